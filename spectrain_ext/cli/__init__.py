"""The command line: ``spectrain doctor``, ``plan`` and ``timeline``."""
