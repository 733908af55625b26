"""Tests the generators against the order that their definition writes out, and what they become."""

from __future__ import annotations

from itertools import product

import pytest
from helpers.schedules import classic, wide
from oracle.schedules import flushing, order

from spectrain_ext.schedule import (
    GENERATORS,
    Duties,
    Instruction,
    Interleaved,
    Kind,
    Place,
    WPipe,
    bounded,
    find_generator,
    flushes,
    put_off,
    tables,
    takes_window,
)

LETTERS = {
    **{Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_INPUT: "B"},
    **{Kind.BACKWARD_WEIGHTS: "W", Kind.UPDATE: "U"},
}
CHUNKED = {
    "interleaved": Interleaved(),
    "interleaved-async": Interleaved(flushes=False),
    "wpipe": WPipe(),
}


@pytest.mark.parametrize("name", [*GENERATORS, *CHUNKED])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_every_stage_does_what_the_definition_writes_out(name, n):
    generate = find_generator(CHUNKED.get(name, name))
    windows = {"classic": classic(n), "wide": wide(n), "all": [n] * n}
    for (kind, m), count in product(product(windows, (1, 2, 3, 4, 8)), (1, 2, 5)):
        for k, window in enumerate(windows[kind]):
            if name == "1f1b":
                expected = flushing(window, [m] * count)
            elif name == "zb-h1" and kind != "all":
                continue  # its window is the number of stages
            else:
                expected = order(name, k, n, window, m, [m] * count)
            found = [
                (LETTERS[what], i, None if what is Kind.UPDATE else j)
                for what, i, j in bounded(generate(Place(k, n, window, m)), k, count)
            ]
            assert found == [*expected], (kind, m, count, k)


def test_what_is_put_off():
    for k in range(4):
        assert put_off("zb-h1", Place(k, 4, 4, 8)) == k + 1
        assert put_off("zb-h1", Place(k, 4, 4, 2)) == min(2, k + 1)
        assert put_off("zb-h1-async", Place(k, 4, 4 - k)) == 1
        assert put_off("1f1b", Place(k, 4, 4 - k, 8)) == 1


def test_what_a_schedule_says_of_itself():
    flushing = {name: flushes(name) for name in GENERATORS}
    assert {name for name, says in flushing.items() if says} == {"gpipe", "1f1b", "zb-h1"}
    assert {name: flushes(find_generator(name)) for name in GENERATORS} == flushing
    assert flushes(Interleaved()) and not flushes(Interleaved(flushes=False))
    assert not flushes(WPipe())
    made = ("1f1b-async", "1f1b", WPipe(), Interleaved())
    assert [*map(takes_window, made)] == [True, False, False, False]
    with pytest.raises(ValueError, match="chunks: expected at least 1 stage per device, got 0"):
        Interleaved(0)
    with pytest.raises(ValueError, match="no 'zero-bubble'; there are 1f1b-async, gpipe, 1f1b"):
        find_generator("zero-bubble")


def test_streams_are_made_as_they_are_asked_for():
    for name in GENERATORS:
        assert next(find_generator(name)(Place(0, 2, 10**12))) == Instruction(Kind.FORWARD, 0)


# What instructions become: loads, receives and sends around them


def lowered(name, place, minibatches):
    first, later = tables(place, Duties())
    return [
        Instruction(step, i, j)
        for kind, i, j in bounded(find_generator(name)(place), place.stage, minibatches)
        for step in (later if j else first)[kind]
    ]


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_every_receive_has_its_send(name, parts, stages):
    actions = [lowered(name, Place(k, stages, stages - k, parts), 6) for k in range(stages)]

    def of(k, kind):
        return [a[1:] for a in actions[k] if a.kind is kind]

    every = [(i, j) for i in range(6) for j in range(parts)]
    halves = name.startswith("zb")
    for k in range(stages):
        first = Kind.BACKWARD_INPUT if halves else Kind.BACKWARD
        assert of(k, Kind.FORWARD) == of(k, first) == every
        assert of(k, Kind.LOAD_FORWARD) == of(k, Kind.LOAD_BACKWARD) == every
        assert of(k, Kind.LOAD_BACKWARD_INPUT) == of(k, Kind.BACKWARD_WEIGHTS)
        assert of(k, Kind.BACKWARD_WEIGHTS) == (every if halves else [])
        assert of(k, Kind.PULL) == [(i, 0) for i in range(6) if not k]
        assert of(k, Kind.LOSS) == (every if k == stages - 1 else [])
    for k in range(stages - 1):
        assert of(k, Kind.SEND_ACTIVATION) == of(k + 1, Kind.RECEIVE_ACTIVATION) == every
        assert of(k + 1, Kind.SEND_GRADIENT) == of(k, Kind.RECEIVE_GRADIENT) == every
    assert of(0, Kind.SEND_GRADIENT) == of(stages - 1, Kind.SEND_ACTIVATION) == []


def words(place, duties=None):
    """Return what each kind of instruction becomes for a minibatch's first microbatch."""
    first, _ = tables(place, duties or Duties())
    return {kind.value: [each.value for each in to] for kind, to in first.items()}


MIDDLE, LAST = Place(1, 3, 2, 2), Place(2, 3, 1, 2)
EVERY = Duties(*[True] * len(Duties._fields))._replace(evaluates=False)


def test_what_belongs_to_an_instruction_comes_in_order():
    forward = ["receive activation", "load forward weights", "forward", "send activation"]
    assert words(MIDDLE)["forward"] == forward
    word = "tell the previous stage that this one is through"
    assert words(LAST, Duties(evaluates=True))["backward"] == [word]
    found = words(MIDDLE, EVERY)
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
    told = words(MIDDLE, EVERY._replace(tells_norm=False))
    assert told["backward"][-2:] == ["check the gradient that goes back", "send gradient"]
    assert "agree whether to update" not in told["update"]
    assert "recompute" in found["backward of the input"]
    assert "recompute" not in found["backward of the weights"]
