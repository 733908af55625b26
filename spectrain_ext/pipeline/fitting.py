"""Trains for some epochs in one run, and shows their progress. Loaded by the first ``fit``."""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import accumulate, pairwise
from math import hypot, isfinite, nan
from operator import length_hint
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from spectrain_ext.errors import check_int

from .losses import Keep, Result

if TYPE_CHECKING:
    from .observer import Observer

_logger = logging.getLogger(__name__)

#: How many losses the CPU fetches at once.
_FETCHED_AT_ONCE = 256
#: How deeply nested samplers are searched.
_SAMPLER_DEPTH = 5


def fitted(
    pipe: Any,
    batches: Iterable[object] | None,
    epochs: int,
    callbacks: Iterable[Callable[[Result], object]],
    trace: Observer | Sequence[Observer] | None,
    keep: Keep | None,
    progress: bool,
) -> list[float]:
    """See ``Pipeline.fit``."""
    check_int("epochs", epochs, 1)
    if not isinstance(callbacks, Iterable):
        raise TypeError(f"callbacks: expected a list of functions, got {type(callbacks).__name__}")
    called = list(callbacks)
    for n, callback in enumerate(called):
        if not callable(callback):
            raise TypeError(f"callbacks[{n}]: expected a callable, got {type(callback).__name__}")
    own_batches = pipe._own_batches(batches)
    if epochs > 1 and isinstance(own_batches, Iterator):
        raise ValueError(
            f"batches: a {type(own_batches).__name__} can be gone through only once, and "
            f"there are {epochs} epochs; give what makes a new iterator every time, as a list "
            "or a DataLoader does"
        )
    begun: list[int] = []
    losses = _Losses()
    of_epochs = _epochs(own_batches, begun, epochs)
    failure: Exception | None = None
    with ExitStack() as stack:
        if progress and not getattr(pipe, "rank", 0):  # one of several processes shows it
            shown = _progress(pipe, own_batches, epochs, begun, losses.mean)
            called.insert(0, stack.enter_context(shown))
        run = stack.enter_context(closing(pipe.run(of_epochs, trace=trace, keep=keep)))
        for result in run:
            losses.add(result)
            try:
                for callback in called:
                    callback(result)
            except Exception as error:
                failure = error
                break

    def lengths() -> list[int]:
        if failure is not None:
            raise failure
        return begun

    doing = "sharing the losses of a training"
    counts = pipe._gather_from_ranks(lengths, doing)[0]
    if not any(counts):
        raise ValueError("batches: expected at least one to train on, got none")
    means: list[float] = pipe._gather_from_ranks(lambda: losses.means(counts), doing)[-1]
    for epoch, mean in enumerate(means):
        if not isfinite(mean) and counts[epoch]:
            _logger.warning("fit: the mean loss of epoch %d is %s", epoch, mean)
    return means


def _epochs(batches: Iterable[object], lengths: list[int], epochs: int) -> Iterator[object]:
    """Yield the batches of all epochs; append each epoch's number of batches to ``lengths``."""
    for epoch in range(epochs):
        for one in _within(batches, "sampler", "batch_sampler"):
            if callable(getattr(one, "set_epoch", None)):
                one.set_epoch(epoch)
        lengths.append(0)
        for batch in batches:
            lengths[epoch] += 1
            yield batch
        if epoch and lengths[0] and not lengths[epoch]:
            raise ValueError(
                f"batches: they were exhausted after epoch {epoch - 1}; give what makes a new "
                "iterator every time, as a list or a DataLoader does"
            )


def share_of(batches: object) -> tuple[str, str, int] | None:
    """Find what gives this process a share of the samples: its class, its attribute, the number."""
    # Torch's DistributedSampler, Accelerate's shards and dispatcher, and similar classes.
    there = _within(batches, "sampler", "batch_sampler", "dataset", "base_dataloader")
    dispatcher = getattr(batches, "state", None)  # of Accelerate's processes
    for one in (*there, dispatcher):
        for name, mine in (("num_replicas", "rank"), ("num_processes", "process_index")):
            count = getattr(one, name, None)
            if isinstance(count, int) and count > 1 and hasattr(one, mine):
                return type(batches if one is dispatcher else one).__name__, name, count
    return None


def _within(batches: object, *names: str) -> list[Any]:
    """Return ``batches`` and the objects under these attributes, recursively, each once."""
    objects = {id(batches): batches}
    for _ in range(_SAMPLER_DEPTH):
        for one in list(objects.values()):
            parts = (getattr(one, name, None) for name in names)
            objects.update((id(part), part) for part in parts if part is not None)
    return list(objects.values())


class _Losses:
    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Tensor | None]] = []
        self._losses, self._counts = array("d"), array("d")

    def add(self, result: Result) -> None:
        if result.has_loss:
            self._waiting.append((result.loss, result.count))
            if len(self._waiting) >= 2 * _FETCHED_AT_ONCE:
                self._ask(_FETCHED_AT_ONCE)  # these were computed long ago

    def _ask(self, number: int) -> None:
        for loss, count in self._waiting[:number]:
            self._losses.append(float(loss))
            self._counts.append(1.0 if count is None else float(count))
        del self._waiting[:number]

    def mean(self, first: int, end: int) -> float:
        """Return the mean loss from one minibatch to before another; nan if nothing counts."""
        self._ask(len(self._waiting))
        known = zip(self._losses[first:end], self._counts[first:end], strict=True)
        counted = [(loss, count) for loss, count in known if count]
        total = sum(count for _, count in counted)
        return sum(loss * count for loss, count in counted) / total if total else nan

    def means(self, lengths: Sequence[int]) -> list[float]:
        return [self.mean(*ends) for ends in pairwise(accumulate(lengths, initial=0))]


# What a terminal shows.


@contextmanager
def _progress(
    pipe: Any,
    batches: Iterable[object],
    epochs: int,
    lengths: Sequence[int],  # minibatches of each epoch that has begun
    mean: Callable[[int, int], float],  # the mean loss, from one minibatch to before another
) -> Iterator[Callable[[Any], None]]:
    """Yield a callback for ``fit`` that shows its progress in a terminal, on stderr."""
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
                samples, begun = pipe._executor.wires.source.samples, pipe._executor.begun
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
    for stage in pipe._executor.stages:
        if stage.clipped is not None:
            with stage.predict.using():
                norms.append(float(stage.clipped))
    if norms:
        words.append(f"norm {norms[-1] if pipe._applied.globally else hypot(*norms):.3g}")
    return words
