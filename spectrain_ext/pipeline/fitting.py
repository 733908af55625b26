"""Trains for some epochs in one run, and shows their progress. Loaded by the first ``fit``."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import accumulate, pairwise
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

from torch import Tensor

from spectrain_ext.errors import check_int
from spectrain_ext.later import later

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
            shown = later("progress_shown")(pipe, own_batches, epochs, begun, losses.mean)
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
        weighted = [(loss, count) for loss, count in known if count]
        total = sum(count for _, count in weighted)
        return sum(loss * count for loss, count in weighted) / total if total else nan

    def means(self, lengths: Sequence[int]) -> list[float]:
        return [self.mean(*ends) for ends in pairwise(accumulate(lengths, initial=0))]
