"""Averages the weights of a stage's replicas during training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from spectrain_ext.method import Method
from spectrain_ext.operators.averaging import Averager, Averaging, Exchange, in_a_row, taken_apart

from .stage import Stage


def check_averaged(method: Method, tied: bool = False) -> None:
    """Raise ValueError if the method changes during training, or stages are tied."""
    if method.then is not None:
        raise ValueError(
            f"averaging: method {method.name!r} changes to {method.then.method.name!r} in the "
            "course of training, and replicas are averaged under one alone"
        )
    if tied:
        raise ValueError("averaging: stages that share parameters cannot be averaged")


class Averaged:
    """Averages the true weights of a stage with those of its other replicas."""

    def __init__(self, stage: Stage, asked: Averaging, exchange: Exchange) -> None:
        assert stage.weights is not None
        self._stage, self._weights = stage, stage.weights
        # ``exchange`` is never called while the thread holds the lock for random numbers: another
        # replica may be a thread that waits for it.
        self._asked, self._exchange = asked, exchange
        self._kept: Averager | None = None  # from the first run on
        self._weights.moves = True

    def _row(self) -> Tensor:
        return in_a_row(self._weights.newest())

    def begin(self) -> None:
        if self._kept is None:
            with self._stage.predict.using(reads=self._stage.memory):
                self._kept = self._made(self._row())

    def _made(self, weights: Tensor) -> Averager:
        return self._asked.begin(weights, self._exchange, self._stage.index)

    @property
    def _left_out(self) -> bool:
        """Whether all replicas skip this update."""
        return self._stage.origin > 0 and self._stage.global_norm is not None

    def send(self, i: int, j: int) -> None:
        """Before an update: send what the other replicas need of these weights."""
        if self._left_out:
            return
        assert self._kept is not None
        with self._stage.predict.using(reads=self._stage.memory):
            self._kept.before(self._row())

    def average_in(self, i: int, j: int) -> None:
        """After an update: average the weights with those of the other replicas."""
        if self._left_out:
            return
        kept, stage = self._kept, self._stage
        assert kept is not None
        with stage.predict.using(writes=stage.memory):
            weights = self._row()
            kept.made(weights)
            moved = kept.after(weights)
            if moved is not None:
                self._weights.move(taken_apart(moved, self._weights.params))
        stage.weights_written()

    # Between runs.

    def _row_between_runs(self) -> Tensor:
        wide = self._weights.masters()
        return in_a_row([wide.get(p, p) for p in self._weights.params])

    def forget(self) -> None:
        """Start anew with the next run."""
        self._kept = None

    def average(self) -> Callable[[], list[Tensor]]:
        """Start averaging for an evaluation; all replicas call this, and then its result."""
        own = self._row_between_runs()
        average = (self._kept or self._made(own)).average(own)
        return lambda: list(taken_apart(average(), self._weights.params))

    @contextmanager
    def holding(self, values: list[Tensor]) -> Iterator[None]:
        """Inside, the parameters have these values; afterwards their own."""
        params = self._weights.params
        before = [p.detach().clone() for p in params]
        with torch.no_grad():
            torch._foreach_copy_(params, values)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(params, before)

    # Checkpoints.

    def state(self) -> tuple[dict[str, Tensor], int]:
        """Return its tensors without the weights, and its updates; empty before the first run."""
        return ({}, 0) if self._kept is None else self._kept.state()

    def load_state(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Continue from a state; ValueError if it does not fit."""
        if not tensors:
            self._kept = None
            return
        made = self._made(self._row_between_runs())
        made.load_state(tensors, updates)
        self._kept = made

    def undo(self) -> Callable[[], None]:
        """Return a function that restores the present state."""
        return partial(setattr, self, "_kept", self._kept)
