"""The command line: ``spectrain train`` and ``spectrain doctor``."""

from spectrain_ext.cli.group import main

__all__ = ["main"]
