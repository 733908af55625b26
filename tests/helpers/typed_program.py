"""A user's program with the types that a checker and an editor must see; ``make lint`` checks it.

test_project.py runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, assert_type

import torch
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.method import MethodName
from spectrain_ext.partitioning import Partition
from spectrain_ext.schedule import Place


def operators(
    weight: Tensor, weights: list[Tensor], module: nn.Module, either: Tensor | list[Tensor]
) -> None:
    assert_type(st.stash(weight), Tensor)
    assert_type(st.stash(weights), list[Tensor])
    assert_type(st.stash((weight, weight)), Sequence[Tensor])
    assert_type(st.stash([*module.parameters()], weights), Sequence[Tensor])
    st.stash(either)  # either is accepted
    assert_type(st.predict(weights, weights, lr=0.1, steps=1), list[Tensor])
    assert_type(st.extrapolate(weight, weight, steps=2.0), Tensor)
    assert_type(st.distance(weights, [weights]), tuple[Tensor, Tensor])
    buffers, gradients = st.stash(weights), st.stash(weights)
    plan = st.Plan(weights, momentum_buffers=buffers, grads=gradients)
    plan.sgd_step_(lr=0.1, momentum=0.9, zero_grad=True)
    if TYPE_CHECKING:
        plan.sgd_step_(lr=0.1)  # type: ignore[call-arg]


def optimizers(module: nn.Module) -> None:
    made = st.optim.AdamW(module.parameters(), 1e-3, (0.9, 0.95), state_dtype=torch.float32)
    assert_type(made, st.optim.AdamW)
    st.optim.SGD(module.parameters(), 0.1, momentum=0.9, smoothed=True)
    if TYPE_CHECKING:
        st.optim.SGD(module.parameters(), momentun=0.9)  # type: ignore[call-arg]


def pipeline(stages: Sequence[nn.Module], name: MethodName, scope: str) -> None:
    def sgd(params: list[nn.Parameter]) -> st.optim.SGD:
        return st.optim.SGD(params, lr=0.1, momentum=0.9)

    mse = nn.functional.mse_loss
    st.Pipeline(stages, sgd, mse, clip_norm=1.0, clip_scope=scope).release()  # type: ignore[arg-type]
    assert_type(st.hybrid("1f1b", name, after=10), st.Method)
    pipe = st.Pipeline(stages, sgd, mse, "1f1b+auto@10", window="wide")
    batches = [(torch.ones(4, 2), torch.ones(4, 2))]
    for result in pipe.run(batches):
        assert_type(result.loss, Tensor)
        assert_type(result.count, Tensor | None)
    assert_type(pipe.fit(batches), list[float])
    assert_type(pipe.evaluate(batches), dict[str, float])
    assert_type(pipe.places, tuple[Place, ...])
    assert_type(pipe.optimizers, tuple[torch.optim.Optimizer, ...])
    assert_type(pipe(batches[0][0]), Any)  # whatever the last stage returns
    pipe.release()


def program() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parts = st.partition(model, 2, torch.ones(4, 2), profile="parameters")
    assert_type(parts, Partition)
    pipeline(parts.stages, "auto", "stage")
