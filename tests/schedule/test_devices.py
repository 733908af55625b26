"""Tests several stages on one device: order, idle time, and the schedules made for it."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some
from oracle.schedules import counted, megatron

from spectrain_ext.schedule import (
    GENERATORS,
    Interleaved,
    Kind,
    Place,
    Rules,
    ScheduleError,
    WPipe,
    flushes,
    takes_window,
)
from spectrain_ext.simulation import (
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


def orders(schedule, devices, n, m, minibatches):
    found = device_order(made(schedule, n, m), devices, minibatches)
    return [
        [(SHORT[t.kind], k, t.minibatch, t.microbatch) for k, t in order if t.kind in SHORT]
        for order in found
    ]


def run(schedule, chunks, n, m, minibatches, **durations):
    """Spans, and the devices."""
    devices = [k % -(-n // chunks) for k in range(n)]
    durations = Durations.of(n, **{"forward": 1, "backward": 2, **durations})
    return simulate(
        made(schedule, n, m), durations, minibatches=minibatches, devices=devices
    ), devices


# The published order


@pytest.mark.parametrize(
    ("p", "v", "m"),
    [(1, 3, 4), (2, 2, 2), (2, 2, 8), (3, 4, 6), (4, 2, 4), (4, 2, 12), (4, 3, 4), (8, 2, 16)],
)
def test_interleaved_is_the_order_of_megatron(p, v, m):
    for d, order in enumerate(orders(Interleaved(v), [*range(p)] * v, p * v, m, 2)):
        expected = [(kind, c * p + d, j) for kind, c, j in megatron(p, d, v, m)]
        for i in range(2):
            assert [(kind, k, j) for kind, k, at, j in order if at == i] == expected


@pytest.mark.parametrize(("p", "v", "m"), [(4, 3, 8), (4, 4, 16), (8, 3, 24)])
def test_every_stage_keeps_to_it_where_a_device_does_not_wait(p, v, m):
    """From three chunks and four devices on; the next test has the time."""
    differ = 0
    for d, order in enumerate(orders(Interleaved(v), [*range(p)] * v, p * v, m, 1)):
        expected = [(kind, c * p + d, j) for kind, c, j in megatron(p, d, v, m)]
        found = [(kind, k, j) for kind, k, _, j in order]
        differ += found != expected
        for k in range(d, p * v, p):
            assert [at for at in found if at[1] == k] == [at for at in expected if at[1] == k]
    assert differ


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_the_published_bubble(p, v):
    """(P-1)/(v*M) of the work's time; section 2.2 of arXiv 2104.04473."""
    for rounds in (1, 2, 4):
        m = p * rounds
        for minibatches in (1, 3):
            spans, devices = run(Interleaved(v), v, p * v, m, minibatches)
            summary = summarize(spans, devices)
            assert summary.makespan == minibatches * (v * m + p - 1) * 3
            assert summary.bubbles == pytest.approx([(p - 1) / (v * m + p - 1)] * p)
    # 1F1B on as many devices, with stages v times as long, waits v times as long
    whole = streams("1f1b", [p - k for k in range(p)], m)
    spans = simulate(whole, Durations.of(p, forward=v, backward=2 * v), minibatches=1)
    assert summarize(spans).makespan == v * (m + p - 1) * 3


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
    assert [count.in_flight for count in found] == [n - k for k in range(n)]
    spans, _ = run(WPipe(), 2, n, m, 30)
    assert summarize(spans).period == 2 * m * 3  # a device's work
    # PipeDream-2BW on as many devices keeps two versions of everything, and is equally fast
    double = streams("1f1b-async", [p - k for k in range(p)], m)
    twice = Durations.of(p, forward=2, backward=4)
    assert summarize(simulate(double, twice, minibatches=30)).period == 2 * m * 3


def test_the_two_groups_by_hand():
    def words(k):
        actions = (a for a in WPipe()(Place(k, 4, 1, 2)) if a.kind in {**SHORT, Kind.UPDATE: "u"})
        named = {**SHORT, Kind.UPDATE: "u"}
        return " ".join(f"{named[a.kind]}{a.minibatch}.{a.microbatch}" for a in islice(actions, 11))

    assert words(0) == "F0.0 F0.1 F1.0 F1.1 B0.0 B0.1 u0.0 F2.0 F2.1 B1.0 B1.1"
    assert words(1) == "F0.0 F0.1 F1.0 B0.0 F1.1 B0.1 u0.0 F2.0 B1.0 F2.1 B1.1"
    assert words(2) == "F0.0 F0.1 B0.0 B0.1 u0.0 F1.0 F1.1 B1.0 B1.1 u1.0 F2.0"
    assert words(3) == "F0.0 B0.0 F0.1 B0.1 u0.0 F1.0 B1.0 F1.1 B1.1 u1.0 F2.0"


def test_what_a_schedule_says_of_itself():
    assert flushes(Interleaved()) and not flushes(Interleaved(flushes=False))
    assert not flushes(WPipe())
    assert [*map(takes_window, ("1f1b-async", "1f1b", WPipe(), Interleaved()))] == [
        *(True, False, False, False)
    ]
    with pytest.raises(ValueError, match="chunks: expected at least 1 stage per device, got 0"):
        Interleaved(0)


# Any stages on any devices


@some.composite
def settings(draw):
    n = draw(some.integers(1, 7))
    m = draw(some.integers(1, 4))
    schedule = draw(some.sampled_from([*sorted(GENERATORS), Interleaved(3), WPipe()]))
    if isinstance(schedule, str):
        windows, least = [], 1
        for _ in range(n):
            least = draw(some.integers(least, least + 3))
            windows.insert(0, least)
    else:
        windows = [schedule.window(k, n, m) for k in range(n)]
    devices = draw(some.lists(some.integers(0, 3), min_size=n, max_size=n))
    return schedule, windows, m, devices, draw(some.integers(1, 5))


@given(settings())
def test_devices_that_keep_to_their_orders_never_wait_for_ever(setting):
    """Each device does its turns in order, and waits for their inputs."""
    schedule, windows, m, devices, minibatches = setting
    n = len(windows)
    order = device_order(streams(schedule, windows, m), devices, minibatches)
    left = [list(turns) for turns in order]
    whole = [turn for turns in left for turn in turns if turn[1].kind is not Kind.BACKWARD_WEIGHTS]
    assert Counter(k for k, _ in whole) == {k: minibatches * (2 * m + 1) for k in range(n)}
    done, progress = set(), True
    while progress:
        progress = False
        for turns in reversed(left):
            while turns:
                k, (kind, i, j) = turns[0]
                before = k - 1 if kind is Kind.FORWARD else k + 1
                if kind in SHORT and 0 <= before < n and (before, kind, i, j) not in done:
                    break
                done.add((k, kind, i, j))
                progress = bool(turns.pop(0))
    assert not any(left)


@given(settings())
def test_a_device_does_one_thing_at_a_time_in_its_order(setting):
    schedule, windows, m, devices, minibatches = setting
    n = len(windows)
    durations = Durations.of(n, forward=1, backward=2, update=0.5, activation=0.25, gradient=0.25)
    spans = list(
        simulate(streams(schedule, windows, m), durations, minibatches=minibatches, devices=devices)
    )
    expected = device_order(streams(schedule, windows, m), devices, minibatches)
    for d, order in enumerate(expected):
        of = [s for s in spans if s.lane == "compute" and devices[s.stage] == d]
        assert [(s.stage, s.kind, s.minibatch) for s in of] == [
            (k, turn.kind, turn.minibatch) for k, turn in order
        ]
        assert all(a.end <= b.start for a, b in pairwise(of))
    alone = simulate(streams(schedule, windows, m), durations, minibatches=minibatches)
    apart = simulate(
        streams(schedule, windows, m), durations, minibatches=minibatches, devices=range(n)
    )
    assert sorted(map(str, alone)) == sorted(map(str, apart))


def test_orders_are_read_as_they_are_asked_for():
    first, second = device_order(made(Interleaved(flushes=False), 4, 1), [0, 1, 0, 1])
    assert next(second)[0] == 1
    assert [k for k, _ in islice(first, 3)] == [0, 0, 2]


def test_what_cannot_be_run():
    with pytest.raises(ValueError, match="device_of: expected one device per stage, 2, got 1"):
        list(device_order(streams("gpipe", [1, 1]), [0], 1)[0])
    actions = [list(stage) for stage in (islice(s, 60) for s in streams("1f1b-async", [1, 1]))]
    with pytest.raises(ScheduleError, match=r"stage 1, .*never arrives: no device can go on"):
        list(device_order([actions[0][:5], actions[1]], [0, 0])[0])
