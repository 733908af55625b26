"""The command line: ``spectrain train``, ``timeline``, ``bench`` and ``doctor``."""

from spectrain_ext.cli.group import main

__all__ = ["main"]
