"""Defines ``Observer``, which watches a run, and marks its steps as torch.profiler ranges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.autograd import profiler

from spectrain_ext.errors import make_all, noted_on
from spectrain_ext.schedule import Kind, Rules

if TYPE_CHECKING:
    from .losses import Result
    from .passes import Handler
    from .stage_run import StageRun

#: The steps that are shown. First their ranges of torch.profiler: "F17", or "F17.1" for
#: microbatch 1; on CUDA they mark CPU time, and the kernels in them show the device's. Then their
#: kind of work, under which traces and metrics record them; None: they do not.
SHOWN_STEPS: dict[Kind, tuple[str, str | None]] = {
    Kind.LOAD_FORWARD: ("predict", "predict"),
    Kind.RECEIVE_ACTIVATION: ("recv", None),
    Kind.FORWARD: ("F{}", "forward"),
    Kind.SEND_ACTIVATION: ("send", "send"),
    Kind.LOSS: ("loss", "loss"),
    Kind.LOAD_BACKWARD: ("predict", "predict"),
    Kind.RECEIVE_GRADIENT: ("recv", None),
    Kind.BACKWARD: ("B{}", "backward"),
    Kind.LOAD_BACKWARD_INPUT: ("predict", "predict"),
    Kind.BACKWARD_INPUT: ("B{}", "backward"),
    Kind.BACKWARD_WEIGHTS: ("W{}", "backward"),
    Kind.SEND_GRADIENT: ("send", "send"),
    Kind.UPDATE: ("update", "update"),
}


class Observer:
    """The base of objects passed to ``Pipeline.run`` as ``trace``: sees steps and results.

    Without one, a run calls nothing of this.

    Attributes:
        ranges: whether every step is also a range of ``torch.profiler``.

    Example:
        >>> class Count(st.Observer):
        ...     seen = 0
        ...     def result(self, result):
        ...         self.seen += 1
        >>> sgd, count = lambda params: st.optim.SGD(params, lr=0.1), Count()
        >>> pipe = st.Pipeline([nn.Linear(2, 1)], sgd, nn.functional.mse_loss)
        >>> for result in pipe.run([(torch.ones(4, 2), torch.ones(4, 1))] * 3, trace=count):
        ...     pass
        >>> count.seen
        3
    """

    ranges = False

    def begin(self, rules: Sequence[Rules], devices: Sequence[torch.device]) -> None:
        """Called when a run begins.

        Args:
            rules: which weights every stage computes with.
            devices: those of the stages of this process.
        """

    def watch(self, run: StageRun, handlers: dict[Kind, Handler]) -> dict[Kind, Handler]:
        """Return the handlers that run a stage's steps, in place of the given ones.

        Called again when the method changes; steps count from 0 again then.

        Args:
            run: one stage in this run; ``run.stage`` is the stage.
            handlers: functions of a minibatch and a microbatch, by the step that they run.
        """
        return handlers

    def result(self, result: Result) -> None:
        """Called with a result when its loss is known, before the caller gets it."""

    def end(self) -> None:
        """Called when the run has ended or failed."""


def observers_of(trace: Observer | Sequence[Observer]) -> Sequence[Observer]:
    observers = tuple(trace) if isinstance(trace, Sequence) else (trace,)
    for n, one in enumerate(observers):
        if not isinstance(one, Observer):
            where = f"trace[{n}]" if isinstance(trace, Sequence) else "trace"
            raise TypeError(f"{where}: expected an Observer, got {type(one).__name__}")
    return observers


@contextmanager
def observing(
    observers: Sequence[Observer], rules: Sequence[Rules], devices: Sequence[torch.device]
) -> Iterator[None]:
    """Let observers watch a run; at its end call ``end`` of each that has begun."""
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


def with_observers(
    observers: Sequence[Observer], run: StageRun, handlers: dict[Kind, Handler]
) -> dict[Kind, Handler]:
    """Return a stage's handlers as observers, or torch's profiler, watch them."""
    for observer in observers:
        handlers = observer.watch(run, handlers)
    if not (profiler._is_profiler_enabled or any(observer.ranges for observer in observers)):
        return handlers
    return {
        kind: partial(_ranged, SHOWN_STEPS[kind][0], handler) if kind in SHOWN_STEPS else handler
        for kind, handler in handlers.items()
    }


def _ranged(name: str, handler: Handler, i: int, j: int) -> None:
    with profiler.record_function(name.format(f"{i}.{j}" if j else i)):
        handler(i, j)
