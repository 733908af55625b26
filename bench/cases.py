"""What is measured: operators and rivals on the same tensors, and the bytes they have to move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import spectrain_ext as st

LR, STEPS, MOMENTUM = 0.05, 3.0, 0.9
Call = Callable[[], object]


@dataclass(frozen=True)
class Workload:
    """A list of tensors: how many, of how many elements, of which types."""

    name: str
    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    momentum_dtype: torch.dtype = torch.float32

    @property
    def elements(self) -> int:
        """Elements of one stream."""
        return sum(self.sizes)


def uneven(count: int, mean: int) -> tuple[int, ...]:
    """Sizes like a network's: most tensors small, a few large; about count * mean in all."""
    small = max(1, mean // 16)
    large = (count * mean - (count - count // 4) * small) // max(1, count // 4)
    return tuple(large if i % 4 == 0 else small for i in range(count // 4 * 4)) + (small,) * (
        count % 4
    )


WORKLOADS = [
    Workload("1 x 16M", (2**24,)),
    Workload("10 x 1M", (2**20,) * 10),
    Workload("300 x 32k uneven", uneven(300, 2**15)),
    Workload("300 x 256", (256,) * 300),
]
SIXTEEN_BIT = Workload("10 x 1M bf16, fp32 momentum", (2**20,) * 10, torch.bfloat16)


@dataclass
class Streams:
    """The lists that the operators work on."""

    w: list[Tensor]
    v: list[Tensor]
    g: list[Tensor]
    kept: list[Tensor]
    out0: list[Tensor]
    out1: list[Tensor]
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of everything."""
        lists = (self.w, self.v, self.g, self.kept, self.out0, self.out1)
        return sum(t.nbytes for ts in lists for t in ts)


def build(work: Workload, device: str = "cpu", *, flat: bool = False) -> Streams:
    """Fresh random tensors; ``flat``: every list is views of one buffer, as a pipeline's are."""

    def stream(dtype: torch.dtype, scale: float) -> list[Tensor]:
        if flat:
            buffer = torch.randn(work.elements, device=device).mul_(scale).to(dtype)
            return list(buffer.split(list(work.sizes)))
        return [torch.randn(n, device=device).mul_(scale).to(dtype) for n in work.sizes]

    d, m = work.dtype, work.momentum_dtype
    return Streams(
        stream(d, 1.0),
        stream(m, 1e-3),
        stream(d, 1e-3),
        stream(d, 1.0),
        stream(d, 1.0),
        stream(d, 1.0),
    )


#: Operator -> (streams read, streams written), w for a weight-sized stream and v for a momentum-
#: sized one.
TRAFFIC = {
    "predict": ("wv", "w"),
    "predict_": ("wv", "w"),
    "stash": ("w", "w"),
    "swap_": ("ww", "ww"),
    "stash_predict_": ("wv", "ww"),
    "sgd_step_": ("wwv", "wv"),
    "sgd_step_ + 2 predictions": ("wwv", "wvww"),
}


def bytes_moved(operator: str, work: Workload) -> int:
    """The fewest bytes the operator can move: every input read once, every output written once."""
    sizes = {"w": work.dtype.itemsize, "v": work.momentum_dtype.itemsize}
    reads, writes = TRAFFIC[operator]
    return work.elements * sum(sizes[s] for s in reads + writes)


def _ours(operator: str, s: Streams) -> dict[str, Call]:
    plan = st.Plan(s.w, momentum_buffers=s.v, grads=s.g, stashed=s.kept, outs=[s.out0, s.out1])
    sgd = {"lr": LR, "momentum": MOMENTUM}
    both = [(STEPS, s.out0), (1.0, s.out1)]
    table: dict[str, tuple[Call, Call]] = {
        "predict": (
            lambda: st.predict(s.w, s.v, lr=LR, steps=STEPS, out=s.out0),
            lambda: plan.predict(lr=LR, steps=STEPS),
        ),
        "predict_": (
            lambda: st.predict_(s.w, s.v, lr=LR, steps=STEPS),
            lambda: plan.predict_(lr=LR, steps=STEPS),
        ),
        "stash": (lambda: st.stash(s.w, s.kept), plan.stash),
        "swap_": (lambda: st.swap_(s.w, s.kept), plan.swap_),
        "stash_predict_": (
            lambda: st.stash_predict_(s.w, s.kept, s.v, lr=LR, steps=STEPS),
            lambda: plan.stash_predict_(lr=LR, steps=STEPS),
        ),
        "sgd_step_": (
            lambda: st.sgd_step_(s.w, s.g, s.v, **sgd),
            lambda: plan.sgd_step_(**sgd),
        ),
        "sgd_step_ + 2 predictions": (
            lambda: st.sgd_step_(s.w, s.g, s.v, predict=both, **sgd),
            lambda: plan.sgd_step_(predict=[STEPS, 1.0], **sgd),
        ),
    }
    operator_call, plan_call = table[operator]
    return {"operator": operator_call, "Plan": plan_call}


def _optimizer(s: Streams, kind: str) -> torch.optim.SGD:
    """torch.optim.SGD on these very tensors, past its first step."""
    params = []
    for w, g in zip(s.w, s.g, strict=True):
        p = w.detach().requires_grad_()
        p.grad = g
        params.append(p)
    opt = torch.optim.SGD(
        params, lr=LR, momentum=MOMENTUM, fused=kind == "fused", foreach=kind == "foreach"
    )
    for p, v in zip(params, s.v, strict=True):
        opt.state[p]["momentum_buffer"] = v
    return opt


def _rivals(operator: str, s: Streams) -> dict[str, Call]:
    """What torch offers uncompiled: a loop over tensors, _foreach operators, fused optimizers."""
    alpha = -LR * STEPS

    def loop_predict() -> None:
        for w, v, o in zip(s.w, s.v, s.out0, strict=True):
            torch.add(w, v, alpha=alpha, out=o)

    def loop_predict_() -> None:
        for w, v in zip(s.w, s.v, strict=True):
            w.add_(v, alpha=alpha)

    def loop_copy() -> None:
        for w, k in zip(s.w, s.kept, strict=True):
            k.copy_(w)

    def foreach_predict(out: list[Tensor], steps: float = STEPS) -> None:
        torch._foreach_copy_(out, s.w)
        torch._foreach_add_(out, s.v, alpha=-LR * steps)

    def foreach_stash_predict() -> None:
        torch._foreach_copy_(s.kept, s.w)
        torch._foreach_add_(s.w, s.v, alpha=alpha)

    def loop_swap() -> None:
        for a, b in zip(s.w, s.kept, strict=True):
            t = a.clone()
            a.copy_(b)
            b.copy_(t)

    mixed = s.w[0].dtype != s.v[0].dtype
    if operator == "predict":
        calls: dict[str, Call] = {"torch.add(out=)": loop_predict}
        return calls if mixed else {**calls, "_foreach": lambda: foreach_predict(s.out0)}
    if operator == "predict_":
        calls = {"Tensor.add_": loop_predict_}
        if not mixed:
            calls["_foreach"] = lambda: torch._foreach_add_(s.w, s.v, alpha=alpha)
        return calls
    if operator == "stash":
        return {"Tensor.copy_": loop_copy, "_foreach": lambda: torch._foreach_copy_(s.kept, s.w)}
    if operator == "swap_":
        return {"three copies": loop_swap}
    if operator == "stash_predict_":
        return {} if mixed else {"_foreach": foreach_stash_predict}
    if mixed:
        return {}
    kinds = ["fused", "foreach", "for loop"]
    optimizers = {kind: _optimizer(s, kind) for kind in kinds}
    if operator == "sgd_step_":
        return {f"optim.SGD {kind}": opt.step for kind, opt in optimizers.items()}

    def step_and_predict(opt: torch.optim.SGD) -> None:
        opt.step()
        with torch.no_grad():
            foreach_predict(s.out0)
            foreach_predict(s.out1, 1.0)

    return {
        f"optim.SGD {kind} + _foreach": (lambda opt=opt: step_and_predict(opt))  # type: ignore[misc]
        for kind, opt in optimizers.items()
        if kind != "for loop"
    }


def implementations(operator: str, s: Streams) -> dict[str, Call]:
    """Name -> call, ours first. All work on the tensors of ``s``."""
    return {**_ours(operator, s), **_rivals(operator, s)}


def copies(elements: int, device: str = "cpu") -> dict[str, Call]:
    """Plain copies that move 8 bytes an element in all; the fastest of them is the ceiling."""
    a = torch.randn(elements, device=device)
    b = torch.empty_like(a)
    half = elements // 2
    plan = st.Plan(b, stashed=a)
    calls: dict[str, Call] = {
        "Tensor.copy_": lambda: b.copy_(a),
        "Tensor.copy_ of two halves": lambda: torch._foreach_copy_(
            [b[:half], b[half:]], [a[:half], a[half:]]
        ),
        "Plan.restore_": plan.restore_,
    }
    if device == "cpu":
        source, target = a.numpy(), b.numpy()

        def numpy_copy() -> None:
            target[...] = source

        calls["numpy"] = numpy_copy
    return calls
