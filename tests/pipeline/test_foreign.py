"""Tests optimizers from outside the package with every method that supports them."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.foreign_optimizers import (
    FOREIGN,
    PECULIAR,
    Bare,
    Lion,
    Replacing,
    Together,
    muon_and_adamw,
)
from helpers.pipeline_cases import Compared, batches, close, losses, mse, tanh_stages
from oracle.definition import Oracle

import spectrain_ext as st

pytestmark = pytest.mark.usefixtures("float64")

DIFFERENCE = st.spectrain(law="difference")


def test_the_optimizers_are_the_users_own():
    made = []

    def optimizer(params):
        made.append(muon_and_adamw(params))
        return made[-1]

    def halved(opt):
        return torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)

    pipe = st.Pipeline(tanh_stages(2), optimizer, mse, "lwp-w", scheduler=halved)
    assert all(map(lambda a, b: a is b, pipe.optimizers, made))
    assert all(s.optimizer is o for s, o in zip(pipe.schedulers, made, strict=True))
    losses(pipe, batches(2))
    assert [g["lr"] for g in made[0].parts[1].param_groups] == [0.01 / 4]


class Failing(Lion):
    """Raises after its first parameter in one step."""

    def __init__(self, params, fails_at):
        super().__init__(params, lr=0.01)
        self.left = fails_at

    def step(self):
        self.left -= 1
        if self.left == 0:
            self.param_groups[0]["params"][0].data.mul_(2)
            raise ArithmeticError("planned")
        super().step()


@pytest.mark.parametrize("kind", ["vanilla", "pipedream", "lwp-w"])
def test_a_step_that_raises(kind):
    stages, data = tanh_stages(3), batches(9)
    made = []

    def optimizer(params):
        made.append(Failing(params, 4 if len(made) == 1 else 0))
        return made[-1]

    pipe = st.Pipeline(copy.deepcopy(stages), optimizer, mse, kind)
    with pytest.raises(st.StageError, match=r"(?s)planned; the step of Failing was cut short") as e:
        losses(pipe, data)
    assert (e.value.stage, e.value.action) == (1, "update")
    assert type(e.value.__cause__) is ArithmeticError
    check_own_storage(pipe)
    weights = copy.deepcopy(pipe.state_dict())
    state = [copy.deepcopy(o.state_dict()) for o in pipe.optimizers]
    again = losses(pipe, data[:3])
    other = st.Pipeline(stages, lambda p: Lion(p, lr=0.01), mse, kind)
    other.load_state_dict(weights)
    for mine, theirs in zip(other.optimizers, state, strict=True):
        mine.load_state_dict(theirs)
    assert losses(other, data[:3]) == again


def check_own_storage(pipe):
    """Check that each stage's parameters are in one buffer of the pipeline's."""
    for stage in pipe.children():
        assert len({p.untyped_storage().data_ptr() for p in stage.parameters()}) == 1


def test_data_of_another_shape_is_refused():
    class Flattening(Replacing):
        def step(self):
            for group in self.param_groups:
                group["params"][0].data = group["params"][0].data.flatten() * 2

    stages = tanh_stages(2)
    before = copy.deepcopy(stages)
    pipe = st.Pipeline(stages, lambda p: Flattening(p, lr=1.0), mse, "lwp-w")
    with pytest.raises(st.StageError, match=r"Flattening: its step gave parameter 0 .*\(5, 5\)"):
        losses(pipe, batches(3))
    check_own_storage(pipe)
    assert all(map(torch.equal, pipe.parameters(), (p for s in before for p in s.parameters())))


def test_hooks_see_the_true_weights_and_count_every_step():
    stages, data = tanh_stages(3), batches(6)
    oracle = Oracle(stages, FOREIGN["SGD"], mse, "lwp-w")
    oracle.run(data)
    seen = [[] for _ in stages]

    def optimizer(params):
        made = FOREIGN["SGD"](params)
        steps = seen[sum(map(bool, seen))]
        steps.append([p.detach().clone() for p in params])
        made.register_step_post_hook(lambda *_: steps.append([p.detach().clone() for p in params]))
        return made

    losses(st.Pipeline(stages, optimizer, mse, "lwp-w"), data)
    for steps, versions in zip(seen, oracle.versions, strict=True):
        assert len(steps) == len(versions) == 7
        for mine, rows in zip(steps, versions, strict=True):
            for weight, row in zip(mine, rows, strict=True):
                close(weight, row.weight)


def test_a_refusal_says_what_to_use():
    with pytest.raises(ValueError, match=r"spectrain_ext\.spectrain\(law='difference'\)"):
        st.Pipeline(tanh_stages(2), FOREIGN["Lion"], mse, "spectrain")
    with pytest.raises(ValueError, match=r"stages\[0\] has torch\.optim.*AdamW, .*optim\.AdamW"):
        st.Pipeline(tanh_stages(2), FOREIGN["AdamW"], mse, "spectrain")
    Compared(tanh_stages(1), "spectrain", optimizer=(FOREIGN["Lion"],) * 2).run(batches(3))


def test_a_step_that_needs_a_closure():
    with pytest.raises(ValueError, match=r"stages\[0\] it made a LBFGS, whose step\(\) needs clos"):
        st.Pipeline(tanh_stages(2), torch.optim.LBFGS, mse, "vanilla")


@pytest.mark.parametrize("kind", ["sync", "vanilla", "lwp-w"])
def test_a_wrapper_that_has_nothing_of_torchs(kind):
    stages, data, found = tanh_stages(3), batches(7), []
    for optimizer in (
        Bare,
        lambda p: Together(
            torch.optim.SGD(p[:1], lr=0.05, momentum=0.9), torch.optim.RMSprop(p[1:], lr=0.01)
        ),
    ):
        pipe = st.Pipeline(copy.deepcopy(stages), optimizer, mse, kind)
        found.append(losses(pipe, data[:5]))
        pipe.release()
        found[-1] += losses(pipe, data[5:])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("method", "versions"),
    [("1f1b", 1), ("vanilla", 1), ("pipedream", None), ("lwp-w", None), (DIFFERENCE, 3)],
)
def test_the_memory_that_was_predicted(method, versions):
    """The difference law has one version more than the package's prediction needs."""
    pipe = st.Pipeline(tanh_stages(4), FOREIGN["Lion"], mse, method, microbatches=1)
    losses(pipe, batches(12, size=8))
    assert pipe.measured_memory() == pipe.predicted_memory()
    if versions is not None:  # working, master, before
        assert [memory.versions for memory in pipe.measured_memory()] == [versions] * 4


@pytest.mark.parametrize("name", ["Queued", "relative steps"])
def test_groups_without_a_learning_rate(tmp_path, name):
    """Only a method that divides rates needs them."""
    stages, data = tanh_stages(3), [(x.float(), y.float()) for x, y in batches(4)]
    for method in ("auto", "vanilla", DIFFERENCE):
        modules = [copy.deepcopy(stage).float() for stage in stages]
        pipe = st.Pipeline(modules, PECULIAR[name], mse, method)
        with st.Metrics(pipe, tmp_path / "metrics.jsonl", every=2) as metrics:
            assert len([*pipe.run(data, trace=metrics)]) == 4
    for method, more in (("auto", {"microbatches": 1}), ("pipemare", {})):
        with pytest.raises(ValueError, match=r"parameter group 0 of the .* has no 'lr'"):
            st.Pipeline(stages, PECULIAR[name], mse, method, **more)
