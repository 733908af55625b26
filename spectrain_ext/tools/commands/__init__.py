"""Provides the commands ``spectrain doctor``, ``plan`` and ``timeline``."""
