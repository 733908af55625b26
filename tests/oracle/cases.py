"""Settings in which methods are compared with the oracle: a covering set, and all."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import torch
from oracle.methods import METHODS, window_of
from oracle.sgd import AveragingSGD

import spectrain_ext as st

# name: (the package's optimizer, the oracle's, options of both)
OPTIMIZERS = {
    "sum": (st.optim.SGD, torch.optim.SGD, {"lr": 0.03, "momentum": 0.9}),
    "nesterov": (
        st.optim.SGD,
        torch.optim.SGD,
        {"lr": 0.03, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02},
    ),
    "penalty": (
        st.optim.SGD,
        torch.optim.SGD,
        {"lr": 0.03, "momentum": 0.8, "weight_decay": 0.05},
    ),
    "average": (st.optim.SGD, AveragingSGD, {"lr": 0.3, "momentum": 0.9, "smoothed": True}),
    "decoupled": (
        st.optim.SGD,
        AveragingSGD,
        {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "Adam": (st.optim.Adam, torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW": (
        st.optim.AdamW,
        torch.optim.AdamW,
        {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)},
    ),
    "NAdam": (st.optim.NAdam, torch.optim.NAdam, {"lr": 0.01}),
}
FAMILY = {"nesterov": "nesterov", "Adam": "adam", "AdamW": "adam", "NAdam": "nadam"}
WINDOWS = ("classic", "wide", "2", "uneven")
SCHEDULERS = {
    "constant": None,
    "decaying": lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
}


class Case(NamedTuple):
    """One setting; ``microbatches`` 0 means the number of stages."""

    method: str
    stages: int
    optimizer: str
    microbatches: int
    window: str
    rates: str

    @property
    def m(self):
        return self.microbatches or self.stages

    @property
    def asked(self):
        """Return the pipeline's argument ``window``."""
        if self.window == "classic":
            return None
        if self.window == "uneven":  # neither N - k nor constant; it must not increase
            return [self.stages + 2 - (k + 1) // 2 for k in range(self.stages)]
        return self.window if self.window == "wide" else int(self.window)

    @property
    def windows(self):
        n, definition = self.stages, METHODS[self.method]
        return [window_of(definition, self.asked, k, n, self.m) for k in range(n)]

    def __str__(self):
        m = f"{self.microbatches}mb" if self.microbatches else "Nmb"
        return "-".join(map(str, (*self[:3], m, *self[4:])))


def makes_sense(case):
    """Return whether the method is defined for the setting."""
    definition = METHODS[case.method]
    if case.microbatches == case.stages:  # the same as 0
        return False
    if FAMILY.get(case.optimizer, "sgd") not in definition.families:
        return False
    if definition.averaged and case.optimizer != "average":
        return False
    if definition.schedule != "1f1b-async" and case.window != "classic":
        return False
    if definition.reads == "previous" and not (
        case.m >= case.stages and max(case.windows) <= case.m + 1
    ):
        return False
    return case.stages <= definition.stages


AXES = (
    tuple(METHODS),
    tuple(range(1, 9)),
    tuple(OPTIMIZERS),
    (1, 2, 3, 0),
    WINDOWS,
    tuple(SCHEDULERS),
)


def every_case():
    """Return the full product."""
    return [case for case in itertools.starmap(Case, itertools.product(*AXES)) if makes_sense(case)]


def covering_cases():
    """Return few cases that cover every pair of values of two axes in the product.

    Greedy, from a fixed seed: all processes that share the tests must choose the same.
    """
    draw, chosen = random.Random(0), []
    # in order of appearance
    wanted = dict.fromkeys(pair for case in every_case() for pair in pairs(case))
    while wanted:
        (a, x), (b, y) = next(iter(wanted))
        tried = []
        while len(tried) < 20:
            values = [draw.choice(axis) for axis in AXES]
            values[a], values[b] = x, y
            case = Case(*values)
            if makes_sense(case):
                tried.append(case)
        best = max(tried, key=lambda case: sum(pair in wanted for pair in pairs(case)))
        chosen.append(best)
        for pair in pairs(best):
            wanted.pop(pair, None)
    return chosen


def pairs(case):
    return itertools.combinations(enumerate(case), 2)
