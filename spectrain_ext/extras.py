"""Imports packages that few programs need; an error names what needs one and how to install it."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
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


def require_tensorboard() -> Any:
    """Return ``torch.utils.tensorboard``, or raise an error early if it is missing."""
    return require(
        "torch.utils.tensorboard",
        "the curves need TensorBoard",
        "pip install 'spectrain_ext[tensorboard]'",
    )


@contextmanager
def progress_of(batches: Iterable[object], epochs: int) -> Iterator[Callable[[Any], None]]:
    """Yield a callback for ``fit`` that shows its progress on stderr, as a bar or in lines."""
    try:
        length = length_hint(batches)
    except NotImplementedError:  # from a data set without a length
        length = 0
    total, terminal = length * epochs, sys.stderr.isatty()
    count, began, due = 0, 0.0, 0.0
    latest: Any = None
    shown: Any = None  # the result at which the progress was shown last
    lines = nullcontext(lambda _, text: print(text, file=sys.stderr, flush=True))
    with _bar(total or None) if terminal else lines as show:

        def text(result: Any, now: float) -> str:
            parts = [f"{count}/{total}" if total else f"{count} minibatches"]
            if total and epochs > 1:
                parts.append(f"epoch {min(epochs, 1 + (count - 1) // length)}/{epochs}")
            if result is not None and result.has_loss:
                parts.append(f"loss {float(result.loss):.4g}")
            if count > 1:  # the first one takes longer
                speed = (count - 1) / (now - began)
                parts.append(f"{speed:.3g}/s")
                if count < total:
                    parts.append(f"{timedelta(seconds=round((total - count) / speed))} left")
            return "  ".join(parts)

        def called(result: Any) -> None:
            nonlocal count, began, due, shown, latest
            now = perf_counter()
            count += 1
            began = began or now
            if now >= due:
                show(count, text(shown, now))  # its loss is computed by now: nothing waits for it
                due, shown = now + (0.1 if terminal else 10.0), result
            latest = result

        yield called
        show(count, text(latest, perf_counter()))


@contextmanager
def _bar(total: int | None) -> Iterator[Callable[[int, str], object]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    # Refreshed by calls alone: a thread would take time from the training.
    with Progress(
        *(BarColumn(20), TextColumn("{task.description}", markup=False)),
        console=Console(stderr=True),
        auto_refresh=False,
        redirect_stdout=sys.stdout.isatty(),
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda n, text: bar.update(task, completed=n, description=text, refresh=True)
