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
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
from torch import Tensor

from .calls import (
    Gradients,
    Lists,
    Role,
    StepOptions,
    Tensors,
    current,
    device_of,
    dtype_of,
    framework_of,
    is_array,
    prediction,
    sgd_prediction,
    sgd_step_arguments,
    step_arguments,
)
from .corrections import StaleCorrection, coefficients_of
from .expressions import lower, traced
from .laws import Horizon, as_laws
from .library import traceable
from .numbers import Adam, Sgd, horizon

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of typing from Python 3.11 on

T = TypeVar("T", Tensor, Sequence[Tensor], Any)  # Any: arrays of other frameworks


def _output(lists: Lists, role: Role, out: Tensors | None, stream: Any) -> Any:
    """Take `out`, or new tensors with the layout of the parameters."""
    if out is None:
        new = lists.new_like_params(stream)
        out = new[0] if lists.single else new
    lists.add(role, "out", out, writes=True)
    return out


@traceable
def predict_(
    params: Tensors,
    momentum_buffers: Tensors,
    *,
    lr: float,
    steps: Horizon,
    momentum: float | None = None,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    stream: Any = None,
) -> None:
    """W <- W - lr*steps*v, in place: the weights expected `steps` updates ahead.

    SpecTrain (Chen, Yang, Cheng, arXiv 1809.02839), equation 4, with v the momentum buffer.

    Args:
        params: W.
        momentum_buffers: v, of the same shapes and strides.
        lr: learning rate, >= 0.
        steps: the version difference s (horizon) in updates, >= 0; 0 keeps the bits of W. Or a law
            of `spectrain_ext.laws`: linear, geometric, future learning rates.
        momentum, weight_decay, nesterov: what the geometric laws have to know of the optimizer.
        stream: CUDA stream (anything with `__cuda_stream__`, or a handle); None: the current one.
    """
    lists = Lists(params, "params", writes=True)
    lists.add(Role.MOMENTUM, "momentum_buffers", momentum_buffers, writes=False)
    plan = lists.plan()
    terms, eps, program = sgd_prediction(1, steps, lr, momentum, weight_decay, nesterov)
    plan.predict_(terms, eps, stream, program)
    lists.bump()


@traceable
def predict(
    params: T,
    momentum_buffers: Tensors,
    *,
    lr: float,
    steps: Horizon,
    momentum: float | None = None,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    out: T | None = None,
    stream: Any = None,
) -> T:
    """Return W - lr*steps*v in `out`, or in new tensors with the layout of the parameters.

    See `predict_`. `out` must not share memory with the inputs; beside float32 weights it may be
    bfloat16 or float16 (working weights of a float32 master).
    """
    lists = Lists(params, "params", writes=False)
    lists.add(Role.MOMENTUM, "momentum_buffers", momentum_buffers, writes=False)
    result = _output(lists, Role.OUT, out, stream)
    plan = lists.plan()
    terms, eps, program = sgd_prediction(1, steps, lr, momentum, weight_decay, nesterov)
    plan.predict(terms, eps, 0, stream, program)
    lists.bump()
    return cast(T, result)


@traceable
def stash(params: T, out: T | None = None, *, stream: Any = None) -> T:
    """Return a copy of the weights, bit for bit, in `out` or in new tensors of the same layout."""
    lists = Lists(params, "params", writes=False)
    result = _output(lists, Role.STASHED, out, stream)
    lists.plan().stash(stream)
    lists.bump()
    return cast(T, result)


@traceable
def restore_(params: Tensors, stashed: Tensors, *, stream: Any = None) -> None:
    """W <- stashed, bit for bit: the inverse of `stash`."""
    lists = Lists(params, "params", writes=True)
    lists.add(Role.STASHED, "stashed", stashed, writes=False)
    lists.plan().restore_(stream)
    lists.bump()


@traceable
def swap_(a: Tensors, b: Tensors, *, stream: Any = None) -> None:
    """A <-> b, bit for bit, without a third buffer."""
    lists = Lists(a, "a", writes=True)
    lists.add(Role.STASHED, "b", b, writes=True)
    lists.plan().swap_(stream)
    lists.bump()


@traceable
def stash_predict_(
    params: Tensors,
    stashed: Tensors,
    momentum_buffers: Tensors,
    *,
    lr: float,
    steps: Horizon,
    momentum: float | None = None,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    stream: Any = None,
) -> None:
    """Stashed <- W and W <- W - lr*steps*v, in one pass over memory; see `predict_`."""
    lists = Lists(params, "params", writes=True)
    lists.add(Role.STASHED, "stashed", stashed, writes=True)
    lists.add(Role.MOMENTUM, "momentum_buffers", momentum_buffers, writes=False)
    plan = lists.plan()
    terms, eps, program = sgd_prediction(1, steps, lr, momentum, weight_decay, nesterov)
    plan.stash_predict_(terms, eps, stream, program)
    lists.bump()


@traceable
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
    decoupled_weight_decay: bool = False,
    ema: bool = False,
    first_step: bool | Sequence[bool] = False,
    predict: Sequence[tuple[Horizon, Tensors]] = (),
    correction: StaleCorrection | None = None,
    stale: Tensors | None = None,
    gap_averages: Tensors | None = None,
    largest_lr: float | None = None,
    averaged: int = 0,
    stream: Any = None,
    **options: Unpack[StepOptions],
) -> None:
    """One step of torch.optim.SGD that also writes predictions of the new weights, in one pass.

    The arithmetic, with fused multiply-adds::

        d = g (or -g with maximize) + weight_decay*W
        v = momentum*v + (1 - dampening)*d        (first_step: v = d)
        W = W - lr*v                              (nesterov: W - lr*d - lr*momentum*v)
        out_j = W - lr*steps_j*v                  for every (steps_j, out_j) in predict

    With `ema` v = momentum*v + (1 - momentum)*d, as the SpecTrain paper writes it; with
    `decoupled_weight_decay` d = g and W shrinks by 1 - lr*weight_decay before it moves.

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
        correction: of g or d, in the same pass, after `clip_factor` and `grad_scale` and before
            the momentum: one of `spectrain_ext.corrections` that reads `stale`. Weights are
            float32 or float64 then.
        stale: the weights that gave g; like the parameters, beside float32 ones bfloat16 or
            float16 as the gradients. May be an output of `predict`, which is written after it was
            read.
        gap_averages: of `corrections.GapAware`: A, like the momentum, zeros at first.
        largest_lr: of `corrections.GapAware`: the largest learning rate so far; None: `lr`.
        averaged: of `corrections.GapAware`: how many steps A has taken up, 0 at the first one.
        grad_scale, found_inf, clip_factor: one float32 element each, on the parameters' device,
            which no host waits for: g is multiplied by clip_factor / grad_scale, and where
            found_inf is not 0 nothing at all is written: not the weights, not the buffers (a
            first step stays one), not the outs. The quotient is made in double and rounded to the
            arithmetic type; torch's fused optimizers divide every gradient, which is the same to
            the bit where the scale is a power of two, and to rounding otherwise.
        zero_grad: set the gradients to zero in the same pass, after the step and its predictions
            have read them; also where found_inf skips the step, since the next backward
            accumulates into them. They must then have memory of their own.
        rounding_seed: round bfloat16 weights stochastically, up or down with a probability
            proportional to the distance: updates that round to nearest would lose are kept on
            average, without a float32 master. Buffers and predictions are rounded to nearest, the
            latter from W as it was rounded. The bits depend on the seed, an int of 64 bits, and on
            the element's place in the memory of all tensors of the call, one behind the other,
            alone: the same on every device. Give every step another seed.
        stream: CUDA stream; None: the current one.
    """
    lists = _step_lists(params, grads, options)
    if momentum_buffers is not None:
        lists.add(Role.MOMENTUM, "momentum_buffers", momentum_buffers, writes=True)
    horizons = _add_outs(lists, predict)
    _add_stale(lists, stale, gap_averages)
    plan = lists.plan()
    row = lr, momentum, dampening, weight_decay, nesterov, maximize, decoupled_weight_decay, ema
    (settings, with_momentum, predictions), program = sgd_step_arguments(row, 1, horizons)
    correcting = None
    if correction is not None:
        correcting = coefficients_of(correction, [Sgd(*row)], largest_lr, averaged)
    more = options, stream, program, correcting
    plan.sgd_step_(settings, with_momentum, first_step, predictions, *more)
    without = traced("momentum", momentum) is None and momentum == 0.0
    lists.bump(untouched=Role.MOMENTUM if without else None)


@traceable
def adam_step_(
    params: Tensors,
    grads: Gradients,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    lr: float,
    step: int,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    momentum_decay: float | None = None,
    mu_product: float = 1.0,
    predict: Sequence[tuple[Horizon, Tensors]] = (),
    correction: StaleCorrection | None = None,
    stale: Tensors | None = None,
    gap_averages: Tensors | None = None,
    largest_lr: float | None = None,
    averaged: int = 0,
    stream: Any = None,
    **options: Unpack[StepOptions],
) -> None:
    """One step of Adam, AdamW or NAdam that also writes predictions, in one pass over memory.

    The arithmetic of torch.optim, with fused multiply-adds::

        d = g (or -g with maximize) + weight_decay*W          (AdamW: d = g, W shrinks first)
        m = beta1*m + (1 - beta1)*d
        u = beta2*u + (1 - beta2)*d*d
        W = W - lr/(1 - beta1^step) * m / (sqrt(u)/sqrt(1 - beta2^step) + eps)
        out_j = W - lr*steps_j/(1 - beta1^step) * m / (the same)   for every (steps_j, out_j)

    Args:
        params: W.
        grads: g; bfloat16 or float16 beside float32 (master) weights. None leaves a tensor alone,
            and its outs receive W.
        exp_avgs: m; like W, or float32 beside a 16-bit one.
        exp_avg_sqs: u, of the dtype of m.
        lr: learning rate, >= 0.
        step: number of this update, counted from 1.
        betas: (beta1, beta2), each in [0, 1).
        eps: >= 0.
        weight_decay: L2 penalty, or with `decoupled_weight_decay` AdamW's.
        decoupled_weight_decay: AdamW.
        maximize: step up the gradient.
        momentum_decay: makes it NAdam (torch's schedule of mu); its usual value is 4e-3.
        mu_product: NAdam's product of mu_1 to mu_step.
        predict: pairs of a horizon (a number of updates, or a law of `spectrain_ext.laws`) and
            outputs like the parameters, bfloat16 or float16 beside float32 ones. They are made from
            the values as they were stored.
        correction, stale, gap_averages, largest_lr, averaged: as in `sgd_step_`.
        grad_scale, found_inf, clip_factor: as in `sgd_step_`. A skipped step counts nowhere: the
            next one has the same number.
        zero_grad, rounding_seed: as in `sgd_step_`.
        stream: CUDA stream; None: the current one.
    """
    lists = _step_lists(params, grads, options)
    lists.add(Role.MOMENTUM, "exp_avgs", exp_avgs, writes=True)
    lists.add(Role.SECOND, "exp_avg_sqs", exp_avg_sqs, writes=True)
    horizons = _add_outs(lists, predict)
    _add_stale(lists, stale, gap_averages)
    more = decoupled_weight_decay, maximize, momentum_decay, mu_product
    numbers = Adam(lr, betas, eps, weight_decay, step, *more)
    plan = lists.plan()
    (settings, _, predictions), program = step_arguments([numbers], horizons)
    correcting = coefficients_of(correction, [numbers], largest_lr, averaged)
    plan.adam_step_(settings, predictions, options, stream, program, correcting)
    lists.bump()


@traceable
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
    out: T | None = None,
    stream: Any = None,
) -> T:
    """Return the weights `steps` updates of Adam ahead, in `out` or in new tensors.

    `step` is the number of the last update made. A number of steps is the linear law,
    W - steps*lr*m_hat/(sqrt(u_hat) + eps) (PipeOptim, 2023); see `adam_step_` for the rest.
    """
    lists = Lists(params, "params", writes=False)
    lists.add(Role.MOMENTUM, "exp_avgs", exp_avgs, writes=False)
    lists.add(Role.SECOND, "exp_avg_sqs", exp_avg_sqs, writes=False)
    result = _output(lists, Role.OUT, out, stream)
    numbers = Adam(lr, betas, eps, weight_decay, step, decoupled_weight_decay)
    plan = lists.plan()
    terms, each_eps, program = prediction([numbers], as_laws(steps, 1))
    plan.predict(terms, each_eps, 0, stream, program)
    lists.bump()
    return cast(T, result)


@traceable
def extrapolate(
    params: T,
    previous: Tensors,
    *,
    steps: float,
    out: T | None = None,
    stream: Any = None,
) -> T:
    """Return W + steps*(W - previous): prediction by weight difference (LWP^w)."""
    lists = Lists(params, "params", writes=False)
    lists.add(Role.STASHED, "previous", previous, writes=False)
    result = _output(lists, Role.OUT, out, stream)
    plan = lists.plan()
    steps, program = lower(horizon("steps", steps))
    plan.extrapolate(steps, 0, stream, program)
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
    """How far other versions of the weights are from them, in one pass and without a copy.

    With a prediction made s updates ago and the stale weights of that time as `others`, these are
    the errors that the SpecTrain paper draws (as root mean squares: divide by the root of the
    number of elements).

    Args:
        params: the weights now; n tensors, or arrays of other frameworks.
        others: k lists like the parameters.
        stream: CUDA stream; None: the current one.

    Returns:
        Two float64 tensors on the parameters' device, or NumPy arrays where the first of params is
        one: the Euclidean norm of others[j][i] - params[i], of shape (k, n), and that of the whole
        lists, of shape (k,). The sums are made in an order that depends on the shapes only: the
        same bits on the CPU and on every GPU.
    """
    norms: Any = _distance(params, others, stream=stream)
    first = params if is_array(params) else next(iter(cast("Sequence[object]", params)), None)
    if not isinstance(first, Tensor) and framework_of(first) == "numpy":
        norms = norms.numpy()
    return norms[:, :-1], norms[:, -1]


@traceable
def _distance(params: Tensors, others: Sequence[Tensors], *, stream: Any = None) -> Tensor:
    """The two in one tensor, which a graph can hold: of shape (k, n + 1)."""
    if isinstance(others, Tensor) or not isinstance(others, Sequence):
        raise TypeError(f"others: expected a sequence of lists, got {type(others).__name__}")
    lists = Lists(params, "params", writes=False)
    given = [
        lists.add(Role.OUT, f"others[{j}]", other, writes=False) for j, other in enumerate(others)
    ]
    native = lists.plan()
    # Outputs may be narrower than their parameters, versions may not.
    for j, arrays in enumerate(given):
        for i, (array, version) in enumerate(zip(lists.params, arrays, strict=True)):
            wanted, came = dtype_of(array), dtype_of(version)
            if str(came).rpartition(".")[2] != str(wanted).rpartition(".")[2]:
                raise ValueError(f"others[{j}][{i}]: expected {wanted}, got {came}")
    arrays = lists.params
    device = device_of(arrays[0]) if arrays else None
    with current(stream, device):
        squares = torch.zeros(len(others), len(arrays) + 1, dtype=torch.float64, device=device)
        scratch = torch.empty(native.distance_scratch(), dtype=torch.uint8, device=device)
        native.distances(squares.data_ptr(), scratch.data_ptr(), stream)
        return squares.sqrt_()


def _step_lists(params: Tensors, grads: Gradients, options: StepOptions) -> Lists:
    lists = Lists(params, "params", writes=True)
    lists.add(Role.GRADS, "grads", grads, writes=bool(options.get("zero_grad")))
    return lists


def _add_outs(lists: Lists, predict: Sequence[tuple[Horizon, Tensors]]) -> list[Horizon]:
    horizons: list[Horizon] = []
    for j, pair in enumerate(predict):
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(f"predict[{j}]: expected a pair (steps, out), got {pair!r}")
        if pair[0] is None:
            raise TypeError(f"predict[{j}]: expected a number of steps or a law, got None")
        horizons.append(pair[0])
        lists.add(Role.OUT, f"predict[{j}].out", pair[1], writes=True)
    return horizons


def _add_stale(lists: Lists, stale: Tensors | None, averages: Tensors | None) -> None:
    if stale is not None:
        lists.add(Role.STALE, "stale", stale, writes=False)
    if averages is not None:
        lists.add(Role.AVERAGE, "gap_averages", averages, writes=True)
