"""Fused operators on one tensor or a sequence of tensors.

All tensors of a call are on one device (CPU or CUDA), dense (any order of dimensions, no gaps), and
of dtype float16, bfloat16, float32 or float64; state may be float32 where weights have 16 bits, and
bfloat16 where they are float32.
A sequence of a few hundred tensors needs one kernel launch, on `stream` (default: the current CUDA
stream). In-place operators bump autograd's version counters, as torch's do. A `Plan` validates its
tensors once and does not bump version counters.

Every operator raises TypeError for arguments that are not dense tensors of these dtypes, and
ValueError if lengths, shapes, strides, dtypes or devices differ, memory overlaps, or a number is
out of range. Errors name the argument and the index, and leave all tensors unchanged.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor

from spectrain_ext import _C

from .calls import (
    Lists,
    Prediction,
    Role,
    Tensors,
    Written,
    current,
    device_of,
    framework_of,
    is_array,
    prediction,
)
from .laws import Horizon, Linear, as_law
from .library import operator
from .numbers import (
    AdamNumbers,
    LionNumbers,
    SgdNumbers,
    Term,
    horizon,
    learning_rate,
    non_negative,
)

#: A result is like the parameters; the last: arrays of other frameworks, and what may be either.
T = TypeVar("T", Tensor, list[Tensor], Sequence[Tensor], "Tensors")


def sgd_prediction(
    steps: Horizon,
    lr: float,
    momentum: float | None = None,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    dampening: float = 0.0,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
    smoothed: bool = False,
) -> Prediction:
    """Translate a prediction under SGD."""
    rate = learning_rate(lr)
    if type(weight_decay) is not float:
        weight_decay = non_negative("weight_decay", weight_decay)
    plain = momentum is None and not weight_decay and not nesterov
    if plain and type(rate) is float and isinstance(steps, (int, float)):  # made fast
        distance = rate * horizon("steps", steps)
        return "sgd_predict", [[Term(1.0, distance)] if distance else []], (), None
    law = as_law(steps)
    if momentum is None:
        if not isinstance(law, Linear):
            raise ValueError(f"momentum: {law} needs it")
        momentum = 1.0
    more = nesterov, maximize, decoupled_weight_decay, smoothed
    return prediction([SgdNumbers(rate, momentum, dampening, weight_decay, *more)], [law])


def _output(lists: Lists, role: Role, out: Tensors | None, stream: Any) -> Any:
    """Return `out`, or new arrays with the layout of the parameters."""
    if out is None:
        with torch.no_grad():
            new = [_new_like(lists, i, stream) for i in range(len(lists.params))]
        out = new[0] if lists.single else new
    lists.add(role, "out", out, writes=True)
    return out


def _new_like(lists: Lists, i: int, stream: Any) -> Any:
    """Return a new array like a parameter, allocated for use on the stream."""
    value = lists.params[i]
    if isinstance(value, Tensor):
        with current(stream, value.device):
            return torch.empty_like(value)
    framework = framework_of(value)
    if framework == "numpy":  # a plain array, even for memory-mapped ones
        return cast(Any, sys.modules["numpy"]).empty_like(value, subok=False)
    if framework == "cupy":
        cupy = cast(Any, sys.modules["cupy"])
        if stream is None:
            return cupy.empty_like(value)
        with cupy.cuda.ExternalStream(_C.stream_handle(stream)):
            return cupy.empty_like(value)
    raise TypeError(
        f"params{'' if lists.single else f'[{i}]'}: expected a tensor, or a NumPy or CuPy array, "
        f"where out is None; got {type(value).__name__}"
    )


@operator
def predict_(
    params: Written,
    momentum_buffers: Tensors,
    *,
    lr: float,
    steps: Horizon,
    momentum: float | None = None,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    stream: Any = None,
) -> None:
    """Predict weights in place: W <- W - lr*steps*v, the weights expected `steps` updates ahead.

    SpecTrain (Chen, Yang, Cheng, arXiv 1809.02839), equation 4; v is the momentum buffer.

    Args:
        params: W.
        momentum_buffers: v, with the shapes and strides of `params`.
        lr: learning rate, >= 0; a CUDA tensor of one element is read when the kernel runs.
        steps: prediction horizon in updates, >= 0; 0 keeps the bits of W. Or a law of
            `spectrain_ext.laws`.
        momentum, weight_decay, nesterov: the optimizer's settings, which geometric laws need.
        stream: CUDA stream (an object with `__cuda_stream__`, or a handle); None: the current one.

    Example:
        >>> weights, momentum = [torch.ones(3)], [torch.ones(3)]
        >>> st.predict_(weights, momentum, lr=0.25, steps=2)
        >>> weights
        [tensor([0.5000, 0.5000, 0.5000])]
    """
    lists = Lists(params, "params", writes=True)
    lists.add(Role.MOMENTUM, "momentum_buffers", momentum_buffers, writes=False)
    plan = lists.plan()
    by = sgd_prediction(steps, lr, momentum, weight_decay, nesterov)
    plan.predict(*by, None, stream)
    lists.bump()


@operator
def predict(
    params: T,
    momentum_buffers: Tensors,
    *,
    lr: float,
    steps: Horizon,
    momentum: float | None = None,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    out: Tensors | None = None,
    stream: Any = None,
) -> T:
    """Return predicted weights, W - lr*steps*v, in `out` or in new tensors like the parameters.

    The arguments are those of `predict_`. `out` must not share memory with the inputs. For float32
    weights it may be bfloat16 or float16 (working weights of float32 master weights).

    Example:
        >>> st.predict(torch.ones(3), torch.ones(3), lr=0.25, steps=2)
        tensor([0.5000, 0.5000, 0.5000])
    """
    lists = Lists(params, "params", writes=False)
    lists.add(Role.MOMENTUM, "momentum_buffers", momentum_buffers, writes=False)
    result = _output(lists, Role.OUT, out, stream)
    plan = lists.plan()
    by = sgd_prediction(steps, lr, momentum, weight_decay, nesterov)
    plan.predict(*by, 0, stream)
    lists.bump()
    return cast(T, result)


@operator
def stash(params: T, out: Tensors | None = None, *, stream: Any = None) -> T:
    """Return a bitwise copy of the weights, in `out` or in new tensors of the same layout.

    Example:
        >>> weights = [torch.ones(2)]
        >>> kept = st.stash(weights)
        >>> _ = weights[0].zero_()
        >>> st.restore_(weights, kept)
        >>> weights
        [tensor([1., 1.])]
    """
    lists = Lists(params, "params", writes=False)
    result = _output(lists, Role.STASHED, out, stream)
    lists.plan().stash(stream)
    lists.bump()
    return cast(T, result)


@operator
def restore_(params: Written, stashed: Tensors, *, stream: Any = None) -> None:
    """Copy stashed weights back, bit for bit: W <- stashed. The inverse of `stash`.

    Example:
        >>> weights = torch.zeros(2)
        >>> st.restore_(weights, torch.ones(2))
        >>> weights
        tensor([1., 1.])
    """
    lists = Lists(params, "params", writes=True)
    lists.add(Role.STASHED, "stashed", stashed, writes=False)
    lists.plan().restore_(stream)
    lists.bump()


@operator
def swap_(a: Written, b: Written, *, stream: Any = None) -> None:
    """Exchange the contents of `a` and `b`, bit for bit, without a third buffer.

    Example:
        >>> a, b = torch.zeros(2), torch.ones(2)
        >>> st.swap_(a, b)
        >>> a, b
        (tensor([1., 1.]), tensor([0., 0.]))
    """
    lists = Lists(a, "a", writes=True)
    lists.add(Role.STASHED, "b", b, writes=True)
    lists.plan().swap_(stream)
    lists.bump()


@operator
def stash_predict_(
    params: Written,
    stashed: Written,
    momentum_buffers: Tensors,
    *,
    lr: float,
    steps: Horizon,
    momentum: float | None = None,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    stream: Any = None,
) -> None:
    """Stash and predict in one pass: stashed <- W, then W <- W - lr*steps*v. See `predict_`.

    Example:
        >>> weights, kept, momentum = torch.ones(2), torch.empty(2), torch.ones(2)
        >>> st.stash_predict_(weights, kept, momentum, lr=0.25, steps=2)
        >>> weights, kept
        (tensor([0.5000, 0.5000]), tensor([1., 1.]))
    """
    lists = Lists(params, "params", writes=True)
    lists.add(Role.STASHED, "stashed", stashed, writes=True)
    lists.add(Role.MOMENTUM, "momentum_buffers", momentum_buffers, writes=False)
    plan = lists.plan()
    by = sgd_prediction(steps, lr, momentum, weight_decay, nesterov)
    plan.stash_predict_(*by, stream)
    lists.bump()


@operator
def adam_predict(
    params: T,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    lr: float,
    step: int,
    steps: Horizon,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    out: Tensors | None = None,
    stream: Any = None,
) -> T:
    """Return the weights predicted `steps` updates of Adam ahead, in `out` or in new tensors.

    `step` is the number of the last update made. For a number of steps the result is
    W - steps*lr*m_hat/(sqrt(u_hat) + eps) (PipeOptim, 2023). See `adam_step_` for the other
    arguments.

    Example:
        >>> m, u = torch.tensor([0.1]), torch.tensor([0.001])  # after one step with gradient 1
        >>> st.adam_predict(torch.ones(1), m, u, lr=0.25, step=1, steps=2)
        tensor([0.5000])
    """
    lists = Lists(params, "params", writes=False)
    lists.add(Role.MOMENTUM, "exp_avgs", exp_avgs, writes=False)
    lists.add(Role.SECOND, "exp_avg_sqs", exp_avg_sqs, writes=False)
    result = _output(lists, Role.OUT, out, stream)
    numbers = AdamNumbers(lr, betas, eps, weight_decay, step, decoupled_weight_decay)
    plan = lists.plan()
    plan.predict(*prediction([numbers], [as_law(steps)]), 0, stream)
    lists.bump()
    return cast(T, result)


@operator
def lion_predict(
    params: T,
    exp_avgs: Tensors,
    *,
    lr: float,
    steps: Horizon,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    out: Tensors | None = None,
    stream: Any = None,
) -> T:
    """Return the weights predicted `steps` updates of Lion ahead, in `out` or in new tensors.

    For a number of steps the result is W - steps*lr*sign(m)/2. See `lion_step_` for the arguments.

    Example:
        >>> st.lion_predict(torch.ones(2), torch.tensor([0.1, -0.2]), lr=0.25, steps=2)
        tensor([0.7500, 1.2500])
    """
    lists = Lists(params, "params", writes=False)
    lists.add(Role.MOMENTUM, "exp_avgs", exp_avgs, writes=False)
    result = _output(lists, Role.OUT, out, stream)
    plan = lists.plan()
    by = prediction([LionNumbers(lr, betas, weight_decay)], [as_law(steps)])
    plan.predict(*by, 0, stream)
    lists.bump()
    return cast(T, result)


@operator
def extrapolate(
    params: T,
    previous: Tensors,
    *,
    steps: float,
    out: Tensors | None = None,
    stream: Any = None,
) -> T:
    """Return W + steps*(W - previous): prediction by weight difference (LWP^w).

    Example:
        >>> st.extrapolate(torch.tensor([3.0]), torch.tensor([2.0]), steps=2)
        tensor([5.])
    """
    lists = Lists(params, "params", writes=False)
    lists.add(Role.STASHED, "previous", previous, writes=False)
    result = _output(lists, Role.OUT, out, stream)
    plan = lists.plan()
    plan.extrapolate(horizon("steps", steps), 0, stream)
    lists.bump()
    return cast(T, result)


@overload
def distance(
    params: Tensor | Sequence[Tensor], others: Sequence[Tensors], *, stream: Any = ...
) -> tuple[Tensor, Tensor]: ...


@overload
def distance(
    params: Tensors, others: Sequence[Tensors], *, stream: Any = ...
) -> tuple[Any, Any]: ...


def distance(params: Tensors, others: Sequence[Tensors], *, stream: Any = None) -> tuple[Any, Any]:
    """Measure the distance of other weight versions from `params`, in one pass without copies.

    Pass a prediction made s updates ago and the stale weights of that time as `others` to get the
    errors that the SpecTrain paper plots (the paper's are root mean squares: divide by the square
    root of the number of elements).

    Args:
        params: the current weights; n tensors, or arrays of other frameworks.
        others: k lists like the parameters.
        stream: CUDA stream; None: the current one.

    Returns:
        Two float64 tensors on the parameters' device, or NumPy arrays if the first parameter is
        one: the Euclidean norms of others[j][i] - params[i], of shape (k, n), and those of the
        whole lists, of shape (k,). The order of summation depends only on the shapes, so the bits
        are the same on the CPU and on every GPU.

    Example:
        >>> each, total = st.distance([torch.zeros(2)], [[torch.tensor([3.0, 4.0])]])
        >>> total
        tensor([5.], dtype=torch.float64)
    """
    norms: Any = _distance(params, others, stream=stream)
    first = params if is_array(params) else next(iter(cast("Sequence[object]", params)), None)
    if not isinstance(first, Tensor) and framework_of(first) == "numpy":
        norms = norms.numpy()
    return norms[:, :-1], norms[:, -1]


@operator
def _distance(params: Tensors, others: Sequence[Tensors], *, stream: Any = None) -> Tensor:
    """Return both results in one tensor of shape (k, n + 1), which a graph can hold."""
    if isinstance(others, Tensor) or not isinstance(others, Sequence):
        raise TypeError(f"others: expected a sequence of lists, got {type(others).__name__}")
    lists = Lists(params, "params", writes=False)
    for j, other in enumerate(others):
        lists.add(Role.OUT, f"others[{j}]", other, writes=False)
    native = lists.plan()
    device = device_of(lists.params[0]) if lists.params else None
    with current(stream, device):
        norms = torch.zeros(len(others), len(lists.params) + 1, dtype=torch.float64, device=device)
        scratch = torch.empty(native.distance_scratch(), dtype=torch.uint8, device=device)
        native.distances(norms.data_ptr(), scratch.data_ptr(), stream)
        return norms.sqrt_() if norms.is_cuda else norms.apply_(math.sqrt)  # torch's is inexact
