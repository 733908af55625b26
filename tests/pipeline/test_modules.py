"""Tests modules in stages: buffers, dropout, layouts, in-place layers, tuples, frozen parts."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.pipeline_cases import (
    Compared,
    batches,
    close,
    every_method,
    float64,  # noqa: F401  # a fixture
    losses,
    mse,
    sgd,
    tanh_stages,
)
from torch import nn

import spectrain_ext as st


@every_method
def test_batch_norm_buffers_are_not_weights(method):
    stages = [
        nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)),
        nn.Sequential(nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None)),
        nn.Sequential(nn.Linear(6, 5)),
    ]
    compared = Compared(stages, method)
    compared.run(batches(10, size=6))
    compared.run(batches(4, size=6))
    assert int(compared.pipe.state_dict()["0.1.num_batches_tracked"]) == 14


@every_method
@pytest.mark.parametrize("inplace", [nn.ReLU(inplace=True), nn.Hardtanh(inplace=True)], ids=str)
def test_in_place_first_layers(method, inplace):
    stages = [
        nn.Sequential(inplace, nn.Linear(5, 5), nn.Sigmoid()),
        nn.Sequential(type(inplace)(inplace=True), nn.Linear(5, 5), nn.Tanh()),
        nn.Sequential(type(inplace)(inplace=True), nn.Linear(5, 5)),
    ]
    data = batches(8)
    kept = [(x.clone(), y.clone()) for x, y in data]
    compared = Compared(stages, method)
    compared.run(data)
    for (x, y), (x_before, y_before) in zip(data, kept, strict=True):
        assert torch.equal(x, x_before)
        assert torch.equal(y, y_before)


class Split(nn.Module):
    """Returns (tensor, positions, mask, scale): with and without gradients, with integers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, value):
        hidden = torch.tanh(self.linear(value))
        return hidden, hidden.argmax(1), hidden.detach() > 0, self.scale * hidden.mean()


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 6)
        self.linear = nn.Linear(6, 5)

    def forward(self, values):
        hidden, positions, mask, scale = values
        return self.linear(torch.where(mask, hidden * scale, hidden) + self.embed(positions)), mask


class First(nn.Module):
    """Uses one member, so that no gradient comes back for the other."""

    def forward(self, values):
        return values[0] * 2


@every_method
@pytest.mark.parametrize("parts", [1, 2])
def test_tuples_of_tensors(method, parts):
    if parts == 2:
        # A mean over the minibatch within a stage changes if the minibatch is cut.
        stages = [Split(), Join(), First()]
        pipe = st.Pipeline(stages, sgd(), mse, method, microbatches=2)
        assert all(loss.isfinite() for loss in losses(pipe, batches(6, size=4)))
        return
    compared = Compared([Split(), Join(), First(), *tanh_stages(1)], method)
    compared.run(batches(10))
    compared.run(batches(3))


class Spectrum(nn.Module):
    """Returns complex numbers, and accepts them; one frozen parameter is complex."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.cdouble), requires_grad=False)

    def forward(self, value):
        if value.is_complex():
            value = torch.fft.irfft(value, n=6)
        return (torch.fft.rfft(torch.tanh(self.linear(value))) * self.phase).conj()


@every_method
@pytest.mark.parametrize("recompute", [False, True])
def test_complex_activations(method, recompute):
    """Between stages, at the output, and with a gradient back to the first stage."""

    def loss_fn(output, target):
        return (output.abs() ** 2).mean() + mse(torch.fft.irfft(output, n=6), target)

    compared = Compared(
        [Spectrum(), Spectrum(), Spectrum()],
        method,
        loss_fn=loss_fn,
        microbatches=2,
        clip_norm=0.1,
        recompute=recompute,
    )
    before = compared.pipe.state_dict()["0.linear.weight"].clone()
    compared.run(batches(8, size=4, width=6))
    assert not torch.equal(compared.pipe.state_dict()["0.linear.weight"], before)


@every_method
def test_tuples_as_input_and_target(method):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 5)

        def forward(self, values):
            tokens, weight = values
            return self.embed(tokens) * weight

    def loss_fn(output, target):
        value, mask = target
        return ((output - value) ** 2 * mask).mean()

    data = [
        ((torch.randint(0, 7, (4,)), torch.rand(4, 1)), (torch.randn(4, 5), torch.rand(4, 5) > 0.5))
        for _ in range(8)
    ]
    for parts in (1, 2):
        stages = [Tokens(), *tanh_stages(2)]
        Compared(stages, method, loss_fn=loss_fn, microbatches=parts).run(data)


@every_method
def test_frozen_parameters_and_stages_without_any(method):
    stages = [nn.Flatten(), *tanh_stages(2), nn.ReLU(), nn.Linear(5, 5), *tanh_stages(1)]
    stages[1][0].requires_grad_(False)
    stages[2][0].bias.requires_grad_(False)
    stages[4].requires_grad_(False)
    pointer = stages[4].weight.data_ptr()
    compared = Compared(stages, method)
    compared.run(batches(12))
    compared.run(batches(3))
    assert len(compared.pipe.optimizers) == 3
    modules = list(compared.pipe.children())
    assert torch.equal(modules[4].weight, stages[4].weight)
    assert torch.equal(modules[1][0].weight, stages[1][0].weight)
    assert stages[4].weight.data_ptr() == pointer
    assert modules[1][0].weight.untyped_storage().nbytes() == modules[1][0].weight.nbytes


@pytest.mark.parametrize("stages", [[nn.Tanh()], [nn.Tanh(), nn.Linear(5, 5)]])
def test_nothing_to_train_at_all(stages):
    for stage in stages:
        stage.requires_grad_(False)
    with pytest.raises(ValueError, match=r"stages: none has a trainable parameter.*is_trainable"):
        st.Pipeline(stages, sgd(), mse)


@every_method
def test_channels_last(method):
    def conv_stage(c_in, c_out):
        return nn.Sequential(nn.Conv2d(c_in, c_out, 3, padding=1), nn.Tanh()).to(
            memory_format=torch.channels_last
        )

    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    seen = []

    class Seen(nn.Module):
        def forward(self, value):
            seen.append(value.is_contiguous(memory_format=torch.channels_last))
            return value

    stages = [conv_stage(3, 4), nn.Sequential(Seen(), conv_stage(4, 4)), head]
    data = [
        (torch.randn(2, 3, 5, 5).contiguous(memory_format=torch.channels_last), torch.randn(2, 3))
        for _ in range(7)
    ]
    compared = Compared(stages, method)
    compared.run(data)
    assert all(seen)
    weight = next(compared.pipe.children())[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()


@every_method
def test_many_kinds_of_layers(method):
    """Layers that save their weights for the backward in different ways."""

    class LSTM(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(5, 5, batch_first=True)

        def forward(self, value):
            return self.lstm(value)[0]

    stages = [
        LSTM(),
        nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0, batch_first=True),
        nn.Sequential(nn.GroupNorm(2, 4), nn.Conv1d(4, 4, 3, padding=1)),
        nn.Sequential(nn.Flatten(), nn.Linear(20, 3)),
    ]
    data = [(torch.randn(2, 4, 5), torch.randn(2, 3)) for _ in range(8)]
    Compared(stages, method).run(data)


@every_method
def test_tied_parameters_within_a_stage(method):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)
            self.two.weight = self.one.weight

        def forward(self, value):
            return torch.tanh(self.two(torch.tanh(self.one(value))))

    compared = Compared([Tied(), Tied(), Tied()], method)
    compared.run(batches(8))
    for result in compared.pipe.run(batches(5)):
        if result.index == 3:
            state = compared.pipe.state_dict()
            assert torch.equal(state["0.one.weight"], state["0.two.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_method
def test_other_dtypes(method, dtype):
    def mean_squares(output, target):
        return ((output.float() - target.float()) ** 2).mean()

    pipe = st.Pipeline(
        [stage.to(dtype) for stage in tanh_stages(3)],
        sgd(momentum_dtype=torch.float32),
        mean_squares,
        method,
    )
    data = [(torch.randn(8, 5).to(dtype), torch.full((8, 5), 0.5, dtype=dtype))] * 60
    found = losses(pipe, data)
    assert found[-1] < found[0] / 4
    assert {p.dtype for p in pipe.parameters()} == {dtype}


class Masks(nn.Module):
    """Remembers random numbers drawn in its forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.seen = []

    def forward(self, value):
        self.seen.append(torch.rand(3))
        return torch.dropout(self.linear(value), 0.5, self.training)


def test_dropout_does_not_depend_on_the_schedule():
    data, found = batches(7), {}
    for method in st.methods():
        if method in ("spectrain-smoothed", "pipedream-2bw", "error-feedback", "xgrad"):
            continue  # not with this optimizer, one microbatch or several stages
        torch.manual_seed(5)
        stages = [Masks() for _ in range(4)]
        before = torch.get_rng_state()
        pipe = st.Pipeline(stages, sgd(lr=0.0), mse, method, microbatches=1)
        values = torch.stack(losses(pipe, data))
        assert torch.equal(torch.get_rng_state(), before)
        found[method] = (values, torch.stack([torch.stack(stage.seen) for stage in stages]))
    values, masks = found["sync"]
    for other, other_masks in found.values():
        assert torch.equal(other, values)
        assert torch.equal(other_masks, masks)
    assert len({tuple(row.tolist()) for row in masks.reshape(-1, 3)}) == 4 * 7


def test_the_callers_random_numbers_and_the_stages_do_not_mix():
    def seen(draws):
        torch.manual_seed(5)
        stages = [Masks(), Masks()]
        drawn = []

        def data():
            for x, y in batches(5):
                drawn.append(torch.rand(1).item() if draws else 0.0)
                yield x, y

        for _ in st.Pipeline(stages, sgd(), mse).run(data()):
            if draws:
                torch.rand(7)
        return torch.stack(stages[0].seen + stages[1].seen), drawn

    quiet, _ = seen(False)
    busy, drawn = seen(True)
    assert torch.equal(quiet, busy)
    assert len(set(drawn)) == 5


def test_seeds_do_not_share_numbers_between_stages():
    seen = set()
    for seed in range(4):
        torch.manual_seed(seed)
        stages = [Masks() for _ in range(3)]
        losses(st.Pipeline(stages, sgd(), mse, microbatches=1), batches(3))
        seen |= {tuple(row.tolist()) for stage in stages for row in stage.seen}
    assert len(seen) == 4 * 3 * 3


def test_a_batch_may_be_refilled_as_soon_as_the_next_one_is_asked_for():
    data = batches(9)

    def refilled():
        x, y = torch.empty(3, 5), torch.empty(3, 5)
        for a, b in data:
            x.copy_(a)
            y.copy_(b)
            yield x, y
            x.fill_(float("nan"))
            y.fill_(float("nan"))

    pipes = [st.Pipeline(tanh_stages(3), sgd(), mse) for _ in range(2)]
    pipes[1].load_state_dict(pipes[0].state_dict())
    fresh, reused = losses(pipes[0], data), losses(pipes[1], refilled())
    assert torch.equal(torch.stack(fresh), torch.stack(reused))


def test_a_batch_may_be_a_list_as_data_loaders_give_it():
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(10, 5), torch.randn(10, 5)), batch_size=4
    )
    assert len(losses(st.Pipeline(tanh_stages(2), sgd(), mse), loader)) == 3


class Sometimes(nn.Module):
    """Changes its input in place in only some forwards, after drawing random numbers."""

    def __init__(self, when):
        super().__init__()
        self.when, self.count, self.drawn = when, 0, []

    def forward(self, value):
        self.drawn.append(torch.rand(1).item())
        self.count += 1
        return value.relu_() if self.count in self.when else value.relu()


@pytest.mark.parametrize("first", [True, False])
def test_a_first_layer_that_works_in_place_now_and_then(first):
    """The identity before it exists when needed; random numbers do not change."""
    torch.manual_seed(1)
    layers = tanh_stages(3)
    found, drawn = [], []
    marked = (1, 6) if first else (4, 5, 9)
    for in_place in (False, True):
        torch.manual_seed(1)
        stages = [copy.deepcopy(layers[0])]
        for layer in layers[1:]:
            sometimes = Sometimes(marked if in_place else ())
            stages.append(nn.Sequential(sometimes, *copy.deepcopy(layer)))
        torch.manual_seed(2)
        pipe = st.Pipeline(stages, sgd(), mse)
        found.append(torch.stack(losses(pipe, batches(10))))
        drawn.append([stage[0].drawn for stage in stages[1:]])
    close(found[1], found[0])
    for without, with_it in zip(*drawn, strict=True):
        assert list(dict.fromkeys(with_it)) == without  # a repeated forward draws the same
