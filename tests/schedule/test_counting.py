"""Tests counted staleness: the versions that every microbatch uses, including fill and drain."""

from __future__ import annotations

import tracemalloc
from typing import NamedTuple

import pytest
from helpers.schedules import Run, classic, runs
from hypothesis import given

from spectrain_ext.schedule import Kind, Rules, ScheduleError
from spectrain_ext.tools.simulation import Durations, simulate, streams, validate

ASYNC = runs(names=["1f1b-async"])


class Reading(NamedTuple):
    version: int
    horizon: int


class Met(NamedTuple):
    forward: Reading
    backward: Reading


def met(run, **rules):
    """stage -> (minibatch, microbatch) -> what it read."""
    forwards, found = [{} for _ in run.windows], [{} for _ in run.windows]
    each = [Rules(**rules)] * run.stages
    durations = Durations.of(run.stages)
    for span in simulate(run.streams(), durations, minibatches=run.minibatches, rules=each):
        part, reading = (span.minibatch, span.microbatch), Reading(span.version, span.horizon)
        if span.kind is Kind.FORWARD:
            forwards[span.stage][part] = reading
        elif span.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            found[span.stage][part] = Met(forwards[span.stage][part], reading)
        elif span.kind is Kind.UPDATE:
            assert reading == (span.minibatch + 1, 0)
    assert [len(of) for of in found] == [run.microbatches * run.minibatches] * run.stages
    return found


def counts(windows, minibatches=20, microbatches=1, name="1f1b-async", **rules):
    return validate(
        streams(name, windows, microbatches),
        minibatches=minibatches,
        microbatches=microbatches,
        rules=[Rules(**rules)] * len(windows),
    )


@given(ASYNC)
def test_any_window_and_any_number_of_microbatches(run):
    """Microbatch q's forward follows the backward of q - w; its backward follows all before it."""
    for of, window in zip(met(run), run.windows, strict=True):
        for (i, j), found in of.items():
            done = max(0, i * run.microbatches + j - window + 1)
            assert found.forward == (done // run.microbatches, 0)
            assert found.backward == (i, 0)
    for of in met(run, forward_horizon="counted"):
        assert all(f.forward.version + f.forward.horizon == f.backward.version for f in of.values())
    ahead = {"forward_horizon": 3, "backward": "predict", "backward_horizon": 2}
    assert {f.horizon for of in met(run, **ahead) for both in of.values() for f in both} == {2, 3}


@given(runs(names=["gpipe", "1f1b", "zb-h1"]))
def test_a_flush_leaves_no_staleness(run):
    for of in met(run):
        assert all(f.forward == f.backward == (i, 0) for (i, _), f in of.items())


@given(ASYNC)
def test_entry_is_the_version_of_stage_0(run):
    found = met(run, forward_reads="entry", backward="stash")
    for of in found:
        assert {q: f.forward for q, f in of.items()} == {q: f.forward for q, f in found[0].items()}
        assert all(f.forward == f.backward for f in of.values())


@given(ASYNC)
def test_once_holds_for_the_whole_minibatch(run):
    for of in met(run, once=True, forward_horizon="counted"):
        assert all(of[i, j].forward == of[i, 0].forward for i, j in of)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 2), (4, 4), (4, 7), (8, 8)])
def test_the_delay_of_2bw_is_exactly_1(n, m):
    rules = {"forward_reads": "previous", "backward": "stash"}
    for count in counts(classic(n), 12, m, **rules):
        assert count.delays == {0: m, 1: 11 * m}
        assert count.versions == 2
    for of in met(Run("1f1b-async", classic(n), m, 12), **rules):
        assert all(f.backward == (max(0, i - 1), 0) for (i, _), f in of.items())
    # with too wide a window its previous version does not exist
    with pytest.raises(ScheduleError, match=r"stage 0, forward of minibatch 2.*reads version 1 "):
        counts(classic(4), 12, 1, **rules)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_most_microbatches_in_flight(n):
    for name, minibatches, m, expected in (
        ("1f1b-async", 20, 3, classic(n)),
        ("1f1b-async", 2, 1, [min(2, w) for w in classic(n)]),
        ("gpipe", 20, 3, [3] * n),
        ("1f1b", 20, 3, [min(3, w) for w in classic(n)]),
    ):
        assert [c.in_flight for c in counts(classic(n), minibatches, m, name)] == expected


PREDICTS = {"backward": "predict", "backward_horizon": 1}
ONCE = {"forward_horizon": 2, "once": True}
BY_STEP = {"law": "second-order", "forward_horizon": 1, "backward": "predict"}


@pytest.mark.parametrize(
    ("windows", "microbatches", "rules", "expected"),
    [
        ([4, 3, 2, 1], 1, {}, [1, 1, 1, 1]),
        ([4, 3, 2, 1], 1, {"backward": "stash"}, [4, 3, 2, 1]),
        ([4, 3, 2, 1], 1, {"forward_horizon": 2}, [2, 2, 2, 2]),
        ([4, 3, 2, 1], 1, {"forward_horizon": "counted"}, [2, 2, 2, 2]),
        ([4, 3, 2, 1], 1, {"forward_horizon": 3, **PREDICTS}, [2, 2, 2, 2]),
        ([4, 3, 2, 1], 1, {"forward_horizon": 1, "backward": "stash"}, [5, 4, 3, 2]),
        ([4, 3, 2, 1], 1, {"forward_reads": "entry", "backward": "stash"}, [4, 4, 4, 4]),
        ([4, 3, 2, 1], 1, {"law": "difference", "forward_horizon": 2}, [3, 3, 3, 3]),
        # The backwards in between use the true weights, or others in a separate buffer.
        ([1], 3, {"forward_horizon": 2}, [2]),
        ([1], 3, ONCE, [2]),
        ([2, 1], 3, ONCE, [2, 2]),
        ([1], 3, {"forward_horizon": 2, **PREDICTS}, [3]),
        ([1], 3, {**ONCE, **PREDICTS}, [3]),
        # What a step wrote is kept for all forwards of its version.
        ([1], 1, BY_STEP, [3]),
        ([1], 2, BY_STEP, [3]),
    ],
)
def test_the_most_weights_at_one_time(windows, microbatches, rules, expected):
    found = counts(windows, 20, microbatches, **rules)
    assert [count.versions for count in found] == expected


def test_no_step_has_written_a_prediction_before_the_first():
    (of,) = met(Run("1f1b-async", [1], 2, 3), **BY_STEP)
    assert [of[i, 0].forward for i in range(3)] == [(0, 0), (1, 1), (2, 1)]


@pytest.mark.parametrize("name", ["1f1b-async", "zb-h1"])
def test_a_long_run_takes_no_more_memory_than_a_short_one(name):
    def peak(minibatches):
        tracemalloc.start()
        counts([3, 2, 1], minibatches, 2, name, backward="stash")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak(100)
    assert peak(1000) < 1.5 * peak(250)
