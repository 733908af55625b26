"""Rows: some parameters of one group on one device, and the Plan that was resolved over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from spectrain_ext.optim.hyper import Hyper
from spectrain_ext.optim.momentum import KEY, empty_like
from spectrain_ext.plan import Plan

_NO_STATE: Mapping[str, Any] = {}
_address = Tensor.data_ptr


class Rows:
    """The tensors of a few parameters, resolved once and checked cheaply before each use.

    A plan keeps raw addresses, and a parameter can get another storage at any time
    (``p.data = ...``, ``module.to()``), as its state can get another buffer. So every use asks
    ``is_current`` first. The plan holds detached aliases of the tensors: they keep the storage it
    points to alive whatever becomes of the parameter.
    """

    def __init__(
        self,
        group: int,
        indices: Sequence[int],
        params: Sequence[Tensor],
        weights: Sequence[Tensor],
        buffers: Sequence[Tensor] | None,
        *,
        stashed: Sequence[Tensor] | None = None,
        outs: Sequence[Tensor] | None = None,
    ) -> None:
        self.group = group
        self.indices = list(indices)
        self.params = list(params)
        self.buffers = None if buffers is None else list(buffers)
        self.stashed = None if stashed is None else list(stashed)
        self._sources = list(weights)
        self._weights = [w.detach() for w in weights]
        self._addresses = self._read_addresses()
        self._generation = -1
        self._states: list[Mapping[str, Any]] = [_NO_STATE] * len(self.params)
        self._expected: list[Tensor | None] = [None] * len(self.params)
        self._first: bool | list[bool] = True
        self.plan = Plan(
            self._weights,
            momentum_buffers=None if buffers is None else [b.detach() for b in buffers],
            grads=[None] * len(self.params),
            stashed=self.stashed,
            outs=() if outs is None else [[o.detach() for o in outs]],
        )

    # What the plan was resolved from, and whether that is still so.

    def _read_addresses(self) -> list[int]:
        return list(map(_address, self._sources)) + list(map(_address, self.buffers or ()))

    def storage_unchanged(self) -> bool:
        """Tell whether weights and buffers are where the plan found them."""
        return self._read_addresses() == self._addresses

    def state_unchanged(self, state: Mapping[Tensor, Any], generation: int) -> bool:
        """Tell whether each parameter's state holds the very buffer of the plan, or none as before.

        ``generation`` counts the changes of ``state`` itself; while it stays the same the
        parameters' own entries need not be looked up again.
        """
        if self.buffers is None:
            return True
        lost = False
        if generation != self._generation:
            before = self._expected
            self._states = [state.get(p, _NO_STATE) for p in self.params]
            self._expected = [
                None if entry.get(KEY) is None else buffer
                for entry, buffer in zip(self._states, self.buffers, strict=True)
            ]
            self._generation = generation
            first = [buffer is None for buffer in self._expected]
            self._first = first if any(first) and not all(first) else any(first)
            # A buffer whose state was deleted still holds the old momentum.
            lost = any(
                new is None and old is not None
                for old, new in zip(before, self._expected, strict=True)
            )
        found = [entry.get(KEY) for entry in self._states]
        return not lost and all(map(is_, found, self._expected))

    def first_step(self) -> bool | list[bool]:
        """Return for which rows momentum starts with the next gradient (one bool if uniform)."""
        return self._first

    # Gradients.

    def read_gradients(self) -> list[bool]:
        """Hand the parameters' gradients to the plan and return which rows have one.

        A gradient of another layout than its parameter (autograd gives the same one, but a hook or
        a caller may not) is copied into the parameter's layout; what cannot be a gradient of the
        parameter raises and leaves the plan's gradients as they were.
        """
        grads = [p.grad for p in self.params]
        try:
            self.plan.refresh(grads)
        except (TypeError, ValueError, RuntimeError):
            fitted = [
                None if grad is None else self._fitted(row, grad) for row, grad in enumerate(grads)
            ]
            if all(map(is_, fitted, grads)):
                raise
            self.plan.refresh(fitted)
        return [grad is not None for grad in grads]

    def forget_gradients(self) -> None:
        """Let go of the gradients, so that ``zero_grad`` really frees their memory."""
        self.plan.refresh([None] * len(self.params))

    def _fitted(self, row: int, grad: Tensor) -> Tensor:
        weight = self._weights[row]
        where = f"the gradient of parameter {self.indices[row]} of group {self.group}"
        if grad.layout != torch.strided:
            raise RuntimeError(f"{where} is sparse ({grad.layout}): SGD needs dense gradients")
        if grad.shape != weight.shape:
            raise ValueError(
                f"{where} must have shape {tuple(weight.shape)}, got {tuple(grad.shape)}"
            )
        if grad.device != weight.device:
            raise ValueError(f"{where} must be on {weight.device}, got {grad.device}")
        if grad.is_complex() or torch.promote_types(grad.dtype, weight.dtype) != weight.dtype:
            raise TypeError(f"{where} must be {weight.dtype}, got {grad.dtype}")
        if grad.dtype == weight.dtype and grad.stride() == weight.stride() and not grad.is_neg():
            return grad
        return empty_like(weight, weight.dtype).copy_(grad.detach())

    # What runs.

    def step(self, hyper: Hyper, active: Sequence[bool], predict: float | None = None) -> None:
        """Update the rows that have a gradient; with ``predict``, write the outs of all rows."""
        merged = predict is not None and hyper.momentum != 0.0 and all(active)
        self.plan.sgd_step_(
            lr=hyper.lr,
            momentum=hyper.momentum,
            dampening=hyper.dampening,
            weight_decay=hyper.weight_decay,
            nesterov=hyper.nesterov,
            maximize=hyper.maximize,
            first_step=hyper.momentum != 0.0 and self.first_step(),
            predict=(predict,) if merged else (),
        )
        if predict is not None and not merged:
            # The step gives a row without a gradient its weights, not their prediction.
            self.plan.predict(lr=hyper.lr, steps=predict, out=0)

    def restore(self) -> None:
        """Write the stashed weights back, wherever the parameters' storage is by now."""
        if self.storage_unchanged():
            self.plan.restore_()
            return
        for param, kept in zip(self.params, self.stashed or (), strict=True):
            param.detach().copy_(kept)
