"""One row per operator: its function, its lists, which of them it writes, and good options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import spectrain_ext as st

SHAPE = (4, 3)
COUNT = 5  # tensors per list
Lists = dict[str, Any]


@dataclass(frozen=True)
class Op:
    """An operator, or the constructor of a plan; "!" marks lists that are written."""

    name: str
    function: Callable[..., Any]
    arguments: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def lists(self) -> list[str]:
        return self.arguments.replace("!", "").split()

    @property
    def written(self) -> list[str]:
        return [name.rstrip("!") for name in self.arguments.split() if name.endswith("!")]

    def build(self) -> Lists:
        """Return a good argument for every list: any numbers would do, these suit Adam's too."""
        return {name: [torch.rand(SHAPE) for _ in range(COUNT)] for name in self.lists}

    def __call__(self, lists: Lists, **changes: Any) -> Any:
        """Call it; a step predicts 1 update ahead into "predict0", and `steps` into "predict1"."""
        given = {name: value for name, value in lists.items() if not name.startswith("predict")}
        options = {**self.options, **changes}
        if self.function is st.Plan:
            options["outs"] = [lists["predict0"], lists["predict1"]]
        elif "predict1" in lists:
            second = (options.pop("steps", 2.0), lists["predict1"])
            options.setdefault("predict", [(1.0, lists["predict0"]), second])
        return self.function(**{**given, **options})


_AHEAD = {"lr": 0.1, "steps": 2.0}
_SGD = "params! grads momentum_buffers! predict0! predict1!"
_ADAM = "params! grads exp_avgs! exp_avg_sqs! predict0! predict1!"
_LION = "params! grads exp_avgs! predict0! predict1!"
OPS = [
    Op("predict_", st.predict_, "params! momentum_buffers", _AHEAD),
    Op("predict", st.predict, "params momentum_buffers out!", _AHEAD),
    Op("stash", st.stash, "params out!"),
    Op("restore_", st.restore_, "params! stashed"),
    Op("swap_", st.swap_, "a! b!"),
    Op("stash_predict_", st.stash_predict_, "params! stashed! momentum_buffers", _AHEAD),
    Op("sgd_step_", st.sgd_step_, _SGD, {"lr": 0.1, "momentum": 0.9}),
    Op("adam_step_", st.adam_step_, _ADAM, {"lr": 0.1, "step": 3}),
    Op("adam_predict", st.adam_predict, "params exp_avgs exp_avg_sqs out!", {**_AHEAD, "step": 3}),
    Op("lion_step_", st.lion_step_, _LION, {"lr": 0.1}),
    Op("lion_predict", st.lion_predict, "params exp_avgs out!", _AHEAD),
    Op("extrapolate", st.extrapolate, "params previous out!", {"steps": 2.0}),
]
#: Constructors: a plan takes its lists once, and rejects what an operator rejects.
PLANS = [
    Op("Plan", st.Plan, f"{_SGD} stashed!"),
    Op("Plan of Adam", st.Plan, f"{_ADAM} stashed!"),
    Op("Plan of Lion", st.Plan, f"{_LION} stashed!"),
]
BY_NAME = {op.name: op for op in [*OPS, *PLANS]}


def alone(lists: Lists) -> Lists:
    """Return the first tensor of every list."""
    return {name: tensors[0] for name, tensors in lists.items()}
