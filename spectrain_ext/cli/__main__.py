"""``python -m spectrain_ext.cli`` is the console script ``spectrain``."""

from .group import main

if __name__ == "__main__":
    main(prog_name="spectrain")
