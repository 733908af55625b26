"""Binding: an optimizer's weights and state kept in buffers that a pipeline owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from spectrain_ext.operators.laws import Horizon

from .buffers import fits
from .ledger import Group, Ledger, named
from .resolve import Kinds, by_kind
from .rows import Rows

if TYPE_CHECKING:
    from .base import PredictingOptimizer

Views = Mapping[Tensor, Tensor]


class Binding:
    """Which tensors hold each parameter's true weights and its state.

    Attributes:
        given: the buffers as the caller gave them.
    """

    given: object = None

    def __init__(
        self,
        groups: Sequence[Group],
        master: Views | None,
        buffers: Mapping[str, Views],
    ) -> None:
        self.weights: dict[Tensor, Tensor] = {}
        self.buffers: dict[Tensor, tuple[Tensor, ...]] = {}
        for where, p in named(groups):
            self.weights[p] = p if master is None else _given("master", where, p, master)
            found = []
            for key, views in buffers.items():
                found.append(_given(key, where, p, views))
                if not fits(self.weights[p], found[-1]) or found[-1].dtype != found[0].dtype:
                    raise ValueError(
                        f"{key} of {where} must have the shape, strides, device and dtype of its "
                        f"weights ({_words(self.weights[p])}), got {_words(found[-1])}"
                    )
            self.buffers[p] = tuple(found)
        self._rows: dict[Kinds, list[Rows]] = {}

    def rows(self, ledger: Ledger, kinds: Kinds) -> list[Rows]:
        """Return the rows of every parameter.

        They are resolved on first use and not before: until then the owner may still move the
        parameters into a buffer (``p.data = view``).
        """
        if kinds not in self._rows:
            self._rows[kinds] = self.resolve(ledger, kinds)
        return self._rows[kinds]

    def resolve(self, ledger: Ledger, kinds: Kinds, outs: Views | None = None) -> list[Rows]:
        """Resolve plans over every parameter (and its out)."""
        rows = []
        for with_buffers, positions in by_kind(ledger, range(len(ledger.params)), kinds):
            params = [ledger.params[i] for i in positions]
            state = [self.buffers[p] for p in params] if with_buffers else None
            rows.append(
                Rows(
                    ledger,
                    positions,
                    [self.weights[p] for p in params],
                    None if state is None else list(zip(*state, strict=True)),
                    outs=None if outs is None else [outs[p] for p in params],
                )
            )
        return rows


class PredictionSink:
    """Where predictions of an optimizer's weights go: one tensor per parameter, resolved once.

    Made by :meth:`PredictingOptimizer.prediction_sink`, valid until the optimizer is unbound.
    """

    def __init__(self, optimizer: PredictingOptimizer, binding: Binding, outs: Views) -> None:
        self._optimizer = optimizer
        self._outs = outs
        self._rows: dict[Kinds, list[Rows]] = {}
        self.binding = binding

    def write(self, steps: Horizon) -> None:
        """Write the prediction of every parameter, with each group's current learning rate.

        ``steps`` counts updates (>= 0; 0 copies the weights' bits), or is a law of
        ``spectrain_ext.laws`` that needs no gradient. Nothing is allocated and autograd's version
        counters stay as they are. ValueError: bad ``steps``, or a prediction of a group whose
        momentum is 0. RuntimeError: the optimizer is not bound as it was.
        """
        self._optimizer._write(self, steps)

    def rows(self, ledger: Ledger, kinds: Kinds) -> list[Rows]:
        """Return the rows of every parameter, with its out."""
        if kinds not in self._rows:
            self._rows[kinds] = self.binding.resolve(ledger, kinds, self._outs)
        return self._rows[kinds]


def checked_outs(groups: Sequence[Group], weights: Views, outs: Views) -> None:
    """Raise ValueError unless ``outs`` has a tensor shaped like every parameter."""
    for where, p in named(groups):
        out = _given("outs", where, p, outs)
        weight = weights[p]
        if out.shape != weight.shape or out.stride() != weight.stride():
            raise ValueError(f"outs of {where} must be {_words(weight)}, got {_words(out)}")


def _given(name: str, where: str, p: Tensor, tensors: Views) -> Tensor:
    if p not in tensors:
        raise ValueError(f"{name} has no tensor for {where}")
    found = tensors[p]
    if found.shape != p.shape or found.device != p.device:
        raise ValueError(f"{name} of {where} must be {_words(p)}, got {_words(found)}")
    return found


def _words(tensor: Tensor) -> str:
    return (
        f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} "
        f"on {tensor.device}"
    )
