"""``spectrain train`` end to end on few minibatches, its options and its errors."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import spectrain_ext as st
from spectrain_ext.cli import main
from spectrain_ext.cli.settings import DEFAULT_METHODS

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

FAST = ("--batch-size", "256", "--epochs", "1", "--seeds", "1")


def _train(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["train", *arguments])


def _methods(folder: Path) -> dict[str, dict[str, Any]]:
    document = json.loads((folder / "results.json").read_text())
    return {entry["method"]: entry for entry in document["methods"]}


def test_every_method_ends_in_a_table_a_picture_and_numbers(tmp_path: Path) -> None:
    result = _train(*FAST, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "results.json").read_text())
    assert set(document) == {"methods", "settings", "versions"}
    assert [entry["method"] for entry in document["methods"]] == list(DEFAULT_METHODS)
    for entry in document["methods"]:
        assert 0 <= entry["test_accuracy"] <= 1
        assert entry["test_loss"] > 0
        assert entry["minibatches_per_second"] > 0
        assert isinstance(entry["weight_version_bytes"], int)
        assert len(entry["seeds"][0]["train_losses"]) == 6
        assert entry["method"] in result.output
    assert document["settings"]["stages"] == 8
    assert document["settings"]["seeds"] == [0]
    assert document["versions"]["spectrain_ext"] == st.__version__
    assert document["versions"]["torch"] == torch.__version__
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert "no throughput comparison" in " ".join(result.output.split())


def test_the_same_arguments_give_the_same_losses(tmp_path: Path) -> None:
    for name in ("a", "b"):
        result = _train(*FAST, "-m", "spectrain", "--out", str(tmp_path / name))
        assert result.exit_code == 0, result.output
    first, second = (_methods(tmp_path / name)["spectrain"]["seeds"] for name in ("a", "b"))
    assert first[0]["train_losses"] == second[0]["train_losses"]


def test_methods_share_weights_and_minibatches(tmp_path: Path) -> None:
    """One stage leaves nothing to be asynchronous about: all methods must then agree."""
    result = _train(*FAST, "--stages", "1", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    losses = [entry["seeds"][0]["train_losses"] for entry in _methods(tmp_path).values()]
    assert len(losses) == len(DEFAULT_METHODS)
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


def test_synchronous_training_does_not_depend_on_the_cut(tmp_path: Path) -> None:
    losses = []
    for stages in ("1", "2", "3", "8"):
        folder = tmp_path / stages
        result = _train(*FAST, "-m", "sync", "--stages", stages, "--out", str(folder))
        assert result.exit_code == 0, result.output
        losses.append(_methods(folder)["sync"]["seeds"][0]["train_losses"])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)


def test_options_reach_the_settings(tmp_path: Path) -> None:
    result = _train(
        *("--stages", "3", "-m", "vanilla,sync", "-m", "vanilla", "--seed", "7", "--seed", "3"),
        *("--epochs", "1", "--batch-size", "512", "--microbatches", "2", "--width", "16"),
        *("--lr", "0.01", "--momentum", "0.8", "--weight-decay", "0.001", "--nesterov"),
        *("--devices", "cpu,cpu", "--out", str(tmp_path)),
    )
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "results.json").read_text())
    expected = {
        "methods": ["vanilla", "sync"],
        "seeds": [7, 3],
        "stages": 3,
        "devices": ["cpu", "cpu", "cpu"],
        "epochs": 1,
        "batch_size": 512,
        "microbatches": 2,
        "width": 16,
        "lr": 0.01,
        "momentum": 0.8,
        "weight_decay": 0.001,
        "nesterov": True,
    }
    assert {key: document["settings"][key] for key in expected} == expected
    assert [run["seed"] for run in document["methods"][0]["seeds"]] == [7, 3]
    assert "±" in result.output


def test_quick_yields_to_what_is_asked_for(tmp_path: Path) -> None:
    result = _train(
        *("--quick", "--seeds", "2", "-m", "sync", "--batch-size", "256"), "--out", str(tmp_path)
    )
    assert result.exit_code == 0, result.output
    settings = json.loads((tmp_path / "results.json").read_text())["settings"]
    assert settings["epochs"] == 1
    assert settings["seeds"] == [0, 1]


def test_without_out_the_results_are_below_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = _train(*FAST, "-m", "sync", "--stages", "1")
    assert result.exit_code == 0, result.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in folder.iterdir()} == {"results.json", "losses.png"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("-m", "sink"), ["unknown method 'sink'", *st.methods()]),
        (("--stages", "0"), ["--stages"]),
        (("--devices", "cpu,cpu,cpu", "--stages", "2"), ["1 to 2 devices for 2 stages, got 3"]),
        (("--devices", "warp"), ["entry 0 is 'warp'"]),
        (("--devices", "cpu,meta"), ["entry 1 is 'meta'"]),
        (("--devices", "cuda:97"), ["entry 0 is 'cuda:97'", "spectrain doctor"]),
        (("--lr", "nan"), ["--lr", "finite"]),
        (("--momentum", "-1"), ["--momentum", "at least 0"]),
    ],
)
def test_bad_options_name_what_was_expected(
    tmp_path: Path, arguments: tuple[str, ...], expected: list[str]
) -> None:
    folder = tmp_path / "out"
    result = _train(*arguments, "--out", str(folder))
    assert result.exit_code == 2
    text = " ".join(result.output.split())
    for fragment in expected:
        assert fragment in text
    assert not folder.exists()


def test_a_prediction_without_momentum_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    result = _train(*FAST, "-m", "spectrain", "--momentum", "0", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "momentum" in result.output
    assert isinstance(result.exception, SystemExit)


def test_a_failure_in_training_is_told_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("no loss today")

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", fail)
    result = _train(*FAST, "-m", "sync", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "RuntimeError: no loss today" in result.output
    assert isinstance(result.exception, SystemExit)
    assert not (tmp_path / "results.json").exists()


def test_the_number_of_threads_is_put_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        result = _train(*FAST, "-m", "sync", "--stages", "1", "--out", str(tmp_path))
        assert result.exit_code == 0, result.output
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("module", ["sklearn", "matplotlib"])
def test_a_missing_extra_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    result = _train(*FAST, "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "pip install 'spectrain_ext[train]'" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_an_out_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    result = _train(*FAST, "--out", str(blocked / "below"))
    assert result.exit_code == 2
    assert "--out" in result.output


def test_both_ways_to_start_it(tmp_path: Path) -> None:
    script = Path(sysconfig.get_path("scripts")) / "spectrain"
    ways = [[sys.executable, "-m", "spectrain_ext.cli"]]
    if script.exists():
        ways.append([str(script)])
    for number, way in enumerate(ways):
        folder = tmp_path / str(number)
        command = [*way, "train", *FAST, "--stages", "2", "-m", "spectrain", "--out", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        assert "spectrain" in done.stdout
        assert (folder / "results.json").exists()


@pytest.mark.nightly
def test_the_default_comparison_orders_the_methods(tmp_path: Path) -> None:
    """What the README shows: prediction comes closer to synchronous training than the others."""
    result = _train("--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    accuracy = {name: entry["test_accuracy"] for name, entry in _methods(tmp_path).items()}
    assert accuracy["sync"] > 0.93
    assert accuracy["spectrain"] > 0.88
    assert accuracy["spectrain"] > accuracy["pipedream"]
    assert accuracy["spectrain"] > accuracy["vanilla"]
