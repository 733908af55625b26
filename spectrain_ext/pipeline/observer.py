"""Observer: what looks on while a pipeline trains; its actions as ranges of torch.profiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.autograd import profiler

from spectrain_ext.errors import make_all
from spectrain_ext.schedule import Kind, Rules

if TYPE_CHECKING:
    from .loads import Handler
    from .losses import Result
from .stage import Stage

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


class _Several(Observer):
    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._begun: list[Observer] = []
        self.ranges = any(observer.ranges for observer in observers)

    def begin(self, rules: Sequence[Rules], devices: Sequence[torch.device]) -> None:
        self._begun = []
        for observer in self._observers:
            try:
                observer.begin(rules, devices)
            except BaseException:
                self.end()
                raise
            self._begun.append(observer)

    def changed(self, rules: Sequence[Rules], minibatches: int) -> None:
        for observer in self._observers:
            observer.changed(rules, minibatches)

    def watch(self, stage: Stage, handlers: dict[Kind, Handler]) -> dict[Kind, Handler]:
        for observer in self._observers:
            handlers = observer.watch(stage, handlers)
        return handlers

    def result(self, result: Result) -> None:
        for observer in self._observers:
            observer.result(result)

    def end(self) -> None:
        make_all([observer.end for observer in self._begun])


def observer_of(trace: Observer | Sequence[Observer] | None) -> Observer | None:
    """One observer for what was given as ``trace``; None: nobody looks on."""
    if not isinstance(trace, Sequence):
        return trace
    for n, one in enumerate(trace):
        if not isinstance(one, Observer):
            raise TypeError(f"trace[{n}]: expected an Observer, got {type(one).__name__}")
    return _Several(trace) if len(trace) > 1 else next(iter(trace), None)


def watched(
    observer: Observer | None, stage: Stage, handlers: dict[Kind, Handler]
) -> dict[Kind, Handler]:
    """The handlers of a stage's actions, as they are unless somebody watches the run.

    Where it is traced, or a profiler is active when the run begins, every action is a range of
    ``torch.profiler``: "F17" and "B17" (of microbatch 1 "F17.1"; of a backward in halves "B17" and
    "W17"), "predict", "send", "recv", "loss" and "update". A range on CUDA is the host's; the
    kernels in it are the device's.
    """
    if observer is not None:
        handlers = observer.watch(stage, handlers)
    if not ((observer is not None and observer.ranges) or profiler._is_profiler_enabled):
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
