"""Tests the configurations of bench_plan.py."""

from __future__ import annotations

import bench_plan
import pytest
from helpers.layers import layers_of

from spectrain_ext.tools.planning import Link


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
        seconds = [0.001 * n for n in bench_plan.MODELS[case.model]]
        layers = layers_of(seconds, 0, 0, 0, (384, 384))
        period, work = bench_plan.planned_of(case, layers, Link("", 1e9), 384, 2)
        assert work == pytest.approx(0.024)
        assert 0.0119 <= period <= 0.025
