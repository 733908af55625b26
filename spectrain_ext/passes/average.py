"""A pass that averages the weights of a stage's replicas during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import Tensor

from spectrain_ext.method import Method
from spectrain_ext.pipeline.passes import Handler, Pass
from spectrain_ext.pipeline.views import ProcessesView, RunView, StageView
from spectrain_ext.schedule import Kind
from spectrain_ext.weights import StageWeights
from spectrain_ext.weights.storage import in_a_row, taken_apart

from .averaging import Averager, Averaging, Exchange


class AverageWeights(Pass):
    """Averages weights over replicas at every update, in place of summing their gradients.

    Only for ``DistributedPipeline(replicas=r)`` with equally many replicas of every stage. Replica
    c of all stages forms a pipeline with its own minibatches and losses.

    Args:
        averaging: a value of ``st.averaging``.

    Raises:
        ValueError: a method that changes during training, or another number of replicas.

    Example:
        >>> st.passes.AverageWeights(st.averaging.Elastic(0.4))
        AverageWeights(averaging=Elastic(strength=0.4))
    """

    own_minibatches = True
    moves_weights = True
    _exchange: Exchange
    _averager: Averager | None

    def __init__(self, averaging: Averaging) -> None:
        self.averaging = averaging

    def check(self, method: Method) -> None:
        if method.then is not None:
            raise ValueError(
                f"AverageWeights: method {method.name!r} changes to {method.then.method.name!r} in "
                "the course of training, and replicas are averaged under one alone"
            )

    def on(self, stage: StageView, processes: ProcessesView) -> Self:
        made = super().on(stage, processes)
        # ``exchange`` is never called while the thread holds the lock for random numbers: another
        # replica may be a thread that waits for it.
        made._exchange = self._exchange_of(stage, processes)
        made._averager = None  # from the first run on
        return made

    def _exchange_of(self, stage: StageView, processes: ProcessesView) -> Exchange:
        if processes.replicas.counts[stage.index] < 2:
            raise ValueError(
                f"AverageWeights: stages[{stage.index}] has no replicas here; expected "
                "DistributedPipeline(..., replicas=...)"
            )
        weights = stage.weights
        if weights is not None and weights.updater.has_modes:
            kind = type(weights.optimizer).__name__
            raise ValueError(
                f"AverageWeights: stages[{stage.index}] has a {kind}, whose train() and eval() "
                "change the weights; replicas would average those for training alone; take an "
                "optimizer without modes, or sum gradients by leaving AverageWeights out"
            )
        return processes.exchange

    @property
    def _weights(self) -> StageWeights:
        weights: StageWeights | None = self.stage.weights
        assert weights is not None
        return weights

    def _row(self) -> Tensor:
        return in_a_row(self._weights.newest())

    def _made(self, weights: Tensor) -> Averager:
        return self.averaging.begin(weights, self._exchange, self.stage.index)

    # During a run.

    def begin(self, run: RunView) -> Mapping[Kind, Handler]:
        self._run = run
        if self.stage.weights is None or not run.trains:
            return {}
        if self._averager is None:
            with self.stage.predict.using(reads=self.stage.memory):
                self._averager = self._made(self._row())
        return {Kind.SEND_WEIGHTS: self._send, Kind.AVERAGE: self._average_in}

    @property
    def _left_out(self) -> bool:
        """Whether all replicas skip this update."""
        return self.stage.skips and self._run.norm is not None

    def _send(self, i: int, j: int) -> None:
        """Send what the other replicas need of the weights before an update."""
        if self._left_out:
            return
        assert self._averager is not None
        with self.stage.predict.using(reads=self.stage.memory):
            self._averager.before(self._row())

    def _average_in(self, i: int, j: int) -> None:
        """Average the updated weights with those of the other replicas."""
        if self._left_out:
            return
        averager, stage = self._averager, self.stage
        assert averager is not None
        with stage.predict.using(writes=stage.memory):
            weights = self._row()
            averager.made(weights)
            moved = averager.after(weights)
            if moved is not None:
                self._weights.move(taken_apart(moved, self._weights.params))
        stage.weights_written()

    # Between runs.

    def _row_between_runs(self) -> Tensor:
        wide = self._weights.masters()
        return in_a_row([wide.get(p, p) for p in self._weights.params])

    def weights_loaded(self) -> None:
        self._averager = None  # its center belongs to other weights

    def evaluated_weights(self) -> Callable[[], list[Tensor]]:
        own = self._row_between_runs()
        average = (self._averager or self._made(own)).average(own)
        return lambda: list(taken_apart(average(), self._weights.params))

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        if self._averager is None:
            return {}
        tensors, updates = self._averager.state()
        return {"updates": updates, "tensors": tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; ValueError if it does not fit."""
        made = None
        if state:
            made = self._made(self._row_between_runs())
            made.load_state(state["tensors"], state["updates"])
        self._averager = made
