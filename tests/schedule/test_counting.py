"""Tests counted staleness: the versions that every microbatch uses, including fill and drain."""

from __future__ import annotations

import tracemalloc
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as some

from spectrain_ext.schedule import GENERATORS, Kind, Rules, ScheduleError
from spectrain_ext.simulation import Durations, simulate, streams, validate


def classic(n):
    return [n - k for k in range(n)]


class Reading(NamedTuple):
    version: int
    horizon: int


class Met(NamedTuple):
    forward: Reading
    backward: Reading


def met(name, windows, minibatches, microbatches=1, rules=None):
    """stage -> (minibatch, microbatch) -> what it read."""
    n = len(windows)
    forwards, found = [{} for _ in windows], [{} for _ in windows]
    rules = None if rules is None else [rules] * n
    schedule = streams(name, windows, microbatches)
    for span in simulate(schedule, Durations.of(n), minibatches=minibatches, rules=rules):
        part, reading = (span.minibatch, span.microbatch), Reading(span.version, span.horizon)
        if span.kind is Kind.FORWARD:
            forwards[span.stage][part] = reading
        elif span.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            found[span.stage][part] = Met(forwards[span.stage][part], reading)
    return found


def counts(name, windows, minibatches, microbatches=1, **rules):
    schedule = streams(name, windows, microbatches)
    return validate(
        schedule,
        minibatches=minibatches,
        microbatches=microbatches,
        rules=[Rules(**rules)] * len(windows),
    )


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_the_definition_of_1f1b_without_a_flush(n):
    for k, of in enumerate(met("1f1b-async", classic(n), 20)):
        assert sorted(of) == [(i, 0) for i in range(20)]
        for i in range(20):
            assert of[i, 0].forward == (max(0, i - (n - k) + 1), 0)
            assert of[i, 0].backward == (i, 0)


@some.composite
def runs(draw):
    windows, least = [], 1
    for _ in range(draw(some.integers(1, 6))):
        least = draw(some.integers(least, least + 4))
        windows.insert(0, least)
    return windows, draw(some.integers(1, 5)), draw(some.integers(1, 9))


@given(runs())
def test_any_window_and_any_number_of_microbatches(run):
    """Microbatch q's forward follows the backward of q - w; its backward follows all before it."""
    windows, m, minibatches = run
    for k, of in enumerate(met("1f1b-async", windows, minibatches, m)):
        assert len(of) == m * minibatches
        for (i, j), found in of.items():
            done = max(0, i * m + j - windows[k] + 1)
            assert found.forward.version == done // m
            assert found.backward.version == i


@given(runs(), some.sampled_from(["gpipe", "1f1b"]))
def test_a_flush_leaves_no_staleness(run, name):
    windows, m, minibatches = run
    for of in met(name, windows, minibatches, m):
        assert all(f.forward == f.backward == (i, 0) for (i, _), f in of.items())


@given(runs())
def test_the_counted_horizon_meets_the_backward(run):
    windows, m, minibatches = run
    for of in met("1f1b-async", windows, minibatches, m, Rules(forward_horizon="counted")):
        assert all(f.forward.version + f.forward.horizon == f.backward.version for f in of.values())


@given(runs())
def test_entry_is_the_version_of_stage_0(run):
    windows, m, minibatches = run
    found = met(
        "1f1b-async", windows, minibatches, m, Rules(forward_reads="entry", backward="stash")
    )
    for of in found:
        assert {q: f.forward for q, f in of.items()} == {q: f.forward for q, f in found[0].items()}
        assert all(f.forward == f.backward for f in of.values())


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 2), (4, 4), (4, 7), (8, 8)])
def test_the_delay_of_2bw_is_exactly_1(n, m):
    rules = {"forward_reads": "previous", "backward": "stash"}
    for count in counts("1f1b-async", classic(n), 12, m, **rules):
        assert count.delays == {0: m, 1: 11 * m}
        assert count.versions == 2
    for of in met("1f1b-async", classic(n), 12, m, Rules(**rules)):
        assert all(f.backward == (max(0, i - 1), 0) for (i, _), f in of.items())


def test_2bw_needs_its_previous_version():
    with pytest.raises(ScheduleError, match=r"stage 0, forward of minibatch 2.*reads version 1 "):
        counts("1f1b-async", classic(4), 12, 1, forward_reads="previous", backward="stash")


def test_once_holds_for_the_whole_minibatch():
    for of in met("1f1b-async", classic(4), 9, 3, Rules(once=True, forward_horizon="counted")):
        assert all(of[i, j].forward == of[i, 0].forward for i, j in of)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_most_microbatches_in_flight(n):
    assert [c.in_flight for c in counts("1f1b-async", classic(n), 20, 3)] == classic(n)
    assert [c.in_flight for c in counts("gpipe", classic(n), 20, 3)] == [3] * n
    assert [c.in_flight for c in counts("1f1b", classic(n), 20, 3)] == [
        min(3, n - k) for k in range(n)
    ]
    assert [c.in_flight for c in counts("1f1b-async", classic(n), 2, 1)] == [
        min(2, n - k) for k in range(n)
    ]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, [1, 1, 1, 1]),
        ({"backward": "stash"}, [4, 3, 2, 1]),
        ({"forward_horizon": 2}, [2, 2, 2, 2]),
        ({"forward_horizon": "counted"}, [2, 2, 2, 2]),
        ({"forward_horizon": 3, "backward": "predict", "backward_horizon": 1}, [2, 2, 2, 2]),
        ({"forward_horizon": 1, "backward": "stash"}, [5, 4, 3, 2]),
        ({"forward_reads": "entry", "backward": "stash"}, [4, 4, 4, 4]),
        ({"law": "difference", "forward_horizon": 2}, [3, 3, 3, 3]),
    ],
)
def test_the_most_weights_at_one_time(rules, expected):
    assert [c.versions for c in counts("1f1b-async", classic(4), 20, **rules)] == expected


def test_once_keeps_the_first_microbatchs_prediction():
    def versions(windows, **rules):
        found = counts("1f1b-async", windows, 5, 3, forward_horizon=2, **rules)
        return [count.versions for count in found]

    # The backwards in between use the true weights, or others in a separate buffer.
    assert versions([1]) == [2]
    assert versions([1], once=True) == [2]
    assert versions([2, 1], once=True) == [2, 2]
    predicting = {"backward": "predict", "backward_horizon": 1}
    assert versions([1], **predicting) == [3]
    assert versions([1], once=True, **predicting) == [3]


def test_what_a_step_wrote_is_kept_for_all_forwards_of_its_version():
    rules = {"law": "second-order", "forward_horizon": 1, "backward": "predict"}

    def versions(m):
        return [count.versions for count in counts("1f1b-async", [1], 5, m, **rules)]

    assert versions(1) == [3]
    assert versions(2) == [3]  # the backward in between needs other weights
    for of in met("1f1b-async", [1], 3, 2, Rules(**rules)):
        # no step has written a prediction before the first
        assert [of[i, j].forward for i, j in sorted(of)][::2] == [(0, 0), (1, 1), (2, 1)]


def test_delays_include_warm_up_and_drain():
    assert counts("1f1b-async", classic(4), 20)[0].delays == {0: 1, 1: 1, 2: 1, 3: 17}
    assert counts("1f1b-async", [7, 5, 3, 1], 20)[1].delays == {0: 1, 1: 1, 2: 1, 3: 1, 4: 16}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_long_run_takes_no_more_memory_than_a_short_one(name):
    def peak(minibatches):
        tracemalloc.start()
        counts(name, [3, 2, 1], minibatches, 2, backward="stash")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak(100)
    assert peak(1500) < 1.5 * peak(300)
