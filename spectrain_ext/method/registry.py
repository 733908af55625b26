"""Registers the named methods, one row each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Literal, TypeAlias

from spectrain_ext.errors import unknown
from spectrain_ext.schedule import Law, Place

from . import formulas
from .value import Family, Method, Phase, StageRule, phases_of

#: For the completion of an editor: the names of ``methods()``.
MethodName: TypeAlias = (
    Literal["auto", "sync", "gpipe", "1f1b", "vanilla", "pipedream", "pipedream-vertical-sync"]
    | Literal["pipedream-2bw", "spectrain", "spectrain-local", "spectrain-stash"]
    | Literal["spectrain-smoothed", "second-order", "pipeoptim", "xpipe", "msnag", "msnag-stash"]
    | Literal["lwp-v", "lwp-w", "interleaved", "interleaved-async", "wpipe", "xgrad", "zb-h1"]
    | Literal["zb-h1-async", "sc", "sc-lwp", "error-feedback", "braking", "dc-asgd", "gap-aware"]
    | Literal["pipemare-t1", "pipemare-t2", "pipemare"]
)


#: A name, and what makes the method at its first use: its schedule or pass is loaded then.
_Row: TypeAlias = tuple[str, Callable[[], Method]]


def spectrain(*, law: Law = "linear") -> Method:
    """Return the ``spectrain`` method with another prediction law.

    Args:
        law: see ``Method``; ``"difference"`` works with every optimizer.

    Example:
        >>> method = st.spectrain(law="difference")
        >>> stages = [nn.Linear(4, 4), nn.Linear(4, 1)]
        >>> pipe = st.Pipeline(stages, torch.optim.RMSprop, nn.functional.mse_loss, method=method)
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
    """Return the ``second-order`` method with other settings.

    Args:
        lead: a rule for the updates that a stage predicts beyond its own delay. Default: up to the
            delay of stage 0, which is k more in classic windows with one microbatch.
        backward: ``"stash"``: the forward's weights; ``"predict"``: a linear prediction by ``lead``
            from the newest.
        clip: a rule for the largest norm of a stage's gradient; None: no clipping. ``recipe_clip``
            kept small deep networks stable.

    Example:
        >>> own_delay = st.second_order(lead=lambda place: 0)
        >>> own_delay.law, own_delay.backward
        ('second-order', 'stash')
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


def hybrid(
    first: MethodName | str | Method = "pipedream",
    then: MethodName | str | Method = "sync",
    *,
    after: int = 1000,
) -> Method:
    """Return a method that changes to another in the course of training.

    Asynchronous, then synchronous is the hybrid of arXiv 1912.12675. Synchronous first is a
    warm-up, PipeMare's T3: ``hybrid("1f1b", "vanilla")``.

    Args:
        first: a name, or a method that does not change.
        then: a name or a method, which may be a hybrid.
        after: minibatches of all training before the change.

    Raises:
        ValueError: an unknown method, a first one that already changes, or an impossible moment.
        TypeError: a value of another type.

    Optimizers, schedulers and random numbers continue. Both phases have the same number of
    microbatches, the larger of their defaults; each has its own windows.

    Example:
        >>> st.hybrid("pipedream", "sync", after=100).name
        'pipedream+sync@100'
    """
    begin, end = find_method(first), find_method(then)
    if begin.then is not None:
        raise ValueError(f"first: {begin.name!r} already changes, to {begin.then.method.name!r}")
    both = replace(
        begin,
        name=f"{begin.name}+{end.name}@{after}",
        summary=f"{begin.name}, then {end.name}",
        chunks=max(begin.chunks, end.chunks),
        then=Phase(end, after),
    )
    phases_of(both)  # raises
    return both


def pipemare(*, updates: float = 1000) -> Method:
    """Return the ``pipemare`` method: T1 and T2 of PipeMare (Yang et al., arXiv 1910.05124).

    T3 is synchronous training before it: ``hybrid("1f1b", pipemare())``.

    Args:
        updates: the minibatches, from the beginning of the phase, over which learning rates rise
            from 1/D of themselves (T1). The paper has a number for every task; choose one that is
            small compared with the training and not smaller than a warm-up of learning rates.

    Example:
        >>> st.hybrid("1f1b", st.pipemare(updates=500), after=100).name
        '1f1b+pipemare@100'
    """
    return Method(
        "pipemare",
        "learning rates begin with 1/delay, backwards look back to their forward's weights (2019)",
        law="average",
        backward="predict",
        backward_horizon=formulas.delay,
        rates=formulas.RatesByDelay(updates),
    )


def interleaved(*, chunks: int = 2, flushes: bool = True) -> Method:
    """Return ``interleaved`` or ``interleaved-async`` with another number of stages per device.

    Args:
        chunks: stages per device.
        flushes: True: synchronous. False: predict as ``auto`` does, every stage as far as stage 0
            is late, by delays counted from the schedule.

    Example:
        >>> st.interleaved(chunks=4).chunks
        4
    """
    from spectrain_ext.schedule import Interleaved

    schedule = Interleaved(chunks, flushes)
    if flushes:
        return Method(
            "interleaved",
            "1F1B with several stages per device, a flush per minibatch (Megatron-LM, synchronous)",
            schedule=schedule,
            microbatches=formulas.one_per_stage,
            chunks=chunks,
        )
    late = partial(formulas.delay_under, schedule)
    return _like(
        second_order(lead=lambda place: place.latest - late(place)),
        "interleaved-async",
        "several stages per device, without a flush; predicts as auto does",
        schedule=schedule,
        forward_horizon=late,
        microbatches=formulas.one_per_stage,
        otherwise="difference",
        chunks=chunks,
    )


def _wpipe() -> Method:
    from spectrain_ext.schedule import WPipe

    return Method(
        "wpipe",
        "two groups of stages, two to a device: the first is late by one update (WPipe, 2022)",
        schedule=WPipe(),
        backward="stash",
        microbatches=lambda stages: max(1, stages // 2),
        chunks=2,
    )


def _spikes(place: Place) -> Any:
    from spectrain_ext.later import later  # loaded where used

    late = formulas.delay(place)
    return later("corrections").SpikeCompensation(late) if late else None


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


def _corrects(
    name: str,
    summary: str,
    kind: str,
    number: float,
    families: tuple[Family, ...] = ("sgd", "adam", "adamw", "nadam"),
) -> _Row:
    """Return the row of PipeDream with a correction of gradients."""

    def made() -> Method:
        from spectrain_ext.later import later  # loaded where used

        passes = (getattr(later("corrections"), kind)(number),)
        return _like(_PIPEDREAM, name, summary, passes=passes, families=families)

    return name, made


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
    correction=_spikes,
    families=("sgd",),
)

_ROWS: tuple[Method | _Row, ...] = (
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
        "spectrain-smoothed",
        "spectrain with smoothed gradients as momentum, as in the paper; SGD(smoothed=True)",
        smoothed=True,
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
    ("interleaved", interleaved),
    ("interleaved-async", partial(interleaved, flushes=False)),
    ("wpipe", _wpipe),
    Method(
        "xgrad",
        "looks ahead on one device: gradients at the predicted weights, updates of the true ones",
        schedule="gpipe",
        forward_horizon=lambda place: 1,
        backward="stash",
        max_stages=1,
    ),
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
        "pipedream-2bw, W moves by 2*d - d_before: a step moves U, W = U + d_before (2606.30634)",
        law="difference",
        forward_horizon=lambda place: 1,
    ),
    _corrects(
        "braking",
        "gradients along the momentum shrink, those against it grow (Venigalla et al., 2020)",
        "AdaptiveBraking",
        1.0,
        families=("sgd",),
    ),
    _corrects(
        "dc-asgd",
        "pipedream with gradients carried on to the weights they meet (Zheng et al., 2017)",
        "DelayCompensation",
        0.04,  # the paper's constant
    ),
    _corrects(
        "gap-aware",
        "pipedream with gradients divided by how far the weights have moved (Barkai et al., 2020)",
        "GapAware",
        0.999,
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
_REGISTRY: dict[str, Method | Callable[[], Method]] = dict(
    (row.name, row) if isinstance(row, Method) else row for row in _ROWS
)


def methods() -> tuple[str, ...]:
    """Return the names that ``Pipeline(method=...)`` accepts.

    Example:
        >>> "spectrain" in st.methods()
        True
    """
    return tuple(_REGISTRY)


def find_method(method: MethodName | str | Method) -> Method:
    """Return the method of a name, as ``"pipedream+sync@1000"``, or a ``Method`` unchanged."""
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise TypeError(f"method: expected a name or a Method, got {type(method).__name__}")
    if phases := _HYBRID.fullmatch(method):
        return hybrid(phases[1], phases[2], after=int(phases[3]))
    if method not in _REGISTRY:
        raise ValueError(f"method: {unknown(method, _REGISTRY)}")
    row = _REGISTRY[method]
    if not isinstance(row, Method):
        row = _REGISTRY[method] = row()
    return row


def is_registered(method: Method) -> bool:
    """Whether it is a row above, for which tests have made all checks at all places."""
    return _REGISTRY.get(method.name) == method
