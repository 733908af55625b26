"""Binding: an optimizer's weights and momentum kept in buffers that a pipeline owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from spectrain_ext.optim.momentum import KEY, fits
from spectrain_ext.optim.resolve import Group, State, buffer_of, by_device
from spectrain_ext.optim.rows import Rows

if TYPE_CHECKING:
    from spectrain_ext.optim.sgd import SGD

Groups = Sequence[Group]


class Binding:
    """Which tensor holds each parameter's true weights, which its momentum."""

    def __init__(
        self,
        groups: Groups,
        master: Mapping[Tensor, Tensor] | None,
        momentum: Mapping[Tensor, Tensor],
    ) -> None:
        self.weights: dict[Tensor, Tensor] = {}
        self.momentum: dict[Tensor, Tensor] = {}
        for where, p in _named(groups):
            self.weights[p] = p if master is None else _given("master", where, p, master)
            self.momentum[p] = _given("momentum", where, p, momentum)
            if not fits(self.weights[p], self.momentum[p]):
                raise ValueError(
                    f"momentum of {where} must have the shape, strides, device and dtype of its "
                    f"weights ({_words(self.weights[p])}), got {_words(self.momentum[p])}"
                )
        self._rows: list[Rows] | None = None

    def rows(self, groups: Groups) -> list[Rows]:
        """Return the rows of every parameter.

        They are resolved on first use and not before: until then the owner may still move the
        parameters into a buffer (``p.data = view``).
        """
        if self._rows is None:
            self._rows = self.resolve(groups)
        return self._rows

    def resolve(self, groups: Groups, outs: Mapping[Tensor, Tensor] | None = None) -> list[Rows]:
        """Resolve plans over every parameter (and its out), one per group and device."""

        def rows(group: int, indices: Sequence[int], params: Sequence[Tensor]) -> Rows:
            return Rows(
                group,
                indices,
                params,
                [self.weights[p] for p in params],
                [self.momentum[p] for p in params],
                outs=None if outs is None else [outs[p] for p in params],
            )

        return [
            found
            for index, group in enumerate(groups)
            for found in by_device(index, range(len(group["params"])), group["params"], rows)
        ]

    def adopt(self, state: State) -> None:
        """Copy momentum that ``state`` holds elsewhere into the bound buffers, zero the rest."""
        for p, view in self.momentum.items():
            buffer = buffer_of(state, p)
            if buffer is view:
                continue
            if buffer is None:
                view.zero_()
            else:
                view.copy_(buffer)
                state[p][KEY] = view

    def check_state(self, groups: Groups, state: State) -> None:
        """Raise unless every buffer in ``state`` can be copied into its bound one."""
        for where, p in _named(groups):
            buffer = buffer_of(state, p)
            if buffer is not None and buffer.shape != p.shape:
                raise ValueError(
                    f"{KEY} of {where} must have shape {tuple(p.shape)}, got {tuple(buffer.shape)}"
                )


class PredictionSink:
    """Where predictions of an optimizer's weights go: one tensor per parameter, resolved once.

    Made by :meth:`SGD.prediction_sink` and valid until the optimizer is unbound.
    """

    def __init__(self, optimizer: SGD, binding: Binding, rows: list[Rows]) -> None:
        self._optimizer = optimizer
        self.binding = binding
        self.rows = rows

    def write(self, steps: float) -> None:
        """Write ``W - lr*steps*v`` for every parameter, with each group's current learning rate.

        ``steps`` counts updates (>= 0; 0 copies the weights' bits). Nothing is allocated and
        autograd's version counters stay as they are. ValueError: bad ``steps``, or ``steps > 0``
        and a group whose momentum is 0. RuntimeError: the optimizer is not bound as it was.
        """
        self._optimizer._write(self, steps)


def checked_outs(
    groups: Groups, weights: Mapping[Tensor, Tensor], outs: Mapping[Tensor, Tensor]
) -> None:
    """Raise ValueError unless ``outs`` has a tensor shaped like every parameter."""
    for where, p in _named(groups):
        out = _given("outs", where, p, outs)
        weight = weights[p]
        if out.shape != weight.shape or out.stride() != weight.stride():
            raise ValueError(f"outs of {where} must be {_words(weight)}, got {_words(out)}")


def _named(groups: Groups) -> list[tuple[str, Tensor]]:
    return [
        (f"parameter {i} of group {index}", p)
        for index, group in enumerate(groups)
        for i, p in enumerate(group["params"])
    ]


def _given(name: str, where: str, p: Tensor, tensors: Mapping[Tensor, Tensor]) -> Tensor:
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
