"""Fused operators on one tensor or a sequence of tensors.

Every operator takes tensors of float16, bfloat16, float32 or float64 (float32 momentum beside 16-bit
weights), all on one device, CPU or CUDA, each dense (any order of dimensions, no gaps). A sequence
of a few hundred tensors is one kernel launch. On CUDA it works on `stream`, by default the caller's
current stream. In-place operators bump autograd's version counters like torch's own; use a `Plan`
to write without that, and to validate only once.

All raise TypeError for what is not a dense tensor of those dtypes, and ValueError where lengths,
shapes, strides, dtypes or devices differ, memory overlaps or a number is out of range. Errors name
the argument and the index, and leave every tensor as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from spectrain_ext._lists import (
    Gradients,
    NativeList,
    Role,
    Tensors,
    as_tuple,
    bump_versions,
    is_single,
    native_plan,
)

T = TypeVar("T", Tensor, Sequence[Tensor])


def _new_like(arrays: tuple[object, ...], name: str) -> tuple[Tensor, ...]:
    for i, array in enumerate(arrays):
        if not isinstance(array, Tensor):
            raise TypeError(f"{name}[{i}]: expected a tensor, got {type(array).__name__}")
    with torch.no_grad():
        return tuple(torch.empty_like(array) for array in arrays)  # type: ignore[call-overload]


def _returned(arrays: tuple[object, ...], like: T, out: T | None) -> T:
    if out is not None:
        return out
    return arrays[0] if is_single(like) else list(arrays)  # type: ignore[return-value]


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
    single = is_single(params)
    w = as_tuple(params, "params", single)
    v = as_tuple(momentum_buffers, "momentum_buffers", single)
    plan = native_plan(
        single,
        (Role.PARAMS, "params", True, w),
        (Role.MOMENTUM, "momentum_buffers", False, v),
    )
    plan.predict_(lr, steps, stream)
    bump_versions(w)


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
    single = is_single(params)
    w = as_tuple(params, "params", single)
    v = as_tuple(momentum_buffers, "momentum_buffers", single)
    target = _new_like(w, "params") if out is None else as_tuple(out, "out", single)
    plan = native_plan(
        single,
        (Role.PARAMS, "params", False, w),
        (Role.MOMENTUM, "momentum_buffers", False, v),
        (Role.OUT, "out", True, target),
    )
    plan.predict(lr, steps, 0, stream)
    bump_versions(target)
    return _returned(target, params, out)


def stash(params: T, out: T | None = None, *, stream: Any = None) -> T:
    """Return a copy of the weights, bit for bit, in `out` or in new tensors of the same layout."""
    single = is_single(params)
    w = as_tuple(params, "params", single)
    target = _new_like(w, "params") if out is None else as_tuple(out, "out", single)
    plan = native_plan(
        single,
        (Role.PARAMS, "params", False, w),
        (Role.STASHED, "out", True, target),
    )
    plan.stash(stream)
    bump_versions(target)
    return _returned(target, params, out)


def restore_(params: Tensors, stashed: Tensors, *, stream: Any = None) -> None:
    """W <- stashed, bit for bit: the inverse of `stash`."""
    single = is_single(params)
    w = as_tuple(params, "params", single)
    kept = as_tuple(stashed, "stashed", single)
    plan = native_plan(
        single,
        (Role.PARAMS, "params", True, w),
        (Role.STASHED, "stashed", False, kept),
    )
    plan.restore_(stream)
    bump_versions(w)


def swap_(a: Tensors, b: Tensors, *, stream: Any = None) -> None:
    """A <-> b, bit for bit, without a third buffer."""
    single = is_single(a)
    first = as_tuple(a, "a", single)
    second = as_tuple(b, "b", single)
    plan = native_plan(
        single,
        (Role.PARAMS, "a", True, first),
        (Role.STASHED, "b", True, second),
    )
    plan.swap_(stream)
    bump_versions(first, second)


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
    single = is_single(params)
    w = as_tuple(params, "params", single)
    kept = as_tuple(stashed, "stashed", single)
    v = as_tuple(momentum_buffers, "momentum_buffers", single)
    plan = native_plan(
        single,
        (Role.PARAMS, "params", True, w),
        (Role.STASHED, "stashed", True, kept),
        (Role.MOMENTUM, "momentum_buffers", False, v),
    )
    plan.stash_predict_(lr, steps, stream)
    bump_versions(w, kept)


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
    single = is_single(params)
    w = as_tuple(params, "params", single)
    g = as_tuple(grads, "grads", single)
    lists: list[NativeList] = [
        (Role.PARAMS, "params", True, w),
        (Role.GRADS, "grads", False, g),
    ]
    v: tuple[object, ...] = ()
    if momentum_buffers is not None:
        v = as_tuple(momentum_buffers, "momentum_buffers", single)
        lists.append((Role.MOMENTUM, "momentum_buffers", True, v))
    outs: list[tuple[object, ...]] = []
    for j, (_, out) in enumerate(predict):
        name = f"predict[{j}].out"
        outs.append(as_tuple(out, name, single))
        lists.append((Role.OUT, name, True, outs[-1]))
    plan = native_plan(single, *lists)
    plan.sgd_step_(
        lr,
        momentum,
        dampening,
        weight_decay,
        nesterov,
        maximize,
        first_step,
        [steps for steps, _ in predict],
        stream,
    )
    stepped = [i for i, grad in enumerate(g) if grad is not None]
    written = [w, v] if momentum != 0.0 else [w]
    bump_versions(*(tuple(arrays[i] for i in stepped) for arrays in written), *outs)
