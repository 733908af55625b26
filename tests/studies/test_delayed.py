"""Tests Delayed against the pipeline, and uniform delays against a definition in ten lines."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers.passes import with_passes
from helpers.pipeline_cases import in_float64, mse
from helpers.side_by_side import SideBySide
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import spectrain_ext as st
from spectrain_ext.method import find_method
from studies.delayed import Delayed, Replicated
from studies.models.mlp import residual_mlp
from studies.models.text import gpt
from studies.sparse import Sparse
from studies.workload import mean_loss

float64 = pytest.fixture(autouse=True)(in_float64)


def text(*sizes):
    tokens = [torch.randint(20, (samples, 7)) for samples in sizes]
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def decoder():
    return gpt(4, vocabulary=20, context=6, width=8, depth=2, seed=0)


def normalized():
    layers = residual_mlp(4, features=6, width=8, depth=2, classes=3, seed=1)
    return [*layers[:1], nn.Sequential(layers[1], nn.BatchNorm1d(8)), *layers[2:]]


def dense():
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]


def adamw(params):
    return st.optim.AdamW(params, lr=0.01)


def sgd(params: Any, **more: Any) -> st.optim.SGD:
    return st.optim.SGD(params, lr=0.3, momentum=0.9, **more)


def same(stages, optimizer, method, data, loss=mean_loss, **more):
    """Check that every stage has the pipeline's weights, and every loss is the pipeline's."""
    mine, engines = stages(), stages()
    more["scheduler"] = lambda made: LambdaLR(made, lambda update: min(1.0, (update + 1) / 4))
    pipe = st.Pipeline(engines, optimizer, loss, method, **with_passes(more))
    expected = [result.loss.item() for result in pipe.run(data)]
    pipe.release()
    delayed = Delayed(mine, optimizer, loss, method, **more)
    found = []
    for value, target in data:
        found.append(delayed.train_on(value, target).item())
        with delayed.true_weights() as model:  # reading changes nothing
            assert not model.training
            model(value)
    assert found == pytest.approx(expected, abs=1e-10)
    for stage, other in zip(mine, engines, strict=True):
        assert stage.training
        for p, q in zip(stage.state_dict().values(), other.state_dict().values(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-10)


CASES = [
    *((name, 1) for name in st.methods() if find_method(name).min_microbatches is None),
    *((name, 5) for name in st.methods()),
    *(("pipedream+sync@3", 1), ("1f1b+vanilla@4", 5), ("lwp-w+auto@5", 5)),
]


@pytest.mark.parametrize(("method", "microbatches"), [case for case in CASES if case[0] != "xgrad"])
def test_every_method_is_the_engines(method: str, microbatches: int) -> None:
    optimizer = partial(sgd, smoothed=True) if method == "spectrain-smoothed" else sgd
    if "adamw" in find_method(method).families:
        optimizer = adamw
    sizes = (8, 8, 8, 3, 8, 8, 8)  # one minibatch has fewer samples than microbatches
    same(decoder, optimizer, method, text(*sizes), microbatches=microbatches)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("method", ["sync", "auto", "vanilla", "spectrain", "pipedream-2bw"])
def test_a_tied_head_is_trained_as_a_pipelines(method: str, clip: float | None) -> None:
    stages = partial(gpt, 4, vocabulary=20, context=6, width=8, depth=2, bias=False, tied=True)
    same(stages, adamw, method, text(10, 10, 4, 9, 10, 2, 10), microbatches=5, clip_norm=clip)


@pytest.mark.parametrize("method", ["auto", "pipedream", "gpipe"])
def test_statistics_of_a_batch_are_a_microbatchs(method):
    """Batch normalization sees the engine's microbatches, and clipping is the engine's."""
    data = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(7)]
    same(normalized, sgd, method, data, microbatches=4, clip_norm=0.1)


def test_clipping_by_the_norm_of_all_stages_is_that_of_a_flush() -> None:
    data = torch.randn(8, 16), torch.randn(8, 16)
    plain = nn.Sequential(*dense())
    mse(plain(data[0]), data[1]).backward()
    norms = [nn.utils.get_total_norm([p.grad for p in stage.parameters()]) for stage in plain]
    limit = 1.01 * sorted(map(float, norms))[1]  # only one stage is above
    after = {}
    for method, of_all in (("sync", False), ("auto", True), ("auto", False)):
        stages = dense()
        trained = Delayed(
            stages, sgd, mse, method, microbatches=4, clip_norm=limit, clip_all=of_all
        )
        trained.train_on(*data)  # before any weights are late
        after[method, of_all] = nn.utils.parameters_to_vector(nn.Sequential(*stages).parameters())
        assert trained.clipped == pytest.approx(1.0 if of_all or method == "sync" else 1 / 3)
    torch.testing.assert_close(after["auto", True], after["sync", False])
    assert not torch.allclose(after["auto", False], after["sync", False], rtol=1e-3)


@pytest.mark.parametrize("method", ["sync", "spectrain"])
def test_what_crosses_is_packed_as_a_pipelines(method: str) -> None:
    """With the same draws: other draws change losses by more than rounding."""
    data = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(6)]
    same(dense, sgd, method, data, mse, microbatches=1, codec=st.codecs.Int4(seed=3))


# The same delay on all stages


OWN = st.Method(
    *("own", ""), law="difference", forward_horizon=lambda at: at.window - 1, backward="stash"
)


MU, DELAY = 0.8, 3
GEOMETRIC = MU * (1 - MU**DELAY) / (1 - MU)


@pytest.mark.parametrize(
    ("method", "steps", "changes"),  # ahead, by the momentum and by the last change
    [
        ("pipedream", 0, 0),
        ("spectrain-stash", DELAY, 0),
        (OWN, 0, DELAY),
        ("msnag-stash", GEOMETRIC, 0),
    ],
)
@pytest.mark.parametrize("cut", [False, True])
def test_a_uniform_delay_by_its_definition(
    method: Any, steps: float, changes: int, cut: bool
) -> None:
    """The gradient of minibatch i at the weights of 3 updates ago, predicted, applied now."""
    model, theirs = (nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)) for _ in "ab")
    theirs.load_state_dict(model.state_dict())
    lr, params = 0.1, [*theirs.parameters()]
    data = [(torch.randn(5, 4), torch.randn(5, 2)) for _ in range(9)]
    kept = [[(p.detach().clone(), 0 * p.detach(), 0 * p.detach()) for p in params]]
    for i, (value, target) in enumerate(data):
        for p, (w, v, change) in zip(params, kept[max(0, i - DELAY)], strict=True):
            p.data = w - steps * lr * v + changes * change
        gradients = torch.autograd.grad(mse(theirs(value), target), params)
        rows = zip(kept[-1], gradients, strict=True)
        moved = [(w, MU * v + g) for (w, v, _), g in rows]
        kept.append([(w - lr * v, v, -lr * v) for w, v in moved])
    delayed = Delayed(
        [model[:1], model[1:]] if cut else [model],
        lambda params: st.optim.SGD(params, lr=lr, momentum=MU),
        *(mse, method),
        delay=DELAY,
    )
    for batch in data:
        delayed.train_on(*batch)
    for p, (w, _, _) in zip(model.parameters(), kept[-1], strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-14)


# Replicas that are averaged


@pytest.mark.parametrize(
    "averaging",
    [st.averaging.Elastic(0.4), Sparse(0.3, 2, 0.6)],
    ids=["elastic", "sparse"],
)
@pytest.mark.parametrize("method", ["sync", "spectrain", "pipedream", "auto"])
def test_replicas_that_are_averaged(method, averaging):
    data = [(torch.randn(12, 6), torch.randint(3, (12,))) for _ in range(9)]
    arguments = (sgd, mean_loss, method)
    side = SideBySide(
        lambda passes: st.Pipeline(normalized(), *arguments, microbatches=2, passes=passes),
        2,
        averaging,
    )
    replicas = [Delayed(normalized(), *arguments, microbatches=2) for _ in range(2)]
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


@pytest.mark.parametrize("method", ["pipedream+sync@3", "auto"])
def test_what_cannot_be_averaged_is_refused(method):
    stages = gpt(3, vocabulary=20, context=6, width=8, depth=1, tied=method == "auto")
    why = "tied weights" if method == "auto" else "a method that changes"
    with pytest.raises(ValueError, match=f"replicas: .*{why} cannot be averaged"):
        Replicated([Delayed(stages, sgd, mean_loss, method, microbatches=3)], Sparse(1, 1, 0.5), 3)
