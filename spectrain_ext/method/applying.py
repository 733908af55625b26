"""Applies a method to stages: their windows, their rules, and the optimizers that fit."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch

from spectrain_ext.operators.laws import Horizon, SecondOrder, law_named
from spectrain_ext.schedule import Place, Replicas, Rules, find_generator, flushes

from .formulas import WINDOWS, WINDOWS_OF_SCHEDULES, delay_under
from .registry import is_registered
from .value import FAMILIES, Method, Window, WindowRule, correction_at, named, phases_of

if TYPE_CHECKING:
    from spectrain_ext.operators.numbers import Corrected

# Windows.


def places_of(
    method: Method,
    stages: int,
    microbatches: int,
    window: Window = None,
    replicas: Replicas | None = None,
) -> list[Place]:
    """Return the place of every stage, which all its replicas share; refuse impossible windows."""
    single = (1,) * stages
    if replicas is None:
        replicas = Replicas(single)
    usual = is_registered(method) and window is None and replicas.counts == single
    if not usual:
        from .refusals import check_places, check_setting

        check_setting(method, stages, microbatches, window, replicas)
    shares = [microbatches // count for count in replicas.counts]
    if window is None or isinstance(window, str):
        rule = _window_of(method) if window is None else WINDOWS[window]
        # With replicas stage k's window is that of stage 0 in a pipeline with as many stages as
        # there are ranks from stage k on, per replica of it.
        windows = [rule(k, k + replicas.depth(k), share) for k, share in enumerate(shares)]
    else:
        windows = [window] * stages if isinstance(window, int) else list(window)
    places = [Place(k, stages, windows[k], share) for k, share in enumerate(shares)]
    if not usual:
        check_places(method, places, replicas)
    latest = delay_under(method.schedule, places[0])
    return [place._replace(latest=latest) for place in places]


def _window_of(method: Method) -> WindowRule:
    if method.window is not None:
        return method.window
    usual = WINDOWS_OF_SCHEDULES.get(str(method.schedule), WINDOWS["classic"])
    rule: WindowRule = getattr(find_generator(method.schedule), "window", usual)
    return rule


def phases_on(
    method: Method,
    stages: int,
    microbatches: int,
    window: Window = None,
    replicas: Replicas | None = None,
) -> list[tuple[Method, list[Place]]]:
    """Return the method and those that it changes to, in order, each with its places.

    A window applies to those that do not flush.
    """
    phases = phases_of(method)
    all_flush = all(flushes(phase.schedule) for phase in phases)
    return [
        (phase, places_of(phase, stages, microbatches, own, replicas))
        for phase in phases
        for own in [None if flushes(phase.schedule) and not all_flush else window]
    ]


def microbatches_of(method: Method, stages: int, replicas: Replicas | None = None) -> int:
    """Return the default number of microbatches: a multiple of every stage's replicas."""
    most = 1
    for phase in phases_of(method):
        if phase.microbatches is not None:
            number = phase.microbatches(stages)
            if not is_registered(phase):
                from .refusals import check_value

                check_value(phase, Place(0, stages, 1), "microbatches", number, 1)
            most = max(most, number)
    multiple = 1 if replicas is None else lcm(*replicas.counts)
    return -(-most // multiple) * multiple


# Rules.


def rules_at(method: Method, place: Place, optimizer: torch.optim.Optimizer | None = None) -> Rules:
    """Return the checked rules of a place, for an optimizer like the given one."""
    usual = is_registered(method)
    if not usual:
        from .refusals import check_fields, check_rules

        check_fields(method, place)
    horizon: int | Literal["counted"] = "counted"
    if method.forward_horizon != "counted":
        horizon = method.forward_horizon(place)
    elif delay_under(method.schedule, place) == 0:
        horizon = 0  # no updates to count
    rules = Rules(
        method.forward_reads,
        method.law,
        horizon,
        method.lead(place),
        method.backward,
        method.backward_horizon(place),
        method.once,
        correction_at(method, place),
    )
    if not usual:
        check_rules(method, place, rules)
    _check_limits(method, place)
    if method.otherwise is None or optimizer is None or _can_predict(optimizer, rules):
        return rules
    assert horizon != "counted"
    return replace(rules, law=method.otherwise, forward_horizon=horizon + rules.lead, lead=0)


def _check_limits(method: Method, place: Place) -> None:
    if method.max_stages is not None and place.stages > method.max_stages:
        raise ValueError(
            f"method: {method.name!r} is defined for at most {method.max_stages} "
            f"stage{'s'[: method.max_stages != 1]}, got {place.stages}"
        )
    least = 1 if method.min_microbatches is None else method.min_microbatches(place)
    if place.microbatches < least:
        raise ValueError(
            f"method: {method.name!r} needs at least {least} microbatches for "
            f"{place.stages} stages, got {place.microbatches}"
        )
    if method.forward_reads == "previous" and delay_under(method.schedule, place) > 1:
        raise ValueError(
            f"{named(method, 'window', place)}: forward_reads='previous' needs a window of at most "
            f"microbatches + 1 ({place.microbatches + 1}), got {place.window}"
        )


# Optimizers.


@runtime_checkable
class _Predicting(Protocol):
    def check_can_predict(self, law: Horizon = ...) -> None: ...
    def check_correction(self, correction: Corrected | None) -> None: ...


# AdamW is a subclass of Adam.
_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "nadam": torch.optim.NAdam,
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "muon": torch.optim.Muon,
}


def family_of(optimizer: torch.optim.Optimizer) -> str | None:
    return next((name for name, kind in _CLASSES.items() if isinstance(optimizer, kind)), None)


def _can_predict(optimizer: torch.optim.Optimizer, rules: Rules) -> bool:
    if not isinstance(optimizer, _Predicting):
        return False
    try:
        _check_laws(optimizer, rules)
    except ValueError:
        return False
    return True


def _check_laws(optimizer: _Predicting, rules: Rules) -> None:
    """Raise ValueError if the optimizer has no momentum for a prediction of a stage."""
    ahead = 1 if rules.forward_horizon == "counted" else max(1, rules.forward_horizon)
    second = rules.law == "second-order"
    optimizer.check_can_predict(
        SecondOrder(ahead, rules.lead) if second else law_named(rules.law, ahead)
    )
    if rules.backward_horizon:
        optimizer.check_can_predict(law_named(rules.law, rules.backward_horizon))


def check_optimizer(method: Method, rules: Rules, k: int, optimizer: torch.optim.Optimizer) -> None:
    """Refuse stage k's optimizer if the method does not support it or cannot predict with it."""
    family, kind = family_of(optimizer), type(optimizer).__name__
    if family not in method.families and not (family is None and {*method.families} >= {*FAMILIES}):
        raise ValueError(
            f"optimizer: stages[{k}] has {kind}, and method {method.name!r} is "
            f"defined for {', '.join(method.families)}"
        )
    if method.smoothed:
        for index, group in enumerate(optimizer.param_groups):
            if not group.get("smoothed", False):
                raise ValueError(
                    f"optimizer: stages[{k}] under method {method.name!r}: parameter group {index} "
                    "has no smoothed momentum; pass smoothed=True to spectrain_ext.optim.SGD"
                )
    predicts = rules.predicts and not rules.keeps_before
    if not predicts and rules.correction is None:
        return
    if not isinstance(optimizer, _Predicting):
        same = "" if family is None else f"spectrain_ext.optim.{_CLASSES[family].__name__}, or "
        does = "corrects the steps of an optimizer of spectrain_ext.optim"
        if predicts:
            does = "predicts with the momentum of an optimizer of spectrain_ext.optim"
        raise ValueError(
            f"optimizer: stages[{k}] has {type(optimizer).__module__}.{kind}, and method "
            f"{method.name!r} {does}; use {same}a method that needs none, such as "
            "'auto' or spectrain_ext.spectrain(law='difference')"
        )
    try:
        if predicts:
            _check_laws(optimizer, rules)
        optimizer.check_correction(rules.correction)
    except (ValueError, TypeError) as error:
        wrong = TypeError if isinstance(error, TypeError) else ValueError
        raise wrong(f"optimizer: stages[{k}] under method {method.name!r}: {error}") from None
