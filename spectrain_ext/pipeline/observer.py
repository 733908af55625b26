"""Observer: what looks on while a pipeline trains; its actions as ranges of torch.profiler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.autograd import profiler

from spectrain_ext.errors import make_all, noted_on
from spectrain_ext.schedule import Kind, Rules

if TYPE_CHECKING:
    from .loads import Handler
    from .losses import Result
from .stage import Stage

#: Of torch.profiler: "F17", of microbatch 1 "F17.1". On CUDA these are the host's, and kernels in
#: them the device's.
_RANGES: dict[Kind, str] = {
    Kind.LOAD_FORWARD: "predict",
    Kind.RECEIVE_ACTIVATION: "recv",
    Kind.FORWARD: "F{}",
    Kind.SEND_ACTIVATION: "send",
    Kind.LOSS: "loss",
    Kind.LOAD_BACKWARD: "predict",
    Kind.RECEIVE_GRADIENT: "recv",
    Kind.BACKWARD: "B{}",
    Kind.LOAD_BACKWARD_INPUT: "predict",
    Kind.BACKWARD_INPUT: "B{}",
    Kind.BACKWARD_WEIGHTS: "W{}",
    Kind.SEND_GRADIENT: "send",
    Kind.UPDATE: "update",
}


class Observer:
    """Is given to ``Pipeline.run`` as ``trace``; sees its actions and its results.

    A run without one makes no call of any of this.

    Attributes:
        ranges: whether every action is to be a range of ``torch.profiler`` as well.

    Example:
        >>> class Indices(st.Observer):
        ...     def result(self, result):
        ...         print("minibatch", result.index)
        >>> pipe = st.Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)],
        ...     lambda p: st.optim.SGD(p, lr=0.1, momentum=0.9), nn.functional.mse_loss)
        >>> batches = [(torch.ones(3, 2), torch.ones(3, 1))] * 2
        >>> results = [*pipe.run(batches, trace=Indices())]
        minibatch 0
        minibatch 1
    """

    ranges = False

    def begin(self, rules: Sequence[Rules], devices: Sequence[torch.device]) -> None:
        """A run begins.

        Args:
            rules: which weights every stage computes with.
            devices: of the stages of this process.
        """

    def changed(self, rules: Sequence[Rules], minibatches: int) -> None:
        """The pipeline has drained, and the run goes on by the next phase of its method.

        ``watch`` is asked again.

        Args:
            rules: which weights every stage computes with from here on.
            minibatches: of the run so far; actions count from 0 again.
        """

    def watch(self, stage: Stage, handlers: dict[Kind, Handler]) -> dict[Kind, Handler]:
        """The handlers that a stage's actions are to be run by, instead of those given."""
        return handlers

    def result(self, result: Result) -> None:
        """A result that the caller is about to get."""

    def end(self) -> None:
        """The run has ended, or failed."""


def observers_of(trace: Observer | Sequence[Observer] | None) -> Sequence[Observer]:
    """Those that were given as ``trace``."""
    if not isinstance(trace, Sequence):
        return () if trace is None else (trace,)
    for n, one in enumerate(trace):
        if not isinstance(one, Observer):
            raise TypeError(f"trace[{n}]: expected an Observer, got {type(one).__name__}")
    return tuple(trace)


@contextmanager
def looking_on(
    observers: Sequence[Observer], rules: Sequence[Rules], devices: Sequence[torch.device]
) -> Iterator[None]:
    """Inside, a run takes place; all that have begun to look on hear of its end."""
    begun: list[Observer] = []

    def end() -> None:
        make_all([observer.end for observer in begun])

    try:
        for observer in observers:
            observer.begin(rules, devices)
            begun.append(observer)
        yield
    except GeneratorExit:
        end()
        raise
    except BaseException as error:
        with noted_on(error):
            end()
        raise
    end()


def watched(
    observers: Sequence[Observer], stage: Stage, handlers: dict[Kind, Handler]
) -> dict[Kind, Handler]:
    """The handlers of a stage's actions, as they are unless somebody watches the run."""
    for observer in observers:
        handlers = observer.watch(stage, handlers)
    if not (profiler._is_profiler_enabled or any(observer.ranges for observer in observers)):
        return handlers
    return {
        kind: _ranged(_RANGES[kind], handler) if kind in _RANGES else handler
        for kind, handler in handlers.items()
    }


def _ranged(name: str, handler: Handler) -> Handler:
    def ranged(i: int, j: int) -> None:
        with profiler.record_function(name.format(f"{i}.{j}" if j else i)):
            handler(i, j)

    return ranged
