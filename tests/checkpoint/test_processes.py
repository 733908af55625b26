"""Tests checkpoints of several processes with one stage each, which load anywhere."""

from __future__ import annotations

import json
import re

import pytest
import torch
from helpers import checkpoint_programs
from helpers.checkpoint_cases import (
    LOSS,
    batches,
    body_of,
    everything,
    model,
    pipeline,
    same,
    sgd,
    train,
)
from helpers.ranks import run_ranks
from safetensors.torch import load_file
from torch import nn

import spectrain_ext as st
from spectrain_ext.checkpoint import CheckpointError, CheckpointManager, ShuffledSampler, load

pytestmark = pytest.mark.processes


def test_one_checkpoint_of_two_processes(tmp_path):
    sums = run_ranks(checkpoint_programs.stages, 2, str(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["alone", "alone0", "alone1", "c"]
    assert load(tmp_path / "alone", model()).minibatches == 8
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "checkpoint.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "state-00001-of-00002.safetensors",
        "state-00002-of-00002.safetensors",
    ]
    plain = model(seed=9)
    loaded = load(tmp_path / "c", plain, sampler=ShuffledSampler(10, 2))
    assert (loaded.minibatches, loaded.random) == (3, False)
    for rank, expected in enumerate(sums):
        found = sum(p.double().sum().item() for p in plain[2 * rank : 2 * rank + 2].parameters())
        assert found == pytest.approx(expected, abs=1e-12)
    # safetensors' own tools read all its weights
    known = {}
    for file in (tmp_path / "c").glob("model-*.safetensors"):
        known |= load_file(file)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == known.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in known.values())
    assert known.keys() == plain.state_dict().keys()
    assert all(torch.equal(known[key], value) for key, value in plain.state_dict().items())
    # the stages had different learning rates: two stages may load them, one may not
    pipe = pipeline(2, seed=4, scheduler=None)
    load(tmp_path / "c", pipe)
    assert [o.param_groups[0]["lr"] for o in pipe.optimizers] == [0.05, 0.1]
    assert len(train(pipe, batches(2))) == 2
    with pytest.raises(CheckpointError, match=r"saved with lr=0\.05, and '2\..*lr=0\.1; give them"):
        load(tmp_path / "c", pipeline(1, scheduler=None))


def test_what_fails_in_one_process_fails_in_all(tmp_path):
    a, b = run_ranks(checkpoint_programs.errors, 2, str(tmp_path))
    assert a[0].startswith("RuntimeError: process 1: TypeError: extra: a checkpoint cannot hold")
    assert b[0].startswith("TypeError: extra: a checkpoint cannot hold a builtins.set")
    for reason in (a[1], b[1]):
        assert reason.startswith("CheckpointError: ")
        assert "model-00002-of-00002.safetensors: damaged, " in reason


@pytest.mark.parametrize(("ranks", "chunks"), [(3, 1), (2, 2)])
def test_stopped_and_continued_over_processes_is_never_stopped_in_one(tmp_path, ranks, chunks):
    torch.set_num_threads(1)
    torch.manual_seed(4)
    n = ranks * chunks
    manager = CheckpointManager(
        tmp_path / "one", pipeline(n), sampler=ShuffledSampler(9, 2), every_minibatches=2
    )
    losses = [
        [(r.index, r.loss.item()) for r in manager.run(data)]
        for data in (batches(5), batches(4, seed=1))
    ]
    assert [index for run in losses for index, _ in run] == list(range(9))
    found = run_ranks(checkpoint_programs.trains, ranks, str(tmp_path), chunks)
    for first, second, _, timed, refused in found:
        assert [first, second] == losses
        assert timed == 3
        which, how = refused
        one, other = (rf"\S+{n} \({n} minibatches, SHA-256 \w{{12}}\.{{3}}\)" for n in (2, 4))
        message = f"path: process 0 has {one} and process 1 has {other}; all must load the same"
        assert re.match(message, which)
        assert how.startswith("only_model: process 0 has False and process 1 has True; all must")
    states = {key: value for each in found for key, value in each[2].items()}
    same(states, everything(manager.pipe))
    names = sorted(path.name for path in (tmp_path / "ranks").iterdir())
    assert names == [f"minibatch-0000000{k}" for k in (2, 4, 5, 6, 8)]
    # and one process resumes from what the ranks saved
    one, other = pipeline(n, seed=5), pipeline(n, seed=6)
    load(tmp_path / "one" / "minibatch-00000008", one)
    load(tmp_path / "ranks" / "minibatch-00000008", other)
    same(everything(other), everything(one))


def test_replicas_save_once_and_all_load(tmp_path):
    plain, pipe = model(seed=9), pipeline(4, seed=3)
    made = run_ranks(checkpoint_programs.replicated, 3, str(tmp_path))
    for target in (plain, pipe):
        assert not load(tmp_path / "replicas" / "minibatch-00000005", target).random
    expected = dict(plain.state_dict())
    same(dict(pipe.state_dict()), expected)
    for rank, (losses, (state, resumed), loaded) in enumerate(made):
        assert [index for index, _ in losses] == [5, 6, 7, 8]
        # module buffers come from the first replica
        kept = [key for key in state if rank < 2 or not ("running" in key or "batches" in key)]
        same({key: resumed[key] for key in kept}, {key: state[key] for key in kept})
        for found in loaded:
            same(found, {key: expected[key] for key in found})
    assert {key for _, _, (_, found) in made for key in found} == set(expected)


# Ties

WIDTH = 6


def data(count):
    drawn = torch.randn(count, 2, 8, WIDTH, generator=torch.Generator().manual_seed(11))
    return [(x, y) for x, y in drawn]


def pipeline_of(rank, ranks, parts):
    if ranks == 1:
        return st.Pipeline(parts, sgd, LOSS)
    return st.DistributedPipeline(list(parts)[rank], sgd, LOSS, timeout=30.0)


class Twice(nn.Module):
    """Not a sequence; uses one module twice, another one's weight, and a buffer in each stage."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.middle.weight
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x):
        for layer in (self.first, self.middle, self.last):
            x = torch.tanh(layer(x)) * self.scale
        return self.first(x)


def _tied(name):
    torch.manual_seed(3)
    if name == "traced":
        return st.partition(Twice(), 3, torch.zeros(2, WIDTH), split_points=["middle", "last"])
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    layers[3].weight = layers[2].weight = layers[0].weight
    return st.partitioning.cut_at(layers, [1, 3, 4])


def _state(pipe):
    for stage in pipe.children():
        for key, value in stage.state_dict().items():
            yield stage.cut.full_name(key), value.clone()


def tied_and_cut(rank, ranks, folder):
    """Return two models' losses, and their states after training and resuming, by name."""
    found = {}
    for name in ("sequence", "traced"):
        pipe = pipeline_of(rank, ranks, _tied(name))
        losses = [result.loss.item() for result in pipe.run(data(5)) if rank == ranks - 1]
        st.checkpoint.save(f"{folder}/{name}", pipe)
        trained = dict(_state(pipe))
        other = pipeline_of(rank, ranks, _tied(name))
        for _ in other.run(data(2)):
            pass
        for buffer in other.buffers():
            buffer.zero_()
        st.checkpoint.load(f"{folder}/{name}", other)
        loaded = dict(_state(other))
        for _ in other.run(data(3)):
            pass
        found[name] = losses, trained, loaded, dict(_state(other))
        if name == "sequence":
            untied = {**dict(_state(other)), "0.weight": torch.zeros(WIDTH, WIDTH)}
            try:
                other.load_state_dict(untied)
            except ValueError as error:
                assert "'0.weight' and '" in str(error), error
            else:  # this rank sees one of the names only
                assert rank == 0 < ranks - 1
    return found


def test_tied_weights(tmp_path):
    """Every rank makes the whole model and cuts it, without naming the ties."""
    found = run_ranks(tied_and_cut, 3, str(tmp_path))
    torch.set_num_threads(1)
    for name, expected in tied_and_cut(0, 1, str(tmp_path / "alone")).items():
        losses, *states = zip(*(rank[name] for rank in found), strict=True)
        assert losses[-1] == expected[0], name
        for when, of_ranks in enumerate(states):
            together = {key: value for state in of_ranks for key, value in state.items()}
            same(together, dict(expected[1 + when]))
        assert kept(tmp_path / name) == kept(tmp_path / "alone" / name)


def kept(path):
    """Return a checkpoint's content without the random generators of processes."""
    return {key for key in body_of(path)["tensors"] if not key.startswith("random.process")}
