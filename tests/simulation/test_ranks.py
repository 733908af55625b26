"""Tests ranks that share cores and replicated stages against other simulations and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from spectrain_ext.method import find_method, places_of
from spectrain_ext.schedule import GENERATORS, Kind, Replicas, ScheduleError, find_generator
from spectrain_ext.simulation import (
    Durations,
    simulate,
    simulate_ranks,
    simulate_repeating,
    streams,
    summarize,
)

SECONDS = some.floats(0.0, 4.0, width=16)
METHOD = {name: "vanilla" if name == "1f1b-async" else name for name in GENERATORS}


@some.composite
def cases(draw, sends=True):
    n = draw(some.integers(1, 5))

    def each(wanted=True):
        return draw(some.lists(SECONDS, min_size=n, max_size=n)) if wanted else [0.0] * n

    durations = Durations.of(
        n,
        forward=each(),
        backward=each(),
        update=each(),
        load_forward=each(),
        load_backward=each(),
        activation=each(sends),
        gradient=each(sends),
        inbound=draw(some.booleans()),
    )
    return n, draw(some.sampled_from([1, 2, 4])), draw(some.sampled_from([*GENERATORS])), durations


def classic(n):
    return [n - k for k in range(n)]


def sends_of(spans):
    """Return when every message enters its wire, in order."""
    at = {(s.stage, s.lane, s.minibatch, s.microbatch): s.start for s in spans}
    return [start for (_, lane, *_), start in sorted(at.items()) if lane != "compute"]


@given(cases())
def test_ranks_with_a_core_each_are_the_simulation(case):
    n, m, name, durations = case
    runs = [streams(name, classic(n), m) for _ in range(3)]
    spans = list(simulate(runs[0], durations, minibatches=7))
    wanted = summarize(spans)
    ones = Replicas([1] * n)
    for cores, actions in ((None, runs[1]), (n + 1, runs[2])):
        same = list(simulate_ranks(actions, durations, ones, minibatches=7, cores=cores))
        assert sends_of(same) == pytest.approx(sends_of(spans))
        found = summarize(same)
        assert found.makespan == pytest.approx(wanted.makespan)
        assert found.period == pytest.approx(wanted.period)
        assert found.busy == pytest.approx(wanted.busy)


@given(cases(sends=False))
def test_one_core_is_never_idle(case):
    n, m, name, d = case
    actions = streams(name, classic(n), m)
    found = summarize(simulate_ranks(actions, d, Replicas([1] * n), minibatches=5, cores=1))
    turns = zip(d.forward, d.backward, d.load_forward, d.load_backward, strict=True)
    work = sum(m * sum(turn) for turn in turns) + sum(d.update)
    assert found.makespan == pytest.approx(5 * work)


@given(cases(), some.integers(1, 4))
def test_fewer_cores_are_never_faster(case, cores):
    """This does not hold for machines with priorities, but for equal shares and fixed orders."""
    n, m, name, durations = case

    def makespan(count):
        actions = streams(name, classic(n), m)
        ones = Replicas([1] * n)
        spans = simulate_ranks(actions, durations, ones, minibatches=5, cores=count)
        return summarize(spans).makespan

    assert makespan(cores) >= makespan(None) * (1 - 1e-9)


def test_two_ranks_on_one_core_get_half_each():
    durations = Durations.of(2, forward=1.0, backward=1.0)
    actions = streams("1f1b-async", [2, 1])
    spans = list(simulate_ranks(actions, durations, Replicas([1, 1]), minibatches=2, cores=1))
    forwards = [(s.stage, s.start, s.end) for s in spans if s.kind is Kind.FORWARD]
    assert forwards[0] == (0, 0.0, 1.0)  # alone
    assert sorted(forwards[1:3]) == [(0, 1.0, 3.0), (1, 1.0, 3.0)]  # together


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(("r", "inbound"), [(2, False), (2, True), (3, False)])
def test_as_many_replicas_everywhere_are_pipelines_beside_one_another(name, r, inbound):
    n, m = 3, 2
    slow = {"activation": 0.25, "gradient": 1.5 * inbound, "inbound": inbound}
    durations = Durations.of(n, forward=[1, 2, 1], backward=[2, 3, 1], update=0.5, **slow)
    replicas = Replicas([r] * n)
    places = places_of(find_method(METHOD[name]), n, m * r, None, replicas)
    generate = find_generator(name)
    runs = [generate(places[replicas.stage_and_replica(rank)[0]]) for rank in range(n * r)]
    found = summarize(simulate_ranks(runs, durations, replicas, minibatches=12))
    windows = [place.window for place in places]
    wanted = simulate_repeating(name, windows, m, 12, durations)
    assert found.period == pytest.approx(wanted.period)
    assert found.makespan == pytest.approx(wanted.makespan)


def test_a_slow_stage_with_two_replicas_keeps_up():
    replicas = Replicas([1, 2, 1])
    places = places_of(find_method("vanilla"), 3, 4, "wide", replicas)
    generate = find_generator("1f1b-async")
    runs = [generate(places[replicas.stage_and_replica(rank)[0]]) for rank in range(4)]
    durations = Durations.of(3, forward=[0.5, 2, 0.5], backward=[0.5, 2, 0.5])
    spans = list(simulate_ranks(runs, durations, replicas, minibatches=30))
    # Two microbatches of 4 on each; an update waits for the replica with the latest last one.
    assert 8.0 <= summarize(spans).period <= 9.0
    done = {(s.stage, s.minibatch): s.end for s in spans if s.kind is Kind.UPDATE}
    assert all(done[1, i] == done[2, i] for i in range(30))  # replicas update together


def test_what_cannot_be_run_is_an_error():
    durations = Durations.of(2)
    with pytest.raises(ValueError, match="actions: expected 3, got 2"):
        list(simulate_ranks(streams("1f1b", [2, 1]), durations, Replicas([2, 1]), minibatches=1))
    with pytest.raises(ValueError, match="durations: expected 1, got 2"):
        list(simulate_ranks(streams("1f1b", [1, 1]), durations, Replicas([2]), minibatches=1))
    with pytest.raises(ValueError, match="cores: expected at least 1, got 0"):
        list(
            simulate_ranks(
                streams("1f1b", [2, 1]), durations, Replicas([1, 1]), minibatches=1, cores=0
            )
        )
    with pytest.raises(ScheduleError, match="never arrives"):
        actions = streams("1f1b-async", [1, 2])
        list(simulate_ranks(actions, durations, Replicas([1, 1]), minibatches=4))
