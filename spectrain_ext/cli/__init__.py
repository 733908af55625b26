"""The command line: ``spectrain train``, ``timeline``, ``bench`` and ``doctor``."""

from .group import main

__all__ = ["main"]
