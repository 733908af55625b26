"""Tests what cannot be saved, and what does not fit where it is loaded: it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoint_cases import (
    batches,
    forge,
    halving,
    model,
    narrow,
    pipeline,
    refused,
    same,
    state_of,
    train,
)
from helpers.foreign_optimizers import FOREIGN, Counting, Lion, Projecting
from torch import nn
from torch.optim import lr_scheduler as schedules

import spectrain_ext as st
from spectrain_ext.checkpoint import CheckpointError, ShuffledSampler, load, save


def wider() -> nn.Sequential:
    found = model()
    found[2].linear = nn.Linear(4, 5)
    return found


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: model(blocks=3), r"has no '3\.linear\.weight', which stage 1 has"),
        (lambda: model(blocks=5), r"has '4\..*', which the model has not \(7 such tensors\)"),
        (wider, r"'2\.linear\.weight' has shape \[5, 4\], expected \[4, 4\]"),
        (model, "has no optimizer for stage 0; only_model=True loads without"),
        (lambda: pipeline(optimizer=FOREIGN["AdamW"], method="sync"), "a AdamW, expected a SGD"),
    ],
)
def test_another_model(
    tmp_path: Path, trained: st.Pipeline, make: Callable[[], nn.Module], match: str
) -> None:
    save(tmp_path / "c", make())
    refused(tmp_path / "c", match, trained)


def test_a_checkpoint_of_the_model_only(tmp_path: Path, trained: st.Pipeline) -> None:
    save(tmp_path / "c", pipeline(3), only_model=True)
    refused(tmp_path / "c", "has no optimizer for stage 0; only_model=True lo", trained)
    expected = {**state_of(trained), "model": dict(pipeline(3).state_dict())}
    assert not load(tmp_path / "c", trained, only_model=True).random
    same(state_of(trained), expected)


@pytest.mark.filterwarnings("ignore:.*rounded away")
def test_a_failure_after_everything_is_undone(tmp_path: Path) -> None:
    """State that is wider than its parameters too, which torch's load_state_dict would round."""

    def made(seed: int) -> st.Pipeline:
        pipe = pipeline(2, seed, optimizer=torch.optim.NAdam, method="vanilla", make=narrow)
        train(pipe, batches(2, dtype=torch.bfloat16))
        return pipe

    kept, pipe = made(0), made(1)
    save(tmp_path / "c", kept, sampler=ShuffledSampler(10, 3))
    other = ShuffledSampler(11, 3)
    match = "does not fit the sampler: samples: expected 11, got 10"
    refused(tmp_path / "c", match, pipe, sampler=other)
    assert other.position == 0
    load(tmp_path / "c", pipe)
    same(state_of(pipe), state_of(kept))
    save(tmp_path / "none", kept)
    refused(tmp_path / "none", "has no state of a sampler", pipe, sampler=other)


@pytest.mark.parametrize("master_dtype", [None, torch.float32])
def test_a_failure_of_the_last_part_is_undone(
    tmp_path: Path, master_dtype: torch.dtype | None
) -> None:
    """A module's own hook raises after the weights of the first stage are in place."""

    def made(seed: int) -> st.Pipeline:
        pipe = pipeline(2, seed, make=narrow, master_dtype=master_dtype)
        train(pipe, batches(3, dtype=torch.bfloat16))
        return pipe

    save(tmp_path / "c", made(0))
    trained = made(3)

    def refuse(*_: object) -> None:
        raise KeyError("not mine")

    list(trained.children())[-1].register_load_state_dict_post_hook(refuse)
    refused(tmp_path / "c", "does not fit stage 1: 'not mine'", trained)


def test_refused_while_a_run_is_under_way(saved: Path, trained: st.Pipeline) -> None:
    run = trained.run(batches(3))
    next(run)
    for action, path in ((save, saved.parent / "d"), (load, saved)):
        with pytest.raises(RuntimeError, match="a run of this pipeline has not ended"):
            action(path, trained)
    assert not (saved.parent / "d").exists()
    run.close()


# Schedulers


one_cycle = partial(schedules.OneCycleLR, max_lr=0.1, total_steps=99)
step = partial(schedules.StepLR, step_size=3)
exponential = partial(schedules.ExponentialLR, gamma=0.9)


def in_sequence(first: Any) -> Callable[[Any], schedules.SequentialLR]:
    return lambda o: schedules.SequentialLR(
        o, [first(o), schedules.ConstantLR(o, 1.0)], milestones=[3]
    )


@pytest.mark.parametrize(
    ("saved", "here", "change", "match"),
    [
        (one_cycle, one_cycle, lambda state: state.pop("total_steps"), "has no 'total_steps'"),
        (step, halving, None, "has no 'milestones', which MultiStepLR has; has 'step_size', which"),
        (step, exponential, None, "stage 0: has 'step_size', which ExponentialLR has not"),
        (in_sequence(step), in_sequence(exponential), None, "has 'step_size', which Sequ"),
    ],
)
def test_the_state_of_another_scheduler(
    tmp_path: Path, saved: Any, here: Any, change: Any, match: str
) -> None:
    """Some would fail in their first step, and some would silently continue with missing state."""
    save(tmp_path / "c", pipeline(2, scheduler=saved))
    if change is not None:
        forge(tmp_path / "c", lambda body: change(body["stages"][0]["scheduler"]))
    pipe = pipeline(2, seed=1, scheduler=here)
    train(pipe, batches(2))
    refused(tmp_path / "c", match, pipe)
    train(pipe, batches(2))


def test_schedulers_of_stages_that_differ_do_not_load_into_one(tmp_path: Path) -> None:
    kept = pipeline(2, scheduler=step)
    train(kept, batches(1))
    kept.schedulers[1].step()  # the learning rates are still the same
    save(tmp_path / "c", kept)
    match = "schedulers of its stages 0 and 1 differ, and stage 0 has parts of both"
    refused(tmp_path / "c", match, pipeline(1, scheduler=step))
    other = pipeline(2, seed=1, scheduler=step)
    load(tmp_path / "c", other)
    assert [each.last_epoch for each in other.schedulers] == [1, 2]


@pytest.mark.filterwarnings("ignore:the scheduler of stage 0")
def test_a_scheduler_that_is_added_begins(tmp_path: Path) -> None:
    """At its own learning rates, and with the saved momentum; a checkpoint's rate is another."""
    warmup = partial(schedules.LinearLR, start_factor=0.5, total_iters=4)
    kept = pipeline(2, scheduler=None)
    train(kept, batches(3))
    rates = [0.025, 0.03125, 0.0375, 0.04375, 0.05, 0.05]
    for optimizer in kept.optimizers:
        optimizer.param_groups[0]["lr"] = 0.01
    save(tmp_path / "c", kept)
    pipe = pipeline(2, seed=1, scheduler=warmup)
    train(pipe, batches(2))
    refused(tmp_path / "c", "has no state of a sampler", pipe, sampler=ShuffledSampler(8, 2))
    pipe = pipeline(2, seed=1, scheduler=warmup)
    with pytest.warns(UserWarning, match="the scheduler of stage 1 was saved without one: it begi"):
        assert load(tmp_path / "c", pipe) == st.checkpoint.Loaded(3, None, True)
    for rate, batch in zip(rates, batches(6, seed=2), strict=True):
        for by_hand, optimizer in zip(kept.optimizers, pipe.optimizers, strict=True):
            by_hand.param_groups[0]["lr"] = rate
            assert optimizer.param_groups[0]["lr"] == pytest.approx(rate, rel=1e-12)
        torch.testing.assert_close(train(pipe, [batch]), train(kept, [batch]))


def test_what_versions_add_to_a_scheduler(tmp_path: Path) -> None:
    plain, paced = (pipeline(2, scheduler=step, method=m) for m in ("vanilla", "pipemare"))
    for pipe, other in ((plain, paced), (paced, plain)):
        train(pipe, batches(2))
        save(tmp_path / pipe.method.name, pipe)

        def older(body: Any) -> None:
            del body["stages"][0]["scheduler"]["_is_initial"]
            body["stages"][1]["scheduler"]["_of_later"] = 3

        forge(tmp_path / pipe.method.name, older)
        load(tmp_path / pipe.method.name, other)
        train(other, batches(1))


# Optimizers


def test_options_that_an_optimizer_does_not_know(tmp_path: Path) -> None:
    def smoothed(params: Any) -> st.optim.SGD:
        return st.optim.SGD(params, lr=0.1, momentum=0.9, smoothed=True)

    save(tmp_path / "c", pipeline(2, optimizer=smoothed, scheduler=None))
    plain = model()
    for optimizer, match in (
        (torch.optim.SGD(plain.parameters(), momentum=0.9), "saved with smoothed=True, which this"),
        (torch.optim.AdamW(plain.parameters()), "stage 0 was a SGD, expected a AdamW"),
    ):
        with pytest.raises(CheckpointError, match=match):
            load(tmp_path / "c", plain, optimizer=optimizer)


def test_values_of_one_stage_do_not_load_into_parts_of_two(tmp_path: Path) -> None:
    kept, other = (pipeline(n, optimizer=Counting, method="sync") for n in (2, 1))
    train(kept, batches(1))
    kept.optimizers[0].state["total"] = 7
    save(tmp_path / "state", kept)
    kept.optimizers[0].param_groups[0]["powers"] = torch.zeros(3)
    save(tmp_path / "group", kept)
    for name, match in (("state", "the state of .* with state="), ("group", "with powers=")):
        refused(tmp_path / name, f"{match}.*load into the saved stages", other)


# What cannot be saved


class Peculiar(Lion):
    """Has more state than Lion."""

    def __init__(self, params: Any, kept: object = None) -> None:
        super().__init__(params)
        self.kept = kept

    def step(self) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            if isinstance(self.kept, bytes):
                self.state[p] = {1: 2}
            else:
                self.state[p]["more"] = self.kept


class Own(Lion):
    def state_dict(self) -> Any:
        return {"whole": super().state_dict()}


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"x": 1}


class Scaled(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = torch.ones(())


def by(optimizer: Any, *args: Any) -> st.Pipeline:
    pipe = pipeline(2, optimizer=lambda params: optimizer(params, *args), method="vanilla")
    train(pipe, batches(1))
    return pipe


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: by(Peculiar, object()), r"stage 0: 0\.linear\.weight\.more: .*ns\.object"),
        (lambda: by(Peculiar, b""), r"stage 0: 0\.linear\.weight: its state is not a dict"),
        (lambda: by(Projecting), r"0\.linear\.weight\.projector: .*\.Projecting\.Projector"),
        (lambda: by(Own), r"stage 0: the state_dict\(\) of a Own has not the form"),
        (lambda: Extra(1, 1), "'_extra_state' in its state_dict is a dict"),
        (lambda: Scaled(4, 4), r"Scaled refuses to load 'scale'.* trained"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, make: Callable[[], nn.Module], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        save(tmp_path / "c", make())
    assert not list(tmp_path.iterdir())


def test_arguments_that_do_not_go_together(tmp_path: Path, trained: st.Pipeline) -> None:
    with pytest.raises(ValueError, match="optimizer, scheduler: a pipeline has its own"):
        save(tmp_path / "c", trained, optimizer=trained.optimizers[0])
    save(tmp_path / "c", trained)
    with pytest.raises(FileExistsError, match=r"path: .* exists; overwrite=True replaces it"):
        save(tmp_path / "c", trained)
    save(tmp_path / "c", trained, overwrite=True, minibatches=8)
    assert load(tmp_path / "c", trained).minibatches == 8
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
