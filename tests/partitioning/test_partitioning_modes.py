"""Tests that stages of a traced model keep both modes and other state that tracing could freeze."""

from __future__ import annotations

import copy
import pickle
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from helpers import rank_pipelines
from helpers.ranks import run_ranks
from torch import nn

import spectrain_ext as st
from spectrain_ext.partitioning import Profile, TracedStage
from spectrain_ext.partitioning.profile import BlockProfile
from spectrain_ext.partitioning.traced import split
from studies.models.vision import resnet

LOSS = nn.functional.mse_loss


def sgd(params):
    return st.optim.SGD(params, lr=0.05, momentum=0.9)


def run(stages, value):
    for stage in stages:
        value = stage(value)
    return value


def drawn(call, *args):
    torch.manual_seed(5)
    return call(*args)


class Two(nn.Module):
    """A module between two linear layers, with a cut directly after it."""

    def __init__(self, middle, width=4):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.middle = middle
        self.last = nn.Linear(width, 2)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


class Functional(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, training=self.training)


class Branch(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x * 2.0


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, 4, num_layers=2, dropout=0.4, batch_first=True)

    def forward(self, x):
        return self.gru(x)[0]


def encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 1)


MIDDLES = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (3, 4)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(5, track_running_stats=True), (3, 5, 4)),
    "Dropout": (nn.Dropout, (3, 4)),
    "Dropout1d": (nn.Dropout1d, (3, 5, 4)),
    "AlphaDropout": (nn.AlphaDropout, (3, 4)),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout, (3, 5, 4)),
    "F.dropout": (Functional, (3, 4)),
    "RReLU": (nn.RReLU, (3, 4)),
    "branch": (Branch, (3, 4)),
    "MultiheadAttention": (Attention, (3, 5, 4)),
    "TransformerEncoder": (encoder, (3, 5, 4)),
    "GRU": (Recurrent, (3, 5, 4)),
}


@pytest.mark.parametrize("name", MIDDLES)
def test_both_modes_are_the_models(name):
    make, shape = MIDDLES[name]
    torch.manual_seed(0)
    model = Two(make())
    stages = nn.Sequential(*split(model, torch.randn(shape), ["last"]))
    alone = copy.deepcopy(model)
    for mode in (True, False, True):
        stages.train(mode)
        alone.train(mode)
        for size in (shape[0], 7, 1):
            if size == 1 and name == "BatchNorm1d" and mode:
                continue
            x = torch.randn(size, *shape[1:])
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    torch.testing.assert_close(drawn(stages, x), drawn(alone, x))
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor)


class Net(nn.Module):
    """The package's ResNet as a module that is not a sequence."""

    def __init__(self, blocks):
        super().__init__()
        layers = resnet(10, width=4, seed=1)
        self.body = nn.Sequential(*layers[:blocks], nn.AdaptiveAvgPool2d(2), nn.Flatten())

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("blocks", [2, pytest.param(9, marks=pytest.mark.nightly)])
def test_resnet_trains_and_evaluates_as_the_uncut_model(blocks):
    """Training updates running statistics once per minibatch; evaluation never does."""
    model = Net(blocks)
    keys = list(model.state_dict())
    alone = copy.deepcopy(model)
    images = torch.randn(4, 3, 8, 8)
    parts = st.partition(
        model, 2, images, split_points=["body.1"], profile=Profile((BlockProfile(1.0),) * 2)
    )
    pipe = st.Pipeline(parts, sgd, F.cross_entropy, method="sync")
    optimizer = sgd(alone.parameters())
    data = [(torch.randn(4, 3, 8, 8), torch.randint(10, (4,))) for _ in range(3)]
    for _ in pipe.run(data):
        pass
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        optimizer.step()

    def compare():
        state = {s.full_name(k): v for s in parts for k, v in s.state_dict().items()}
        assert sorted(state) == sorted(keys)
        for name, tensor in alone.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5)

    compare()
    assert int(alone.state_dict()["body.0.1.num_batches_tracked"]) == 3
    pipe.eval()
    alone.eval()
    for size in (4, 6, 1):
        x = torch.randn(size, 3, 8, 8)
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), alone(x), rtol=1e-4, atol=1e-5)
    compare()
    pipe.train()
    alone.train()
    torch.testing.assert_close(pipe(images), alone(images), rtol=1e-4, atol=1e-5)
    compare()


def test_a_model_in_evaluation_can_be_cut_and_trained():
    model = Two(nn.BatchNorm1d(4)).eval()
    keys = set(model.state_dict())
    alone = copy.deepcopy(model)
    stages = nn.Sequential(*split(model, torch.randn(3, 4), ["last"]))
    assert not any(stage.training for stage in stages)
    assert not model.training
    assert {s.full_name(k) for s in stages for k in s.state_dict()} == keys
    x = torch.randn(5, 4)
    assert torch.equal(stages(x), alone(x))
    assert torch.equal(stages.train()(x), alone.train()(x))
    assert torch.equal(stages.eval()(x), alone.eval()(x))


def test_copies_and_conversions_keep_both_modes():
    model = Two(nn.BatchNorm1d(4)).double().float()
    stages = nn.Sequential(*split(model, torch.randn(3, 4), ["last"]))
    x = torch.randn(3, 4)
    copied = copy.deepcopy(stages)
    stages(x)
    assert not torch.equal(copied.eval()(x), stages.eval()(x))
    copied.load_state_dict(stages.state_dict())
    assert torch.equal(copied(x), stages(x))
    other = copy.deepcopy(stages).double().train()
    other(x.double())  # its buffers differ from before
    alone = copy.deepcopy(model).double().train()
    alone(x.double())
    torch.testing.assert_close(other.eval()(x.double()), alone.eval()(x.double()))
    assert other[0].state_dict()["part.middle.num_batches_tracked"] == 2
    assigned = copy.deepcopy(copied)
    assigned.load_state_dict(other.float().state_dict(), assign=True)
    assert torch.equal(assigned(x), other(x))


def test_stages_are_not_pickled():
    with pytest.raises(TypeError, match="traced model cannot be pickled; keep its state_dict"):
        pickle.dumps(split(Two(nn.ReLU()), torch.randn(3, 4), ["last"])[1])


@pytest.mark.parametrize("method", ["sync", "spectrain"])
def test_recomputation_moves_running_statistics_once(method):
    torch.manual_seed(0)
    model = Two(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)))
    other = copy.deepcopy(model)
    data = [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(4)]
    found = []
    for each, recompute in ((model, False), (other, True)):
        torch.manual_seed(1)
        pipe = st.Pipeline(
            split(each, data[0][0], ["last"]), sgd, LOSS, method=method, recompute=recompute
        )
        losses = [result.loss for result in pipe.run(data)]
        assert pipe.state_dict()["middle.0.num_batches_tracked"] == 4
        pipe.eval()
        found.append([*losses, pipe(data[0][0]).detach()] if method == "sync" else [])
    torch.testing.assert_close(found[0], found[1])


def test_microbatches_of_uneven_sizes():
    torch.manual_seed(0)

    class Mean(nn.Module):
        def forward(self, x):
            return (x - x.sum(0) / x.size(0)).view(x.size(0), -1)

    model = Two(Mean())
    alone = nn.Sequential(copy.deepcopy(model))
    data = [(torch.randn(n, 4), torch.randn(n, 2)) for n in (5, 4, 2, 1)]
    found = [
        [r.loss for r in st.Pipeline(s, sgd, LOSS, method="gpipe", microbatches=2).run(data)]
        for s in (split(model, data[0][0], ["middle", "last"]), alone)
    ]
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.nightly
def test_ranks_have_the_stages_of_one_process():
    torch.set_num_threads(1)
    alone = rank_pipelines.cut(0, 1)
    for (expected,), (state, value) in zip(run_ranks(rank_pipelines.cut, 3), alone, strict=True):
        torch.testing.assert_close(expected, (state, value), rtol=0.0, atol=0.0)


# Modes that the stages cannot have


class NotInEvaluation(nn.Module):
    def forward(self, x):
        if not self.training and x.sum() > 0:
            return x
        return x * 2.0


def test_a_mode_that_cannot_be_traced_is_refused_when_asked_for():
    stages = split(Two(NotInEvaluation()), torch.randn(3, 4), ["last"])
    pipe = st.Pipeline(stages, sgd, LOSS)
    x = torch.randn(3, 4)
    before = pipe(x)
    with pytest.raises(RuntimeError, match=r"eval: .* in evaluation: torch\.export cannot trace"):
        pipe.eval()
    assert pipe.training
    assert all(module.training for module in pipe.modules())
    assert torch.equal(pipe(x), before)
    pipe.train()
    stages[0].training = False  # without its knowledge
    with pytest.raises(RuntimeError, match=r"forward: .* in evaluation"):
        stages[0](x)
    with pytest.raises(RuntimeError, match="cannot trace the model as it is"):
        split(Two(NotInEvaluation()).eval(), x, ["last"])


class Auxiliary(nn.Module):
    """Returns two tensors in training and one in evaluation."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.extra = nn.Linear(4, 2)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        extra = self.extra(x) if self.training else None
        y = self.last(x)
        return y if extra is None else y + extra


class Swaps(nn.Module):
    """Returns the same number of tensors in both modes, but different ones."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        first, second = (self.a, self.b) if self.training else (self.b, self.a)
        y, z = first(x), second(x)
        return self.last(y) + z


class Skipped(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.middle(x) if self.training else x)


@pytest.mark.parametrize(
    ("model", "point", "why"),
    [
        (
            Auxiliary,
            "last",
            r"in evaluation stage 1 takes linear \(\*, 4\) float32, and in tr",
        ),
        (Swaps, "last", r"in evaluation stage 1 takes"),
        (Skipped, "middle", r"in evaluation the model has 1 stages, and 2 in training"),
    ],
)
def test_modes_that_need_other_cuts(model, point, why):
    model = model()
    alone = copy.deepcopy(model)
    stages = nn.Sequential(*split(model, torch.randn(3, 4), [point]))
    x = torch.randn(3, 4)
    assert torch.equal(stages(x), alone(x))
    with pytest.raises(RuntimeError, match=f"eval: {why}"):
        stages.eval()
    assert torch.equal(stages(x), alone(x))


def test_a_model_may_return_something_else_in_evaluation():
    class Heads(Skipped):
        def forward(self, x):
            x = self.middle(self.first(x))
            y = self.last(x)
            return (y, x) if self.training else y

    model = Heads()
    stages = nn.Sequential(*split(model, torch.randn(3, 4), ["middle"]))
    x = torch.randn(3, 4)
    torch.testing.assert_close(stages(x), model(x))
    torch.testing.assert_close(stages.eval()(x), model.eval()(x))


def test_some_modules_in_another_mode():
    model = Two(nn.BatchNorm1d(4))
    model.middle.eval()
    alone = copy.deepcopy(model)
    stages = nn.Sequential(*split(model, torch.randn(3, 4), ["last"]))
    assert [m.training for m in model.modules()] == [m.training for m in alone.modules()]
    x = torch.randn(3, 4)
    assert torch.equal(stages(x), alone(x))
    assert torch.equal(copy.deepcopy(stages)(x), alone(x))
    assert torch.equal(stages.train()(x), alone.train()(x))  # as ever, of all modules
    assert torch.equal(stages.eval()(x), alone.eval()(x))


def test_a_train_of_the_models_own():
    class Frozen(Two):
        def train(self, mode=True):
            super().train(mode)
            self.middle.eval()
            return self

    model = Frozen(nn.BatchNorm1d(4)).train()
    stages = nn.Sequential(*split(model, torch.randn(3, 4), ["last"]))
    assert (model.training, model.middle.training) == (True, False)
    for mode in (True, False, True):
        stages.train(mode)(torch.randn(3, 4))
    assert model.middle.num_batches_tracked == 0


def test_a_train_that_changes_weights():
    class Merging(nn.Linear):
        def train(self, mode=True):
            if mode != self.training:
                self.weight.data += -1.0 if mode else 1.0
            return super().train(mode)

    model = Two(Merging(4, 4))
    before = copy.deepcopy(model.state_dict())
    stages = nn.Sequential(*split(model, torch.randn(3, 4), ["last"]))
    assert model.middle.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    with pytest.raises(RuntimeError, match=r"own eval\(\) changes 'middle\.weight'"):
        stages.eval()


def test_inner_modules_have_no_mode_of_their_own():
    stages = split(Two(nn.BatchNorm1d(4)), torch.randn(3, 4), ["last"])
    with pytest.raises(RuntimeError, match="eval: the modules inside a traced stage have no mode"):
        stages[0].part.middle.eval()


# Other state that tracing could freeze


def test_sizes_that_the_model_treats_otherwise_are_refused():
    class Long(nn.Module):
        def forward(self, x):
            return x if x.size(0) > 4 else -x

    stages = split(Two(Long()), torch.randn(6, 4), ["last"])
    run(stages, torch.randn(5, 4))
    with pytest.raises(ValueError, match=r"Guard failed: .* got shapes \[\(4, 4\)\]"):
        run(stages, torch.randn(4, 4))
    with pytest.raises(ValueError, match=r"expected x \(\*, 4\) float32, got shape \(6, 5\)"):
        run(stages, torch.randn(6, 5))
    with pytest.raises(ValueError, match=r"expected .* \(\*, 4\) float32, got shape \(6, 3\)"):
        stages[1](torch.randn(6, 3))


def test_sizes_are_those_of_the_call_on_every_stage():
    class Sizes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.middle = nn.Linear(4, 4)
            self.last = nn.Linear(4, 4)

        def forward(self, x, mask):
            n, t, _ = x.shape
            y = self.first(x).reshape(n * t, 4)
            total = self.middle(y).sum(0) / (n * t)
            return self.last(total).expand(n, 4) + mask

    model = Sizes()
    stages = split(model, (torch.randn(3, 5, 4), torch.ones(3, 4)), ["middle", "last"])
    for n, t in ((3, 5), (2, 7), (6, 3)):
        given = (torch.randn(n, t, 4), torch.rand(n, 4))
        torch.testing.assert_close(run(stages, given), model(*given))


def test_a_single_sample_is_not_taken_for_several():
    """If no input of a stage has the number of samples."""

    class Sums(Skipped):
        def forward(self, x):
            y = self.middle(self.first(x).sum(0))
            return self.last(y) * (5.0 if x.size(0) == 1 else 1.0)

    class Passes(Sums):
        def forward(self, x):
            return super().forward(x) + x.sum(1, keepdim=True)

    x = torch.randn(3, 4)
    model = Sums()
    stages = split(model, x, ["middle"])
    torch.testing.assert_close(run(stages, x), model(x))
    with pytest.raises(ValueError, match=r"a single sample: .* no later stage could tell; leave"):
        run(stages, x[:1])
    model = Passes()
    stages = split(model, x, ["middle"])
    for size in (1, 2, 3):
        torch.testing.assert_close(run(stages, x[:size]), model(x[:size]))


class Convolves(nn.Module):
    """Attends over the pixels after a batch norm, and returns to the image's size."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        h = torch.relu(self.norm(self.stem(x)))
        h = h.view(x.size(0), 4, -1).transpose(1, 2)
        h = self.attention(h, h, h, need_weights=False)[0]
        h = self.last(h).transpose(1, 2).reshape(-1, 2, *x.shape[2:])
        return h.mean((2, 3))


class Folds(nn.Module):
    """Returns the tokens of all samples as rows, without the number of samples."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        h = self.first(x)
        rows = self.attention(h, h, h, need_weights=False)[0].reshape(-1, 4)
        return self.last(rows).view(x.size(0), -1, 2).softmax(0).mean(1)


@pytest.mark.parametrize(
    ("make", "samples", "shapes"),
    [
        (Convolves, 3, [(3, 6, 4), (3, 5, 5)]),
        (Folds, 3, [(5, 4), (3, 4)]),
        (Folds, 1, [(5, 4), (3, 4)]),
    ],
)
def test_a_single_sample_of_any_length(make, samples, shapes):
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    stages = nn.Sequential(*split(model, torch.randn(samples, *shapes[0]), ["last"]))
    for mode in (True, False):
        stages.train(mode)
        alone.train(mode)
        for size in (1, 2, 1):
            for shape in shapes:
                x = torch.randn(size, *shape)
                found, expected = stages(x), alone(x)
                torch.testing.assert_close(found, expected)
                found.square().sum().backward()
                expected.square().sum().backward()
    for (name, p), q in zip(alone.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=name)
    torch.testing.assert_close(model.state_dict(), alone.state_dict())


def test_an_epoch_whose_last_microbatch_has_one_sample():
    torch.manual_seed(0)
    model = Convolves()
    alone = copy.deepcopy(model)
    dataset = torch.utils.data.TensorDataset(torch.randn(7, 3, 6, 4), torch.randint(2, (7,)))
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    parts = st.partition(model, 2, torch.randn(2, 3, 5, 5), profile="parameters")
    pipe = st.Pipeline(parts, sgd, F.cross_entropy, method="gpipe", microbatches=2)
    losses = [result.loss for result in pipe.run(loader)]
    optimizer = sgd(list(alone.parameters()))
    for found, (x, y) in zip(losses, loader, strict=True):
        optimizer.zero_grad()
        halves = zip(x.split(2), y.split(2), strict=True)
        expected = sum(F.cross_entropy(alone(a), b) * (len(a) / len(x)) for a, b in halves)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(dict(pipe.state_dict()), dict(alone.state_dict()))


def test_one_sample_that_the_model_refuses():
    stages = split(Two(nn.BatchNorm1d(4)), torch.randn(3, 4), ["last"])
    why = r"a single sample: .*Expected more than 1 value per channel .*; leave such a batch out"
    with pytest.raises(ValueError, match=why):
        run(stages, torch.randn(1, 4))


class Constants(nn.Module):
    """Uses its device and dtype, a literal, and a tensor that is not a module buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = torch.ones(4)

    def forward(self, x):
        with torch.no_grad():
            noise = torch.zeros(x.size(0), 4, device=x.device, dtype=x.dtype)
        x = self.linear(x) + noise + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
        return x.to(noise.device) * self.table.to(x.device)


def test_a_stage_moves_to_another_device():
    stages = nn.Sequential(*split(Two(Constants()), torch.randn(3, 4), ["last"]))
    assert all("_constants" not in key for key in stages.state_dict())
    moved = copy.deepcopy(stages).to("meta")
    assert moved(torch.empty(2, 4, device="meta")).device.type == "meta"
    assert stages(torch.randn(2, 4)).device.type == "cpu"


def test_a_dtype_that_the_code_names_must_stay():
    stages = split(Two(Constants()), torch.randn(3, 4), ["last"])
    with pytest.raises(TypeError, match=r"expected torch\.float32 .* convert the model before"):
        stages[0].double()(torch.randn(3, 4, dtype=torch.double))
    plain = nn.Sequential(*split(Two(nn.ReLU()), torch.randn(3, 4), ["last"])).bfloat16()
    assert plain(torch.randn(3, 4).bfloat16()).dtype is torch.bfloat16


def test_gradients_enabled_or_not_is_asked_each_time():
    class Asks(nn.Module):
        def forward(self, x):
            return x * 2.0 if torch.is_grad_enabled() else x * 3.0

    model = Two(Asks())
    asks = torch.is_grad_enabled
    with torch.no_grad():
        stages = nn.Sequential(*split(model, torch.randn(3, 4), ["last"]))
    assert torch.is_grad_enabled is asks
    x = torch.randn(3, 4)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert torch.equal(stages(x), model(x))
            assert stages(x).requires_grad is grad


def test_autocast_follows_the_device():
    class Casts(nn.Module):
        def forward(self, x):
            with torch.autocast(x.device.type, torch.bfloat16):
                return x @ x.T

    class Model(Two):
        def forward(self, x):
            return self.middle(self.first(x)) + self.last(x).sum()

    stages = split(Model(Casts()), torch.randn(3, 4), ["last"])
    assert torch.bfloat16 in {tensor.dtype for tensor in stages[0](torch.randn(5, 4))}
    moved = stages[0]._modes[True, True][0].program._on(torch.device("cuda", 0))
    names = [node.args[0] for node in moved.graph.nodes if str(node.target) == "wrap_with_autocast"]
    assert names == ["cuda"]


@pytest.mark.parametrize("draw", [random.random, lambda: float(numpy.random.rand())])
def test_numbers_that_torch_does_not_draw_are_refused(draw):
    class Draws(nn.Module):
        def forward(self, x):
            return x * draw() if self.training else x

    python, legacy = random.getstate(), numpy.random.get_state()[2]
    with pytest.raises(RuntimeError, match=r"the model draws from .*random as it is, and those"):
        split(Two(Draws()), torch.randn(3, 4), ["last"])
    stages = split(Two(Draws()).eval(), torch.randn(3, 4), ["last"])
    with pytest.raises(RuntimeError, match=r"train: .*the model draws from .*random in training"):
        stages[0].train()
    assert (random.getstate(), numpy.random.get_state()[2]) == (python, legacy)


def test_code_that_counts_is_warned_of():
    class Counts(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x / self.calls

    model = Two(Counts())
    model.middle.calls = 2
    with pytest.warns(
        UserWarning, match=r"forward changes middle\.calls; stages of a traced model"
    ):
        split(model, torch.randn(3, 4), ["last"])
    assert model.middle.calls == 2
    assert not model._forward_hooks


class Rounds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class StraightThrough(nn.Module):
    def forward(self, x):
        return Rounds.apply(x * 1.0)


class Hooked(nn.Module):
    def forward(self, x):
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / 10)
        return x


class HookedModule(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_full_backward_hook(lambda module, given, made: (given[0] / 10,))


class Inference(nn.Module):
    def forward(self, x):
        with torch.inference_mode():
            shift = torch.tanh(x)
        return x + shift


@pytest.mark.parametrize(
    ("middle", "what"),
    [
        (StraightThrough, "autograd.Function Rounds"),
        (Hooked, "a tensor's register_hook"),
        (HookedModule, "a module's backward hook"),
        (Inference, "torch.inference_mode, where no_grad would do"),
    ],
)
def test_derivatives_that_a_graph_does_not_have_are_refused(middle, what):
    real = vars(torch.autograd.Function)["apply"], torch.Tensor.register_hook
    for cut in (
        lambda: split(Two(middle()), torch.randn(3, 4), ["last"]),
        lambda: st.partition(Two(middle()), 2, torch.randn(3, 4)),
    ):
        with pytest.raises(RuntimeError, match=rf"backward of its own as it is, {what}, and"):
            cut()
    assert (vars(torch.autograd.Function)["apply"], torch.Tensor.register_hook) == real


def test_derivatives_of_a_custom_op_are_kept():
    @torch.library.custom_op("spectrain_test::rounded", mutates_args=())
    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.round()

    rounded.register_fake(torch.empty_like)
    rounded.register_autograd(lambda ctx, gradient: gradient)

    class Operation(nn.Module):
        def forward(self, x):
            return rounded(x * 1.0)

    model, x = Two(Operation()), torch.randn(3, 4)
    stages = split(model, x, ["last"])
    (wanted,) = torch.autograd.grad(model(x).square().sum(), model.first.weight)
    (found,) = torch.autograd.grad(run(stages, x).square().sum(), model.first.weight)
    assert wanted.abs().sum() > 0
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_is_assigned_to(persistent):
    class Averages(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4), persistent=persistent)

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x - self.mean

    model = Two(Averages())
    if not persistent:  # usually a cache
        split(model, torch.randn(3, 4), ["last"])
        return
    with pytest.raises(RuntimeError, match=r"assigns to the module buffer middle\.mean, and"):
        split(model, torch.randn(3, 4), ["last"])
    with pytest.raises(RuntimeError, match=r"assigns to the module buffer middle\.mean, and"):
        st.partition(model, 2, torch.randn(3, 4))
    assert not model._forward_hooks


def test_what_no_graph_uses_is_kept_for_checkpoints():
    class Unused(Two):
        def __init__(self):
            super().__init__(nn.ReLU())
            self.head = nn.Linear(4, 4)
            self.last.register_buffer("scale", torch.ones(2))

    model = Unused()
    stages = split(model, torch.randn(3, 4), ["last"])
    assert all(isinstance(stage, TracedStage) for stage in stages)
    assert sorted(s.full_name(k) for s in stages for k in s.state_dict()) == sorted(
        model.state_dict()
    )
    data = [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(4)]
    for method in ("sync", "spectrain", "pipedream"):
        for _ in st.Pipeline(stages, sgd, LOSS, method=method).run(data):
            pass


def test_other_results_than_tensors():
    class Dict(Two):
        def forward(self, x):
            return {"y": super().forward(x), "more": (x, [x * 2])}

    model, x = Dict(nn.ReLU()), torch.randn(3, 4)
    stages = split(model, x, ["last"])
    assert run(stages, x).keys() == {"y", "more"}
    torch.testing.assert_close(run(stages, x), model(x))

    class Number(Two):
        def forward(self, x):
            return super().forward(x), 3

    with pytest.raises(ValueError, match="the model returns 3, expected"):
        split(Number(nn.ReLU()), x, ["last"])
    with pytest.raises(TypeError, match=r"example_input: expected a tensor .* got a int at 1"):
        st.partition(Two(nn.ReLU()), 2, (torch.randn(3, 4), 3), split_points=["last"])
