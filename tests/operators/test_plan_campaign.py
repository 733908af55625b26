"""Tests random calls of a plan against float64 arithmetic; nothing else may change."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import spectrain_ext as st
from spectrain_ext.operators.numbers import Adam, Sgd

_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
Lists = dict[str, list[Tensor]]
Expected = dict[str, list[Tensor]]


class _Case:
    """A plan over random tensors, and the expected effects of its calls."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        torch.manual_seed(seed)
        self.adam = self.dice.random() < 0.4
        self.n_groups = self.dice.randint(1, 3)
        n = self.dice.randint(1, 9)
        shapes = [self._shape() for _ in range(n)]
        dtype = self.dice.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
        wide = torch.float32 if dtype == torch.bfloat16 and self.dice.random() < 0.5 else dtype
        self.tolerance = _TOLERANCE[dtype]
        last = dict.fromkeys(range(self.n_groups - 1, -1, -1))
        self.groups = sorted(
            [self.dice.choice([*last]) for _ in range(n - 1)] + [self.n_groups - 1]
        )
        self.groups = self.groups if n >= self.n_groups else [0] * n
        self.n_groups = max(self.groups) + 1
        column = {"params": dtype, "stashed": dtype, "grads": dtype, "out0": dtype, "out1": dtype}
        column |= {"first": wide, "second": wide} if self.adam else {"momentum": wide}
        self.lists: Lists = {k: [self._tensor(s, t) for s in shapes] for k, t in column.items()}
        for u in self.lists.get("second", ()):
            u.abs_()
        names = {"momentum": "momentum_buffers", "first": "exp_avgs", "second": "exp_avg_sqs"}
        self.plan = st.Plan(
            self.lists["params"],
            grads=self.lists["grads"],
            stashed=self.lists["stashed"],
            outs=[self.lists["out0"], self.lists["out1"]],
            groups=self.groups,
            **{names[k]: x for k, x in self.lists.items() if k in names},
        )

    def _shape(self) -> tuple[int, ...]:
        many = self.dice.choice([1, 3, 17, 256, 257, 5000])
        return self.dice.choice([(many,), (many, 2), (), (0, 3), (2, 1, many)])

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        shift = self.dice.randint(0, 3)  # relative to an allocation's alignment
        n = int(torch.tensor(shape, dtype=torch.int64).prod())
        return torch.randn(n + shift).to(dtype)[shift:].view(shape)

    def exact(self, name: str) -> list[Tensor]:
        return [t.double().clone() for t in self.lists[name]]

    def numbers(self) -> list[Sgd] | list[Adam]:
        d = self.dice
        if not self.adam:
            smoothed = d.random() < 0.2
            return [
                Sgd(
                    d.uniform(0, 0.2),
                    d.uniform(0.1, 0.95),
                    0.0 if smoothed else d.choice([0.0, 0.3]),
                    d.choice([0.0, 0.1]),
                    False,
                    d.random() < 0.3,
                    d.random() < 0.5,
                    smoothed,
                )
                for _ in range(self.n_groups)
            ]
        return [
            Adam(
                d.uniform(0, 0.2),
                (d.uniform(0.5, 0.95), d.uniform(0.9, 0.999)),
                10 ** d.uniform(-8, -1),
                d.choice([0.0, 0.1]),
                d.randint(1, 50),
                d.random() < 0.5,
                d.random() < 0.3,
            )
            for _ in range(self.n_groups)
        ]

    def velocity(self, numbers: list[Sgd] | list[Adam]) -> list[Tensor]:
        """Return what one update subtracts from each weight, from the present state: lr*v."""
        if not self.adam:
            return [
                numbers[g].lr * v for g, v in zip(self.groups, self.exact("momentum"), strict=True)
            ]
        moved = []
        for g, m, u in zip(self.groups, self.exact("first"), self.exact("second"), strict=True):
            c = numbers[g]
            assert isinstance(c, Adam)
            m_hat, u_hat = m / (1 - c.betas[0] ** c.step), u / (1 - c.betas[1] ** c.step)
            moved.append(c.lr * m_hat / (u_hat.sqrt() + c.eps))
        return moved

    # The calls: each returns the changed lists as float64

    def predict(self) -> Expected:
        numbers, steps = self.numbers(), self.dice.choice([0, 1, 2.5])
        out = self.dice.choice([None, 0, 1])
        w, moved = self.exact("params"), self.velocity(numbers)
        if out is None:
            self.plan.predict_(numbers, steps=steps)
        else:
            self.plan.predict(numbers, steps=steps, out=out)
        name = "params" if out is None else f"out{out}"
        return {name: [a - steps * b for a, b in zip(w, moved, strict=True)]}

    def stash_predict(self) -> Expected:
        numbers, steps = self.numbers(), self.dice.choice([0, 1, 3])
        w, moved = self.exact("params"), self.velocity(numbers)
        self.plan.stash_predict_(numbers, steps=steps)
        return {"stashed": w, "params": [a - steps * b for a, b in zip(w, moved, strict=True)]}

    def versions(self) -> Expected:
        w, kept = self.exact("params"), self.exact("stashed")
        what = self.dice.choice(["stash", "restore_", "swap_", "write_out"])
        getattr(self.plan, what)()
        changed = {
            "stash": {"stashed": w},
            "restore_": {"params": kept},
            "swap_": {"params": kept, "stashed": w},
            "write_out": {"out0": w},
        }
        return changed[what]

    def extrapolate(self) -> Expected:
        steps, out = self.dice.uniform(0, 3), self.dice.choice([0, 1])
        w, kept = self.exact("params"), self.exact("stashed")
        self.plan.extrapolate(steps=steps, out=out)
        return {f"out{out}": [a + steps * (a - b) for a, b in zip(w, kept, strict=True)]}

    def step(self) -> Expected:
        numbers = self.numbers()
        asked = [self.dice.choice([None, 1.0, 2.0]) for _ in range(2)]
        zero = self.dice.random() < 0.3
        before = {k: self.exact(k) for k in self.lists}
        result: Expected = {k: [] for k in self.lists if k not in ("stashed", "grads")}
        for i, group in enumerate(self.groups):
            w, g = before["params"][i], before["grads"][i]
            c = numbers[group]
            d = -g if c.maximize else g
            keep = 1.0
            if c.decoupled_weight_decay:
                keep = 1 - c.lr * c.weight_decay
            else:
                d = d + c.weight_decay * w
            if isinstance(c, Adam):
                m = c.betas[0] * before["first"][i] + (1 - c.betas[0]) * d
                u = c.betas[1] * before["second"][i] + (1 - c.betas[1]) * d * d
                m_hat, u_hat = m / (1 - c.betas[0] ** c.step), u / (1 - c.betas[1] ** c.step)
                w = keep * w - c.lr * m_hat / (u_hat.sqrt() + c.eps)
                result["first"].append(m)
                result["second"].append(u)
            else:
                v = c.momentum * before["momentum"][i] + c.gain * d
                w = keep * w - c.lr * v
                result["momentum"].append(v)
            result["params"].append(w)
        if self.adam:
            self.plan.adam_step_(numbers, predict=asked, zero_grad=zero)
        else:
            self.plan.sgd_step_(numbers, predict=asked, zero_grad=zero)
        if zero:
            result["grads"] = [torch.zeros_like(g) for g in before["grads"]]
        # A prediction continues from the stored values, with the step's bias corrections.
        moved = self.velocity(numbers)
        for j, steps in enumerate(asked):
            if steps is None:
                del result[f"out{j}"]
                continue
            w = self.exact("params")
            result[f"out{j}"] = [a - steps * b for a, b in zip(w, moved, strict=True)]
        return result

    def refresh(self) -> Expected:
        self.lists["grads"] = [torch.randn_like(g) for g in self.lists["grads"]]
        self.plan.refresh(self.lists["grads"])
        return {}

    def calls(self) -> list[Callable[[], Expected]]:
        return [
            self.predict,
            self.stash_predict,
            self.versions,
            self.extrapolate,
            self.step,
            self.step,
            self.refresh,
        ]


def _check(case: _Case, seed: int, n_calls: int) -> None:
    for number in range(n_calls):
        before = {k: [t.clone() for t in x] for k, x in case.lists.items()}
        call = case.dice.choice(case.calls())
        expected = call()
        where = f"seed {seed}, call {number}: {call.__name__}"
        for name, tensors in case.lists.items():
            if call.__name__ == "refresh" and name == "grads":
                continue
            for i, (now, was) in enumerate(zip(tensors, before[name], strict=True)):
                if name not in expected:
                    assert torch.equal(now, was), f"{where}: {name}[{i}] changed"
                    continue
                exact = expected[name][i]
                size = float(exact.abs().max()) if exact.numel() else 0.0
                bound = case.tolerance * (1.0 + size)
                apart = float((now.double() - exact).abs().max()) if exact.numel() else 0.0
                assert apart <= bound, f"{where}: {name}[{i}] is {apart} from {exact.flatten()[:3]}"
        for tensors in case.lists.values():  # keep numbers in the range of the tolerance
            for t in tensors:
                t.clamp_(-100, 100).nan_to_num_(0.0)
        for u in case.lists.get("second", ()):
            u.clamp_(min=1e-4)


@pytest.mark.parametrize("seed", range(12))
def test_random_calls(seed: int) -> None:
    _check(_Case(seed), seed, 40)


@pytest.mark.nightly
def test_many_random_calls() -> None:
    for seed in range(1000, 4000):
        _check(_Case(seed), seed, 60)
