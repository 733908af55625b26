"""Tests the simulation against hand-computed times and closed forms."""

from __future__ import annotations

from itertools import pairwise

import pytest
from helpers.schedules import classic, runs, wide
from hypothesis import given
from hypothesis import strategies as some

from spectrain_ext.schedule import Kind
from spectrain_ext.tools.simulation import Durations, Span, simulate, streams, summarize


def spans_of(name, windows, minibatches, microbatches=1, **durations):
    made, of = streams(name, windows, microbatches), Durations.of(len(windows), **durations)
    return list(simulate(made, of, minibatches=minibatches))


def summary_of(*arguments, **durations):
    return summarize(spans_of(*arguments, **durations))


def times(spans, stage, kind):
    return [(s.start, s.end) for s in spans if s.stage == stage and s.kind is kind]


SLOW = {"activation": 2, "gradient": 2}


@pytest.mark.parametrize(
    ("windows", "durations", "expected"),
    [
        (
            [2, 1],
            {"forward": 1, "backward": 2, "update": 0.5, "activation": 0.25},
            {
                (0, Kind.FORWARD): [(0, 1), (1, 2), (6.75, 7.75)],
                (1, Kind.FORWARD): [(1.25, 2.25), (4.75, 5.75), (8.25, 9.25)],
                (1, Kind.BACKWARD): [(2.25, 4.25), (5.75, 7.75), (9.25, 11.25)],
                (0, Kind.BACKWARD): [(4.25, 6.25), (7.75, 9.75), (11.25, 13.25)],
            },
        ),
        # Stage 1 receives F0 F1 B0 F2 B1: the forward of 2, sent at 3, waits for the gradient of 0.
        (
            [3, 2, 1],
            {**SLOW, "inbound": True},
            {
                (0, Kind.SEND_ACTIVATION): [(1, 3), (3, 5), (10, 12)],
                (2, Kind.SEND_GRADIENT): [(8, 10), (12, 14), (17, 19)],
                (1, Kind.FORWARD): [(3, 4), (5, 6), (12, 13)],
                (1, Kind.BACKWARD): [(10, 11), (14, 15), (19, 20)],
                (0, Kind.BACKWARD): [(13, 14), (17, 18), (22, 23)],
            },
        ),
        ([3, 2, 1], SLOW, {(1, Kind.FORWARD): [(3, 4), (5, 6), (11, 12)]}),
    ],
    ids=["two-stages", "inbound", "apart"],
)
def test_three_minibatches_by_hand(windows, durations, expected):
    spans = spans_of("1f1b-async", windows, 3, **durations)
    assert {key: times(spans, *key) for key in expected} == expected


def test_loads_run_before_the_input_arrives_and_sends_beside_the_computation():
    spans = spans_of("1f1b-async", [2, 1], 2, forward=1, backward=1, load_forward=0.5, gradient=3.0)
    assert times(spans, 1, Kind.LOAD_FORWARD)[0] == (0.0, 0.5)
    assert times(spans, 1, Kind.FORWARD)[0] == (1.5, 2.5)
    assert times(spans, 1, Kind.SEND_GRADIENT) == [(3.5, 6.5), (6.5, 9.5)]
    lanes = {s.kind: s.lane for s in spans}
    assert lanes[Kind.SEND_GRADIENT] == "to previous"
    assert lanes[Kind.SEND_ACTIVATION] == "to next"


@pytest.mark.parametrize("inbound", [False, True])
def test_stages_of_a_device_share_its_inbound_wire(inbound):
    slow = Durations.of(4, **SLOW, inbound=inbound)
    actions = streams("1f1b-async", classic(4))
    spans = simulate(actions, slow, minibatches=4, devices=[0, 1, 0, 1])
    to_first = sorted((s.start, s.end) for s in spans if s.lane != "compute" and s.stage % 2)
    assert len(to_first) == 3 * 4
    assert all(a[1] <= b[0] for a, b in pairwise(to_first)) == inbound


# Closed forms


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 4, 16])
def test_the_bubble_of_a_flush(n, m):
    """(N-1)/(M+N-1), for GPipe and for 1F1B."""
    for name in ("gpipe", "1f1b"):
        found = summary_of(name, [m] * n, 3, m, forward=1, backward=2)
        assert found.bubbles == pytest.approx([(n - 1) / (m + n - 1)] * n)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("forward", "of_input", "of_weights"), [(1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (1.0, 1.25, 0.75)]
)
def test_the_bubble_of_zb_h1(n, forward, of_input, of_weights):
    """(N-1)*(F+B-W); 1F1B has (N-1)*(F+B+W), three times as much with equal lengths."""
    m, both = 2 * n, of_input + of_weights
    durations = {"forward": forward, "backward": both, "backward_weights": of_weights}
    for name, windows, bubble in (
        ("zb-h1", [n] * n, forward + of_input - of_weights),
        ("1f1b", classic(n), forward + both),
    ):
        found = summary_of(name, windows, 1, m, **durations)
        assert found.makespan == m * (forward + both) + (n - 1) * bubble


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_the_period_without_a_flush(n):
    """A classic window exposes copies, F + B + 2c(N-1)/N; a wide one hides them."""
    work = {"forward": 1, "backward": 2}
    found = summary_of("1f1b-async", classic(n), 60, **work)
    assert (found.period, found.makespan) == (3.0, (n - 1) * 3 + 60 * 3)
    slow = {**work, "activation": 0.5, "gradient": 0.5}
    tight = summary_of("1f1b-async", classic(n), 40 * n, **slow)
    assert tight.period == pytest.approx(3 + 2 * 0.5 * (n - 1) / n, rel=1e-2)
    assert summary_of("1f1b-async", wide(n), 40 * n, **slow).period == pytest.approx(3.0)


def test_a_period_has_neither_filling_nor_draining_in_it():
    """It is that of the middle third of the updates, of all of them where these are fewer."""
    ends = (0, 8, 12, 15, 17, 19, 21, 40, 70)

    def period(count):
        spans = (
            Span(k, "compute", Kind.UPDATE, i, 0, end - k, end, i + 1, 0)
            for i, end in enumerate(ends[:count])
            for k in (1, 0)
        )
        return summarize(spans).period

    assert [period(count) for count in (0, 1, 2, 3, 9)] == [0, 0, 8, 4, 2]


def test_spans_come_before_the_run_has_been_read():
    spans = simulate(streams("1f1b-async", classic(3)), Durations.of(3), minibatches=10**9)
    assert next(spans).kind is Kind.FORWARD


# Any durations

# Whole binary fractions: their sums are exact in any order.
AMOUNTS = some.integers(0, 12).map(lambda i: i / 4)
FIELDS = sorted(set(Durations.of(1).__dataclass_fields__) - {"inbound"})


@some.composite
def timed(draw):
    run = draw(runs(most=12))
    each = some.lists(AMOUNTS, min_size=run.stages, max_size=run.stages)
    durations = {name: draw(each) for name in FIELDS}
    halves = zip(durations["backward_weights"], durations["backward"], strict=True)
    durations["backward_weights"] = [min(half, whole) for half, whole in halves]
    return run, Durations.of(run.stages, **durations, inbound=draw(some.booleans()))


@given(timed())
def test_a_lane_does_one_thing_at_a_time_and_inputs_come_first(case):
    run, durations = case
    spans = list(simulate(run.streams(), durations, minibatches=run.minibatches))
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
        if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and k < run.stages - 1:
            assert s.start >= at[k + 1, Kind.SEND_GRADIENT, i, j].end
    turns = ("forward", "backward")  # including halves
    computed = [s for s in spans if s.lane == "compute" and s.kind.value.startswith(turns)]
    each = 3 if run.name.startswith("zb") else 2
    assert len(computed) == each * run.stages * run.microbatches * run.minibatches


# Errors


@pytest.mark.parametrize(
    ("stages", "durations", "expected"),
    [
        (3, {"backward": [1, 2]}, "backward: expected one duration per stage, 3, got 2"),
        (2, {"update": [0, -1]}, r"update: expected a duration from 0 to 1e\+100 for"),
        (
            *(2, {"backward": [1, 2], "backward_weights": [1, 3]}),
            "weights: expected no more than the backward of stage 1",
        ),
        (3, {}, "durations: expected 2 stages, got 3"),
    ],
)
def test_bad_durations(stages, durations, expected):
    with pytest.raises(ValueError, match=expected):
        made = Durations.of(stages, **durations)
        next(simulate(streams("gpipe", [1, 1]), made, minibatches=1))
