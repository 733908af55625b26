"""Tests bench: rivals compute the same in turn; scripts and the report say what was measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_distributed
import bench_pipeline
import pytest
import torch
from helpers.ranks import run_pytest, run_said
from report import speed
from rivals import contest, in_torch, targets
from rivals.operations import OPERATIONS, STAGE, Operation, applies, ours
from rivals.workloads import (
    FP32,
    FP32_16,
    MIXED,
    MIXED_16,
    PRECISIONS,
    Precision,
    Streams,
    Workload,
)


def test_bytes_per_weight_are_the_least_possible() -> None:
    got = {}
    for precision in (FP32, MIXED, FP32_16, MIXED_16):
        work = Workload("w", ((2, 5),), precision)
        got[precision.name] = [op.bytes_moved(work) // 10 for op in OPERATIONS]
    #                        predict_ ..         SGD       AdamW   Lion, stage
    assert got["fp32"] == [12, 12, 8, 16, 16, 20, 24, 28, 28, 32, 36, 28, 36]
    assert got["mixed"] == [12, 10, 8, 16, 16, 18, 20, 22, 26, 28, 30, 22, 30]
    assert got["fp32-16"][5:-1] == [16, 20, 24, 20, 24, 28, 24]
    assert got["mixed-16"][5:-1] == [14, 16, 18, 18, 20, 22, 18]


def _run(operation: Operation, work: Workload, call: Callable[[Streams], Any]) -> Streams:
    """Start every implementation from the same values."""
    s = Streams(work)
    for letter in operation.letters:
        s[letter]
    call(s)
    return s


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=lambda p: p.name)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
def test_rivals_compute_the_same(
    operation: Operation, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    work = Workload("w", ((40,), (7, 3)), precision)
    if not applies(operation, work):
        return

    def table(s: Streams) -> dict[str, Any]:
        return {**ours(operation, s), **in_torch.rivals(operation, s)}

    before = Streams(work)
    expected = _run(operation, work, lambda s: table(s)["Plan"]())
    changed = [c for c in operation.letters if not torch.equal(before[c][0], expected[c][0])]
    assert set(changed) == set(operation.writes) or precision is not FP32  # too narrow for a step
    names = [name for name in table(Streams(work)) if name != "Plan"]
    results = {name: _run(operation, work, lambda s, n=name: table(s)[n]()) for name in names}
    if precision in (FP32, MIXED) and not operation.lion:  # compiling runs it once
        compiled = _run(operation, work, lambda s: in_torch.compiled(operation, [s]))
        results["torch.compile"] = compiled
    assert results or operation is STAGE
    for name, s in results.items():
        for letter in operation.letters:
            for a, b in zip(s[letter], expected[letter], strict=True):
                message = f"{operation.name}, {name}, {letter}"
                torch.testing.assert_close(a.detach(), b, msg=message)


def test_a_contest_measures_every_implementation_and_copy() -> None:
    settings = contest.Settings(case_s=0.0)
    with pytest.raises(contest.TooLarge, match=r"needs 0\.0 GiB, 0\.0 may be used"):
        small = contest.Settings(memory_bytes=2**20)
        contest.contest(OPERATIONS[0], Workload("large", ((2**20,),)), small)
    for work in (Workload("tiny", ((33,), (8,))), Workload("tiny", ((33,),), MIXED)):
        for operation in OPERATIONS:
            found = contest.contest(operation, work, settings)
            assert list(found) == contest.names(operation, work, settings)
            kinds = [times.about["kind"] for times in found.values()]
            assert "ours" in kinds and kinds.count("copy") == 3
            assert "rival" in kinds or operation is STAGE or operation.lion
            for times in found.values():
                entry = times.as_benchmark()["stats"]
                assert entry["rounds"] == len(times.seconds) >= 5
                assert entry["median"] >= entry["min"] > 0
                nbytes = 10 * times.about["bytes"] // times.about["elements"]
                assert nbytes // 10 <= operation.bytes_per_element(work)


@pytest.mark.cuda
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
def test_a_contest_on_a_device(operation: Operation) -> None:
    settings = contest.Settings(device="cuda", case_s=0.0)
    work = Workload("small", ((4099,), (8,)))
    found = contest.contest(operation, work, settings)
    assert list(found) == contest.names(operation, work, settings)
    assert found["Plan"].about["how"] == "graph"
    assert all(times.about["how"] in ("graph", "events") for times in found.values())
    assert all(min(times.seconds) > 0 for times in found.values())


# Scripts and the report

BENCH = Path(__file__).resolve().parents[2] / "bench"
_TWO = "SGD step + 2 predictions"


def entry(name: str, us: float, kind: str = "ours", best: float = 0.9, **more: Any) -> Any:
    """An entry of pytest-benchmark's JSON, for 1,000 bytes."""
    about = {"operation": "predict_", "workload": "2^24", "precision": "fp32", "name": name}
    about |= {"kind": kind, "bytes": 1000, "elements": 2**24, "tensors": 1, **more}
    stats = {"median": us / 1e6, "iqr": us / 1e7, "min": us * best / 1e6, "rounds": 5}
    return {"extra_info": about, "stats": stats}


def verdict(what: str, *entries: Any, device: str = "cpu") -> targets.Verdict:
    found = targets.judged({"device": device}, entries)
    (one,) = [v for v in found if v.what.startswith(what)]
    return one


def test_the_worst_large_workload_and_a_rival_that_is_ahead_anywhere_decide() -> None:
    good = [entry("Plan", 1.0), entry("operator", 3.0), entry("copy", 0.97, "copy")]
    large = {"workload": "2^26"}
    worse = [entry("Plan", 1.0, **large), entry("copy", 0.94, "copy", 0.99, **large)]
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


@pytest.mark.processes
def test_a_group_holds_all_rivals_and_its_file_makes_the_section(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    path = tmp_path / "bench.json"
    tiny = ("--elements", 6, "--case-seconds", 0, "--threads", 1, "-k", "SGD-step")
    code, printed = run_pytest(BENCH, "bench_operators.py", *tiny, f"--benchmark-json={path}")
    assert code == 0, printed
    assert "benchmark 'SGD step, 2^6, fp32'" in printed
    assert "ours against the best copy and the fastest rival" in printed
    document = json.loads(path.read_text())
    about = [each["extra_info"] for each in document["benchmarks"]]
    assert {each["operation"] for each in about} == {"SGD step", "SGD step + 1 prediction", _TWO}
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


def test_an_instruction_beside_torch_and_its_calls() -> None:
    found = bench_pipeline.measured(1, ["vanilla"])
    assert found.keys() >= {"torch, N = 8", "1f1b, N = 4", "auto, N = 1", "own cost, vanilla"}
    lines = bench_pipeline.report([found], [found]).splitlines()[2:]
    assert len(lines) == len(found) and all(" | 1.00 (1.00 to 1.00) |" in line for line in lines)
    calls = bench_pipeline.calls_of("vanilla", 1)
    steps = {name.partition(" ")[2]: n for name, n in calls.items() if name.startswith("optim/")}
    assert steps["Stepper.step"] == bench_pipeline.COUNTED_STAGES


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
