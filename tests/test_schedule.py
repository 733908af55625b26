"""Schedules as data: every stage's actions, what a run leaves of them, the versions they imply."""

from __future__ import annotations

from itertools import islice

import pytest

from spectrain_ext.schedule import Action, Cursor, Extent, Kind, one_f_one_b

SHORT = {Kind.FORWARD: "F", Kind.BACKWARD: "b", Kind.UPDATE: "u"}


def drawn(actions):
    return " ".join(f"{SHORT[a.kind]}{a.minibatch}" for a in actions if a.kind in SHORT)


def finite(stage, stages, window, minibatches, parts=1):
    extent = Extent(window)
    extent.minibatches = minibatches
    extent.shares = {i: [1 / parts] * parts for i in range(minibatches)}
    cursor = Cursor(one_f_one_b(stage, stages, window, parts), extent)
    found = []
    while (action := cursor.head()) is not None:
        found.append(action)
        cursor.advance()
    return found


def test_steady_state():
    actions = list(islice(one_f_one_b(1, 4, 3), 80))
    assert drawn(actions).startswith("F0 F1 F2 b0 u0 F3 b1 u1 F4 b2 u2 F5 b3 u3")


def test_warm_up_and_drain_are_what_is_left_of_the_endless_stream():
    assert drawn(finite(0, 4, 4, 5)) == "F0 F1 F2 F3 b0 u0 F4 b1 u1 b2 u2 b3 u3 b4 u4"
    assert drawn(finite(3, 4, 1, 3)) == "F0 b0 u0 F1 b1 u1 F2 b2 u2"
    assert drawn(finite(0, 4, 4, 2)) == "F0 F1 b0 u0 b1 u1"
    assert finite(0, 4, 4, 0) == []


def test_microbatches_share_one_update():
    assert drawn(finite(0, 2, 2, 2, parts=2)) == "F0 F0 F1 F1 b0 b0 u0 b1 b1 u1"
    actions = finite(1, 2, 1, 1, parts=2)
    assert [a.microbatch for a in actions if a.kind is Kind.BACKWARD] == [0, 1]


def test_a_small_minibatch_has_fewer_microbatches():
    extent = Extent(2)
    extent.add([0.5, 0.5])
    extent.add([1.0])
    extent.stop()
    cursor = Cursor(one_f_one_b(0, 1, 2, 2), extent)
    found = []
    while (action := cursor.head()) is not None:
        found.append(action)
        cursor.advance()
    assert drawn(found) == "F0 F0 F1 b0 b0 u0 b1 u1"


def test_a_run_that_ends_while_it_goes():
    extent = Extent(2)
    cursor = Cursor(one_f_one_b(0, 2, 2), extent)
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
    assert seen[-1] == Action(Kind.UPDATE, 2)


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_every_receive_has_its_send(stages):
    per_stage = [finite(k, stages, stages - k, 7, parts=2) for k in range(stages)]

    def of(k, kind):
        return [a[1:] for a in per_stage[k] if a.kind is kind]

    for k in range(stages - 1):
        assert of(k, Kind.SEND_ACTIVATION) == of(k + 1, Kind.RECEIVE_ACTIVATION)
        assert of(k + 1, Kind.SEND_GRADIENT) == of(k, Kind.RECEIVE_GRADIENT)
    assert of(0, Kind.SEND_GRADIENT) == of(stages - 1, Kind.SEND_ACTIVATION) == []
    assert len(of(0, Kind.PULL)) == 7
    assert len(of(stages - 1, Kind.LOSS)) == 14
