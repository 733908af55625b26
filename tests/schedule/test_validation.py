"""Tests validation by breaking every rule of schedules in every way."""

from __future__ import annotations

import pickle
from itertools import count

import pytest
from helpers.schedules import finite, runs, update
from hypothesis import given
from hypothesis import strategies as some

from spectrain_ext.schedule import Instruction, Kind, ScheduleError
from spectrain_ext.tools.simulation import streams, validate


@given(runs(least=0))
def test_what_the_generators_make_is_valid(run):
    limits = run.windows if run.name == "1f1b-async" else None
    sizes = {"minibatches": run.minibatches, "microbatches": run.microbatches}
    found = validate(run.streams(), **sizes, windows=limits)
    assert [count.updates for count in found] == [run.minibatches] * run.stages
    if run.minibatches:
        assert validate(run.finite()) == found


@given(runs(), some.data())
def test_an_action_that_is_missing_or_comes_twice_is_found(run, data):
    actions = run.finite()
    k = data.draw(some.integers(0, run.stages - 1))
    at = data.draw(some.integers(0, len(actions[k]) - 1))
    limits = {}
    if data.draw(some.booleans()):
        del actions[k][at]
        limits = {"minibatches": run.minibatches, "microbatches": run.microbatches}
    else:
        actions[k].insert(data.draw(some.integers(0, len(actions[k]))), actions[k][at])
    with pytest.raises(ScheduleError):
        validate(actions, **limits)


def without(stage, minibatch):
    """Two stages, of which one has no such minibatch."""
    actions = finite("1f1b-async", [2, 1], 6)
    actions[stage] = [a for a in actions[stage] if a.minibatch < minibatch]
    return actions


def reordered():
    actions = finite("gpipe", [1, 1], 1, 2)
    actions[1][:2] = reversed(actions[1][:2])
    return actions


TURN = [Instruction(Kind.BACKWARD, 2)]


def backward_at(place):
    """One stage of three minibatches, with another backward of the last one."""
    (actions,) = finite("1f1b-async", [1], 3)
    at = {"first": 0, "before": actions.index(update(2)), "last": len(actions)}[place]
    return [actions[:at] + TURN + actions[at:]]


ONE, TWO = ("1f1b-async", [1], 3, 2), ("gpipe", [1, 1], 3, 2)


def early_update():
    (actions,) = finite(*ONE)
    actions.remove(update(0))
    actions.insert(actions.index(Instruction(Kind.BACKWARD, 0, 1)), update(0))
    return [actions]


def swapped_update():
    return [[update(1) if a == update(0) else a for a in finite(*ONE)[0]]]


def forwards():
    return (Instruction(Kind.FORWARD, i) for i in count())


DEADLOCK = (
    "stage 0, receive gradient of minibatch 0, microbatch 0: a deadlock: stage 1, which sends it, "
    "waits at receive activation of minibatch 1, microbatch 0, which stage 0 sends later"
)
WINDOW = "stage 0, forward of minibatch 2, microbatch 0: the window allows 2"
NINE = {"minibatches": 9}
BROKEN = [
    (lambda: without(0, 5), {}, "1, receive activation of minibatch 5.*0 ends without sending it"),
    (lambda: without(1, 5), {}, "0, receive gradient of minibatch 5.*1 ends without sending it"),
    (reordered, {}, "stage 1, receive activation of .* 1: stage 0 sends minibatch 0, microbatch 0"),
    (lambda: streams("1f1b-async", [1, 2]), NINE, DEADLOCK),
    # The stages after it wait as well: the error names the cause, not them.
    (lambda: streams("1f1b-async", [4, 4, 1, 2]), NINE, "stage 2, .*a deadlock"),
    (lambda: streams("1f1b-async", [3, 2]), {**NINE, "windows": [2, 2]}, WINDOW),
    (lambda: backward_at("first"), {}, "0, backward of minibatch 2.*expected its forward before"),
    (lambda: backward_at("before"), {}, "backward of minibatch 2.*found again"),
    (lambda: backward_at("last"), {}, "found again: the minibatch has had its update"),
    (early_update, {}, "update of minibatch 0: expected backward of minibatch 0, microbatch 1"),
    (swapped_update, {}, "0, update of minibatch 1: expected update of minibatch 0 first"),
    (lambda: [finite(*ONE)[0][:-1]], {}, "stage 0, update of minibatch 2: missing at the end"),
    (lambda: finite(*ONE), {"minibatches": 4}, "update of minibatch 3: missing at the end"),
    (lambda: finite(*TWO), {"microbatches": 3}, "expected forward of .* 0, microbatch 2 before it"),
    (lambda: finite(*TWO), {"microbatches": 1}, "1: expected microbatches 0 to 0 only"),
    (lambda: [forwards()], NINE, "expected the update of minibatch 8 before it"),
]


@pytest.mark.parametrize(("made", "limits", "expected"), BROKEN)
def test_what_is_broken_is_named(made, limits, expected):
    with pytest.raises(ScheduleError, match=expected):
        validate(made(), **limits)


def test_an_error_has_its_stage_and_instruction():
    actions = finite("1f1b-async", [3, 2, 1], 6)
    actions[1].remove(Instruction(Kind.FORWARD, 4))
    expected = "stage 1, receive activation of minibatch 5, microbatch 0: stage 0 sends minibatch 4"
    with pytest.raises(ScheduleError, match=expected) as raised:
        validate(actions)
    error = raised.value
    assert (error.stage, error.instruction) == (1, Instruction(Kind.RECEIVE_ACTIVATION, 5))
    copy = pickle.loads(pickle.dumps(error))
    copied = str(copy), copy.stage, copy.instruction, copy.reason
    assert copied == (str(error), error.stage, error.instruction, error.reason)


@pytest.mark.parametrize(
    "kind", [Kind.PULL, Kind.LOAD_FORWARD, Kind.RECEIVE_GRADIENT, Kind.SEND_ACTIVATION, Kind.LOSS]
)
def test_what_is_no_computation_is_refused(kind):
    """Receives and sends follow from compute instructions and are not written by hand."""
    actions = finite("1f1b-async", [2, 1], 3)
    actions[1].insert(2, Instruction(kind, 0))
    said = r"made of forwards, backwards and updates only, as forward\(place, i, j\)"
    with pytest.raises(ScheduleError, match=rf"stage 1, {kind.value} of minibatch 0.*{said}"):
        validate(actions)


@pytest.mark.parametrize(
    ("windows", "microbatches", "limits", "expected"),
    [
        ([1, 1], 1, [1, 1, 1], "windows: expected one per stage, 2, got 3"),
        ([2, 0], 1, None, r"windows\[1\]: expected at least 1 microbatch, got 0"),
        ([2, 1], 0, None, "microbatches: expected at least 1, got 0"),
    ],
)
def test_arguments(windows, microbatches, limits, expected):
    with pytest.raises(ValueError, match=expected):
        validate(streams("gpipe", windows, microbatches), windows=limits, minibatches=1)
