"""Tests the generators: every stage's instructions in every schedule, and their consistency."""

from __future__ import annotations

from itertools import islice

import pytest

from spectrain_ext.schedule import (
    GENERATORS,
    Duties,
    Instruction,
    Kind,
    Place,
    find_generator,
    put_off,
    tables,
)

SHORT = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "b",
    Kind.BACKWARD_INPUT: "b",
    Kind.BACKWARD_WEIGHTS: "w",
    Kind.UPDATE: "u",
}


def drawn(schedule, place, count):
    actions = (a for a in GENERATORS[schedule](place) if a.kind in SHORT)
    words = []
    for kind, i, j in islice(actions, count):
        part = "" if kind is Kind.UPDATE or place.microbatches == 1 else f".{j}"
        words.append(f"{SHORT[kind]}{i}{part}")
    return " ".join(words)


def lower(instructions, place):
    first, later = tables(place, Duties())
    for kind, i, j in instructions:
        yield from (Instruction(step, i, j) for step in (later if j else first)[kind])


def finite(schedule, place, minibatches):
    """All instructions of a run of some minibatches, up to its last update."""
    found = []
    for action in lower(GENERATORS[schedule](place), place):
        if action.minibatch < minibatches:
            found.append(action)
        if action == (Kind.UPDATE, minibatches - 1, 0):
            return found
    raise AssertionError


def test_one_minibatch_per_update():
    assert drawn("1f1b-async", Place(1, 4, 3), 12) == "F0 F1 F2 b0 u0 F3 b1 u1 F4 b2 u2 F5"
    assert drawn("1f1b-async", Place(3, 4, 1), 6) == "F0 b0 u0 F1 b1 u1"


def test_microbatches_of_all_minibatches_are_one_row():
    assert (
        drawn("1f1b-async", Place(0, 3, 3, 2), 17)
        == "F0.0 F0.1 F1.0 b0.0 F1.1 b0.1 u0 F2.0 b1.0 F2.1 b1.1 u1 F3.0 b2.0 F3.1 b2.1 u2"
    )
    assert drawn("1f1b-async", Place(2, 3, 1, 2), 8) == "F0.0 b0.0 F0.1 b0.1 u0 F1.0 b1.0 F1.1"


def test_gpipe_and_1f1b_flush():
    assert (
        drawn("gpipe", Place(0, 4, 3, 3), 14)
        == "F0.0 F0.1 F0.2 b0.0 b0.1 b0.2 u0 F1.0 F1.1 F1.2 b1.0 b1.1 b1.2 u1"
    )
    assert (
        drawn("1f1b", Place(1, 3, 2, 3), 14)
        == "F0.0 F0.1 b0.0 F0.2 b0.1 b0.2 u0 F1.0 F1.1 b1.0 F1.2 b1.1 b1.2 u1"
    )
    assert drawn("1f1b", Place(0, 8, 8, 2), 5) == "F0.0 F0.1 b0.0 b0.1 u0"
    assert drawn("1f1b", Place(2, 3, 1, 2), 5) == "F0.0 b0.0 F0.1 b0.1 u0"


def test_backwards_in_halves():
    assert (
        drawn("zb-h1", Place(1, 3, 3, 4), 14)
        == "F0.0 F0.1 b0.0 F0.2 b0.1 w0.0 F0.3 b0.2 w0.1 b0.3 w0.2 w0.3 u0 F1.0"
    )
    assert drawn("zb-h1", Place(0, 3, 3, 2), 8) == "F0.0 F0.1 b0.0 w0.0 b0.1 w0.1 u0 F1.0"
    assert drawn("zb-h1", Place(2, 3, 3, 1), 5) == "F0 b0 w0 u0 F1"
    assert drawn("zb-h1", Place(2, 3, 1, 2), 7) == "F0.0 b0.0 w0.0 F0.1 b0.1 w0.1 u0"
    assert drawn("zb-h1-async", Place(1, 3, 2), 9) == "F0 F1 b0 w0 u0 F2 b1 w1 u1"


def test_what_is_put_off():
    for k in range(4):
        assert put_off("zb-h1", Place(k, 4, 4, 8)) == k + 1
        assert put_off("zb-h1", Place(k, 4, 4, 2)) == min(2, k + 1)
        assert put_off("zb-h1-async", Place(k, 4, 4 - k)) == 1
        assert put_off("1f1b", Place(k, 4, 4 - k, 8)) == 1


@pytest.mark.parametrize("schedule", GENERATORS)
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_the_actions_of_a_microbatch(schedule, parts):
    def of(k, i, j):
        actions = finite(schedule, Place(k, 3, 3 - k, parts), 4)
        return [a.kind.value for a in actions if (a.minibatch, a.microbatch) == (i, j)]

    forward = ["receive activation", "load forward weights", "forward"]
    receive, send = ["receive gradient"], ["send gradient"]
    backward, turn, rest = ["load backward weights"], "backward", []
    if schedule.startswith("zb"):
        rest = [*backward, "backward of the weights"]
        backward, turn = ["load weights of the input's backward"], "backward of the input"
    start = ["pull", *forward, "send activation", *receive, *backward, turn, *rest]
    first = of(0, 2, 0)
    assert [kind for kind in first if kind != "update"] == start
    middle = [*forward, "send activation", *receive, *backward, turn, *send, *rest]
    assert [kind for kind in of(1, 2, parts - 1) if kind != "update"] == middle
    last = [kind for kind in of(2, 2, parts - 1) if kind != "update"]
    assert last == [*forward, "loss", *backward, turn, *send, *rest]
    for k in range(3):
        updates = [
            a for a in finite(schedule, Place(k, 3, 3 - k, parts), 4) if a.kind.value == "update"
        ]
        assert updates == [Instruction(Kind.UPDATE, i) for i in range(4)]


@pytest.mark.parametrize("schedule", GENERATORS)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_every_receive_has_its_send(schedule, parts, stages):
    actions = [finite(schedule, Place(k, stages, stages - k, parts), 6) for k in range(stages)]

    def of(k, kind):
        return [a[1:] for a in actions[k] if a.kind is kind]

    every = [(i, j) for i in range(6) for j in range(parts)]
    for k in range(stages):
        halves = schedule.startswith("zb")
        first = Kind.BACKWARD_INPUT if halves else Kind.BACKWARD
        assert of(k, Kind.FORWARD) == of(k, first) == every
        assert of(k, Kind.LOAD_FORWARD) == of(k, Kind.LOAD_BACKWARD) == every
        assert of(k, Kind.LOAD_BACKWARD_INPUT) == of(k, Kind.BACKWARD_WEIGHTS)
        assert of(k, Kind.BACKWARD_WEIGHTS) == (every if halves else [])
    for k in range(stages - 1):
        assert of(k, Kind.SEND_ACTIVATION) == of(k + 1, Kind.RECEIVE_ACTIVATION) == every
        assert of(k + 1, Kind.SEND_GRADIENT) == of(k, Kind.RECEIVE_GRADIENT) == every
    assert of(0, Kind.SEND_GRADIENT) == of(stages - 1, Kind.SEND_ACTIVATION) == []
    assert of(0, Kind.PULL) == [(i, 0) for i in range(6)]
    assert of(stages - 1, Kind.LOSS) == every


@pytest.mark.parametrize("window", [1, 2, 3, 7])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_window_counts_microbatches(window, parts):
    flying, peak = 0, 0
    for kind, _, _ in finite("1f1b-async", Place(0, 4, window, parts), 12):
        flying += (kind is Kind.FORWARD) - (kind is Kind.BACKWARD)
        peak = max(peak, flying)
    assert peak == window


def test_streams_are_made_as_they_are_asked_for():
    for schedule in GENERATORS:
        place = Place(0, 2, 10**12)
        assert next(lower(find_generator(schedule)(place), place)).kind is Kind.PULL


def test_unknown_schedules():
    with pytest.raises(ValueError, match="no 'zero-bubble'; there are 1f1b-async, gpipe, 1f1b"):
        find_generator("zero-bubble")
