"""Computes and checks the window of every stage under a method."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Literal

from spectrain_ext.schedule import (
    Place,
    Replicas,
    ScheduleError,
    find_generator,
    flushes,
    name_of,
    put_off,
    takes_window,
)

from .formulas import delay_under
from .value import Method, WindowRule, at_least, named, phases_of

#: A window setting: None (the method's), a name, one for all stages, or one per stage.
Window = Literal["classic", "wide"] | int | Sequence[int] | None

# At k = 0 the classic window is PipeDream's NOAM (Narayanan et al., 2019).
_NAMED: dict[str, WindowRule] = {
    "classic": lambda k, n, m: n - k,  # until the first one returns
    "wide": lambda k, n, m: 2 * (n - k) - 1,  # hides messages too, at twice the staleness
}
_USUAL: dict[str, WindowRule] = {
    "gpipe": lambda k, n, m: m,  # a whole minibatch
    "1f1b": lambda k, n, m: min(n - k, m),  # the classic window, within one minibatch
    "zb-h1": lambda k, n, m: n,  # the classic one, and k with half a backward to come
}


def places_of(
    method: Method,
    stages: int,
    microbatches: int,
    window: Window = None,
    replicas: Replicas | None = None,
) -> list[Place]:
    """Return the place of every stage, which all its replicas share; refuse impossible windows."""
    if replicas is None:
        replicas = Replicas((1,) * stages)
    if replicas.stages != stages:
        raise ValueError(
            f"replicas: expected one number per stage ({stages}), got {list(replicas.counts)}"
        )
    for k, count in enumerate(replicas.counts):
        if microbatches % count:
            raise ValueError(
                f"replicas: stage {k} has {count}, which must divide the {microbatches} "
                "microbatches of a minibatch"
            )
    if method.forward_reads == "entry" and len(set(replicas.counts)) > 1:
        raise ValueError(
            f"replicas: method {method.name!r} has a microbatch read the version that stage 0 "
            "had at its entry, which is counted for as many replicas there as on every other "
            f"stage; expected the same number everywhere, got {list(replicas.counts)}"
        )
    try:
        generate = find_generator(method.schedule)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{named(method, 'schedule')}: {error}") from None
    if hasattr(generate, "window") and len(set(replicas.counts)) > 1:
        raise ValueError(
            f"replicas: method {method.name!r} has a schedule with windows of its own "
            f"({name_of(method.schedule)!r}), made for as many replicas of every stage; expected "
            f"the same number everywhere, got {list(replicas.counts)}"
        )
    parts = [microbatches // count for count in replicas.counts]
    # With replicas stage k's window is that of stage 0 in a pipeline with as many stages as there
    # are ranks from stage k on, per replica of it.
    asked = [(k, k + replicas.depth(k), parts[k]) for k in range(stages)]
    if window is not None:
        windows = _given_windows(method, asked, window)
    else:
        usual = _USUAL.get(str(method.schedule), _NAMED["classic"])
        rule = method.window or getattr(generate, "window", None) or usual
        windows = [rule(*of) for of in asked]
        for k, w in enumerate(windows):
            at_least(method, k, stages, "window", w, 1)
    places = [Place(k, stages, w, parts[k]) for k, w in enumerate(windows)]
    if not isinstance(method.schedule, str) and not replicas.dealt:
        # Here, because named schedules need no check.
        from spectrain_ext.schedule.order import check_generator

        try:
            check_generator(generate, places)
        except (ScheduleError, TypeError) as error:
            kind = ValueError if isinstance(error, ScheduleError) else TypeError
            raise kind(f"{named(method, 'schedule')}: {error}") from error
    elif not (replicas.dealt and flushes(method.schedule)):
        _check_windows(windows, replicas)
    latest = delay_under(method.schedule, places[0])
    return [place._replace(latest=latest) for place in places]


def microbatches_of(method: Method, stages: int, replicas: Replicas | None = None) -> int:
    """Return the default number of microbatches: a multiple of every stage's replicas."""
    usual = 1
    for phase in phases_of(method):
        if phase.microbatches is not None:
            wanted = phase.microbatches(stages)
            at_least(phase, 0, stages, "microbatches", wanted, 1)
            usual = max(usual, wanted)
    each = 1 if replicas is None else lcm(*replicas.counts)
    return -(-usual // each) * each


def put_off_by(method: Method, places: Sequence[Place]) -> list[int]:
    return [max(put_off(p.schedule, place) for p in phases_of(method)) for place in places]


def phase_places(
    method: Method,
    stages: int,
    microbatches: int,
    window: Window = None,
    replicas: Replicas | None = None,
) -> list[list[Place]]:
    """Return ``places_of`` each phase; a window applies to phases that do not flush."""
    phases = phases_of(method)
    flushing = [flushes(phase.schedule) for phase in phases]
    windows = [None if each and not all(flushing) else window for each in flushing]
    return [
        places_of(phase, stages, microbatches, asked, replicas)
        for phase, asked in zip(phases, windows, strict=True)
    ]


def _check_windows(windows: Sequence[int], replicas: Replicas) -> None:
    """Refuse a stage that would wait for what the previous stage sends after its own next update.

    Before a microbatch's backward stage k+1 has begun (w-1)*r later forwards. Stage k has begun
    w*r, but an update ends a minibatch on all its replicas: r - 1 less.
    """
    counts = replicas.counts
    for k in range(len(windows) - 1):
        later, earlier = ((windows[s] - 1) * counts[s] for s in (k + 1, k))
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


def numbers_of(window: Window, stages: int) -> list[int] | None:
    """Return the checked window of every stage; None for no window or a named one."""
    if window is None:
        return None
    if isinstance(window, str):
        if window not in _NAMED:
            raise ValueError(f"window: expected 'classic', 'wide' or numbers, got {window!r}")
        return None
    given: Sequence[object] = window if isinstance(window, Sequence) else [window] * stages
    if len(given) != stages:
        raise ValueError(f"window: expected one per stage ({stages}), got {len(given)}")
    checked = []
    for k, w in enumerate(given):
        if isinstance(w, bool) or not isinstance(w, int):
            raise TypeError(f"window: expected an int for stage {k}, got {type(w).__name__}")
        if w < 1:
            raise ValueError(f"window: expected at least 1 for stage {k} of {stages}, got {w}")
        checked.append(w)
    return checked


def _given_windows(
    method: Method, asked: Sequence[tuple[int, int, int]], window: Window
) -> list[int]:
    stages = len(asked)
    if not takes_window(method.schedule):
        why = "finishes every minibatch before the next"
        if not flushes(method.schedule):
            why = "has windows of its own"
        raise ValueError(
            f"window: method {method.name!r} {why} "
            f"(schedule {name_of(method.schedule)!r}): there is no window to choose"
        )
    given = numbers_of(window, stages)
    if given is None:
        return [_NAMED[str(window)](*of) for of in asked]
    return given
