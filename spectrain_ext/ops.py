"""Fused operators on one tensor or a sequence of tensors.

Every operator takes tensors of float16, bfloat16, float32 or float64 (float32 momentum beside
16-bit weights), all on one device, CPU or CUDA, each dense (any order of dimensions, no gaps). A
sequence of a few hundred tensors is one kernel launch. On CUDA it works on `stream`, by default the
caller's current stream. In-place operators bump autograd's version counters like torch's own; use
a `Plan` to write without that, and to validate only once.

All raise TypeError for what is not a dense tensor of those dtypes, and ValueError where lengths,
shapes, strides, dtypes or devices differ, memory overlaps or a number is out of range. Errors name
the argument and the index, and leave every tensor as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from spectrain_ext._lists import Gradients, Lists, Role, Tensors, bump_versions

T = TypeVar("T", Tensor, Sequence[Tensor])


def _output(lists: Lists, role: Role, out: Tensors | None) -> tuple[Any, tuple[object, ...]]:
    """Take `out`, or new tensors with the layout of the parameters: what to return, and a tuple."""
    if out is None:
        for i, array in enumerate(lists.params):
            if not isinstance(array, Tensor):
                raise TypeError(f"params[{i}]: expected a tensor, got {type(array).__name__}")
        with torch.no_grad():
            new = [torch.empty_like(array) for array in cast(tuple[Tensor, ...], lists.params)]
        out = new[0] if lists.single else new
    return out, lists.add(role, "out", out, writes=True)


def predict_(
    params: Tensors,
    momentum_buffers: Tensors,
    *,
    lr: float,
    steps: float,
    stream: Any = None,
) -> None:
    """W <- W - lr*steps*v, in place: the weights expected `steps` updates ahead.

    SpecTrain (Chen, Yang, Cheng, arXiv 1809.02839), equation 4, with v the momentum buffer.

    Args:
        params: W.
        momentum_buffers: v, of the same shapes and strides.
        lr: learning rate, >= 0.
        steps: the version difference s (horizon) in updates, >= 0; 0 keeps the bits of W.
        stream: CUDA stream (anything with `__cuda_stream__`, or a handle); None: the current one.
    """
    lists = Lists(params, "params", writes=True)
    lists.add(Role.MOMENTUM, "momentum_buffers", momentum_buffers, writes=False)
    lists.plan().predict_(lr, steps, stream)
    bump_versions(lists.params)


def predict(
    params: T,
    momentum_buffers: Tensors,
    *,
    lr: float,
    steps: float,
    out: T | None = None,
    stream: Any = None,
) -> T:
    """Return W - lr*steps*v in `out`, or in new tensors with the layout of the parameters.

    See `predict_`. `out` must not share memory with the inputs.
    """
    lists = Lists(params, "params", writes=False)
    lists.add(Role.MOMENTUM, "momentum_buffers", momentum_buffers, writes=False)
    result, written = _output(lists, Role.OUT, out)
    lists.plan().predict(lr, steps, 0, stream)
    bump_versions(written)
    return cast(T, result)


def stash(params: T, out: T | None = None, *, stream: Any = None) -> T:
    """Return a copy of the weights, bit for bit, in `out` or in new tensors of the same layout."""
    lists = Lists(params, "params", writes=False)
    result, written = _output(lists, Role.STASHED, out)
    lists.plan().stash(stream)
    bump_versions(written)
    return cast(T, result)


def restore_(params: Tensors, stashed: Tensors, *, stream: Any = None) -> None:
    """W <- stashed, bit for bit: the inverse of `stash`."""
    lists = Lists(params, "params", writes=True)
    lists.add(Role.STASHED, "stashed", stashed, writes=False)
    lists.plan().restore_(stream)
    bump_versions(lists.params)


def swap_(a: Tensors, b: Tensors, *, stream: Any = None) -> None:
    """A <-> b, bit for bit, without a third buffer."""
    lists = Lists(a, "a", writes=True)
    written = lists.add(Role.STASHED, "b", b, writes=True)
    lists.plan().swap_(stream)
    bump_versions(lists.params, written)


def stash_predict_(
    params: Tensors,
    stashed: Tensors,
    momentum_buffers: Tensors,
    *,
    lr: float,
    steps: float,
    stream: Any = None,
) -> None:
    """Stashed <- W and W <- W - lr*steps*v, in one pass over memory; see `predict_`."""
    lists = Lists(params, "params", writes=True)
    written = lists.add(Role.STASHED, "stashed", stashed, writes=True)
    lists.add(Role.MOMENTUM, "momentum_buffers", momentum_buffers, writes=False)
    lists.plan().stash_predict_(lr, steps, stream)
    bump_versions(lists.params, written)


def sgd_step_(
    params: Tensors,
    grads: Gradients,
    momentum_buffers: Tensors | None,
    *,
    lr: float,
    momentum: float,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    first_step: bool | Sequence[bool] = False,
    predict: Sequence[tuple[float, Tensors]] = (),
    stream: Any = None,
) -> None:
    """One step of torch.optim.SGD that also writes predictions of the new weights, in one pass.

    The arithmetic, with fused multiply-adds::

        d = g (or -g with maximize) + weight_decay*W
        v = momentum*v + (1 - dampening)*d        (first_step: v = d)
        W = W - lr*(d + momentum*v with nesterov, else v)
        out_j = W - lr*steps_j*v                  for every (steps_j, out_j) in predict

    Predictions are made from the values as they were stored: the same bits as a later `predict`.

    Args:
        params: W.
        grads: g, of the parameters' dtype; where an entry is None its tensor is left alone, and its
            outs receive W.
        momentum_buffers: v; may be None where momentum == 0, and is not touched then.
        lr: learning rate, >= 0.
        momentum: factor of the old buffer, >= 0.
        dampening: dampening of the gradient in the buffer.
        weight_decay: L2 penalty, >= 0.
        nesterov: Nesterov momentum; needs momentum > 0 and dampening == 0.
        maximize: step up the gradient.
        first_step: a bool, or one per tensor: the buffer becomes the gradient, as torch does when
            there is no buffer yet. The old content of the buffer is not used.
        predict: pairs of a horizon in updates, >= 0, and outputs like the parameters.
        stream: CUDA stream; None: the current one.
    """
    lists = Lists(params, "params", writes=True)
    g = lists.add(Role.GRADS, "grads", grads, writes=False)
    stepped: list[tuple[object, ...]] = [lists.params]
    if momentum_buffers is not None:
        v = lists.add(Role.MOMENTUM, "momentum_buffers", momentum_buffers, writes=True)
        if momentum != 0.0:
            stepped.append(v)
    horizons, outs = [], []
    for j, pair in enumerate(predict):
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(f"predict[{j}]: expected a pair (steps, out), got {pair!r}")
        horizons.append(pair[0])
        outs.append(lists.add(Role.OUT, f"predict[{j}].out", pair[1], writes=True))
    lists.plan().sgd_step_(
        lr,
        momentum,
        dampening,
        weight_decay,
        nesterov,
        maximize,
        first_step,
        horizons,
        stream,
    )
    changed = [i for i, grad in enumerate(g) if grad is not None]
    bump_versions(*([arrays[i] for i in changed] for arrays in stepped), *outs)
