"""Tests ``python -m studies train --checkpoint-every``: interruption changes no result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from helpers.cli_programs import undrawn
from torch import nn

from studies import compare
from studies.__main__ import main
from studies.data.split import Batches, Split
from studies.workload import epochs_of

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

# 12 minibatches
SMALL = ("--batch-size", "256", "--epochs", "2", "--seeds", "1", "--width", "8", "--stages", "2")
KEEP = ("--checkpoint-every", "3")


def _train(folder: Path, *arguments: str) -> Result:
    with undrawn():
        return CliRunner().invoke(main, ["train", *SMALL, *arguments, "--out", str(folder)])


def _results(folder: Path) -> list[dict[str, Any]]:
    found = json.loads((folder / "results.json").read_text())["methods"]
    for entry in found:  # values that depend on the clock
        del entry["simulated_time"]
        for timed in (entry, *entry["seeds"]):
            del timed["minibatches_per_second"]
    return list(found)


class _Interrupting(nn.Module):
    """Raises KeyboardInterrupt in one forward; counts forwards."""

    def __init__(self, module: nn.Module, forward: int, seen: list[int]) -> None:
        super().__init__()
        self.module = module
        self.forward_at = forward
        self.seen = seen

    def forward(self, value: torch.Tensor) -> object:
        if self.training:
            self.seen[0] += 1
            if self.seen[0] == self.forward_at:
                raise KeyboardInterrupt
        return self.module(value)


@pytest.mark.parametrize("method", ["spectrain", "pipedream", "xgrad"])
def test_an_interrupted_run_goes_on_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    arguments = (*KEEP, "-m", method, "--lr-schedule", "cosine", "--metrics")
    straight = _train(tmp_path / "straight", *arguments)
    assert straight.exit_code == 0, straight.output
    build = compare.stages_in

    def train(interrupted_at: int) -> tuple[Result, int]:
        seen = [0]
        with monkeypatch.context() as patch:
            patch.setattr(
                compare,
                "stages_in",
                lambda *given: (
                    [_Interrupting(stage, interrupted_at, seen) for stage in build(*given)][:1]
                    + build(*given)[1:]
                ),
            )
            return _train(tmp_path / "broken", *arguments), seen[0]

    first, _ = train(8)
    assert first.exit_code == 1
    assert "--out" in first.output
    (kept,) = (tmp_path / "broken" / "checkpoints").iterdir()
    assert {path.name for path in kept.iterdir()} == {
        *("minibatch-00000003", "minibatch-00000006", "latest")
    }
    second, forwards = train(1000)
    assert second.exit_code == 0, second.output
    assert forwards == 6  # of 12
    assert _results(tmp_path / "broken") == _results(tmp_path / "straight")
    assert list((tmp_path / "broken" / "checkpoints").iterdir()) == []
    lines = [json.loads(line) for line in (tmp_path / "broken" / "metrics.jsonl").open()]
    assert max(line["minibatch"] for line in lines) == 12


def test_draining_changes_an_asynchronous_method_only(tmp_path: Path) -> None:
    losses = {}
    for name, more in (("plain", ()), ("kept", KEEP)):
        done = _train(tmp_path / name, "-m", "sync,vanilla", *more)
        assert done.exit_code == 0, done.output
        losses[name] = [entry["seeds"][0]["train_losses"] for entry in _results(tmp_path / name)]
    assert losses["plain"][0] == losses["kept"][0]
    assert losses["plain"][1] != losses["kept"][1]
    assert losses["plain"][1][:3] == losses["kept"][1][:3]


def test_checkpoints_need_a_place(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["train", *SMALL, *KEEP])
    assert done.exit_code == 2
    assert "checkpoints need --out" in " ".join(done.output.split())


def test_a_damaged_checkpoint_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = compare.stages_in
    with monkeypatch.context() as patch:
        patch.setattr(
            compare,
            "stages_in",
            lambda *given: [_Interrupting(stage, 5, [0]) for stage in build(*given)],
        )
        assert _train(tmp_path, *KEEP, "-m", "vanilla").exit_code == 1
    (kept,) = (tmp_path / "checkpoints").iterdir()
    for path in (kept / "minibatch-00000003").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    done = _train(tmp_path, *KEEP, "-m", "vanilla")
    assert done.exit_code == 1
    assert ".safetensors" in " ".join(done.output.split())
    assert isinstance(done.exception, SystemExit)


@pytest.mark.parametrize("augmented", [False, True], ids=["plain", "augmented"])
@pytest.mark.parametrize("begin", [0, 1, 2, 3, 5, 6])
def test_the_order_can_be_entered_anywhere(begin: int, augmented: bool) -> None:
    images = torch.arange(7 * 3 * 4 * 4).view(7, 3, 4, 4).remainder(251).to(torch.uint8)
    targets = torch.arange(7)
    data = Split(
        name="t",
        kind="images",
        train_inputs=images,
        train_targets=targets,
        test_inputs=images,
        test_targets=targets,
        classes=7,
        fingerprint="",
    )

    def batches(begin: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(epochs_of(Batches(data, batch_size=3, seed=4, augmented=augmented), 2, begin))

    everything = batches(0)
    assert len(everything) == 6
    rest = batches(begin)
    assert len(rest) == len(everything) - begin
    for (a, b), (c, d) in zip(rest, everything[begin:], strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)
