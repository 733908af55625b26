"""Packages that only some of this one's features need, each named where it is missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any


def require(module: str, what: str, remedy: str) -> Any:
    """Return a module that not everyone has; else say what needs it, and what installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{what}, which is not installed: {remedy}", name=error.name
        ) from error


def require_matplotlib() -> None:
    """Find out before there is something to draw."""
    require("matplotlib", "the picture needs matplotlib", "pip install 'spectrain_ext[pictures]'")


@contextmanager
def picture(path: str | Path, width: float, height: float) -> Iterator[Any]:
    """A figure of so many inches, saved at the end; the same picture is the same file."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    # No pyplot: it would choose a backend and keep global state. Text stays text in an SVG.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "timeline"}):
        figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
        yield figure
        undated = {"Date": None} if Path(path).suffix == ".svg" else None
        figure.savefig(path, metadata=undated)


def require_tensorboard() -> Any:
    """Return ``torch.utils.tensorboard``, or find out before there are figures."""
    return require(
        "torch.utils.tensorboard",
        "the curves need TensorBoard",
        "pip install 'spectrain_ext[tensorboard]'",
    )
