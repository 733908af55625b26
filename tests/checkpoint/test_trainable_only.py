"""Tests checkpoints of trainable weights only: small, to the bit, refused by another base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import checkpoint_programs
from helpers.checkpoint_cases import (
    Adapted,
    adapted,
    batches,
    body_of,
    forge,
    optimizers_of,
    pipeline,
    refused,
    same,
    state_of,
    tied,
    train,
    weights,
)
from helpers.ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.checkpoint import CheckpointError, CheckpointManager, load, save


def adapters(n: int, seed: int = 0, **more: Any) -> st.Pipeline:
    return pipeline(n, seed, make=adapted, **more)


def size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("model*.safetensors"))


def test_an_interrupted_training_goes_on_to_the_bit(tmp_path: Path) -> None:
    def manager(name: str, seed: int) -> CheckpointManager:
        more = {"every_minibatches": 2, "trainable_only": name == "small"}
        return CheckpointManager(tmp_path / name, adapters(3, seed), **more)

    kept, stopped = manager("full", 0), manager("small", 0)
    expected = [r.loss.item() for r in kept.run(batches(6))]
    assert [r.loss.item() for r in stopped.run(batches(4))] == expected[:4]
    resumed = manager("small", 7)
    loaded = resumed.restore()
    assert loaded is not None
    assert loaded.random
    assert [r.loss.item() for r in resumed.run(batches(6)[4:])] == expected[4:]
    same(state_of(resumed.pipe), state_of(kept.pipe))
    full, small = (tmp_path / name / "minibatch-00000006" for name in ("full", "small"))
    assert size(small) < 8000 < 100_000 < size(full)
    trained = {name for name, p in adapted().named_parameters() if p.requires_grad}
    statistics = {name for name, _ in adapted().named_buffers() if "norm" in name}
    assert load_file(small / "model.safetensors").keys() == trained | statistics


@pytest.mark.parametrize("master_dtype", [None, torch.float32])
def test_another_cut_and_a_module_load_it(tmp_path: Path, master_dtype: torch.dtype | None) -> None:
    def make(seed: int = 0) -> nn.Sequential:
        return adapted(seed) if master_dtype is None else adapted(seed).bfloat16()

    more: Any = {"make": make, "master_dtype": master_dtype}
    kept = pipeline(3, **more)
    dtype = torch.float32 if master_dtype is None else torch.bfloat16
    train(kept, batches(3, dtype=dtype))
    save(tmp_path / "c", kept, trainable_only="verified", minibatches=3)
    other = pipeline(2, 7, **more)
    train(other, batches(1, dtype=dtype))
    assert load(tmp_path / "c", other).minibatches == 3
    for key in ("model", "masters", "state"):
        same(state_of(other)[key], state_of(kept)[key])
    plain = make(7)
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=9, momentum=0.1)
    load(tmp_path / "c", plain, optimizer=optimizer)
    same(weights(plain), dict(kept.state_dict()))
    names = {p: name for name, p in plain.named_parameters()}
    same(optimizers_of([optimizer], names)["state"].keys(), state_of(kept)["state"].keys())


def test_tied_weights(tmp_path: Path) -> None:
    kept = pipeline(3, make=tied)
    train(kept, batches(2))
    save(tmp_path / "c", kept, trainable_only=True)
    assert [list(stage["base"]) for stage in body_of(tmp_path / "c")["stages"]] == [
        [],
        ["1.0.bias"],
        [],
    ]
    for other in (pipeline(2, 7, make=tied), tied(7)):
        load(tmp_path / "c", other, only_model=isinstance(other, nn.Sequential))
        same(dict(other.state_dict()), dict(kept.state_dict()))


def changed(change: Callable[[nn.Sequential], object]) -> Callable[[int], nn.Sequential]:
    def make(seed: int = 0) -> nn.Sequential:
        found = adapted(seed)
        change(found)
        return found

    return make


def widen(found: Any) -> None:
    found[2].enter, found[2].leave = nn.Linear(4, 65), nn.Linear(65, 4)
    found[2].requires_grad_(False)
    found[2].up.requires_grad_(True)
    found[2].down.requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (widen, r"another base: '2\.enter\.weight' has shape \[1024, 4\], expected \[65, 4\]"),
        (lambda m: m.append(Adapted()), r"has no '4\.\S+', which stage 1 has"),
        (lambda m: m.pop(3), r"has '3\.\S+', which the model has not \(12 such tensors\)"),
        (lambda m: m[1].enter.weight.data.add_(1), r"base: '1\.enter\.weight' has other values"),
        (lambda m: m[3].enter.bfloat16(), r"base: '3\.enter\.weight' has other values here"),
        (
            lambda m: m[1].leave.requires_grad_(True),
            r"while 1\.leave\.weight, 1\.leave\.bias were frozen, and they are trained here; only_",
        ),
        (
            lambda m: m[0].up.requires_grad_(False),
            r"while 0\.up\.weight were trained, and they are frozen here; only_model=True",
        ),
    ],
)
def test_another_base_is_refused(
    tmp_path: Path, change: Callable[[nn.Sequential], object], match: str
) -> None:
    save(tmp_path / "c", adapters(3), trainable_only="verified")
    pipe = pipeline(2, 5, make=changed(change))
    refused(tmp_path / "c", match, pipe)
    if "only_model" in match:
        load(tmp_path / "c", pipe, only_model=True)
        same(pipe.state_dict()["1.up.weight"], adapted()[1].up.weight.detach())
    if "other values" in match:
        save(tmp_path / "unverified", adapters(3), trainable_only=True)
        load(tmp_path / "unverified", pipe)


ENTRY: dict[str, Any] = {"dtype": "float32", "shape": [1024, 4]}


@pytest.mark.parametrize(
    "base",
    [
        *(None, 3, "x", [], [["0.enter.weight", ENTRY]], {"0.enter.weight": ENTRY}),
        *({}, 3, "x", [], {"shape": [1024, 4]}, ENTRY | {"dtype": []}, ENTRY | {"dtype": "qint8"}),
        *(ENTRY | {"sha256": value} for value in (None, 3, [], {}, "0")),
    ],
)
def test_a_forged_base(tmp_path: Path, base: Any) -> None:
    save(tmp_path / "c", adapters(2), trainable_only=True)

    def change(body: Any) -> None:
        stage = body["stages"][0]
        if isinstance(base, dict) and "0.enter.weight" not in base:
            stage["base"]["0.enter.weight"] = base
        else:
            stage["base"] = base

    forge(tmp_path / "c", change)
    refused(tmp_path / "c", r"checkpoint\.json: ", adapters(2, 3))


def test_arguments(tmp_path: Path) -> None:
    for wrong in ("yes", "values", 2):
        with pytest.raises(ValueError, match="trainable_only: expected True, False or 'verified'"):
            save(tmp_path / "c", adapted(), trainable_only=wrong)
        with pytest.raises(ValueError, match=f"'verified', got {wrong!r}"):
            CheckpointManager(tmp_path / "c", adapters(2), trainable_only=wrong)
    with pytest.raises(ValueError, match="trainable_only: the module has no trainable parameter"):
        save(tmp_path / "c", adapted().requires_grad_(False), trainable_only=True)
    assert not list(tmp_path.iterdir())
    # a full checkpoint loads into a model that trains less, as before
    save(tmp_path / "c", adapters(2))
    target = adapted(3)
    load(tmp_path / "c", target)
    same(weights(target), weights(adapted()))


@pytest.mark.processes
def test_over_processes(tmp_path: Path) -> None:
    found: list[dict[str, Tensor]] = run_ranks(checkpoint_programs.adapters, 2, str(tmp_path))
    plain, pipe = adapted(9), adapters(3, 9)
    for target in (plain, pipe):
        load(tmp_path / "c", target, only_model=True)
        same(dict(target.state_dict()), {k: v for state in found for k, v in state.items()})
    with torch.no_grad():
        plain[3].leave.weight[0, 0] += 1
    with pytest.raises(CheckpointError, match=r"base: '3\.leave\.weight' has other values"):
        load(tmp_path / "c", plain)
