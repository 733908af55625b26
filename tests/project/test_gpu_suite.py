"""Tests the GPU suite without a GPU: a full rehearsal, and its handling of failures."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import zipfile
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers import suite_programs

BENCH = Path(__file__).resolve().parents[2] / "bench"
_BUILD = {"cuda": True, "cuda_compiler": "13.0.88", "cuda_architectures": ["sm_90"]}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of bench/ by name."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


@pytest.fixture
def steps(load: Any) -> ModuleType:
    found: ModuleType = load("gpu.steps")
    return found


def _program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


@pytest.mark.processes
def test_all_of_it_rehearsed(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part's lines run; tools are replaced by stand-ins, and one is missing."""
    suite, scale = load("gpu_suite"), load("gpu.scale")
    for name in ("PYTHONPATH", "PYTHONUNBUFFERED", "CUBLAS_WORKSPACE_CONFIG", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "CUPY_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    carried = load("gpu.carried")
    monkeypatch.setattr(carried, "FOLDER", tmp_path / "carried")
    monkeypatch.setattr(load("bench_pipeline"), "MINIBATCHES", 3)
    (tmp_path / "carried").mkdir()
    (tmp_path / "carried" / "sources").write_text(carried.fingerprint())
    _program(tmp_path / "bin" / "compute-sanitizer", "echo '==== ERROR SUMMARY: 0 errors'")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_cuda.py").write_text(
        "import pytest\n@pytest.mark." + "cuda\ndef test_fine(): pass\ndef test_other(): assert 0\n"
    )
    out = tmp_path / "out"
    code = suite.main(["--out", str(out), "--rehearse", "--tests", str(tests)])
    text = (out / "summary.md").read_text()
    assert code == 0, text
    assert {path.name for path in out.iterdir()} == set(load("gpu.results").FILES)
    summary = json.loads((out / "summary.json").read_text())
    assert {s["name"]: s["status"] for s in summary["steps"] if s["status"] != "ok"} == {}
    parts = json.loads((out / "parts.json").read_text())
    for name, part in parts.items():
        assert {c["status"] for c in part.values()} <= {"ok", "passed over"}, (name, part)
    assert parts["tests"]["test_cuda.py"]["result"]["passed"] == 1
    assert parts["stress-methods"]["spectrain, seed 0"]["result"]["streams_entered"] > 0
    report = json.loads((out / "operators.json").read_text())
    assert all(each["stats"]["median"] > 0 for each in report["benchmarks"])
    assert {"Plan", "fused + torch.add", "copy: numpy"} <= {
        each["extra_info"]["name"] for each in report["benchmarks"]
    }
    assert "us of its own per action" in text and "Two GPUs: not measured." in text
    assert "| 1 process | " in text and "No table" not in text
    # The command that the replaced tool would have run.
    options = ["--record", "x", "--rehearse", "--part", "small"]
    assert suite.main(["--out", str(tmp_path), *options]) == 0
    assert scale.FULL.on_gpu


@pytest.mark.processes
def test_dry_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(BENCH / "gpu_suite.py"), "--out", str(out), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    several = {s["name"] for s in summary["steps"] if s["status"] == "skipped"}
    assert several == {"devices"}
    assert summary["dry_run"] and {
        s["status"] for s in summary["steps"] if s["name"] not in several
    } == {"not run"}
    assert "Operators: not measured." in (out / "summary.md").read_text()
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 2 and "expected an empty folder" in again.stderr


def test_the_plan_ends_in_time_and_begins_with_what_all_else_needs(
    load: Any, tmp_path: Path
) -> None:
    module = load("gpu.plan")
    groups = module.plan(tmp_path, [])
    assert sum(max(s.limit_s for s in group) for group in groups) == pytest.approx(module.TOTAL_S)
    assert module.TOTAL_S < 600
    assert len(load("gpu.results").FILES) <= 7  # one more while a file is written
    assert [s.name for group in groups[:2] for s in group] == ["install", "first"]
    assert groups[0][0].essential
    short = module.plan(tmp_path, [], 57)
    assert sum(max(s.limit_s for s in group) for group in short) == pytest.approx(57)


class TestCases:
    def test_every_case_is_on_disk_at_once_and_failures_cost_no_other(
        self, load: Any, tmp_path: Path
    ) -> None:
        cases = load("gpu.cases").Cases(tmp_path / "a.json", float("inf"))

        def look() -> str:
            return str(json.loads((tmp_path / "a.json").read_text())["fine"]["status"])

        assert cases.run("fine", look) == "running"
        assert cases.run("bad", lambda: [][1]) is None
        assert cases.run("after", lambda: 3) == 3
        found = json.loads((tmp_path / "a.json").read_text())
        assert [found[k]["status"] for k in found] == ["ok", "failed", "ok"]
        assert found["bad"]["error"] == "IndexError: list index out of range"

    def test_a_part_that_lost_its_device_goes_on_behind_it(self, load: Any, tmp_path: Path) -> None:
        module, path = load("gpu.cases"), tmp_path / "a.json"

        def lost() -> None:
            raise RuntimeError("an illegal memory access was encountered")

        first = module.Cases(path, float("inf"), alive=lost)
        assert first.run("one", lambda: 1) == 1
        with pytest.raises(SystemExit) as ended:
            first.run("two", lost)
        assert ended.value.code == module.POISONED
        first.put("three", "running")  # as if the process had ended in it
        second = module.Cases(path, float("inf"))
        ran: list[str] = []
        for name in ("one", "two", "three", "four"):
            second.run(name, lambda n=name: ran.append(n))  # type: ignore[misc]
        assert ran == ["four"]
        statuses = [case["status"] for case in json.loads(path.read_text()).values()]
        assert statuses == ["ok", "failed", "died", "ok"]

    @pytest.mark.processes
    def test_a_case_that_hangs_costs_itself_alone(
        self, load: Any, steps: ModuleType, tmp_path: Path
    ) -> None:
        code = (
            f"import sys, time; sys.path.insert(0, {str(BENCH)!r}); from gpu.cases import Cases; "
            "from pathlib import Path; cases = Cases(Path('a.json'), float('inf'), limit_s=1.5); "
            "cases.run('hangs', lambda: time.sleep(100)); cases.run('after', lambda: 3)"
        )
        step = steps.Step("s", [sys.executable, "-c", code], 60)
        outcome = TestSteps._run(steps, tmp_path, step)
        assert (outcome.status, outcome.facts) == ("ok", {"restarts": 1})
        found = json.loads((tmp_path / "a.json").read_text())
        assert [case["status"] for case in found.values()] == ["died", "ok"]
        assert "in <lambda>" in (tmp_path / "s.log").read_text()

    def test_no_case_is_begun_too_late(self, load: Any, tmp_path: Path) -> None:
        cases = load("gpu.cases").Cases(tmp_path / "a.json", time.time() + 10)
        assert cases.run("long", lambda: 1, reserve_s=20) is None
        assert cases.run("short", lambda: 1) == 1
        assert cases.data["long"]["status"] == "no time left"


@pytest.mark.processes
class TestSteps:
    @staticmethod
    def _run(steps: ModuleType, tmp_path: Path, *group: Any, seconds: float = 60) -> Any:
        told: list[int] = []
        found = steps.run_group(
            group,
            lambda step: tmp_path / f"{step.name}.log",
            tmp_path,
            time.monotonic() + seconds,
            lambda: told.append(1),
        )
        return found[0] if len(group) == 1 else found

    @staticmethod
    def _python(code: str) -> list[str]:
        return [sys.executable, "-c", code]

    def test_a_missing_tool_and_no_time_are_recorded(
        self, steps: ModuleType, tmp_path: Path
    ) -> None:
        step = steps.Step("x", ["x"], 10, needs="no-such-program-anywhere")
        assert self._run(steps, tmp_path, step).status == "missing"
        step = steps.Step("y", ["y"], 10)
        assert self._run(steps, tmp_path, step, seconds=0).status == "not run"

    def test_side_by_side_failures_and_hangs_are_recorded(
        self, steps: ModuleType, tmp_path: Path
    ) -> None:
        fails = steps.Step("f", self._python("print('ERROR SUMMARY: 3 errors'); exit(4)"), 9)
        hangs = steps.Step("h", ["sleep", "100"], 9)
        outcomes = self._run(steps, tmp_path, fails, hangs, seconds=6)
        assert (outcomes[0].status, outcomes[0].code) == ("failed", 4)
        assert outcomes[0].facts == {"sanitizer_errors": 3}
        assert outcomes[1].status == "timed out" and 1 < outcomes[1].seconds < 20

    def test_once_more_without_the_filter(self, steps: ModuleType, tmp_path: Path) -> None:
        refuses = ["sh", "-c", "echo unknown option; exit 1"]
        works = ["sh", "-c", "echo 'RACECHECK SUMMARY: 0 hazards displayed'"]
        outcome = self._run(steps, tmp_path, steps.Step("s", refuses, 60, unfiltered=works))
        assert (outcome.status, outcome.facts) == ("ok", {"hazards": 0, "unfiltered": True})

    def test_once_more_where_the_device_was_lost(self, steps: ModuleType, tmp_path: Path) -> None:
        for end in ("exit 77", "kill -9 $$"):
            mark = tmp_path / end.split()[0]
            code = f"test -e {mark} && exit 0; touch {mark}; {end}"
            outcome = self._run(steps, tmp_path, steps.Step("s", ["sh", "-c", code], 60))
            assert (outcome.status, outcome.facts) == ("ok", {"restarts": 1})


def test_the_package_comes_from_the_wheel_that_fits(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, carried, site = load("gpu.install"), load("gpu.carried"), tmp_path / "site"
    monkeypatch.setattr(carried, "FOLDER", tmp_path)
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for name, text in ((tag, "fits"), ("cp399", "does not")):
        with zipfile.ZipFile(tmp_path / f"spectrain_ext-0-{name}-x.whl", "w") as wheel:
            wheel.writestr("spectrain_ext/__init__.py", text)

    def run(command: list[str]) -> str:
        if not site.exists():
            raise RuntimeError("No module named 'spectrain_ext'")
        return json.dumps({"build": _BUILD, "capabilities": [[9, 0]], "failed": None})

    monkeypatch.setattr(module, "_run", run)
    monkeypatch.setattr(module, "driver", lambda: (13, 0))
    (tmp_path / "sources").write_text("of something else")
    with pytest.raises(FileNotFoundError, match="is of other sources: make gpu-wheel again"):
        carried.carried("*.whl")
    (tmp_path / "sources").write_text(carried.fingerprint())
    cases = load("gpu.cases").Cases(tmp_path / "a.json", float("inf"))
    module.install(cases, load("gpu.scale").FULL, tmp_path)
    found = {k: c["status"] for k, c in json.loads((tmp_path / "a.json").read_text()).items()}
    assert found == {"as it is": "passed over", "the wheel": "ok"}
    assert (site / "spectrain_ext" / "__init__.py").read_text() == "fits"


@pytest.mark.parametrize(
    ("build", "driver", "capability", "why"),
    [
        ({}, (13, 0), (9, 0), None),
        ({}, (12, 8), (9, 0), "compiled by CUDA 13.0.88, and the driver runs CUDA 12.8"),
        ({"cuda_compiler": "13.1.80"}, (13, 0), (9, 0), None),
        ({"cuda_compiler": "12.4.1"}, (13, 0), (9, 0), None),
        ({}, (13, 0), (10, 0), "capability 10.0, and it was compiled for sm_90"),
        ({"cuda_architectures": ["sm_80"]}, (13, 0), (8, 6), None),
        ({"cuda_architectures": ["sm_80"]}, (13, 0), (8, 7), "capability 8.7"),
        ({"cuda_architectures": ["sm_86"]}, (13, 0), (8, 0), "capability 8.0"),
        ({"cuda_architectures": ["sm_90", "compute_90"]}, (13, 0), (12, 0), None),
        (
            {"cuda_architectures": ["compute_90"], "cuda_compiler": "13.1.80"},
            *((13, 0), (12, 0), "would run its PTX, but it was compiled by CUDA 13.1.80"),
        ),
        ({"cuda": False}, (13, 0), (9, 0), "no CUDA half"),
        ({}, None, (9, 0), "libcuda.so.1 cannot be loaded"),
    ],
)
def test_which_builds_a_driver_runs(
    load: Any, build: Any, driver: Any, capability: Any, why: str | None
) -> None:
    found = load("gpu.install").refused(_BUILD | build, driver, [capability])
    assert found is None if why is None else why in found, found


def test_what_the_driver_cannot_run_is_compiled_there(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("gpu.install")
    compiled: list[tuple[str, ...]] = []
    build = dict(_BUILD)

    def run(command: list[str]) -> str:
        if "--version" in command:
            return "Cuda compilation tools, release 12.4, V12.4.131"
        return json.dumps({"build": build, "capabilities": [[9, 0]], "failed": None})

    def pip(*arguments: str) -> str:
        compiled.append(arguments)
        build["cuda_compiler"] = "12.4.131"
        return ""

    monkeypatch.setattr(module, "_run", run)
    monkeypatch.setattr(module, "_pip", pip)
    monkeypatch.setattr(module, "_TOOLS", {})
    monkeypatch.setattr(module, "driver", lambda: (12, 8))
    monkeypatch.setattr(load("gpu.carried"), "FOLDER", tmp_path)
    monkeypatch.setenv("SPECTRAIN_CUDA", "1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def statuses(name: str) -> dict[str, str]:
        cases = load("gpu.cases").Cases(tmp_path / name, float("inf"))
        module.install(cases, load("gpu.scale").FULL, tmp_path)
        return {k: f"{case['status']} {case.get('error', '')}" for k, case in cases.data.items()}

    without = statuses("a.json")
    assert "the driver runs CUDA 12.8: update the driver" in without["as it is"]
    assert "no nvcc on PATH or in CUDA_HOME" in without["from source"] and not compiled
    _program(tmp_path / "bin" / "nvcc", "")
    found = statuses("b.json")
    assert found["as it is"].startswith("passed over") and found["from source"] == "ok "
    assert len(compiled) == 1
    monkeypatch.setattr(module, "driver", lambda: (11, 8))
    with pytest.raises(RuntimeError, match=r"is of CUDA 12\.4, and the driver runs CUDA 11\.8"):
        module.check_compiler((11, 8))


def test_every_step_is_known_to_the_report_and_every_part_to_the_plan(
    load: Any, tmp_path: Path
) -> None:
    report, parts = load("gpu.report"), load("gpu_suite").PARTS
    steps = [step for group in load("gpu.plan").plan(tmp_path, [], gpus=8) for step in group]
    assert {step.name for step in steps} == {*report.WITH_TABLE, *report.WITHOUT_TABLE}
    called = {step.command[step.command.index("--part") + 1] for step in steps}
    assert called == set(parts)
    for where in parts.values():
        module, _, function = where.partition(".")
        assert callable(getattr(load(f"gpu.{module}"), function)), where


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_what_needs_several_gpus_takes_no_time_where_there_is_one(
    load: Any, tmp_path: Path, gpus: int
) -> None:
    module = load("gpu.plan")
    groups = module.plan(tmp_path, [], 100, gpus)
    assert sum(max(s.limit_s for s in group) for group in groups) == pytest.approx(100)
    limits = {step.name: step.limit_s for group in groups for step in group}
    assert (limits["devices"] > 0) == (gpus > 1)
    only = module.plan(tmp_path, [], 100, gpus, ["ranks", "devices"])
    assert [s.name for group in only for s in group] == ["install", "first", "devices", "ranks"]
    assert sum(max(s.limit_s for s in group) for group in only) == pytest.approx(100)


def test_what_only_gpus_run(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two simulated GPUs, of which this process has used the second."""
    torch, scale = load("torch"), load("gpu.scale").FULL
    devices, stress = load("gpu.devices"), load("gpu.stress")
    waited: list[int] = []
    for name, value in {
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "synchronize": waited.append,
        "memory_reserved": lambda k: 100 * k,
        "can_device_access_peer": lambda a, b: a < b,
        "stream": lambda stream: nullcontext(entered.append(str(stream.device))),
        "_sleep": lambda cycles: slept.append(cycles),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    entered: list[str] = []
    slept: list[int] = []
    scale.wait()  # an unused device gets no context
    assert waited == [1]
    assert scale.devices(3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices._access(scale) == {"reaches": [[True, True], [False, True]]}
    cases = load("gpu.cases").Cases(tmp_path / "a.json", float("inf"))
    ranks = load("gpu.ranks")
    assert ranks.fits(cases, "x", 2, scale) and not ranks.fits(cases, "x", 4, scale)
    reason = "it needs 4 GPUs, and 2 can be used"
    assert cases.data["x"] == {"status": "skipped", "error": reason}

    monkeypatch.setattr(stress, "_cycles_per_second", lambda: 1e6)
    both = [SimpleNamespace(device=torch.device("cuda", k)) for k in (0, 1)]
    monkeypatch.setattr(stress.streams.CudaStream, "__enter__", lambda self: None)
    stream = stress.streams.CudaStream(both)
    delays = stress.Delays(scale)
    for device, expected in (("cuda:1", {"cuda:1"}), (None, {"cuda:0", "cuda:1"})):
        entered.clear()
        with delays.seeded(3, device):
            for _ in range(40):
                with stream:
                    pass
        assert set(entered) == expected and delays.entered == 40
    assert slept and max(slept) <= scale.delay_s * 1e6


@pytest.mark.processes
def test_a_rank_that_hangs_is_ended_and_says_where(load: Any) -> None:
    launch, scale = load("gpu.launch").launch, load("gpu.scale").REHEARSAL
    ended = launch(suite_programs.hangs, 2, scale, 1, limit_s=10.0)
    assert ended[1].code is None and "in hangs" in ended[1].said, ended
    ended = launch(suite_programs.told, 2, scale, limit_s=60.0)
    assert [(end.code, end.value) for end in ended] == [(0, 0), (0, 1)]


def test_what_bits_and_training_are_judged_by(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, training = load("gpu.exact"), load("gpu.training")
    stale, predicted = (exact.Exact(m, 3).on_cpu() for m in ("vanilla", "spectrain"))
    exact.same(exact.Exact("spectrain", 3).on_cpu(), predicted)
    with pytest.raises(AssertionError, match="of 6 tensors differ"):
        exact.same(stale, predicted)
    with pytest.raises(AssertionError, match="expected"):
        exact.same({}, predicted)
    ways = {
        m: {"minibatches_per_s": s, "losses": [2.0, 1.0]} for m, s in (("auto", 3), ("1f1b", 2))
    }
    monkeypatch.setattr(training, "run_all", lambda *_, **__: [ways])
    assert training.throughput(1, None)["auto_over_1f1b"] == 1.5
    ways["1f1b"]["losses"] = [1.0, 1.0]
    with pytest.raises(AssertionError, match="1f1b does not train"):
        training.throughput(1, None)


def test_what_ran_at_the_same_time(load: Any) -> None:
    """Two streams: 10 us of compute with 4 us of prediction in parallel, 2 us idle, a 4 us copy."""
    module = load("gpu.overlap")

    def event(name: str, category: str, begin: float, duration: float, stream: int) -> Any:
        more = {"ph": "X", "name": name, "cat": category, "args": {"stream": stream}}
        return {"ts": begin, "dur": duration, **more}

    found = module.overlap(
        module.spans(
            [
                event("gemm", "kernel", 100, 10, 7),
                event("spectrain::run_table<spectrain::SgdPredict<float>>", "kernel", 103, 4, 8),
                event("Memcpy DtoD", "gpu_memcpy", 112, 4, 9),
                event("aten::mm", "cpu_op", 90, 100, 1),
                {"ph": "M", "name": "process_name"},
            ]
        )
    )
    assert found["us_by_kind"] == {"compute": 10, "prediction": 4, "copy": 4}
    assert (found["whole_us"], found["busy_us"], found["kernels"]) == (16, 14, 3)
    assert found["two_streams_share"] == pytest.approx(4 / 14, abs=1e-4)
    assert found["share_together"] == {"compute and prediction": pytest.approx(4 / 14, abs=1e-4)}
    assert found["two_devices_share"] == 0
    assert module.overlap([]) == {"kernels": 0}
    # Two devices whose streams share a number; an NCCL message in parallel with a product.
    both = [event("gemm", "kernel", 0, 8, 7), event("ncclDevKernel_SendRecv()", "kernel", 4, 8, 7)]
    both[0]["args"]["device"], both[1]["args"]["device"] = 0, 1
    found = module.overlap(module.spans(both))
    assert (found["streams"], found["two_devices_share"]) == (2, pytest.approx(4 / 12, abs=1e-4))
    assert found["share_together"] == {"compute and message": pytest.approx(4 / 12, abs=1e-4)}


def test_a_late_stream_that_changes_a_bit_is_a_failure(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stress, scale = load("gpu.stress"), load("gpu.scale").REHEARSAL
    cases = load("gpu.cases").Cases(tmp_path / "a.json", float("inf"))
    monkeypatch.setattr(stress.Delays, "sleep", lambda self, share: (_ for _ in ()).throw(OSError))
    stress.stress_options(cases, scale)
    assert {c["status"] for k, c in cases.data.items() if "no delays" in k} == {"ok"}
    assert {c["status"] for k, c in cases.data.items() if "seed" in k} == {"failed"}
    a, b = load("torch").zeros(3), load("torch").zeros(3)
    b[1] = 1e-7
    with pytest.raises(AssertionError, match=r"1 of 1 tensors differ, by up to 1e-07: \['w'\]"):
        load("gpu.exact").same({"w": b}, {"w": a})


def test_counts_of_a_file_whose_process_ended_early(load: Any) -> None:
    counts = load("gpu.cuda_tests").counts
    assert counts("a.py::b PASSED\n=== 12 passed, 3 skipped in 4.20s ===") == {
        "passed": 12,
        "skipped": 3,
    }
    assert counts("t.py::a PASSED [ 1%]\nt.py::b[x y] PASSED\nt.py::c FAILED\nt.py::d ") == {
        "passed": 2,
        "failed": 1,
    }


def test_files_with_tests_for_the_device_are_found(load: Any) -> None:
    tests = BENCH.parent / "tests"
    names = [str(p.relative_to(tests)) for p in load("gpu.cuda_tests").marked(tests)]
    assert names[0] == "operators/test_cuda_arrays.py" and "optim/test_cuda.py" in names
    assert "observation/test_trace.py" in names and "partitioning/test_cut.py" not in names


def test_files_are_tested_on_gpus_in_turn(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("gpu.cuda_tests")
    for count, given, expected in (
        (1, "3", [None]),
        (3, None, ["0,1,2", "1,2,0", "2,0,1"]),
        (2, "GPU-a,GPU-b", ["GPU-a,GPU-b", "GPU-b,GPU-a"]),
    ):
        monkeypatch.setattr(module.machine, "gpus", lambda n=count: n)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if given is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert module._visible() == expected
