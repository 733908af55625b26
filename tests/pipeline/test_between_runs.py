"""Tests freezing, unfreezing and new learning rates between two runs."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.pipeline_cases import (
    METHODS,
    batches,
    close,
    float64,  # noqa: F401  # a fixture
    losses,
    mse,
    sgd,
    tanh_stages,
    torch_sgd,
)
from torch import nn
from torch.optim.lr_scheduler import StepLR

import spectrain_ext as st

DECAY = {"weight_decay": 0.01}
MAKERS = {
    "ours": sgd(**DECAY),
    "torch's": torch_sgd(**DECAY),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.2),
}


def freeze(module, *names):
    for name, p in module.named_parameters():
        p.requires_grad_(name not in names)


def states(pipe):
    """Return the state of every parameter by stage and name."""
    found = {}
    optimizers = {p: o for o in pipe.optimizers for g in o.param_groups for p in g["params"]}
    for name, p in pipe.named_parameters():
        if p in optimizers and p in optimizers[p].state:
            found[name] = dict(optimizers[p].state[p])
    return found


def fresh(pipe, make, method, **more):
    """Return another pipeline that continues from this one."""
    known = copy.deepcopy(states(pipe))
    made = st.Pipeline(copy.deepcopy(list(pipe.children())), make, mse, method, **more)
    made.minibatches = pipe.minibatches
    names = {p: name for name, p in made.named_parameters()}
    for optimizer in made.optimizers:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        state = {n: known[names[p]] for n, p in enumerate(params) if names[p] in known}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    for ours, theirs in zip(made.schedulers, pipe.schedulers, strict=True):
        ours.load_state_dict(theirs.state_dict())
    return made


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("scheduler", [None, lambda optimizer: StepLR(optimizer, 3, 0.7)])
def test_as_in_the_uncut_model(make, scheduler):
    make = MAKERS[make]
    model = nn.Sequential(*tanh_stages(3))
    alone = copy.deepcopy(model)
    frozen = ["0.0.weight", "1.0.bias", *(f"2.{n}.{what}" for n in (0, 2) for what in KINDS)]
    freeze(model, *frozen)
    pipe = st.Pipeline(list(model), make, mse, "1f1b", scheduler=scheduler, microbatches=1)
    theirs = MAKERS["torch's"] if make is MAKERS["ours"] else make
    optimizer = theirs(list(alone.parameters()))
    rates = None if scheduler is None else scheduler(optimizer)
    before = pipe.optimizers
    for now in (frozen, [], ["0.0.bias", "2.2.weight"], ["0.0.bias", "1.0.weight"], []):
        freeze(model, *now)
        freeze(alone, *now)
        data = batches(4)
        for (value, target), loss in zip(data, losses(pipe, data), strict=True):
            optimizer.zero_grad()
            expected = mse(alone(value), target)
            expected.backward()
            optimizer.step()
            if rates is not None:
                rates.step()
            close(loss, expected.detach())
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            close(p, q)
    assert len(pipe.optimizers) == 3
    assert all(a is b for a, b in zip(pipe.optimizers, before, strict=False))


KINDS = ("weight", "bias")


@pytest.mark.parametrize("method", [*METHODS, "auto", "pipeoptim", "pipemare", "pipedream-2bw"])
def test_versions_of_what_trains_now(method):
    """The next run equals that of a new pipeline of the trainable parameters, with predictions."""
    make = sgd(**DECAY)
    pipe = st.Pipeline(tanh_stages(3), make, mse, method)
    freeze(pipe, "2.0.weight")
    losses(pipe, batches(6))
    for now in (["0.0.weight", "1.2.bias"], ["1.2.bias", "2.0.bias"], []):
        freeze(pipe, *now)
        other = fresh(pipe, make, method)
        held = {name: p.detach().clone() for name, p in pipe.named_parameters() if name in now}
        data = batches(6)
        for found, expected in zip(losses(pipe, data), losses(other, data), strict=True):
            close(found, expected)
        for (name, p), q in zip(pipe.named_parameters(), other.parameters(), strict=True):
            close(p, q)
            if name in held:
                assert torch.equal(p, held[name])


def test_a_stage_with_nothing_to_train_gets_an_optimizer_and_phases_know_it():
    stages = tanh_stages(2)
    stages[0].requires_grad_(False)
    method = st.hybrid("spectrain", "1f1b", after=6)
    pipe = st.Pipeline(stages, sgd(), mse, method, scheduler=lambda o: StepLR(o, 3, 0.5))
    assert len(pipe.optimizers) == 1
    losses(pipe, batches(4))
    stages[0].requires_grad_(True)
    for _ in range(2):
        before = copy.deepcopy(pipe.state_dict())
        losses(pipe, batches(4))
        assert len(pipe.optimizers) == 2
        assert not any(torch.equal(p, before[name]) for name, p in pipe.state_dict().items())
    assert pipe.phase == 1
    rates = [optimizer.param_groups[0]["lr"] for optimizer in pipe.optimizers]
    assert rates == [0.05 / 16] * 2  # after 12 updates


@pytest.mark.parametrize("kind", [st.optim.SGD, torch.optim.SGD])
def test_new_parameters_join_the_group_that_the_factory_gives_them(kind):
    def make(params):
        kinds = [[p for p in params if (p.dim() > 1) == wide] for wide in (True, False)]
        groups = [{"params": p, "weight_decay": d} for p, d in zip(kinds, (0.1, 0.0), strict=True)]
        return kind([group for group in groups if group["params"]], lr=0.1, momentum=0.9)

    (stage,) = tanh_stages(1)
    freeze(stage, "2.bias", "0.weight", "2.weight")
    pipe = st.Pipeline([stage], make, mse, "1f1b", microbatches=1)
    (optimizer,) = pipe.optimizers
    optimizer.param_groups[0]["lr"] = 0.01
    losses(pipe, batches(2))
    freeze(stage)
    before = copy.deepcopy(stage.state_dict())
    losses(pipe, batches(2))
    assert pipe.optimizers == [optimizer]
    found = [(len(g["params"]), g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [(2, 0.1, 0.1), (2, 0.01, 0.0)]
    assert not any(torch.equal(p, before[name]) for name, p in stage.state_dict().items())
    # In the order of a newly made pipeline.
    (wanted,) = st.Pipeline([copy.deepcopy(stage)], make, mse).optimizers
    for group, other in zip(optimizer.param_groups, wanted.param_groups, strict=True):
        assert [p.shape for p in group["params"]] == [p.shape for p in other["params"]]


def test_a_group_that_the_scheduler_does_not_know_is_refused():
    def make(params):
        return torch.optim.SGD([{"params": [p]} for p in params], lr=0.1)

    stages = tanh_stages(2)
    freeze(stages[0], "0.bias")
    pipe = st.Pipeline(stages, make, mse, "1f1b", scheduler=lambda o: StepLR(o, 3))
    before = copy.deepcopy(pipe.state_dict())
    freeze(stages[0])
    match = r"stages\[0\]: parameter '0.bias' has become trainable, in a parameter group that the"
    for _ in range(2):
        with pytest.raises(ValueError, match=match):
            losses(pipe, batches(2))
    assert [len(each.param_groups) for each in pipe.optimizers] == [3, 4]
    freeze(stages[0], "0.bias")
    losses(pipe, batches(2))
    assert torch.equal(pipe.state_dict()["0.0.bias"], before["0.0.bias"])


@pytest.mark.parametrize("make", [sgd(), torch_sgd()])
def test_masters_and_their_state_keep_their_digits(make):
    stages = [stage.bfloat16() for stage in tanh_stages(2)]
    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches(5)]
    freeze(stages[0], "0.weight")
    pipe = st.Pipeline(stages, make, mse, "1f1b", master_dtype=torch.float32)
    losses(pipe, data)
    before = {p: master.clone() for p, master in pipe.masters().items()}
    state = copy.deepcopy(states(pipe))
    assert all(entry["momentum_buffer"].dtype == torch.float32 for entry in state.values())
    for frozen, masters in (("0.weight", "2.weight"), 7), (("2.weight",), 8):
        freeze(stages[0], *frozen)
        losses(pipe, [])
        now = pipe.masters()
        assert len(now) == masters
        assert all(torch.equal(now[p], master) for p, master in before.items())
        for name, entry in state.items():
            assert torch.equal(states(pipe)[name]["momentum_buffer"], entry["momentum_buffer"])


@pytest.mark.parametrize("method", ["1f1b", "spectrain"])
def test_a_stage_that_is_frozen_as_a_whole(method):
    more = {"recompute": True, "clip_norm": 0.1, "microbatches": 2}
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse, method, **more)
    losses(pipe, batches(4))
    for frozen in ([0], [0, 1], [2]):
        for k, stage in enumerate(pipe.children()):
            stage.requires_grad_(k not in frozen)
        other = fresh(pipe, sgd(), method, **more)
        assert len(other.optimizers) == 3 - len(frozen)
        before = copy.deepcopy(pipe.state_dict())
        data = batches(4)
        for found, expected in zip(losses(pipe, data), losses(other, data), strict=True):
            close(found, expected)
        for (name, p), q in zip(pipe.named_parameters(), other.parameters(), strict=True):
            close(p, q)
            assert torch.equal(p, before[name]) == (int(name[0]) in frozen)


def test_what_is_unfrozen_within_a_run_waits_for_the_next():
    stages = tanh_stages(2)
    freeze(stages[1], "0.weight")
    weight = stages[1][0].weight
    before = weight.detach().clone()
    pipe = st.Pipeline(stages, sgd(), mse, "1f1b")
    for result in pipe.run(batches(4)):
        if result.index == 1:
            weight.requires_grad_(True)
    assert torch.equal(weight, before)
    losses(pipe, batches(1))
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("method", ["1f1b", "auto"])
def test_a_tied_weight(method):
    model = nn.Sequential(*tanh_stages(3))
    model[2][0].weight = model[0][0].weight
    alone = copy.deepcopy(model)
    model[0][0].weight.requires_grad_(False)
    pipe = st.Pipeline(list(model), sgd(), mse, method, microbatches=1)
    optimizer = torch_sgd()(list(alone.parameters()))
    before = model[0][0].weight.detach().clone()
    for frozen in (True, False, True):
        model[0][0].weight.requires_grad_(not frozen)
        alone[0][0].weight.requires_grad_(not frozen)
        data = batches(4)
        found = losses(pipe, data)
        assert torch.equal(model[2][0].weight, model[0][0].weight)
        assert frozen or not torch.equal(model[0][0].weight, before)
        for value, target in data if method == "1f1b" else ():
            optimizer.zero_grad()
            expected = mse(alone(value), target)
            expected.backward()
            optimizer.step()
            close(found.pop(0), expected.detach())
    model[2][0].weight.requires_grad_(True)
    losses(pipe, batches(1))  # the first stage's weight counts
    assert not model[2][0].weight.requires_grad


# Rates, and other numbers of parameter groups


def adam(**changed):
    return lambda params: st.optim.AdamW(params, **{"lr": 0.05, **changed})


def by_steps(optimizer):
    return StepLR(optimizer, 4, 0.5)


@pytest.mark.parametrize("scheduler", [None, by_steps])
@pytest.mark.parametrize(
    ("method", "make", "changed"),
    [
        *((method, sgd, {"lr": 0.01}) for method in ("1f1b", "auto", "spectrain", "pipedream")),
        *((method, adam, {"lr": 0.2}) for method in ("1f1b", "auto", "xpipe", "pipedream")),
        ("spectrain", sgd, {"momentum": 0.5, "weight_decay": 0.1}),
        (st.spectrain(law="difference"), torch_sgd, {"lr": 0.01}),
    ],
)
def test_numbers_of_groups_hold_from_the_next_run_on(method, make, changed, scheduler):
    more = {"scheduler": scheduler, "microbatches": 1}
    pipe = st.Pipeline(tanh_stages(3), make(), mse, method, **more)
    losses(pipe, batches(6))
    scale = 1.0 if scheduler is None else 0.5  # the scheduler's present factor
    for optimizer in pipe.optimizers:
        for group in optimizer.param_groups:
            group.update(changed)
    rate = changed.get("lr", 0.05 * scale)
    other = fresh(pipe, make(**{**changed, "lr": rate}), method, **more)
    for optimizer in other.optimizers:
        for group in optimizer.param_groups:  # as a new scheduler leaves it
            group["lr"] = rate
    data = batches(6)
    for found, expected in zip(losses(pipe, data), losses(other, data), strict=True):
        close(found, expected)
    for p, q in zip(pipe.parameters(), other.parameters(), strict=True):
        close(p, q)
    found = {group["lr"] for o in pipe.optimizers for group in o.param_groups}
    assert found == {rate * scale * scale}  # after 12 updates
