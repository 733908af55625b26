"""Tests tied weights in checkpoints: saved under the model's names, whatever the cut."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from helpers import rank_pipelines
from helpers.checkpoint_cases import LOSS, batches, everything, halving, same, sgd, train
from helpers.ranks import run_ranks
from torch import nn

import spectrain_ext as st
from spectrain_ext.checkpoint import load, save
from spectrain_ext.checkpoint.parts import parts_of
from spectrain_ext.errors import CheckpointError
from spectrain_ext.partitioning import cut_at


def tied(seed=0, dtype=None):
    """Return blocks of which the first and the last share a weight."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    blocks[3][0].weight = blocks[0][0].weight
    return nn.Sequential(*blocks).to(dtype)


def pipeline(ends, seed=0, method="spectrain", dtype=None, **more):
    stages = cut_at(tied(seed, dtype), ends)
    return st.Pipeline(stages, sgd, LOSS, method, scheduler=halving, **more)


@pytest.mark.parametrize("method", ["gpipe", "vanilla", "pipedream", "auto"])
def test_stopped_and_continued_is_never_stopped(tmp_path, method):
    first, second = batches(5), batches(6, seed=1)
    kept, stopped = (pipeline([1, 3, 4], method=method) for _ in range(2))
    train(kept, first)
    train(stopped, first)
    save(tmp_path / "c", stopped)
    continued = pipeline([1, 3, 4], seed=9, method=method)
    assert load(tmp_path / "c", continued).random
    assert [x.item() for x in train(continued, second)] == [x.item() for x in train(kept, second)]
    same(everything(continued), everything(kept))


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("ends", [[4], [2, 4], [1, 2, 3, 4]])
def test_any_cut_loads_into_any_other(tmp_path, ends, released):
    saved = pipeline([1, 3, 4])
    train(saved, batches(5))
    if released:
        saved.release()
    save(tmp_path / "c", saved)
    other = pipeline(ends, seed=5)
    train(other, batches(1))
    if released:
        other.release()
    load(tmp_path / "c", other)
    save(tmp_path / "again", other)
    third = pipeline([1, 3, 4], seed=6)
    load(tmp_path / "again", third)
    found, expected = everything(third), everything(saved)
    for states in (found, expected):
        for key in [key for key in states if key.startswith("random")]:
            del states[key]
    same(found, expected)
    losses = [[x.item() for x in train(pipe, batches(4, seed=2))] for pipe in (third, saved)]
    assert losses[0] == losses[1]


def test_a_plain_model_and_torchs_optimizer(tmp_path):
    pipe = pipeline([2, 4])
    train(pipe, batches(4))
    save(tmp_path / "c", pipe)
    plain = tied(seed=3)
    optimizer = torch.optim.SGD(plain.parameters(), lr=9, momentum=0.1)
    load(tmp_path / "c", plain, optimizer=optimizer)
    home = pipe.get_submodule("0.0.0").weight
    assert torch.equal(plain[3][0].weight, home)
    momentum = optimizer.state[plain[0][0].weight]["momentum_buffer"]
    assert torch.equal(momentum, pipe.optimizers[0].state[home]["momentum_buffer"])
    save(tmp_path / "plain", plain, optimizer=optimizer)
    back = pipeline([1, 4], seed=8)
    load(tmp_path / "plain", back, only_model=True)
    assert torch.equal(back.get_submodule("1.2.0").weight, plain[0][0].weight)


def test_compiled_stages(tmp_path):
    stages = [torch.compile(stage, backend="eager") for stage in cut_at(tied(), [2, 4])]
    pipe = st.Pipeline(stages, sgd, LOSS, "spectrain", scheduler=halving)
    train(pipe, batches(3))
    save(tmp_path / "c", pipe)
    plain, other = tied(seed=3), pipeline([1, 3, 4], seed=4)
    for target in (plain, other):
        load(tmp_path / "c", target)
    assert torch.equal(plain[3][0].weight, pipe.get_submodule("0._orig_mod.0.0").weight)
    same(other.state_dict(), pipe.state_dict())
    load(tmp_path / "c", pipe)


def test_stages_behind_those_of_another_process():
    """The other process has its own stage 0, possibly with a weight of that name."""
    home, away = nn.Linear(4, 4), nn.Linear(4, 4)
    away.weight = home.weight
    pipe = st.Pipeline([nn.Sequential(home), nn.Sequential(away)], sgd, LOSS)
    for _ in range(2):
        first, second = parts_of(pipe, first_stage=3)
        assert (first.tied, second.tied) == ({}, {"4.0.weight": ["3.0.weight"]})
        pipe.release()


def test_masters_are_loaded_by_all_names(tmp_path):
    """They are loaded into float32, although the copy's weight is rounded."""
    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches(5)]
    pipe = pipeline([2, 4], dtype=torch.bfloat16, master_dtype=torch.float32)
    train(pipe, data)
    save(tmp_path / "c", pipe)
    master = pipe.masters()[pipe.get_submodule("0.0.0").weight]
    assert not torch.equal(master, master.bfloat16().float())
    plain = tied()
    load(tmp_path / "c", plain)
    assert torch.equal(plain[3][0].weight, master)
    cut = pipeline([1, 2, 4])
    load(tmp_path / "c", cut)
    last = cut.get_submodule("2.1.0").weight
    assert torch.equal(last, master)


def test_a_checkpoint_of_a_model_without_the_tie_is_refused(tmp_path):
    untied = tied(seed=3)
    untied[3][0].weight = nn.Parameter(untied[0][0].weight.detach().clone())
    save(tmp_path / "same", untied)
    with torch.no_grad():
        untied[3][0].weight[0, 0] += 1
    save(tmp_path / "other", untied)
    for target in (tied(), pipeline([4]), pipeline([1, 3, 4])):
        before = {name: value.clone() for name, value in target.state_dict().items()}
        with pytest.raises(CheckpointError, match=r"'0\.0\.weight' and '3\.0\.weight' are one ten"):
            load(tmp_path / "other", target, only_model=True)
        same(target.state_dict(), before)
        load(tmp_path / "same", target, only_model=True)
        assert torch.equal(target.state_dict()["3.0.weight"], untied[0][0].weight)


@pytest.mark.processes
def test_over_processes(tmp_path):
    """Every rank makes the whole model and cuts it, without naming the ties."""
    found = run_ranks(rank_pipelines.tied_and_cut, 3, str(tmp_path))
    torch.set_num_threads(1)
    for name, expected in rank_pipelines.tied_and_cut(0, 1, str(tmp_path / "alone")).items():
        losses, *states = zip(*(rank[name] for rank in found), strict=True)
        assert losses[-1] == expected[0], name
        for when, of_ranks in enumerate(states):
            together = {key: value for state in of_ranks for key, value in state.items()}
            same(together, expected[1 + when])
        assert kept(tmp_path / name) == kept(tmp_path / "alone" / name)


def kept(path):
    """Return a checkpoint's content without the random generators of processes."""
    body = json.loads((path / "checkpoint.json").read_text())["checkpoint"]
    return {key for key in body["tensors"] if not key.startswith("random.process")}


def test_the_uncut_model_loads_what_other_processes_have_trained_without_a_warning(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    stages = cut_at(model, [1, 2])
    save(tmp_path / "c", model)
    stages[0].uncut.trained_elsewhere([1])
    with pytest.warns(UserWarning, match=r"have trained stages \[1\] of this model"):
        model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(tmp_path / "c", model)
        model.state_dict()
