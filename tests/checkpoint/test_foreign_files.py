"""Tests foreign results, traces and names: bounded, a ValueError, safe to print."""

from __future__ import annotations

import json
import os

import pytest

from spectrain_ext.files import read_bounded, read_json, replace_file
from spectrain_ext.timelines.merging import main as merge
from spectrain_ext.timelines.merging import merge_traces
from studies.report import draw_losses
from studies.results import Run, RunFile, summarize

DEEP = "[" * 10**5


def test_only_plain_files_of_some_size(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(ValueError, match="a: expected at most 4 bytes"):
        read_bounded(path, 4)
    os.mkfifo(tmp_path / "b")
    (tmp_path / "c").symlink_to("/dev/zero")
    for name in ("b", "c", "."):
        with pytest.raises(ValueError, match="expected a plain file"):
            read_bounded(tmp_path / name, 5)
    with pytest.raises(OSError, match=r"expected a plain file: '.*b'"):
        replace_file(tmp_path / "b", b"")
    path.write_text(DEEP)
    with pytest.raises(ValueError, match="a: expected JSON"):
        read_json(path, 10**6)


@pytest.mark.parametrize(
    "change",
    [*({"seed": float("inf")}, {"losses": [10**400]}, {"losses": 3}, {"__class__": 1}, [1])],
    ids=range(5),
)
def test_a_forged_run_is_no_finished_run(tmp_path, change):
    file = RunFile(tmp_path, "spectrain-seed3", {}, Run)
    file.write(Run("spectrain", 3, 0.25, 1.0 / 3, 12.5, 4096, (2.0, 1.0)))
    path = file.path
    document = json.loads(path.read_text())
    document["run"] = document["run"] | change if isinstance(change, dict) else change
    path.write_text(json.dumps(document))
    assert file.read() is None
    for text in (DEEP, "9" * 10**4):
        path.write_text(text)
        assert file.read() is None
    path.unlink()
    os.mkfifo(path)
    assert file.read() is None


@pytest.mark.parametrize(
    "events",
    [
        *([3], [[["a", 1]]], [{"pid": {}}], [{"ts": "soon"}], [{"ts": 10**400}]),
        *([{"name": "process_name"}], [{"name": "process_name", "args": 3}]),
    ],
    ids=range(7),
)
def test_events_that_are_none(tmp_path, events, capsys):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": 3}))
    assert merge([str(tmp_path / "out"), str(path)]) == 1
    assert "a.json: expected events of a trace" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_no_trace(tmp_path):
    path = tmp_path / "a.json"
    empty = [json.dumps({"traceEvents": [], "baseTimeNanoseconds": t}) for t in (-1, 1 << 63, True)]
    for text, said in (
        *((text, "does not say when it began") for text in empty),
        (DEEP, "expected a trace in JSON"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            merge_traces(tmp_path / "out", [path])


def test_a_title_is_no_formula(tmp_path):
    pytest.importorskip("matplotlib")
    run = Run("sync", 0, 0.5, 1.0, 1.0, 1, (1.0, 0.5))
    draw_losses(tmp_path / "a.png", summarize([run]), title="my $\\frac{$ text", window=1)
    assert (tmp_path / "a.png").stat().st_size > 1000
