"""Imports packages that few programs need; an error names what needs one and how to install it."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from operator import length_hint
from pathlib import Path
from time import perf_counter
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


@contextmanager
def progress_of(batches: Iterable[object], epochs: int) -> Iterator[Callable[[Any], None]]:
    """Yield a callback for ``fit`` that shows its progress in a terminal, on stderr."""
    from rich import progress
    from rich.console import Console

    try:
        length = length_hint(batches)
    except NotImplementedError:  # from a data set without a length
        length = 0
    due = 0.0  # the time at which the progress is shown next
    shown: Any = None  # the result at which it was shown last
    columns = [
        progress.BarColumn(20),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.description}"),
        progress.TimeRemainingColumn(),
    ]
    console = Console(stderr=True)
    # Refreshed by calls alone: a thread would take time from the training.
    with progress.Progress(
        *columns,
        console=console,
        auto_refresh=False,
        redirect_stdout=sys.stdout.isatty(),
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=length * epochs or None)

        def called(result: Any) -> None:
            nonlocal due, shown
            bar.advance(task)
            if perf_counter() < due:
                return
            # its loss is computed by now: nothing waits for it
            has_loss = shown is not None and shown.has_loss
            text = f"loss {float(shown.loss):.4g}" if has_loss else ""
            if (speed := bar.tasks[0].speed) is not None:
                text += f"  {speed:.3g}/s"
            bar.update(task, description=text, refresh=True)
            due, shown = perf_counter() + 0.1, result

        yield called
        bar.refresh()
