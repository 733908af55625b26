"""Tests the planner's search, bound and costs: inner, because a plan shows only what it chose."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from helpers.layers import SLOW, SOME, layers_of
from hypothesis import given, settings
from hypothesis import strategies as some
from report.quality import known_to_planner

from spectrain_ext.method import find_method, rules_at
from spectrain_ext.passes.codecs import BFloat16, Int8
from spectrain_ext.schedule import Place, count_stage, flushes
from spectrain_ext.tools.planning import METHODS, Link, find_link
from spectrain_ext.tools.planning.costs import Costs, Setting, Way, passes_of
from spectrain_ext.tools.planning.search import Search
from spectrain_ext.tools.planning.training_plan import SYNCHRONOUS, expected, measurements

FAST = Link("fast", 1e12)

# The search


def every_way(layers, devices, batch, methods):
    blocks = len(layers.profiles[0].blocks)
    for n in range(1, min(blocks, devices) + 1):
        shapes = [
            tuple(b - a for a, b in zip((0, *inner), (*inner, devices), strict=True))
            for inner in combinations(range(1, devices), n - 1)
        ]
        for replicas in shapes:
            for m in range(1, batch + 1):
                if batch % m or any(m % r for r in replicas):
                    continue
                for inner in combinations(range(1, blocks), n - 1):
                    for method in methods:
                        if (n == 1) != (method.name == "sync"):
                            continue
                        for window in (None,) if flushes(method.schedule) else (None, "wide"):
                            yield Way(method, (*inner, blocks), replicas, m, window)


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("link", "speeds", "limits"),
    [
        *((SLOW, None, None), (FAST, None, None), (SLOW, (2, 0.5, 1, 1), None)),
        (SLOW, None, (60e3, 30e3, 50e3, 40e3)),
        ((FAST, SLOW, Link("late", 1e9, 0.01)), (1, 1, 0.25, 0.5), (1e9, 40e3, 50e3, 1e9)),
    ],
)
def test_the_search_finds_the_best_of_all_ways(devices, link, speeds, limits):
    batch = 12 if devices == 3 else 8
    methods = [find_method(name) for name in ("sync", "1f1b", "gpipe", "vanilla", "auto")]
    if isinstance(link, tuple):
        link = link[: devices - 1]
    setting = Setting(SOME, link, batch, speeds=speeds and speeds[:devices])
    limits = limits and limits[:devices]
    search = Search(setting, devices, methods, limits)
    least, too_large = dict.fromkeys(methods, math.inf), False
    for way in every_way(SOME, devices, batch, methods):
        try:
            costs = Costs(setting, way)
        except ValueError:
            continue
        sizes = [size for size, r in zip(costs.memory, way.replicas, strict=True) for _ in range(r)]
        if limits and any(map(operator.gt, sizes, limits)):
            too_large = True
        elif costs.bound < least[way.method]:
            least[way.method] = min(least[way.method], costs.period)
    for method in methods:
        best = search.best(method, lambda costs: 1.0)
        found = math.inf if best is None else best.period
        assert found <= least[method] * (1 + 1e-9), method.name
        assert (best is None) == (least[method] == math.inf)
    assert (search.left_out > 0) == too_large


# The cost of a way


@some.composite
def ways(draw):
    blocks = draw(some.integers(1, 6))
    seconds = draw(some.lists(some.floats(1e-3, 0.1), min_size=blocks, max_size=blocks))
    n = draw(some.integers(1, blocks))
    ends = (*sorted(draw(some.permutations(range(1, blocks)))[: n - 1]), blocks)
    replicas = tuple(draw(some.lists(some.sampled_from([1, 2, 4]), min_size=n, max_size=n)))
    if draw(some.booleans()):
        replicas = (replicas[0],) * n
    m = draw(some.sampled_from([4, 8]))
    method = find_method(draw(some.sampled_from(METHODS)))
    window = None if flushes(method.schedule) else draw(some.sampled_from([None, "wide"]))
    bandwidth, latency = some.sampled_from([1e5, 1e6, 1e9]), some.sampled_from([0.0, 1e-3])
    link = Link("", draw(bandwidth), draw(latency), inbound=draw(some.booleans()))
    cores = draw(some.sampled_from([None, 1, 2, 5]))
    layers = layers_of(seconds, byte_seconds=draw(some.sampled_from([0.0, 1e-7])))
    links, speeds, devices = link, None, sum(replicas)
    if draw(some.booleans()):
        speeds = draw(
            some.lists(some.sampled_from([0.5, 1, 3]), min_size=devices, max_size=devices)
        )
        links = tuple(draw(some.sampled_from([link, SLOW])) for _ in range(devices - 1))
    return Setting(layers, links, 16, cores, speeds=speeds), Way(method, ends, replicas, m, window)


@settings(deadline=None, max_examples=60)
@given(ways())
def test_no_simulation_is_below_the_bound_and_memory_is_the_ledgers(case):
    setting, way = case
    try:
        costs = Costs(setting, way)
    except ValueError:
        return
    # In a run with rounds of several updates, a mean over some of them may be slightly off.
    assert costs.bound <= costs.period * 1.02
    blocks = setting.profile(way.microbatches).blocks
    for k, (size, place) in enumerate(zip(costs.memory, costs.places, strict=True)):
        rules = rules_at(way.method, place)
        count = count_stage(way.method.schedule, costs.places[0], place, rules, False)
        start = way.ends[k - 1] if k else 0
        mine = blocks[start : way.ends[k]]
        parameters = sum(b.parameter_bytes for b in mine)
        weights = (count.versions + 2 + (way.replicas[k] > 1)) * parameters
        kept = count.in_flight * sum(b.saved_bytes for b in mine)
        messages = mine[-1].output_bytes
        if k:
            messages += (place.window + 1) * blocks[start - 1].output_bytes
        assert size == weights + kept + messages


@pytest.mark.parametrize(
    ("method", "entry", "place", "passes"),
    [
        # two stages with one microbatch, the first and the last
        ("vanilla", Place(0, 2, 2), Place(0, 2, 2), (0, 0, 20)),
        # Versions stay in place; an update that would overwrite a needed one copies it first.
        ("pipedream", Place(0, 2, 2), Place(0, 2, 2), (0, 0, 28)),
        ("pipedream", Place(0, 2, 2), Place(1, 2, 1), (0, 0, 20)),
        # The step writes the forward's prediction; the backward uses the master.
        ("spectrain", Place(0, 2, 2), Place(0, 2, 2), (0, 0, 24)),
        ("spectrain", Place(0, 2, 2), Place(1, 2, 1), (0, 0, 20)),
        # On the third stage the backward's weights are predicted too.
        ("spectrain", Place(0, 4, 4), Place(2, 4, 2), (0, 12, 24)),
        # The second half of a backward has the weights already.
        ("auto", Place(0, 4, 4, 4), Place(0, 4, 4, 4), (0, 0, 24)),
        ("zb-h1-async", Place(0, 4, 4, 4), Place(0, 4, 4, 4), (0, 0, 24)),
        ("auto", Place(0, 4, 4, 4), Place(2, 4, 2, 4), (0, 0, 24)),
        ("zb-h1-async", Place(0, 4, 4, 4), Place(2, 4, 2, 4), (0, 0, 24)),
    ],
)
def test_passes_over_a_stages_weights_by_hand(method, entry, place, passes):
    assert passes_of(find_method(method), entry, place) == passes


def durations_of(replicas, links, speeds=None, seconds=(1.0, 1.0, 1.0), **more):
    """Return those of 1F1B with 4 microbatches of 2 samples and a block per stage."""
    way = Way(find_method("1f1b"), tuple(range(1, len(replicas) + 1)), replicas, 4)
    return Costs(Setting(layers_of(seconds, **more), links, 8, speeds=speeds), way).durations


def test_each_link_carries_its_own_messages_and_the_slowest_replica_counts():
    slow = Link("slow", 1e4)
    quick, late = 250e-12, 250e-4
    for replicas, links, activation, gradient in (
        ((1, 1, 1), (FAST, slow), (quick, late, 0), (0, quick, late)),
        # A stage with replicas counts the slowest link between.
        ((1, 2, 1), (FAST, slow, FAST), (late, late, 0), (0, late, late)),
        ((1, 1, 2), (FAST, FAST, slow), (quick, late, 0), (0, quick, late)),
    ):
        found = durations_of(replicas, links)
        assert found.activation == pytest.approx(activation)
        assert found.gradient == pytest.approx(gradient)
    summed = durations_of((1, 1, 2), (FAST, FAST, slow)).update
    assert summed[:2] == (0, 0)
    assert summed[2] > 0.1 > durations_of((1, 1, 2), FAST).update[2]
    paced = durations_of((1, 2, 1), FAST, (2, 1, 0.5, 4)).forward
    assert paced == pytest.approx([1 / 12 / 2, 1 / 12 / 0.5, 1 / 12 / 4])


@pytest.mark.parametrize("codecs", [(Int8(), None), (None, Int8()), (Int8(), BFloat16())])
def test_a_codec_makes_messages_and_their_buffers_smaller(codecs):
    """Int8 takes 66 bytes for 64 float32; what arrives packed is unpacked into a buffer more."""
    way = Way(find_method("1f1b"), (1, 2, 3), (1, 1, 1), 4)
    slow = Link("slow", 1e4, 1e-3, busy_bandwidth=1e5)
    shares = [{None: 1, Int8(): 66 / 256, BFloat16(): 1 / 2}[codec] for codec in codecs]
    plain, coded = (
        Costs(Setting(layers_of([1.0] * 3), slow, 8, codecs=each), way)
        for each in ((None, None), codecs)
    )
    sent = [1e-3 + 250 * share / 1e4 for share in shares]  # a microbatch's output has 250 bytes
    assert coded.durations.activation == pytest.approx([sent[0], sent[0], 0])
    assert coded.durations.gradient == pytest.approx([0, sent[1], sent[1]])
    assert coded.period < plain.period
    for share, name in zip(shares, ("forward", "backward"), strict=True):
        saved = map(operator.sub, getattr(plain.durations, name), getattr(coded.durations, name))
        handling = 250 * (1 - share) / 1e5  # of a message, at either end
        assert [*saved] == pytest.approx([handling, 2 * handling, handling])
    # the last two receive; they have 2 and 1 microbatches in flight, and a slot more
    ring, kept = (round(shares[0] * n * 250) - n * 250 for n in (3, 2)), (500, 250)
    more = [0, *(a + b * (codecs[0] is not None) for a, b in zip(ring, kept, strict=True))]
    assert [a - b for a, b in zip(coded.memory, plain.memory, strict=True)] == more


def test_gradients_are_summed_beside_the_backward():
    layers, link = layers_of([0.3], parameters=80 * 2**20), Link("", 1e9)

    def update(r):
        way = Way(find_method("sync"), (1,), (r,), r)
        return Costs(Setting(layers, link, 8), way).durations.update

    assert update(1) == (0.0,)
    whole = 2 * 80 * 2**20 * 3 / 4 / 1e9  # of 8 pieces; the backward of a fourth takes 50 ms
    assert update(4)[0] == pytest.approx(whole - 0.05 * 7 / 8)


def test_a_shared_wire_takes_twice_as_long():
    """Two messages per microbatch arrive at the middle stage."""
    wan = find_link("wan200")
    way = Way(find_method("auto"), (1, 3, 5), (1, 1, 1), 8, "wide")
    seconds = 8 * wan.seconds(1000 / 8)
    shared, apart = (
        Costs(Setting(SOME, replace(wan, inbound=inbound), 8), way) for inbound in (True, False)
    )
    assert shared.bound == pytest.approx(2 * seconds)
    assert shared.period == pytest.approx(2 * seconds)
    assert apart.bound == pytest.approx(seconds)


# Quality


def test_what_the_planner_knows_is_what_the_frontier_says():
    root = Path(__file__).resolve().parents[2]
    known = root / "spectrain_ext" / "tools" / "planning" / "quality.json"
    assert known.read_text() == known_to_planner(root / "bench" / "results")


def test_quality_is_of_the_most_similar_pipelines():
    assert expected(find_method("1f1b"), 8, 0) is SYNCHRONOUS
    assert expected(find_method("vanilla"), 1, 0) is SYNCHRONOUS
    assert expected(find_method("xpipe"), 8, 1) is None
    rows = [r for r in measurements() if (r["method"], r["delay"]) == ("auto", 1)]
    for n in (4, 32):
        found = expected(find_method("auto"), n, 1)
        mine = [r for r in rows if r["workload"] != "text" or r["stages"] == n]
        assert found.high == max(r["gap"] for r in mine)
        assert found.low == min(r["gap"] for r in mine)
        assert f"text, N = {n}, delay 1" in found.where
        assert found.updates == max(r["updates"] for r in mine)
    assert expected(find_method("vanilla"), 8, 1).updates == math.inf
    # Not measured; two updates less of delay were already too many.
    late = expected(find_method("vanilla"), 4, 3)
    assert late.updates == math.inf and late.where[0] == "text, N = 4, delay 1"
    assert expected(find_method("pipedream"), 4, 3) is None
