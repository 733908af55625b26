"""Tests finished runs on disk: found complete or not at all."""

import json
import math
from pathlib import Path

import pytest

from spectrain_ext import files
from studies.results import Run, RunFile

SETTINGS: dict[str, object] = {"lr": 0.1, "window": (3, 2, 1), "depth": None}
RUN = Run("spectrain", 3, 0.25, 1.0 / 3, 12.5, 4096, (2.0, 0.1 + 0.2, 1e-30))


def _file(folder: Path, about: dict[str, object], name: str = "spectrain-seed3") -> RunFile[Run]:
    return RunFile(folder, name, about, Run)


def test_a_run_is_found_again_bit_for_bit(tmp_path: Path) -> None:
    _file(tmp_path / "runs", SETTINGS).write(RUN)
    again = dict(reversed(SETTINGS.items()))
    assert _file(tmp_path / "runs", again).read() == RUN
    assert _file(tmp_path / "runs", again, "spectrain-seed4").read() is None


def test_a_diverged_run_is_found_again(tmp_path: Path) -> None:
    file = _file(tmp_path, SETTINGS)
    file.write(Run("vanilla", 0, 0.1, math.nan, 1.0, 1, (1.0, math.inf, -math.inf, math.nan)))
    found = file.read()
    assert found is not None
    assert found.losses[:3] == (1.0, math.inf, -math.inf)
    assert math.isnan(found.losses[3])
    assert math.isnan(found.test_loss)


@pytest.mark.parametrize(
    "other", [{"lr": 0.2}, {"window": (3, 2)}, {"depth": 0}, {"more": 1}], ids=str
)
def test_other_settings_are_other_runs(tmp_path: Path, other: dict[str, object]) -> None:
    _file(tmp_path, SETTINGS).write(RUN)
    file = _file(tmp_path, {**SETTINGS, **other})
    assert file.read() is None
    file.write(RUN)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_that_was_changed_is_no_finished_run(tmp_path: Path) -> None:
    file = _file(tmp_path, SETTINGS)
    file.write(RUN)
    path = file.path
    text = path.read_text()
    document = json.loads(text)
    document["run"]["losses"][0] = [1]
    wrong_losses = json.dumps(document)
    document = json.loads(text)
    del document["run"]["test_loss"]
    without_loss = json.dumps(document)
    for broken in ("", text[:-20], "[]", "{}", '{"run": 3}', wrong_losses, without_loss):
        path.write_text(broken)
        assert file.read() is None
    path.write_text(text.replace('"lr": 0.1', '"lr": 0.3'))
    assert file.read() is None
    path.write_text(text)
    assert file.read() == RUN


def test_what_is_interrupted_leaves_the_file_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    files.replace_file(path, b"before")

    def fail(descriptor: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="the disk is full"):
        files.replace_file(path, b"after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
