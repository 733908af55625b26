"""Imports packages that few programs need; an error names what needs one and how to install it."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any


def require(module: str, what: str, remedy: str) -> Any:
    """Import a module; if it is missing, raise an error that says what needs it and the remedy."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{what}, which is not installed: {remedy}", name=error.name
        ) from error


def require_matplotlib() -> None:
    """Raise an error early if matplotlib is missing."""
    require("matplotlib", "the picture needs matplotlib", "pip install 'spectrain_ext[pictures]'")


@contextmanager
def picture(path: str | Path, width: float, height: float) -> Iterator[Any]:
    """Yield a figure of this size in inches, and save it; the same picture gives the same bytes."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    # No pyplot: it would choose a backend and keep global state. SVG text stays text.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "timeline"}):
        figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
        yield figure
        undated = {"Date": None} if Path(path).suffix == ".svg" else None
        figure.savefig(path, metadata=undated)
