"""Compares models in stages with the uncut ones: outputs, gradients, training, names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import spectrain_ext as st
from spectrain_ext.partitioning import BlockProfile, Partition, Profile

LOSS = nn.functional.mse_loss


def sgd(params: Any) -> st.optim.SGD:
    return st.optim.SGD(params, lr=0.05, momentum=0.9)


def layers(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


class Calls(nn.Module):
    """Calls a function of itself, with these parts, and its input."""

    def __init__(self, function: Callable[[Any, Any], Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


class Two(nn.Module):
    """A module between two linear layers."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4) if middle is None else middle
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.middle(self.first(x)))


def split(
    model: nn.Module, example: Any = None, points: Sequence[str] = ("last",)
) -> list[nn.Module]:
    """Return the stages of a traced model, cut before these submodules."""
    example = torch.randn(3, 4) if example is None else example
    more = {"split_points": [*points], "profile": "parameters"}
    return st.partition(model, len(points) + 1, example, **more).stages


def taking(*seconds: float, **more: Any) -> Profile:
    """Return a profile of blocks that take so long."""
    return Profile(tuple(BlockProfile(s) for s in seconds), **more)


EVEN = taking(1, 1, 1, 1, 1, 1)  # a decoder's embedding, four blocks and head


def run(stages: Iterable[nn.Module], value: Any) -> Any:
    for stage in stages:
        value = stage(value)
    return value


def alike(
    model: nn.Module,
    cut: Callable[[nn.Module], Iterable[nn.Module]],
    values: Sequence[Any],
    modes: Sequence[bool] = (True, False, True),
) -> nn.Sequential:
    """Check that stages compute what the uncut model does, and have its parameters and names.

    Outputs with and without gradients, all gradients, and what forwards change in the model.
    """
    alone = copy.deepcopy(model)
    stages = nn.Sequential(*cut(model))
    state = {s.cut.full_name(key): tensor for s in stages for key, tensor in s.state_dict().items()}
    assert state.keys() == alone.state_dict().keys()
    assert [m.training for m in model.modules()] == [m.training for m in alone.modules()]
    for mode in modes:
        stages.train(mode)
        alone.train(mode)
        for value in values:
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    torch.manual_seed(5)
                    found = stages(value)
                    torch.manual_seed(5)
                    expected = alone(*value) if isinstance(value, tuple) else alone(value)
                torch.testing.assert_close(found, expected)
                if grad:
                    for output in (found, expected):
                        sum(tensor.square().sum() for tensor in tree_leaves(output)).backward()
    named = dict(model.named_parameters())
    for name, p in alone.named_parameters():
        torch.testing.assert_close(named[name].grad, p.grad, msg=name)
    assert {*model.parameters()} == {p for stage in stages for p in stage.parameters()}
    torch.testing.assert_close(dict(model.state_dict()), dict(alone.state_dict()))
    return stages


def trains_alike(
    alone: nn.Module,
    parts: Partition | Sequence[nn.Module],
    data: Sequence[Any],
    loss_fn: Any = LOSS,
    output_of: Callable[[nn.Module, Any], Any] | None = None,
    **more: Any,
) -> st.Pipeline:
    """Check that a pipeline of these stages trains as the uncut model, to about the same digits.

    A batch is a pair unless ``output_of`` says what the uncut model computes of it.
    """
    pipe = st.Pipeline(parts, sgd, loss_fn, **{"method": "sync", **more})
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for result, batch in zip(pipe.run(data), data, strict=True):
        if output_of is None:
            inputs, target = batch
            output = alone(*inputs) if isinstance(inputs, tuple) else alone(inputs)
            expected = loss_fn(output, target)
        else:
            expected = output_of(alone, batch)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(result.loss, expected.detach())
    torch.testing.assert_close(dict(pipe.state_dict()), dict(alone.state_dict()))
    return pipe
