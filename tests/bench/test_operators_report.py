"""What becomes of figures: JSON, tables, comparison, targets, the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_operators import in_short, workloads
from click.testing import CliRunner, Result
from rivals import targets
from rivals.report import (
    Report,
    Row,
    changes_table,
    compare,
    differences,
    markdown,
    spread,
    times_rival,
)

from spectrain_ext.cli.group import main

ABOUT = {
    "device": "cpu",
    "cpu": "a processor",
    "cores": 2,
    "threads": 1,
    "torch": "2.13.0",
    "python": "3.11.7",
    "instruction_set": "x86-64-v4",
    "spectrain_ext": "0.1.0",
    "date": "2026-01-01T00:00:00+00:00",
}


def row(implementation: str, us: float, kind: str = "ours", **more: Any) -> Row:
    known: dict[str, Any] = {
        "operation": "predict_",
        "workload": "2^24",
        "precision": "fp32",
        "bytes": 1000,
        "iqr_us": us / 10,
        "best_us": us * 0.9,
        "samples": 5,
        "gb_per_s": 1.0 / us,
        "share": 1.0 / us,
        "share_best": 1.0 / us,
        "elements": 2**24,
        "tensors": 1,
    }
    return Row(implementation=implementation, kind=kind, median_us=us, **{**known, **more})


def report(*rows: Row) -> Report:
    return Report(dict(ABOUT), {}, list(rows), {"Plan.refresh, 300 gradients": 30.0})


def test_spread() -> None:
    assert spread([2.0, 4.0, 3.0]) == (3.0, 2.0, 2.0)
    assert spread([2.0]) == (2.0, 0.0, 2.0)
    with pytest.raises(ValueError, match="no measured times"):
        spread([])


def test_json_comes_back() -> None:
    before = report(row("Plan", 2.0), row("_foreach", 4.0, "rival"))
    assert Report.from_json(before.to_json()) == before
    rounded = Report.from_json(report(row("Plan", 1.23456789)).to_json())
    assert rounded.rows[0].median_us == 1.2346


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "rows": [{}]}'])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a report of spectrain bench"):
        Report.from_json(text)


def test_a_table_holds_ratios_of_ours_and_leaves_out_copies() -> None:
    rows = [row("Plan", 2.0), row("slow", 9.0, "rival"), row("fast", 4.0, "rival", compile_s=1.5)]
    rows.append(row("copy: numpy", 1.0, "copy"))
    assert times_rival(rows[0], rows) == pytest.approx(2.0)
    assert times_rival(rows[1], rows) is None and times_rival(rows[0], rows[:1]) is None
    lines = markdown(report(*rows)).splitlines()
    assert len(lines) == 5 and lines[2].endswith("| 2.00 |")
    assert "fast (compiled in 1.5 s)" in lines[4]
    assert "copy: numpy" in markdown(report(*rows), copies=True)


class TestCompare:
    def test_a_regression_is_slower_by_median_and_by_best(self) -> None:
        before = report(row("Plan", 2.0), row("operator", 2.0), row("_foreach", 1.0, "rival"))
        after = report(
            row("Plan", 3.0),
            row("operator", 3.0, share_best=0.5),  # noise: the best is as good as it was
            row("_foreach", 9.0, "rival"),
        )
        changes = compare(before, after)
        assert [c.key[3] for c in changes] == ["Plan", "operator"]
        assert changes[0].ratio == pytest.approx(2 / 3)
        assert [c.regressed(0.15) for c in changes] == [True, False]
        assert not changes[0].regressed(0.5)
        assert "| 0.67 | 0.67 | slower |" in changes_table(changes, 0.15)

    def test_a_machine_twice_as_slow_is_no_regression(self) -> None:
        """Its copies are, too: shares stay."""
        before = report(row("Plan", 2.0, share=0.9, share_best=0.9))
        after = report(row("Plan", 4.0, share=0.9, share_best=0.9))
        assert not compare(before, after)[0].regressed(0.01)

    def test_differences_are_named(self) -> None:
        other = report()
        other.environment["threads"] = 2
        assert differences(report(), other) == ["threads: 1 before, 2 now"]


class TestTargets:
    def find(self, found: list[targets.Verdict], what: str) -> targets.Verdict:
        (verdict,) = [v for v in found if v.what.startswith(what)]
        return verdict

    def test_the_worst_large_workload_decides(self) -> None:
        rows = [
            row("Plan", 2.0, share=0.97),
            row("operator", 3.0, share=0.5),
            row("Plan", 5.0, workload="2^26", share=0.94, share_best=0.99),
            row("Plan", 9.0, workload="2^10", elements=2**10, share=0.1),
        ]
        verdict = self.find(targets.verdicts(report(*rows)), "predict_")
        assert verdict.met is False
        assert verdict.measured == "94% at worst (2^26); 99% by best times"
        assert self.find(targets.verdicts(report(*rows[:2])), "predict_").met is True

    def test_a_rival_that_is_ahead_anywhere_decides(self) -> None:
        name = "pipeline stage, one minibatch"
        rows = [
            row("Plan", 2.0, operation=name),
            row("fused + torch.add", 3.0, "rival", operation=name),
            row("Plan", 5.0, operation=name, workload="2^26"),
            row("fused + torch.add", 4.0, "rival", operation=name, workload="2^26"),
        ]
        verdict = self.find(targets.verdicts(report(*rows)), name)
        assert verdict.met is False and verdict.measured.startswith("0.80x at worst (2^26)")

    def test_what_was_not_measured_is_not_met(self) -> None:
        found = targets.verdicts(report())
        assert self.find(found, "pipeline stage").met is None
        assert "| not measured |" in targets.markdown(found)

    def test_the_faster_of_ours_against_the_composition(self) -> None:
        name = "SGD step + 2 predictions"
        rows = [row("Plan", 2.0, operation=name), row("operator", 3.0, operation=name)]
        rows.append(row("fused + torch.add", 4.0, "rival", operation=name))
        verdict = self.find(targets.verdicts(report(*rows)), f"{name}, against fused")
        assert verdict.met is True and verdict.measured.startswith("2.00x")

    def test_host_limits(self) -> None:
        assert self.find(targets.verdicts(report()), "host time, Plan.refresh").met is False

    def test_extra_bytes_are_counted_from_the_operations(self) -> None:
        one, pipeline = targets.counted()
        assert (one.measured, one.met) == ("7.1% (counted)", True)
        assert (pipeline.measured, pipeline.met) == ("21.4% (counted)", True)

    def test_a_gpu_has_its_own(self) -> None:
        gpu = report(row("Plan", 2.0, elements=2**28, share=0.98))
        gpu.environment["device"] = "cuda"
        verdict = self.find(targets.verdicts(gpu), "every operator at 2^26")
        assert verdict.met is True and "98.0%" in verdict.measured


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    from rivals.picture import draw

    path = tmp_path / f"bench{suffix}"
    draw(path, report(row("Plan", 2.0), row("a", 3.0, "rival"), row("copy: numpy", 1.0, "copy")))
    start = path.read_bytes()[:100]
    assert start.startswith(b"\x89PNG") if suffix == ".png" else b"<?xml" in start
    with pytest.raises(ValueError, match="nothing was measured"):
        draw(path, report())


class TestCommand:
    def run(self, *arguments: object) -> Result:
        tiny = ["--elements", "5", "--tensors", "1", "-k", "stash_pre", "--case-seconds", "0"]
        return CliRunner().invoke(main, ["bench", *tiny, *map(str, arguments)])

    def test_tables_and_files(self, tmp_path: Path) -> None:
        json_path, text_path = tmp_path / "a.json", tmp_path / "a.md"
        done = self.run("--all", "--json", json_path, "--markdown", text_path)
        assert done.exit_code == 0, done.output
        assert "| stash_predict_ | 2^5 | fp32 | Plan |" in done.output
        measured = Report.load(json_path)
        assert {r.operation for r in measured.rows} == {"stash_predict_"}
        assert text_path.read_text() in done.output

    def test_in_short_an_operation_is_a_row(self, tmp_path: Path) -> None:
        path = tmp_path / "a.md"
        done = self.run("--elements", "6", "--markdown", path)
        assert done.exit_code == 0, done.output
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("| stash_pred")]
        assert line.startswith("| stash_predict_ | 2^6 | fp32 | ")
        assert "not measured" in done.stdout and "--all prints all" in done.stdout
        assert "| stash_predict_ | 2^5 | fp32 | Plan |" in path.read_text()

    def test_what_was_missed_is_named(self) -> None:
        slow = report(row("Plan", 2.0), row("a", 3.0, "rival"), row("copy", 1.0, "copy"))
        text = in_short(slow)
        assert "| predict_ | 2^24 | fp32 | 2 | 10% | 1.8 | 50% | 50% | a | 3 | 1.50 |" in text
        assert "- host time, Plan.refresh, 300 gradients: 30.00 us, expected <= 25 us" in text
        assert "predict_, its share of the best copy's bandwidth" in text
        assert "2 missed" in text

    @pytest.mark.parametrize("option", ["--json", "--markdown", "--picture"])
    def test_files_that_cannot_be_written_are_found_before(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
    ) -> None:
        monkeypatch.setattr("bench_operators.measure", None)  # would be called
        done = self.run(option, tmp_path / "none" / "a.png")
        assert done.exit_code == 2
        assert option in done.output and "No such file or directory" in done.output
        kept = tmp_path / "kept.json"
        kept.write_text("as it was")
        done = self.run("--json", kept, option, tmp_path)
        assert done.exit_code == 2
        assert kept.read_text() == "as it was"
        assert list(tmp_path.iterdir()) == [kept]

    def test_compare_fails_where_it_got_slower(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        assert self.run("--json", path).exit_code == 0
        data = json.loads(path.read_text())
        for factor, status, says in ((1e-6, 0, "0 of 2 slower"), (1e6, 1, "2 of 2 slower")):
            for r in data["rows"]:
                r["share"] = r["share_best"] = factor
            path.write_text(json.dumps(data))
            done = self.run("--compare", path)
            assert done.exit_code == status and says in done.output
        path.write_text(report(row("Plan", 2.0)).to_json())
        done = self.run("--compare", path)
        assert done.exit_code == 1 and "no row in common" in done.output

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["-k", "nothing"], "no operation's name contains 'nothing'"),
            (["--picture", "a.gif"], "expected a .png or an .svg"),
            (["--compare", __file__], "not a report of spectrain bench"),
            (["--compare", "no.json"], "does not exist"),
        ],
    )
    def test_bad_arguments_are_found_before_anything_is_measured(
        self, arguments: list[str], says: str
    ) -> None:
        done = self.run(*arguments)
        assert done.exit_code == 2 and says in done.output

    def test_suites(self) -> None:
        names = [work.name for work in workloads("quick", (), (), (), ())]
        assert names == ["2^24", "300 x, 2^20", "10 x, 2^14"]
        full = workloads("full", (), (), (), ())
        assert {w.precision.name for w in full} == {"fp32", "bf16", "mixed"}
        assert {"2^10", "3000 x, 2^30", "VGG16"} <= {w.name for w in full}
        chosen = workloads("quick", (8,), (1,), ("VGG16",), ("mixed",))
        assert [w.name for w in chosen] == ["2^8", "VGG16"]
