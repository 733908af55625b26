"""The command line: ``spectrain train``, ``timeline`` and ``doctor``."""

from .group import main

__all__ = ["main"]
