"""Tests metrics, TensorBoard and log of ``python -m studies train``, which change no result."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from studies.__main__ import main

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

SMALL = ("--batch-size", "256", "--epochs", "1", "--seeds", "1", "--width", "8", "--stages", "3")


def _train(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["train", *SMALL, *arguments])


def _losses(folder: Path) -> list[list[float]]:
    methods = json.loads((folder / "results.json").read_text())["methods"]
    return [entry["seeds"][0]["train_losses"] for entry in methods]


def test_observation_changes_no_result(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    methods = ("-m", "spectrain,xgrad")
    looked_at = (*methods, "--metrics", "--tensorboard", str(tmp_path / "tb"), "-v")
    level = logging.getLogger("spectrain_ext").level
    done = _train(*looked_at, "--out", str(tmp_path / "a"))
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").open()]
    assert [(line["method"], line["seed"], line["stage"]) for line in lines] == [
        *(("spectrain", 0, stage) for stage in range(3)),
        ("xgrad", 0, 0),
    ]
    assert {line["minibatch"] for line in lines} == {6}
    assert {path.name for path in (tmp_path / "tb").iterdir()} == {"spectrain-seed0", "xgrad-seed0"}
    text = " ".join(done.output.split())
    assert "run begins: spectrain, stages 0 to 2 of 3" in text
    assert "run begins: xgrad, stage 0 of 1" in text
    done = _train(*methods, "--out", str(tmp_path / "b"))
    assert done.exit_code == 0, done.output
    assert "run begins" not in done.output
    assert not (tmp_path / "b" / "metrics.jsonl").exists()
    assert _losses(tmp_path / "a") == _losses(tmp_path / "b")
    logger = logging.getLogger("spectrain_ext")
    assert logger.level == level
    assert [type(handler) for handler in logger.handlers] == [logging.NullHandler]


def test_without_tensorboard_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    done = _train("-m", "sync", "--tensorboard", "tb", "--out", str(tmp_path / "out"))
    assert done.exit_code == 1
    assert "pip install 'spectrain_ext[tensorboard]'" in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()
