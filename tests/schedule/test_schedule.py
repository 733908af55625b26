"""Tests schedules as data: every stage's instructions, shortened runs, implied versions."""

from __future__ import annotations

import pytest

from spectrain_ext.pipeline.edges import Cursor
from spectrain_ext.schedule import Duties, Instruction, Kind, Place, find_generator, tables

SHORT = {Kind.FORWARD: "F", Kind.BACKWARD: "b", Kind.UPDATE: "u"}


def drawn(actions):
    return " ".join(f"{SHORT[a.kind]}{a.minibatch}" for a in actions if a.kind in SHORT)


def cursor_of(place, schedule="1f1b-async"):
    return Cursor(find_generator(schedule)(place))


def left(cursor):
    """Return the instructions that the schedule yields while each one is completed."""
    found = []
    while (instruction := cursor.take()) is not None:
        found.append(instruction)
        if instruction.kind is Kind.UPDATE:
            cursor.shares.pop(instruction.minibatch)
    return found


def finite(place, minibatches, schedule="1f1b-async"):
    cursor = cursor_of(place, schedule)
    for _ in range(minibatches):
        cursor.add(place.microbatches)
    cursor.stop()
    return left(cursor)


def test_warm_up_and_drain_are_what_is_left_of_the_endless_stream():
    assert drawn(finite(Place(0, 4, 4), 5)) == "F0 F1 F2 F3 b0 u0 F4 b1 u1 b2 u2 b3 u3 b4 u4"
    assert drawn(finite(Place(3, 4, 1), 3)) == "F0 b0 u0 F1 b1 u1 F2 b2 u2"
    assert drawn(finite(Place(0, 4, 4), 2)) == "F0 F1 b0 u0 b1 u1"
    assert finite(Place(0, 4, 4), 0) == []


def test_microbatches_share_one_update():
    assert drawn(finite(Place(0, 2, 2, 2), 2)) == "F0 F0 b0 F1 b0 u0 F1 b1 b1 u1"
    assert drawn(finite(Place(0, 2, 2, 2), 2, "gpipe")) == "F0 F0 b0 b0 u0 F1 F1 b1 b1 u1"
    actions = finite(Place(1, 2, 1, 2), 1)
    assert [a.microbatch for a in actions if a.kind is Kind.BACKWARD] == [0, 1]


def test_a_small_minibatch_has_fewer_microbatches():
    cursor = cursor_of(Place(0, 1, 2, 2))
    cursor.add(2)
    cursor.add(1)
    cursor.stop()
    assert drawn(left(cursor)) == "F0 F0 b0 F1 b0 u0 b1 u1"
    assert cursor.finished
    assert not cursor.shares


def test_a_run_that_ends_while_it_goes():
    cursor, seen = cursor_of(Place(0, 2, 2)), []
    while (instruction := cursor.take()) is not None:
        if instruction == Instruction(Kind.FORWARD, 3):
            cursor.stop()
        else:
            seen.append(instruction)
            if instruction.kind is Kind.FORWARD:
                cursor.add(1)
    assert drawn(seen) == "F0 F1 b0 u0 F2 b1 u1 b2 u2"


def words(place, duties=None):
    """Return what each kind of instruction becomes for a minibatch's first microbatch."""
    first, _ = tables(place, duties or Duties())
    return {kind.value: [each.value for each in to] for kind, to in first.items()}


def test_what_belongs_to_an_update_comes_in_order():
    every = Duties(*[True] * len(Duties._fields))._replace(evaluates=False)
    found = words(Place(1, 3, 2, 2), every)
    assert found["update"] == [
        *("send tied gradients", "add tied gradients", "sum gradients over replicas"),
        *("divide gradients by the count", "check for non-finite numbers", "send norm"),
        *("agree whether to update", "clip", "send weights to replicas", "update"),
        *("average weights over replicas", "report to the caller"),
    ]
    assert found["forward"] == [
        *("pull", "load forward weights", "receive activation", "send tied weights"),
        *("receive tied weights", "forward", "send activation"),
    ]
    assert found["backward"] == [
        *("load backward weights", "receive gradient", "load tied weights", "recompute"),
        *("expect the gradients that are summed", "backward", "free tied weights"),
        "send gradient",
    ]
    told = words(Place(1, 3, 2, 2), every._replace(tells_norm=False))
    assert told["backward"][-2:] == ["check the gradient that goes back", "send gradient"]
    assert "agree whether to update" not in told["update"]
    assert "recompute" in found["backward of the input"]
    assert "recompute" not in found["backward of the weights"]


@pytest.mark.parametrize("field", Duties._fields)
def test_each_duty_adds_its_own_instructions_and_moves_no_other(field):
    place = Place(1, 3, 2, 2)
    plain = words(place)
    found = words(place, Duties(**{field: True}))
    if field == "evaluates":
        assert found["backward"] == [
            "hear that the next stage is through",
            "tell the previous stage that this one is through",
        ]
        assert found["forward"] == ["receive activation", "forward", "send activation"]
        return
    added = {each for to in found.values() for each in to} - {
        e for to in plain.values() for e in to
    }
    assert bool(added) == (field != "blocks")
    for kind, to in plain.items():
        rest = [each for each in found[kind] if each not in added]
        assert sorted(rest) == sorted(to) if field == "blocks" else rest == to
