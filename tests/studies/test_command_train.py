"""Tests ``python -m studies train`` end to end on few minibatches, its options and its errors."""

import io
import json
import math
import pickle
import sys
import tarfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from helpers.cli_programs import undrawn

import spectrain_ext as st
from studies import compare
from studies.__main__ import main
from studies.compare import train_once
from studies.results import Run
from studies.settings import DEFAULT_METHODS, TrainSettings

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

FAST = ("--batch-size", "256", "--epochs", "1", "--seeds", "1")


def _train(*arguments: str, draws: bool = False) -> Result:
    with nullcontext() if draws else undrawn():
        return CliRunner().invoke(main, ["train", *arguments])


def _methods(folder: Path) -> dict[str, dict[str, Any]]:
    document = json.loads((folder / "results.json").read_text())
    return {entry["method"]: entry for entry in document["methods"]}


def test_every_method_ends_in_a_table_a_picture_and_numbers(tmp_path: Path) -> None:
    result = _train(*FAST, "--out", str(tmp_path), draws=True)
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "results.json").read_text())
    assert set(document) == {"methods", "settings", "versions"}
    assert [entry["method"] for entry in document["methods"]] == list(DEFAULT_METHODS)
    for entry in document["methods"]:
        assert 0 <= entry["test_accuracy"] <= 1
        assert entry["test_loss"] > 0
        assert entry["minibatches_per_second"] > 0
        assert 0.9 < entry["simulated_time"] < 9
        assert isinstance(entry["weight_version_bytes"], int)
        assert len(entry["seeds"][0]["train_losses"]) == 6
        assert entry["method"] in result.output
    assert document["settings"]["stages"] == 8
    assert document["settings"]["seeds"] == [0]
    assert document["versions"]["spectrain_ext"] == st.__version__
    assert document["versions"]["torch"] == torch.__version__
    for picture in ("losses.png", "losses-over-time.png", "timelines.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert "does not compare throughput" in " ".join(result.output.split())


def test_the_same_arguments_give_the_same_losses(tmp_path: Path) -> None:
    for name in ("a", "b"):
        result = _train(*FAST, "-m", "spectrain", "--out", str(tmp_path / name))
        assert result.exit_code == 0, result.output
    first, second = (_methods(tmp_path / name)["spectrain"]["seeds"] for name in ("a", "b"))
    assert first[0]["train_losses"] == second[0]["train_losses"]


def test_methods_share_weights_and_minibatches(tmp_path: Path) -> None:
    """With one stage nothing is asynchronous: all methods must agree."""
    result = _train(*FAST, "--stages", "1", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    losses = [entry["seeds"][0]["train_losses"] for entry in _methods(tmp_path).values()]
    assert len(losses) == len(DEFAULT_METHODS)
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


def test_all_methods_that_fit_are_compared_and_the_others_named(tmp_path: Path) -> None:
    result = _train(*FAST, "--stages", "3", "-m", "all", "--width", "8", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "results.json").read_text())
    assert "left_out" not in document["settings"]
    compared = [entry["method"] for entry in document["methods"]]
    assert compared == list(st.methods())
    assert document["settings"]["methods"] == compared
    text = " ".join(result.output.split())
    assert "auto: 3 microbatches a minibatch" in text
    losses = {name: entry["seeds"][0]["train_losses"] for name, entry in _methods(tmp_path).items()}
    assert all(math.isfinite(loss) for run in losses.values() for loss in run)
    # methods that flush make the same updates, and an average with its larger rate those of a sum
    assert losses["1f1b"] == losses["gpipe"] == losses["sync"]
    assert losses["spectrain-smoothed"] == pytest.approx(losses["spectrain"], rel=1e-4)
    assert losses["xgrad"] != losses["sync"]


def test_a_method_that_needs_microbatches_gets_them(tmp_path: Path) -> None:
    arguments = ("-m", "sync,pipedream-2bw", "--stages", "3", "--width", "8")
    losses = []
    for name, more in (("a", ()), ("b", ("--microbatches", "3"))):
        result = _train(*FAST, *arguments, *more, "--out", str(tmp_path / name))
        assert result.exit_code == 0, result.output
        losses.append(_methods(tmp_path / name)["pipedream-2bw"]["seeds"][0]["train_losses"])
    assert losses[0] == losses[1]
    result = _train(*FAST, *arguments, "--microbatches", "2", "--out", str(tmp_path / "c"))
    assert result.exit_code == 1
    assert "method pipedream-2bw: " in result.output
    assert "at least 3 microbatches for 3 stages, got 2" in " ".join(result.output.split())


# Resuming after an interruption


def test_a_second_call_reads_the_runs_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (*FAST, "--stages", "2", "--width", "8", "--out", str(tmp_path))
    first = _train(*arguments, "-m", "sync,vanilla")
    assert first.exit_code == 0, first.output
    before = _methods(tmp_path)
    trained = []

    def recorded(settings: TrainSettings, name: str, seed: int, *rest: Any) -> Run:
        trained.append((name, seed))
        return train_once(settings, name, seed, *rest)

    monkeypatch.setattr(compare, "train_once", recorded)
    second = _train(*arguments, "-m", "sync,pipedream,vanilla", "--seeds", "2")
    assert second.exit_code == 0, second.output
    assert trained == [("pipedream", 0), ("sync", 1), ("pipedream", 1), ("vanilla", 1)]
    assert "2 of 6 runs were finished before" in " ".join(second.output.split())
    for name, entry in before.items():
        assert _methods(tmp_path)[name]["seeds"][0] == entry["seeds"][0]
    trained.clear()
    third = _train(*arguments, "-m", "sync", "--lr", "0.01")
    assert third.exit_code == 0, third.output
    assert trained == [("sync", 0)]


def test_an_interruption_keeps_the_finished_runs_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(settings: TrainSettings, name: str, *rest: Any) -> Run:
        if name == "vanilla":
            raise KeyboardInterrupt
        return train_once(settings, name, *rest)

    arguments = (*FAST, "--stages", "2", "--width", "8", "-m", "sync,vanilla")
    with monkeypatch.context() as patch:
        patch.setattr(compare, "train_once", interrupted)
        stopped = _train(*arguments, "--out", str(tmp_path))
    assert stopped.exit_code == 1
    assert f"--out {tmp_path}" in " ".join(stopped.output.split())
    assert not (tmp_path / "results.json").exists()
    resumed = _train(*arguments, "--out", str(tmp_path))
    assert resumed.exit_code == 0, resumed.output
    assert "1 of 2 runs were finished before" in " ".join(resumed.output.split())
    straight = _train(*arguments, "--out", str(tmp_path / "straight"))
    assert straight.exit_code == 0, straight.output
    for name, entry in _methods(tmp_path / "straight").items():
        found = _methods(tmp_path)[name]
        assert found["seeds"][0]["train_losses"] == entry["seeds"][0]["train_losses"]
        assert found["test_loss"] == entry["test_loss"]


# Other data and models, from files that the test writes


def _write_text(folder: Path) -> None:
    words = ["pipeline ", "weight ", "stage ", "minibatch ", "gradient. "]
    text = "".join(words[n * n * n % 5] for n in range(1200))
    (folder / "text.txt").write_text(text)


def _write_images(folder: Path) -> None:
    batches = folder / "cifar-10-batches-py"
    batches.mkdir()
    for number, name in enumerate([f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]):
        random = np.random.default_rng(number)
        labels = random.integers(0, 10, 20)
        images = random.integers(0, 128, (20, 3072)) + 12 * labels[:, None]
        content = {"data": images.astype(np.uint8), "labels": labels.tolist()}
        (batches / name).write_bytes(pickle.dumps(content, protocol=2))


PAIRS = [
    ("cifar10", "residual-mlp", ()),
    ("cifar10", "vgg16", ("--augment",)),
    ("cifar10", "resnet", ("--lr-schedule", "cosine")),
    ("text", "gpt", ("--depth", "2", "--context", "16")),
    ("text", "lstm", ("--depth", "2", "--context", "16", "--warmup", "3")),
]


@pytest.mark.parametrize(("data", "model", "more"), PAIRS, ids=[model for _, model, _ in PAIRS])
def test_every_model_learns_from_its_data(
    tmp_path: Path, data: str, model: str, more: tuple[str, ...]
) -> None:
    write = _write_text if data == "text" else _write_images
    write(tmp_path)
    arguments = ("--data", data, "--data-dir", str(tmp_path), "--model", model, *more)
    sizes = ("--width", "8", "--stages", "4", "--batch-size", "10", "--epochs", "3")
    samples = ("--train-samples", "60", "--test-samples", "15", "--lr", "0.005", "--warmup", "0")
    result = _train(
        *("--quick", "-m", "sync,spectrain", *sizes, *samples, *arguments),
        *("--out", str(tmp_path / "out")),
    )
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    settings = document["settings"]
    assert (settings["data"], settings["model"]) == (data, model)
    assert (settings["train_samples"], settings["test_samples"]) == (60, 15)
    assert len(settings["data_sha256"]) == 64
    assert settings["optimizer"] == ("adamw" if model == "gpt" else "sgd")
    assert ("perplexity" if data == "text" else "accuracy") in result.output
    for entry in document["methods"]:
        losses = entry["seeds"][0]["train_losses"]
        assert len(losses) == 18
        assert sum(losses[-6:]) < sum(losses[:6])
        assert entry["perplexity"] == pytest.approx(math.exp(entry["test_loss"]))
    assert str(tmp_path) not in json.dumps(settings)  # the data's location is private


def test_decoded_images_are_kept_beside_the_output(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in" / "cifar.tar", "w") as archive:
        for part in ("train", "test"):
            for label in range(10):
                buffer = io.BytesIO()
                image.new("RGB", (32, 32), (25 * label, 0, 0)).save(buffer, "JPEG")
                member = tarfile.TarInfo(f"{part}/{label}/0.jpg")
                member.size = buffer.tell()
                archive.addfile(member, io.BytesIO(buffer.getvalue()))
    arguments = ("--data", "cifar10", "--data-dir", str(tmp_path / "in"), "--model", "residual-mlp")
    result = _train(
        *("--quick", "-m", "sync", "--width", "8", "--stages", "2", *arguments),
        *("--out", str(tmp_path / "results" / "a")),
    )
    assert result.exit_code == 0, result.output
    (kept,) = (tmp_path / "results" / "data-cache").iterdir()
    assert kept.name.startswith("cifar10-")
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["cifar.tar"]
    settings = json.loads((tmp_path / "results" / "a" / "results.json").read_text())["settings"]
    assert settings["data_name"] == "CIFAR-10 (JPEG)"


def test_another_optimizer(tmp_path: Path) -> None:
    result = _train(
        *(*FAST, "--optimizer", "nadam", "--lr", "0.001", "--stages", "2", "--width", "8"),
        *("-m", "all", "--out", str(tmp_path)),
    )
    assert result.exit_code == 0, result.output
    settings = json.loads((tmp_path / "results.json").read_text())["settings"]
    assert settings["optimizer"] == "nadam"
    assert "spectrain-smoothed" in settings["left_out"]


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
        *("--stages", "3", "-m", "vanilla,sync", "-m", "vanilla", "--seeds", "2"),
        *("--epochs", "1", "--batch-size", "512", "--microbatches", "2", "--width", "16"),
        *(
            "--clip-norm",
            "5",
            "--lr",
            "0.01",
            "--momentum",
            "0.8",
            "--weight-decay",
            "0.001",
            "--nesterov",
        ),
        *("--devices", "cpu,cpu", "--out", str(tmp_path)),
    )
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "results.json").read_text())
    expected = {
        "methods": ["vanilla", "sync"],
        "seeds": [0, 1],
        "stages": 3,
        "devices": ["cpu", "cpu", "cpu"],
        "epochs": 1,
        "batch_size": 512,
        "microbatches": 2,
        "clip_norm": 5.0,
        "width": 16,
        "lr": 0.01,
        "momentum": 0.8,
        "weight_decay": 0.001,
        "nesterov": True,
    }
    assert {key: document["settings"][key] for key in expected} == expected
    assert [run["seed"] for run in document["methods"][0]["seeds"]] == [0, 1]
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
    pictures = {"losses.png", "losses-over-time.png", "timelines.png"}
    names = {"results.json", "runs", *pictures}
    assert {path.name for path in folder.iterdir()} == names


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("-m", "sink"), ["there is no 'sink'", *st.methods()]),
        (("--stages", "0"), ["--stages"]),
        (("--devices", "cpu,cpu,cpu", "--stages", "2"), ["1 to 2 devices for 2 stages, got 3"]),
        (("--devices", "warp"), ["entry 0 is 'warp'"]),
        (("--devices", "cpu,meta"), ["entry 1 is 'meta'"]),
        (("--devices", "cuda:97"), ["entry 0 is 'cuda:97'", "spectrain doctor"]),
        (("--lr", "nan"), ["--lr", "finite"]),
        (("--momentum", "-1"), ["--momentum", "at least 0"]),
        (("--clip-norm", "inf"), ["--clip-norm", "finite"]),
        (("--stages", str(10**9)), ["--stages", "not in the range 1<=x<=1000"]),
        (("--epochs", str(10**30)), ["--epochs", "not in the range"]),
        (("--model", "gpt"), ["gpt cannot be trained on digits", "residual-mlp"]),
        (("--data", "text"), ["--data-dir names their folder"]),
        (("--data-dir", "."), ["digits come with scikit-learn"]),
        (("--augment",), ["--augment", "--data digits has none"]),
        (("--optimizer", "adam", "--momentum", "0.5"), ["--momentum", "optimizer is adam"]),
        (("--optimizer", "adamw", "--nesterov"), ["--nesterov", "optimizer is adamw"]),
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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--data", "text"), "there is no *.txt in it"),
        (("--data", "cifar10"), "there is no CIFAR-10 in it; expected the folder cifar-10-batches"),
        (("--data", "text", "--stages", "9"), "stages must be between 1 and the 8 layers, got 9"),
        (("--data", "cifar10", "--stages", "11"), "between 1 and the 10 layers, got 11"),
        (("--data", "cifar10", "--depth", "7"), "depth of ResNet must be one of 18, 34"),
        (("--data", "text", "--context", "100000"), "too few for sequences of 100000"),
    ],
    ids=["no-text", "no-cifar", "gpt-stages", "resnet-stages", "resnet-depth", "context"],
)
def test_what_cannot_be_trained_is_told_before_training(
    tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    given = tmp_path / "in"
    given.mkdir()
    if "there is no" not in expected:
        _write_text(given)
        _write_images(given)
    folder = tmp_path / "out"
    result = _train("--quick", *arguments, "--data-dir", str(given), "--out", str(folder))
    assert result.exit_code == 1
    assert expected in " ".join(result.output.split())
    assert isinstance(result.exception, SystemExit)
    assert not folder.exists()


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
    remedy = {
        "sklearn": "pip install -r studies/requirements.txt",
        "matplotlib": "pip install 'spectrain_ext[pictures]'",
    }[module]
    assert remedy in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_an_out_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    result = _train(*FAST, "--out", str(blocked / "below"))
    assert result.exit_code == 2
    assert "--out" in result.output


@pytest.mark.nightly
def test_the_default_comparison_orders_the_methods(tmp_path: Path) -> None:
    """The README's claim: prediction is closer to synchronous training than the others."""
    result = _train("--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    accuracy = {name: entry["test_accuracy"] for name, entry in _methods(tmp_path).items()}
    assert accuracy["sync"] > 0.93
    assert accuracy["spectrain"] > 0.88
    assert accuracy["spectrain"] > accuracy["pipedream"]
    assert accuracy["spectrain"] > accuracy["vanilla"]
