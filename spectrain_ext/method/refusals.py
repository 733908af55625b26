"""Refuses what registered methods with their usual windows cannot get wrong.

Loaded for methods of your own, windows that a caller chooses, and replicas.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from math import inf
from typing import Any, get_args

from spectrain_ext.operators.laws import terms_of
from spectrain_ext.operators.numbers import AdamNumbers, SgdNumbers
from spectrain_ext.schedule import (
    Backward,
    Law,
    Place,
    Reads,
    Replicas,
    Rules,
    ScheduleError,
    find_generator,
    flushes,
    name_of,
    takes_window,
)
from spectrain_ext.schedule.order import check_generator

from .formulas import WINDOWS, delay_under, none
from .value import FAMILIES, Method, Window, named, rate_at


def check_value(method: Method, place: Place, field: str, value: object, least: int) -> None:
    """Refuse a rule's value at a place unless it is an int and at least ``least``."""
    where = f"{named(method, field)} gives {value!r} for stage {place.stage} of {place.stages}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{where}, expected an int")
    if value < least:
        raise ValueError(f"{where}, expected at least {least}")


# Windows and replicas.


def check_setting(
    method: Method, stages: int, microbatches: int, window: Window, replicas: Replicas
) -> None:
    """Refuse a schedule, replicas or a chosen window before windows are computed."""
    counts = list(replicas.counts)
    if len(counts) != stages:
        raise ValueError(f"replicas: expected one number per stage ({stages}), got {counts}")
    for k, count in enumerate(counts):
        if microbatches % count:
            raise ValueError(
                f"replicas: stage {k} has {count}, which must divide the {microbatches} "
                "microbatches of a minibatch"
            )
    uneven = len(set(counts)) > 1
    if uneven and method.forward_reads == "entry":
        raise ValueError(
            f"replicas: method {method.name!r} has a microbatch read the version that stage 0 "
            "had at its entry, which is counted for as many replicas there as on every other "
            f"stage; expected the same number everywhere, got {counts}"
        )
    try:
        generate = find_generator(method.schedule)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{named(method, 'schedule')}: {error}") from None
    if uneven and hasattr(generate, "window"):
        raise ValueError(
            f"replicas: method {method.name!r} has a schedule with windows of its own "
            f"({name_of(method.schedule)!r}), made for as many replicas of every stage; expected "
            f"the same number everywhere, got {counts}"
        )
    if window is not None and not takes_window(method.schedule):
        why = "finishes every minibatch before the next"
        if not flushes(method.schedule):
            why = "has windows of its own"
        raise ValueError(
            f"window: method {method.name!r} {why} "
            f"(schedule {name_of(method.schedule)!r}): there is no window to choose"
        )
    numbers_of(window, stages)


def numbers_of(window: Window, stages: int) -> list[int] | None:
    """Return the checked window of every stage; None for no window or a named one."""
    if window is None:
        return None
    if isinstance(window, str):
        if window not in WINDOWS:
            raise ValueError(f"window: expected 'classic', 'wide' or numbers, got {window!r}")
        return None
    numbers = [*window] if isinstance(window, Sequence) else [window] * stages
    if len(numbers) != stages:
        raise ValueError(f"window: expected one per stage ({stages}), got {len(numbers)}")
    for k, number in enumerate(numbers):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"window: expected an int for stage {k}, got {type(number).__name__}")
        if number < 1:
            raise ValueError(f"window: expected at least 1 for stage {k} of {stages}, got {number}")
    return numbers


def check_places(method: Method, places: Sequence[Place], replicas: Replicas) -> None:
    """Refuse windows and schedules that cannot run."""
    for place in places:
        check_value(method, place, "window", place.window, 1)
    if not isinstance(method.schedule, str) and not replicas.dealt:
        try:
            check_generator(find_generator(method.schedule), places)
        except (ScheduleError, TypeError) as error:
            kind = ValueError if isinstance(error, ScheduleError) else TypeError
            raise kind(f"{named(method, 'schedule')}: {error}") from error
    elif not (replicas.dealt and flushes(method.schedule)):
        _check_deadlocks([place.window for place in places], replicas)


def _check_deadlocks(windows: Sequence[int], replicas: Replicas) -> None:
    """Refuse a stage that would wait for what the previous stage sends after its own next update.

    Before a microbatch's backward stage k+1 has begun (w-1)*r later forwards. Stage k has begun
    w*r, but an update ends a minibatch on all its replicas: r - 1 less.
    """
    counts = replicas.counts
    for k in range(len(windows) - 1):
        earlier, later = ((windows[s] - 1) * counts[s] for s in (k, k + 1))
        if later <= earlier:
            continue
        if not replicas.dealt:
            raise ValueError(
                f"window: stage {k + 1} of {len(windows)} would wait for {windows[k + 1]} "
                f"microbatches, and stage {k} sends no more than {windows[k]} before a backward: "
                "a deadlock"
            )
        raise ValueError(
            f"window: stage {k + 1} of {len(windows)}, {windows[k + 1]} microbatches on each "
            f"of its {counts[k + 1]} replicas, would wait for more than stage {k} sends before "
            f"an update, {windows[k]} on each of its {counts[k]}: a deadlock"
        )


def check_replicas(
    method: Method,
    places: Sequence[Place],
    replicas: Replicas,
    passes: Sequence[Any] = (),  # beside the method's own
) -> None:
    """Refuse replicas of late stages whose gradients passes cannot use summed."""
    reason = next((each.alone for each in (*passes, *method.passes) if each.alone), None)
    for place, count in zip(places, replicas.counts, strict=True):
        if reason and count > 1 and delay_under(method.schedule, place):
            raise ValueError(
                f"replicas: method {method.name!r} {reason}; expected one replica of stage "
                f"{place.stage}, got {count}"
            )


# Methods of your own.


def check_fields(method: Method, place: Place) -> None:
    """Refuse values that a field cannot have, before rules are computed."""
    if callable(method.law):
        _check_law(method)
    for field, value, known in (
        ("forward_reads", method.forward_reads, get_args(Reads)),
        ("backward", method.backward, get_args(Backward)),
        ("law", "linear" if callable(method.law) else method.law, get_args(Law)),
        ("otherwise", method.otherwise or "difference", ("difference",)),
        *(("families", family, FAMILIES) for family in method.families),
    ):
        if value not in known:
            one_of = f"expected one of {', '.join(known)}, got {value!r}"
            raise ValueError(f"{named(method, field)}: {one_of}")
    rules: dict[str, object] = {
        "lead": method.lead,
        "backward_horizon": method.backward_horizon,
        "correction": method.correction or none,
    }
    if method.forward_horizon != "counted":
        rules["forward_horizon"] = method.forward_horizon
    for field, rule in rules.items():
        if not callable(rule):
            raise TypeError(f"{named(method, field)}: expected a function of a Place, got {rule!r}")
    if method.rates is not None:
        _check_rates(method, place)
    for each in method.passes:
        each.check(method)


def _check_rates(method: Method, place: Place) -> None:
    where = named(method, "rates")
    if not callable(method.rates):
        raise TypeError(f"{where}: expected a function of a Place and an update's number")
    factor = rate_at(method, place, 0)
    if not (isinstance(factor, (int, float)) and 0.0 <= factor < inf):
        raise ValueError(
            f"{where} gives {factor!r} for the first update of stage {place.stage}, expected a "
            "number >= 0"
        )


def _check_law(method: Method) -> None:
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
    kinds: tuple[tuple[SgdNumbers | AdamNumbers, set[str]], ...] = (
        (SgdNumbers(0.1, 0.9), {"sgd", "muon"}),
        (AdamNumbers(0.1, step=1), {"adam", "adamw", "nadam"}),
    )
    for numbers, families in kinds:
        known = families & {*method.families}
        if known and any(term.gradient for term in terms_of(law, numbers)):
            raise ValueError(
                f"{where}: {law!r} takes the gradient, which only a step has; 'second-order' is "
                "the one law that a step writes"
            )


def check_rules(method: Method, place: Place, rules: Rules) -> None:
    """Refuse rules that are no numbers of updates, or that contradict each other."""
    ahead: list[tuple[str, object, int]] = [
        ("chunks", method.chunks, 1),
        ("backward_horizon", rules.backward_horizon, 0),
    ]
    least = 0
    if rules.forward_horizon != "counted":
        ahead.insert(0, ("forward_horizon", rules.forward_horizon, 0))
        if rules.law == "second-order":  # at least one update ahead
            least = min(0, 1 - int(rules.forward_horizon))
    for field, value, minimum in (*ahead, ("lead", rules.lead, least)):
        check_value(method, place, field, value, minimum)
    for field, why in _contradictions(method, rules):
        raise ValueError(f"{named(method, field, place)}: {why}")


def _contradictions(method: Method, rules: Rules) -> Iterator[tuple[str, str]]:
    """Yield fields, and why their values are impossible beside those of others."""
    if rules.backward != "predict" and rules.backward_horizon:
        why = f"backward={rules.backward!r} predicts nothing, expected 0, got "
        yield "backward_horizon", f"{why}{rules.backward_horizon}"
    if rules.lead and rules.law != "second-order":
        yield "lead", f"only the second-order law has one, expected 0, got {rules.lead}"
    if rules.forward_reads != "newest":
        reads = f"forward_reads={rules.forward_reads!r}"
        counted = rules.forward_horizon == "counted"
        if rules.lead or counted or (rules.forward_horizon and rules.law != "difference"):
            why = "reads an older version, whose momentum is gone; expected 0, or law='difference'"
            yield "forward_horizon", f"{reads} {why}"
        if rules.once:
            yield "once", f"needs forward_reads='newest', got {rules.forward_reads!r}"
    if method.forward_horizon == "counted" and method.otherwise is not None:
        yield "otherwise", "needs a horizon that is not counted"
    if method.forward_horizon == "counted" and rules.law == "second-order":
        why = "the step writes a second-order prediction, for one fixed delay"
        yield "forward_horizon", why
    if rules.law == "average" and (rules.forward_horizon or rules.backward != "predict"):
        yield "law", "'average' looks back from the newest weights, for backward='predict' alone"
