"""Draws optimizers and schedulers for random programs, in combinations that are valid."""

from __future__ import annotations

import torch
from helpers.foreign_optimizers import Lion, Replacing, Whitened, muon_and_adamw
from helpers.random_settings import CORRECTING, MOMENTUM, OURS, SECOND_ORDER, SGD_ONLY
from oracle.sgd import AveragingSGD
from torch.optim import lr_scheduler

import spectrain_ext as st

# (our class, torch's with the same numbers), or one class
SAME = {
    f"st.{name}": (getattr(st.optim, name), getattr(torch.optim, name))
    for name in ("SGD", "Adam", "AdamW", "NAdam")
}
_OF_TORCH = tuple(SAME)
SAME["st.Lion"] = st.optim.Lion, Lion
_TORCHS = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop"),
    *("ASGD", "Rprop", "Adafactor"),
)
FOREIGN = {
    **{name: getattr(torch.optim, name) for name in _TORCHS},
    **{"Lion": Lion, "Replacing": Replacing, "Whitened": Whitened, "Muon": None},
}
RATE = {
    **dict.fromkeys(("st.SGD", "SGD", "ASGD", "Replacing"), 0.03),
    **dict.fromkeys(("Adagrad", "Adafactor", "Whitened", "Adamax"), 0.01),
    **{"Adadelta": 0.5, "st.Lion": 0.002, "Lion": 0.002, "Rprop": 0.002},
}  # of others 0.005
LINEAR = {"st.SGD", "SGD", "ASGD", "Replacing"}  # no full step for a gradient that is only rounding
ROUNDING = {"Muon"}  # computes in bfloat16 itself: comparable only bit for bit
WITHOUT_DECAY = {"Rprop", "Lion", "Replacing", "Whitened", "Muon"}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")

# Options, one row of which is drawn.
DECAY, DECOUPLED = {"weight_decay": 0.05}, {"decoupled_weight_decay": True, "weight_decay": 0.05}
UP = {"maximize": True, "rate": 0.1}  # a loss has no maximum: a small rate
_OF_SGD = (
    {"momentum": 0.9},
    {"momentum": 0.8, **DECAY},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.8, "nesterov": True, **DECAY},
    {"momentum": 0.9, "dampening": 0.3, **DECAY},
    {"momentum": 0.9, **UP},
    {"momentum": 0.0, **DECAY},
)
_BETAS = ({"betas": (0.9, 0.999)}, {"betas": (0.8, 0.95), **DECAY}, {"betas": (0.8, 0.95), **UP})
_AMSGRAD = ({"betas": (0.9, 0.999), "amsgrad": True}, {"betas": (0.8, 0.95), "amsgrad": True})
_DECOUPLED = {"betas": (0.8, 0.95), **DECOUPLED}
OPTIONS = {
    "st.SGD": (
        *_OF_SGD,
        {"momentum": 0.9, "smoothed": True, "rate": 10},
        {"momentum": 0.9, "smoothed": True, "rate": 10, **DECOUPLED},
        {"momentum": 0.8, **DECOUPLED},
    ),
    "st.Adam": (*_BETAS, _DECOUPLED),
    "st.AdamW": _BETAS,
    "st.NAdam": (*_BETAS, _DECOUPLED),
    "st.Lion": ({}, {"betas": (0.8, 0.95), **DECAY}),
    "SGD": _OF_SGD,
    "Adam": (*_BETAS, *_AMSGRAD),
    "AdamW": (*_BETAS, *_AMSGRAD),
    "NAdam": (*_BETAS, _DECOUPLED),
    "RAdam": (*_BETAS[:2], _DECOUPLED),
    "RMSprop": ({"momentum": 0.0}, {"momentum": 0.9, **DECAY}, {"centered": True}),
    "Adagrad": ({"lr_decay": 0.1}, DECAY),
    **{name: ({}, DECAY) for name in ("Adamax", "Adadelta", "ASGD", "Adafactor")},
}

SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.7),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, _rates(o), 80, cycle_momentum=False),
    "OneCycleLR of both": lambda o: lr_scheduler.OneCycleLR(o, _rates(o), 60),
    "CyclicLR of both": lambda o: lr_scheduler.CyclicLR(
        o, [0.5 * lr for lr in _rates(o)], _rates(o), 3
    ),
    "one after another": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.5, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(o, 3, 0.5), lr_scheduler.ExponentialLR(o, 0.95)]
    ),
}


def _rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


class RandomOptimizer:
    """An optimizer for methods of these names, and a scheduler, as the program draws them."""

    def __init__(self, program, named):
        pick, chance = program.pick, program.chance
        exactly, rounds = program.exactly, program.narrow and not program.has_masters
        self.kind = kind = self._draw_kind(program, named)
        self.foreign = kind not in SAME
        fitting = [row for row in OPTIONS.get(kind, ({},)) if self._fits(row, named, exactly)]
        numbers = dict(pick(*fitting))
        numbers["lr"] = RATE.get(kind, 0.005) * numbers.pop("rate", 1)
        ways = [{}, *[{"fused": True}] * (kind in FUSED)]
        ways += [{"foreach": True}, {"foreach": False}] if kind in _TORCHS else []
        numbers |= pick(*ways)
        # Some kernels and loops need the rate as a plain number.
        self.tensor_rate = (
            program.against != "definition"
            and kind in (*_OF_TORCH, "SGD", "Adam", "AdamW", "NAdam", "RAdam")
            and not numbers.get("foreach")
            and chance(0.15)
        )
        if not self.foreign and rounds and chance(0.5):
            numbers["state_dtype"] = torch.float32
        elif not self.foreign and exactly and program.wide == torch.float32 and chance(0.2):
            numbers["state_dtype"] = torch.bfloat16
        if exactly and kind in ("st.Adam", "st.AdamW") and chance(0.2):
            numbers["capturable"] = True
        self.numbers = {} if kind == "Muon" else numbers
        self.groups = "one" if kind == "Muon" else pick("one", "one", "two", "each")
        plain = numbers.get("momentum", 0.0) and not numbers.keys() & {"nesterov", "smoothed"}
        if kind == "st.SGD" and exactly and plain and not named & MOMENTUM and chance(0.3):
            self.groups = "one still"
        self.has_momentum = not self.foreign and bool(numbers.get("momentum", 0.9))
        both = self.groups != "one still" and (
            numbers.get("momentum", 0.0)
            if kind in ("st.SGD", "SGD")
            # No definition says which step's betas a prediction's bias corrections have.
            else "betas" in numbers and program.against != "definition"
        )
        names = [name for name in SCHEDULERS if both or "of both" not in name]
        self.scheduler = pick(None, pick(*names)) if kind != "Muon" else None

    @staticmethod
    def _draw_kind(program, named):
        if not named & OURS and program.chance(0.6):
            kind = program.pick(*[k for k in FOREIGN if program.exactly or k not in ROUNDING])
            if kind == "Whitened" and program.narrow and not program.has_masters:
                return "Lion"  # inverses need 32 bits
            return kind
        if named & SGD_ONLY:
            return "st.SGD"
        if named & {*CORRECTING}:
            return program.pick(*_OF_TORCH)
        return program.pick(*SAME)

    @staticmethod
    def _fits(row, named, exactly):
        """Return whether the methods are defined for these options, and comparable with them."""
        return not (
            ("spectrain-smoothed" in named and "smoothed" not in row)
            or (named & {*MOMENTUM, *SGD_ONLY} and row.get("momentum") == 0.0)
            or (named & {"sc", "sc-lwp"} and "nesterov" in row)
            # the definition's first change is the whole momentum, the package's is zero
            or (named & SECOND_ORDER and "dampening" in row and not exactly)
        )

    def __str__(self):
        numbers = ", ".join(f"{key}={value!r}" for key, value in self.numbers.items())
        rate = " as a tensor" * self.tensor_rate
        return f"{self.kind}({numbers}{rate}; groups: {self.groups}), scheduler {self.scheduler}"

    @property
    def ours(self):
        return self._maker(FOREIGN[self.kind] if self.foreign else SAME[self.kind][0])

    @property
    def theirs(self):
        """Return torch's optimizer with the same numbers."""
        if self.foreign:
            return self.ours
        more = self.numbers.keys() & {"smoothed", "decoupled_weight_decay"}
        return self._maker(AveragingSGD if more and self.kind == "st.SGD" else SAME[self.kind][1])

    @property
    def make_scheduler(self):
        return None if self.scheduler is None else SCHEDULERS[self.scheduler]

    def _maker(self, kind):
        if self.kind == "Muon":
            return muon_and_adamw
        numbers = dict(self.numbers)
        if kind in (torch.optim.SGD, AveragingSGD) and not self.foreign:
            numbers.pop("state_dtype", None)

        def made(params):
            own = {**numbers, "lr": self._rate()}
            return kind(self._grouped(list(params)), **own)

        return made

    def _rate(self, factor=1):
        lr = self.numbers["lr"] * factor
        return torch.tensor(lr) if self.tensor_rate else lr

    def _grouped(self, params):
        if self.groups == "one":
            return params
        if self.groups == "each":
            return [{"params": [p], "lr": self._rate(1 + 0.1 * p.dim())} for p in params]
        flat, rest = [p for p in params if p.dim() < 2], [p for p in params if p.dim() >= 2]
        other = {"lr": self._rate(0.5)}
        if self.kind not in WITHOUT_DECAY:
            other["weight_decay"] = 0.0
        if self.groups == "one still":
            other["momentum"] = 0.0
        groups = [{"params": rest}, {"params": flat, **other}]
        return [group for group in groups if group["params"]]
