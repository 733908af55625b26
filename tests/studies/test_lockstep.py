"""Lockstep gives the engine's numbers, for every method, optimizer and number of microbatches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import spectrain_ext as st
from spectrain_ext.method import find_method
from spectrain_ext.operators.averaging import Averaging, Elastic, Sparse
from studies.lockstep import Lockstep, Replicated
from studies.models import gpt, residual_mlp
from studies.side_by_side import SideBySide
from studies.workload import mean_loss

Optimizer = Callable[[list[nn.Parameter]], st.optim.PredictingOptimizer]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _text(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 20, (samples, 7), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _same(
    stages: Callable[[], list[nn.Module]],
    optimizer: Optimizer,
    method: str,
    data: list[tuple[Tensor, Tensor]],
    microbatches: int,
    clip_norm: float | None = None,
) -> None:
    mine, engines = stages(), stages()

    def decay(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / 4))

    pipe = st.Pipeline(
        engines,
        optimizer,
        mean_loss,
        method,
        scheduler=decay,
        microbatches=microbatches,
        clip_norm=clip_norm,
    )
    expected = [result.loss.item() for result in pipe.run(data)]
    pipe.release()
    lock = Lockstep(
        mine,
        optimizer,
        mean_loss,
        find_method(method),
        scheduler=decay,
        microbatches=microbatches,
        clip_norm=clip_norm,
    )
    found = []
    for value, target in data:
        found.append(lock.train_on(value, target))
        with lock.true_weights() as model:  # looking changes nothing
            model(value)
    lock.release()
    assert found == pytest.approx(expected, abs=1e-10)
    for stage, other in zip(mine, engines, strict=True):
        for p, q in zip(stage.state_dict().values(), other.state_dict().values(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-10)


@pytest.mark.parametrize("microbatches", [1, 5])
@pytest.mark.parametrize("method", [m for m in st.methods() if m != "xgrad"])
def test_every_method_is_the_engines(method: str, microbatches: int) -> None:
    if find_method(method).min_microbatches is not None and microbatches < 4:
        pytest.skip("needs as many microbatches as stages")

    def optimizer(params: list[nn.Parameter]) -> st.optim.PredictingOptimizer:
        if method == "spectrain-ema":
            return st.optim.SGD(params, lr=0.3, momentum=0.9, ema=True)
        if "adamw" not in find_method(method).families:
            return st.optim.SGD(params, lr=0.3, momentum=0.9)
        return st.optim.AdamW(params, lr=0.01)

    sizes = (8, 8, 8, 3, 8, 8, 8)  # one minibatch has fewer samples than microbatches
    _same(
        lambda: gpt(4, vocabulary=20, context=6, width=8, depth=2, seed=0),
        optimizer,
        method,
        [_text(size, seed) for seed, size in enumerate(sizes)],
        microbatches,
    )


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("method", ["pipedream+sync@3", "1f1b+vanilla@4", "lwp-w+auto@5"])
def test_methods_that_change_are_the_engines(method: str, microbatches: int) -> None:
    _same(
        lambda: gpt(4, vocabulary=20, context=6, width=8, depth=2, seed=0),
        lambda params: st.optim.AdamW(params, lr=0.01),
        method,
        [_text(size, seed) for seed, size in enumerate((8, 8, 8, 2, 8, 8, 8, 8))],
        microbatches,
    )


def test_a_gap_only_runs_measure() -> None:
    method = st.hybrid(after=3, gap=0.1)
    with pytest.raises(ValueError, match="ends at a gap, which only runs measure"):
        Lockstep([nn.Linear(2, 2)], st.optim.SGD, nn.functional.mse_loss, method)


@pytest.mark.parametrize("method", ["auto", "spectrain", "pipedream", "lwp-w"])
def test_statistics_of_a_batch_are_a_microbatchs(method: str) -> None:
    """What normalizes by the batch sees the engine's microbatches; clipping is by stage."""

    def stages() -> list[nn.Module]:
        layers = residual_mlp(4, features=6, width=8, depth=2, classes=3, seed=1)
        return [*layers[:1], nn.Sequential(layers[1], nn.BatchNorm1d(8)), *layers[2:]]

    generator = torch.Generator().manual_seed(3)
    data = [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(7)
    ]
    _same(
        stages,
        lambda params: st.optim.SGD(params, lr=0.1, momentum=0.9),
        method,
        data,
        4,
        clip_norm=0.1,
    )


def test_what_is_refused() -> None:
    stages = gpt(2, vocabulary=20, context=6, width=8, depth=2, seed=0)
    method = st.hybrid("pipedream", "sync", after=9, gap=0.02)
    with pytest.raises(ValueError, match="ends at a gap"):
        Lockstep(stages, lambda params: st.optim.AdamW(params), mean_loss, method)


def test_four_microbatches_that_flush_are_four_replicas() -> None:
    """What the contender ``data-parallel-4`` rests on: BatchNorm sees a replica's part alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    replicas = [copy.deepcopy(model) for _ in range(4)]

    def sgd(params: list[nn.Parameter]) -> st.optim.SGD:
        return st.optim.SGD(params, lr=0.1, momentum=0.9)

    theirs = [sgd(list(replica.parameters())) for replica in replicas]
    lock = Lockstep(
        [nn.Sequential(*model[:2]), nn.Sequential(*model[2:])],
        sgd,
        mean_loss,
        find_method("sync"),
        microbatches=4,
    )
    for _ in range(5):
        value, target = torch.randn(16, 6), torch.randint(0, 3, (16,))
        lock.train_on(value, target)
        for replica, v, t in zip(replicas, value.chunk(4), target.chunk(4), strict=True):
            mean_loss(replica(v), t).backward()
        for same in zip(*(replica.parameters() for replica in replicas), strict=True):
            mean = torch.stack([p.grad for p in same]).mean(0)
            for p in same:
                p.grad = mean.clone()
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
    lock.release()
    for mine, their in zip(model.parameters(), replicas[0].parameters(), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-10, atol=1e-12)


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
    locks = [
        Lockstep(stages(), optimizer, mean_loss, find_method(method), microbatches=2)
        for _ in range(2)
    ]
    lock = Replicated(locks, averaging)
    found = []
    for value, target in data:
        found.append(lock.train_on(value, target))
        with lock.true_weights() as model:  # looking changes nothing
            model(value)
    expected = [sum(r.loss.item() for r in results) / 2 for results in side.run(data)]
    assert found == pytest.approx(expected, abs=1e-10)
    with side.averaged(), lock.true_weights() as model:
        for p, q in zip(model.parameters(), side.pipes[0].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-10)
