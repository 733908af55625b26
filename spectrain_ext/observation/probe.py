"""Probe: how far the weights that a forward computed with were from those they stood for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from spectrain_ext.operators import distance
from spectrain_ext.pipeline.stage import Stage
from spectrain_ext.schedule import Rules


class Errors(NamedTuple):
    """Norms of differences, divided by the norm of the weights they stood for.

    Attributes:
        prediction: of the weights that a forward computed with; None where it predicts nothing.
        staleness: of the newest weights of that time, which prediction starts from.
    """

    prediction: float | None
    staleness: float


class _Kept(NamedTuple):
    due: int
    computed: list[Tensor] | None
    newest: list[Tensor]


class Probe:
    """Looks at one forward in so many, and again once the updates it looked ahead by are made.

    It stands for the weights after as many updates as it predicts ahead; a method that predicts
    nothing, for those that the minibatch's own backward meets. Looking costs two copies of the
    stage's weights, until then, and a pass over them each time; the stage's prediction stream is
    waited for.

    Args:
        stage: has trainable parameters.
        rules: the method at this stage.
        delay: the updates by which its forwards are late.
        every: minibatches.
    """

    def __init__(self, stage: Stage, rules: Rules, delay: int, every: int) -> None:
        assert stage.weights is not None
        self._stage, self._weights = stage, stage.weights
        horizon = rules.forward_horizon
        self._predicts = horizon != 0
        self._ahead = delay if horizon == "counted" or not horizon else horizon
        self._every = every
        self._kept: _Kept | None = None

    def begin(self) -> None:
        self._kept = None

    def forward(self, i: int, j: int, updates: int) -> None:
        """The forward of a microbatch has been issued, after so many updates."""
        if j or i % self._every or self._kept is not None or not self._ahead:
            return
        with self._stage.looking():
            newest = self._weights.newest()
            computed = [
                torch.empty_like(true).copy_(p)
                for p, true in zip(self._weights.params, newest, strict=True)
            ]
            copies = [true.clone() for true in newest]
        self._kept = _Kept(updates + self._ahead, computed if self._predicts else None, copies)

    def update(self, updates: int) -> Errors | None:
        """An update has been issued, the last of so many; the errors, if it is the one."""
        kept = self._kept
        if kept is None or kept.due != updates:
            return None
        self._kept = None
        with self._stage.looking():
            now = self._weights.newest()
            others = [kept.newest, *([] if kept.computed is None else [kept.computed])]
            _, norms = distance(now, others)
            staleness, *prediction = (norms / get_total_norm(now).double()).tolist()
        return Errors(prediction[0] if prediction else None, staleness)
