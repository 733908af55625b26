"""Tests the steps, state and predictions of SGD, Adam, AdamW and NAdam against torch in float64.

Each case has its own options, dtypes and places of weights, and goes through a list of events. The
definition starts each step from the values that our optimizer has stored, so that the next ones may
differ by one rounding only. torch's own 16-bit steps round after every operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from helpers.covering import Axes, Row, neighbours, walks
from helpers.optim_cases import (
    BF16,
    F16,
    F32,
    F64,
    assert_bits,
    bits,
    buffers_for,
    flat_views,
    law_of,
    make_params,
)
from oracle.laws import predict, rows_of
from oracle.sgd import AveragingSGD
from torch import Tensor, nn

import spectrain_ext as st

Geometric, Linear, SecondOrder = st.laws.Geometric, st.laws.Linear, st.laws.SecondOrder
BOUND = ("in place", "master", "wide master")
SHARED: dict[str, Any] = {
    "state": (None, F32, BF16),  # dtype of momenta
    "home": ("its own", *BOUND),
    "maximize": (False, True),
    "weight_decay": (0.0, 0.05),
    "decoupled_weight_decay": (False, True),
}
SGD = {
    **SHARED,
    "name": ("SGD",),
    "dtype": (F64, F32, BF16, F16, "mixed"),
    "momentum": (0.9, 0.0),
    "dampening": (0.0, 0.3),
    "nesterov": (False, True),
    "smoothed": (False, True),
}
ADAM = {
    **SHARED,
    "name": ("Adam", "AdamW", "NAdam"),
    "dtype": (F64, F32, BF16, F16),
    "betas": ((0.9, 0.999), (0.0, 0.5)),
    "eps": (1e-8, 1e-3),
    "momentum_decay": (4e-3, 0.1),
    "capturable": (False, True),  # of ours: torch's has it on GPUs alone
    "default": (F32, F64),  # dtype of torch's step counts
}
EXCLUDED: list[dict[str, Any]] = [
    {"state": [F32], "dtype": [F64, F32, "mixed"]},
    {"state": [BF16], "dtype": [F64, F16, "mixed"]},
    {"home": ["wide master"], "dtype": [F64, F32, "mixed"]},
    {"home": BOUND, "state": [F32]},  # buffers have the dtype of the weights
    {"home": BOUND, "dtype": ["mixed"]},
]
CASES = (
    Axes(
        SGD,
        [
            *EXCLUDED,
            {"momentum": [0.0], "nesterov": [True]},
            {"momentum": [0.0], "smoothed": [True]},
            {"momentum": [0.0], "dampening": [0.3]},  # of the second group it becomes 0
            {"dampening": [0.3], "nesterov": [True]},
            {"dampening": [0.3], "smoothed": [True]},
            {"dampening": [0.3], "decoupled_weight_decay": [True]},  # not in the oracle
        ],
    ).covering()
    + Axes(
        ADAM,
        [
            *EXCLUDED,
            # Their second moments would be 0.
            {"dtype": [F16], "home": ["in place", "master"]},
            {"dtype": [F16], "home": ["its own"], "state": [None]},
            {"name": ["Adam", "AdamW"], "momentum_decay": [0.1]},
            {"name": ["NAdam"], "capturable": [True]},
            {"momentum_decay": [0.1], "capturable": [True]},
            {"name": ["AdamW"], "decoupled_weight_decay": [False]},
        ],
    ).covering()
)
STATES = ("replaced", "rebound", "in place", "deleted", "cleared", "count", "count in place")
PRECISION = {F64: 1e-13, F32: 1e-6, BF16: 1e-6, F16: 1e-6}  # of the arithmetic
NOT_OPTIONS = ("name", "dtype", "state", "home", "default")
# What the second parameter group has instead.
SECOND = {
    "SGD": {"lr": 0.2, "weight_decay": 0.1, "momentum": 0.8},
    "Adam": {"lr": 0.05, "weight_decay": 0.1, "betas": (0.5, 0.9), "eps": 1e-4},
}
LAWS = 0, 1, 2.5, Linear(3), Geometric(2), SecondOrder(2, 1)


class How(NamedTuple):
    """How a step is made."""

    none: tuple[int, ...] = ()  # parameters without a gradient
    strange: bool = False  # gradients of other layouts
    under: str = "cpu"  # torch's default device


class Life:
    """One of our optimizers, and torch's in float64 with the same events."""

    def __init__(self, case: Row, first_law: int, device: str) -> None:
        self.case, self.made, self.bound = case, 2 * first_law, case["home"] != "its own"
        mixed = (F64, F32, BF16, F16, F32, BF16)
        dtypes = mixed if case["dtype"] == "mixed" else (case["dtype"],) * 6
        rows = zip(make_params(F64, device), dtypes, strict=True)
        self.params = [nn.Parameter(p.detach().to(dtype)) for p, dtype in rows]
        self.of = {p: nn.Parameter(doubled(p)) for p in self.params}
        name, options = case["name"], {k: v for k, v in case.items() if k not in NOT_OPTIONS}
        self.is_extra = name == "SGD" and (options["smoothed"] or options["decoupled_weight_decay"])
        self.negates = self.is_extra and options["maximize"]
        kind = AveragingSGD if self.is_extra else getattr(torch.optim, name)
        second = {**options, **SECOND["SGD" if name == "SGD" else "Adam"]}
        groups = [{"params": self.params[:2], **options}, {"params": self.params[2:5], **second}]
        self.definition = kind([self.twins_of(group) for group in groups], lr=0.05)
        own = getattr(st.optim, name)
        self.optimizer = own(groups, lr=0.05, state_dtype=case["state"])
        self.later = {"params": self.params[5:], **options, "lr": 0.01}
        self.master: dict[Tensor, Tensor] | None = None
        if self.bound:
            self.add_group()
            self.bind()

    def twins_of(self, group: Row) -> Row:
        twins = {**group, "params": [self.of[p] for p in group["params"]], "foreach": False}
        return {key: value for key, value in twins.items() if key != "capturable"}

    def bind(self) -> None:
        wide = F32 if self.case["home"] == "wide master" else None
        if self.case["home"] != "in place":
            self.master = flat_views(self.params, wide, filled=True)
        self.buffers = buffers_for(self.optimizer, self.case["state"] or wide)
        self.outs = flat_views(self.params)
        self.optimizer.stepper.bind(self.master, self.buffers)

    @property
    def now(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def weight(self, p: Tensor) -> Tensor:
        return (p if self.master is None else self.master[p]).detach()

    # Events.

    def add_group(self) -> None:
        if len(self.optimizer.param_groups) == 2:
            self.optimizer.add_param_group(dict(self.later))
            self.definition.add_param_group(self.twins_of(self.later))

    def set(self, group: int, **options: Any) -> None:
        for optimizer in (self.optimizer, self.definition):
            optimizer.param_groups[group].update(options)

    def change_in_place(self, rate: Tensor) -> None:
        """Change a learning rate and a decay that stay the same objects for the optimizers."""
        group = self.optimizer.param_groups[1]
        if not isinstance(group["lr"], Tensor):
            self.set(1, lr=rate.clone())
        group["lr"].copy_(rate)
        if "betas" in group:
            betas = group["betas"] if isinstance(group["betas"], list) else [0.5, 0.9]
            betas[1] = 0.8 + rate.item()
            self.set(1, betas=betas)

    def move(self) -> None:
        for p in self.now:
            p.data = p.data.clone()

    def cast(self, dtype: torch.dtype) -> None:
        """As ``module.to``, which changes the parameters and not the state."""
        for p in self.now:
            p.data = p.data.to(dtype)
            twin = self.of[p]
            twin.data = doubled(p)
            for key, buffer in self.entry(p).items():
                if key in self.optimizer.stepper.buffer_keys:
                    keeps = dtype == buffer.dtype or (buffer.dtype == F32 and dtype.itemsize == 2)
                    keeps = keeps or (buffer.dtype == BF16 and dtype == F32)
                    wanted = self.case["state"] if dtype.itemsize == 2 else None
                    settled = buffer.to(buffer.dtype if keeps else wanted or dtype)
                    self.definition.state[twin][key] = doubled(settled)

    def exchange(self) -> None:
        """The caller replaces a parameter by a new one, which has no state."""
        group = self.optimizer.param_groups[0]["params"]
        new = nn.Parameter(group[0].detach().clone())
        self.of[new] = nn.Parameter(doubled(new))
        group[0] = new
        self.definition.param_groups[0]["params"][0] = self.of[new]

    def entry(self, p: Tensor) -> dict[str, Any]:
        return self.optimizer.state.get(p) or {}

    def change_state(self, how: str) -> None:
        """The caller changes a parameter's state."""
        p = self.now[3]
        entry, twin = self.entry(p), self.definition.state.get(self.of[p]) or {}
        buffers = [key for key in self.optimizer.stepper.buffer_keys if key in entry]
        if how == "cleared":
            entry.clear()
            twin.clear()
        elif how == "deleted":
            self.optimizer.state.pop(p, None)
            self.definition.state.pop(self.of[p], None)
        elif how == "count" and "step" in entry:
            entry["step"], twin["step"] = 17, torch.tensor(17.0, dtype=twin["step"].dtype)
        elif how == "count in place" and "step" in entry:
            entry["step"].fill_(5.0)
            twin["step"].fill_(5.0)
        for key in buffers if how in ("replaced", "rebound", "in place") else ():
            value = torch.rand_like(entry[key])
            twin[key] = doubled(value)
            if how == "replaced":
                entry[key] = other_layout(value)
            elif how == "rebound" and not self.bound:
                entry[key].data = value.clone(memory_format=torch.preserve_format)
            else:
                entry[key].copy_(value)

    # A step and its check.

    def next_law(self) -> Any:
        """Return the next law that can be predicted by; None if no prediction is possible."""
        law: Any = LAWS[self.made // 2 % len(LAWS)]  # twice, so that calls may be reused
        self.made += 1
        if not all(group.get("momentum", 1.0) for group in self.optimizer.param_groups):
            return None
        # The second-order law gets the last change of a momentum from its new, rounded value.
        wide = self.case["dtype"] in (F64, F32) or self.case["home"] == "wide master"
        wide = wide and self.case["state"] != BF16
        if isinstance(law, SecondOrder) and not (
            self.bound and wide and self.case.get("betas", (0.9,))[0]
        ):
            return Linear(law.delay + law.lead)
        return law

    def step(self, how: How) -> None:
        now, optimizer, law = self.now, self.optimizer, self.next_law()
        self.give_gradients(how)
        given, before = [p.grad for p in now], rows_of(self.definition, [self.of[p] for p in now])
        kept, weights = [None if g is None else g.clone() for g in given], bits(now)
        versions = [p._version for p in now]
        with torch.device(how.under):
            if self.bound:
                optimizer.stepper.step(write=(self.outs, law_of(law or 0)))
            else:
                optimizer.step()
        for p, g, old in zip(now, given, kept, strict=True):
            assert p.grad is g
            assert g is None or torch.equal(g, old)
        if self.master is not None:
            assert_bits(now, weights)
        moved = [p._version > version for p, version in zip(now, versions, strict=True)]
        assert moved == [g is not None and not self.bound for g in given]
        self.definition.step()
        self.check()
        self.check_predictions(law, before)

    def give_gradients(self, how: How) -> None:
        for i, p in enumerate(self.now):
            grad = torch.randn_like(p) * 0.3
            if how.strange and p.dim():
                grad = torch._neg_view(grad) if i % 2 else other_layout(grad)
            p.grad = grad
            self.of[p].grad = -grad.double() if self.negates else grad.double()
            if i in how.none:
                p.grad = self.of[p].grad = None

    def check(self) -> None:
        """Compare with the definition, and let it go on from the stored values."""
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                twin, weight = self.of[p], self.weight(p)
                close(weight, twin, PRECISION[weight.dtype], least=0.1)
                twin.data = doubled(weight)
                if group.get("momentum") != 0.0 or type(self.definition) is torch.optim.SGD:
                    self.check_state(p, self.definition.state.get(twin) or {})

    def check_state(self, p: Tensor, theirs: dict[str, Any]) -> None:
        entry, precision = self.entry(p), PRECISION[self.weight(p).dtype]
        assert list(entry) == list(theirs)
        for key, value in entry.items():
            if key in self.optimizer.stepper.buffer_keys:
                assert value.stride() == p.stride()
                assert not self.bound or value is self.buffers[key][p]
                second = key == "exp_avg_sq"  # in bfloat16 rounded up or down
                close(
                    value, theirs[key], precision, least=0.0 if second else 0.1, nearest=not second
                )
                theirs[key] = doubled(value)
            else:
                at = p.device if self.case.get("capturable") else torch.device("cpu")
                assert value.device == at
                assert value.dtype == theirs[key].dtype
                assert torch.equal(value, theirs[key].cpu())

    def check_predictions(self, law: Any, before: Any) -> None:
        now, optimizer = self.now, self.optimizer
        kept, versions = bits(now), [p._version for p in now]
        if law is None and not self.bound:
            with pytest.raises(ValueError, match="momentum 0"):
                optimizer.predict_(0)
        elif not self.bound:
            with optimizer.predicted(law):
                found = bits(now)
            assert_bits(now, kept)
            self.check_predicted(law, before, found)
        else:
            found = [self.outs[p].clone() for p in now]
            if not isinstance(law, SecondOrder):
                for view in self.outs.values():
                    view.fill_(7)
                optimizer.stepper.predict(self.outs, law_of(law or 0))
                assert_bits([self.outs[p] for p in now], found)
            assert [p._version for p in now] == versions
            self.check_predicted(law or 0, before, found)

    def check_predicted(self, law: Any, before: Any, found: list[Tensor]) -> None:
        rows = rows_of(self.definition, [self.of[p] for p in self.now])
        every = continued(law, before, rows)
        for i, (p, value) in enumerate(zip(self.now, found, strict=True)):
            expected = every[i]
            assert value.dtype == p.dtype
            precision = 10 * PRECISION[self.weight(p).dtype]
            # mu_product is in float32
            close(value, expected, 1e-5 if "mu_product" in rows[i].state else precision, least=0.1)
            if torch.equal(expected, self.of[p]):
                assert torch.equal(value, self.weight(p).to(p.dtype))


def doubled(tensor: Tensor) -> Tensor:
    return tensor.detach().to(F64, copy=True)


def continued(law: Any, before: Any, rows: Any) -> list[Tensor]:
    """Return the definition's predictions; of a fraction of updates, between two whole ones."""
    versions = [before, rows]
    if isinstance(law, Geometric):
        return predict("geometric", versions, 1, int(law.steps))
    if isinstance(law, SecondOrder):
        return predict("second-order", versions, 1, int(law.delay), int(law.lead))
    steps = law.steps if isinstance(law, Linear) else law
    low = math.floor(steps)
    least = predict("linear", versions, 1, low)
    most = least if low == steps else predict("linear", versions, 1, low + 1)
    return [a + (steps - low) * (b - a) for a, b in zip(least, most, strict=True)]


def other_layout(tensor: Tensor) -> Tensor:
    return tensor.flatten().repeat_interleave(2)[::2].view(tensor.shape)


def close(
    value: Tensor, exact: Tensor, arithmetic: float, least: float = 0.0, nearest: bool = True
) -> None:
    """Assert that a value is the exact one, rounded once after arithmetic of some precision.

    Terms as large as the largest value, or as `least`, may have cancelled.
    """
    info, exact = torch.finfo(value.dtype), exact.detach()
    size = max(least, float(exact.abs().max()) if exact.numel() else 0.0)
    ulp = info.eps / 2 if nearest or value.dtype != BF16 else info.eps
    rtol, atol = ulp + 10 * arithmetic, info.tiny * info.eps + size * arithmetic
    assert torch.allclose(value.detach().double(), exact, rtol=rtol, atol=atol)


EVENTS: dict[str, Callable[[Life], How | None]] = {
    "step": lambda life: None,
    "some have no gradient": lambda life: How(none=(0, 3)),
    "others have none": lambda life: How(none=(1, 2, 5)),
    "none has a gradient": lambda life: How(none=(0, 1, 2, 3, 4, 5)),
    "other layouts": lambda life: How(strange=True),
    "other device": lambda life: How(under="meta"),
    "rate": lambda life: life.set(0, lr=0.02 * (1 + life.made % 3)),
    "rate in a tensor": lambda life: life.change_in_place(torch.rand((), dtype=F64) * 0.1),
    "decay": lambda life: life.set(1, weight_decay=0.02 * (life.made % 3)),
    "momentum": lambda life: (
        life.set(1, betas=(0.5, 0.8), eps=1e-3)
        if "betas" in life.case
        else life.set(1, momentum=0.7 if life.made % 2 or life.is_extra else 0.0)
    ),
    **{how: partial(Life.change_state, how=how) for how in STATES},
}
UNBOUND: dict[str, Callable[[Life], How | None]] = {
    "new group": Life.add_group,
    "moved": Life.move,
    "widened": partial(Life.cast, dtype=F64),
    "narrowed": partial(Life.cast, dtype=BF16),
    "exchanged": Life.exchange,
}


def allowed(case: Row) -> Callable[[str], bool]:
    def is_allowed(event: str) -> bool:
        if event.startswith("count") and case["name"] == "NAdam":
            return False  # the oracle has the product of its momenta from the count
        return event in EVENTS or case["home"] == "its own"

    return is_allowed


PROGRAMS = walks([*EVENTS, *UNBOUND], list(map(allowed, CASES)), 21)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_step_and_prediction_is_torchs(number: int, device: str) -> None:
    case = CASES[number]
    default = torch.get_default_dtype()
    torch.set_default_dtype(case.get("default", default))
    try:
        life = Life(case, number, device)
        for done, event in enumerate(PROGRAMS[number]):
            try:
                life.step({**EVENTS, **UNBOUND}[event](life) or How())
            except Exception as error:
                error.add_note(f"{case}\nafter {PROGRAMS[number][:done]}: {event}")
                raise
    finally:
        torch.set_default_dtype(default)


def test_every_event_follows_every_other() -> None:
    every = [*EVENTS, *UNBOUND]
    assert {(a, b) for a in every for b in every} == neighbours(PROGRAMS)
    for axis in ("name", "home"):
        programs = zip(CASES, PROGRAMS, strict=True)
        drawn = {(c[axis], event) for c, program in programs for event in program}
        assert {(c[axis], e) for c in CASES for e in EVENTS if allowed(c)(e)} <= drawn
