"""Builds ``fit`` and ``evaluate`` from runs, and warns about a run that is never started."""

from __future__ import annotations

import itertools
import logging
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import accumulate, pairwise
from math import isfinite, nan
from typing import TYPE_CHECKING, Any
from weakref import finalize

import torch
from torch import Tensor, nn

from spectrain_ext.errors import check_int
from spectrain_ext.schedule import Place, find_generator

from .batch import without_dropped_columns
from .compute import Mode
from .edges import SourceSettings
from .executor import Executor
from .losses import Keep, Result
from .run import Work

if TYPE_CHECKING:
    from .observer import Observer

_logger = logging.getLogger(__name__)

#: How many losses the CPU fetches at once.
_FETCHED_AT_ONCE = 256
#: How deeply nested samplers are searched.
_SAMPLER_DEPTH = 5


class Loops(nn.Module):
    """The base class of a pipeline: ``fit`` and ``evaluate``."""

    _executor: Executor
    _evaluator: Executor | None = None  # made by the first evaluation; its edges are kept
    _batches: SourceSettings
    _places_of_evaluations: list[Place]
    devices: tuple[torch.device, ...]
    run: Callable[..., Any]
    check_drained: Callable[[str], None]

    def _with_columns(self, batches: Iterator[object], several: bool) -> Iterator[object]:
        """Drop the columns of batches that the first stage's model does not take."""
        columns = getattr(self._executor.stages[0].module, "batch_columns", None)
        if columns is None or not self._executor.processes.takes_batches:
            return batches
        return map(partial(without_dropped_columns, columns, several), batches, itertools.count())

    # Overridden by a pipeline over several processes.

    def _own_batches(self, batches: Iterable[object] | None) -> Iterable[object]:
        return checked_batches(batches)

    def _gather_from_ranks(self, make: Callable[[], Any], doing: str) -> list[Any]:
        """Return what ``make`` returns in every process, by rank; values are JSON types."""
        return [make()]

    # Evaluation.

    def evaluate(
        self, batches: Iterable[object] | None, metrics: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """Measure the model on every batch: true weights, modules in eval mode, no graph.

        Several batches are in flight, and no further weight versions are made. Each batch is
        computed whole, even with ``microbatches`` above 1, and may have any size.

        Args:
            batches: as for ``run``. With several processes, rank 0 provides them.
            metrics: by name, functions ``(output, target)`` that return the mean over the batch's
                samples (a 0-d tensor or a number) or a pair (sum, count); or objects with
                ``update(output, target)`` and ``compute()``, as in torchmetrics, which are
                ``reset()`` first if possible. They run on the last stage, without a graph. None:
                the loss, as ``"loss"``.

        Returns:
            The value of each metric. Means are weighted by the samples of each batch (the size of
            its target along ``split_dim``), pairs are the sum of sums divided by the sum of counts
            (nan if that is 0); both are added in float64 without rounding. A list of microbatches
            counts as several batches. A batch without samples is not measured. All processes get
            the same floats as a single process would.

        Raises:
            RuntimeError: a run has not ended yet.
            ValueError: there was no batch, or the value of a metric is not one number.
            TypeError: a metric of another kind, or a batch of another form.
            StageError: an exception inside a stage or a metric; its cause is the original.

        Afterwards all modules have their previous modes, even after an exception. Random numbers,
        of the stages and of torch's default generators, and running statistics are unchanged, so
        that training continues with the same bits as without the evaluation.
        """
        from .evaluation import evaluated

        self.check_drained("evaluate")
        return evaluated(self, batches, metrics)

    def _forward_all(
        self, batches: Iterator[object], measure: Callable[..., Any], evaluates: bool = True
    ) -> None:
        if self._evaluator is None:
            from .evaluation import evaluator_of

            made = evaluator_of(self._executor, self._batches)
            self._evaluator, self._places_of_evaluations = made
        mode = Mode.EVALUATE if evaluates else Mode.CALL
        work = Work(mode, self._places_of_evaluations, find_generator("1f1b-async"), measure)
        for _ in self._evaluator.run(self._with_columns(batches, several=True), work):
            pass

    # Training.

    def fit(
        self,
        batches: Iterable[object] | None,
        epochs: int = 1,
        callbacks: Iterable[Callable[[Result], object]] = (),
        *,
        trace: Observer | Sequence[Observer] | None = None,
        keep: Keep | None = None,
        progress: bool = False,
    ) -> list[float]:
        """Train for some epochs in one run; the pipeline drains only at the end.

        Args:
            batches: as for ``run``; a new iterator is made for every epoch. ``set_epoch`` of a
                sampler, or of ``batches``, is called first.
            epochs: at least 1.
            callbacks: each is called with every ``Result``, in order, as soon as ``run`` yields it.
            trace: as for ``run``.
            keep: as for ``run``.
            progress: where stderr is a terminal, shows minibatches, time left, a recent loss, rate,
                gradient norm and speed, and a line for each epoch that ends; see docs/loops.md.
                With several processes rank 0 shows it, with losses under ``ShareLoss``.

        Returns:
            The mean loss of every epoch over its minibatches, weighted by ``count`` where there is
            one; each loss is the one that its forward computed. nan if there was none. All
            processes get the same floats.

        Raises:
            ValueError: there was no batch, or none in a later epoch: a generator lasts for one.
            TypeError: a callback that cannot be called.
            And what ``run`` raises. An exception in a callback ends the run like leaving its loop.
        """
        check_int("epochs", epochs, 1)
        if not isinstance(callbacks, Iterable):
            raise TypeError(
                f"callbacks: expected a list of functions, got {type(callbacks).__name__}"
            )
        called = list(callbacks)
        for n, callback in enumerate(called):
            if not callable(callback):
                raise TypeError(
                    f"callbacks[{n}]: expected a callable, got {type(callback).__name__}"
                )
        own_batches = self._own_batches(batches)
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
            if progress and not getattr(self, "rank", 0):  # one of several processes shows it
                from spectrain_ext.extras import progress_of

                shown = progress_of(self, own_batches, epochs, begun, losses.mean)
                called.insert(0, stack.enter_context(shown))
            run = stack.enter_context(closing(self.run(of_epochs, trace=trace, keep=keep)))
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
        counts = self._gather_from_ranks(lengths, doing)[0]
        if not any(counts):
            raise ValueError("batches: expected at least one to train on, got none")
        means: list[float] = self._gather_from_ranks(lambda: losses.means(counts), doing)[-1]
        for epoch, mean in enumerate(means):
            if not isfinite(mean) and counts[epoch]:
                _logger.warning("fit: the mean loss of epoch %d is %s", epoch, mean)
        return means


# The batches of a training.


def checked_batches(batches: object) -> Iterable[object]:
    if isinstance(batches, Iterable) or hasattr(batches, "__getitem__"):
        return batches  # type: ignore[return-value]
    raise TypeError(f"batches: expected an iterable of batches, got {type(batches).__name__}")


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


# A run that is never started.


def warn_unless_begun(run: Iterator[Result], begun: list[bool]) -> Iterator[Result]:
    """Return the run; warn if it is dropped before its first step, as when taken for a call."""
    finalize(run, _warn_unless, begun).atexit = False
    return run


def _warn_unless(begun: list[bool]) -> None:
    if not begun:
        warnings.warn(
            "the iterator that run() returned was dropped, and nothing was trained; iterate over "
            "it, or call fit()",
            stacklevel=3,
        )
