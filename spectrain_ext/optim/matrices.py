"""Expresses the updates of Muon and SOAP as steps of SGD, so that all prediction laws apply."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from torch import Tensor

from spectrain_ext.operators.numbers import Sgd

State: TypeAlias = MutableMapping[str, Any]  # of one parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixUpdate(Sgd):
    """A matrix update as SGD with momentum 1, whose gradient is the change of the update.

    SGD's buffer is then the last update, so every law of SGD predicts along it, and the
    second-order law uses its last change.
    """

    # Half the last change: the norm of such an update hardly depends on the gradient's. With half,
    # Muon with gradients 1, 2 or 4 updates late ended with a lower loss than with none of the
    # change or the difference law, and from 2 on lower than with all of it. At 7 updates seeds
    # differ by as much. For SOAP none, half and all differ less than seeds.
    trust: ClassVar[float] = 0.5

    def loose(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return keys and shapes of a matrix's state outside the buffers of ``bind``."""
        return {}

    def update(
        self, weight: Tensor, gradient: Tensor, momentum: Tensor, state: State, step: int
    ) -> Tensor:
        """Update momentum and other state; return this step's update, shaped like the weight."""
        raise NotImplementedError
