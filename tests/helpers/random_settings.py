"""Methods, optimizers and schedulers for random programs, and their valid combinations."""

from __future__ import annotations

from dataclasses import replace

import torch
from helpers.foreign_optimizers import Lion, Replacing, Whitened
from oracle.methods import METHODS as DEFINITIONS
from oracle.methods import hybrid as defined
from torch.optim import lr_scheduler

import spectrain_ext as st

# Methods

FLUSHING = ("sync", "gpipe", "1f1b", "zb-h1", "interleaved")
HYBRIDS = (
    ("pipedream", "sync"),
    ("1f1b", "vanilla"),
    ("spectrain", "gpipe"),
    ("lwp-w", "second-order"),
    ("auto", "1f1b"),
    ("vanilla", "lwp-w"),
)
# Their requirements on the package's optimizers; the others take any optimizer.
MOMENTUM = {
    *("spectrain", "spectrain-local", "spectrain-stash", "spectrain-smoothed", "second-order"),
    *("pipeoptim", "xpipe", "msnag", "msnag-stash", "lwp-v", "xgrad", "sc-lwp", "error-feedback"),
    *("braking", "gap-aware"),
}
OURS = {*MOMENTUM, "sc", "dc-asgd"}
SGD_ONLY = {"spectrain-smoothed", "sc", "sc-lwp", "braking"}
WIDE_STEPS = {"dc-asgd", "gap-aware"}  # read stale weights, in 32 bits or more
PREVIOUS = {"pipedream-2bw", "error-feedback"}  # a delay of at most one update
SECOND_ORDER = {"second-order", "auto", "zb-h1-async", "interleaved-async"}
OTHERWISE = {"auto", "zb-h1-async", "interleaved-async"}  # use another law without a momentum
OWN_WINDOWS = {*FLUSHING, "xgrad", "wpipe", "interleaved-async"}


def method_of(name):
    if name == "spectrain difference":
        return st.spectrain(law="difference")
    if name == "pipedream until a gap":
        return st.hybrid("pipedream", "sync", after=9, gap=0.02)
    return name


def otherwise(definition):
    """Return the definition with the difference law for the prediction of stage 0."""
    return replace(definition, law="difference")


def definition_of(name, momentum):
    if "+" in name:
        first, then, after = name.replace("@", "+").split("+")
        found = defined(first, then, int(after))
        if first in OTHERWISE and not momentum:
            found = replace(otherwise(found), then=found.then)
        return found
    if name == "spectrain difference":
        return replace(DEFINITIONS["spectrain"], law="difference")
    found = DEFINITIONS[name]
    return otherwise(found) if name in OTHERWISE and not momentum else found


# Optimizers: (our class, torch's with the same numbers), or one class

SAME = {
    "st.SGD": (st.optim.SGD, torch.optim.SGD),
    "st.Adam": (st.optim.Adam, torch.optim.Adam),
    "st.AdamW": (st.optim.AdamW, torch.optim.AdamW),
    "st.NAdam": (st.optim.NAdam, torch.optim.NAdam),
}
FOREIGN = {
    **{name: getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam")},
    **{name: getattr(torch.optim, name) for name in ("Adamax", "Adagrad", "Adadelta", "RMSprop")},
    **{name: getattr(torch.optim, name) for name in ("ASGD", "Rprop", "Adafactor")},
    "Lion": Lion,
    "Replacing": Replacing,
    "Whitened": Whitened,
    "Muon": None,
}
RATE = {
    **dict.fromkeys(("st.SGD", "SGD", "ASGD", "Replacing"), 0.03),
    **dict.fromkeys(("Adagrad", "Adafactor", "Whitened", "Adamax"), 0.01),
    "Adadelta": 0.5,
    "Lion": 0.002,
    "Rprop": 0.002,
}  # of others 0.005
LINEAR = {"st.SGD", "SGD", "ASGD", "Replacing"}  # no full step for a gradient that is only rounding
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
FOREACH = (*FUSED, "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "ASGD", "Rprop", "Adafactor")
ROUNDING = {"Muon"}  # computes in bfloat16 itself: comparable only bit for bit
DECAYING = {"st.SGD", "st.Adam", "st.AdamW", "st.NAdam", *FOREACH} - {"Rprop"}

SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.7),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4], 0.5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, total_iters=4),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 20),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.8),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, _rates(o), 80, cycle_momentum=False),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, [0.5 * lr for lr in _rates(o)], _rates(o), 3, cycle_momentum=False
    ),
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
