"""Tests what stages of a traced model refuse: modes, sizes and code that a graph would freeze."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from helpers.cut_models import LOSS, Calls, Two, layers, run, sgd, split
from torch import Tensor, nn

import spectrain_ext as st

# Modes


def only_in_training(self: nn.Module, x: Tensor) -> Tensor:
    return x if not self.training and x.sum() > 0 else x * 2.0


def test_a_mode_that_cannot_be_traced_is_refused_when_asked_for() -> None:
    stages = split(Two(Calls(only_in_training)))
    pipe = st.Pipeline(stages, sgd, LOSS)
    x = torch.randn(3, 4)
    before = pipe(x)
    with pytest.raises(RuntimeError, match=r"eval: .* in evaluation: torch\.export cannot trace"):
        pipe.eval()
    assert pipe.training
    assert all(module.training for module in pipe.modules())
    assert torch.equal(pipe(x), before)
    pipe.train()
    stages[0][0].training = False  # without its knowledge
    with pytest.raises(RuntimeError, match=r"forward: .* in evaluation"):
        stages[0](x)
    with pytest.raises(RuntimeError, match="cannot trace the model as it is"):
        split(Two(Calls(only_in_training)).eval(), x)


class Auxiliary(Two):
    """Passes on two tensors in training and one in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        extra = self.middle(x)[:, :2] if self.training else None
        y = self.last(x)
        return y if extra is None else y + extra


class Swaps(Two):
    """Passes on the same number of tensors in both modes, but different ones."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = (self.first, self.middle) if self.training else (self.middle, self.first)
        y, z = a(x), b(x)
        return self.last(y) + z[:, :2]


class Skipped(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.middle(x) if self.training else x)


@pytest.mark.parametrize(
    ("kind", "point", "why"),
    [
        (Auxiliary, "last", r"in evaluation stage 1 takes .* \(\*, 4\) float32, and in tr"),
        (Swaps, "last", r"in evaluation stage 1 takes"),
        (Skipped, "middle", r"in evaluation the model has 1 stages, and 2 in training"),
    ],
)
def test_modes_that_need_other_cuts(kind: type[Two], point: str, why: str) -> None:
    model, x = kind(), torch.randn(3, 4)
    expected = model(x)
    stages = nn.Sequential(*split(model, points=[point]))
    for _ in range(2):
        assert torch.equal(stages(x), expected)
        with pytest.raises(RuntimeError, match=f"eval: {why}"):
            stages.eval()


def test_a_train_that_changes_weights() -> None:
    class Merging(nn.Linear):
        def train(self, mode: bool = True) -> Any:
            if mode != self.training:
                self.weight.data += -1.0 if mode else 1.0
            return super().train(mode)

    model = Two(Merging(4, 4))
    before = copy.deepcopy(model.state_dict())
    stages = nn.Sequential(*split(model))
    assert model.middle.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    with pytest.raises(RuntimeError, match=r"own eval\(\) changes 'middle\.weight'"):
        stages.eval()


def test_stages_are_not_pickled_and_their_modules_have_no_mode() -> None:
    first, last = split(Two())
    with pytest.raises(RuntimeError, match="eval: the modules inside a traced stage have no mode"):
        first.get_submodule("0.part.middle").eval()
    with pytest.raises(TypeError, match="traced model cannot be pickled; keep its state_dict"):
        pickle.dumps(last)


# Sizes


def test_sizes_that_the_model_treats_otherwise() -> None:
    stages = split(Two(Calls(lambda _, x: x if x.size(0) > 4 else -x)), torch.randn(6, 4))
    run(stages, torch.randn(5, 4))
    with pytest.raises(ValueError, match=r"Guard failed: .* got shapes \[\(4, 4\)\]"):
        run(stages, torch.randn(4, 4))
    with pytest.raises(ValueError, match=r"expected x \(\*, 4\) float32, got shape \(6, 5\)"):
        run(stages, torch.randn(6, 5))
    with pytest.raises(ValueError, match=r"expected .* \(\*, 4\) float32, got shape \(6, 3\)"):
        stages[1](torch.randn(6, 3))


class Sums(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.first(x).sum(0))
        return self.last(y) * (5.0 if x.size(0) == 1 else 1.0)


@pytest.mark.parametrize(
    ("make", "point", "why"),
    [
        (Sums, "middle", r"a single sample: .* does something else with one; leave"),
        (
            lambda: Two(nn.BatchNorm1d(4)),
            "last",
            r"a single sample: .*Expected more than 1 value per channel .*; leave such a batch out",
        ),
    ],
)
def test_a_single_sample_that_is_another_case(
    make: Callable[[], Two], point: str, why: str
) -> None:
    model, x = make(), torch.randn(3, 4)
    alone, stages = copy.deepcopy(model), split(model, points=[point])
    torch.testing.assert_close(run(stages, x), alone(x))
    with pytest.raises(ValueError, match=why):
        run(stages, x[:1])


# Code


@pytest.mark.parametrize("draw", [random.random, lambda: float(numpy.random.rand())])
def test_numbers_that_torch_does_not_draw(draw: Callable[[], float]) -> None:
    def drawn(self: nn.Module, x: Tensor) -> Tensor:
        return x * draw() if self.training else x

    python, legacy = random.getstate(), numpy.random.get_state()[2]
    with pytest.raises(RuntimeError, match=r"the model draws from .*random as it is, and those"):
        split(Two(Calls(drawn)))
    stages = split(Two(Calls(drawn)).eval())
    with pytest.raises(RuntimeError, match=r"train: .*the model draws from .*random in training"):
        stages[0].train()
    assert (random.getstate(), numpy.random.get_state()[2]) == (python, legacy)


class Rounds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def hooked(_: nn.Module, x: Tensor) -> Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient / 10)
    return x


def hooked_module() -> nn.Module:
    module = nn.Linear(4, 4)
    module.register_full_backward_hook(lambda module, taken, made: (taken[0] / 10,))
    return module


def inferred(_: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        shift = torch.tanh(x)
    return x + shift


@pytest.mark.parametrize(
    ("middle", "what"),
    [
        (lambda: Calls(lambda _, x: Rounds.apply(x * 1.0)), "autograd.Function Rounds"),
        (lambda: Calls(hooked), "a tensor's register_hook"),
        (hooked_module, "a module's backward hook"),
        (lambda: Calls(inferred), "torch.inference_mode, where no_grad would do"),
    ],
)
def test_derivatives_that_a_graph_does_not_have(middle: Callable[[], nn.Module], what: str) -> None:
    real = vars(torch.autograd.Function)["apply"], torch.Tensor.register_hook
    for cut in (split, lambda model: st.partition(model, 2, torch.randn(3, 4))):
        with pytest.raises(RuntimeError, match=rf"backward of its own as it is, {what}, and"):
            cut(Two(middle()))
    assert (vars(torch.autograd.Function)["apply"], torch.Tensor.register_hook) == real


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_is_assigned_to(persistent: bool) -> None:
    class Averages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4), persistent=persistent)

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x - self.mean

    model = Two(Averages())
    if not persistent:  # usually a cache
        split(model)
        return
    for cut in (split, lambda model: st.partition(model, 2, torch.randn(3, 4))):
        with pytest.raises(RuntimeError, match=r"assigns to the module buffer middle\.mean, and"):
            cut(model)
    assert not model._forward_hooks


def branching(self: nn.Module, x: Tensor) -> Tensor:
    return x if x.abs().sum() > 0 else -x


EXAMPLE = torch.randn(3, 4)


class Number(Two):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), 3


@pytest.mark.parametrize(
    ("model", "more", "error", "why"),
    [
        (Two(Calls(branching)), {}, RuntimeError, "cannot trace the model .*list of blocks"),
        (Number(), {"split_points": ["last"]}, ValueError, "the model returns 3, expected"),
        (Two(), {"example_input": (EXAMPLE, 3), "split_points": ["last"]}, TypeError, "a int at 1"),
        (Two(), {"split_points": ["tail"]}, ValueError, "split_points: .* has no submodule 'tail'"),
        (torch.compile(Two()), {}, TypeError, "it is compiled by torch.compile; cut"),
        (torch.compile(layers(4, 4)), {}, TypeError, "it is compiled by torch.compile; cut"),
        (Two().to("meta"), {}, ValueError, "a Two on the meta device cannot be traced; make it"),
        (Two(torch.compile(nn.Linear(4, 4))), {}, TypeError, "its module 'middle' is compiled"),
    ],
)
def test_models_and_examples(model: Any, more: dict[str, Any], error: Any, why: str) -> None:
    with pytest.raises(error, match=why):
        st.partition(model, 2, **{"example_input": EXAMPLE, **more})
