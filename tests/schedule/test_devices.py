"""Tests several stages on one device: order, idle time, and the schedules made for it."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise, product

import pytest
from helpers.schedules import classic, runs
from hypothesis import given
from hypothesis import strategies as some
from oracle.schedules import counted, megatron

from spectrain_ext.schedule import GENERATORS, Interleaved, Kind, Place, Rules, ScheduleError, WPipe
from spectrain_ext.tools.simulation import (
    Durations,
    check_generator,
    device_order,
    simulate,
    streams,
    summarize,
    validate,
)

SHORT = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_INPUT: "B"}


def places(schedule, n, m):
    return [Place(k, n, schedule.window(k, n, m), m) for k in range(n)]


def made(schedule, n, m):
    return [schedule(place) for place in places(schedule, n, m)]


def summary_of(schedule, chunks, n, m, minibatches):
    """Simulate with as many stages per device, one forward and two for a backward."""
    devices = [k % -(-n // chunks) for k in range(n)]
    durations = Durations.of(n, forward=1, backward=2)
    spans = simulate(made(schedule, n, m), durations, minibatches=minibatches, devices=devices)
    return summarize(spans, devices)


def summary_of_whole(name, p, m, minibatches, length):
    """Simulate ``p`` devices with a stage each, that take so many times as long."""
    durations = Durations.of(p, forward=length, backward=2 * length)
    return summarize(simulate(streams(name, classic(p), m), durations, minibatches=minibatches))


# The published order


@pytest.mark.parametrize(
    ("p", "v", "m"), [(1, 3, 4), (2, 2, 8), (3, 4, 6), (4, 2, 12), (4, 3, 4), (8, 2, 16)]
)
def test_interleaved_is_the_order_of_megatron(p, v, m):
    """With more chunks, a device of Megatron-LM's waits where ours does not."""
    order = list(device_order(made(Interleaved(v), p * v, m), [*range(p)] * v, 2))
    for d in range(p):
        mine = [(k, turn) for k, turn in order if k % p == d and turn.kind in SHORT]
        found = [(SHORT[t.kind], k, t.minibatch, t.microbatch) for k, t in mine]
        once = [(kind, c * p + d, j) for kind, c, j in megatron(p, d, v, m)]
        assert found == [(kind, k, i, j) for i in range(2) for kind, k, j in once]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_the_published_bubble(p, v):
    """(P-1)/(v*M) of the work's time; section 2.2 of arXiv 2104.04473."""
    for rounds, minibatches in product((1, 2, 4), (1, 3)):
        m = p * rounds
        summary = summary_of(Interleaved(v), v, p * v, m, minibatches)
        assert summary.makespan == minibatches * (v * m + p - 1) * 3
        assert summary.bubbles == pytest.approx([(p - 1) / (v * m + p - 1)] * p)
    # 1F1B on as many devices, with stages v times as long, waits v times as long
    assert summary_of_whole("1f1b", p, m, 1, v).makespan == v * (m + p - 1) * 3


# Schedules as values


def test_one_chunk_is_the_schedule_with_wide_windows():
    schedule = Interleaved(1, flushes=False)
    for k, place in enumerate(places(schedule, 5, 2)):
        assert place.window == 2 * (5 - k) - 1
        usual = GENERATORS["1f1b-async"](place)
        assert list(islice(schedule(place), 400)) == list(islice(usual, 400))


@pytest.mark.parametrize("schedule", [Interleaved(), Interleaved(flushes=False), WPipe()], ids=repr)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8, 11])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 8])
def test_windows_and_delays_are_the_definitions(schedule, n, m):
    """Whether everything divides or not: the oracle counts its own orders."""
    name = "wpipe" if isinstance(schedule, WPipe) else "interleaved"
    name += "-async" * (schedule == Interleaved(flushes=False))
    at = places(schedule, n, m)
    check_generator(schedule, at)
    found = validate(made(schedule, n, m), minibatches=4 * n // m + 8, microbatches=m)
    for k, count in enumerate(found):
        assert (count.in_flight, max(count.delays)) == counted(name, k, n, m)
        assert count.in_flight == at[k].window


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_wpipe_is_never_idle_and_half_of_it_never_late(p):
    n, m = 2 * p, p
    rules = [Rules(backward="stash")] * n
    found = validate(made(WPipe(), n, m), minibatches=20, microbatches=m, rules=rules)
    assert [max(count.delays) for count in found] == [1] * p + [0] * p
    assert found[0].delays == {0: m, 1: 19 * m}  # no delay in the first minibatch
    assert [count.versions for count in found] == [2] * p + [1] * p
    assert [count.in_flight for count in found] == classic(n)
    assert summary_of(WPipe(), 2, n, m, 30).period == 2 * m * 3  # a device's work
    # PipeDream-2BW on as many devices keeps two versions of everything, and is equally fast
    assert summary_of_whole("1f1b-async", p, m, 30, 2).period == 2 * m * 3


# Any stages on any devices


@some.composite
def settings(draw):
    run = draw(runs(7, most=5, names=[*sorted(GENERATORS), Interleaved(3), WPipe()]))
    devices = some.lists(some.integers(0, 3), min_size=run.stages, max_size=run.stages)
    return run, draw(devices)


@given(settings())
def test_a_device_does_one_thing_at_a_time_in_its_order_and_never_waits_for_ever(setting):
    run, devices = setting
    n = run.stages
    durations = Durations.of(n, forward=1, backward=2, update=0.5, activation=0.25, gradient=0.25)

    def simulated(on):
        return list(simulate(run.streams(), durations, minibatches=run.minibatches, devices=on))

    spans = simulated(devices)
    order = list(device_order(run.streams(), devices, run.minibatches))
    for d in range(1 + max(devices)):
        of = [s for s in spans if s.lane == "compute" and devices[s.stage] == d]
        assert [(s.stage, s.kind, s.minibatch) for s in of] == [
            (k, turn.kind, turn.minibatch) for k, turn in order if devices[k] == d
        ]
        assert all(a.end <= b.start for a, b in pairwise(of))
    updates = [0] * n
    for k, turn in order:
        if turn.kind is Kind.UPDATE:
            assert updates[k] == min(updates[m] for m in range(n) if devices[m] == devices[k])
            updates[k] += 1
    whole = [s for s in spans if s.lane == "compute" and s.kind is not Kind.BACKWARD_WEIGHTS]
    each = run.minibatches * (2 * run.microbatches + 1)
    assert Counter(s.stage for s in whole) == dict.fromkeys(range(n), each)
    assert sorted(map(str, simulated(None))) == sorted(map(str, simulated(range(n))))


def test_an_order_is_read_as_it_is_asked_for():
    order = device_order(made(Interleaved(flushes=False), 4, 1), [0, 1, 0, 1])
    assert [k for k, _ in islice(order, 5)] == [0, 1, 0, 1, 2]


def test_what_cannot_be_run():
    with pytest.raises(ValueError, match="device_of: expected one device per stage, 2, got 1"):
        next(device_order(streams("gpipe", [1, 1]), [0], 1))
    actions = [list(stage) for stage in (islice(s, 60) for s in streams("1f1b-async", [1, 1]))]
    with pytest.raises(ScheduleError, match=r"stage 1, .*: stage 0 ends without sending it"):
        list(device_order([actions[0][:5], actions[1]], [0, 0]))
