"""Optimizers from outside the package, as users write them."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch


class ByParameter(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    with torch.no_grad():
                        self.update(p, self.state[p], group)


class Lion(ByParameter):
    """The sign of an interpolated momentum (Chen et al., 2023)."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        average = state.setdefault("exp_avg", torch.zeros_like(p))
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(torch.sign(average * first + p.grad * (1 - first)), alpha=-group["lr"])
        average.lerp_(p.grad, 1 - second)


class ScheduleFree(ByParameter):
    """SGD whose modes change the weights in place (Defazio et al., 2024), by its definition.

    ``p`` is y, at which gradients are taken, in training, and the average x in evaluation.
    """

    def __init__(self, params, lr=0.05, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "train_mode": False})

    @torch.no_grad()
    def _move(self, trains: bool) -> None:
        for group in self.param_groups:
            weight = 1 - group["beta"] if trains else 1 - 1 / group["beta"]
            for p in group["params"]:
                if "z" in self.state[p] and group["train_mode"] != trains:
                    p.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = trains

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert group["train_mode"]
        z = state.setdefault("z", p.clone())
        state["count"] = state.get("count", 0) + 1
        x = p.lerp(z, 1 - 1 / group["beta"])
        z.sub_(p.grad, alpha=group["lr"])
        p.copy_(x.lerp_(z, 1 / state["count"]).lerp_(z, 1 - group["beta"]))


class Replacing(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


class Whitened(ByParameter):
    """State of every kind, as in Shampoo and SOAP: a list with a matrix or None per axis."""

    def __init__(self, params, lr=1e-2, largest=8):
        super().__init__(params, {"lr": lr, "largest": largest})

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            sizes = [n if n <= group["largest"] else None for n in p.shape]
            state["count"] = 0
            state["GG"] = [None if n is None else torch.zeros(n, n, dtype=p.dtype) for n in sizes]
            state["sums"] = {"of.rows": torch.zeros(1), "last": (None, p.new_zeros(()))}
            state["unused"] = None
            state["projected"] = p.new_zeros(2, p.numel() // 2)
        state["count"] += 1
        moved = p.grad
        for axis, gram in enumerate(state["GG"]):
            if gram is not None:
                other = [d for d in range(p.dim()) if d != axis]
                gram.mul_(0.9).add_(torch.tensordot(p.grad, p.grad, [other, other]))
                inverse = torch.linalg.inv(gram + torch.eye(len(gram), dtype=p.dtype))
                moved = torch.movedim(torch.tensordot(inverse, moved, [[1], [axis]]), 0, axis)
        state["sums"]["of.rows"] += float(moved.sum())
        last = state["sums"]["last"][1]
        state["sums"]["last"] = (None, moved.mean() + last / 2)
        even = p.grad.flatten()[: p.numel() // 2 * 2].view(2, -1)
        state["projected"].lerp_(even, 0.5)
        p.add_(moved + last + state["projected"].sum(), alpha=-group["lr"] / state["count"])


class Counting(torch.optim.Optimizer):
    """Its first step adds options to groups; it also has state that belongs to no parameter."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": np.float32(lr), "dtype": torch.float64})
        self.updates = 0

    @torch.no_grad()
    def step(self):
        self.updates += 1
        self.state["total"] = self.state.get("total", 0) + 1
        self.state["mixing"] = torch.full((2, 2), 0.5 ** self.state["total"])
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group.setdefault("scale", torch.ones(1)).mul_(0.9)
            group.setdefault("powers", torch.ones(2, 3).T).mul_(0.5)
            group.setdefault("recent", deque(maxlen=2)).append(torch.tensor(0.1 * group["step"]))
            rate = group["lr"] * np.float32(self.updates) / np.float32(self.state["total"])
            factor = group["scale"].item() + sum(group["recent"]) + group["powers"].sum()
            for p in group["params"]:
                if p.grad is not None:
                    p -= (factor * float(rate) * self.state["mixing"].sum()) * p.grad

    def state_dict(self):
        return super().state_dict() | {"updates": self.updates}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.updates = state_dict["updates"]


class Queued(ByParameter):
    """A group without a learning rate, and state of kinds that torch's classes do not have."""

    def __init__(self, params):
        super().__init__(params, {"decay": 0.01})

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["rule"] = ("sum", "ij->ji")
            state["name"], state["shape"] = "queued", p.shape
            state["dtype"] = torch.float64
            state["rate"] = np.float32(0.01)
            state["gradients"] = deque([torch.zeros_like(p)], maxlen=2)
            state["spectrum"] = torch.zeros_like(p, dtype=torch.complex64)
            state["count"] = torch.zeros((), dtype=torch.int64)
        assert state["name"] == "queued"
        state["count"] += 1
        state["gradients"].append(p.grad.clone())
        state["spectrum"] += 1j * p.grad
        wide = [g.to(state["dtype"]) for g in state["gradients"]]
        moved = sum(wide) / len(wide) + state["spectrum"].imag / state["count"]
        p -= (moved * float(state["rate"])).to(p.dtype).view(state["shape"])


class Projecting(Lion):
    """Its state has an object that a checkpoint cannot hold, as that of GaLore."""

    class Projector:
        pass

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(p, state, group)
        state["projector"] = self.Projector()


class Together(torch.optim.Optimizer):
    """Several optimizers as one, with their groups and one state."""

    def __init__(self, *parts):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {"lr": 0.0})
        self._share()

    def _share(self):
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def __setstate__(self, state):
        super().__setstate__(state)
        self._share()

    def step(self):
        for part in self.parts:
            part.step()


class Bare(torch.optim.Optimizer):
    """Two optimizers in a class that shares only its name with torch's."""

    def __init__(self, params):
        self.first = torch.optim.SGD(params[:1], lr=0.05, momentum=0.9)
        self.second = torch.optim.RMSprop(params[1:], lr=0.01)

    @property
    def param_groups(self):
        return self.first.param_groups + self.second.param_groups

    def step(self):
        self.first.step()
        self.second.step()


def muon_and_adamw(params):
    matrices = [p for p in params if p.dim() == 2]
    others = [p for p in params if p.dim() != 2]
    parts = [torch.optim.Muon(matrices, lr=0.02)] if matrices else []
    if others:
        parts.append(torch.optim.AdamW(others, lr=0.01, weight_decay=0.1))
    return Together(*parts)


def adafactor(params):
    """Return an optimizer whose groups have ``lr=None``, as it computes its rates."""
    return pytest.importorskip("transformers").Adafactor(params)


FOREIGN = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
    "Lion": lambda p: Lion(p, lr=0.003, weight_decay=0.01),
    "ScheduleFree": ScheduleFree,
    "Replacing": lambda p: Replacing(p, lr=0.05),
    "Whitened": lambda p: Whitened(p, lr=0.02),
    "Muon": muon_and_adamw,
}

PECULIAR = {"Counting": Counting, "Queued": Queued, "relative steps": adafactor}
