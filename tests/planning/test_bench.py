"""Tests the untimed parts of the benchmarks: configurations, counted bytes, report sections."""

from __future__ import annotations

import json
from pathlib import Path

import bench_plan
import pytest
import simulate_throughput as throughput
import torch
from report import planner
from report import throughput as report
from torch import nn

from spectrain_ext.partitioning import Profile
from spectrain_ext.partitioning.profile import BlockProfile
from spectrain_ext.planning import Layers, Link

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


@pytest.mark.parametrize("processes", bench_plan.PROCESSES)
def test_every_configuration_can_be_cut_and_planned(processes):
    found = list(bench_plan.cases(processes))
    assert len(found) == len(set(found)) > 14
    for case in found:
        ends = bench_plan.ends_of(case)
        assert len(ends) == case.stages
        assert list(ends) == sorted(set(ends))
        assert ends[-1] == len(bench_plan.MODELS[case.model])
        assert sum(case.replicas) == processes
        assert 384 % case.microbatches == 0
        blocks = tuple(BlockProfile(0.001 * n) for n in bench_plan.MODELS[case.model])
        layers = Layers((384, 384), (Profile(blocks), Profile(blocks)))
        period, work = bench_plan.planned_of(case, layers, Link("", 1e9), 384, 2)
        assert work == pytest.approx(0.024)
        assert 0.0119 <= period <= 0.025


def test_a_slower_rank_gets_fewer_layers():
    found = {case: bench_plan.layers_in(case) for case in bench_plan.unequal_cases((1, 0.5))}
    assert len(found) == 16
    for case, layers in found.items():
        counts = bench_plan.MODELS[case.model]
        blocks = tuple(BlockProfile(0.001 * n, name=str(k)) for k, n in enumerate(counts))
        profile = Profile(blocks)
        period, work = bench_plan.planned_of(
            case, Layers((384, 384), (profile, profile)), Link("", 1e9), 384, None
        )
        fitted = {"even": [16, 8], "uneven": [17, 7]}[case.model]
        assert layers == (fitted if case.fitted else [12, 12])
        assert work == pytest.approx(0.001 * (layers[0] + 2 * layers[1]))
        assert period >= 0.001 * max(layers[0], 2 * layers[1])


def test_a_slowed_stage_computes_the_same_twice():
    stage, calls = nn.Linear(3, 2), []
    slowed = bench_plan.Slowed(stage, 0.5)
    for part in (stage, *slowed._others):
        part.register_forward_hook(lambda *_: calls.append("forward"))
        part.weight.register_hook(lambda _: calls.append("backward"))
    x = torch.randn(4, 3, requires_grad=True)
    output = slowed(x)
    output.backward(torch.ones_like(output))
    assert calls == ["forward"] * 2 + ["backward"] * 2
    assert [p.shape for p in slowed.parameters()] == [(2, 3), (2,)]
    assert torch.equal(x.grad, torch.ones(4, 2) @ stage.weight)
    assert torch.equal(stage.bias.grad, torch.tensor([4.0, 4.0]))


def test_blocks_are_counted_without_running_them():
    def make():
        layers = [nn.Linear(6, 5), nn.Linear(5, 4)]
        return nn.Sequential(*layers), layers, torch.randn(1, 6)

    found = throughput.counted(throughput.Counted("", make, 8, ""))
    assert found == [throughput.Block(35, 20, 60), throughput.Block(24, 16, 40)]
    whole = throughput.counted(throughput.TABLE["vgg16"])
    assert sum(block.parameters for block in whole) == pytest.approx(138.36e6, rel=1e-3)
    assert sum(block.flops for block in whole) == pytest.approx(2 * 15.5e9, rel=0.01)


def test_bytes_of_gradients_and_of_activations():
    def make():
        layers = [nn.Linear(8, 8, bias=False) for _ in range(8)]
        return nn.Sequential(*layers), layers, torch.randn(1, 8)

    entry = throughput.Counted("", make, 16, "")
    found = throughput._ratio(entry, throughput.counted(entry))
    assert found["parameters"] == 512
    assert found["exchanged_bytes"] == 2 * 3 / 4 * 4 * 512
    assert found["passed_bytes"] == 2 * 16 * 8 * 4
    assert found["ratio"] == 3.0


def test_the_report_says_what_the_files_say():
    document = json.loads((RESULTS / report.FOLDER / "ratios.json").read_text())
    text = report.traffic(RESULTS)
    for row in document["rows"]:
        assert f"| {row['title']} | {row['parameters'] / 1e6:,.0f} |" in text
    assert "| H100 | VGG16 | NVLink |" in report.section(RESULTS)


def test_planned_against_real_is_a_table(tmp_path):
    row = {
        **{"case": "", "model": "even", "method": "auto", "replicas": [1, 1], "microbatches": 2},
        **{"planned": [0.05, 0.052], "measured": [0.06, 0.05]},
        **{"planned_work": [0.1, 0.1], "measured_work": [0.1, 0.1]},
    }
    slow = {**row, "speeds": [1, 0.5], "fitted": True, "layers": [16, 8]}
    alike = {**slow, "fitted": False, "layers": [12, 12], "measured": [0.09, 0.1]}
    for folder, rows in (
        (planner.FOLDER, [row, {**row, "planned": [1, 1]}]),
        (planner.UNEQUAL, [slow, alike]),
    ):
        (tmp_path / folder).mkdir()
        document = {"runs": [{"processes": 2, "rows": rows}]}
        (tmp_path / folder / "plan.json").write_text(json.dumps(document))
    assert planner.within(tmp_path) == "1 of 2"
    text = planner.section(tmp_path)
    assert "| 2 processes | 2 | 1 | 870 % | 1733 % | 0 | 0 |" in text
    assert "| `auto` | even | 2 | 16 + 8 | 51.0 | 55.0 | 95.0 | 1.75 |" in planner.unequal(tmp_path)
