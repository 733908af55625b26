"""Tests the simulations by events and by levels against hand-computed times and each other."""

from __future__ import annotations

from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from spectrain_ext.schedule import GENERATORS, Kind, Rules, ScheduleError
from spectrain_ext.schedule.instructions import backward, forward
from spectrain_ext.simulation import Durations, simulate, simulate_repeating, streams, summarize


def classic(n):
    return [n - k for k in range(n)]


def wide(n):
    return [2 * (n - k) - 1 for k in range(n)]


def spans_of(name, windows, minibatches, microbatches=1, rules=None, **durations):
    return list(
        simulate(
            streams(name, windows, microbatches),
            Durations.of(len(windows), **durations),
            minibatches=minibatches,
            rules=rules,
        )
    )


def times(spans, stage, kind):
    return [(s.start, s.end) for s in spans if s.stage == stage and s.kind is kind]


def test_two_stages_by_hand():
    spans = spans_of("1f1b-async", [2, 1], 3, forward=1, backward=2, update=0.5, activation=0.25)
    assert times(spans, 0, Kind.FORWARD) == [(0, 1), (1, 2), (6.75, 7.75)]
    assert times(spans, 1, Kind.FORWARD) == [(1.25, 2.25), (4.75, 5.75), (8.25, 9.25)]
    assert times(spans, 1, Kind.BACKWARD) == [(2.25, 4.25), (5.75, 7.75), (9.25, 11.25)]
    assert times(spans, 0, Kind.BACKWARD) == [(4.25, 6.25), (7.75, 9.75), (11.25, 13.25)]


def test_loads_run_before_the_input_arrives_and_sends_beside_the_computation():
    spans = spans_of("1f1b-async", [2, 1], 2, forward=1, backward=1, load_forward=0.5, gradient=3.0)
    assert times(spans, 1, Kind.LOAD_FORWARD)[0] == (0.0, 0.5)
    assert times(spans, 1, Kind.FORWARD)[0] == (1.5, 2.5)
    sends = times(spans, 1, Kind.SEND_GRADIENT)
    assert sends == [(3.5, 6.5), (6.5, 9.5)]
    assert {s.lane for s in spans if s.kind is Kind.SEND_GRADIENT} == {"to previous"}
    assert {s.lane for s in spans if s.kind is Kind.SEND_ACTIVATION} == {"to next"}


def test_an_inbound_wire_by_hand():
    """Stage 1 receives F0 F1 B0 F2 B1: the forward of 2, sent at 3, waits for the gradient of 0."""
    slow = {"activation": 2, "gradient": 2, "inbound": True}
    spans = spans_of("1f1b-async", [3, 2, 1], 3, **slow)
    assert times(spans, 0, Kind.SEND_ACTIVATION) == [(1, 3), (3, 5), (10, 12)]
    assert times(spans, 2, Kind.SEND_GRADIENT) == [(8, 10), (12, 14), (17, 19)]
    assert times(spans, 1, Kind.FORWARD) == [(3, 4), (5, 6), (12, 13)]
    assert times(spans, 1, Kind.BACKWARD) == [(10, 11), (14, 15), (19, 20)]
    assert times(spans, 0, Kind.BACKWARD) == [(13, 14), (17, 18), (22, 23)]
    apart = spans_of("1f1b-async", [3, 2, 1], 3, **{**slow, "inbound": False})
    assert times(apart, 1, Kind.FORWARD) == [(3, 4), (5, 6), (11, 12)]


def test_stages_of_a_device_share_its_inbound_wire():
    for inbound in (False, True):
        slow = Durations.of(4, activation=2, gradient=2, inbound=inbound)
        actions = streams("1f1b-async", classic(4))
        spans = simulate(actions, slow, minibatches=4, devices=[0, 1, 0, 1])
        to_first = sorted((s.start, s.end) for s in spans if s.lane != "compute" and s.stage % 2)
        assert len(to_first) == 3 * 4
        assert all(a[1] <= b[0] for a, b in pairwise(to_first)) == inbound


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 4, 16])
def test_the_bubble_of_a_flush(n, m):
    """(N-1)/(M+N-1), for GPipe and for 1F1B."""
    for name in ("gpipe", "1f1b"):
        spans = spans_of(name, [m] * n, 3, m, forward=1, backward=2)
        assert summarize(spans).bubbles == pytest.approx([(n - 1) / (m + n - 1)] * n)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("forward", "of_input", "of_weights"), [(1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (1.0, 1.25, 0.75)]
)
def test_the_bubble_of_zb_h1(n, forward, of_input, of_weights):
    """(N-1)*(F+B-W); 1F1B has (N-1)*(F+B+W), three times as much with equal lengths."""
    m, both = 2 * n, of_input + of_weights
    durations = {"forward": forward, "backward": both, "backward_weights": of_weights}
    bubbles = (
        ("zb-h1", [n] * n, forward + of_input - of_weights),
        ("1f1b", classic(n), forward + both),
    )
    for name, windows, bubble in bubbles:
        found = summarize(spans_of(name, windows, 1, m, **durations))
        assert found.makespan == m * (forward + both) + (n - 1) * bubble


@pytest.mark.parametrize(("message", "period"), [(0.0, 3.0), (0.5, 3.0), (0.75, 3.375)])
def test_halves_without_a_flush_hide_messages_of_half_a_forward(message, period):
    durations = {"forward": 1, "backward": 2, "activation": message, "gradient": message}
    halves, whole = (
        summarize(spans_of(name, classic(4), 120, **durations)).period
        for name in ("zb-h1-async", "1f1b-async")
    )
    assert halves == pytest.approx(period, rel=0.01)
    assert whole == pytest.approx(3 + 1.5 * message, rel=0.02)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_without_a_flush_nothing_waits_in_between(n):
    summary = summarize(spans_of("1f1b-async", classic(n), 60, forward=1, backward=2))
    assert summary.period == 3.0
    assert summary.makespan == (n - 1) * 3 + 60 * 3


@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_period_with_slow_edges(n):
    """A classic window exposes the copies: F + B + 2c(N-1)/N; a wide one hides them."""
    slow = {"forward": 1, "backward": 2, "activation": 0.5, "gradient": 0.5}
    tight = summarize(spans_of("1f1b-async", classic(n), 40 * n, **slow))
    assert tight.period == pytest.approx(3 + 2 * 0.5 * (n - 1) / n, rel=1e-2)
    assert summarize(spans_of("1f1b-async", wide(n), 40 * n, **slow)).period == pytest.approx(3.0)


def test_versions_are_those_that_are_read():
    n, last = 4, 30
    rules = [
        Rules(forward_horizon=k // 2 + n - k - 1, backward="predict", backward_horizon=k // 2)
        for k in range(n)
    ]
    spans = spans_of("1f1b-async", classic(n), 40, rules=rules)
    for k in range(n):
        of = {s.kind: s for s in spans if s.stage == k and s.minibatch == last}
        assert of[Kind.FORWARD][-2:] == (last - (n - k) + 1, k // 2 + n - k - 1)
        assert of[Kind.BACKWARD][-2:] == (last, k // 2)
        assert of[Kind.UPDATE][-2:] == (last + 1, 0)


def test_spans_come_before_the_run_has_been_read():
    spans = simulate(streams("1f1b-async", classic(3)), Durations.of(3), minibatches=10**9)
    assert next(spans).kind is Kind.FORWARD


TURNS = ("forward", "backward")  # including halves

# Whole binary fractions: their sums are exact in any order.
amounts = some.integers(0, 12).map(lambda i: i / 4)


@some.composite
def runs(draw):
    n = draw(some.integers(1, 6))
    name = draw(some.sampled_from(sorted(GENERATORS)))
    windows, least = [], 1
    for _ in range(n):
        least = draw(some.integers(least, least + 3))
        windows.insert(0, least)
    each = some.lists(amounts, min_size=n, max_size=n)
    fields = set(Durations.of(1).__dataclass_fields__) - {"inbound"}
    durations = {name: draw(each) for name in sorted(fields)}
    halves = zip(durations["backward_weights"], durations["backward"], strict=True)
    durations["backward_weights"] = [min(half, whole) for half, whole in halves]
    durations["inbound"] = draw(some.booleans())
    return name, windows, draw(some.integers(1, 4)), draw(some.integers(1, 12)), durations


@given(runs())
def test_levels_agree_with_events(run):
    name, windows, microbatches, minibatches, durations = run
    d = Durations.of(len(windows), **durations)
    by_events = summarize(
        simulate(streams(name, windows, microbatches), d, minibatches=minibatches)
    )
    by_levels = simulate_repeating(name, windows, microbatches, minibatches, d)
    assert by_levels.makespan == by_events.makespan
    assert by_levels.period == pytest.approx(by_events.period)
    assert by_levels.busy == pytest.approx(by_events.busy)


@given(runs())
def test_a_lane_does_one_thing_at_a_time_and_inputs_come_first(run):
    name, windows, microbatches, minibatches, durations = run
    spans = spans_of(name, windows, minibatches, microbatches, **durations)
    last_end = {}
    for s in spans:
        assert s.end >= s.start >= last_end.get((s.stage, s.lane), 0.0)
        last_end[s.stage, s.lane] = s.end
    at = {(s.stage, s.kind, s.minibatch, s.microbatch): s for s in spans}
    for (k, kind, i, j), s in at.items():
        if kind is Kind.FORWARD and k:
            assert s.start >= at[k - 1, Kind.SEND_ACTIVATION, i, j].end
        if kind is Kind.BACKWARD_WEIGHTS:
            assert s.start >= at[k, Kind.BACKWARD_INPUT, i, j].end
        if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and k < len(windows) - 1:
            assert s.start >= at[k + 1, Kind.SEND_GRADIENT, i, j].end
    computed = [s for s in spans if s.lane == "compute" and s.kind.value.startswith(TURNS)]
    each = 3 if name.startswith("zb") else 2
    assert len(computed) == each * len(windows) * microbatches * minibatches


@pytest.mark.parametrize("windows", [[1, 2], [2, 3, 1]])
def test_a_deadlock_by_levels(windows):
    with pytest.raises(ScheduleError, match=r"stage 0, receive gradient of minibatch 0.*never"):
        simulate_repeating("1f1b-async", windows, 1, 5, Durations.of(len(windows)))


def growing(place):
    """One minibatch, then two together, then three."""
    i = 0
    for together in count(1):
        for m in range(i, i + together):
            yield from forward(place, m, 0)
        for m in range(i, i + together):
            yield from backward(place, m, 0)
        i += together


def test_a_schedule_that_does_not_repeat():
    with pytest.raises(ValueError, match="stage 0 do not repeat"):
        simulate_repeating(growing, [3, 3], 1, 5, Durations.of(2))
    summary = summarize(simulate(streams(growing, [3, 3]), Durations.of(2), minibatches=6))
    assert summary.makespan == (2 + 2) + (3 + 3) + (4 + 4)


def test_bad_durations():
    with pytest.raises(ValueError, match="backward: expected one duration per stage, 3, got 2"):
        Durations.of(3, backward=[1, 2])
    with pytest.raises(ValueError, match=r"update: expected a duration from 0 to 1e\+100 for"):
        Durations.of(2, update=[0, -1])
    with pytest.raises(ValueError, match="weights: expected no more than the backward of stage 1"):
        Durations.of(2, backward=[1, 2], backward_weights=[1, 3])
    with pytest.raises(ValueError, match="durations: expected 2 stages, got 3"):
        next(simulate(streams("gpipe", [1, 1]), Durations.of(3), minibatches=1))
