"""Provides the commands ``spectrain doctor``, ``plan`` and ``timeline``."""

import sys

from spectrain_ext.extras import require


def main() -> None:
    """Run ``spectrain``; without the packages that it needs, say how to install them."""
    try:
        for package in ("click", "rich"):
            require(package, f"spectrain needs {package}", "pip install 'spectrain_ext[commands]'")
    except ModuleNotFoundError as error:
        sys.exit(f"spectrain: {error}")
    from .__main__ import main as run

    run()
