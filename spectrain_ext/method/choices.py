"""Choices: what a method says at one place, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, NoReturn, get_args

from spectrain_ext.schedule import FLUSHING, Place, ReplicaPlace, Replicas, find_generator

from . import rules
from .value import FAMILIES, Backward, Law, Method, Reads, StageRule, WindowRule

#: A window setting: of the method, by name, for all stages, or one per stage.
Window = Literal["classic", "wide"] | int | Sequence[int] | None

_USUAL: dict[str, WindowRule] = {"gpipe": rules.all_microbatches, "1f1b": rules.flushing_window}
_NAMED: dict[str, WindowRule] = {"classic": rules.classic_window, "wide": rules.wide_window}


class Choices(NamedTuple):
    """A method at one place: the rules evaluated.

    Attributes:
        forward: updates that the forward predicts ahead; None: counted for each microbatch.
        backward_ahead: the same for a backward that predicts.

    The others are the Method's.
    """

    reads: Reads
    law: Law
    forward: int | None
    lead: int
    backward: Backward
    backward_ahead: int
    once: bool
    future_rates: bool

    @property
    def predicts(self) -> bool:
        """Whether any weights are predicted."""
        return self.forward != 0 or self.lead > 0 or self.backward_ahead > 0


def places_of(
    method: Method,
    stages: int,
    microbatches: int,
    window: Window = None,
    replicas: Replicas | None = None,
) -> list[Place]:
    """The place of every stage, or of each of its replicas, which all have the same.

    A replica of stage k has 1/r_k of a minibatch's microbatches. Its window is that of a stage 0 of
    so many stages as there are ranks from stage k on for each of its replicas, rounded up: for k =
    0 this is PipeDream's NOAM (Narayanan et al., 2019).

    Raises:
        ValueError: an unknown schedule, a window below 1, or one for a schedule that flushes; or
            replicas that the method cannot have, or that do not divide the microbatches.
        TypeError: a window that is no number.
    """
    if replicas is not None:
        _check_replicas(method, replicas, microbatches)
    try:
        find_generator(method.schedule)
    except ValueError as error:
        raise ValueError(f"method: schedule of {method.name!r}: {error}") from None
    counts = (1,) * stages if replicas is None else replicas.counts
    alone = all(r == 1 for r in counts)
    parts = [microbatches // r for r in counts]
    # What a named rule is asked for: the stage, the stages, the microbatches.
    asked = [(k, stages, microbatches) for k in range(stages)]
    if replicas is not None and not alone:
        asked = [(0, replicas.depth(k), parts[k]) for k in range(stages)]
    if window is not None:
        windows = _given_windows(method, asked, window)
    else:
        if method.window is not None:
            own = method.window
            windows = [own(k, stages, parts[k]) for k in range(stages)]
        else:
            rule = _USUAL.get(method.schedule, rules.classic_window)
            windows = [rule(*place) for place in asked]
        for k, w in enumerate(windows):
            _at_least(method, k, stages, "window", w, 1)
    if alone:
        _check_windows(windows)
        return [Place(k, stages, w, microbatches) for k, w in enumerate(windows)]
    if method.schedule not in FLUSHING:
        _check_replicas_windows(windows, counts)
    return [ReplicaPlace(k, stages, w, parts[k]) for k, w in enumerate(windows)]


def _check_replicas(method: Method, replicas: Replicas, microbatches: int) -> None:
    replicas.check_microbatches(microbatches)
    if method.forward_reads == "entry" and len(set(replicas.counts)) > 1:
        raise ValueError(
            f"replicas: method {method.name!r} has a microbatch read the version that stage 0 "
            "had at its entry, which is counted for as many replicas there as on every other "
            f"stage; expected the same number everywhere, got {list(replicas.counts)}"
        )


def _check_windows(windows: Sequence[int]) -> None:
    stages = len(windows)
    for k in range(stages - 1):
        if windows[k + 1] > windows[k]:
            raise ValueError(
                f"window: stage {k + 1} of {stages} would wait for {windows[k + 1]} microbatches, "
                f"and stage {k} sends no more than {windows[k]} before a backward: a deadlock"
            )


def _check_replicas_windows(windows: Sequence[int], counts: Sequence[int]) -> None:
    """No replica may wait for a microbatch that the stage before sends after its own next update.

    Before the backward of a microbatch stage k+1 has begun the forwards of the (w-1)*r after it.
    Stage k has begun w*r, but an update ends a minibatch on all replicas of it: r - 1 less.
    """
    for k in range(len(windows) - 1):
        later, earlier = ((windows[s] - 1) * counts[s] for s in (k + 1, k))
        if later > earlier:
            raise ValueError(
                f"window: stage {k + 1} of {len(windows)}, {windows[k + 1]} microbatches on each "
                f"of its {counts[k + 1]} replicas, would wait for more than stage {k} sends before "
                f"an update, {windows[k]} on each of its {counts[k]}: a deadlock"
            )


def _given_windows(
    method: Method, asked: Sequence[tuple[int, int, int]], window: Window
) -> list[int]:
    stages = len(asked)
    if method.schedule in FLUSHING:
        raise ValueError(
            f"window: method {method.name!r} finishes every minibatch before the next "
            f"(schedule {method.schedule!r}): there is no window to choose"
        )
    given: Sequence[object]
    if isinstance(window, str):
        if window not in _NAMED:
            raise ValueError(f"window: expected 'classic', 'wide' or numbers, got {window!r}")
        given = [_NAMED[window](*place) for place in asked]
    elif isinstance(window, Sequence):
        given = window
        if len(given) != stages:
            raise ValueError(f"window: expected one per stage ({stages}), got {len(given)}")
    else:
        given = [window] * stages
    checked = []
    for k, w in enumerate(given):
        if isinstance(w, bool) or not isinstance(w, int):
            raise TypeError(f"window: expected an int for stage {k}, got {type(w).__name__}")
        if w < 1:
            raise ValueError(f"window: expected at least 1 for stage {k} of {stages}, got {w}")
        checked.append(w)
    return checked


def choices_at(method: Method, place: Place) -> Choices:
    """The method at one place.

    Raises:
        ValueError: a value that a field cannot have, fields that contradict one another, or a place
            that the method is not defined for; the message names the method, the stage, the field.
    """
    for field, annotation in (("forward_reads", Reads), ("law", Law), ("backward", Backward)):
        _one_of(method, field, getattr(method, field), get_args(annotation))
    if method.direction is not None:
        _one_of(method, "direction", method.direction, ("ema",))
    for family in method.families:
        _one_of(method, "families", family, FAMILIES)
    counted = method.forward_horizon == "counted"
    if not counted:
        forward: int | None = _count(method, place, "forward_horizon")
    elif method.schedule in FLUSHING or rules.delay(place) == 0:
        forward = 0  # there is nothing to count
    else:
        forward = None
    found = Choices(
        method.forward_reads,
        method.law,
        forward,
        _count(method, place, "lead"),
        method.backward,
        _count(method, place, "backward_horizon"),
        method.once,
        method.future_rates,
    )
    _check_range(method, place)
    _check_contradictions(method, place, found)
    return found


def _check_contradictions(method: Method, place: Place, found: Choices) -> None:
    def refuse(field: str, why: str) -> NoReturn:
        raise ValueError(
            f"method: {field} of {method.name!r} at stage {place.stage} of {place.stages}: {why}"
        )

    if found.backward != "predict" and found.backward_ahead:
        refuse(
            "backward_horizon",
            f"backward={found.backward!r} predicts nothing, expected 0, got {found.backward_ahead}",
        )
    if found.lead and found.law != "second-order":
        refuse("lead", f"only the second-order law has one, expected 0, got {found.lead}")
    if found.reads != "newest" and (found.forward != 0 or found.lead):
        refuse(
            "forward_horizon",
            f"forward_reads={found.reads!r} reads an older version, whose momentum is gone; "
            "expected 0",
        )
    if found.reads != "newest" and found.once:
        refuse("once", f"needs forward_reads='newest', got {found.reads!r}")
    if found.law == "second-order" and method.forward_horizon == "counted":
        refuse("forward_horizon", "the step writes a second-order prediction, for one fixed delay")
    if found.future_rates and found.law not in ("linear", "geometric"):
        refuse("future_rates", f"the {found.law} law takes none")
    if found.reads == "previous" and rules.delay(place) > 1:
        refuse(
            "window",
            f"forward_reads='previous' needs a window of at most microbatches + 1 "
            f"({place.microbatches + 1}), got {place.window}",
        )


def _check_range(method: Method, place: Place) -> None:
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


def _count(method: Method, place: Place, field: str) -> int:
    rule: StageRule = getattr(method, field)
    if not isinstance(rule, Callable):  # type: ignore[arg-type]
        raise TypeError(
            f"method: {field} of {method.name!r}: expected a function of a Place, got {rule!r}"
        )
    value = rule(place)
    _at_least(method, place.stage, place.stages, field, value, 0)
    return value


def _at_least(method: Method, k: int, n: int, field: str, value: object, least: int) -> None:
    where = f"method: {field} of {method.name!r} gives {value!r} for stage {k} of {n}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{where}, expected an int")
    if value < least:
        raise ValueError(f"{where}, expected at least {least}")


def _one_of(method: Method, field: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(
            f"method: {field} of {method.name!r}: expected one of {', '.join(known)}, got {value!r}"
        )
