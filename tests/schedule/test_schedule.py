"""Schedules as data: every stage's actions, what a run leaves of them, the versions they imply."""

from __future__ import annotations

from spectrain_ext.pipeline.cursor import Cursor, Extent
from spectrain_ext.schedule import Instruction, Kind, Place, find_generator, lower

SHORT = {Kind.FORWARD: "F", Kind.BACKWARD: "b", Kind.UPDATE: "u"}


def drawn(actions):
    return " ".join(f"{SHORT[a.kind]}{a.minibatch}" for a in actions if a.kind in SHORT)


def finite(place, minibatches, schedule="1f1b-async"):
    extent = Extent(place.window)
    extent.minibatches = minibatches
    extent.shares = {i: [1 / place.microbatches] * place.microbatches for i in range(minibatches)}
    cursor = Cursor(find_generator(schedule)(place), extent)
    found = []
    while (action := cursor.head()) is not None:
        found.append(action)
        cursor.advance()
    return found


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
    extent = Extent(2)
    extent.add([0.5, 0.5])
    extent.add([1.0])
    extent.stop()
    cursor = Cursor(find_generator("1f1b-async")(Place(0, 1, 2, 2)), extent)
    found = []
    while (action := cursor.head()) is not None:
        found.append(action)
        cursor.advance()
    assert drawn(found) == "F0 F0 b0 F1 b0 u0 b1 u1"


def test_a_run_that_ends_while_it_goes():
    extent = Extent(2)
    place = Place(0, 2, 2)
    cursor = Cursor(lower(find_generator("1f1b-async")(place), place), extent)
    seen = []
    while (action := cursor.head()) is not None:
        cursor.advance()
        seen.append(action)
        if action.kind is Kind.PULL:
            if action.minibatch == 3:
                extent.stop()
            else:
                extent.add([1.0])
    assert drawn(seen) == "F0 F1 b0 u0 F2 b1 u1 b2 u2"
    assert seen[-1] == Instruction(Kind.UPDATE, 2)
