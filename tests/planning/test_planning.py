"""Tests the planner: search against enumeration, bound, memory, links, profiles, quality."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from report.quality import known_to_planner
from torch import nn

import spectrain_ext as st
from spectrain_ext.method import find_method, rules_at
from spectrain_ext.partitioning import Profile, measure
from spectrain_ext.partitioning.profile import BlockProfile, Tie
from spectrain_ext.partitioning.stages import profile_of
from spectrain_ext.planning import (
    METHODS,
    Layers,
    Link,
    find_link,
    measure_layers,
    plan,
    read_layers,
    write_layers,
    write_plan,
)
from spectrain_ext.planning.costs import Costs, Setting, Way, passes_of
from spectrain_ext.planning.plan import SYNCHRONOUS, expected, measurements
from spectrain_ext.planning.search import Search
from spectrain_ext.schedule import Place, Replicas, count_stage, flushes

ROOT = Path(__file__).resolve().parents[2]


def layers_of(seconds, outputs=1000, parameters=4000, saved=3000, **more):
    """Return blocks with these seconds for 8 samples, and half for 4."""

    def profile(share):
        return Profile(
            tuple(
                BlockProfile(
                    s * share, int(outputs * share), parameters, int(saved * share), str(i)
                )
                for i, s in enumerate(seconds)
            )
        )

    return Layers((4, 8), (profile(0.5), profile(1.0)), **more)


SOME = layers_of([0.010, 0.014, 0.007, 0.021, 0.009])
SLOW = Link("slow", 1e6, 1e-4)


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
    ("link", "speeds"),
    [
        *[(SLOW, None), (Link("fast", 1e12), None), (SLOW, (2, 0.5, 1, 1))],
        ((Link("fast", 1e12), SLOW, Link("late", 1e9, 0.01)), (1, 1, 0.25, 0.5)),
    ],
)
def test_the_search_finds_the_best_of_all_ways(devices, link, speeds):
    batch = 12 if devices == 3 else 8
    methods = [find_method(name) for name in ("sync", "1f1b", "gpipe", "vanilla", "auto")]
    if isinstance(link, tuple):
        link = link[: devices - 1]
    setting = Setting(SOME, link, batch, speeds=speeds and speeds[:devices])
    search = Search(setting, devices, methods)
    least = dict.fromkeys(methods, math.inf)
    for way in every_way(SOME, devices, batch, methods):
        try:
            costs = Costs(setting, way)
        except ValueError:
            continue
        if costs.bound < least[way.method]:
            least[way.method] = min(least[way.method], costs.period)
    for method in methods:
        best = search.best(method, lambda costs: 1.0)
        if best is None:
            assert least[method] == math.inf
        else:
            assert best.period <= least[method] * (1 + 1e-9), (method.name, best.way)


def test_a_thousand_devices_take_few_simulations():
    found = plan(
        layers_of([0.01 + 0.001 * (i % 5) for i in range(60)]), 1024, link="pcie3", batch=4096
    )
    assert found.simulated <= 2 * 8 * len(METHODS)
    assert found.tried < 5000
    assert math.prod(found.fastest.replicas[:1]) * found.fastest.stages == 1024
    assert sum(found.fastest.replicas) == 1024


def test_what_takes_too_much_memory_is_left_out_and_said():
    free = plan(SOME, 4, link=SLOW, batch=8)
    limit = max(free.fastest.memory) - 1
    within = plan(SOME, 4, link=SLOW, batch=8, memory=limit)
    assert all(max(c.memory) <= limit for c in within.candidates)
    assert within.left_out > 0
    assert within.least_memory > limit
    with pytest.raises(ValueError, match=r"memory: all .* looked at take more than 1000 bytes"):
        plan(SOME, 4, link=SLOW, batch=8, memory=1000)


def test_devices_of_different_kinds():
    def best(devices=2, method="auto", **more):
        given = {"link": "nvlink", "batch": 8, "replicas": 1, "methods": [method], **more}
        return plan(layers_of([0.01] * 6), devices, **given).fastest

    # A slower device gets fewer layers, in any order of devices.
    assert best(speeds=(1, 0.5)).ends == (4, 6)
    assert best(speeds=(0.5, 1)).ends == (2, 6)
    assert best(speeds=(1, 0.5)).period == pytest.approx(best(speeds=(0.5, 1)).period, rel=0.01)
    # Also with pruned divisions, and with few bytes over a slow link.
    long = {"link": 1e12, "batch": 8, "replicas": 1, "methods": ["auto"]}
    assert plan(layers_of([0.01] * 40), 2, **long, speeds=(1, 0.25)).fastest.ends == (32, 40)
    profiles = [
        replace(p, blocks=tuple(replace(b, output_bytes=1000 * (b.name != "29")) for b in p.blocks))
        for p in layers_of([0.01] * 40).profiles
    ]
    narrow = Layers((4, 8), tuple(profiles))
    assert plan(narrow, 3, **long).fastest.ends[1] != 30
    assert plan(narrow, 3, **{**long, "link": (1e12, 1e4)}).fastest.ends[1] == 30
    # Equal speeds give the result of a single number.
    assert best(speeds=(4, 4)) == best(speed=4)
    assert best(3, link=["nvlink"] * 2, memory=[1e9] * 3) == best(3, memory=1e9)
    # Each device's memory limits it
    free = best()
    sizes = [2 * size for size in free.memory]
    assert best(memory=sizes) == free
    tight = best(memory=(free.memory[0] - 1, sizes[1]))
    assert tight.ends[0] < free.ends[0] and tight.memory[0] < free.memory[0] < tight.memory[1]
    with pytest.raises(ValueError, match=r"memory: all .* more than 9 bytes a device; the sm"):
        best(memory=(1e9, 9))
    # Each link carries its own messages; a stage with replicas counts the slowest link between.
    slow, fast = Link("slow", 1e4), Link("fast", 1e12)

    def sent(replicas, links, speeds=None):
        way = Way(find_method("1f1b"), (1, 2, 3), replicas, 4)
        return Costs(Setting(layers_of([1.0] * 3), links, 8, speeds=speeds), way).durations

    assert sent((1, 1, 1), (fast, slow)).activation == pytest.approx((250e-12, 250e-4, 0))
    assert sent((1, 1, 1), (fast, slow)).gradient == pytest.approx((0, 250e-12, 250e-4))
    assert sent((1, 2, 1), (fast, slow, fast)).activation == pytest.approx((250e-4, 250e-4, 0))
    assert sent((1, 1, 2), (fast, fast, slow)).activation == pytest.approx((250e-12, 250e-4, 0))
    summed = sent((1, 1, 2), (fast, fast, slow)).update
    assert summed[:2] == (0, 0) and summed[2] > 0.1 > sent((1, 1, 2), fast).update[2]
    # The slowest replica counts
    paced = sent((1, 2, 1), fast, (2, 1, 0.5, 4)).forward
    assert paced == pytest.approx([1 / 12 / 2, 1 / 12 / 0.5, 1 / 12 / 4])


def test_the_first_reaches_a_loss_soonest_and_what_does_not_get_there_is_last():
    # A message takes so long that cutting minibatches does not pay.
    found = plan(SOME, 4, link=Link("late", 1e9, 0.01), batch=8, replicas=1)
    assert found.fastest.period == min(c.period for c in found.candidates)
    assert found.fastest.period < found.candidates[0].period
    assert found.soonest is found.candidates[0]
    soon = [c.seconds_to_quality for c in found.candidates]
    assert soon == sorted(soon) and soon[0] < math.inf
    rest = [c for c in found.candidates if c.seconds_to_quality == math.inf]
    unmeasured = [c for c in rest if c.quality is None]
    assert rest[: len(unmeasured)] == unmeasured
    assert {c.method for c in unmeasured} >= {"pipedream"}
    assert {c.method for c in rest[len(unmeasured) :]} >= {"vanilla", "pipedream-2bw"}
    for alike in (unmeasured, rest[len(unmeasured) :]):
        assert [c.period for c in alike] == sorted(c.period for c in alike)


def test_stages_that_share_a_parameter_have_one_replica():
    tied = tuple(replace(p, shared=(Tie(0, 4, "a weight"),)) for p in SOME.profiles)
    layers = replace(SOME, profiles=tied)
    found = plan(layers, 6, link="nvlink", batch=12)
    counts = {c.replicas for c in found.candidates if c.stages > 1}
    assert counts and all(c[0] == c[-1] == 1 < max(c) for c in counts)
    two = tuple(Profile(p.blocks[:2], (), (Tie(0, 1, "a weight"),)) for p in SOME.profiles)
    with pytest.raises(ValueError, match="replicas: stages 0 and 1 share a weight, and have 1 and"):
        plan(Layers((4, 8), two), 3, link="nvlink", batch=6, methods=["1f1b"])


def test_replicas_are_limited():
    found = plan(SOME, 4, link="nvlink", batch=8, replicas=1)
    assert {c.replicas for c in found.candidates} == {(1, 1, 1, 1)}
    with pytest.raises(ValueError, match="replicas: 1 of each of at most 5 stages leave some"):
        plan(SOME, 6, link="pcie3", batch=12, replicas=1)


def test_the_call_that_it_prints_is_one_that_can_be_made():
    found = plan(SOME, 4, link="pcie3", batch=8)
    for candidate in found.candidates:
        said = candidate.code.partition("loss_fn, ")[2].rstrip(")")
        given = eval(f"dict({said})")
        found = Replicas.of(given.get("replicas"), 4)
        assert found.counts == candidate.replicas
        st.methods().index(given["method"])


def test_replicas_that_a_pipeline_refuses_are_not_planned():
    found = plan(SOME, 4, link="nvlink", batch=8, methods=["dc-asgd", "pipedream"])
    of_method = {
        name: [c.replicas for c in found.candidates if c.method == name]
        for name in ("dc-asgd", "pipedream")
    }
    assert of_method["dc-asgd"]
    for replicas in of_method["dc-asgd"]:  # the last stage has no delay
        assert set(replicas[:-1]) <= {1}
    with pytest.raises(ValueError, match=r"method 'dc-asgd' corrects gradients of stage 0 by"):
        st.method.check("dc-asgd", 2, microbatches=2, replicas=[2, 1])
    st.method.check("dc-asgd", 2, microbatches=2, replicas=[1, 2])


def test_arguments_out_of_range():
    for more, message in (
        ({"devices": 0}, "devices: expected a number from 1 to .*, got 0"),
        ({"batch": 0}, "batch: expected a number from 1 to .*, got 0"),
        ({"batch": 10**400}, "batch: expected a number from 1 to .*, got 1000"),
        ({"replicas": 0}, "replicas: expected a number from 1 to .*, got 0"),
        ({"cores": 0}, "cores: expected a number from 1 to .*, got 0"),
        ({"state": 10**400}, "state: expected a number from 0 to .*, got 1000"),
        ({"speed": 1e-300}, "speed: 1e-300 is too little: seconds: expected a number"),
        ({"speed": 1, "speeds": (1, 1)}, "speed: it contradicts speeds"),
        ({"speeds": (1, 1, 1)}, r"speeds: expected one per device \(2\), got 3"),
        ({"speeds": (1, math.nan)}, "speeds: expected a number from 1e-18 to .*, got nan"),
        ({"memory": (1e9,)}, r"memory: expected one per device \(2\), got 1"),
        ({"link": ("pcie3",) * 2}, r"link: .* each two neighbours of the 2 devices \(1\), got 2"),
        ({"link": ["isa"]}, "link: expected pcie3, .* got 'isa'"),
        ({"memory": -1.0}, r"memory: expected a number from 1e-18 to 1e\+18, got -1"),
        ({"speed": 0.0}, "speed: expected a positive number, got 0"),
        ({"link": "token ring"}, "link: expected pcie3, .* or bytes per second, got 'token ring'"),
        ({"methods": ["wpipe"]}, "methods: 'wpipe' has 2 stages per device, a plan has one"),
        ({"methods": ["1f1b+wpipe@3"]}, r"'1f1b\+wpipe@3' has 2 stages per device, a plan has one"),
        (
            {"methods": [replace(find_method("dc-asgd"), backward="current")]},
            "needs backward='stash'",
        ),
        ({"batch": 7, "devices": 16}, "batch: 7 samples cannot be dealt out to 16 devices"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(SOME, **{"devices": 2, "link": "pcie3", "batch": 8, **more})


# The cost of a plan


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


@settings(deadline=None)
@given(ways())
def test_no_simulation_is_below_the_bound(case):
    try:
        costs = Costs(*case)
    except ValueError:
        return
    # In a run with rounds of several updates, a mean over some of them may be slightly off.
    assert costs.bound <= costs.period * 1.02


@settings(deadline=None, max_examples=30)
@given(ways())
def test_memory_is_the_ledgers(case):
    try:
        costs = Costs(*case)
    except ValueError:
        return
    way, blocks = case[1], case[0].profile(case[1].microbatches).blocks
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


def test_passes_by_hand():
    """Two stages with one microbatch, stage 0: the passes of stage_weights per minibatch."""
    first, last = Place(0, 2, 2), Place(1, 2, 1)
    assert passes_of("vanilla", first, first) == (0, 0, 20)
    # Versions stay in place; an update that would overwrite a needed one copies it first.
    assert passes_of("pipedream", first, first) == (0, 0, 28)
    assert passes_of("pipedream", first, last) == (0, 0, 20)
    for place in (Place(0, 4, 4, 4), Place(2, 4, 2, 4)):  # the second half has the weights already
        halves, whole = (passes_of(m, Place(0, 4, 4, 4), place) for m in ("zb-h1-async", "auto"))
        assert halves == whole
    assert passes_of("auto", Place(0, 4, 4, 4), Place(0, 4, 4, 4)) == (0, 0, 24)
    # The step writes the forward's prediction; the backward uses the master.
    assert passes_of("spectrain", first, first) == (0, 0, 24)
    # On the third stage the backward's weights are predicted too.
    assert passes_of("spectrain", Place(0, 4, 4), Place(2, 4, 2)) == (0, 12, 24)
    assert passes_of("spectrain", first, last) == (0, 0, 20)


def test_gradients_are_summed_beside_the_backward():
    layers = layers_of([0.3], parameters=80 * 2**20)
    link = Link("", 1e9)

    def update(r):
        return Costs(
            Setting(layers, link, 8), Way(find_method("sync"), (1,), (r,), r)
        ).durations.update

    assert update(1) == (0.0,)
    whole = 2 * 80 * 2**20 * 3 / 4 / 1e9  # of 8 pieces; the backward of a fourth takes 50 ms
    assert update(4)[0] == pytest.approx(whole - 0.05 * 7 / 8)


def test_a_ring_or_trees():
    link = Link("", 1e9, 1e-5)
    assert link.all_reduce(1e6, 1) == 0.0
    assert link.all_reduce(1e6, 4) == pytest.approx(6 * (1e-5 + 0.25e-3))
    assert link.all_reduce(1e6, 1024) == pytest.approx(20 * 1e-5 + 2e-3)
    assert replace(link, inbound=True).all_reduce(1e6, 1024) == pytest.approx(
        2046 * 1e-5 + 2e-3, 1e-2
    )
    # each of two CPUs sends a megabyte and takes one, and is busy with both
    busy = Link("cpu", 1e9, busy_bandwidth=2e9)
    assert busy.all_reduce(1e6, 2) == pytest.approx(1e-3 + 1e-3)


def test_links():
    assert find_link("pcie3").bandwidth == pytest.approx(15.75e9, rel=1e-3)
    assert find_link("25e9") == find_link(25e9) == Link("2.5e+10 bytes/s", 25e9)
    wan = find_link("wan200")
    assert wan.inbound and wan.seconds(2.5e6) == pytest.approx(0.15)
    way = Way(find_method("auto"), (1, 3, 5), (1, 1, 1), 8, "wide")
    shared, apart = (
        Costs(Setting(SOME, replace(wan, inbound=each), 8), way) for each in (True, False)
    )
    # Two messages per microbatch arrive at the middle stage.
    seconds = 8 * wan.seconds(1000 / 8)
    assert shared.bound == pytest.approx(2 * seconds) and shared.period == pytest.approx(
        2 * seconds
    )
    assert apart.bound == pytest.approx(seconds)
    for bad in ("-1", "nan", "inf", 0.0):
        with pytest.raises(ValueError, match="bandwidth: expected a positive number"):
            find_link(bad)


# Profiles


def test_a_profile_is_a_constant_and_a_slope():
    def profile(seconds):
        return Profile((BlockProfile(seconds, 10, 7, 20, "", seconds / 4),))

    layers = Layers((4, 8), (profile(3.0), profile(5.0)))
    assert [layers.at(n).blocks[0].seconds for n in (2, 4, 8, 16)] == pytest.approx([2, 3, 5, 9])
    assert layers.at(16).blocks[0].parts == pytest.approx((2.25, 6.75))
    assert layers.at(16).blocks[0].parameter_bytes == 7
    # A time measured too short for a few samples does not give a negative constant.
    noisy = Layers((4, 8), (profile(1.0), profile(5.0)))
    assert noisy.at(2).blocks[0].seconds == pytest.approx(1.25)
    assert layers.faster(10).at(8).blocks[0].seconds == pytest.approx(0.5)


def test_layers_are_measured_at_two_sizes():
    model = [nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)]
    layers = measure_layers(model, torch.randn(8, 6), repeats=2)
    assert layers.samples == (2, 8)  # the first is enough for BatchNorm
    assert [b.output_bytes for b in layers.profiles[0].blocks] == [40, 40, 16]
    assert [b.output_bytes for b in layers.at(16).blocks] == [320, 320, 128]
    assert layers.profiles[1].blocks[0].parameter_bytes == 140
    assert layers.byte_seconds > 0
    assert all(0 < b.forward_seconds < b.seconds for b in layers.profiles[1].blocks)


def test_forwards_are_measured_apart(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("spectrain_ext.partitioning.profile.time.perf_counter", lambda: clock[0])

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            clock[0] += 1.0
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            clock[0] += 3.0
            return gradient * 2

    class Block(nn.Module):
        def forward(self, x):
            return Slow.apply(x)

    first = nn.Linear(2, 2)
    found = measure([first, Block()], torch.randn(3, 2), repeats=3)
    assert (found.blocks[1].seconds, found.blocks[1].forward_seconds) == (4.0, 1.0)
    assert found.blocks[1].parts == (1.0, 3.0)
    assert BlockProfile(3.0).parts == (1.0, 2.0)
    with pytest.raises(ValueError, match="forward_seconds: expected 0 to all of the 1"):
        BlockProfile(1.0, forward_seconds=2.0)


def test_any_model_that_can_be_cut_has_a_profile():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

    model = Model()
    assert len(profile_of(model, torch.randn(2, 4), repeats=1).blocks) == 2
    model.b.weight = model.a.weight
    found = profile_of(model, torch.randn(2, 4), repeats=1)
    assert [(tie.first, tie.last) for tie in found.shared] == [(0, 1)] and not found.ties


def test_a_file_has_all_of_it(tmp_path):
    layers = replace(
        SOME,
        profiles=tuple(
            replace(p, ties=(Tie(0, 1, "a module"),), shared=(Tie(0, 2, "a weight"),))
            for p in SOME.profiles
        ),
        about={"device": "some"},
        byte_seconds=1e-10,
    )
    write_layers(tmp_path / "p.json", layers)
    assert read_layers(tmp_path / "p.json") == layers
    older = json.loads((tmp_path / "p.json").read_text())
    del older["shared"]
    (tmp_path / "p.json").write_text(json.dumps(older))
    assert read_layers(tmp_path / "p.json").profiles[1].shared == ()


@pytest.mark.parametrize(
    "change",
    [
        {"spectrain_profile": 2},
        {"profiles": [[]]},
        {"profiles": [[{"seconds": -1}], [{"seconds": 1}]]},
        {"profiles": [[{"second": 1}], [{"seconds": 1}]]},
        {"samples": [8, 4]},
        {"samples": 3},
        {"ties": [{}]},
        {"byte_seconds": -1},
    ],
)
def test_another_file_is_an_error_that_names_it(tmp_path, change):
    path = tmp_path / "p.json"
    write_layers(path, SOME)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=r"p\.json: expected a profile"):
        read_layers(path)


def test_a_bad_number_in_a_file_is_an_error_that_names_its_place(tmp_path):
    path = tmp_path / "p.json"
    tied = tuple(replace(p, ties=(Tie(0, 1, "shared"),)) for p in SOME.profiles)
    write_layers(path, replace(SOME, profiles=tied))
    good = path.read_text()
    places = {
        "byte_seconds": ("byte_seconds",),
        "samples[1]": ("samples", 1),
        "ties[0]: last": ("ties", 0, "last"),
        **{
            f"profiles[1][2]: {name}": ("profiles", 1, 2, name)
            for name in ("seconds", "forward_seconds", "output_bytes", "parameter_bytes")
        },
        "profiles[0][1]: saved_bytes": ("profiles", 0, 1, "saved_bytes"),
    }
    for place, (*inside, last) in places.items():
        for number in ("NaN", "Infinity", "-1", "1e308", "1" + 400 * "0", "true", '"3"', "[]"):
            document = json.loads(good)
            holder = document
            for key in inside:
                holder = holder[key]
            holder[last] = "BAD"
            path.write_text(json.dumps(document).replace('"BAD"', number))
            with pytest.raises(
                ValueError, match=rf"p\.json: .*: {re.escape(place)}: exp"
            ) as caught:
                plan(read_layers(path), 2, link="pcie3", batch=8)
            assert len(str(caught.value)) < 250


def test_a_file_that_is_no_json(tmp_path):
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(ValueError, match=r"p\.json: expected JSON"):
        read_layers(tmp_path / "p.json")


# Quality


def test_what_the_planner_knows_is_what_the_frontier_says():
    known = ROOT / "spectrain_ext" / "planning" / "quality.json"
    assert known.read_text() == known_to_planner(ROOT / "bench" / "results")


def test_quality_is_of_the_most_similar_pipelines():
    assert expected(find_method("1f1b"), 8, 0) is SYNCHRONOUS
    assert expected(find_method("vanilla"), 1, 0) is SYNCHRONOUS
    assert expected(find_method("xpipe"), 8, 1) is None
    rows = [r for r in measurements() if (r["method"], r["delay"]) == ("auto", 1)]
    for n in (4, 32):
        found = expected(find_method("auto"), n, 1)
        gaps = {r["gap"] for r in rows if r["workload"] == "text" and r["stages"] == n}
        others = {r["gap"] for r in rows if r["workload"] != "text"}
        assert found.high == max(gaps | others)
        assert found.low == min(gaps | others)
        assert f"text, N = {n}, delay 1" in found.where
        assert found.updates == max(r["updates"] for r in rows if _counts(r, n))
    assert expected(find_method("vanilla"), 8, 1).updates == math.inf
    # Not measured; two updates less of delay were already too many.
    late = expected(find_method("vanilla"), 4, 3)
    assert late.updates == math.inf and late.where[0] == "text, N = 4, delay 1"
    assert expected(find_method("pipedream"), 4, 3) is None


def _counts(row, stages):
    return row["workload"] != "text" or row["stages"] == stages


def test_a_plan_is_written_as_json(tmp_path):
    found = plan(SOME, 4, link="pcie3", batch=8)
    write_plan(tmp_path / "plan.json", found)
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["candidates"][0]["throughput"] == found.fastest.throughput
    assert document["candidates"][0]["code"] == found.fastest.code
    spans = list(found.spans(found.fastest))
    assert spans and max(span.end for span in spans) > found.fastest.period
    other = found.document(found.fastest)
    assert (other["ends"], other["settings"]) == ([*found.fastest.ends], found.fastest.settings)


# Applying plans


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 6)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        first = x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x + first)


def sequence():
    layers = {f"layer{k}": nn.Linear(6, 6) for k in range(5)}
    return nn.Sequential(OrderedDict(layers)), torch.randn(8, 6), {}


def traced():
    return Net(), torch.randn(8, 6), {}


def blocks():
    around = {"before": nn.Linear(6, 6), "after": torch.tanh}
    return [nn.Linear(6, 6) for _ in range(3)], torch.randn(8, 6), around


def decoder():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=16)
    return transformers.LlamaForCausalLM(config), torch.randint(32, (8, 5)), {}


def run(module, value):
    with torch.no_grad():
        output = module(value)
    return getattr(output, "logits", output)


@pytest.mark.parametrize("form", [sequence, blocks, traced, decoder])
def test_a_model_is_cut_where_its_plan_says_without_being_measured(form, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model, example, around = form()
    found = plan(
        measure_layers(model, example, repeats=1, **around),
        *(3,),
        **{"link": ["nvlink", "pcie3"], "batch": 12, "replicas": 1, "methods": ["auto", "gpipe"]},
        **{"speeds": (1, 0.5, 1), "memory": (1e9, 2e9, 1e9)},
    )
    write_plan(str(tmp_path / "plan.json"), found)
    monkeypatch.setattr("spectrain_ext.partitioning.profile._measured", None)
    needed = {"example_input": example} if form is traced else {}
    whole = model if isinstance(model, nn.Module) else nn.Sequential(*model)
    for way in (tmp_path / "plan.json", str(tmp_path / "plan.json"), found, found.document()):
        parts = st.partition(model, plan=way, **needed, **around)
        assert parts.cut.ends == found.soonest.ends
        assert parts.settings == found.soonest.settings
        value = example
        for stage in parts:
            value = run(stage, value)
        before, after = (around.get(name, nn.Identity()) for name in ("before", "after"))
        assert torch.equal(value, run(lambda x: after(whole(before(x))), example))  # noqa: B023
        for stage, point in zip(parts.stages[1:], found.soonest.split_points, strict=True):
            names = [stage.full_name(name) for name, _ in stage.named_parameters()]
            assert point == "after" or any(name.startswith(f"{point}.") for name in names)
    assert st.partition(model, 3, plan=found, **needed, **around).cut == parts.cut
    with pytest.raises(ValueError, match="n_stages: expected 3, as the plan has, or none, got 2"):
        st.partition(model, 2, plan=found, **needed, **around)
    pipe = st.Pipeline(
        *(parts, lambda p: st.optim.SGD(p, lr=0.1), lambda output, _: 0 * sum_of(output)),
        **parts.settings,
    )
    assert pipe.method.name == found.soonest.method


def sum_of(output):
    return getattr(output, "logits", output).sum()


def document_of(model, example, **more):
    layers = measure_layers(model, example, repeats=1)
    found = plan(layers, 2, link="nvlink", batch=8, replicas=1, methods=["auto"])
    return {**found.document(), **more}


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (
            nn.Sequential(*[nn.Linear(6, 6)] * 2),
            "at block 0 its 'Net' of 5 blocks has 'stem', this",
        ),
        (nn.Sequential(OrderedDict(stem=nn.Linear(6, 8))), "at block 1 .* 'blocks.0', .* 1 has no"),
    ],
)
def test_a_plan_of_another_model_is_an_error_that_names_the_first_difference(other, why):
    with pytest.raises(ValueError, match=f"plan: it is of another model: {why}"):
        st.partition(other, plan=document_of(Net(), torch.randn(8, 6)))


def test_a_plan_of_another_traced_model():
    longer = Net()
    longer.blocks.append(nn.Linear(8, 8))
    example = torch.randn(8, 6)
    with pytest.raises(ValueError, match=r"at block 4 .* has 'head', this one of 6 has 'blocks.3'"):
        st.partition(longer, example_input=example, plan=document_of(Net(), example))
    with pytest.raises(ValueError, match="split_points: the plan has its own"):
        st.partition(Net(), 2, example, plan=document_of(Net(), example), split_points=["head"])


def test_a_plan_that_separates_what_is_shared():
    norm = nn.BatchNorm1d(6)
    model = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6), norm)
    document = {**document_of(model, torch.randn(8, 6)), "ends": [2, 4]}
    with pytest.raises(ValueError, match=r"plan: it separates .*which stages 0 and 1 use"):
        st.partition(model, plan=document)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"spectrain_plan": 2}, "spectrain_plan: expected format 1, got 2"),
        ({"spectrain_plan": None}, "spectrain_plan: expected format 1"),
        ({"blocks": [3]}, r"blocks\[0\]: "),
        ({"blocks": [{"seconds": 1, "name": 3}]}, "blocks: expected some, with names"),
        ({"blocks": [{"seconds": 10**400}]}, r"blocks\[0\]: seconds: expected a number"),
        ({"blocks": None}, "not iterable"),
        ({"ends": [True, 3]}, "ends: expected ascending numbers, the last of them 3"),
        ({"ends": [1, 2]}, "ends: expected ascending numbers, the last of them 3"),
        ({"ends": [2, 2, 3]}, "ends: expected ascending numbers"),
        ({"ends": []}, "ends: expected ascending numbers"),
        ({"ends": [1, "3"]}, "ends: expected ascending numbers"),
        ({"settings": {"group": 1}}, "settings: 'group' cannot be 1"),
        ({"settings": {"microbatches": True}}, "settings: 'microbatches' cannot be True"),
        ({"settings": 3}, "not iterable"),
    ],
)
def test_a_damaged_plan(tmp_path, change, why):
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document_of(model, torch.randn(8, 6), **change)))
    with pytest.raises(ValueError, match=f"plan.json: expected one that spectrain plan .*{why}"):
        st.partition(model, plan=path)
    assert not hasattr(model, "cut_place")


def test_what_is_no_plan(tmp_path):
    model = [nn.Linear(6, 6) for _ in range(3)]
    for content, why in (("{", "expected JSON"), ("[]", "expected one"), ("{}", "no 'spectrain_")):
        (tmp_path / "plan.json").write_text(content)
        with pytest.raises(ValueError, match=f"plan.json: .*{why}"):
            st.partition(model, plan=tmp_path / "plan.json")
    with pytest.raises(
        TypeError, match="plan: expected a file's name, a Plan or its document, got"
    ):
        st.partition(model, plan=3)
    with pytest.raises(FileNotFoundError):
        st.partition(model, plan="no.json")
