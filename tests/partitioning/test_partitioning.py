"""Measuring and cutting models: nothing is changed, names are the model's, errors say why."""

from __future__ import annotations

import copy
from collections import UserDict
from itertools import pairwise

import pytest
import torch
from helpers import value_programs
from torch import nn
from torch.distributed.pipelining import SplitPoint

import spectrain_ext as st
from spectrain_ext.partitioning import BlockProfile, Profile, Slice, cut_at, measure

LOSS = nn.functional.mse_loss


def sgd(params):
    return st.optim.SGD(params, lr=0.05, momentum=0.9)


def layers(*sizes):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def given(*seconds, **more):
    return Profile(tuple(BlockProfile(s) for s in seconds), **more)


# Measuring.


class Noisy(nn.Module):
    """Has all that a measurement could change."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.drop(self.norm(self.linear(x))))


def test_measuring_changes_nothing():
    blocks = [Noisy(), nn.ReLU(inplace=True), Noisy()]
    kept = [torch.full_like(p, 7.0) for p in blocks[0].parameters()]
    for p, gradient in zip(blocks[0].parameters(), kept, strict=True):
        p.grad = gradient
    before = copy.deepcopy([block.state_dict() for block in blocks])
    random = torch.get_rng_state()
    example = torch.randn(5, 4)
    copied = example.clone()
    random = torch.get_rng_state()
    measure(blocks, example, repeats=2)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(example, copied)
    for block, state in zip(blocks, before, strict=True):
        for name, tensor in block.state_dict().items():
            assert torch.equal(tensor, state[name]), name
    for p, gradient in zip(blocks[0].parameters(), kept, strict=True):
        assert p.grad is gradient
        assert torch.equal(gradient, torch.full_like(p, 7.0))
    assert all(p.grad is None for p in blocks[2].parameters())


def test_measured_bytes():
    profile = measure([nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)], torch.randn(3, 4), repeats=1)
    assert [block.output_bytes for block in profile.blocks] == [96, 96, 24]
    assert [block.parameter_bytes for block in profile.blocks] == [160, 0, 72]
    # a Linear keeps its input, a Tanh its output
    assert [block.saved_bytes for block in profile.blocks] == [48, 96, 96]
    assert all(block.seconds > 0 for block in profile.blocks)


def test_a_slower_block_takes_longer(monkeypatch):
    layers = [0]  # a clock that no busy machine disturbs
    monkeypatch.setattr("spectrain_ext.partitioning.profile.time.perf_counter", lambda: layers[0])

    class Many(nn.Module):
        def __init__(self, times):
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.times = times

        def forward(self, x):
            for _ in range(self.times):
                x = self.linear(x)
            layers[0] += self.times
            return x

    slow = st.partition([Many(200), Many(1), Many(1)], 2, torch.randn(32, 64), repeats=3)
    assert slow.cut.ends == (1, 3)
    assert slow.cut.bottleneck == 0


def test_blocks_may_exchange_tuples_and_need_no_gradient():
    class Pair(nn.Module):
        def forward(self, value):
            return value[0] * 2.0, value[1]

    blocks = [nn.Embedding(5, 3), nn.Identity()]
    assert measure(blocks, torch.tensor([1, 2]), repeats=1).blocks[0].output_bytes == 24
    profile = measure([Pair()], (torch.randn(2), torch.tensor([1, 2])), repeats=1)
    assert profile.blocks[0].output_bytes == 8 + 16


def test_blocks_that_exchange_complex_numbers_are_measured_with_their_gradients():
    class Inverse(nn.Module):
        def forward(self, x):
            x.register_hook(seen.append)
            return torch.fft.irfft(x)

    class Forward(nn.Module):
        def forward(self, x):
            return torch.fft.rfft(x)

    seen = []
    measure([nn.Linear(4, 4), Forward(), Inverse()], torch.randn(3, 4), repeats=1)
    assert [gradient.dtype for gradient in seen] == [torch.complex64] * 2


@pytest.mark.parametrize("repeats", [0, -1])
def test_no_repeats(repeats):
    with pytest.raises(ValueError, match=r"repeats: expected at least 1, got"):
        measure([nn.ReLU()], torch.zeros(1), repeats=repeats)


def test_what_a_block_may_not_return():
    class Listed(nn.Module):
        def forward(self, x):
            return [x]

    with pytest.raises(TypeError, match=r"block 1: expected a tensor, a tuple of tensors.*list"):
        measure([nn.ReLU(), Listed(), nn.ReLU()], torch.zeros(1))
    assert measure([nn.ReLU(), Listed()], torch.zeros(3)).blocks[1].output_bytes == 12
    with pytest.raises(TypeError, match=r"example_input\[0\]: expected a tensor"):
        st.partition([nn.ReLU()], 1, [1.0])


def test_dicts_from_block_to_block_take_the_bytes_of_tuples():
    """The last block returns a dataclass."""
    found = {}
    for form in ("dict", "tuple"):
        (batch,) = value_programs.data([4], form)
        example = UserDict(batch) if form == "dict" else batch[0]
        blocks = value_programs.stages(3, form, "dataclass")
        parts = st.partition(blocks, 2, example, repeats=1)
        found[form] = [(b.output_bytes, b.parameter_bytes) for b in parts.profile.blocks]
        assert all(p.grad is None for block in blocks for p in block.parameters())
    assert found["dict"] == found["tuple"]
    assert [of for of, _ in found["dict"]] == [4 * 4 * 4 + 4 * 4] * 2 + [4 * 4 * 4]
    with pytest.raises(TypeError, match=r"example_input\['x'\]: expected a tensor, got None"):
        st.partition([nn.ReLU()], 1, {"x": None})


# Cutting.


def test_stages_compute_what_the_model_does_and_are_its_own():
    model = layers(4, 5, 6, 7, 8)
    parts = st.partition(model, 3, torch.randn(2, 4), profile=given(2, 1, 1, 2))
    assert parts.cut.ends == (1, 3, 4)
    assert [range(s.blocks.start, s.blocks.stop) for s in parts.cut.stages] == [
        range(0, 1),
        range(1, 3),
        range(3, 4),
    ]
    x = torch.randn(2, 4)
    y = x
    for stage in parts:
        y = stage(y)
    assert torch.equal(y, model(x))
    assert {p for s in parts for p in s.parameters()} == set(model.parameters())
    assert len(parts) == 3


def test_stages_know_the_models_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    names = [s.full_name(n) for s in cut_at(model, [1, 2]) for n in s.state_dict()]
    assert names == list(model.state_dict())


def test_a_partition_trains():
    parts = st.partition(layers(4, 4, 4, 4), 3, torch.randn(2, 4), repeats=1)
    pipe = st.Pipeline(parts, sgd, LOSS)
    data = [(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(4)]
    assert len(list(pipe.run(data))) == 4


def test_tied_blocks_stay_together():
    model = layers(3, 3, 3, 3, 3)
    model[2].weight = model[1].weight
    parts = st.partition(model, 3, torch.randn(1, 3), profile=given(1, 5, 5, 1))
    assert parts.cut.ends == (1, 3, 4)
    with pytest.raises(ValueError, match=r"'1\.weight', which is '2\.weight' too") as caught:
        st.partition(model, 4, torch.randn(1, 3), profile=given(1, 5, 5, 1))
    assert str(caught.value).startswith("n_stages: 4 stages need 3 places to cut")
    with pytest.raises(ValueError, match=r"ends: a cut before block 2 separates parameter '1"):
        cut_at(model, [2, 4])


def test_a_module_in_two_places_stays_together():
    relu = nn.ReLU()
    with pytest.raises(ValueError, match=r"module '0', which is '2' too"):
        st.partition([relu, nn.Tanh(), relu], 2, torch.zeros(1), profile=given(1, 1, 1))


@pytest.mark.parametrize(
    ("ends", "why"),
    [([], "ends: exp"), ([2], "the last of them 3"), ([2, 2, 3], "asc"), ([0, 3], "asc")],
    ids=["none", "short", "equal", "empty"],
)
def test_bad_ends(ends, why):
    with pytest.raises(ValueError, match=why):
        cut_at(layers(1, 1, 1, 1), ends)


@pytest.mark.parametrize("n", [0, 4])
def test_bad_number_of_stages(n):
    with pytest.raises(ValueError, match=r"n_stages: expected 1 to 3"):
        st.partition(layers(1, 1, 1, 1), n, torch.zeros(1, 1))


def test_other_bad_arguments():
    example = torch.zeros(1, 1)
    with pytest.raises(TypeError, match=r"model: expected an nn\.Sequential.*Linear; .*split_poin"):
        st.partition(nn.Linear(1, 1), 1, example)
    with pytest.raises(TypeError, match=r"model\[1\]: expected an nn\.Module, got int"):
        st.partition([nn.ReLU(), 3], 1, example)
    with pytest.raises(ValueError, match="model: expected at least one block"):
        st.partition([], 1, example)
    with pytest.raises(TypeError, match="n_stages: expected an int, got float"):
        st.partition([nn.ReLU()], 1.0, example)
    with pytest.raises(ValueError, match="profile: expected 1 blocks, as the model has, got 2"):
        st.partition([nn.ReLU()], 1, example, profile=given(1, 1))


# Models that are no sequence.


class Skips(nn.Module):
    """Its first value is needed at the end, and one of its inputs only there."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x, mask):
        first = self.embed(x)
        h = first
        for layer in self.layers:
            h = torch.relu(layer(h))
        return self.head(self.norm(h) + first * mask)


EXAMPLE = (torch.linspace(-1, 1, 12).view(3, 4), torch.ones(3, 4))


def test_skip_connections_pass_through_and_train_alike():
    model = Skips()
    alone = copy.deepcopy(model)
    parts = st.partition(model, 3, EXAMPLE, split_points=["layers.1", "norm"], repeats=1)
    names = [s.full_name(n) for s in parts for n, _ in s.named_parameters()]
    assert sorted(names) == sorted(n for n, _ in alone.named_parameters())

    pipe = st.Pipeline(parts, sgd, LOSS, method="sync")
    optimizer = sgd(alone.parameters())
    data = [((torch.randn(3, 4), torch.rand(3, 4)), torch.randn(3, 2)) for _ in range(5)]
    found = [result.loss for result in pipe.run(data)]
    for loss, (inputs, target) in zip(found, data, strict=True):
        optimizer.zero_grad()
        expected = LOSS(alone(*inputs), target)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach())
    trained = {s.full_name(n): p for s in parts for n, p in s.named_parameters()}
    for name, p in alone.named_parameters():
        torch.testing.assert_close(trained[name], p)


def test_more_split_points_than_needed_are_candidates():
    profile = given(1, 1, 4)
    points = ["layers.1", "norm"]
    parts = st.partition(Skips(), 2, EXAMPLE, split_points=points, profile=profile)
    assert parts.cut.ends == (2, 3)
    model = Skips()
    names = {
        s.full_name(n)
        for s in st.partition(model, 2, EXAMPLE, split_points=points, profile=profile)
        for n in s.state_dict()
    }
    assert names == set(model.state_dict())


def test_splitting_leaves_the_model_as_it_was():
    model = Skips()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    expected = model.eval()(*EXAMPLE)
    st.partition(model, 2, EXAMPLE, split_points={"norm": SplitPoint.BEGINNING}, repeats=1)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert torch.equal(model(*EXAMPLE), expected)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 3, bias=False)
        self.middle = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.middle(self.embed(x)))


def test_tied_weights_across_graph_stages():
    with pytest.raises(ValueError, match=r"parameter 'embed\.weight' of stage 0 and 'head\.w"):
        st.partition(Tied(), 2, torch.zeros(1, 3), split_points=["head"])
    with pytest.raises(ValueError, match=r"split_points: the model has no submodule 'tail'"):
        st.partition(Tied(), 2, torch.zeros(1, 3), split_points=["tail"])


def test_slices_nest_in_checkpoints_of_the_pipeline():
    stage = Slice([nn.Linear(1, 1), nn.Linear(1, 1)], 4)
    assert stage.full_name("1.bias") == "5.bias"
