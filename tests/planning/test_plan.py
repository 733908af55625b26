"""Tests plans: what is chosen for which devices, profiles of layers and their files, errors."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace

import pytest
import torch
from helpers.layers import SLOW, SOME, layers_of
from torch import nn

import spectrain_ext as st
from spectrain_ext.method import find_method
from spectrain_ext.partitioning import BlockProfile, Profile, Tie, measure, profile_of
from spectrain_ext.schedule import Replicas
from spectrain_ext.tools.planning import (
    HOST_SECONDS,
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


def test_many_devices_take_few_simulations():
    layers = layers_of([0.01 + 0.001 * (i % 5) for i in range(40)])
    found = plan(layers, 256, link="pcie3", batch=1024)
    assert found.simulated <= 2 * 8 * len(METHODS)
    assert found.tried < 5000
    assert math.prod(found.fastest.replicas[:1]) * found.fastest.stages == 256
    assert sum(found.fastest.replicas) == 256


def test_what_takes_too_much_memory_is_left_out_and_said():
    more = {"link": SLOW, "batch": 8, "methods": ["sync", "1f1b", "auto"]}
    limit = max(plan(SOME, 4, **more).fastest.memory) - 1
    within = plan(SOME, 4, **more, memory=limit)
    assert all(max(c.memory) <= limit for c in within.candidates)
    assert within.left_out > 0 and within.least_memory > limit


SIX = layers_of([0.01] * 6)


def best(devices=2, layers=SIX, **more):
    given = {"link": "nvlink", "batch": 8, "replicas": 1, "methods": ["auto"], **more}
    return plan(layers, devices, **given).fastest


def test_devices_of_different_kinds():
    # A slower device gets fewer layers, in any order of devices.
    assert best(speed=(1, 0.5)).ends == (4, 6)
    assert best(speed=(0.5, 1)).ends == (2, 6)
    assert best(speed=(1, 0.5)).period == pytest.approx(best(speed=(0.5, 1)).period, rel=0.01)
    # Also with pruned divisions.
    forty = layers_of([0.01] * 40)
    assert best(2, forty, link=1e12, speed=(1, 0.25)).ends == (32, 40)
    # Equal speeds give the result of a single number.
    assert best(speed=(4, 4)) == best(speed=4)
    assert best(3, link=["nvlink"] * 2, memory=[1e9] * 3) == best(3, memory=1e9)


def test_calls_limit_small_stages():
    fast = best()
    limited = best(host=0.1)  # a stage's forward takes 0.01 s
    assert fast.limited_by_calls == () and fast.seconds_of_calls == 0.0
    assert limited.limited_by_calls == (0, 1) and limited.period >= 0.2 * limited.microbatches
    forwards = limited.stages * limited.microbatches
    assert limited.seconds_of_calls == pytest.approx(2 * forwards * 0.1)
    almost = best(host=1e-3)
    assert almost.limited_by_calls == () and almost.period == fast.period
    # By default as measured on a GPU, if the layers were.
    short = layers_of([1e-5] * 6)
    on_gpu = best(layers=replace(short, about={"device": "NVIDIA H200"}))
    assert on_gpu.limited_by_calls == (0, 1) and on_gpu.period >= 2 * HOST_SECONDS
    assert best(layers=replace(short, about={"device": "cpu"})).limited_by_calls == ()


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


def test_replicas_are_limited_and_a_shared_parameter_allows_one():
    few = {"link": "nvlink", "methods": ["1f1b", "auto"]}
    found = plan(SOME, 4, batch=8, replicas=1, **few)
    assert {c.replicas for c in found.candidates} == {(1, 1, 1, 1)}
    tied = tuple(replace(p, shared=(Tie(0, 4, "a weight"),)) for p in SOME.profiles)
    found = plan(replace(SOME, profiles=tied), 6, batch=12, **few)
    counts = {c.replicas for c in found.candidates if c.stages > 1}
    assert counts and all(c[0] == c[-1] == 1 < max(c) for c in counts)


def test_replicas_that_a_pipeline_refuses_are_not_planned():
    found = plan(SOME, 4, link="nvlink", batch=8, methods=["dc-asgd", "pipedream"])
    replicas = [c.replicas for c in found.candidates if c.method == "dc-asgd"]
    assert replicas and all(set(each[:-1]) <= {1} for each in replicas)  # the last has no delay
    with pytest.raises(ValueError, match=r"'dc-asgd' corrects .* stage 0, got 2"):
        st.method.check("dc-asgd", 2, microbatches=2, replicas=[2, 1])
    st.method.check("dc-asgd", 2, microbatches=2, replicas=[1, 2])


def test_a_plan_is_code_and_json(tmp_path):
    found = plan(SOME, 4, link="pcie3", batch=8)
    for candidate in found.candidates:
        said = candidate.code.partition("loss_fn, ")[2].rstrip(")")
        given = eval(f"dict({said})")
        assert Replicas.of(given.get("replicas"), 4).counts == candidate.replicas
        assert given["method"] in st.methods()
    write_plan(tmp_path / "plan.json", found)
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["candidates"][0]["throughput"] == found.fastest.throughput
    assert document["candidates"][0]["code"] == found.fastest.code
    other = found.document(found.fastest)
    assert (other["ends"], other["settings"]) == ([*found.fastest.ends], found.fastest.settings)


TWO = Layers(
    (4, 8), tuple(Profile(p.blocks[:2], (), (Tie(0, 1, "a weight"),)) for p in SOME.profiles)
)
CURRENT = replace(find_method("dc-asgd"), backward="current")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"devices": 0}, "devices: expected a number from 1 to .*, got 0"),
        ({"batch": 10**400}, "batch: expected a number from 1 to .*, got 1000"),
        ({"state": 10**400}, "state: expected a number from 0 to .*, got 1000"),
        *(
            ({"speed": n}, f"speed: expected a number from 1e-18 to .*, got {n}")
            for n in (1e-300, 0.0)
        ),
        ({"speed": (1, 1, 1)}, r"speed: expected one per device \(2\), got 3"),
        ({"speed": (1, math.nan)}, "speed: expected a number from 1e-18 to .*, got nan"),
        ({"memory": (1e9,)}, r"memory: expected one per device \(2\), got 1"),
        ({"memory": -1.0}, r"memory: expected a number from 1e-18 to 1e\+18, got -1"),
        ({"memory": 1000}, r"memory: all .* looked at take more than 1000 bytes"),
        ({"memory": (1e9, 9)}, r"memory: all .* more than 9 bytes a device; the sm"),
        ({"link": ("pcie3",) * 2}, r"link: .* each two neighbours of the 2 devices \(1\), got 2"),
        ({"link": ["isa"]}, "link: expected pcie3, .* got 'isa'"),
        ({"link": "token ring"}, "link: expected pcie3, .* or bytes per second, got 'token ring'"),
        *(({"link": bad}, "bandwidth: expected a positive") for bad in ("nan", "inf", 0.0)),
        ({"methods": []}, "methods: expected at least one"),
        ({"methods": ["wpipe"]}, "methods: 'wpipe' has 2 stages per device, a plan has one"),
        ({"methods": [CURRENT]}, "needs backward='stash'"),
        ({"batch": 7, "devices": 16}, "batch: 7 samples cannot be dealt out to 16 devices"),
        ({"devices": 6, "replicas": 1}, "replicas: 1 of each of at most 5 stages leave some"),
        (
            {"layers": TWO, "devices": 3, "batch": 6, "methods": ["1f1b"]},
            "replicas: stages 0 and 1 share a weight, and have 1 and",
        ),
    ],
)
def test_what_cannot_be_planned(more, message):
    with pytest.raises(ValueError, match=message):
        plan(**{"layers": SOME, "devices": 2, "link": "pcie3", "batch": 8, **more})


def test_links_and_sums_over_them_in_a_ring_or_trees():
    assert find_link("pcie3").bandwidth == pytest.approx(15.75e9, rel=1e-3)
    assert find_link("25e9") == find_link(25e9) == Link("2.5e+10 bytes/s", 25e9)
    wan = find_link("wan200")
    assert wan.inbound and wan.seconds(2.5e6) == pytest.approx(0.15)
    link = Link("", 1e9, 1e-5)
    assert link.all_reduce(1e6, 1) == 0.0
    assert link.all_reduce(1e6, 4) == pytest.approx(6 * (1e-5 + 0.25e-3))
    assert link.all_reduce(1e6, 1024) == pytest.approx(20 * 1e-5 + 2e-3)
    inbound = replace(link, inbound=True)
    assert inbound.all_reduce(1e6, 1024) == pytest.approx(2046 * 1e-5 + 2e-3, 1e-2)
    # each of two CPUs sends a megabyte and takes one, and is busy with both
    busy = Link("cpu", 1e9, busy_bandwidth=2e9)
    assert busy.all_reduce(1e6, 2) == pytest.approx(1e-3 + 1e-3)


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
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

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

    found = measure([nn.Linear(2, 2), Block()], torch.randn(3, 2), repeats=3)
    assert (found.blocks[1].seconds, found.blocks[1].forward_seconds) == (4.0, 1.0)
    assert found.blocks[1].parts == (1.0, 3.0)
    assert BlockProfile(3.0).parts == (1.0, 2.0)
    with pytest.raises(ValueError, match="forward_seconds: expected 0 to all of the 1"):
        BlockProfile(1.0, forward_seconds=2.0)


def test_what_blocks_share_is_in_the_profile():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    found = profile_of(model, torch.randn(2, 4), repeats=1)
    assert [(tie.first, tie.last) for tie in found.shared] == [(0, 2)] and not found.ties


TIED = replace(
    SOME,
    profiles=tuple(
        replace(p, ties=(Tie(0, 1, "a module"),), shared=(Tie(0, 2, "a weight"),))
        for p in SOME.profiles
    ),
    about={"device": "some"},
    byte_seconds=1e-10,
)


def test_a_file_has_all_of_it(tmp_path):
    path = tmp_path / "p.json"
    write_layers(path, TIED)
    assert read_layers(path) == TIED
    older = json.loads(path.read_text())
    del older["shared"]
    path.write_text(json.dumps(older))
    assert read_layers(path).profiles[1].shared == ()


def test_another_file_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "p.json"
    write_layers(path, SOME)
    good = json.loads(path.read_text())
    bad = [[{"second": 1}], [{"seconds": 1}]]
    for change in (
        *({"spectrain_profile": 2}, {"profiles": [[]]}, {"profiles": bad}),
        *({"samples": [8, 4]}, {"samples": 3}, {"ties": [{}]}),
    ):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(ValueError, match=r"p\.json: expected a profile"):
            read_layers(path)


def test_a_bad_number_in_a_file_is_an_error_that_names_its_place(tmp_path):
    path = tmp_path / "p.json"
    write_layers(path, TIED)
    good = path.read_text()
    places = {
        "byte_seconds": ("byte_seconds",),
        "samples[1]": ("samples", 1),
        "ties[0]: last": ("ties", 0, "last"),
        "profiles[1][2]: seconds": ("profiles", 1, 2, "seconds"),
        "profiles[1][2]: saved_bytes": ("profiles", 1, 2, "saved_bytes"),
    }
    for place, (*inside, last) in places.items():
        for number in ("NaN", "Infinity", "-1", "1e308", "1" + 400 * "0", "true", '"3"', "[]"):
            document = holder = json.loads(good)
            for key in inside:
                holder = holder[key]
            holder[last] = "BAD"
            path.write_text(json.dumps(document).replace('"BAD"', number))
            expected = rf"p\.json: .*: {re.escape(place)}: exp"
            with pytest.raises(ValueError, match=expected) as caught:
                plan(read_layers(path), 2, link="pcie3", batch=8)
            assert len(str(caught.value)) < 250
