"""Tests the generators against the order that their definition writes out, and what they become."""

from __future__ import annotations

from itertools import product

import pytest
from helpers.schedules import classic, wide
from oracle.schedules import flushing, order

from spectrain_ext.schedule import (
    GENERATORS,
    Instruction,
    Interleaved,
    Kind,
    Place,
    WPipe,
    bounded,
    find_generator,
    flushes,
    plain_steps,
    put_off,
    steps,
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
    handled = plain_steps(place)
    return [
        Instruction(step, i, j)
        for kind, i, j in bounded(find_generator(name)(place), place.stage, minibatches)
        for step in steps(kind, handled, first=not j)
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


def words(kind, handled=frozenset(Kind), **more):
    return [step.value for step in steps(kind, handled, **more)]


def test_what_belongs_to_an_instruction_comes_in_order():
    plain = plain_steps(Place(1, 3, 2, 2))
    forward = ["receive activation", "load forward weights", "forward", "send activation"]
    assert words(Kind.FORWARD, plain) == forward
    assert words(Kind.FORWARD, plain, blocks=True) == [forward[1], forward[0], *forward[2:]]
    assert words(Kind.FORWARD, blocks=True) == [
        *("pull", "load forward weights", "receive activation", "send tied weights"),
        *("receive tied weights", "forward", "loss", "metrics", "send activation"),
    ]
    assert words(Kind.FORWARD, first=False)[0] == "receive activation"
    assert words(Kind.BACKWARD, blocks=True) == [
        *("load backward weights", "receive gradient", "load tied weights", "recompute"),
        *("expect the gradients that are summed", "backward", "free tied weights"),
        *("check the gradient that goes back", "send gradient"),
        "hear that the next stage is through",
        "tell the previous stage that this one is through",
    ]
    assert words(Kind.UPDATE) == [
        *("send tied gradients", "add tied gradients", "sum gradients over replicas"),
        *("divide gradients by the count", "check for non-finite numbers", "send norm"),
        *("agree whether to update", "clip", "change gradients", "send weights to replicas"),
        *("update", "average weights over replicas", "report to the caller"),
    ]
    assert "recompute" in words(Kind.BACKWARD_INPUT)
    assert "recompute" not in words(Kind.BACKWARD_WEIGHTS)
