"""MatrixUpdate: what the numbers of Muon and SOAP share: whole updates of matrices, as an SGD."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from torch import Tensor

from spectrain_ext.operators.numbers import Sgd

State: TypeAlias = MutableMapping[str, Any]  # of one parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixUpdate(Sgd):
    """An update as that of SGD: of momentum 1, with the change of the update for a gradient.

    The buffer of that SGD is then the last update itself: every law of SGD predicts along it, and
    the second-order law by its last change as well.
    """

    # All of the last change is too much: the norm of such an update is about the same whatever the
    # gradient's. With half, training by Muon with gradients 1, 2 or 4 updates late ended below none
    # of it and the difference law, and from 2 on below all of it; with 7 seeds differ as much as
    # these do (bench/muon_laws.py). By SOAP none, half and all are alike within a seed's noise.
    trust: ClassVar[float] = 0.5

    def loose(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Keys and shapes of a matrix's state that is in no buffer of ``bind``."""
        return {}

    def update(
        self, weight: Tensor, gradient: Tensor, momentum: Tensor, state: State, step: int
    ) -> Tensor:
        """Update momentum and loose state; return the update of this step, like the weight."""
        raise NotImplementedError
