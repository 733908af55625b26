"""Tests what a caller does in the loop of a run, as in a plain one, and between runs."""

from __future__ import annotations

import copy
from contextlib import closing

import pytest
import torch
from helpers.pipeline_cases import (
    Compared,
    batches,
    close,
    every_method,
    losses,
    mse,
    sgd,
    tanh_stages,
    torch_sgd,
)
from helpers.random_settings import PREVIOUS
from torch import nn
from torch.func import functional_call
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.optim.swa_utils import AveragedModel

import spectrain_ext as st

pytestmark = pytest.mark.usefixtures("float64")


def same(found, expected):
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)


@every_method
def test_state_dict_of_a_suspended_run_has_the_true_weights(method):
    stages = [nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(4)]
    stages[3][0].weight = stages[0][0].weight
    compared, data, updates = Compared(stages, method), batches(10), [0] * 4
    compared.oracle.run(data)
    for k, opt in enumerate(compared.pipe.optimizers):
        opt.register_step_post_hook(lambda *_, k=k: updates.__setitem__(k, updates[k] + 1))
    for result in compared.pipe.run(data):
        state = compared.pipe.state_dict(prefix="model.")
        for k, (stage, made) in enumerate(zip(compared.oracle.stages, updates, strict=True)):
            places = {p: i for i, p in enumerate(compared.oracle.params[k])}
            for name, p in stage.named_parameters():
                if p in places:
                    row = compared.oracle.versions[k][made][places[p]]
                    close(state[f"model.{k}.{name}"], row.weight)
        assert torch.equal(state["model.3.0.weight"], state["model.0.0.weight"])
        with compared.pipe.weights():
            model = copy.deepcopy(nn.Sequential(*compared.pipe.children()))
        same(model.state_dict(prefix="model."), state)
        if result.index == 6:
            snapshot = state
            copied = {name: tensor.clone() for name, tensor in state.items()}
    for name, tensor in snapshot.items():
        assert torch.equal(tensor, copied[name])  # later updates do not change it
    same(compared.pipe.state_dict(), nn.Sequential(*compared.pipe.children()).state_dict())


ADAMW = {"lr": 0.05, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("make", "method", "dtype"),
    [
        (sgd(), "spectrain", torch.float64),
        (sgd(), "vanilla", torch.float64),  # no master: the newest version is the true one
        (torch_sgd(), "pipedream", torch.float64),
        (lambda params: st.optim.AdamW(params, **ADAMW), "auto", torch.bfloat16),
        (lambda params: torch.optim.AdamW(params, **ADAMW), "auto", torch.bfloat16),
    ],
)
def test_a_run_goes_on_to_the_bit_after_blocks_with_the_true_weights(make, method, dtype):
    """Inside, the model is averaged, copied, saved and called; and all blocks may be nested."""
    stages = nn.Sequential(*tanh_stages(4)).to(dtype)
    stages[3][2].weight = stages[0][0].weight
    master = None if dtype is torch.float64 else torch.float32
    more = {"microbatches": 2, "master_dtype": master}
    plain, pipe = (st.Pipeline(copy.deepcopy(stages), make, mse, method, **more) for _ in range(2))
    model = nn.Sequential(*pipe.children())
    average, mean = AveragedModel(model), {}
    data = [(x.to(dtype), y.to(dtype)) for x, y in batches(10, size=4)]
    pairs = zip(pipe.run(data), plain.run(data), strict=True)
    for n, (result, other) in enumerate(pairs):
        assert torch.equal(result.loss, other.loss)
        state = pipe.state_dict()
        for name, value in state.items():
            mean[name] = value if n == 0 else mean[name] + (value - mean[name]) / (n + 1)
        with pipe.weights():
            average.update_parameters(model)
            with pipe.weights():
                same(pipe.state_dict(), state)
            same(copy.deepcopy(model).state_dict(), state)
            same(model.state_dict(), state)
            with torch.no_grad():
                output = model(data[0][0])
        assert torch.equal(output, functional_call(model, state, data[0][0]))
        with pytest.raises(
            RuntimeError, match=r"do this inside `with pipe\.weights\(\):`, or take"
        ):
            model.state_dict()
    same(average.module.state_dict(), mean)
    same(pipe.state_dict(), plain.state_dict())
    with pipe.weights():  # between two runs it changes nothing
        same(model.state_dict(), pipe.state_dict())


class Counting(nn.Module):
    """Adds a number to a weight in each forward, which changes no output."""

    def __init__(self, width=5):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.count = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        with torch.no_grad():
            self.count += 0.25
        return self.inner(x).tanh() + 0 * self.count.sum()


OTHER_OPTIMIZERS = {
    "spectrain-smoothed": sgd(smoothed=True),
    "error-feedback": torch_sgd(),
}


@pytest.mark.parametrize(
    "more", [{}, {"recompute": True}, {"master_dtype": torch.float32}], ids=str
)
@pytest.mark.parametrize("method", [each for each in st.methods() if each != "xgrad"])
def test_true_weights_follow_what_modules_write_in_forwards(method, more):
    narrow = "master_dtype" in more
    dtype = torch.bfloat16 if narrow else torch.float64
    stages = nn.Sequential(*(Counting() for _ in range(3))).to(dtype)
    m = 3 if method in PREVIOUS else 2
    make = OTHER_OPTIMIZERS.get(method, sgd())
    pipe = st.Pipeline(stages, make, mse, method, microbatches=m, **more)
    data = [(x.to(dtype), y.to(dtype)) for x, y in batches(5, size=m, last=1)]
    for runs in range(1, 3):
        for result in pipe.run(data):
            with pipe.weights():
                counts = [float(stage.count.detach()[0]) for stage in stages]
            assert min(counts) >= 0.25 * (m * (result.index + 1) - (result.index == 4) * (m - 1))
        forwards = (4 * m + 1) * (2 if "recompute" in more else 1) * runs
        for stage in stages:
            assert stage.count.tolist() == [0.25 * forwards] * 3


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        *((method, torch.float64) for method in ("1f1b", "auto", "spectrain", "pipedream-2bw")),
        *((method, torch.bfloat16) for method in ("1f1b", "zb-h1-async")),
    ],
)
def test_embeddings_keep_their_largest_norm(method, dtype):
    """After a step of rate 0 the true rows are those of the last forward."""
    stages = [nn.Embedding(6, 5, max_norm=1.0), *tanh_stages(2)]
    stages = nn.Sequential(*stages).to(dtype)
    more = {"master_dtype": None if dtype is torch.float64 else torch.float32}
    pipe = st.Pipeline(stages, sgd(lr=0.5), mse, method, microbatches=3, **more)
    words = torch.arange(6).repeat(4, 1).T.flatten()
    data = [(words, 9 * torch.randn(24, 5).to(dtype)) for _ in range(12)]
    losses(pipe, data)
    for optimizer in pipe.optimizers:
        optimizer.param_groups[0].update(lr=0.0)
    losses(pipe, data)
    norms = stages[0].weight.norm(dim=1)
    assert norms.amax() <= 1.0 + (1e-6 if dtype is torch.float64 else 0.01)
    assert norms.amax() > 0.9  # the bound acts


def test_a_forward_that_begins_to_write_weights_late_is_refused():
    class Late(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 3:
                with torch.no_grad():
                    self.weight.mul_(0.5)
            return super().forward(x)

    stages = [*tanh_stages(1), Late(5, 5), *tanh_stages(1)]
    pipe = st.Pipeline(stages, sgd(), mse, "spectrain")
    match = "stage 1, minibatch 2, .*parameter 'weight' was changed in place, in a forward but not"
    with pytest.raises(st.StageError, match=match):
        losses(pipe, batches(6))
    losses(pipe, batches(6))  # it can run again


@pytest.mark.parametrize("method", ["auto", "1f1b", "pipedream-2bw", "spectrain"])
@pytest.mark.parametrize("how", ["in place", "data", "data in a block"])
def test_weights_that_are_changed_in_the_loop(method, how):
    """Autograd's anomaly mode finds what no counter tells of."""
    stages = tanh_stages(3)
    pipe, given = st.Pipeline(stages, sgd(), mse, method), batches(8)
    weight = stages[1][0].weight

    def train():
        for result in pipe.run(given):
            if result.index == 3:
                with pipe.weights() if "block" in how else torch.no_grad():
                    (weight if how == "in place" else weight.data).mul_(0.5)

    with torch.autograd.set_detect_anomaly(how != "in place", check_nan=False):
        if method == "1f1b":  # computes with the true weights
            train()
        else:
            match = r"stages\[1\]: parameter '0\.weight' was changed in place, and the true weights"
            with pytest.raises(RuntimeError, match=match):
                train()
    losses(pipe, given)


@pytest.mark.parametrize("scope", ["own", "global"])
@pytest.mark.parametrize("method", ["auto", "1f1b", "error-feedback", "spectrain"])
def test_hooks_of_steps_have_the_true_weights(method, scope):
    """They read what the last one left, although forwards had other weights in between."""
    stages = nn.Sequential(*tanh_stages(3)).to(torch.bfloat16)
    pipe = st.Pipeline(stages, sgd(lr=0.5), mse, method, master_dtype=torch.float32)
    seen, handles = set(), []

    def before(optimizer, *_):
        seen.update(p.abs().amax().item() > 0.25 for p in optimizer.param_groups[0]["params"])

    def after(optimizer, *_):
        for p in optimizer.param_groups[0]["params"]:
            p.data.clamp_(-0.25, 0.25)

    for p in stages.parameters():
        p.data.clamp_(-0.25, 0.25)
    if scope == "own":
        for optimizer in pipe.optimizers:
            optimizer.register_step_pre_hook(before)
            optimizer.register_step_post_hook(after)
    else:
        handles = [register_optimizer_step_pre_hook(before)]
        handles += [register_optimizer_step_post_hook(after)]
    try:
        losses(pipe, [(x.bfloat16(), 4 * y.bfloat16()) for x, y in batches(12)])
    finally:
        for handle in handles:
            handle.remove()
    assert seen == {False}
    bound = torch.tensor(0.25)
    masters = pipe.masters()
    assert all(master.abs().amax() <= bound for master in masters.values())
    assert any(master.abs().amax() == bound for master in masters.values())
    assert all(torch.equal(p, masters[p].bfloat16()) for p in stages.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_must_not_happen_in_a_block_with_the_true_weights(dtype):
    stages = nn.Sequential(*tanh_stages(3)).to(dtype)
    master = None if dtype is torch.float64 else torch.float32
    pipe = st.Pipeline(stages, sgd(), mse, "spectrain", master_dtype=master)
    data = [(x.to(dtype), y.to(dtype)) for x, y in batches(8)]
    losses(pipe, data)

    with closing(pipe.run(data)) as run:
        next(run)
        match = r"weights: stages\[1\]: parameter '2\.bias' was changed in place, and predictions"
        with pytest.raises(RuntimeError, match=match), pipe.weights():
            stages[1][2].bias.data.zero_()  # nothing reports this
            nn.init.zeros_(stages[1][2].bias)
        with pytest.raises(ZeroDivisionError), pipe.weights():
            stages[1][2].bias.data.add_(1 / 0)
        next(run)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ends", ["next", "close", "release"])
def test_a_run_that_goes_on_or_ends_ends_the_block_with_the_true_weights(ends, dtype):
    stages = nn.Sequential(*tanh_stages(3)).to(dtype)
    more = {"master_dtype": None if dtype is torch.float64 else torch.float32}
    plain, pipe = (
        st.Pipeline(copy.deepcopy(stages), sgd(), mse, "spectrain", **more) for _ in range(2)
    )
    data = [(x.to(dtype), y.to(dtype)) for x, y in batches(8)]
    model, runs = nn.Sequential(*pipe.children()), [each.run(data) for each in (plain, pipe)]
    for run in runs:
        next(run)
    with pipe.weights():
        inside = copy.deepcopy(model)
        if ends == "next":
            assert torch.equal(*(next(run).loss for run in runs))
            with pytest.raises(RuntimeError, match="do this inside"):
                copy.deepcopy(model)
        else:
            for run in runs:
                run.close()
        if ends == "release":
            pipe.release()
            plain.release()
    if ends == "next":
        assert torch.equal(*(torch.stack([result.loss for result in run]) for run in runs))
    same(pipe.state_dict(), plain.state_dict())
    same(pipe.state_dict(), model.state_dict())
    assert not all(map(torch.equal, model.parameters(), inside.parameters()))
    assert torch.equal(*(torch.stack(losses(each, data)) for each in (plain, pipe)))


def refused(pipe):
    """Return the calls that a run refuses, with their names."""
    yield from (("step", optimizer.step) for optimizer in pipe.optimizers)
    yield from (("zero_grad", optimizer.zero_grad) for optimizer in pipe.optimizers)
    yield from (("step", scheduler.step) for scheduler in pipe.schedulers)
    yield "zero_grad", pipe.zero_grad


def has_no_effect(pipe):
    nn.utils.clip_grad_norm_(pipe.parameters(), 1e-3)
    for stage in pipe.children():
        stage.zero_grad()
    for each in (*pipe.optimizers, *pipe.schedulers):
        copy.deepcopy(each.state_dict())
    for optimizer, scheduler in zip(pipe.optimizers, pipe.schedulers, strict=True):
        assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]
        assert "step" not in scheduler.state_dict()
        assert isinstance(scheduler, ExponentialLR)
        assert type(scheduler).__name__ == "ExponentialLR"
        optimizer.param_groups[0]["lr"] *= 1
        torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    pipe.state_dict()
    # A model of the caller's own, and gradients that reach no parameter.
    loss = sum(p.square().sum() for p in pipe.parameters())
    torch.autograd.grad(loss, list(pipe.parameters()))
    assert all(p.grad is None for p in pipe.parameters())


@pytest.mark.parametrize(("make", "method"), [(sgd(), "auto"), (torch_sgd(), "1f1b")])
def test_habits_of_a_plain_loop_change_nothing(make, method):
    """They are refused, or have no effect; the run goes on, also where the caller leaves it."""
    more = {"scheduler": lambda o: ExponentialLR(o, 0.9), "microbatches": 2}
    stages = tanh_stages(3)
    pipes = [st.Pipeline(copy.deepcopy(stages), make, mse, method, **more) for _ in range(2)]
    pipe, other = pipes
    data = batches(8, size=4)
    steps = [vars(each)["step"] for each in pipe.optimizers]  # the schedulers have wrapped them
    for n, (found, expected) in enumerate(zip(*(pipe.run(data) for pipe in pipes), strict=True)):
        assert torch.equal(found.loss, expected.loss)
        for name, call in refused(pipe):
            match = rf"^{name}: a run of the pipeline has not ended; .* docs/loops\.md"
            with pytest.raises(RuntimeError, match=match):
                call()
        has_no_effect(pipe)
        if n == 6:
            break
    same(pipe.state_dict(), other.state_dict())
    rates = [[each.param_groups[0]["lr"] for each in one.optimizers] for one in pipes]
    assert rates[0] == rates[1]
    for scheduler in pipe.schedulers:
        assert type(scheduler) is ExponentialLR
    for optimizer, step in zip(pipe.optimizers, steps, strict=True):
        assert vars(optimizer)["step"] is step
    for _, call in refused(pipe):
        call()


@pytest.mark.parametrize("make", [sgd(), torch_sgd()])
def test_a_gradient_that_the_caller_makes_ends_the_run(make):
    pipe = st.Pipeline(tanh_stages(3), make, mse, "1f1b", microbatches=2)
    data = batches(6, size=4)
    losses(pipe, data)
    match = r"stages\[1\]: parameter '2\.weight' got a gradient in the loop, as by backward\(\)"
    for leaves in (False, True):
        run = pipe.run(data)
        next(run)
        next(run)
        list(pipe.children())[1][2].weight.square().sum().backward()
        with pytest.raises(RuntimeError, match=match):
            run.close() if leaves else next(run)
        assert all(p.grad is None for p in pipe.parameters())
        for _, call in refused(pipe):
            call()
        fresh = st.Pipeline(copy.deepcopy(list(pipe.children())), make, mse, "1f1b", microbatches=2)
        assert torch.equal(losses(pipe, data)[0], losses(fresh, data)[0])


def test_what_a_suspended_run_forbids():
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse)
    state = copy.deepcopy(pipe.state_dict())
    match = r"a run of this pipeline has not ended.*close\(\)"
    with closing(pipe.run(batches(8))) as results:
        next(results)
        for forbidden in (
            lambda: pipe(torch.randn(2, 5)),
            lambda: pipe.load_state_dict(state),
            lambda: nn.Sequential(pipe).load_state_dict({f"0.{k}": v for k, v in state.items()}),
            lambda: pipe.run(batches(1)),
            pipe.release,
        ):
            with pytest.raises(RuntimeError, match=match):
                forbidden()
    pipe.load_state_dict(state)
    same(pipe.state_dict(), state)
    pipe(torch.randn(2, 5))


@pytest.mark.parametrize(
    ("make", "whole", "thaws"),
    [
        (sgd(), False, True),
        (sgd(), True, False),
        (torch_sgd(), True, True),
        (torch_sgd(), False, False),
    ],
)
def test_freezing_and_unfreezing_are_refused_and_a_new_pipeline_continues(
    make, whole, thaws, tmp_path
):
    stages = tanh_stages(3)
    changed = stages[0] if whole else stages[0][0].weight
    changed.requires_grad_(not thaws)
    pipe = st.Pipeline(stages, make, mse, "pipedream")
    losses(pipe, batches(4))
    st.checkpoint.save(tmp_path / "c", pipe)
    weights = copy.deepcopy(pipe.state_dict())
    changed.requires_grad_(thaws)
    name, flag = "0.bias" if whole else "0.weight", "unfrozen" if thaws else "frozen"
    match = (
        rf"stages\[0\]: parameter '{name}' was {flag} since the pipeline was made; save a "
        r"checkpoint, release\(\) this pipeline, make a new one"
    )
    for between in (list, lambda: pipe.evaluate(batches(1)), pipe.release):
        between()
        with pytest.raises(RuntimeError, match=match):
            losses(pipe, batches(2))
        same(pipe.state_dict(), weights)
        assert pipe.minibatches == 4
    made = st.Pipeline(stages, make, mse, "pipedream")
    if whole and thaws:
        match = "has no optimizer for stage 0; only_model=True loads without"
        with pytest.raises(st.CheckpointError, match=match):
            st.checkpoint.load(tmp_path / "c", made)
        return
    st.checkpoint.load(tmp_path / "c", made)
    losses(made, batches(4))
    still = {name for name, p in made.named_parameters() if torch.equal(p, weights[name])}
    assert still == {name for name, p in made.named_parameters() if not p.requires_grad}


def test_new_parameters_are_refused_and_frozen_ones_are_not():
    pipe = st.Pipeline(stages := tanh_stages(2), sgd(), mse)
    stages[1].append(nn.Linear(5, 5))
    with pytest.raises(RuntimeError, match=r"stages\[1\]: parameter '4.bias' was unfrozen"):
        losses(pipe, batches(1))
    stages[1][4].requires_grad_(False)
    losses(pipe, batches(1))


def test_a_tied_weight_is_refused_where_it_is_trained():
    stages = tanh_stages(3)
    stages[2][0].weight = stages[0][0].weight
    pipe = st.Pipeline(stages, sgd(), mse)
    for k in (2, 0):
        stages[k][0].weight.requires_grad_(False)
        with pytest.raises(RuntimeError, match=rf"stages\[{k}\]: parameter '0.weight' was frozen"):
            losses(pipe, batches(1))
        stages[k][0].weight.requires_grad_(True)
    losses(pipe, batches(2))
