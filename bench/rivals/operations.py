"""The measured operators, and the minimum bytes of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from spectrain_ext import operators
from spectrain_ext.operators.plan import Plan

from .workloads import Streams, Workload, dtype_of

Call = Callable[[], object]
LR, MOMENTUM, STEPS, EPS = 0.05, 0.9, (3.0, 1.0), 1e-8
ADAM_LR, BETAS, DECAY, STEP = 1e-4, (0.9, 0.999), 0.01, 100
#: This package's implementations; the others are rivals.
OURS = ("operator", "Plan")


@dataclass(frozen=True)
class Operation:
    """An operator with the streams that it must read and write (letters of `Streams`)."""

    name: str
    reads: str
    writes: str
    predictions: int = 0

    @property
    def letters(self) -> str:
        return "".join(sorted(set(self.reads + self.writes)))

    @property
    def steps(self) -> bool:
        """Whether it includes an optimizer's step."""
        return "g" in self.reads

    @property
    def lion(self) -> bool:
        return self.name.startswith("Lion")

    @property
    def adam(self) -> bool:
        return "u" in self.reads

    def bytes_moved(self, work: Workload) -> int:
        """Return the minimum bytes: every input read once, every output written once."""
        return work.elements * self.bytes_per_element(work)

    def bytes_per_element(self, work: Workload) -> int:
        """Return the minimum bytes per weight."""
        return sum(dtype_of(work, letter).itemsize for letter in self.reads + self.writes)


PREDICT_ = Operation("predict_", "wv", "w", 1)
PREDICT = Operation("predict", "wv", "o", 1)
STASH = Operation("stash", "w", "k")
SWAP = Operation("swap_", "wk", "wk")
STASH_PREDICT = Operation("stash_predict_", "wv", "wk", 1)
SGD = Operation("SGD step", "wvg", "wv")
SGD_1 = Operation("SGD step + 1 prediction", "wvg", "wvo", 1)
SGD_2 = Operation("SGD step + 2 predictions", "wvg", "wvop", 2)
ADAMW = Operation("AdamW step", "wvug", "wvu")
ADAMW_1 = Operation("AdamW step + 1 prediction", "wvug", "wvuo", 1)
ADAMW_2 = Operation("AdamW step + 2 predictions", "wvug", "wvuop", 2)
LION_2 = Operation("Lion step + 2 predictions", "wvg", "wvop", 2)
#: A step that writes the forward's prediction into the working buffer, followed by the backward's
#: prediction into the same buffer.
STAGE = Operation("pipeline stage, one minibatch", "wvgwv", "wvoo", 2)

_IN_PLACE = (PREDICT_, STASH, SWAP, STASH_PREDICT)
OPERATIONS = [PREDICT_, PREDICT, STASH, SWAP, STASH_PREDICT, SGD, SGD_1, SGD_2]
OPERATIONS += [ADAMW, ADAMW_1, ADAMW_2, LION_2, STAGE]


def applies(operation: Operation, work: Workload) -> bool:
    """Return whether to measure it: in-place forms are equivalent in `mixed` and `fp32`."""
    if work.precision.name.endswith("-16"):
        return operation.steps and operation is not STAGE
    return work.precision.name != "mixed" or operation not in _IN_PLACE


def ours(operation: Operation, s: Streams) -> dict[str, Call]:
    """Return the module-level operator and the plan on the tensors of `s`."""
    letters, adam, lion = operation.letters, operation.adam, operation.lion
    w, ahead = s["w"], STEPS[: operation.predictions]
    plan = Plan(
        w,
        momentum_buffers=s["v"] if "v" in letters and not (adam or lion) else None,
        exp_avgs=s["v"] if adam or lion else None,
        exp_avg_sqs=s["u"] if adam else None,
        grads=s["g"] if operation.steps else None,
        stashed=s["k"] if "k" in letters else None,
        outs=[s[letter] for letter in "op" if letter in letters],
    )
    if operation is STAGE:
        return {"Plan": lambda: _stage(plan)}
    if operation.steps:
        g, v = s["g"], s["v"]
        pairs = [(steps, s[o]) for steps, o in zip(ahead, "op", strict=False)]
        if lion:
            return {
                "operator": lambda: operators.lion_step_(w, g, v, lr=ADAM_LR, predict=pairs),
                "Plan": lambda: plan.lion_step_(lr=ADAM_LR, predict=ahead),
            }
        if not adam:
            return {
                "operator": lambda: operators.sgd_step_(
                    w, g, v, lr=LR, momentum=MOMENTUM, predict=pairs
                ),
                "Plan": lambda: plan.sgd_step_(lr=LR, momentum=MOMENTUM, predict=ahead),
            }
        u = s["u"]
        options: dict[str, Any] = {"lr": ADAM_LR, "step": STEP, "betas": BETAS, "eps": EPS}
        options |= {"weight_decay": DECAY, "decoupled_weight_decay": True}
        return {
            "operator": lambda: operators.adam_step_(w, g, v, u, **options, predict=pairs),
            "Plan": lambda: plan.adam_step_(**options, predict=ahead),
        }
    function, method = getattr(operators, operation.name), getattr(plan, operation.name)
    lists = [s[letter] for letter in "wkv" if letter in letters]
    if not ahead:
        return {"operator": lambda: function(*lists), "Plan": method}
    steps, out = STEPS[0], {"out": s["o"]} if operation is PREDICT else {}
    return {
        "operator": lambda: function(*lists, lr=LR, steps=steps, **out),
        "Plan": lambda: method(lr=LR, steps=steps),
    }


def _stage(plan: Plan) -> None:
    plan.sgd_step_(lr=LR, momentum=MOMENTUM, predict=STEPS[:1])
    plan.predict(lr=LR, steps=STEPS[1])


def host_calls(device: str = "cpu", count: int = 300) -> dict[str, Call]:
    """Return a plan's calls on empty tensors, and the refresh of its gradients."""
    s = Streams(Workload("empty", ((0,),) * count), device)
    params = [torch.zeros(4, device=device, requires_grad=True) for _ in range(count)]
    for p in params:
        p.grad = torch.zeros_like(p)
    trained = Plan(params, momentum_buffers=[torch.zeros_like(p) for p in params])
    calls = {op.name: ours(op, s)["Plan"] for op in (PREDICT, SGD_1, ADAMW_1)}
    return {**calls, "refresh": trained.refresh}
