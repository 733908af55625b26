"""What torch offers for the same operations: fused optimizers, _foreach, loops, torch.compile."""

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


def rivals(operation: Operation, s: Streams) -> dict[str, Call]:
    """Name -> call on the tensors of `s`, without compilation."""
    if operation in (PREDICT_, PREDICT, STASH, SWAP, STASH_PREDICT):
        return _versions(operation, s)
    calls = {"fused + torch.add" if operation.predictions else "fused": _composition(operation, s)}
    mixed = s.work.precision.name != "fp32"
    if mixed:
        return {} if s.work.precision.name == "bf16" else calls
    if operation.predictions:
        calls["foreach + _foreach"] = _foreach_composition(operation, s)
    else:
        calls["foreach"] = _foreach_composition(operation, s)
    if operation.predictions:
        calls["per-tensor SpecTrain loop"] = _public_loop(operation, s)
    else:
        calls["for loop"] = torch.no_grad()(_optimizer(operation, s, "for loop").step)
    return calls


def references(operation: Operation, s: Streams) -> dict[str, Call]:
    """A plain copy of the same tensors, which a prediction is held against."""
    if operation not in (PREDICT, PREDICT_) or s.work.precision.name != "fp32":
        return {}
    w, out = s["w"], s["o"]
    if len(w) > 1:
        return {"copy_ of the same tensors": lambda: torch._foreach_copy_(out, w)}
    return {"copy_ of the same tensors": lambda: out[0].copy_(w[0])}


def _versions(operation: Operation, s: Streams) -> dict[str, Call]:
    """Loops over tensors and _foreach, for operations without an optimizer's step."""
    alpha = -LR * STEPS[0]
    w = s["w"]
    same = s.work.precision.name == "fp32"  # _foreach takes one dtype only
    if operation is PREDICT:
        v, out = s["v"], s["o"]

        def add_out() -> None:
            for a, b, c in zip(w, v, out, strict=True):
                torch.add(a, b, alpha=alpha, out=c)

        def foreach_add() -> None:
            torch._foreach_copy_(out, w)
            torch._foreach_add_(out, v, alpha=alpha)

        def public_loop() -> None:
            for a, b, c in zip(w, v, out, strict=True):
                c.copy_(a + alpha * b)

        calls: dict[str, Call] = {
            "torch.add(out=)": add_out,
            "per-tensor SpecTrain loop": public_loop,
        }
        return {**calls, "_foreach": foreach_add} if same else calls
    if operation is PREDICT_:
        v = s["v"]

        def add_() -> None:
            for a, b in zip(w, v, strict=True):
                a.add_(b, alpha=alpha)

        calls = {"Tensor.add_": add_}
        if same:
            calls["_foreach"] = lambda: torch._foreach_add_(w, v, alpha=alpha)
        return calls
    k = s["k"]
    if operation is STASH:

        def copy() -> None:
            for a, b in zip(w, k, strict=True):
                b.copy_(a)

        return {"Tensor.copy_": copy, "_foreach": lambda: torch._foreach_copy_(k, w)}
    if operation is SWAP:

        def three_copies() -> None:
            for a, b in zip(w, k, strict=True):
                c = a.clone()
                a.copy_(b)
                b.copy_(c)

        return {"three copies": three_copies}
    v = s["v"]

    def copy_and_add() -> None:
        for a, b, c in zip(w, k, v, strict=True):
            b.copy_(a)
            a.add_(c, alpha=alpha)

    def foreach_both() -> None:
        torch._foreach_copy_(k, w)
        torch._foreach_add_(w, v, alpha=alpha)

    calls = {"Tensor.copy_, add_": copy_and_add}
    return {**calls, "_foreach": foreach_both} if same else calls


def _optimizer(operation: Operation, s: Streams, kind: str) -> torch.optim.Optimizer:
    """torch's optimizer on these very tensors, past its first step."""
    adam = "u" in operation.letters
    gradients = s["g"] if s["g"][0].dtype == s["w"][0].dtype else s["t"]
    params = []
    for w, g in zip(s["w"], gradients, strict=True):
        p = w.detach().requires_grad_()
        p.grad = g
        params.append(p)
    options: dict[str, Any] = {"fused": kind == "fused", "foreach": kind == "foreach"}
    if not adam:
        opt: torch.optim.Optimizer = torch.optim.SGD(params, LR, momentum=MOMENTUM, **options)
        for p, v in zip(params, s["v"], strict=True):
            opt.state[p]["momentum_buffer"] = v
        return opt
    cuda = s.device != "cpu"
    opt = torch.optim.AdamW(
        params, ADAM_LR, BETAS, EPS, DECAY, capturable=cuda and kind != "for loop", **options
    )
    for p, v, u in zip(params, s["v"], s["u"], strict=True):
        where = s.device if cuda and kind != "for loop" else "cpu"
        step = torch.tensor(float(STEP - 1), device=where)
        opt.state[p].update(step=step, exp_avg=v, exp_avg_sq=u)
    return opt


def _outputs(operation: Operation, s: Streams) -> list[tuple[float, list[Tensor]]]:
    """Horizons and where their predictions go; a stage writes both into its working buffer."""
    letters = "oo" if operation is STAGE else "op"
    return [(STEPS[j], s[letters[j]]) for j in range(operation.predictions)]


def _composition(operation: Operation, s: Streams) -> Call:
    """The fused optimizer, then torch.add(out=) (addcdiv for Adam) per prediction and tensor."""
    step = _optimizer(operation, s, "fused").step
    outputs = _outputs(operation, s)
    w, v, g = s["w"], s["v"], s["g"]
    widened = s["t"] if g[0].dtype != w[0].dtype else None
    adam = "u" in operation.letters
    u = s["u"] if adam else []
    scratch = [torch.empty_like(x) for x in u] if adam and outputs else []

    @torch.no_grad()
    def run() -> None:
        if widened is not None:
            torch._foreach_copy_(widened, g)
        step()
        if adam and outputs:
            rate, root = adam_rates()
            for i, t in enumerate(scratch):
                torch.sqrt(u[i], out=t).mul_(root).add_(EPS)
                for steps, out in outputs:
                    if out[i].dtype == t.dtype:
                        torch.addcdiv(w[i], v[i], t, value=-rate * steps, out=out[i])
                    else:  # addcdiv(out=) does not convert
                        out[i].copy_(torch.addcdiv(w[i], v[i], t, value=-rate * steps))
            return
        for steps, out in outputs:
            for i, o in enumerate(out):
                torch.add(w[i], v[i], alpha=-LR * steps, out=o)

    return run


def adam_rates() -> tuple[float, float]:
    """Of the linear law: what the first moment is multiplied by, and the root of the second."""
    return ADAM_LR / (1.0 - BETAS[0] ** STEP), 1.0 / math.sqrt(1.0 - BETAS[1] ** STEP)


def _foreach_composition(operation: Operation, s: Streams) -> Call:
    """The foreach optimizer, then _foreach operators per prediction."""
    step = _optimizer(operation, s, "foreach").step
    outputs = _outputs(operation, s)
    w, v = s["w"], s["v"]
    u = s["u"] if "u" in operation.letters else []

    @torch.no_grad()
    def run() -> None:
        step()
        if u and outputs:
            rate, root = adam_rates()
            divisor = torch._foreach_sqrt(u)
            torch._foreach_mul_(divisor, root)
            torch._foreach_add_(divisor, EPS)
            for steps, out in outputs:
                torch._foreach_copy_(out, w)
                torch._foreach_addcdiv_(out, v, divisor, value=-rate * steps)
            return
        for steps, out in outputs:
            torch._foreach_copy_(out, w)
            torch._foreach_add_(out, v, alpha=-LR * steps)

    return run


def _public_loop(operation: Operation, s: Streams) -> Call:
    """Tensor by tensor, with temporaries, as public code does it: stash, predict, restore.

    With SGD and two predictions 104 bytes per float32 weight, where 28 are needed.
    """
    step = _optimizer(operation, s, "for loop").step
    outputs = _outputs(operation, s)
    w, v = s["w"], s["v"]
    u = s["u"] if "u" in operation.letters else []
    rate, root = adam_rates()

    @torch.no_grad()
    def run() -> None:
        step()
        for i, weight in enumerate(w):
            kept = weight.clone()
            for steps, out in outputs:
                if u:
                    out[i].copy_(weight - (rate * steps) * v[i] / (u[i].sqrt() * root + EPS))
                else:
                    out[i].copy_(weight - (LR * steps) * v[i])
            weight.copy_(kept)

    return run


def compiled(operation: Operation, sets: Sequence[Streams]) -> tuple[list[Call], float]:
    """The same expressions under torch.compile, once for all sets of tensors of one workload.

    Returns a call for every set, and the seconds that the first call of the first one took.
    """
    # Otherwise the limit on recompilations ends it after a few workloads.
    reset: Callable[[], None] = torch.compiler.reset
    reset()
    # A stage computes between its step and the second prediction: no compiler sees both at once.
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
    with config.patch(force_disable_caches=True):  # what was compiled in an earlier run counts too
        calls[0]()
    return calls, time.perf_counter() - start


def _expression(operation: Operation, horizons: Sequence[float]) -> Any:
    adam = "u" in operation.letters
    rate, root = adam_rates()

    def step(s: dict[str, list[Tensor]]) -> None:
        for i, w in enumerate(s["w"]):
            v, g = s["v"][i], s["g"][i].to(w.dtype)
            outs = [s["op"[j]][i] for j in range(operation.predictions)]
            if adam:
                u = s["u"][i]
                w.mul_(1.0 - ADAM_LR * DECAY)
                v.lerp_(g, 1.0 - BETAS[0])
                u.mul_(BETAS[1]).addcmul_(g, g, value=1.0 - BETAS[1])
                ratio = v / (u.sqrt() * root + EPS)
                w.add_(ratio, alpha=-rate)
                for steps, out in zip(horizons, outs, strict=False):
                    out.copy_(w - rate * steps * ratio)
            else:
                v.mul_(MOMENTUM).add_(g)
                w.add_(v, alpha=-LR)
                for steps, out in zip(horizons, outs, strict=False):
                    out.copy_(w - LR * steps * v)

    def versions(s: dict[str, list[Tensor]]) -> None:
        for i, w in enumerate(s["w"]):
            if operation is SWAP:
                kept = s["k"][i].clone()
                s["k"][i].copy_(w)
                w.copy_(kept)
                continue
            if operation in (STASH, STASH_PREDICT):
                s["k"][i].copy_(w)
            if operation in (PREDICT_, STASH_PREDICT):
                w.add_(s["v"][i], alpha=-LR * horizons[0])
            if operation is PREDICT:
                s["o"][i].copy_(torch.add(w, s["v"][i], alpha=-LR * horizons[0]))

    return step if "g" in operation.letters else versions
