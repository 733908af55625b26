"""The named methods: one row each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any, Literal

from spectrain_ext.operators import corrections
from spectrain_ext.schedule import Interleaved, Law, Place, WPipe

from . import formulas
from .value import Method, Phase, StageRule, phases_of


def spectrain(*, law: Law = "linear") -> Method:
    """The ``spectrain`` method with another law: ``"difference"`` works with every optimizer.

    Args:
        law: how forwards and backwards predict, see ``Method``.
    """
    return Method(
        "spectrain",
        "forward and backward predict the weights at the minibatch's end (arXiv 1809.02839)",
        law=law,
        forward_horizon=formulas.spectrain_forward,
        backward="predict",
        backward_horizon=formulas.spectrain_backward,
    )


def second_order(
    *,
    lead: StageRule = formulas.rest_of_delay,
    backward: Literal["stash", "predict"] = "stash",
    clip: Callable[[Place], float] | None = None,
) -> Method:
    """The ``second-order`` method with other settings.

    Args:
        lead: a rule for the updates that a stage predicts further than its own delay; by default
            those by which stage 0's backward comes later, k with one microbatch.
        backward: the forward's weights again, or a linear prediction by ``lead`` from the newest.
        clip: a rule for the largest norm of a stage's gradient; ``recipe_clip`` was found to keep
            small deep networks stable. None: no clipping.
    """
    return Method(
        "second-order",
        "predicts with the momentum's last change as well, further on later stages",
        law="second-order",
        forward_horizon=formulas.delay,
        lead=lead,
        backward=backward,
        backward_horizon=lead if backward == "predict" else formulas.none,
        clip=clip,
    )


def xgrad(*, steps: int = 1) -> Method:
    """The ``xgrad`` method (Guan et al., 2023) with another number of updates to look ahead."""
    return Method(
        "xgrad",
        "looks ahead on one device: gradients at the predicted weights, updates of the true ones",
        schedule="gpipe",
        forward_horizon=lambda place: steps,
        backward="stash",
        max_stages=1,
    )


def hybrid(
    first: str | Method = "pipedream",
    then: str | Method = "sync",
    *,
    after: int | None = 1000,
    gap: float | None = None,
) -> Method:
    """A method that becomes another in the course of training.

    Asynchronous first and synchronous then is the hybrid of arXiv 1912.12675; synchronous first is
    a warm-up, PipeMare's third technique: ``hybrid("1f1b", "vanilla")``.

    Args:
        first: a name, or a method without an end of its own.
        then: likewise; it may be a hybrid too.
        after: the minibatches of all training before the change; None: only the gap decides.
        gap: the method changes as well once stage 0's weights, from a minibatch's forward to its
            own update, move by more than this share of their norm. Measured for a minibatch at a
            time, which costs stage 0 a copy of its weights and now and then two passes over them;
            on CUDA the host waits for it.

    Raises:
        ValueError: a method that there is not, that already changes, or a moment that cannot be.
        TypeError: a value of another type than is asked for.

    Optimizers, schedulers and random numbers go on. Microbatches are the same for both, as many as
    is usual for the one that wants more, and each has its own windows.
    """
    begin, end = find_method(first), find_method(then)
    if begin.then is not None:
        raise ValueError(f"first: {begin.name!r} already changes, to {begin.then.method.name!r}")
    moments = [str(moment) for moment in (after, gap) if moment is not None]
    made = replace(
        begin,
        name=f"{begin.name}+{end.name}@{'-'.join(moments)}",
        summary=f"{begin.name}, then {end.name}",
        then=Phase(end, after, gap),
    )
    phases_of(made)
    return made


def pipemare(*, updates: float = 1000, warm_up: int = 0) -> Method:
    """The ``pipemare`` method: T1, T2 and T3 of PipeMare (Yang et al., arXiv 1910.05124).

    Args:
        updates: over so many from the start on, learning rates rise to their own from 1/D of it
            (T1). The paper has a number for every task; take what is short beside the training, and
            not shorter than a warm-up of learning rates.
        warm_up: minibatches of synchronous training, by ``1f1b``, before all of that (T3).
    """
    if warm_up:
        return hybrid("1f1b", pipemare(updates=updates), after=warm_up)
    return Method(
        "pipemare",
        "learning rates begin with 1/delay, backwards look back to their forward's weights (2019)",
        law="average",
        backward="predict",
        backward_horizon=formulas.delay,
        rates=formulas.RatesByDelay(updates),
    )


def interleaved(*, chunks: int = 2, flushes: bool = True) -> Method:
    """The methods ``interleaved`` and ``interleaved-async``, with other numbers of chunks.

    Args:
        chunks: stages per device.
        flushes: whether it is synchronous. If not, it predicts as ``auto`` does: every stage as far
            ahead as stage 0 is late, by what the schedule's delays are counted to be.
    """
    schedule = Interleaved(chunks, flushes)
    if flushes:
        return Method(
            "interleaved",
            "1F1B with several stages per device, a flush per minibatch (Megatron-LM, synchronous)",
            schedule=schedule,
            microbatches=formulas.one_per_stage,
            chunks=chunks,
        )

    def own_delay(place: Place) -> int:
        return formulas.delay_under(schedule, place)

    def rest_of_delay(place: Place) -> int:
        return formulas.delay_under(schedule, place._replace(stage=0)) - own_delay(place)

    return _like(
        second_order(lead=rest_of_delay),
        "interleaved-async",
        "several stages per device, without a flush; predicts as auto does",
        schedule=schedule,
        forward_horizon=own_delay,
        microbatches=formulas.one_per_stage,
        otherwise="difference",
        chunks=chunks,
    )


def _like(row: Method, name: str, summary: str, **other: Any) -> Method:
    return replace(row, name=name, summary=summary, **other)


_AUTO = _like(
    second_order(lead=formulas.lead_in_deep_delays),
    "auto",
    "microbatches for a delay of one update, predicted on all stages alike",
    rates=formulas.RatesByDelay(inf, power=0.5),
    window=formulas.window_for_messages,
    microbatches=formulas.one_per_stage,
    otherwise="difference",
)

_PIPEDREAM = Method("pipedream", "the backward reloads its forward's version", backward="stash")

_2BW = Method(
    "pipedream-2bw",
    "two versions, a delay of exactly one update; needs as many microbatches as stages",
    window=formulas.window_for_messages,
    forward_reads="previous",
    backward="stash",
    min_microbatches=lambda place: place.stages,
    microbatches=formulas.one_per_stage,
)

_SC = Method(
    "sc",
    "late gradients at once get the momentum's share by now (Kosson et al., 2020)",
    correction=formulas.where_late(corrections.SpikeCompensation),
    families=("sgd",),
)

_ROWS = (
    _AUTO,
    Method("sync", "one minibatch at a time, no overlap: the yardstick", schedule="gpipe"),
    Method(
        "gpipe",
        "all forwards, all backwards, update (synchronous)",
        schedule="gpipe",
        microbatches=formulas.one_per_stage,
    ),
    Method(
        "1f1b",
        "one forward, one backward, a flush per minibatch (synchronous)",
        schedule="1f1b",
        microbatches=formulas.one_per_stage,
    ),
    Method("vanilla", "forward and backward at the newest version"),
    _PIPEDREAM,
    Method(
        "pipedream-vertical-sync",
        "all stages use the version that stage 0 had at the microbatch's entry",
        forward_reads="entry",
        backward="stash",
    ),
    _2BW,
    spectrain(),
    Method(
        "spectrain-local",
        "the forward predicts its own backward's version, by the counted number of updates",
        forward_horizon="counted",
    ),
    Method(
        "spectrain-stash",
        "the forward predicts its own backward's version, the backward reuses that prediction",
        forward_horizon=formulas.delay,
        backward="stash",
    ),
    _like(
        spectrain(),
        "spectrain-ema",
        "spectrain with averaged momentum, as the paper writes it; SGD(ema=True)",
        direction="ema",
        families=("sgd",),
    ),
    second_order(),
    Method(
        "pipeoptim",
        "the forward predicts its own backward's version (PipeOptim, 2023)",
        forward_horizon=formulas.delay,
    ),
    Method(
        "xpipe",
        "one prediction per minibatch, for all its microbatches (XPipe, 2019)",
        forward_horizon=formulas.xpipe_forward,
        backward="predict",
        backward_horizon=formulas.xpipe_backward,
        once=True,
    ),
    Method(
        "msnag",
        "the forward predicts updates with zero gradients (FTPipe, 2021)",
        law="geometric",
        forward_horizon=formulas.delay,
    ),
    Method(
        "msnag-stash",
        "msnag, and the backward reuses the forward's weights",
        law="geometric",
        forward_horizon=formulas.delay,
        backward="stash",
    ),
    Method(
        "lwp-v",
        "linear weight prediction along the velocity (Kosson et al., 2020)",
        forward_horizon=formulas.delay,
    ),
    Method(
        "lwp-w",
        "linear weight prediction along the last change of the weights (Kosson et al., 2020)",
        law="difference",
        forward_horizon=formulas.delay,
    ),
    interleaved(),
    interleaved(flushes=False),
    Method(
        "wpipe",
        "two groups of stages, two to a device: the first is late by one update (WPipe, 2022)",
        schedule=WPipe(),
        backward="stash",
        microbatches=lambda stages: max(1, stages // 2),
        chunks=2,
    ),
    xgrad(),
    Method(
        "zb-h1",
        "1f1b, backwards in two halves, those of the weights put off (ZB-H1, arXiv 2401.10241)",
        schedule="zb-h1",
        microbatches=formulas.one_per_stage,
    ),
    _like(
        _AUTO,
        "zb-h1-async",
        "auto, backwards in two halves, the gradient sent between them",
        schedule="zb-h1-async",
    ),
    _SC,
    _like(
        _SC,
        "sc-lwp",
        "sc, and the forward predicts its own backward's version (Kosson et al., 2020)",
        forward_horizon=formulas.delay,
    ),
    _like(
        _2BW,
        "error-feedback",
        "pipedream-2bw, and a step makes up for what the one before has missed (2606.30634)",
        correction=lambda place: corrections.ErrorFeedback(),  # every stage is late by one
        families=("sgd", "adam", "adamw"),
    ),
    _like(
        _PIPEDREAM,
        "braking",
        "gradients along the momentum shrink, those against it grow (Venigalla et al., 2020)",
        correction=formulas.where_late(lambda late: corrections.AdaptiveBraking(1.0)),
        families=("sgd",),
    ),
    _like(
        _PIPEDREAM,
        "dc-asgd",
        "pipedream with gradients carried on to the weights they meet (Zheng et al., 2017)",
        # The strength that its paper has for a constant one.
        correction=formulas.where_late(lambda late: corrections.DelayCompensation(0.04)),
    ),
    _like(
        _PIPEDREAM,
        "gap-aware",
        "pipedream with gradients divided by how far the weights have moved (Barkai et al., 2020)",
        correction=formulas.where_late(lambda late: corrections.GapAware()),
    ),
    _like(
        pipemare(),
        "pipemare-t1",
        "vanilla with learning rates that begin with 1/delay (PipeMare, 2019)",
        law="linear",
        backward="current",
        backward_horizon=formulas.none,
    ),
    _like(
        pipemare(),
        "pipemare-t2",
        "the backward looks back to about its forward's weights (PipeMare, 2019)",
        rates=None,
    ),
    pipemare(),
)

_HYBRID = re.compile(r"([^+@]+)\+([^+@]+)@([0-9]{1,9})")
_REGISTRY = {method.name: method for method in _ROWS}


def methods() -> tuple[str, ...]:
    """Names that ``Pipeline(method=...)`` accepts."""
    return tuple(_REGISTRY)


def is_hybrid(name: str) -> bool:
    """Whether it names a method that becomes another, as ``"pipedream+sync@1000"``."""
    return _HYBRID.fullmatch(name) is not None


def find_method(method: str | Method) -> Method:
    """The method of that name, as ``"pipedream+sync@1000"``; a ``Method`` is returned as it is."""
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise TypeError(f"method: expected a name or a Method, got {type(method).__name__}")
    if found := _HYBRID.fullmatch(method):
        return hybrid(found[1], found[2], after=int(found[3]))
    if method not in _REGISTRY:
        raise ValueError(f"method: there is no {method!r}; there are {', '.join(_REGISTRY)}")
    return _REGISTRY[method]
