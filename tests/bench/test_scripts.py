"""Tests the scripts that measure operators and processes, and the report on operators."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import bench_distributed
import pytest
from helpers.ranks import run_pytest, run_said
from report import speed
from rivals import targets

BENCH = Path(__file__).resolve().parents[2] / "bench"
_TWO = "SGD step + 2 predictions"
_RESTS = ("", " + 1 prediction", " + 2 predictions")


def entry(name: str, us: float, kind: str = "ours", best: float = 0.9, **more: Any) -> Any:
    """An entry of pytest-benchmark's JSON, for 1,000 bytes."""
    about = {"operation": "predict_", "workload": "2^24", "precision": "fp32", "name": name}
    about |= {"kind": kind, "bytes": 1000, "elements": 2**24, "tensors": 1, **more}
    stats = {"median": us / 1e6, "iqr": us / 1e7, "min": us * best / 1e6, "rounds": 5}
    return {"extra_info": about, "stats": stats}


def copy(us: float, **more: Any) -> Any:
    return entry("copy: numpy", us, "copy", **more)


def verdict(what: str, *entries: Any, device: str = "cpu") -> targets.Verdict:
    found = targets.judged({"device": device}, entries)
    (one,) = [v for v in found if v.what.startswith(what)]
    return one


def test_the_worst_large_workload_and_a_rival_that_is_ahead_anywhere_decide() -> None:
    good = [entry("Plan", 1.0), entry("operator", 3.0), copy(0.97)]
    worse = [entry("Plan", 1.0, workload="2^26"), copy(0.94, workload="2^26", best=0.99)]
    small = [entry("Plan", 9.0, workload="2^10", elements=2**10)]
    one = verdict("predict_", *good, *worse, *small)
    assert one.met is False and one.measured == "94% at worst (2^26); 103% by best times"
    assert verdict("predict_", *good, *small).met is True
    of = {"operation": _TWO}
    entries = [entry("Plan", 2.0, **of), entry("fused + torch.add", 4.0, "rival", **of)]
    one = verdict(f"{_TWO}, against fused", *entries)
    assert one.met is True and one.measured.startswith("2.00x")
    of["workload"] = "2^26"
    entries += [entry("Plan", 5.0, **of), entry("fused + torch.add", 4.0, "rival", **of)]
    one = verdict(f"{_TWO}, against fused", *entries)
    assert one.met is False and one.measured.startswith("0.80x at worst (2^26)")
    one = verdict("pipeline stage")
    assert one.met is None and "| not measured |" in targets.markdown([one])


TINY = ("bench_operators.py", "--elements", 6, "--case-seconds", 0, "--threads", 1, "-k")


@pytest.mark.processes
def test_a_group_holds_all_rivals_and_its_file_makes_the_section(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    path = tmp_path / "bench.json"
    code, printed = run_pytest(BENCH, *TINY, "SGD-step", f"--benchmark-json={path}")
    assert code == 0, printed
    assert "benchmark 'SGD step, 2^6, fp32'" in printed
    assert "ours against the best copy and the fastest rival" in printed
    document = json.loads(path.read_text())
    about = [each["extra_info"] for each in document["benchmarks"]]
    assert {each["operation"] for each in about} == {f"SGD step{rest}" for rest in _RESTS}
    assert {"Plan", "operator", "fused", "foreach", "for loop", "copy: numpy"} <= {
        each["name"] for each in about if each["operation"] == "SGD step"
    }
    assert all(each["stats"]["rounds"] >= 5 for each in document["benchmarks"])
    assert "node" not in document["machine_info"] and "data" not in path.read_text()
    kept = tmp_path / speed.OPERATORS
    kept.parent.mkdir()
    kept.write_text(json.dumps(document))
    assert "| SGD step | fp32 | " in speed.operators(tmp_path)
    code, printed = run_pytest(BENCH, "bench_operators.py", "--suite", "nothing")
    assert code == 4 and "invalid choice: 'nothing'" in printed


@pytest.mark.processes
def test_two_processes_beside_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "measured.json"
    arguments = ["bench_distributed.py", "--ranks", "2", "--quick", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(bench_distributed, "spawned", run_said)
    bench_distributed.main()
    found = json.loads(path.read_text())
    figures = found["ranks"]["2"]["microbatches_per_second"]
    assert {"ideal", "auto, M = 2", "torch 1F1B, M = 2", "DDP, M = 2"} <= set(figures)
    assert all(len(each) == 1 and each[0] > 0 for each in figures.values())
    assert found["command"] == "python bench/bench_distributed.py --ranks 2 --quick --json FILE"
    assert "| spectrain | " in capsys.readouterr().out
