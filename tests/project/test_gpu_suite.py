"""Tests the GPU suite without a GPU: a full rehearsal, and its handling of failures."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_pipeline
import gpu_suite
import pytest
import torch
from gpu import carried, cuda_tests, devices, exact, install, plan, ranks, stress
from gpu.cases import POISONED, Cases
from gpu.launch import launch
from gpu.overlap import overlap, spans
from gpu.results import FILES
from gpu.scale import FULL, REHEARSAL
from gpu.steps import Step, run_group
from helpers.ranks import hangs

from spectrain_ext.transport import CudaStream

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def cases(tmp_path: Path) -> Cases:
    return Cases(tmp_path / "a.json", float("inf"))


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore afterwards what the suite changes in its process; no wheel, one stand-in."""
    for name in ("PYTHONPATH", "PYTHONUNBUFFERED", "CUBLAS_WORKSPACE_CONFIG", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "CUPY_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(carried, "FOLDER", tmp_path / "carried")
    monkeypatch.setattr(bench_pipeline, "MINIBATCHES", 3)
    sanitizer = tmp_path / "bin" / "compute-sanitizer"
    sanitizer.parent.mkdir()
    sanitizer.write_text("#!/bin/sh\necho '==== ERROR SUMMARY: 0 errors'")
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.processes
@pytest.mark.usefixtures("started")
def test_all_of_it_rehearsed(tmp_path: Path) -> None:
    """Every part's lines run; tools are replaced by stand-ins, and one is missing."""
    (tmp_path / "carried").mkdir()
    (tmp_path / "carried" / "sources").write_text(carried.fingerprint())
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_cuda.py").write_text(
        "import pytest\n@pytest.mark." + "cuda\ndef test_fine(): pass\ndef test_other(): assert 0\n"
    )
    out = tmp_path / "out"
    code = gpu_suite.main(["--out", str(out), "--rehearse", "--tests", str(tests)])
    text = (out / "summary.md").read_text()
    assert code == 0, text
    assert {path.name for path in out.iterdir()} == set(FILES)
    summary = json.loads((out / "summary.json").read_text())
    assert {s["name"]: s["status"] for s in summary["steps"] if s["status"] != "ok"} == {}
    parts = json.loads((out / "parts.json").read_text())
    for name, part in parts.items():
        assert {c["status"] for c in part.values()} <= {"ok", "passed over"}, (name, part)
    assert parts["tests"]["test_cuda.py"]["result"]["passed"] == 1
    assert parts["stress-methods"]["spectrain, seed 0"]["result"]["works"] > 0
    benchmarks = json.loads((out / "operators.json").read_text())["benchmarks"]
    assert all(each["stats"]["median"] > 0 for each in benchmarks)
    names = {each["extra_info"]["name"] for each in benchmarks}
    assert names >= {"Plan", "fused + torch.add", "copy: numpy"}
    assert "us of its own per instruction" in text and "Two GPUs: not measured." in text
    assert "| 1 process | " in text and "No table" not in text
    # The command that the replaced tool would have run.
    options = ["--record", "x", "--rehearse", "--part", "kernels"]
    assert gpu_suite.main(["--out", str(tmp_path), *options]) == 0
    assert FULL.on_gpu


@pytest.mark.processes
@pytest.mark.usefixtures("started")
def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert gpu_suite.main(["--out", str(out), "--dry-run"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["dry_run"]
    assert {s["status"] for s in summary["steps"]} == {"not run", "skipped"}
    assert gpu_suite.main(["--out", str(out), "--dry-run"]) == 2
    assert "expected an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize("gpus", [1, 8])
def test_a_plan_ends_in_time_and_begins_with_what_all_else_needs(tmp_path: Path, gpus: int) -> None:
    """What needs several GPUs takes no time where there is one."""
    groups = plan.plan(tmp_path, [], 100, gpus)
    limits = {step.name: step.limit_s for group in groups for step in group}
    assert (limits["devices"] > 0) == (gpus > 1)
    assert groups[0][0].essential
    only = plan.plan(tmp_path, [], 100, gpus, ["ranks", "devices"])
    named = [step.name for group in only for step in group]
    assert named == ["install", "first", "devices", "ranks"]
    for made in (groups, only):
        longest = sum(max(step.limit_s for step in group) for group in made)
        assert longest == pytest.approx(100)


class TestCases:
    def test_a_failure_costs_no_other_case_and_a_lost_device_a_new_process(
        self, tmp_path: Path
    ) -> None:
        def lost() -> None:
            raise RuntimeError("an illegal memory access was encountered")

        first = Cases(tmp_path / "a.json", float("inf"), alive=lambda: None)
        assert first.run("one", lambda: 1) == 1
        assert first.run("bad", lambda: [][1]) is None
        assert first.data["bad"]["error"] == "IndexError: list index out of range"
        first = Cases(tmp_path / "a.json", float("inf"), alive=lost)
        with pytest.raises(SystemExit) as ended:
            first.run("two", lost)
        assert ended.value.code == POISONED
        first.put("three", "running")  # as if the process had ended in it
        second = Cases(tmp_path / "a.json", float("inf"))
        ran: list[str] = []
        for name in ("one", "bad", "two", "three", "four"):
            second.run(name, lambda n=name: ran.append(n))  # type: ignore[misc]
        assert ran == ["four"]
        statuses = [
            case["status"] for case in json.loads((tmp_path / "a.json").read_text()).values()
        ]
        assert statuses == ["ok", "failed", "failed", "died", "ok"]

    @pytest.mark.processes
    def test_a_case_that_hangs_costs_itself_alone(self, tmp_path: Path) -> None:
        code = (
            f"import sys, time; sys.path.insert(0, {str(BENCH)!r}); from gpu.cases import Cases; "
            "from pathlib import Path; cases = Cases(Path('a.json'), float('inf'), limit_s=1.0); "
            "cases.run('hangs', lambda: time.sleep(100)); cases.run('after', lambda: 3)"
        )
        (outcome,) = _run(tmp_path, Step("s", [sys.executable, "-c", code], 60))
        assert (outcome.status, outcome.facts) == ("ok", {"restarts": 1})
        found = json.loads((tmp_path / "a.json").read_text())
        assert [case["status"] for case in found.values()] == ["died", "ok"]
        assert "in <lambda>" in (tmp_path / "s.log").read_text()


def _run(tmp_path: Path, *group: Step, seconds: float = 60) -> list[Any]:
    until = time.monotonic() + seconds
    return run_group(
        group, lambda step: tmp_path / f"{step.name}.log", tmp_path, until, lambda: None
    )


@pytest.mark.processes
class TestSteps:
    @pytest.mark.parametrize(
        ("program", "more", "status", "facts"),
        [
            ("x", {"needs": "no-such-program-anywhere"}, "missing", {}),
            ("echo 'ERROR SUMMARY: 3 errors'; exit 4", {}, "failed", {"sanitizer_errors": 3}),
            ("echo 'RACECHECK SUMMARY: 0 hazards displayed'", {}, "ok", {"hazards": 0}),
            # once more where the device was lost
            ("test -e mark && exit 0; touch mark; exit 77", {}, "ok", {"restarts": 1}),
            ("test -e mark && exit 0; touch mark; kill -9 $$", {}, "ok", {"restarts": 1}),
        ],
    )
    def test_what_becomes_of_a_step(
        self, program: str, more: dict[str, Any], status: str, facts: Any, tmp_path: Path
    ) -> None:
        (outcome,) = _run(tmp_path, Step("s", ["sh", "-c", program], 60, **more))
        assert (outcome.status, outcome.facts) == (status, facts)

    def test_a_hang_beside_a_failure_is_ended(self, tmp_path: Path) -> None:
        fails = Step("f", ["sh", "-c", "exit 4"], 9)
        hangs = Step("h", ["sleep", "100"], 9)
        failed, hung = _run(tmp_path, fails, hangs, seconds=4)
        assert (failed.status, failed.code) == ("failed", 4)
        assert hung.status == "timed out" and 1 < hung.seconds < 20


@pytest.mark.parametrize(
    ("architectures", "compiler", "driver", "capability", "why"),
    [
        ("sm_80", "12.4.1", (13, 0), (8, 6), None),
        ("sm_90 compute_90", "13.0.88", (13, 0), (12, 0), None),
        ("sm_90", "13.0.88", (12, 8), (9, 0), "by CUDA 13.0.88, and the driver runs CUDA 12.8"),
        ("sm_90", "13.0.88", (13, 0), (10, 0), "10.0, and it was compiled for sm_90"),
        ("compute_90", "13.1.80", (13, 0), (12, 0), "run its PTX, but it was compiled by CUDA"),
        ("sm_90", "13.0.88", None, (9, 0), "libcuda.so.1 cannot be loaded"),
    ],
)
def test_which_builds_a_driver_runs(
    architectures: str, compiler: str, driver: Any, capability: Any, why: str | None
) -> None:
    named = architectures.split()
    build = {"cuda": bool(named), "cuda_compiler": compiler, "cuda_architectures": named}
    found = install.refused(build, driver, [capability])
    assert found is None if why is None else why in found, found


def test_one_bit_is_a_difference() -> None:
    zero, one = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    exact.same(one, {"w": torch.ones(2)})
    with pytest.raises(AssertionError, match="nothing was compared"):
        exact.same(zero, zero)
    with pytest.raises(AssertionError, match=r"1 of 1 tensors differ, by up to 1e-07: \['w'\]"):
        exact.same({"w": torch.tensor([0.0, 1e-7])}, zero)
    with pytest.raises(AssertionError, match="expected"):
        exact.same({}, zero)


def _event(name: str, begin: float, duration: float, kind: str = "kernel", **at: int) -> Any:
    return {"name": name, "cat": kind, "ts": begin, "dur": duration, "ph": "X", "args": at}


def test_shares_of_time_in_which_streams_compute_together() -> None:
    """10 us of compute with 4 us of prediction in parallel, 2 us idle, a 4 us copy."""
    predict = "spectrain::run_table<spectrain::SgdPredict<float>>"
    events = [
        _event("gemm", 100, 10, stream=7),
        _event(predict, 103, 4, stream=8),
        _event("Memcpy DtoD", 112, 4, "gpu_memcpy", stream=9),
        _event("aten::mm", 90, 100, "cpu_op", stream=1),
        {"ph": "M", "name": "process_name"},
    ]
    found = overlap(spans(events))
    assert found["us_by_kind"] == {"compute": 10, "prediction": 4, "copy": 4}
    assert (found["whole_us"], found["busy_us"], found["kernels"]) == (16, 14, 3)
    assert found["two_streams_share"] == pytest.approx(4 / 14, abs=1e-4)
    assert found["two_devices_share"] == 0


def test_a_late_stream_that_changes_a_bit_is_a_failure(
    cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stress.Delays, "sleep", lambda self, share: (_ for _ in ()).throw(OSError))
    stress.stress_options(cases, REHEARSAL)
    assert {c["status"] for k, c in cases.data.items() if "no delays" in k} == {"ok"}
    assert {c["status"] for k, c in cases.data.items() if "seed" in k} == {"failed"}


def test_what_only_gpus_run(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two simulated GPUs, of which this process has used the second."""
    waited: list[int] = []
    entered: list[str] = []
    slept: list[int] = []
    for name, value in {
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "synchronize": waited.append,
        "memory_reserved": lambda k: 100 * k,
        "can_device_access_peer": lambda a, b: a < b,
        "stream": lambda stream: nullcontext(entered.append(str(stream.device))),
        "_sleep": slept.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    FULL.wait()  # an unused device gets no context
    assert waited == [1]
    assert FULL.devices(3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices._access(FULL) == {"reaches": [[True, True], [False, True]]}
    assert ranks.fits(cases, "x", 2, FULL) and not ranks.fits(cases, "x", 4, FULL)
    reason = "it needs 4 GPUs, and 2 can be used"
    assert cases.data["x"] == {"status": "skipped", "error": reason}

    monkeypatch.setattr(stress, "_cycles_per_second", lambda: 1e6)
    both = [CudaStream(SimpleNamespace(device=torch.device("cuda", k))) for k in (0, 1)]  # type: ignore[arg-type]
    monkeypatch.setattr(CudaStream, "__enter__", lambda self: None)
    monkeypatch.setattr(CudaStream, "__exit__", lambda *_: None)
    delays = stress.Delays(FULL)
    for device, expected in (("cuda:1", {"cuda:1"}), (None, {"cuda:0", "cuda:1"})):
        entered.clear()
        with delays.seeded(3, device):
            for _ in range(20):
                for stream in both:
                    with stream.using():
                        pass
                    stream.copy([])
        assert set(entered) == expected and delays.delayed == 80
    assert slept and max(slept) <= FULL.delay_s * 1e6


@pytest.mark.processes
def test_a_rank_that_hangs_is_ended_and_says_where() -> None:
    done, hung = launch(hangs, 2, REHEARSAL, 1, limit_s=10.0)
    assert done.value == "rank 0 of 2", done
    assert hung.code is None and "in hangs" in hung.said, hung


def test_the_tests_of_this_suite_that_a_gpu_runs() -> None:
    tests = BENCH.parent / "tests"
    names = [str(path.relative_to(tests)) for path in cuda_tests.marked(tests)]
    assert names[0] == "operators/test_cuda_arrays.py" and "optim/test_cuda.py" in names
    assert "metrics/test_trace.py" in names and "partitioning/test_cut.py" not in names
    # counted also where a file's process ended early
    ended = "t.py::a PASSED [ 1%]\nt.py::b[x y] PASSED\nt.py::c FAILED\nt.py::d "
    assert cuda_tests.counts(ended) == {"passed": 2, "failed": 1}
