"""Tests Delayed against the pipeline, and uniform delays against a definition in ten lines."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import spectrain_ext as st
from spectrain_ext.method import find_method
from studies.delayed import Delayed
from studies.models.mlp import residual_mlp
from studies.models.text import gpt
from studies.workload import mean_loss


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def text(*sizes):
    made = []
    for seed, samples in enumerate(sizes):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 20, (samples, 7), generator=generator)
        made.append((tokens[:, :-1], tokens[:, 1:]))
    return made


def decoder():
    return gpt(4, vocabulary=20, context=6, width=8, depth=2, seed=0)


def adamw(params):
    return st.optim.AdamW(params, lr=0.01)


def sgd(params):
    return st.optim.SGD(params, lr=0.3, momentum=0.9)


def decay(optimizer):
    return LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / 4))


def same(stages, optimizer, method, data, **more):
    """Check that every stage has the pipeline's weights, and every loss is the pipeline's."""
    mine, engines = stages(), stages()
    more["scheduler"] = decay
    pipe = st.Pipeline(engines, optimizer, mean_loss, method, **more)
    expected = [result.loss.item() for result in pipe.run(data)]
    pipe.release()
    delayed = Delayed(mine, optimizer, mean_loss, method, **more)
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


@pytest.mark.parametrize("microbatches", [1, 5])
@pytest.mark.parametrize("method", [m for m in st.methods() if m != "xgrad"])
def test_every_method_is_the_engines(method, microbatches):
    if find_method(method).min_microbatches is not None and microbatches < 4:
        pytest.skip("needs as many microbatches as stages")

    def optimizer(params):
        if method == "spectrain-smoothed":
            return st.optim.SGD(params, lr=0.3, momentum=0.9, smoothed=True)
        return adamw(params) if "adamw" in find_method(method).families else sgd(params)

    sizes = (8, 8, 8, 3, 8, 8, 8)  # one minibatch has fewer samples than microbatches
    same(decoder, optimizer, method, text(*sizes), microbatches=microbatches)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("method", ["pipedream+sync@3", "1f1b+vanilla@4", "lwp-w+auto@5"])
def test_methods_that_change_are_the_engines(method, microbatches):
    data = text(8, 8, 8, 2, 8, 8, 8, 8)
    same(decoder, adamw, method, data, microbatches=microbatches)


@pytest.mark.parametrize("method", ["auto", "spectrain", "pipedream", "lwp-w", "gpipe"])
def test_statistics_of_a_batch_are_a_microbatchs(method):
    """Batch normalization sees the engine's microbatches, and clipping is the engine's."""

    def stages():
        layers = residual_mlp(4, features=6, width=8, depth=2, classes=3, seed=1)
        return [*layers[:1], nn.Sequential(layers[1], nn.BatchNorm1d(8)), *layers[2:]]

    data = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(7)]
    same(stages, sgd, method, data, microbatches=4, clip_norm=0.1)


def small():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def test_a_gap_is_refused():
    with pytest.raises(ValueError, match="gap, which only runs measure"):
        Delayed(decoder(), sgd, mean_loss, st.hybrid(after=3, gap=0.1))


@dataclass
class Kept:
    """The weights of a minibatch's gradient, by the definition; updated by ``at``."""

    delay: int
    law: str

    def predicted(self, kept, i, lr, mu):
        weights, momentum, change = kept[max(0, i - self.delay)]
        if self.law == "none":
            return weights
        if self.law == "linear":
            return [w - self.delay * lr * v for w, v in zip(weights, momentum, strict=True)]
        if self.law == "difference":
            return [w + self.delay * d for w, d in zip(weights, change, strict=True)]
        steps = mu * (1 - mu**self.delay) / (1 - mu)
        return [w - steps * lr * v for w, v in zip(weights, momentum, strict=True)]


@pytest.mark.parametrize(
    ("method", "law"),
    [
        ("pipedream", "none"),
        ("spectrain-stash", "linear"),
        (
            st.Method(
                "own",
                "",
                law="difference",
                forward_horizon=lambda at: at.window - 1,
                backward="stash",
            ),
            "difference",
        ),
        ("msnag-stash", "geometric"),
    ],
)
@pytest.mark.parametrize("cut", [False, True])
def test_a_uniform_delay_by_its_definition(method, law, cut):
    """The gradient of minibatch i at the weights of 3 updates ago, predicted, applied now."""
    model, theirs, lr, mu = small(), small(), 0.1, 0.8
    theirs.load_state_dict(model.state_dict())
    data = [(torch.randn(5, 4), torch.randn(5, 2)) for _ in range(9)]
    weights = [p.detach().clone() for p in theirs.parameters()]
    kept = [(weights, [torch.zeros_like(w) for w in weights], [0 * w for w in weights])]
    for i, (value, target) in enumerate(data):
        for p, w in zip(theirs.parameters(), Kept(3, law).predicted(kept, i, lr, mu), strict=True):
            p.data = w.clone()
        gradients = torch.autograd.grad(
            nn.functional.mse_loss(theirs(value), target), [*theirs.parameters()]
        )
        now, momentum, _ = kept[-1]
        momentum = [mu * v + g for v, g in zip(momentum, gradients, strict=True)]
        after = [w - lr * v for w, v in zip(now, momentum, strict=True)]
        kept.append((after, momentum, [a - w for a, w in zip(after, now, strict=True)]))
    stages = [model[:1], model[1:]] if cut else [model]
    delayed = Delayed(
        stages,
        lambda params: st.optim.SGD(params, lr=lr, momentum=mu),
        nn.functional.mse_loss,
        method,
        delay=3,
    )
    for batch in data:
        delayed.train_on(*batch)
    for p, w in zip(model.parameters(), kept[-1][0], strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("method", ["sync", "pipedream", "spectrain"])
def test_what_crosses_is_packed_as_a_pipelines(method):
    """The same draws: other draws change gradients by more than rounding."""

    def stages():
        torch.manual_seed(1)
        return [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]

    data = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(6)]
    codec = st.codecs.Int4(seed=3)
    pipe = st.Pipeline(stages(), sgd, nn.functional.mse_loss, method, microbatches=1, codec=codec)
    losses = [result.loss.item() for result in pipe.run(data)]
    mine, others = (
        Delayed(stages(), sgd, nn.functional.mse_loss, method, microbatches=1, codec=each)
        for each in (codec, st.codecs.Int4(seed=4))
    )
    for expected, batch in zip(losses, data, strict=True):
        assert mine.train_on(*batch).item() == pytest.approx(expected, rel=1e-9)
        drawn = others.train_on(*batch).item()
    assert drawn != pytest.approx(expected, rel=1e-6)


def test_four_microbatches_that_flush_are_four_replicas():
    """The basis of the contender ``data-parallel-4``: BatchNorm sees only a replica's part."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    replicas = [copy.deepcopy(model) for _ in range(4)]
    theirs = [sgd([*replica.parameters()]) for replica in replicas]
    delayed = Delayed([model[:2], model[2:]], sgd, mean_loss, "sync", microbatches=4)
    for _ in range(5):
        value, target = torch.randn(16, 6), torch.randint(0, 3, (16,))
        delayed.train_on(value, target)
        for replica, v, t in zip(replicas, value.chunk(4), target.chunk(4), strict=True):
            mean_loss(replica(v), t).backward()
        for ones in zip(*(replica.parameters() for replica in replicas), strict=True):
            mean = torch.stack([p.grad for p in ones]).mean(0)
            for p in ones:
                p.grad = mean.clone()
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
    for mine, their in zip(model.parameters(), replicas[0].parameters(), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-10, atol=1e-12)
