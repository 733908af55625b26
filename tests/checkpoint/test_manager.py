"""Tests the checkpoint manager: when it saves, what it keeps, where it resumes."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from helpers.checkpoint_cases import batches, pipeline, same, state_of, train
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from spectrain_ext import StageError
from spectrain_ext.checkpoint import CheckpointError, CheckpointManager, ShuffledSampler, load, save


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def loader(sampler, workers=0):
    generator = torch.Generator().manual_seed(3)
    data = [torch.randn(40, 4, generator=generator) for _ in range(2)]
    return DataLoader(TensorDataset(*data), batch_sampler=sampler, num_workers=workers)


def lists(results):
    return [(result.index, result.loss.item()) for result in results]


def test_saves_when_it_is_time_and_keeps_the_last(tmp_path):
    manager = CheckpointManager(tmp_path / "c", pipeline(2), every_minibatches=2, keep=2)
    assert manager.latest() is None
    assert manager.restore() is None
    found = [result.index for result in manager.run(batches(7))]
    assert found == list(range(7))
    assert manager.minibatches == 7
    assert names(tmp_path / "c") == ["minibatch-00000004", "minibatch-00000006"]
    assert manager.latest() == tmp_path / "c" / "minibatch-00000006"
    # the next one is due at 8, not 2 after the start of the run
    assert [result.index for result in manager.run(batches(1))] == [7]
    assert names(tmp_path / "c") == ["minibatch-00000006", "minibatch-00000008"]


@pytest.mark.parametrize(
    ("stop", "method"),
    [
        (4, "spectrain+sync@8"),
        (5, "spectrain+sync@4"),
        (7, "pipedream+sync@3"),
        (9, "sync+pipedream@5"),
    ],
    ids=["due", "between", "epoch", "next"],
)
def test_stopped_anywhere_and_restored_is_never_stopped(tmp_path, stop, method):
    """In any phase of a method too."""

    def make(name, seed=0):
        sampler = ShuffledSampler(40, 6, seed=1)
        pipe = pipeline(3, seed, method=method)
        manager = CheckpointManager(tmp_path / name, pipe, sampler=sampler, every_minibatches=2)
        return manager, loader(sampler)

    kept, data = make("kept")
    expected = [pair for _ in range(2) for pair in lists(kept.run(data))]
    assert len(expected) == 14
    assert kept.pipe.phase == 1

    stopped, data = make("stopped")
    for end in [7, stop] if stop > 7 else [stop]:
        for result in stopped.run(data):
            if result.index + 1 == end:
                break

    continued, data = make("stopped", seed=5)
    torch.manual_seed(99)
    loaded = continued.restore()
    assert loaded.random
    done = loaded.minibatches
    assert done == continued.minibatches
    assert stop - 2 < done <= stop + 1  # leaving the loop finishes the work in flight
    again = lists(continued.run(data))
    if done < 7:
        again += lists(continued.run(data))
    assert again == expected[done:]
    same(state_of(continued.pipe), state_of(kept.pipe))


def test_a_pipeline_that_went_too_far_goes_back_to_the_phase_of_a_checkpoint(tmp_path):
    data, pipe = batches(12), pipeline(3, method="pipedream+sync@6")
    train(pipe, data[:4])
    save(tmp_path / "c", pipe)
    expected = train(pipe, data[4:])
    save(tmp_path / "d", pipe)
    load(tmp_path / "c", pipe)
    assert (pipe.minibatches, pipe.phase) == (4, 0)
    assert train(pipe, data[4:]) == expected
    plain = pipeline(3, method="sync")  # a method without phases accepts it
    load(tmp_path / "d", plain)
    assert (pipe.phase, plain.minibatches, plain.phase) == (1, 12, 0)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_loader_asked_for_in_advance_comes_again(tmp_path, workers):
    sampler = ShuffledSampler(40, 6, seed=1)
    manager = CheckpointManager(tmp_path, pipeline(2), sampler=sampler, every_minibatches=3)
    data = loader(sampler, workers)
    for result in manager.run(data):
        if result.index == 2:
            break
    other = ShuffledSampler(40, 6)
    restored = CheckpointManager(tmp_path, pipeline(2, seed=5), sampler=other)
    assert restored.restore().minibatches == 3
    assert other.position == 3
    seen = []

    def watched():
        for inputs, targets in data:
            seen.append(inputs)
            yield inputs, targets

    assert len(list(manager.run(watched()))) == 4
    expected = [data.dataset.tensors[0][rows] for rows in ShuffledSampler(40, 6, seed=1)]
    assert all(map(torch.equal, seen, expected[3:]))
    assert len(seen) == 4


def test_every_so_many_seconds(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    manager = CheckpointManager(tmp_path, pipeline(2), every_seconds=10, keep=9)

    def ticking():
        for batch in batches(9):
            now[0] += 4
            yield batch

    list(manager.run(ticking()))
    assert names(tmp_path) == [f"minibatch-0000000{k}" for k in (3, 6, 9)]


def test_a_failed_run_is_not_saved_and_a_restart_has_what_was_saved_along(tmp_path):
    losses = []
    manager = CheckpointManager(tmp_path, pipeline(2), every_minibatches=2)
    data = batches(5)
    data[3] = (data[3][0], torch.zeros(6, 5, 4, 3))
    with pytest.raises(StageError):
        for result in manager.run(data, extra=lambda: {"losses": list(losses)}):
            losses.append(result.loss.item())
    with pytest.raises(RuntimeError, match=r"save: the last run failed.*restore\(\) first"):
        manager.save()
    assert names(tmp_path) == ["minibatch-00000002"]
    loaded = manager.restore()
    assert (loaded.minibatches, loaded.extra) == (2, {"losses": losses[:2]})
    assert [result.index for result in manager.run(batches(2))] == [2, 3]


@pytest.mark.parametrize("stops", [5, 6])
def test_an_average_of_weights_goes_on_after_a_restart(tmp_path, stops):
    averages = []
    for place, ends in (("whole", (8,)), ("cut", (stops, 8))):
        for end in ends:  # each time anew, as another process would
            pipe = pipeline(2)
            model = nn.Sequential(*pipe.children())
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
            manager = CheckpointManager(tmp_path / place, pipe, every_minibatches=2)
            if loaded := manager.restore():
                average.load_state_dict(loaded.extra)
            data = batches(8)[manager.minibatches : end]
            for _ in manager.run(data, extra=average.state_dict):
                with pipe.weights():
                    average.update_parameters(model)
        averages.append(average.state_dict())
    assert averages[0].pop("n_averaged") == averages[1].pop("n_averaged") == 8
    torch.testing.assert_close(*averages, rtol=0, atol=0)


def test_a_damaged_checkpoint_and_the_one_before(tmp_path):
    manager = CheckpointManager(tmp_path, pipeline(2), every_minibatches=2)
    list(manager.run(batches(4)))
    newest = manager.latest()
    (newest / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"minibatch-00000004/checkpoint\.json: cannot be"):
        manager.restore()
    shutil.rmtree(newest)
    assert manager.restore().minibatches == 2


def test_leftovers_are_tidied_up(tmp_path):
    manager = CheckpointManager(tmp_path, pipeline(2))
    path = manager.save()
    writer = "01234567-89-89abcdef"  # on another host, long ago
    path.rename(tmp_path / f".minibatch-00000000.{writer}.replaced")
    (tmp_path / f".minibatch-00000001.{writer}.partial").mkdir()
    for left in tmp_path.iterdir():
        for each in (*left.iterdir(), left):
            os.utime(each, (0, 0))
    kept = [".minibatch-00000001.partial", ".minibatch-notes"]
    for name in kept:
        (tmp_path / name).mkdir()
    assert manager.restore().minibatches == 0
    assert names(tmp_path) == [*kept, "minibatch-00000000"]


def test_a_checkpoint_with_something_else_is_kept(tmp_path, caplog):
    manager = CheckpointManager(tmp_path, pipeline(2), every_minibatches=1, keep=1)
    list(manager.run(batches(1)))
    (tmp_path / "minibatch-00000001" / "notes.txt").write_text("mine")
    (tmp_path / "minibatch-00000000").mkdir()
    list(manager.run(batches(2)))
    assert names(tmp_path) == ["minibatch-00000001", "minibatch-00000003"]
    assert (tmp_path / "minibatch-00000001" / "notes.txt").read_text() == "mine"
    assert "kept: " in caplog.text
    assert "minibatch-00000001 holds 'notes.txt'" in caplog.text


def test_bad_arguments(tmp_path):
    for bad, match in (
        ({"every_minibatches": 0}, "every_minibatches: expected at least 1, got 0"),
        ({"every_seconds": -1.0}, r"every_seconds: expected at least 0, got -1\.0"),
        ({"keep": 0}, "keep: expected at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=match):
            CheckpointManager(tmp_path, pipeline(2), **bad)
