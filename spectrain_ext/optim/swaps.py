"""Lets parameters hold the true weights during a step or its hooks, without moving either.

The optimizer keeps references to the parameters, so the parameter objects never change. Inside,
their data is the true weights; afterwards it is the stage's working weights again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Private in torch 2.10 to 2.15; FSDP2 depends on it. A change in place would bump the version
# counters of tensors that autograd saved for microbatches in flight, and their backwards would
# raise. A pipeline method changes weights between forward and backward on purpose.
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as versions_preserved

from .parameter_table import Views


class Swap(NamedTuple):
    """A parameter's working weights and true weights, the same tensor without a master."""

    p: Tensor
    working: Tensor
    true: Tensor
    at: tuple[int, int]  # addresses of `working` and `true`

    @classmethod
    def of(cls, p: Tensor, master: Views | None) -> Swap:
        working = p.data
        true = working if master is None else master[p]
        return cls(p, working, true, (working.data_ptr(), true.data_ptr()))

    def enter(self) -> None:
        p, working, true, at = self
        if true.dtype == working.dtype:
            if at[0] != at[1]:
                p.data = true
            return
        gradient, p.grad = p.grad, None
        p.data = true
        p.grad = None if gradient is None else gradient.to(true.dtype)

    def leave(self, keeps_gradient: bool = False) -> bool:
        """Restore the working weights; return whether the shape is unchanged."""
        p, working, true, at = self
        fits, now = True, p.data_ptr()
        if now not in at:  # for example after ``p.data = p.data - lr * p.grad``
            fits = p.shape == true.shape
            if fits:
                true.copy_(p.detach())
        gradient = p.grad if keeps_gradient else None
        narrow = p.dtype != working.dtype
        if narrow:
            p.grad = None
        if now != at[0] or narrow:  # empty tensors have no address
            p.data = working
        if narrow and gradient is not None:
            p.grad = gradient.to(working.dtype)
        return fits


@contextmanager
def swapped(swaps: Sequence[Swap], action: str, keeps_gradients: bool = False) -> Iterator[None]:
    """Let parameters hold the true weights inside; ``action`` begins the error of another shape."""
    try:
        for swap in swaps:
            swap.enter()
        with versions_preserved(tuple(swap.p for swap in swaps)):
            yield
    finally:
        left = [swap.leave(keeps_gradients) for swap in swaps]
        for k in [k for k, fits in enumerate(left) if not fits]:
            raise RuntimeError(
                f"{action} gave parameter {k} data of another shape than "
                f"{tuple(swaps[k].p.shape)}; that one was not updated"
            )


class Hooks:
    """The hooks of one step of a bound optimizer: they read and write the true weights.

    The step may have written predictions before its hooks change the weights. These are then
    shifted by the same amount, as if the step had ended with the changed weights.
    """

    _inside: AbstractContextManager[None] | None = None
    _stepped: Sequence[Tensor] = ()  # copies of the weights between the step and its hooks

    def __init__(self, params: Iterable[Tensor], master: Views, action: str) -> None:
        self._swaps = [Swap.of(p, master) for p in params]
        self._action = action

    def run(self, step_with_hooks: Callable[[], Any], outs: Views | None) -> Any:
        """Run hooks and step, which calls ``outside``; ``outs`` are the predictions it writes."""
        self._enter()
        try:
            result = step_with_hooks()
        finally:
            self._leave()
        if outs is not None:
            for swap, old in zip(self._swaps, self._stepped, strict=False):
                shift(outs[swap.p], old, swap.true)
        return result

    def outside(self, step: Callable[[], Any], keeps: bool) -> Any:
        """Run the step on the working weights; ``keeps``: hooks follow that may change weights."""
        self._leave()
        result = step()
        if keeps:
            self._stepped = [swap.true.clone() for swap in self._swaps]
        self._enter()
        return result

    def _enter(self) -> None:
        self._inside = swapped(self._swaps, self._action, keeps_gradients=True)
        self._inside.__enter__()

    def _leave(self) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:  # the step itself may have failed
            inside.__exit__(None, None, None)


def shift(prediction: Tensor, old: Tensor, now: Tensor) -> None:
    """Make a prediction from ``old`` weights one from the weights ``now``, in place.

    Where the weights are the same, it keeps its bits. Where it is not ahead of them, it becomes the
    rounded weights.
    """
    narrow = prediction.dtype
    ahead = (prediction + (now - old)).to(narrow)
    moved = torch.where(prediction == old.to(narrow), now.to(narrow), ahead)
    prediction.copy_(torch.where(now == old, prediction, moved))
