"""Tests ranks that share cores and replicated stages against other simulations and by hand."""

from __future__ import annotations

import pytest
from helpers.schedules import classic, runs
from hypothesis import given
from hypothesis import strategies as some

from spectrain_ext.method import find_method, places_of
from spectrain_ext.schedule import GENERATORS, Kind, Replicas, ScheduleError, find_generator
from spectrain_ext.tools.simulation import (
    Durations,
    simulate,
    simulate_ranks,
    streams,
    summarize,
)

SECONDS = some.floats(0.0, 4.0, width=16)
SENT = ("activation", "gradient")


@some.composite
def cases(draw, sends=True):
    run = draw(runs(5, most=5))
    run = run._replace(windows=classic(run.stages))
    each = some.lists(SECONDS, min_size=run.stages, max_size=run.stages)
    names = ("forward", "backward", "update", "load_forward", "load_backward")
    durations = {name: draw(each) for name in (*names, *(SENT if sends else ()))}
    return run, Durations.of(run.stages, **durations, inbound=draw(some.booleans()))


def ranks_of(run, durations, cores):
    ones = Replicas([1] * run.stages)
    spans = simulate_ranks(
        *(run.streams(), durations, ones), minibatches=run.minibatches, cores=cores
    )
    return list(spans)


def sends_of(spans):
    """Return when every message enters its wire, in order."""
    at = {(s.stage, s.lane, s.minibatch, s.microbatch): s.start for s in spans}
    return [start for (_, lane, *_), start in sorted(at.items()) if lane != "compute"]


@given(cases(), some.integers(1, 4))
def test_ranks_with_a_core_each_are_the_simulation_and_fewer_cores_never_faster(case, few):
    """The latter not on machines with priorities, but for equal shares and fixed orders."""
    run, durations = case
    spans = list(simulate(run.streams(), durations, minibatches=run.minibatches))
    wanted = summarize(spans)
    for cores in (None, run.stages + 1):
        same = ranks_of(run, durations, cores)
        assert sends_of(same) == pytest.approx(sends_of(spans))
        found = summarize(same)
        assert found.makespan == pytest.approx(wanted.makespan)
        assert found.period == pytest.approx(wanted.period)
        assert found.busy == pytest.approx(wanted.busy)
    assert summarize(ranks_of(run, durations, few)).makespan >= wanted.makespan * (1 - 1e-9)


@given(cases(sends=False))
def test_one_core_is_never_idle(case):
    run, d = case
    turns = zip(d.forward, d.backward, d.load_forward, d.load_backward, strict=True)
    work = sum(run.microbatches * sum(turn) for turn in turns) + sum(d.update)
    found = summarize(ranks_of(run, d, 1))
    assert found.makespan == pytest.approx(run.minibatches * work)


def test_two_ranks_on_one_core_get_half_each():
    durations = Durations.of(2, forward=1.0, backward=1.0)
    actions = streams("1f1b-async", [2, 1])
    spans = list(simulate_ranks(actions, durations, Replicas([1, 1]), minibatches=2, cores=1))
    forwards = [(s.stage, s.start, s.end) for s in spans if s.kind is Kind.FORWARD]
    assert forwards[0] == (0, 0.0, 1.0)  # alone
    assert sorted(forwards[1:3]) == [(0, 1.0, 3.0), (1, 1.0, 3.0)]  # together


def replicated(method, counts, m, window=None):
    """Return the replicas, every stage's place, and the instructions of every rank."""
    replicas, method = Replicas(counts), find_method(method)
    places = places_of(method, len(counts), m, window, replicas)
    generate = find_generator(method.schedule)
    each = [places[replicas.stage_and_replica(rank)[0]] for rank in range(sum(counts))]
    return replicas, places, [generate(place) for place in each]


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(("r", "inbound"), [(2, False), (2, True), (3, False)])
def test_as_many_replicas_everywhere_are_pipelines_beside_one_another(name, r, inbound):
    slow = {"activation": 0.25, "gradient": 1.5 * inbound, "inbound": inbound}
    durations = Durations.of(3, forward=[1, 2, 1], backward=[2, 3, 1], update=0.5, **slow)
    method = "vanilla" if name == "1f1b-async" else name
    replicas, places, actions = replicated(method, [r] * 3, 2 * r)
    found = summarize(simulate_ranks(actions, durations, replicas, minibatches=12))
    one = streams(name, [place.window for place in places], 2)
    wanted = summarize(simulate(one, durations, minibatches=12))
    assert found.period == pytest.approx(wanted.period)
    assert found.makespan == pytest.approx(wanted.makespan)


def test_a_slow_stage_with_two_replicas_keeps_up():
    replicas, _, actions = replicated("vanilla", [1, 2, 1], 4, "wide")
    durations = Durations.of(3, forward=[0.5, 2, 0.5], backward=[0.5, 2, 0.5])
    spans = list(simulate_ranks(actions, durations, replicas, minibatches=30))
    # Two microbatches of 4 on each; an update waits for the replica with the latest last one.
    assert 8.0 <= summarize(spans).period <= 9.0
    done = {(s.stage, s.minibatch): s.end for s in spans if s.kind is Kind.UPDATE}
    assert all(done[1, i] == done[2, i] for i in range(30))  # replicas update together


@pytest.mark.parametrize(
    ("windows", "counts", "cores", "error", "expected"),
    [
        ([2, 1], [2, 1], None, ValueError, "actions: expected 3, got 2"),
        ([1, 1], [2], None, ValueError, "durations: expected 1, got 2"),
        ([2, 1], [1, 1], 0, ValueError, "cores: expected at least 1, got 0"),
        ([1, 2], [1, 1], None, ScheduleError, "never arrives"),
    ],
)
def test_what_cannot_be_run_is_an_error(windows, counts, cores, error, expected):
    actions = streams("1f1b-async", windows)
    with pytest.raises(error, match=expected):
        list(
            simulate_ranks(
                *(actions, Durations.of(2), Replicas(counts)), minibatches=4, cores=cores
            )
        )
