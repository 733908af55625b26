"""Lets the caller of a run read the true weights where stages compute with other ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from spectrain_ext.interrupts import deferred

from .names import bare
from .run import Run
from .ties import Copy


class TrueWeights(AbstractContextManager[None]):
    """Lets the stages' parameters hold the true weights, so that their modules may be saved."""

    # A class, as in interrupts.py: an interrupt inside contextlib's code would bypass the end. One
    # on the way to the end does; the run then ends this before it goes on.

    def __init__(self, run: Run, copies: Sequence[Copy]) -> None:
        self._run, self._wires, self._copies = run, run.wires, copies
        self._changed: set[Tensor] = set()

    def __enter__(self) -> None:
        stages = self._wires.stages
        with deferred():
            self._wires.let_caller_follow()
            shown = self._true_weights()
            self._guards = [each for stage in stages for each in stage.guard.lift(stage.guarded)]
            self._before = [(p, p.data) for p in shown]
            trained = (p for stage in stages for p in stage.guarded)
            self._versions = {p: p._version for p in trained}  # a DTensor's, not its shard's
            self._run.begin_look(self.end)
            for p, weights in shown.items():
                p.data = weights

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self._run.end_look()
        for stage in self._wires.stages if self._changed and kind is None else ():
            for name, p in stage.module.named_parameters():
                if p in self._changed:
                    raise RuntimeError(
                        f"weights: stages[{stage.index}]: parameter {bare(name)!r} was changed in "
                        "place, and predictions for minibatches in flight do not follow; end the "
                        "run before you change parameters"
                    )

    def end(self) -> None:
        """Point the parameters at what they held before; may be repeated."""
        self._changed.update(p for p, version in self._versions.items() if p._version != version)
        for stage in self._wires.stages if self._changed else ():
            if stage.weights is not None and stage.weights.own_writes is not None:
                stage.weights.own_writes.acknowledge(self._changed)
        self._wires.follow_caller()
        for p, data in self._before:
            p.data = data
        for attributes, guard in self._guards:
            attributes.update(guard)

    def _true_weights(self) -> dict[Tensor, Tensor]:
        """Return where they are; copies of those in another dtype or on another device."""
        shown: dict[Tensor, Tensor] = {}
        for stage in self._wires.stages:
            if stage.weights is not None:
                true = stage.weights.true_weights()
                shown.update((p, true[p].to(p.dtype)) for p in stage.weights.params)
        for copy in self._copies:
            if copy.original is not None:
                weights = shown.get(copy.original, copy.original.detach())
                shown[copy.held] = weights.to(copy.held.device)
        return shown
