"""Checks a method at a place and derives the stage's rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Literal, NoReturn, Protocol, get_args, runtime_checkable

import torch

from spectrain_ext.operators.corrections import Correction, OwnCorrection, as_correction
from spectrain_ext.operators.laws import terms_of
from spectrain_ext.operators.numbers import Adam, Sgd
from spectrain_ext.schedule import Backward, Law, Place, Reads, Replicas, Rules

from .formulas import as_late, delay_under
from .places import Window, microbatches_of, phase_places
from .registry import find_method
from .value import FAMILIES, Method, at_least, named, phases_of, rate_at


@runtime_checkable
class _Predicting(Protocol):
    def check_can_predict(self) -> None: ...
    def check_correction(self, correction: Correction | None) -> None: ...


def check(
    method: str | Method,
    stages: int,
    *,
    microbatches: int | Literal["auto"] = "auto",
    window: Window = None,
    replicas: Replicas | Sequence[int] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Raise what ``Pipeline`` would with these arguments and optimizers like this one."""
    method = find_method(method)
    if replicas is not None and not isinstance(replicas, Replicas):
        replicas = Replicas(replicas)
    if microbatches == "auto":
        microbatches = microbatches_of(method, stages, replicas)
    of_phases = phase_places(method, stages, microbatches, window, replicas)
    for phase, places in zip(phases_of(method), of_phases, strict=True):
        for place in places:
            rules = rules_at(phase, place, optimizer)
            if optimizer is not None:
                check_optimizer(phase, rules, place.stage, optimizer)
    if replicas is not None:
        check_replicas(method, of_phases, replicas)


def check_replicas(
    method: Method, of_phases: Sequence[Sequence[Place]], replicas: Replicas
) -> None:
    """Refuse corrections that read stale weights on stages with several replicas."""
    for phase, places in zip(phases_of(method), of_phases, strict=True):
        for k, count in enumerate(replicas.counts):
            correction = _correction(phase, places[k]) if count > 1 else None
            if correction is not None and correction.reads_stale:
                raise ValueError(
                    f"replicas: method {phase.name!r} corrects gradients of stage {k} by the stale "
                    f"weights that they read, of which its {count} replicas have different ones, "
                    "and would drift apart; expected one replica of that stage"
                )


def check_optimizer(method: Method, rules: Rules, k: int, optimizer: torch.optim.Optimizer) -> None:
    """Refuse stage k's optimizer if the method does not support it or cannot predict with it."""
    family, kind = _family_of(optimizer), type(optimizer).__name__
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
    if predicts or rules.correction is not None:
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
                optimizer.check_can_predict()
            optimizer.check_correction(rules.correction)
        except (ValueError, TypeError) as error:
            wrong = TypeError if isinstance(error, TypeError) else ValueError
            raise wrong(f"optimizer: stages[{k}] under method {method.name!r}: {error}") from None


# AdamW is a subclass of Adam.
_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "nadam": torch.optim.NAdam,
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "muon": torch.optim.Muon,
}


def _family_of(optimizer: torch.optim.Optimizer) -> str | None:
    return next((name for name, kind in _CLASSES.items() if isinstance(optimizer, kind)), None)


def rules_at(method: Method, place: Place, optimizer: torch.optim.Optimizer | None = None) -> Rules:
    """Return the checked rules of a place, for an optimizer like the given one."""
    for field, annotation in (("forward_reads", Reads), ("backward", Backward)):
        _one_of(method, field, getattr(method, field), get_args(annotation))
    if callable(method.law):
        _check_own_law(method)
    else:
        _one_of(method, "law", method.law, get_args(Law))
    for family in method.families:
        _one_of(method, "families", family, FAMILIES)
    horizon: int | Literal["counted"] = "counted"
    if method.forward_horizon != "counted":
        horizon = _count(method, place, "forward_horizon")
    elif delay_under(method.schedule, place) == 0:
        horizon = 0  # no updates to count
    found = Rules(
        method.forward_reads,
        method.law,
        horizon,
        _count(method, place, "lead", _least_lead(method, horizon)),
        method.backward,
        _count(method, place, "backward_horizon"),
        method.once,
        _correction(method, place),
    )
    _check_range(method, place)
    _check_rates(method, place)
    _check_contradictions(method, place, found)
    if method.otherwise is None or optimizer is None or _has_momentum(optimizer):
        return found
    _one_of(method, "otherwise", method.otherwise, ("difference",))
    assert found.forward_horizon != "counted"
    horizon = found.forward_horizon + found.lead
    return replace(found, law=method.otherwise, forward_horizon=horizon, lead=0)


def _has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    if not isinstance(optimizer, _Predicting):
        return False
    try:
        optimizer.check_can_predict()
    except ValueError:
        return False
    return True


def in_words(
    method: Method, places: Sequence[Place], optimizer: torch.optim.Optimizer | None = None
) -> str:
    """Describe a method on these stages in a line: microbatches, delay, prediction, backward."""
    parts, late = places[0].microbatches, max(delay_under(method.schedule, at) for at in places)
    rules = [rules_at(method, place, optimizer) for place in places]
    said = f"{method.name}: {parts} microbatch{'es' * (parts > 1)} a minibatch"
    if late == 0:
        return f"{said}, nothing is late and nothing predicted"
    said += f", so that forwards are at most {_updates(late)} late"
    least = min(rate_at(method, place, 0) for place in places) if method.rates else 1.0
    if least != 1.0:
        said += f"; learning rates begin with {least:.3g} of their own at the least"
    horizons = [rule.forward_horizon for rule in rules]
    if "counted" in horizons:
        said += "; each is predicted by what it is late"
    else:
        ahead = [int(s) + rule.lead for s, rule in zip(horizons, rules, strict=True)]
        least, most = min(ahead), max(ahead)
        far = _updates(most) if least == most else f"{least} to {_updates(most)}"
        if most:
            law = rules[0].law
            name = law if isinstance(law, str) else getattr(law, "__name__", type(law).__name__)
            said += f"; every stage predicts {far} ahead by the {name} law"
    met = {
        "current": "backwards meet the newest weights",
        "predict": "backwards predict again",
        "stash": "backwards meet their forwards' weights",
    }
    back = method.law == "average"
    said += "; backwards look back" if back else f"; {met[method.backward]}"
    made = (rule.correction for rule in rules if rule.correction)
    owners = (one.rule if isinstance(one, OwnCorrection) else one for one in made)
    corrections = dict.fromkeys(type(one).__name__ for one in owners)
    if corrections:
        names = (re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower() for name in corrections)
        said += f"; steps have {' or '.join(names)}"
    if late > 1 and optimizer is not None and _family_of(optimizer) in ("adam", "adamw", "nadam"):
        said += f"; so late, SOAP loses far less than {type(optimizer).__name__}"
    return said


def _updates(count: int) -> str:
    return f"{count} update{'s' * (count != 1)}"


def _check_contradictions(method: Method, place: Place, found: Rules) -> None:
    def refuse(field: str, why: str) -> NoReturn:
        raise ValueError(f"{named(method, field, place)}: {why}")

    if found.backward != "predict" and found.backward_horizon:
        refuse(
            "backward_horizon",
            f"backward={found.backward!r} predicts nothing, expected 0, "
            f"got {found.backward_horizon}",
        )
    if found.lead and found.law != "second-order":
        refuse("lead", f"only the second-order law has one, expected 0, got {found.lead}")
    if found.forward_reads != "newest" and (found.forward_horizon != 0 or found.lead):
        refuse(
            "forward_horizon",
            f"forward_reads={found.forward_reads!r} reads an older version, whose momentum is "
            "gone; expected 0",
        )
    if found.forward_reads != "newest" and found.once:
        refuse("once", f"needs forward_reads='newest', got {found.forward_reads!r}")
    if method.otherwise is not None and method.forward_horizon == "counted":
        refuse("otherwise", "needs a horizon that is not counted")
    if found.law == "second-order" and method.forward_horizon == "counted":
        refuse("forward_horizon", "the step writes a second-order prediction, for one fixed delay")
    if found.law == "average" and (found.forward_horizon or found.backward != "predict"):
        refuse("law", "'average' looks back from the newest weights, for backward='predict' alone")
    if found.correction is not None and found.correction.reads_stale:
        for field, value in (("backward", "stash"), ("forward_reads", "newest")):
            if getattr(found, field) != value:
                why = f"{found.correction} compares weights with those of a forward that read the"
                refuse("correction", f"{why} newest, needs {field}={value!r}")
    if found.forward_reads == "previous" and delay_under(method.schedule, place) > 1:
        refuse(
            "window",
            f"forward_reads='previous' needs a window of at most microbatches + 1 "
            f"({place.microbatches + 1}), got {place.window}",
        )


def _check_range(method: Method, place: Place) -> None:
    at_least(method, place.stage, place.stages, "chunks", method.chunks, 1)
    if method.max_stages is not None and place.stages > method.max_stages:
        raise ValueError(
            f"method: {method.name!r} is defined for at most {method.max_stages} "
            f"stage{'s'[: method.max_stages != 1]}, got {place.stages}"
        )
    if method.min_microbatches is not None:
        least = method.min_microbatches(place)
        if place.microbatches < least:
            raise ValueError(
                f"method: {method.name!r} needs at least {least} microbatches for "
                f"{place.stages} stages, got {place.microbatches}"
            )


def _check_own_law(method: Method) -> None:
    """Refuse a function that returns no law, or one that needs the gradient."""
    assert callable(method.law)
    law, where = method.law(1), named(method, "law")
    if not all(callable(getattr(law, name, None)) for name in ("sgd", "adam")):
        raise TypeError(f"{where}: expected a function that gives a law (sgd, adam), got {law!r}")
    if not isinstance(law, Hashable):
        raise TypeError(
            f"{where}: expected a law that can be a key of a dict, as a frozen dataclass can, got "
            f"{law!r}"
        )
    kinds: tuple[tuple[Sgd | Adam, set[str]], ...] = (
        (Sgd(0.1, 0.9), {"sgd", "muon"}),
        (Adam(0.1, step=1), {"adam", "adamw", "nadam"}),
    )
    for numbers, families in kinds:
        known = families & {*method.families}
        if known and any(term.gradient for term in terms_of(law, numbers)):
            raise ValueError(
                f"{where}: {law!r} takes the gradient, which only a step has; 'second-order' is "
                "the one law that a step writes"
            )


def _rule(method: Method, field: str) -> Callable[[Place], Any]:
    rule = getattr(method, field)
    if not callable(rule):
        raise TypeError(f"{named(method, field)}: expected a function of a Place, got {rule!r}")
    found: Callable[[Place], Any] = rule
    return found


def _count(method: Method, place: Place, field: str, least: int = 0) -> int:
    value: int = _rule(method, field)(place)
    at_least(method, place.stage, place.stages, field, value, least)
    return value


def _least_lead(method: Method, horizon: int | str) -> int:
    """A second-order prediction is at least one update ahead."""
    return min(0, 1 - horizon) if method.law == "second-order" and type(horizon) is int else 0


def _check_rates(method: Method, place: Place) -> None:
    if method.rates is None:
        return
    where = named(method, "rates")
    if not callable(method.rates):
        raise TypeError(f"{where}: expected a function of a Place and an update's number")
    factor = rate_at(method, place, 0)
    if not (isinstance(factor, (int, float)) and 0.0 <= factor < inf):
        raise ValueError(
            f"{where} gives {factor!r} for the first update of stage {place.stage}, expected a "
            "number >= 0"
        )


def _correction(method: Method, place: Place) -> Correction | None:
    if method.correction is None:
        return None
    found = _rule(method, "correction")(as_late(method.schedule, place))
    try:
        return None if found is None else as_correction(found)
    except TypeError as error:
        why = str(error).removeprefix("correction: ")
        raise TypeError(f"{named(method, 'correction', place)}: {why}") from None


def _one_of(method: Method, field: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        one_of = f"expected one of {', '.join(known)}, got {value!r}"
        raise ValueError(f"{named(method, field)}: {one_of}")
