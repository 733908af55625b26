"""Declares ``fit`` and ``evaluate``, and warns about a run that is never started."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import finalize

import torch
from torch import nn

from spectrain_ext.cutting import cut_of
from spectrain_ext.peers import Peers

from .compute import Mode
from .executor import Executor
from .losses import Keep, Result
from .run import Work
from .source import BatchSettings, without_dropped_columns

if TYPE_CHECKING:
    from .observer import Observer


class Loops(nn.Module):
    """The base class of a pipeline: ``fit`` and ``evaluate``."""

    _executor: Executor
    _evaluator: Executor | None = None  # made by the first evaluation; its edges are kept
    _batches: BatchSettings
    devices: tuple[torch.device, ...]
    run: Callable[..., Any]
    check_drained: Callable[[str], None]

    def _with_columns(self, batches: Iterator[object], several: bool) -> Iterator[object]:
        """Drop the columns of batches that the first stage's model does not take."""
        columns = cut_of(self._executor.stages[0].module).columns
        if columns is None or not self._executor.processes.takes_batches:
            return batches
        return map(partial(without_dropped_columns, columns, several), batches, itertools.count())

    # Overridden by a pipeline over several processes.

    def _own_batches(self, batches: Iterable[object] | None) -> Iterable[object]:
        return checked_batches(batches)

    def together(self, what: str) -> AbstractContextManager[Peers]:
        """Return a context for work that all processes of the pipeline do together."""
        return nullcontext(Peers())

    def _gather_from_ranks(self, make: Callable[[], Any], doing: str) -> list[Any]:
        """Return what ``make`` returns in every process, by rank; values are JSON types."""
        with self.together(doing) as peers:
            with peers.attempt(doing) as found:
                found.append(make())
            return found

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

            self._evaluator = evaluator_of(self._executor, self._batches)
        work = Work(Mode.EVALUATE if evaluates else Mode.CALL, measure)
        for _ in self._evaluator.run(self._with_columns(batches, several=True), work):
            pass

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
            trace, keep: as for ``run``.
            progress: where stderr is a terminal, shows loss, rate, norm and speed (docs/loops.md).
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
        from .fitting import fitted

        return fitted(self, batches, epochs, callbacks, trace, keep, progress)


def checked_batches(batches: object) -> Iterable[object]:
    if isinstance(batches, Iterable) or hasattr(batches, "__getitem__"):
        return batches  # type: ignore[return-value]
    raise TypeError(f"batches: expected an iterable of batches, got {type(batches).__name__}")


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
