"""Imports packages that few programs need; an error names what needs one and how to install it."""

import sys
from collections.abc import Callable, Iterator
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


def require_tensorboard() -> Any:
    """Return ``torch.utils.tensorboard``, or raise an error early if it is missing."""
    return require(
        "torch.utils.tensorboard",
        "the curves need TensorBoard",
        "pip install 'spectrain_ext[tensorboard]'",
    )


@contextmanager
def progress_bar(total: int | None) -> Iterator[Callable[[int, str], object]]:
    """Yield a function that shows a count and a text on stderr: a bar in a terminal, else lines."""
    if not sys.stderr.isatty():
        yield lambda done, text: print(text, file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = BarColumn(20), TextColumn("{task.description}", markup=False)
    # Refreshed by calls alone: a thread would take time from the training.
    with Progress(
        *columns,
        console=Console(stderr=True),
        auto_refresh=False,
        redirect_stdout=sys.stdout.isatty(),
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda n, text: bar.update(task, completed=n, description=text, refresh=True)
