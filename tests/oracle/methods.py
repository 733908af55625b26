"""Defines every method: the version its forward reads, the horizon, and its backward's weights.

One row per method, from the papers' formulas. k is the stage, n the number of stages, w the
microbatches that the stage may have in flight, m the microbatches of one update, and latest the
updates by which stage 0 is late.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from oracle.schedules import CHUNKED, counted


@dataclass(frozen=True)
class Definition:
    """A method: choices that hold for all stages, and rules ``(k, n, w, m) -> number``.

    ``lead``, the updates beyond ``forward``, has the argument ``latest`` as well.
    """

    schedule: str = "1f1b-async"
    reads: str = "newest"  # or "entry": stage 0's version, "previous": one minibatch earlier
    law: str = "linear"  # "geometric", "second-order", "difference"
    forward: Callable | str = lambda k, n, w, m: 0  # or "counted": the updates up to the backward
    backward: str = "current"  # "predict", "stash"
    backward_horizon: Callable = lambda k, n, w, m: 0
    lead: Callable = lambda k, n, w, m, latest: 0
    once: bool = False  # a minibatch's microbatches share the weights of its first
    averaged: bool = False  # needs v = mu*v + (1 - mu)*g
    rates: Callable = lambda k, n, w, m, t: 1  # a factor for the learning rates of minibatch t
    correction: Callable = lambda k, n, w, m: None  # see oracle.corrections
    families: tuple = ("sgd", "nesterov", "adam", "nadam", "lion")  # that it is defined for
    stages: int = 8  # maximum
    roomy: bool = False  # has a wider window if that delays no forward by more than one update
    then: tuple | None = None  # (another method, after this many minibatches of training)


def nearest(x):
    """Round to nearest; halves go up."""
    return math.floor(x + 0.5)


def local(k, n, w, m):
    """Return the maximum updates between a forward and its backward: w - 1 microbatches."""
    return -(-(w - 1) // m)


def slow_start(k, n, w, m, t, updates=1000):
    """PipeMare's T1: lr/D^(1 - min(t/T, 1))."""
    return 1 / max(1, local(k, n, w, m)) ** (1 - min(t / updates, 1))


def spike(k, n, w, m):
    return "spike", local(k, n, w, m)


def where_late(*correction):
    """Return a rule without correction where D is 0."""
    return lambda k, n, w, m: correction if local(k, n, w, m) else None


SPECTRAIN = Definition(
    forward=lambda k, n, w, m: nearest((k // 2 + n - k - 1) / m),
    backward="predict",
    backward_horizon=lambda k, n, w, m: nearest((k // 2) / m),
)

SECOND_ORDER = Definition(
    law="second-order",
    forward=local,
    lead=lambda k, n, w, m, latest: latest - local(k, n, w, m),
    backward="stash",
)

LOOKING_BACK = Definition(law="average", backward="predict", backward_horizon=local)


def interleaved_delay(k, n, w, m):
    """Counted, since there is no published formula: this schedule without a flush is our own."""
    return counted("interleaved-async", k, n, m)[1]


def less_half(k, n, w, m, latest):
    """Half of a stage's own delay, rounded down, is not predicted along the momentum."""
    return latest - local(k, n, w, m) - local(k, n, w, m) // 2


AUTO = replace(
    SECOND_ORDER,
    lead=less_half,
    rates=lambda k, n, w, m, t: 1 / math.sqrt(max(1, local(k, n, w, m))),
    roomy=True,
)

_GRADIENTS = ("sgd", "nesterov", "adam", "nadam")  # whose updates grow with gradients
METHODS = {
    "auto": AUTO,
    "sync": Definition("gpipe"),
    "gpipe": Definition("gpipe"),
    "1f1b": Definition("1f1b"),
    "vanilla": Definition(),
    "pipedream": Definition(backward="stash"),
    "pipedream-vertical-sync": Definition(reads="entry", backward="stash"),
    "pipedream-2bw": Definition(reads="previous", backward="stash", roomy=True),
    "spectrain": SPECTRAIN,
    "spectrain-local": Definition(forward="counted"),
    "spectrain-stash": Definition(forward=local, backward="stash"),
    "spectrain-smoothed": replace(SPECTRAIN, averaged=True),
    "second-order": SECOND_ORDER,
    "pipeoptim": Definition(forward=local),
    "xpipe": Definition(
        forward=lambda k, n, w, m: nearest((n + m - k // 2 - 2) / m),
        backward="predict",
        backward_horizon=lambda k, n, w, m: nearest((m + k // 2 - 1) / m),
        once=True,
    ),
    "msnag": Definition(law="geometric", forward=local),
    "msnag-stash": Definition(law="geometric", forward=local, backward="stash"),
    "lwp-v": Definition(forward=local),
    "lwp-w": Definition(law="difference", forward=local),
    "sc": Definition(correction=spike, families=("sgd",)),
    "sc-lwp": Definition(forward=local, correction=spike, families=("sgd",)),
    "error-feedback": Definition(
        reads="previous",
        law="difference",
        forward=lambda k, n, w, m: 1,
        backward="stash",
        roomy=True,
    ),
    "braking": Definition(
        backward="stash", correction=where_late("braking", 1.0), families=("sgd", "nesterov")
    ),
    "dc-asgd": Definition(
        backward="stash", correction=where_late("delay", 0.04), families=_GRADIENTS
    ),
    "gap-aware": Definition(
        backward="stash", correction=where_late("gap", 0.999), families=_GRADIENTS
    ),
    "pipemare-t1": Definition(rates=slow_start),
    "pipemare-t2": LOOKING_BACK,
    "pipemare": replace(LOOKING_BACK, rates=slow_start),
    "interleaved": Definition("interleaved"),
    "interleaved-async": replace(
        SECOND_ORDER,
        schedule="interleaved-async",
        forward=interleaved_delay,
        lead=lambda k, n, w, m, _: interleaved_delay(0, n, w, m) - interleaved_delay(k, n, w, m),
    ),
    "wpipe": Definition("wpipe", backward="stash"),
    "zb-h1": Definition("zb-h1"),
    "zb-h1-async": replace(AUTO, schedule="zb-h1-async"),
    "xgrad": Definition("gpipe", forward=lambda k, n, w, m: 1, backward="stash", stages=1),
}


def hybrid(first, then, after):
    """Combine two methods; the second starts after some minibatches, with an empty pipeline."""
    return replace(METHODS[first], then=(METHODS[then], after))


def window_of(definition, window, k, n, m):
    """Return the microbatches that stage k may have in flight; ``window`` is the caller's."""
    if definition.schedule == "gpipe":
        return m
    if definition.schedule == "1f1b":
        return min(m, n - k)
    if definition.schedule == "zb-h1":
        return n
    if definition.schedule in CHUNKED:
        return counted(definition.schedule, k, n, m)[0]
    if window is None and definition.roomy:
        # Stage 0 then has at most m in flight: of two neighbouring minibatches.
        return next(w for w in range(2 * (n - k) - 1, 0, -1) if w == n - k or w + k <= m)
    if window is None or window == "classic":
        return n - k
    if window == "wide":
        return 2 * (n - k) - 1
    return window if isinstance(window, int) else window[k]
