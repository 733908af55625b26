"""Tests the scripts of bench/: that they run and count correctly."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import bench_calls
import bench_checkpoint
import bench_distributed
import bench_flush
import bench_steady
import bench_wan
import pytest
from helpers.ranks import run_said
from slow_link import InboundWires

BENCH = Path(bench_calls.__file__).parent
_FLUSH = "--methods auto spectrain --width 8 --minibatches 3 --rounds 2"
_WAN = "--ranks 3 --forward 0 --backward 0 --microbatches 2 --count 2 --rounds 1"
_STEADY = "--microbatches 2 --methods auto --count 3 --rounds 1"


def test_calls_are_the_package_s_and_as_many_every_time() -> None:
    bench_calls.calls_of("vanilla", 1)  # its instructions are cached
    found = bench_calls.calls_of("vanilla", 1)
    assert found == bench_calls.calls_of("vanilla", 1)
    assert all((bench_calls.PACKAGE / function.file).exists() for function in found)
    minibatches = bench_calls.LAST - bench_calls.FIRST
    # One call of the optimizer's step per stage and minibatch.
    steps = [n for f, n in found.items() if f.file == "optim/base.py" and f.name.endswith("step")]
    assert bench_calls.STAGES * minibatches in steps
    more = bench_calls.calls_of("auto", 3)
    assert more.total() > found.total()


def test_list_has_every_call(capsys: pytest.CaptureFixture[str]) -> None:
    bench_calls.report("vanilla", 1, listed=True)
    head, *lines = capsys.readouterr().out.splitlines()
    files, functions = "\n".join(lines).strip().split("\n\n")
    for part in (files, functions):
        total = sum(float(line.split()[0]) for line in part.splitlines())
        assert f"M = 1: {total:.0f} calls per minibatch in {len(files.splitlines())} files" in head


def test_methods_beside_a_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flush.json"
    arguments = [*_FLUSH.split(), "--json"]
    monkeypatch.setattr(sys, "argv", ["bench_flush.py", *arguments, str(path)])
    bench_flush.main()
    rounds = json.loads(path.read_text())["seconds"]
    assert len(rounds) == 2 and all(set(each) == {"1f1b", "auto", "spectrain"} for each in rounds)
    said = capsys.readouterr().out
    ratio = sorted(each["auto"] / each["1f1b"] for each in rounds)
    assert f"| auto | {sum(ratio) / 2:.3f} |" in said


def test_checkpoints_beside_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "checkpoint.json"
    small = "--width 8 --rounds 2 --every 2 --directory"
    arguments = ["bench_checkpoint.py", *small.split(), str(tmp_path), "--json", str(path)]
    monkeypatch.setattr(bench_checkpoint, "MEMORY", tmp_path)
    monkeypatch.setattr(sys, "argv", arguments)
    bench_checkpoint.main()
    rounds = json.loads(path.read_text())["seconds"]
    assert len(rounds) == 2 and all(each["save"] > 0 for each in rounds)
    ratios = [each["saved"] / each["not drained"] for each in rounds]
    assert f"| saved | {sum(ratios) / 2:.2f} |" in capsys.readouterr().out
    assert [*tmp_path.iterdir()] == [path]


def test_single_saves_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_checkpoint, "MEMORY", tmp_path)
    small = "bench_checkpoint.py --widths 8 16 --rounds 2 --directory"
    monkeypatch.setattr(sys, "argv", [*small.split(), str(tmp_path)])
    bench_checkpoint.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * 2
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["disk", "memory"] * 2
    assert [*tmp_path.iterdir()] == []


@pytest.mark.processes
def test_two_processes_in_the_steady_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steady.json"
    script = str(BENCH / "bench_steady.py")
    monkeypatch.setattr(sys, "argv", [script, *_STEADY.split(), "--json", str(path)])
    monkeypatch.setattr(bench_distributed, "spawned", run_said)
    bench_steady.main()
    found = json.loads(path.read_text())
    assert set(found["seconds"]) == {"torch 1F1B, M = 2", "auto, M = 2", "begin", "end"}
    assert all(len(each) == 1 and each[0] > 0 for each in found["seconds"].values())
    assert found["command"].startswith("python bench/bench_steady.py --microbatches 2")
    assert "times as fast as torch's 1F1B" in capsys.readouterr().out


@pytest.mark.parametrize("record", bench_wan.PUBLISHED.values(), ids=list(bench_wan.PUBLISHED))
def test_published_seconds_per_step(record: bench_wan.Published) -> None:
    """Protocol NanoGPT's records: the compute comes from the same log with the links off."""
    size, parts = record.bytes, record.microbatches
    off = bench_wan.Link("off", 1e18)
    found = bench_wan.meter_seconds("1f1b", parts, size, size, record.compute, link=off)
    assert found == pytest.approx(record.off, rel=1e-3)
    found = bench_wan.meter_seconds("1f1b", parts, size, size, record.compute)
    assert found == pytest.approx(record.on, rel=0.05)


def test_a_wire_s_arrivals_by_hand(tmp_path: Path) -> None:
    wires = InboundWires(InboundWires.make(tmp_path, 2), 1, 2, bandwidth=1000.0, latency=0.5)
    sent = [(10.0, 10.6), (10.25, 11.2), (9.0, 11.8), (20.0, 20.6)]
    for moment, arrives in sent:  # 92 bytes, and 8 of their count
        assert wires.arrival(moment, 92) == pytest.approx(arrives)


@pytest.mark.processes
def test_processes_behind_wires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wan.json"
    monkeypatch.setattr(sys, "argv", ["bench_wan.py", *_WAN.split(), "--json", str(path)])
    monkeypatch.setattr(bench_distributed, "spawned", run_said)
    bench_wan.main()
    found = json.loads(path.read_text())
    assert set(found["seconds"]) == set(found["simulated"]) == {"1f1b, M = 2", "auto, M = 2"}
    # They compute nothing and wait for their messages.
    for name, (taken,) in found["seconds"].items():
        assert taken > found["simulated"][name] / 2
    assert "| 1f1b, M = 2 |" in capsys.readouterr().out
