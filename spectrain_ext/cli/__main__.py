"""Runs ``spectrain`` as ``python -m spectrain_ext.cli``."""

from .group import main

if __name__ == "__main__":
    main(prog_name="spectrain")
