"""Several processes, one stage each: one checkpoint, which loads anywhere else."""

from __future__ import annotations

import os
import socket

import pytest
import torch.multiprocessing as mp
from checkpoint_cases import batches, model, pipeline, train
from checkpoint_programs import WORLD, errors, save_and_load, worker

from spectrain_ext.checkpoint import CheckpointError, load
from spectrain_ext.data.sampler import ShuffledSampler


def together(actions, tmp_path):
    """Run ``actions(rank, path)`` in every process; returns what each returned."""
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    store = tmp_path / f"store-{actions.__name__}"
    processes = [
        context.Process(target=worker, args=(rank, store, actions, str(tmp_path), answers))
        for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * WORLD
    return dict(answers.get() for _ in processes)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), *_paths()]))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", _loopback())


def _paths():
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _loopback():
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def test_one_checkpoint_of_two_processes(tmp_path):
    sums = together(save_and_load, tmp_path)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "checkpoint.json",
    ]
    plain = model(seed=9)
    sampler = ShuffledSampler(10, 2)
    loaded = load(tmp_path / "c", plain, sampler=sampler)
    assert (loaded.minibatches, loaded.random) == (3, False)
    for rank in range(WORLD):
        found = sum(p.double().sum().item() for p in plain[2 * rank : 2 * rank + 2].parameters())
        assert found == pytest.approx(sums[rank], abs=1e-12)
    # the stages had other learning rates: two stages here may have them too, one may not
    pipe = pipeline(2, seed=4, scheduler=None)
    load(tmp_path / "c", pipe)
    assert [o.param_groups[0]["lr"] for o in pipe.optimizers] == [0.05, 0.1]
    assert len(train(pipe, batches(2))) == 2
    with pytest.raises(CheckpointError, match=r"saved with lr=0\.05, and '2\..*lr=0\.1; give them"):
        load(tmp_path / "c", pipeline(1, scheduler=None))


def test_what_fails_in_one_process_fails_in_all(tmp_path):
    found = together(errors, tmp_path)
    a, b = found[0], found[1]
    assert a[0] == b[0] == "ValueError: first_stage: stage 0 is saved by process 0 and process 1"
    assert a[1].startswith("ValueError: first_stage: 'model.0.linear.weight' is saved by process 0")
    assert a[2].startswith("RuntimeError: process 1: TypeError: extra: a checkpoint cannot hold")
    assert b[2].startswith("TypeError: extra: a checkpoint cannot hold a builtins.set")
    assert None not in (a[3], b[3])
    for reason in (a[4], b[4]):
        assert reason.startswith("CheckpointError: ")
        assert "__1_0.distcp: damaged, the SHA-256 of 'model." in reason
