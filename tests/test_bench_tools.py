"""The benchmarks' own logic: tables of what was measured, a GPU suite planned without a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from spectrain_ext.benchmark import engine, operations

BENCH = Path(__file__).resolve().parent.parent / "bench"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def table() -> ModuleType:
    return _load("table")


@pytest.fixture
def suite(table: ModuleType) -> ModuleType:
    return _load("gpu_suite")


class TestTable:
    def test_a_row_from_raw_times(self, table: ModuleType) -> None:
        row = table.summarize("g", "Plan", [2e-6, 4e-6, 3e-6])
        assert row.median_us == pytest.approx(3.0) and row.rounds == 3
        assert row.best_us == pytest.approx(2.0) and row.iqr_us == pytest.approx(2.0)

    def test_nothing_measured_is_an_error_and_not_a_row(self, table: ModuleType) -> None:
        with pytest.raises(ValueError, match="no measured times"):
            table.summarize("g", "Plan", [])

    def test_ratio_to_the_fastest_rival(self, table: ModuleType) -> None:
        rows = [
            table.Row("g", "Plan", 2.0, 0.1, 1.9, 5),
            table.Row("g", "slow", 10.0, 0.1, 9.9, 5),
            table.Row("g", "fast", 4.0, 0.1, 3.9, 5),
        ]
        assert table.ratio_to_rival(rows[0], rows) == pytest.approx(2.0)
        assert table.ratio_to_rival(rows[1], rows) is None
        assert table.ratio_to_rival(rows[0], rows[:1]) is None

    def test_markdown_leaves_empty_what_is_not_known(self, table: ModuleType) -> None:
        text = table.markdown([table.Row("g", "Plan", 2.0, 0.1, 1.9, 5)])
        assert text.splitlines()[-1] == "| g | Plan | 2.0 | 0.1 | 1.9 |  |"

    def test_rows_of_pytest_benchmark(self, table: ModuleType) -> None:
        stats = {"median": 1e-6, "iqr": 2e-7, "min": 9e-7, "rounds": 9}
        data = {"benchmarks": [{"name": "n", "stats": stats, "extra_info": {"name": "Plan"}}]}
        (row,) = table.from_pytest_benchmark(data)
        assert (row.name, row.rounds) == ("Plan", 9)
        assert row.median_us == pytest.approx(1.0)


class TestSuite:
    @pytest.mark.processes
    def test_dry_run(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        done = subprocess.run(
            [sys.executable, str(BENCH / "gpu_suite.py"), "--out", str(out), "--dry-run"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        summary = json.loads((out / "summary.json").read_text())
        assert summary["dry_run"] and {s["status"] for s in summary["steps"]} == {"not run"}
        assert summary["environment"]["torch"] == torch.__version__
        text = (out / "summary.md").read_text()
        assert "Operators: not measured." in text and "Two GPUs: not measured." in text
        assert len(list(out.iterdir())) <= 8

    def test_a_folder_with_files_is_refused(self, suite: ModuleType, tmp_path: Path) -> None:
        (tmp_path / "old").touch()
        assert suite.main(["--out", str(tmp_path), "--dry-run"]) == 2

    def test_plan_ends_in_time_and_in_few_files(self, suite: ModuleType, tmp_path: Path) -> None:
        steps = suite.plan(tmp_path, 570)
        files = {s.file for s in steps} | {"summary.json", "summary.md"}
        files |= {"operators.json", "pipeline.json"}
        assert len(files) <= 8
        assert steps[0].name == "tests"

    def test_a_missing_tool_is_recorded(self, suite: ModuleType, tmp_path: Path) -> None:
        step = suite.Step("x", ["x"], "x.txt", 10, needs="no-such-program-anywhere")
        assert suite.run_step(step, tmp_path, float("inf")).status == "missing"

    @pytest.mark.processes
    def test_failures_and_hangs_are_recorded(self, suite: ModuleType, tmp_path: Path) -> None:
        deadline = float("inf")
        fails = suite.Step("f", [sys.executable, "-c", "print('3 passed'); exit(4)"], "f.txt", 60)
        outcome = suite.run_step(fails, tmp_path, deadline)
        assert (outcome.status, outcome.code, outcome.facts) == ("failed", 4, {"passed": 3})
        endless = [sys.executable, "-c", "while True: pass"]
        hangs = suite.Step("h", endless, "h.txt", 0.5)
        assert suite.run_step(hangs, tmp_path, deadline).status == "timed out"
        assert suite.run_step(hangs, tmp_path, 0.0).status == "not run"

    @pytest.mark.processes
    def test_once_more_without_the_filter(self, suite: ModuleType, tmp_path: Path) -> None:
        refuses = [sys.executable, "-c", "print('unknown option'); exit(1)"]
        works = [sys.executable, "-c", "print('ERROR SUMMARY: 0 errors')"]
        step = suite.Step("s", refuses, "s.txt", 60, unfiltered=works)
        outcome = suite.run_step(step, tmp_path, float("inf"))
        assert (outcome.status, outcome.facts) == ("ok", {"sanitizer_errors": 0})
        finds = [sys.executable, "-c", "print('ERROR SUMMARY: 3 errors'); exit(17)"]
        step = suite.Step("s", finds, "s.txt", 60, unfiltered=works)
        outcome = suite.run_step(step, tmp_path, float("inf"))
        assert (outcome.status, outcome.facts) == ("failed", {"sanitizer_errors": 3})

    def test_rehearsal_on_the_cpu(
        self,
        suite: ModuleType,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """The parts that measure, on the CPU."""
        pipeline, parts = _load("bench_pipeline"), _load("gpu_parts")
        monkeypatch.setattr(parts, "DEVICE", "cpu")
        monkeypatch.setattr(parts, "EXPONENTS", (8, 9, 5))
        monkeypatch.setattr(parts, "COUNTS", (3, 4))
        monkeypatch.setattr(parts, "MODELS", ())
        monkeypatch.setattr(parts, "CASE_S", 0.0)
        monkeypatch.setattr(parts, "SAMPLE_S", 0.0)
        few = [operations.PREDICT, operations.ADAMW_2, operations.STAGE]
        monkeypatch.setattr(operations, "OPERATIONS", few)
        monkeypatch.setattr(engine, "host_overhead", lambda device: {})
        monkeypatch.setattr(pipeline, "MINIBATCHES", 3)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch, "compile", lambda f, **options: f)
        parts.part_small()
        assert "every kernel ran" in capsys.readouterr().out
        parts.part_operators(tmp_path, 100.0)
        parts.part_pipeline(tmp_path)
        about = {"date": "a date", "device": {"name": "rehearsal"}, "devices": 1}
        text = suite.report(about, [suite.Outcome("tests", "ok", 3.0)], tmp_path)
        assert "| AdamW step + 2 predictions | 3 x, 2^9 | fp32 | Plan |" in text
        assert "us of the pipeline's own per action" in text
        data = json.loads((tmp_path / "operators.json").read_text())
        assert not data["left_out"] and all(r["median_us"] > 0 for r in data["rows"])
        parts.part_operators(tmp_path, 0.0)
        data = json.loads((tmp_path / "operators.json").read_text())
        assert not data["rows"] and data["left_out"]

    def test_figures_are_read_from_the_tools(self, suite: ModuleType) -> None:
        assert suite.read("= 12 passed, 3 skipped in 4 s") == {"passed": 12, "skipped": 3}
        assert suite.read("========= ERROR SUMMARY: 2 errors")["sanitizer_errors"] == 2
        text = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
        assert suite.read(text)["hazards"] == 1
