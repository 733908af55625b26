"""Tests replicas trained minibatch by minibatch against SideBySide."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.side_by_side import SideBySide
from torch import nn

import spectrain_ext as st
from spectrain_ext.operators.averaging import Averaging, Elastic, Sparse
from studies.delayed import Delayed, Replicated
from studies.models.mlp import residual_mlp
from studies.workload import mean_loss


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "averaging", [Elastic(0.4), Sparse(0.3, 2, 0.6)], ids=["elastic", "sparse"]
)
@pytest.mark.parametrize("method", ["sync", "spectrain", "pipedream", "auto"])
def test_replicas_that_are_averaged(method: str, averaging: Averaging) -> None:
    def stages() -> list[nn.Module]:
        return residual_mlp(3, features=6, width=8, depth=2, classes=4, seed=1)

    def optimizer(params: list[nn.Parameter]) -> st.optim.PredictingOptimizer:
        return st.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)

    generator = torch.Generator().manual_seed(2)
    data = [
        (torch.randn(12, 6, generator=generator), torch.randint(4, (12,), generator=generator))
        for _ in range(9)
    ]
    side = SideBySide(
        [st.Pipeline(stages(), optimizer, mean_loss, method, microbatches=2) for _ in range(2)],
        averaging,
    )
    replicas = [Delayed(stages(), optimizer, mean_loss, method, microbatches=2) for _ in range(2)]
    trained = Replicated(replicas, averaging, 4)
    found = []
    for value, target in data:
        found.append(trained.train_on(value, target).item())
        with trained.true_weights() as model:  # reading changes nothing
            model(value)
    expected = [sum(r.loss.item() for r in results) / 2 for results in side.run(data)]
    assert found == pytest.approx(expected, abs=1e-10)
    with side.averaged(), trained.true_weights() as model:
        for p, q in zip(model.parameters(), side.pipes[0].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-10)
