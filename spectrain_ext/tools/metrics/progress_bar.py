"""Shows the progress of ``fit`` in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import hypot
from operator import length_hint
from time import perf_counter
from typing import Any

from spectrain_ext.extras import require


@contextmanager
def progress_shown(
    pipe: Any,
    batches: Iterable[object],
    epochs: int,
    lengths: Sequence[int],  # minibatches of each epoch that has begun
    mean: Callable[[int, int], float],  # the mean loss, from one minibatch to before another
) -> Iterator[Callable[[Any], None]]:
    """Yield a callback for ``fit`` that shows its progress in a terminal, on stderr."""
    require("rich", "progress=True needs rich", "pip install 'spectrain_ext[commands]'")
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda result: None
        return
    try:
        length = length_hint(batches)
    except NotImplementedError:  # from a data set without a length
        length = 0
    due = 0.0  # the time at which the progress is shown next
    latest: Any = None  # result
    shown: Any = None  # the result at which it was shown last
    epoch, epoch_began = 0, perf_counter()  # of the latest result, as far as known
    fixed = Column(no_wrap=True)
    columns = [
        progress.BarColumn(10, table_column=fixed),
        progress.MofNCompleteColumn(table_column=fixed),
        progress.TimeRemainingColumn(table_column=fixed),
        # in a narrow terminal, over two lines
        progress.TextColumn("{task.description}", table_column=Column()),
    ]
    # Refreshed by calls alone: a thread would take time from the training.
    with progress.Progress(
        *columns,
        console=console,
        auto_refresh=False,
        redirect_stdout=sys.stdout.isatty(),
    ) as bar:
        task = bar.add_task("", total=length * epochs or None)

        def end_epochs(at_end: bool = False) -> None:
            """Print a line for each epoch whose results have all come."""
            nonlocal epoch, epoch_began
            while epoch + (not at_end) < len(lengths):  # the length of the newest is not known yet
                first = sum(lengths[:epoch])
                end = first + lengths[epoch]
                left = at_end and lengths[epoch] < length  # by an exception
                if latest is None or latest.index < end - 1 or left:
                    return
                now, name = perf_counter(), f"epoch {epoch + 1}/{epochs}"
                loss = f"mean loss {mean(first, end):.4g}  " if latest.has_loss else ""
                bar.console.print(f"{name}  {loss}{now - epoch_began:.3g} s", highlight=False)
                epoch, epoch_began = epoch + 1, now

        def called(result: Any) -> None:
            nonlocal due, latest, shown
            latest = result
            if perf_counter() < due:
                return
            bar.update(task, completed=result.index + 1)
            end_epochs()
            parts = [f"{epoch + 1}/{epochs}"] if epochs > 1 else []
            if shown is not None and shown.has_loss:  # computed by now: nothing waits for it
                parts.append(f"loss {float(shown.loss):.4g}")
            parts += _rates_and_norm(pipe)
            if (speed := bar.tasks[0].speed) is not None:
                samples, begun = pipe._wires.source.samples, pipe._training.begun
                each = speed * samples / begun
                parts += [f"{speed:.3g}/s", f"{each:{',.0f' if each >= 100 else '.3g'}} samples/s"]
            bar.update(task, description="  ".join(parts), refresh=True)
            due, shown = perf_counter() + 0.25, result

        yield called
        bar.update(task, completed=0 if latest is None else latest.index + 1, refresh=True)
        end_epochs(at_end=True)


def _rates_and_norm(pipe: Any) -> list[str]:
    """Return words for the first stage's learning rates, and for the norm that clipping computed.

    The norm is that of all stages, or of those in this process, each in its last update.
    """
    words = []
    for optimizer in pipe.optimizers[:1]:
        rates = [float(rate) for g in optimizer.param_groups if (rate := g.get("lr")) is not None]
        shown = dict.fromkeys(f"{rate:.3g}" for rate in (min(rates), max(rates))) if rates else ()
        words += [f"lr {' to '.join(shown)}"] if shown else []
    norms = []
    for stage in pipe._wires.stages:
        if stage.clipped is not None:
            with stage.predict.using():
                norms.append(float(stage.clipped))
    if norms:
        words.append(f"norm {norms[-1] if pipe._applied.globally else hypot(*norms):.3g}")
    return words
