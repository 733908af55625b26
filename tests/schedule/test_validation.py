"""Tests validation by breaking every rule of schedules in every way."""

from __future__ import annotations

import pickle

import pytest
from helpers.schedules import finite, named_windows
from hypothesis import given
from hypothesis import strategies as some

from spectrain_ext.schedule import Instruction, Kind, ScheduleError
from spectrain_ext.simulation import streams, validate


@some.composite
def runs(draw):
    name, windows = draw(named_windows(6))
    return name, windows, draw(some.integers(1, 4)), draw(some.integers(0, 8))


@given(runs())
def test_what_the_generators_make_is_valid(run):
    name, windows, microbatches, minibatches = run
    endless = streams(name, windows, microbatches)
    limits = windows if name == "1f1b-async" else None
    found = validate(endless, minibatches=minibatches, microbatches=microbatches, windows=limits)
    assert [count.updates for count in found] == [minibatches] * len(windows)
    if minibatches:
        assert validate(finite(name, windows, minibatches, microbatches)) == found


@given(runs(), some.data())
def test_an_action_that_is_missing_is_found(run, data):
    name, windows, microbatches, minibatches = run
    actions = finite(name, windows, minibatches + 1, microbatches)
    k = data.draw(some.integers(0, len(windows) - 1))
    at = data.draw(some.integers(0, len(actions[k]) - 1))
    del actions[k][at]
    with pytest.raises(ScheduleError):
        validate(actions, minibatches=minibatches + 1, microbatches=microbatches)


@given(runs(), some.data())
def test_an_action_that_comes_twice_is_found(run, data):
    name, windows, microbatches, minibatches = run
    actions = finite(name, windows, minibatches + 1, microbatches)
    k = data.draw(some.integers(0, len(windows) - 1))
    at = data.draw(some.integers(0, len(actions[k]) - 1))
    to = data.draw(some.integers(0, len(actions[k])))
    actions[k].insert(to, actions[k][at])
    with pytest.raises(ScheduleError):
        validate(actions)


def check(actions, *expected, **limits):
    with pytest.raises(ScheduleError) as raised:
        validate(actions, **limits)
    for text in expected:
        assert text in str(raised.value)
    return raised.value


def test_a_missing_forward():
    actions = finite("1f1b-async", [3, 2, 1], 6)
    actions[1].remove(Instruction(Kind.FORWARD, 4))
    error = check(
        actions,
        "stage 1, receive activation of minibatch 5, microbatch 0: stage 0 sends minibatch 4",
    )
    assert error.stage == 1
    assert error.instruction == Instruction(Kind.RECEIVE_ACTIVATION, 5)
    copy = pickle.loads(pickle.dumps(error))
    copied = str(copy), copy.instruction, copy.reason
    assert copied == (str(error), error.instruction, error.reason)


@pytest.mark.parametrize(
    "kind", [Kind.PULL, Kind.LOAD_FORWARD, Kind.RECEIVE_GRADIENT, Kind.SEND_ACTIVATION, Kind.LOSS]
)
def test_what_is_no_computation_is_refused(kind):
    """Receives and sends follow from compute instructions and are not written by hand."""
    actions = finite("1f1b-async", [2, 1], 3)
    actions[1].insert(2, Instruction(kind, 0))
    where = f"stage 1, {kind.value} of minibatch 0"
    check(actions, where, "made of forwards, backwards and updates only, as forward(place, i, j)")


def test_a_microbatch_that_is_not_sent_on():
    actions = finite("1f1b-async", [2, 1], 6)
    actions[0] = [a for a in actions[0] if a.minibatch < 5]
    check(actions, "stage 1, receive activation of minibatch 5", "stage 0 ends without sending it")


def test_a_microbatch_that_is_not_received():
    actions = finite("1f1b-async", [2, 1], 6)
    actions[1] = [a for a in actions[1] if a.minibatch < 5]
    check(actions, "stage 0, receive gradient of minibatch 5", "stage 1 ends without sending it")


def test_another_order_at_the_other_end_of_an_edge():
    actions = finite("gpipe", [1, 1], 1, 2)
    actions[1][:2] = reversed(actions[1][:2])
    check(
        actions,
        "stage 1, receive activation of minibatch 0, microbatch 1",
        "stage 0 sends minibatch 0, microbatch 0",
    )


def test_a_deadlock_of_windows():
    check(
        streams("1f1b-async", [1, 2]),
        "stage 0, receive gradient of minibatch 0, microbatch 0: a deadlock",
        "stage 1, which sends it, waits at receive activation of minibatch 1, microbatch 0, which "
        "stage 0 sends later",
        minibatches=9,
    )
    # The stages after it wait as well: the error names the cause, not them.
    error = check(streams("1f1b-async", [4, 4, 1, 2]), "a deadlock", minibatches=9)
    assert error.stage == 2
    # With one minibatch there is nothing to wait for.
    validate(streams("1f1b-async", [1, 2]), minibatches=1)


def test_a_window_that_is_exceeded():
    check(
        streams("1f1b-async", [3, 2]),
        "stage 0, forward of minibatch 2, microbatch 0: the window allows 2",
        minibatches=9,
        windows=[2, 2],
    )


def test_backward_before_forward_and_twice():
    actions = finite("1f1b-async", [1], 3)
    turn = [Instruction(Kind.BACKWARD, 2)]
    check([turn + actions[0]], "stage 0, backward of minibatch 2", "expected its forward before it")
    at = actions[0].index(Instruction(Kind.UPDATE, 2))
    check([actions[0][:at] + turn + actions[0][at:]], "backward of minibatch 2", "found again")
    check([actions[0] + turn], "found again: the minibatch has had its update")


def test_updates():
    actions = finite("1f1b-async", [1], 3, 2)[0]
    early = list(actions)
    early.remove(Instruction(Kind.UPDATE, 0))
    early.insert(early.index(Instruction(Kind.BACKWARD, 0, 1)), Instruction(Kind.UPDATE, 0))
    check([early], "stage 0, update of minibatch 0: expected backward of minibatch 0, microbatch 1")
    swapped = [a._replace(minibatch=1) if a == Instruction(Kind.UPDATE, 0) else a for a in actions]
    check([swapped], "stage 0, update of minibatch 1: expected update of minibatch 0 first")
    check([actions[:-1]], "stage 0, update of minibatch 2: missing at the end")
    check([actions], "update of minibatch 3: missing at the end", minibatches=4)


def test_the_number_of_microbatches():
    actions = finite("gpipe", [1, 1], 3, 2)
    check(actions, "expected forward of minibatch 0, microbatch 2 before it", microbatches=3)
    check(
        actions,
        "forward of minibatch 0, microbatch 1: expected microbatches 0 to 0 only",
        microbatches=1,
    )


def test_an_endless_stream_that_never_updates():
    def idle():
        i = 0
        while True:
            yield Instruction(Kind.FORWARD, i)
            i += 1

    check([idle()], "expected the update of minibatch 1 before it", minibatches=2)


def test_arguments():
    with pytest.raises(ValueError, match="windows: expected one per stage, 2, got 3"):
        validate(streams("gpipe", [1, 1]), windows=[1, 1, 1], minibatches=1)
    with pytest.raises(ValueError, match=r"windows\[1\]: expected at least 1 microbatch, got 0"):
        streams("1f1b-async", [2, 0])
    with pytest.raises(ValueError, match="microbatches: expected at least 1, got 0"):
        streams("1f1b-async", [2, 1], 0)
