"""Tests Delayed against the engine for every method, optimizer and number of microbatches.

User-defined delays are compared with ten lines that keep old weights.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import spectrain_ext as st
from spectrain_ext.method import delayed_places, find_method, rules_at
from studies.models import gpt, residual_mlp
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


def rmsprop(params):
    return torch.optim.RMSprop(params, lr=0.01)


def decay(optimizer):
    return LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / 4))


def same(stages, optimizer, method, data, delays=None, loss_fn=mean_loss, **more):
    """Check that every stage has the pipeline's weights, and every loss is the pipeline's."""
    mine, engines = stages(), stages()
    more["scheduler"] = decay
    asked = more if delays is None else {**more, "microbatches": 1}
    pipe = st.Pipeline(engines, optimizer, loss_fn, method, **asked)
    expected = [result.loss.item() for result in pipe.run(data)]
    pipe.release()
    delayed = st.Delayed(mine, optimizer, loss_fn, method, delays=delays, **more)
    found = []
    for value, target in data:
        found.append(delayed.train_on(value, target).item())
        with delayed.true_weights() as model:  # reading changes nothing
            assert not model.training
            model(value)
    delayed.release()
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


@pytest.mark.parametrize("microbatches", [1, 4, 8])
@pytest.mark.parametrize(
    ("optimizer", "methods"),
    [
        (sgd, ("vanilla", "pipedream", "pipedream-2bw", "spectrain", "spectrain-stash", "auto")),
        (rmsprop, ("vanilla", "pipedream", "pipedream-2bw", "auto", "lwp-w")),
    ],
)
def test_other_optimizers_are_the_engines(optimizer, methods, microbatches):
    for method in methods:
        if method != "pipedream-2bw" or microbatches > 1:
            same(decoder, optimizer, method, text(*[8] * 6), microbatches=microbatches)


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


class Branch(nn.Module):
    """Returns a dict and a constant, changes its input in place, and is partly frozen."""

    def __init__(self, last=False):
        super().__init__()
        self.layer, self.frozen, self.last = nn.Linear(6, 6), nn.Linear(6, 6), last
        self.frozen.requires_grad_(False)

    def forward(self, value):
        x, scale = (value["x"], value["more"][1]) if isinstance(value, dict) else (value, 2)
        x = self.layer(torch.relu_(x)) + self.frozen(x)
        return (
            x
            if self.last
            else {"x": x, "more": (x.abs() + value["more"][0], scale)}
            if (isinstance(value, dict))
            else {"x": x, "more": (x.abs(), scale)}
        )


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("method", ["vanilla", "pipedream", "auto"])
def test_values_between_stages_and_losses_by_counts(method, microbatches):
    def loss_fn(output, target):
        kept = target > 0
        return (output[kept] - target[kept]).square().sum(), kept.sum()

    def stages():
        torch.manual_seed(1)
        return [Branch(), Branch(), nn.Identity(), Branch(last=True)]

    data = [(torch.randn(4, 6), torch.randn(4, 6)) for _ in range(6)]
    data[3] = data[3][0], -data[3][1].abs()  # no target counts
    mine, engines = stages(), stages()
    more = {"microbatches": microbatches}
    pipe = st.Pipeline(engines, sgd, loss_fn, method, **more)
    expected = [result.loss.item() for result in pipe.run(data)]
    delayed = st.Delayed(mine, sgd, loss_fn, method, **more)
    before = [value.clone() for value, _ in data]
    found = [delayed.train_on(*batch).item() for batch in data]
    assert found == pytest.approx(expected, abs=1e-10, nan_ok=True)
    assert all(map(torch.equal, before, (value for value, _ in data)))
    for p, q in zip(nn.ModuleList(mine).parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-10)


# User-defined delays


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("method", ["vanilla", "pipedream", "spectrain", "second-order", "auto"])
def test_a_pipelines_delays_are_the_pipeline(method, optimizer):
    same(decoder, optimizer, method, text(*[8] * 7), delays=[3, 2, 1, 0], clip_norm=0.5)


def small():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


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
    stages = [model[:1], model[1:]] if cut else model
    delayed = st.Delayed(
        stages,
        lambda params: st.optim.SGD(params, lr=lr, momentum=mu),
        nn.functional.mse_loss,
        method,
        delays=3,
    )
    assert delayed.delays == (3,) * (1 + cut)
    for batch in data:
        delayed.train_on(*batch)
    for p, w in zip(model.parameters(), kept[-1][0], strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-14)


def test_rules_mean_the_delays_that_are_given():
    def numbers(method, delays):
        (places,) = delayed_places(find_method(method), 3, delays)
        rules = [rules_at(find_method(method), place) for place in places]
        return [(rule.forward_horizon, rule.lead, rule.backward_horizon) for rule in rules]

    # As far as the most delayed stage, less half of its own delay.
    assert numbers("auto", 5) == [(5, -2, 0)] * 3
    assert numbers("auto", [1, 4, 0]) == [(1, 3, 0), (4, -2, 0), (0, 4, 0)]
    assert numbers("spectrain", 5) == [(5, 0, 0)] * 3
    assert numbers("spectrain", [2, 1, 0]) == [(2, 0, 0), (1, 0, 0), (1, 0, 1)]
    assert numbers("lwp-v", [0, 7, 3]) == [(0, 0, 0), (7, 0, 0), (3, 0, 0)]


def test_a_change_to_what_flushes_is_late_no_more():
    delayed = st.Delayed(small(), sgd, nn.functional.mse_loss, "pipedream+sync@2", delays=4)
    late = []
    for _ in range(3):
        delayed.train_on(torch.randn(5, 4), torch.randn(5, 2))
        late.append(delayed.delays)
    assert late == [(4,), (4,), (0,)]


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        ({"delays": [1, 2]}, ValueError, r"delays: expected one per stage \(1\), got 2"),
        ({"delays": -1}, ValueError, "delays: expected at least 0 for stage 0 of 1, got -1"),
        ({"delays": [1.0]}, TypeError, "delays: expected an int for stage 0, got float"),
        ({"delays": 1, "microbatches": 2}, ValueError, "one microbatch"),
        ({"delays": 1, "window": 2}, ValueError, "there is no window"),
        ({"delays": 1, "method": "gpipe"}, ValueError, "'gpipe' has delays of its own"),
        ({"delays": 1, "method": "interleaved-async"}, ValueError, "has delays of its own"),
        (
            {"delays": [0, 1], "method": "pipedream-vertical-sync", "model": [small(), small()]},
            ValueError,
            "as late as stage 0; expected no delay above 0, got 1",
        ),
        ({"method": st.hybrid(after=3, gap=0.1)}, ValueError, "gap, which only runs measure"),
        ({"method": "spectrain", "optimizer": rmsprop, "delays": 2}, ValueError, "RMSprop, and"),
        ({"model": []}, ValueError, "expected at least one module"),
        ({"loss_fn": None}, TypeError, "loss_fn: expected a function of"),
    ],
)
def test_what_is_refused(changed, kind, said):
    asked = {"model": small(), "optimizer": sgd, "loss_fn": nn.functional.mse_loss, **changed}
    with pytest.raises(kind, match=said):
        st.Delayed(**asked)


def test_stages_that_share_parameters_are_refused():
    a, b = small(), small()
    b[0].weight = a[0].weight
    with pytest.raises(ValueError, match=r"stages\[1\]: parameter '0.weight' is tied .*no param"):
        st.Delayed([a, b], sgd, nn.functional.mse_loss)


def test_after_an_error_training_begins_anew_with_the_true_weights():
    model, batch = small(), (torch.randn(5, 4), torch.randn(5, 2))
    delayed = st.Delayed(model, sgd, nn.functional.mse_loss, "pipedream", delays=2)
    for _ in range(4):
        delayed.train_on(*batch)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        delayed.train_on(torch.randn(5, 3), batch[1])
    for name, p in model.state_dict().items():
        assert torch.equal(p, before[name])
    other = copy.deepcopy(model)
    expected = nn.functional.mse_loss(other(batch[0]), batch[1])
    assert delayed.train_on(*batch).item() == pytest.approx(expected.item(), rel=1e-12)
    delayed.release()
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    weights = copy.deepcopy(model.state_dict())
    delayed.train_on(*batch)
    assert not torch.equal(model[0].weight, weights["0.weight"])
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match="train_on: autocast is on"):
        delayed.train_on(*batch)


@pytest.mark.parametrize("method", ["sync", "pipedream", "spectrain"])
def test_what_crosses_is_packed_as_a_pipelines(method):
    """The same draws: other draws change gradients by more than rounding."""

    def stages():
        torch.manual_seed(1)
        return [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]

    data = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(6)]
    codec = st.codecs.BFloat16(), st.codecs.Int4(seed=3)
    pipe = st.Pipeline(stages(), sgd, nn.functional.mse_loss, method, microbatches=1, codec=codec)
    losses = [result.loss.item() for result in pipe.run(data)]
    mine, others = (
        st.Delayed(stages(), sgd, nn.functional.mse_loss, method, microbatches=1, codec=each)
        for each in (codec, (codec[0], st.codecs.Int4(seed=4)))
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
    delayed = st.Delayed([model[:2], model[2:]], sgd, mean_loss, "sync", microbatches=4)
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
    delayed.release()
    for mine, their in zip(model.parameters(), replicas[0].parameters(), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-10, atol=1e-12)
