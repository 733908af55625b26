"""Tests that passes of one's own are saved and resumed, over ranks and cuts too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.checkpoint_cases import LOSS, batches, ends, sgd
from helpers.ranks import run_ranks
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.checkpoint import CheckpointError, load, save
from spectrain_ext.partitioning import cut_at


class Means(st.passes.Pass):
    """Adds up the gradients of each parameter, and counts updates."""

    def on(self, stage: Any, processes: Any) -> Means:
        made = super().on(stage, processes)
        made._sums, made._updates = {}, 0
        return made

    def begin(self, run: Any) -> dict[st.passes.Kind, Any]:
        return {st.passes.Kind.CHANGE_GRADIENTS: self.add}

    def add(self, i: int, j: int) -> None:
        self._updates += 1
        with self.stage.changing_gradients():
            for name, p in self.stage.module.named_parameters():
                self._sums[name] = self._sums.get(name, 0.0) + p.grad

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates, **self._sums} if self._updates else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._updates = state.pop("updates", 0)
        self._sums = state


def made(stages: int, rank: int | None = None, seed: int = 1) -> st.Pipeline:
    torch.manual_seed(seed)
    parts = cut_at([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)], ends(4, stages))
    more: dict[str, Any] = {"microbatches": 2, "passes": [Means()]}
    if rank is None:
        return st.Pipeline(parts, sgd, LOSS, "1f1b", **more)
    return st.DistributedPipeline(parts[rank], sgd, LOSS, "1f1b", timeout=60.0, **more)


def means_of(pipe: st.Pipeline) -> dict[str, Tensor]:
    found = {}
    for stage in pipe._wires.stages:
        (own,) = stage.passes
        assert own._updates == pipe.minibatches
        found |= {stage.module.cut.full_name(name): s.clone() for name, s in own._sums.items()}
    return found


def trained(rank: int, ranks: int, path: str) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    pipe = made(ranks, rank)
    pipe.fit(batches(6)[:3])
    save(path, pipe)
    other = made(ranks, rank, seed=2)
    load(path, other)
    assert means_of(other).keys() == means_of(pipe).keys()
    other.fit(batches(6)[3:])
    return means_of(other)


@pytest.mark.processes
def test_a_pass_of_ones_own_goes_on_over_ranks_and_in_other_cuts(tmp_path) -> None:
    torch.set_num_threads(1)
    unbroken = made(3)
    unbroken.fit(batches(6))
    expected = means_of(unbroken)
    of_ranks = run_ranks(trained, 2, str(tmp_path / "c"))
    found = {name: s for rank in of_ranks for name, s in rank.items()}
    assert found.keys() == expected.keys()
    for stages in (1, 2, 4):
        pipe = made(stages, seed=3)
        load(tmp_path / "c", pipe)
        pipe.fit(batches(6)[3:])
        for means in (found, means_of(pipe)):
            for name, s in expected.items():
                torch.testing.assert_close(means[name], s)


def test_what_is_of_no_parameter_must_be_alike_in_the_stages_that_are_joined(tmp_path) -> None:
    pipe = made(2)
    pipe.fit(batches(2))
    pipe._wires.stages[1].passes[0]._updates = 7
    save(tmp_path / "c", pipe)
    other = made(1, seed=2)
    other.fit(batches(1))
    before = means_of(other)
    why = "stages 0 and 1 have different states of Means, and stage 0 has parameters of both"
    with pytest.raises(CheckpointError, match=why):
        load(tmp_path / "c", other)
    assert all(torch.equal(before[name], s) for name, s in means_of(other).items())
    load(tmp_path / "c", other, only_model=True)  # and the pass begins anew
    assert not other._wires.stages[0].passes[0].state_dict()
    save(tmp_path / "d", other)
    load(tmp_path / "d", made(2))
