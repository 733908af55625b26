"""Tests ``python -m studies train`` end to end on few minibatches, its options and its errors."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli_programs import called, text_of
from helpers.study_data import document_in, losses_in, write_batches, write_text

import spectrain_ext as st
from studies import compare
from studies.__main__ import main
from studies.compare import train_once
from studies.results import Run
from studies.settings import DEFAULT_METHODS, TrainSettings

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

FAST = ("--batch-size", 256, "--epochs", 1, "--seeds", 1)
TINY = (*FAST, "--stages", 2, "--width", 8)
PICTURES = ("losses.png", "losses-over-time.png", "timelines.png")


def trained(folder: Path, *arguments: object, draws: bool = False) -> str:
    """Train into a folder; return what was printed."""
    result = called(main, "train", *arguments, "--out", folder, draws=draws)
    assert result.exit_code == 0, result.output
    return text_of(result)


def test_every_method_ends_in_a_table_a_picture_and_numbers(tmp_path: Path) -> None:
    text = trained(tmp_path, *FAST, draws=True)
    document = document_in(tmp_path)
    assert set(document) == {"methods", "settings", "versions"}
    assert [entry["method"] for entry in document["methods"]] == list(DEFAULT_METHODS)
    for entry in document["methods"]:
        assert 0 <= entry["test_accuracy"] <= 1
        assert entry["test_loss"] > 0
        assert entry["minibatches_per_second"] > 0
        assert 0.9 < entry["simulated_time"] < 9
        assert isinstance(entry["weight_version_bytes"], int)
        assert len(entry["seeds"][0]["train_losses"]) == 6
        assert entry["method"] in text
    assert (document["settings"]["stages"], document["settings"]["seeds"]) == (8, [0])
    assert document["versions"]["spectrain_ext"] == st.__version__
    assert document["versions"]["torch"] == torch.__version__
    for picture in PICTURES:
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert "does not compare throughput" in text


def test_all_methods_that_fit_are_compared_and_the_others_named(tmp_path: Path) -> None:
    text = trained(tmp_path, *FAST, "--stages", 3, "-m", "all", "--width", 8)
    document, losses = document_in(tmp_path), losses_in(tmp_path)
    assert "left_out" not in document["settings"]
    assert list(losses) == document["settings"]["methods"] == list(st.methods())
    assert "auto: 3 microbatches a minibatch" in text
    assert all(math.isfinite(loss) for run in losses.values() for loss in run)
    # methods that flush make the same updates, and an average with its larger rate those of a sum
    assert losses["1f1b"] == losses["gpipe"] == losses["sync"]
    assert losses["spectrain-smoothed"] == pytest.approx(losses["spectrain"], rel=1e-4)
    assert losses["xgrad"] != losses["sync"]
    few = (*TINY, "--batch-size", 1437, "--optimizer", "nadam", "--lr", 0.001)
    text = trained(tmp_path / "nadam", *few, "-m", "all")
    settings = document_in(tmp_path / "nadam")["settings"]
    assert settings["optimizer"] == "nadam"
    assert "spectrain-smoothed" in settings["left_out"]
    assert "Left out: spectrain-smoothed (" in text


def test_options_reach_the_settings(tmp_path: Path) -> None:
    given = {
        **{"stages": 3, "epochs": 1, "batch_size": 512, "microbatches": 2, "clip_norm": 5.0},
        **{"width": 16, "lr": 0.01, "momentum": 0.8, "weight_decay": 0.001},
    }
    options = [each for key, n in given.items() for each in (f"--{key.replace('_', '-')}", n)]
    methods = ("-m", "vanilla,sync", "-m", "vanilla", "--seeds", 2)
    text = trained(tmp_path, *options, *methods, "--nesterov", "--devices", "cpu,cpu")
    document = document_in(tmp_path)
    expected = {
        **{"methods": ["vanilla", "sync"], "seeds": [0, 1], "devices": ["cpu"] * 3},
        **{"nesterov": True, **given},
    }
    assert {key: document["settings"][key] for key in expected} == expected
    assert [run["seed"] for run in document["methods"][0]["seeds"]] == [0, 1]
    assert "±" in text


def test_without_out_results_are_below_runs_and_quick_yields_to_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the number of threads is put back."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(2)
    result = called(
        *(main, "train", "--quick", "--seeds", 2, "-m", "sync"),
        *("--batch-size", 256, "--stages", 1),
    )
    assert result.exit_code == 0, result.output
    assert torch.get_num_threads() == 2
    (folder,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in folder.iterdir()} == {"results.json", "runs", *PICTURES}
    settings = document_in(folder)["settings"]
    assert (settings["epochs"], settings["seeds"]) == (1, [0, 1])


def test_an_interruption_keeps_the_finished_runs_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, broken = [], ("vanilla", 0)

    def recorded(settings: TrainSettings, name: str, seed: int, *rest: Any) -> Run:
        if (name, seed) == broken:
            raise KeyboardInterrupt
        asked.append((name, seed))
        return train_once(settings, name, seed, *rest)

    monkeypatch.setattr(compare, "train_once", recorded)
    stopped = called(main, "train", *TINY, "-m", "sync,vanilla", "--out", tmp_path)
    assert stopped.exit_code == 1
    assert f"--out {tmp_path}" in text_of(stopped)
    assert not (tmp_path / "results.json").exists()
    broken = ("none", 0)
    text = trained(tmp_path, *TINY, "-m", "sync,pipedream,vanilla", "--seeds", 2)
    assert "1 of 6 runs were finished before" in text
    pairs = [(name, seed) for seed in (0, 1) for name in ("sync", "pipedream", "vanilla")]
    assert asked == pairs
    trained(tmp_path / "straight", *TINY, "-m", "sync,pipedream,vanilla")
    assert losses_in(tmp_path) == losses_in(tmp_path / "straight")
    asked.clear()
    trained(tmp_path, *TINY, "-m", "sync", "--lr", 0.01)
    assert asked == [("sync", 0)]


# Other data and models, from files that the test writes

LONG = ("--depth", 2, "--context", 16)
PAIRS = [
    ("cifar10", "residual-mlp", ()),
    ("cifar10", "vgg16", ("--augment",)),
    ("cifar10", "resnet", ("--lr-schedule", "cosine")),
    ("text", "gpt", LONG),
    ("text", "lstm", (*LONG, "--warmup", 3)),
]


@pytest.mark.parametrize(("data", "model", "more"), PAIRS, ids=[model for _, model, _ in PAIRS])
def test_every_model_learns_from_its_data(
    tmp_path: Path, data: str, model: str, more: tuple[str, ...]
) -> None:
    if data == "text":
        write_text(tmp_path)
    else:
        write_batches(tmp_path, 20)
    text = trained(
        tmp_path / "out",
        *("--quick", "-m", "sync,spectrain", "--data", data, "--data-dir", tmp_path),
        *("--model", model, "--width", 8, "--stages", 4, "--batch-size", 10, "--epochs", 3),
        *("--train-samples", 60, "--test-samples", 15, "--lr", 0.005, "--warmup", 0, *more),
    )
    document = document_in(tmp_path / "out")
    settings = document["settings"]
    assert (settings["data"], settings["model"]) == (data, model)
    assert (settings["train_samples"], settings["test_samples"]) == (60, 15)
    assert len(settings["data_sha256"]) == 64
    assert settings["optimizer"] == ("adamw" if model == "gpt" else "sgd")
    assert ("perplexity" if data == "text" else "accuracy") in text
    for entry in document["methods"]:
        losses = entry["seeds"][0]["train_losses"]
        assert len(losses) == 18
        assert sum(losses[-6:]) < sum(losses[:6])
        assert entry["perplexity"] == pytest.approx(math.exp(entry["test_loss"]))
    assert str(tmp_path) not in json.dumps(settings)  # the data's location is private


# Errors

TEXT, IMAGES = ("--data", "text", "--data-dir", "{}"), ("--data", "cifar10", "--data-dir", "{}")
EMPTY = "{}/empty"


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("-m", "sink"), 2, ["there is no 'sink'", *st.methods()]),
        (("--stages", 0), 2, ["--stages"]),
        (("--devices", "cpu,cpu,cpu", "--stages", 2), 2, ["1 to 2 devices for 2 stages, got 3"]),
        (("--devices", "warp"), 2, ["entry 0 is 'warp'"]),
        (("--devices", "cuda:97"), 2, ["entry 0 is 'cuda:97'", "spectrain doctor"]),
        (("--lr", "nan"), 2, ["--lr", "finite"]),
        (("--momentum", "-1"), 2, ["--momentum", "at least 0"]),
        (("--stages", 10**9), 2, ["--stages", "not in the range 1<=x<=1000"]),
        (("--model", "gpt"), 2, ["gpt cannot be trained on digits", "residual-mlp"]),
        (("--data", "text"), 2, ["--data-dir names their folder"]),
        (("--data-dir", "."), 2, ["digits come with scikit-learn"]),
        (("--augment",), 2, ["--augment", "--data digits has none"]),
        (("--optimizer", "adam", "--momentum", "0.5"), 2, ["--momentum", "optimizer is adam"]),
        (("--out", "{}/text.txt/below"), 2, ["--out"]),
        (("-m", "spectrain", "--momentum", "0"), 1, ["momentum"]),
        (
            ("-m", "sync,pipedream-2bw", "--stages", 3, "--microbatches", 2),
            *(1, ["method pipedream-2bw: ", "at least 3 microbatches for 3 stages, got 2"]),
        ),
        ((*TEXT[:-1], EMPTY), 1, ["there is no *.txt in it"]),
        ((*IMAGES[:-1], EMPTY), 1, ["there is no CIFAR-10 in it; expected the folder cifar-10-b"]),
        ((*TEXT, "--stages", 9), 1, ["stages must be between 1 and the 8 layers, got 9"]),
        ((*IMAGES, "--model", "inception-v4", "--depth", 3), 2, ["has the one that it has"]),
        ((*IMAGES, "--depth", 7), 1, ["depth of ResNet must be one of 18, 34"]),
        ((*TEXT, "--context", 100000), 1, ["too few for sequences of 100000"]),
    ],
)
def test_what_cannot_be_trained_is_told_before_training(
    tmp_path: Path, arguments: tuple[object, ...], code: int, expected: list[str]
) -> None:
    (tmp_path / "empty").mkdir()
    write_text(tmp_path)
    if IMAGES[1] in arguments:
        write_batches(tmp_path)
    given = [str(each).format(tmp_path) for each in arguments]
    where = () if "--out" in arguments else ("--out", tmp_path / "out")
    result = called(main, "train", "--quick", *given, *where)
    assert result.exit_code == code
    assert isinstance(result.exception, SystemExit)
    for fragment in expected:
        assert fragment in text_of(result)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        ("sklearn", "pip install -r studies/requirements.txt"),
        ("matplotlib", "pip install 'spectrain_ext[pictures]'"),
    ],
)
def test_a_missing_extra_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    result = called(main, "train", *FAST, "--out", tmp_path / "out", draws=True)
    assert result.exit_code == 1
    assert remedy in text_of(result)
    assert not (tmp_path / "out").exists()


def test_a_failure_in_training_is_told_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("no loss today")

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", fail)
    result = called(main, "train", *FAST, "-m", "sync", "--out", tmp_path)
    assert result.exit_code == 1
    assert "RuntimeError: no loss today" in result.output
    assert isinstance(result.exception, SystemExit)
    assert not (tmp_path / "results.json").exists()


@pytest.mark.nightly
def test_the_default_comparison_orders_the_methods(tmp_path: Path) -> None:
    """The README's claim: prediction is closer to synchronous training than the others."""
    trained(tmp_path)
    accuracy = {m["method"]: m["test_accuracy"] for m in document_in(tmp_path)["methods"]}
    assert accuracy["sync"] > 0.93
    assert accuracy["spectrain"] > 0.88
    assert accuracy["spectrain"] > accuracy["pipedream"]
    assert accuracy["spectrain"] > accuracy["vanilla"]
