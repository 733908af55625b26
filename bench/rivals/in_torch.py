"""Torch's alternatives for the operations: fused optimizers, _foreach, loops, torch.compile."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .operations import (
    ADAM_LR,
    BETAS,
    DECAY,
    EPS,
    LR,
    MOMENTUM,
    PREDICT,
    PREDICT_,
    SGD_1,
    STAGE,
    STASH,
    STASH_PREDICT,
    STEP,
    STEPS,
    SWAP,
    Call,
    Operation,
)
from .workloads import Streams

Tensors = list[Tensor]

_ALPHA = -LR * STEPS[0]
#: In the linear law: the factor of the first moment, and of the second moment's root.
_ADAM_RATE, _ADAM_ROOT = ADAM_LR / (1.0 - BETAS[0] ** STEP), 1.0 / math.sqrt(1.0 - BETAS[1] ** STEP)


def rivals(operation: Operation, s: Streams) -> dict[str, Call]:
    """Return the calls on the tensors of `s` by name, without compilation."""
    types = s.work.precision.name
    if operation in _VERSIONS:
        letters, name, loop, foreach = _VERSIONS[operation]
        lists = [s[letter] for letter in letters]
        calls: dict[str, Call] = {name: lambda: loop(*lists)}
        # _foreach supports only one dtype
        if foreach is not None and (types == "fp32" or operation is STASH):
            calls["_foreach"] = lambda: foreach(*lists)
        return calls
    ways: dict[str, tuple[str, Callable[[Operation, Streams], Call]]]
    if operation is PREDICT:
        ways = {"torch.add(out=)": ("", _added), "per-tensor SpecTrain loop": ("", _looped)}
        ways |= {"_foreach": ("", _foreach)} if types == "fp32" else {}
    elif types not in ("fp32", "mixed") or operation.lion:
        return {}
    else:
        predicts = bool(operation.predictions)
        ways = {"fused + torch.add" if predicts else "fused": ("fused", _added)}
        if types == "fp32":
            ways["foreach + _foreach" if predicts else "foreach"] = "foreach", _foreach
            ways["per-tensor SpecTrain loop" if predicts else "for loop"] = "for loop", _looped
    return {name: _after(kind, write, operation, s) for name, (kind, write) in ways.items()}


# Without a step and outputs: loops over lists of tensors, also the input of torch.compile.


def _add(w: Tensors, v: Tensors) -> None:
    for a, b in zip(w, v, strict=True):
        a.add_(b, alpha=_ALPHA)


def _stash(w: Tensors, k: Tensors) -> None:
    for a, b in zip(w, k, strict=True):
        b.copy_(a)


def _swap(w: Tensors, k: Tensors) -> None:
    for a, b in zip(w, k, strict=True):
        c = a.clone()
        a.copy_(b)
        b.copy_(c)


def _stash_and_add(w: Tensors, k: Tensors, v: Tensors) -> None:
    for a, b, c in zip(w, k, v, strict=True):
        b.copy_(a)
        a.add_(c, alpha=_ALPHA)


def _foreach_stash_and_add(w: Tensors, k: Tensors, v: Tensors) -> None:
    torch._foreach_copy_(k, w)
    torch._foreach_add_(w, v, alpha=_ALPHA)


_Loop = Callable[..., None]
_VERSIONS: dict[Operation, tuple[str, str, _Loop, _Loop | None]] = {
    PREDICT_: ("wv", "Tensor.add_", _add, lambda w, v: torch._foreach_add_(w, v, alpha=_ALPHA)),
    STASH: ("wk", "Tensor.copy_", _stash, lambda w, k: torch._foreach_copy_(k, w)),
    SWAP: ("wk", "three copies", _swap, None),
    STASH_PREDICT: ("wkv", "Tensor.copy_, add_", _stash_and_add, _foreach_stash_and_add),
}


# A step of torch's optimizers followed by predictions.


def _after(
    kind: str, write: Callable[[Operation, Streams], Call], operation: Operation, s: Streams
) -> Call:
    if not kind:
        return write(operation, s)
    step = _step(operation, s, kind)
    if not operation.predictions:
        return torch.no_grad()(step)
    predict = write(operation, s)

    @torch.no_grad()
    def run() -> None:
        step()
        predict()

    return run


def _step(operation: Operation, s: Streams, kind: str) -> Call:
    """Return the step of torch's optimizer on these tensors, after its first step."""
    widened = s["t"] if s["g"][0].dtype != s["w"][0].dtype else None
    params = []
    for w, g in zip(s["w"], widened or s["g"], strict=True):
        p = w.detach().requires_grad_()
        p.grad = g
        params.append(p)
    options: dict[str, Any] = {"fused": kind == "fused", "foreach": kind == "foreach"}
    if operation.adam:
        on_device = s.device != "cpu" and kind != "for loop"
        opt: torch.optim.Optimizer = torch.optim.AdamW(
            params, ADAM_LR, BETAS, EPS, DECAY, capturable=on_device, **options
        )
        for p, v, u in zip(params, s["v"], s["u"], strict=True):
            step = torch.tensor(float(STEP - 1), device=s.device if on_device else "cpu")
            opt.state[p].update(step=step, exp_avg=v, exp_avg_sq=u)
    else:
        opt = torch.optim.SGD(params, LR, momentum=MOMENTUM, **options)
        for p, v in zip(params, s["v"], strict=True):
            opt.state[p]["momentum_buffer"] = v
    if widened is None:
        return opt.step

    def widen_and_step() -> None:
        torch._foreach_copy_(widened, s["g"])
        opt.step()

    return widen_and_step


def _outputs(operation: Operation, s: Streams) -> list[tuple[float, Tensors]]:
    """Return horizons and outputs of predictions; a stage writes both into its working buffer."""
    letters = "oo" if operation is STAGE else "op"
    return [(STEPS[j], s[letters[j]]) for j in range(operation.predictions)]


def _added(operation: Operation, s: Streams) -> Call:
    """Use torch.add(out=), or addcdiv for Adam, per prediction and tensor."""
    outputs = _outputs(operation, s)
    w, v = s["w"], s["v"]
    u = s["u"] if operation.adam else []
    scratch = [torch.empty_like(x) for x in u]

    def add() -> None:
        for steps, out in outputs:
            for i, o in enumerate(out):
                torch.add(w[i], v[i], alpha=-LR * steps, out=o)

    def divide() -> None:
        for i, t in enumerate(scratch):
            torch.sqrt(u[i], out=t).mul_(_ADAM_ROOT).add_(EPS)
            for steps, out in outputs:
                if out[i].dtype == t.dtype:
                    torch.addcdiv(w[i], v[i], t, value=-_ADAM_RATE * steps, out=out[i])
                else:  # addcdiv(out=) does not convert
                    out[i].copy_(torch.addcdiv(w[i], v[i], t, value=-_ADAM_RATE * steps))

    return divide if u else add


def _foreach(operation: Operation, s: Streams) -> Call:
    outputs = _outputs(operation, s)
    w, v = s["w"], s["v"]
    u = s["u"] if operation.adam else []

    def add() -> None:
        for steps, out in outputs:
            torch._foreach_copy_(out, w)
            torch._foreach_add_(out, v, alpha=-LR * steps)

    def divide() -> None:
        divisor = torch._foreach_sqrt(u)
        torch._foreach_mul_(divisor, _ADAM_ROOT)
        torch._foreach_add_(divisor, EPS)
        for steps, out in outputs:
            torch._foreach_copy_(out, w)
            torch._foreach_addcdiv_(out, v, divisor, value=-_ADAM_RATE * steps)

    return divide if u else add


def _looped(operation: Operation, s: Streams) -> Call:
    """Loop over tensors with temporaries, as in public code: stash, predict, restore.

    SGD with two predictions moves 104 bytes per float32 weight, where 28 are needed.
    """
    outputs = _outputs(operation, s)
    w, v = s["w"], s["v"]
    u = s["u"] if operation.adam else []

    def run() -> None:
        for i, weight in enumerate(w):
            kept = weight.clone() if operation.steps else None
            for steps, out in outputs:
                if u:
                    root = u[i].sqrt() * _ADAM_ROOT + EPS
                    out[i].copy_(weight - (_ADAM_RATE * steps) * v[i] / root)
                else:
                    out[i].copy_(weight - (LR * steps) * v[i])
            if kept is not None:
                weight.copy_(kept)

    return run


def compiled(operation: Operation, sets: Sequence[Streams]) -> tuple[list[Call], float]:
    """Compile the same expressions with torch.compile, once for all sets of a workload's tensors.

    Returns a call for every set, and the seconds of the first call of the first one.
    """
    # Otherwise the recompilation limit stops it after a few workloads.
    reset: Callable[[], None] = torch.compiler.reset
    reset()
    # A stage computes between its step and the second prediction, so that no compiler sees both at
    # once.
    parts = [(SGD_1, STEPS), (PREDICT, STEPS[1:])] if operation is STAGE else [(operation, STEPS)]
    programs: list[Callable[..., object]] = [
        torch.compile(_expression(part, steps), fullgraph=True, dynamic=False)
        for part, steps in parts
    ]

    def of(s: Streams) -> Call:
        lists = {letter: s[letter] for letter in operation.letters}

        @torch.no_grad()
        def run() -> None:
            for program in programs:
                program(lists)

        return run

    calls = [of(s) for s in sets]
    config: Any = importlib.import_module("torch._inductor.config")
    start = time.perf_counter()
    # include the cost of code compiled in an earlier run
    with config.patch(force_disable_caches=True):
        calls[0]()
    return calls, time.perf_counter() - start


def _expression(operation: Operation, horizons: Sequence[float]) -> Any:
    if operation in _VERSIONS:
        letters, _, loop, _ = _VERSIONS[operation]
        return lambda s: loop(*(s[letter] for letter in letters))
    rate = _ADAM_RATE if operation.adam else LR

    def run(s: dict[str, Tensors]) -> None:
        for i, w in enumerate(s["w"]):
            along = v = s["v"][i]
            if operation.adam:
                u, g = s["u"][i], s["g"][i].to(w.dtype)
                w.mul_(1.0 - ADAM_LR * DECAY)
                v.lerp_(g, 1.0 - BETAS[0])
                u.mul_(BETAS[1]).addcmul_(g, g, value=1.0 - BETAS[1])
                along = v / (u.sqrt() * _ADAM_ROOT + EPS)
                w.add_(along, alpha=-rate)
            elif operation.steps:
                v.mul_(MOMENTUM).add_(s["g"][i].to(w.dtype))
                w.add_(v, alpha=-rate)
            for steps, letter in zip(horizons, "op"[: operation.predictions], strict=False):
                s[letter][i].copy_(w - rate * steps * along)

    return run
