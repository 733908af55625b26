"""Tests measuring and cutting models: no change, the model's names, clear errors."""

from __future__ import annotations

import copy
import pickle
from collections import UserDict
from itertools import pairwise

import pytest
import torch
from helpers import rank_programs, value_programs
from helpers.ranks import run_ranks
from safetensors.torch import save_file
from torch import nn
from torch.distributed.pipelining import SplitPoint

import spectrain_ext as st
from spectrain_ext.partitioning import Profile, cut_at, measure
from spectrain_ext.partitioning.blocks import Slice
from spectrain_ext.partitioning.profile import BlockProfile

LOSS = nn.functional.mse_loss


def sgd(params):
    return st.optim.SGD(params, lr=0.05, momentum=0.9)


def layers(*sizes):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def given(*seconds, **more):
    return Profile(tuple(BlockProfile(s) for s in seconds), **more)


# Measuring


class Noisy(nn.Module):
    """Has everything that a measurement could change."""

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


def test_measuring_leaves_the_buffers_that_code_assigns_to():
    class Averages(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("cache", None, persistent=False)

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.cache = torch.ones(4)
            return x - self.mean

    block = Averages()
    mean = block.mean
    st.partition([nn.Linear(4, 4), block, nn.Linear(4, 4)], 2, torch.randn(5, 4))
    assert block.mean is mean
    assert torch.equal(mean, torch.zeros(4))
    assert block.cache is None


def test_measured_bytes():
    profile = measure([nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)], torch.randn(3, 4), repeats=1)
    assert [block.output_bytes for block in profile.blocks] == [96, 96, 24]
    assert [block.parameter_bytes for block in profile.blocks] == [160, 0, 72]
    # a Linear keeps its input, a Tanh its output
    assert [block.saved_bytes for block in profile.blocks] == [48, 96, 96]
    assert all(block.seconds > 0 for block in profile.blocks)


def test_a_slower_block_takes_longer(monkeypatch):
    layers = [0]  # a simulated clock
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

    slow = st.partition([Many(200), Many(1), Many(1)], 2, torch.randn(32, 64))
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
    class Odd(nn.Module):
        def forward(self, x):
            return [x, {1}]

    with pytest.raises(TypeError, match=r"block 1\[1\]: expected a tensor, or tuples.*got a set"):
        measure([nn.ReLU(), Odd(), nn.ReLU()], torch.zeros(1))
    assert measure([nn.ReLU(), Odd()], torch.zeros(3)).blocks[1].output_bytes == 12
    with pytest.raises(TypeError, match=r"example_input: expected at least one tensor"):
        st.partition([nn.ReLU()], 1, [1.0])


def test_dicts_from_block_to_block_take_the_bytes_of_tuples():
    """The last block returns a dataclass."""
    found = {}
    for form in ("dict", "tuple"):
        (batch,) = value_programs.data([4], form)
        example = UserDict(batch) if form == "dict" else batch[0]
        blocks = value_programs.stages(3, form, "dataclass")
        parts = st.partition(blocks, 2, example)
        found[form] = [(b.output_bytes, b.parameter_bytes) for b in parts.profile.blocks]
        assert all(p.grad is None for block in blocks for p in block.parameters())
    assert found["dict"] == found["tuple"]
    assert [of for of, _ in found["dict"]] == [4 * 4 * 4 + 4 * 4] * 2 + [4 * 4 * 4]
    with pytest.raises(TypeError, match=r"example_input: expected at least one tensor, got a d"):
        st.partition([nn.ReLU()], 1, {"x": None})


# Cutting


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
    parts = st.partition(layers(4, 4, 4, 4), 3, torch.randn(2, 4))
    pipe = st.Pipeline(parts, sgd, LOSS)
    data = [(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(4)]
    assert len(list(pipe.run(data))) == 4


def test_blocks_with_one_buffer_stay_together():
    model = [nn.BatchNorm1d(3) for _ in range(4)]
    model[2].running_mean = model[1].running_mean
    parts = st.partition(model, 3, torch.randn(2, 3), profile=given(1, 5, 5, 1))
    assert parts.cut.ends == (1, 3, 4)
    with pytest.raises(ValueError, match=r"'1\.running_mean', which is '2\.ru.* too") as caught:
        st.partition(model, 4, torch.randn(2, 3), profile=given(1, 5, 5, 1))
    assert str(caught.value).startswith("n_stages: 4 stages need 3 places to cut")
    with pytest.raises(ValueError, match=r"ends: a cut before block 2 separates buffer '1"):
        cut_at(model, [2, 4])


class Rotates(nn.Module):
    """Reads a table that other blocks read too, as rotary embeddings do."""

    def __init__(self, table):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", table)

    def forward(self, x):
        return self.linear(x) * self.table[: x.shape[1]] + x


class Rotary(nn.Module):
    """Has blocks and the table in one of several ways."""

    def __init__(self, way):
        super().__init__()
        table = torch.rand(9, 4)
        self.way = way
        if way == "blocks'":
            self.blocks = nn.ModuleList(Rotates(table) for _ in range(6))
        else:
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        if way == "model's":
            self.register_buffer("table", table)
        elif way == "unsaved":
            self.register_buffer("table", table, persistent=False)
        elif way == "plain":
            self.table = table

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if self.way != "blocks'":
                x = x * self.table[: x.shape[1]] + x
        return x


def rotating(way):
    if way != "list":
        return Rotary(way)
    table = torch.rand(9, 4)
    return nn.Sequential(*(Rotates(table) for _ in range(6)))


@pytest.mark.parametrize("way", ["list", "blocks'", "model's", "unsaved", "plain"])
def test_constant_buffers_are_copied_to_the_stages_that_read_them(way, tmp_path):
    model, example = rotating(way), torch.randn(2, 7, 4)
    state = copy.deepcopy(model.state_dict())
    parts = st.partition(model, 3, example, profile="parameters")
    assert parts.cut.balance > 0.99 and parts.profile.ties == ()
    # As on several devices: each stage has tensors of its own.
    stages = [move(stage) for stage in parts]
    pipe = st.Pipeline(stages, sgd, LOSS, "sync")
    assert pipe.state_dict().keys() == state.keys()
    changed = {name: value + 1 for name, value in state.items()}
    pipe.load_state_dict(changed)
    model.load_state_dict(changed)
    torch.testing.assert_close(pipe(example), model(example))
    st.checkpoint.save(tmp_path / "c", pipe)
    fewer = [move(stage) for stage in st.partition(rotating(way), 2, example)]
    other = st.Pipeline(fewer, sgd, LOSS, "sync")
    if way != "unsaved" and way != "plain":
        st.checkpoint.load(tmp_path / "c", other)
        torch.testing.assert_close(other(example), model(example))
    again = rotating(way)
    st.checkpoint.load(tmp_path / "c", again, only_model=True)
    assert all(torch.equal(again.state_dict()[name], changed[name]) for name in changed)


def move(stage):
    """Give a stage tensors of its own, as ``stage.to(device)`` does."""
    return stage._apply(torch.clone)


@pytest.mark.parametrize("way", ["list", "blocks'", "model's"])
def test_constant_buffers_on_the_meta_device(way, tmp_path):
    model, example = rotating(way), torch.randn(2, 7, 4)
    save_file({n: t.clone() for n, t in model.state_dict().items()}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        parts = st.partition(rotating(way), 3, example)
    assert parts.cut.balance > 0.99
    for stage in reversed(parts.stages):
        st.materialize(stage, tmp_path)
    assert torch.equal(st.Pipeline(parts, sgd, LOSS)(example), model(example))


class Counts(Rotary):
    """Writes into the table, in one mode only."""

    def __init__(self, mode):
        super().__init__("model's")
        self.mode = mode

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if self.training == self.mode:
                self.table[0] += 1
            x = x * self.table[0]
        return x


@pytest.mark.parametrize("mode", [True, False])
def test_buffers_that_a_forward_writes_to_bind_blocks_together(mode, caplog):
    model, example = Counts(mode), torch.randn(2, 7, 4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"buffer 'table', which blocks 0 and 1 use.* give each"):
        st.partition(model, 2, example, profile="parameters")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    blocks = [nn.BatchNorm1d(4) for _ in range(6)]
    for block in blocks[:4]:
        block.running_mean = blocks[0].running_mean
    st.partition(blocks, 3, torch.randn(2, 4), profile="parameters")
    (record,) = (r for r in caplog.records if r.name.startswith("spectrain_ext"))
    assert record.levelname == "WARNING" and record.getMessage() == (
        "the slowest stage takes 2 times as long as if all blocks could be separated; these share "
        "buffer '0.running_mean', which is '2.running_mean' too (and 1 more); give each its own; "
        "partition copies buffers if an example_input shows that no forward writes to them"
    )


def test_blocks_with_one_parameter_may_be_cut():
    model = layers(3, 3, 3, 3, 3)
    model[2].weight = model[1].weight
    model[3].weight = model[1].weight
    parts = st.partition(model, 3, torch.randn(1, 3), profile=given(1, 5, 5, 1))
    assert parts.cut.ends == (1, 2, 4)
    first, *others = cut_at(model, [2, 3, 4])
    assert not hasattr(first, "tied_parameters")
    assert [stage.tied_parameters for stage in others] == [{"0.weight": (0, "1.weight")}] * 2
    pipe = st.Pipeline(cut_at(model, [2, 3, 4]), sgd, LOSS)
    list(pipe.run([(torch.randn(3, 3), torch.randn(3, 3)) for _ in range(4)]))
    pipe.release()
    assert model[1].weight is model[2].weight is model[3].weight


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


@pytest.mark.parametrize("points", [None, ["middle"]])
def test_an_example_on_which_the_model_fails(points):
    good, wide, meta = torch.ones(2, 3), torch.ones(2, 5), torch.ones(2, 3, device="meta")
    blocks = layers(3, 3, 4)
    with pytest.raises(
        ValueError,
        match=r"example_input: block 0 \(Linear\) fails on \(2, 5\) float32: RuntimeError",
    ):
        st.partition(blocks, 2, wide)
    blocks[1] = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"block 1 \(Linear\) fails on \(2, 3\) float32: Run"):
        st.partition(blocks, 2, good)
    with pytest.raises(ValueError, match=r"a tensor of shape \(2, 3\) is on the meta device and"):
        st.partition(blocks, 2, meta)
    with torch.device("meta"):
        valueless = layers(3, 3)
    with pytest.raises(ValueError, match=r"block 0 \(Linear\) fails on \(2, 5\) float32: Runt"):
        st.partition(valueless, 1, wide)
    for model, example, error, why in (
        (Twice(), wide, ValueError, r"Twice in its 'first' fails on \(2, 5\) float32: RuntimeErr"),
        (Twice(), good.long(), ValueError, r"Twice in its 'first' fails on \(2, 3\) int64: Runti"),
        (Twice(), (good, good), ValueError, r"Twice fails on \(2, 3\) float32, \(2, 3\) float32"),
        (Twice(), [good], TypeError, "expected a tensor or a tuple of tensors, got a list"),
        (Twice(), meta, ValueError, r"a tensor of shape \(2, 3\) is on the meta device"),
    ):
        with pytest.raises(error, match=f"example_input: {why}"):
            st.partition(model, 1, example, split_points=points)


def test_models_that_are_wrapped():
    whole = Twice()
    for wrapped in (torch.compile(whole), torch.compile(layers(3, 3))):
        with pytest.raises(TypeError, match=r"model: it is compiled by torch.compile; cut its _or"):
            st.partition(wrapped, 1, torch.zeros(2, 3))
    whole.middle = torch.compile(whole.middle)
    with pytest.raises(TypeError, match=r"model: its module 'middle' is compiled by torch.compile"):
        st.partition(whole, 1, torch.zeros(2, 3))


@pytest.mark.parametrize("n", [0, 4])
def test_bad_number_of_stages(n):
    with pytest.raises(ValueError, match=r"n_stages: expected 1 to 3"):
        st.partition(layers(1, 1, 1, 1), n, torch.zeros(1, 1))


def test_other_bad_arguments():
    example = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"n_stages: expected 1 to 1 \(the blocks\), got 2; name"):
        st.partition(nn.Linear(1, 1), 2, example)
    with pytest.raises(TypeError, match=r"model: expected an nn\.Sequential or a list.*Linear"):
        cut_at(nn.Linear(1, 1), [1])
    with pytest.raises(TypeError, match="example_input: expected a microbatch, got None"):
        st.partition(nn.Linear(1, 1), 1)
    with pytest.raises(TypeError, match=r"model\[1\]: expected an nn\.Module, got int"):
        st.partition([nn.ReLU(), 3], 1, example)
    with pytest.raises(ValueError, match="model: expected at least one block"):
        st.partition([], 1, example)
    with pytest.raises(TypeError, match="n_stages: expected an int, got float"):
        st.partition([nn.ReLU()], 1.0, example)
    with pytest.raises(ValueError, match="profile: expected a Profile or 'parameters', got 'time'"):
        st.partition([nn.ReLU()], 1, example, profile="time")
    with pytest.raises(ValueError, match="profile: expected 1 blocks, as the model has, got 2"):
        st.partition([nn.ReLU()], 1, example, profile=given(1, 1))


# Models that are not sequences


class Skips(nn.Module):
    """Its end needs its first value and one of its inputs."""

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
    parts = st.partition(model, 3, EXAMPLE, split_points=["layers.1", "norm"])
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
    st.partition(model, 2, EXAMPLE, split_points={"norm": SplitPoint.BEGINNING})
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


@pytest.mark.parametrize("points", [["head"], ["middle", "head"]])
def test_tied_weights_across_graph_stages(points):
    model = Tied()
    whole = copy.deepcopy(model)
    n = len(points) + 1
    parts = st.partition(model, n, torch.zeros(2, 3), split_points=points)
    first, last = parts.stages[0], parts.stages[-1]
    assert last.tied_parameters == {"0.part.head.weight": (0, "0.part.embed.weight")}
    names = [[stage.full_name(name) for name in stage.state_dict()] for stage in (first, last)]
    assert "embed.weight" in names[0] and "head.weight" not in names[0]
    assert names[1] == ["head.weight"]

    pipe = st.Pipeline(parts, sgd, LOSS, "sync")
    data = [(torch.randn(2, 3), torch.randn(2, 3)) for _ in range(5)]
    list(pipe.run(data))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9)
    for x, y in data:
        optimizer.zero_grad()
        LOSS(whole(x), y).backward()
        optimizer.step()
    state = pipe.state_dict()
    for name in ("embed.weight", "head.weight"):
        torch.testing.assert_close(state[name], whole.head.weight.detach())
    torch.testing.assert_close(pipe(data[0][0]), whole(data[0][0]))
    pipe.release()
    assert model.embed.weight is model.head.weight
    assert first[0].part.embed.weight is last[0].part.head.weight


class Twice(nn.Module):
    """One module in two places: its parameter has one name."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.middle = nn.Linear(3, 3)

    def forward(self, x):
        return self.first(self.middle(self.first(x)))


def test_a_module_of_a_traced_model_in_two_stages():
    torch.manual_seed(0)
    whole = copy.deepcopy(model := Twice())
    parts = st.partition(model, 2, torch.zeros(2, 3), split_points=["middle"])
    pipe = st.Pipeline(parts, sgd, LOSS, "sync")
    data = [(torch.randn(2, 3), torch.randn(2, 3)) for _ in range(5)]
    list(pipe.run(data))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9)
    for x, y in data:
        optimizer.zero_grad()
        LOSS(whole(x), y).backward()
        optimizer.step()
    pipe.release()
    torch.testing.assert_close(dict(model.state_dict()), dict(whole.state_dict()))


def test_split_points_that_are_none():
    with pytest.raises(ValueError, match=r"split_points: the model has no submodule 'tail'"):
        st.partition(Tied(), 2, torch.zeros(1, 3), split_points=["tail"])


def test_slices_nest_in_checkpoints_of_the_pipeline():
    stage = Slice([nn.Linear(1, 1), nn.Linear(1, 1)], ["4", "5"])
    assert stage.full_name("1.bias") == "5.bias"


# Values before and after a list of blocks


class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(7, 4)

    def forward(self, batch):
        return self.tokens(batch["ids"])


def test_before_and_after_a_list_of_blocks():
    torch.manual_seed(0)
    blocks, before = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), Embeds()
    batch = {"ids": torch.randint(7, (3, 5))}
    parts = st.partition(
        blocks, 3, batch, before=before, after=torch.sum, profile=given(1, 1, 1, 1, 1)
    )
    value = batch
    for stage in parts:
        value = stage(value)
    expected = before(batch)
    for block in blocks:
        expected = block(expected)
    assert torch.equal(value, expected.sum())
    pipe = st.Pipeline(parts, sgd, lambda output, _: output, method="sync")
    names = ["before.tokens.weight"]
    names += [f"blocks.{k}.{leaf}" for k in range(3) for leaf in ("weight", "bias")]
    assert list(pipe.state_dict()) == names
    measured = st.partition(list(blocks), 2, batch, before=before).profile
    assert [b.name for b in measured.blocks] == ["before", *(f"blocks.{k}" for k in range(3))]
    assert len(list(pipe.run([batch, batch]))) == 2


def test_bad_things_before_and_after():
    blocks, example = [nn.Linear(2, 2)], torch.zeros(1, 2)
    with pytest.raises(TypeError, match="before: expected a module or a function, got int"):
        st.partition(blocks, 1, example, before=3)
    with pytest.raises(TypeError, match=r"after: .* a method of a Linear, whose parameters nobody"):
        st.partition(blocks, 1, example, after=nn.Linear(2, 2).forward)
    with pytest.raises(
        ValueError, match="before, after: for a list of blocks only, model is a Net"
    ):
        st.partition(Net(), 1, example, before=nn.ReLU())


# Computed cuts


class Net(nn.Module):
    """A residual net with a long skip connection, in which some modules are called twice."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in "123")
        self.twice = nn.Linear(4, 4)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))

    def forward(self, x):
        first = x = self.stem(x.flatten(1))
        for block in self.body:
            x = self.twice(x) if block is self.body[1] else x
            x = torch.relu(block(x) + x)
        return {"logits": self.head(self.twice(x) + first)}


def test_places_to_cut_are_found():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(3, 2, 2)
    alone = copy.deepcopy(model)
    parts = st.partition(model, 3, x, profile=given(*range(1, 9)))
    assert parts.cut.ends == (4, 6, 8)  # of stem, three times two, and head
    assert [stage.takes for stage in parts] == [1, 3, 3]
    for mode in (False, True):
        for size in (3, 5):
            value = x = torch.randn(size, 2, 2)
            torch.manual_seed(1)
            for stage in parts:
                value = stage.train(mode)(value)
            torch.manual_seed(1)
            torch.testing.assert_close(value, alone.train(mode)(x))
    assert set(map(id, model.parameters())) == {id(p) for s in parts for p in s.parameters()}
    assert st.Pipeline(parts, sgd, LOSS).state_dict().keys() == alone.state_dict().keys()


def test_one_tensor_is_passed_where_that_costs_little():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

        def forward(self, x):
            a, b, c, d, e, f = self.layers
            x = a(x)
            x = b(x) * c(x)
            x = d(x)
            return e(x) * f(x)

    x = torch.randn(3, 4)
    near, far = given(4, 1, 4, 4, 1, 4), given(1, 9, 9, 1, 1, 1)
    assert st.partition(Branches(), 2, x, profile=near).cut.ends == (3, 6)
    assert st.partition(Branches(), 2, x, profile=given(3, 2, 4, 4, 2, 2)).cut.ends == (3, 6)
    assert st.partition(Branches(), 2, x, profile=far).cut.ends == (2, 6)  # within a branch


def test_coarser_places_where_finer_ones_do_not_do():
    class Counts(nn.Module):
        """Passes a number from one inner module to the next."""

        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.one(x)
            number = y.sum().item()
            return self.two(y) * number

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = Counts(), Counts()

        def forward(self, x):
            return self.last(self.first(x))

    parts = st.partition(Model(), 2, torch.randn(3, 4))
    assert len(parts.profile.blocks) == 2
    with pytest.raises(
        ValueError, match=r"takes .*, a .*; stages can pass on nothing but tensors; n"
    ):
        st.partition(Model(), 3, torch.randn(3, 4))


def test_a_model_that_cannot_be_traced():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.two(x) if self.one(x).abs().sum() > 0 else x

    with pytest.raises(RuntimeError, match=r"cannot trace the model .*before= and after="):
        st.partition(Branch(), 2, torch.ones(2, 4))


def test_a_slower_device_gets_fewer_blocks():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    parts = st.partition(model, 2, torch.randn(64, 256), speeds=(4, 1))
    first, second = (len(stage.blocks) for stage in parts.cut.stages)
    assert first > second  # measured: about 6 of 8
    with pytest.raises(ValueError, match="speeds: expected"):
        st.partition(model, 2, torch.randn(64, 256), speeds=(4, 1, 1))


def test_a_cut_by_numbers_of_parameters():
    model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    parts = st.partition(model, 3, torch.tensor([1]), profile="parameters")
    assert [block.seconds for block in parts.profile.blocks] == pytest.approx([0, 2e-8, 2e-8, 2e-8])
    assert [block.parameter_bytes for block in parts.profile.blocks] == [1600, 80, 80, 80]
    assert parts.cut.ends == (2, 3, 4)
    with pytest.raises(ValueError, match="loss_fn: the model has no loss of its own"):
        _ = parts.loss_fn


# Batches that are mappings


class Named(nn.Module):
    """Takes its arguments by names; one has a default that counts."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, *, scale=None, ids, mask=None):
        h = torch.relu(self.inner(self.embed(ids)))
        if mask is not None:
            h = h * mask.unsqueeze(-1)
        return self.head(h.mean(1)) * (2.0 if scale is None else scale)


class TakesDict(Named):
    def forward(self, batch, doubled=True):
        return super().forward(ids=batch["ids"], mask=batch["mask"]) * (2.0 if doubled else 1.0)


class TakesAny(Named):
    def forward(self, ids, **more):
        return super().forward(ids=ids, mask=more["mask"])


def sentences(count):
    mask, ids = torch.rand(count, 5), torch.randint(9, (count, 5))
    labels = torch.arange(count) % 3
    return {"mask": mask, "text": ["a"] * count, "ids": ids, "more": ids, "labels": labels}


@pytest.mark.parametrize("points", [None, ["head"]])
@pytest.mark.parametrize("make", [Named, TakesDict, TakesAny])
def test_a_mapping_is_taken_as_forward_takes_it(make, points):
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    example = sentences(4)
    parts = st.partition(model, 2, example, split_points=points, profile="parameters")

    def loss_fn(output, batch):
        assert "text" not in batch
        assert ("more" in batch) == (make is not Named)
        return nn.functional.cross_entropy(output, batch["labels"])

    pipe = st.Pipeline(parts, sgd, loss_fn, method="sync", microbatches=2)
    optimizer = sgd(list(alone.parameters()))
    data = [sentences(count) for count in (4, 3, 1)]
    for result, given in zip(pipe.run(data), data, strict=True):
        taken = {name: given[name] for name in ("ids", "mask")}
        output = alone(taken) if make is TakesDict else alone(**taken)
        optimizer.zero_grad()
        expected = nn.functional.cross_entropy(output, given["labels"])
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(result.loss, expected.detach())
    torch.testing.assert_close(dict(pipe.state_dict()), dict(alone.state_dict()))
    del example["mask"]
    with pytest.raises(TypeError, match=r"batches\[0\]: expected .*'mask'.*; got 'text', 'ids'"):
        list(pipe.run([example]))


def test_arguments_that_the_example_has_not(caplog):
    """Stages always use their defaults; a batch that has one is rejected."""
    given = sentences(4)
    parts = st.partition(Named(), 2, {"ids": given["ids"]}, profile="parameters", columns=["more"])
    kept = []
    pipe = st.Pipeline(parts, sgd, lambda output, batch: kept.append(set(batch)) or output.sum())
    with pytest.raises(TypeError, match=r"takes 'mask', and its stages do not, which were cut wi"):
        list(pipe.run([given]))
    del given["mask"]
    with caplog.at_level("INFO", "spectrain_ext"):
        list(pipe.run([given]))
    assert "does not take are dropped: ['text']" in caplog.text
    assert kept == [{"ids", "more", "labels"}] * 2


def test_bad_mappings():
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(
        TypeError, match=r"example_input: .* forward needs 'ids', got 'mask', 'IDS'"
    ):
        st.partition(Named(), 2, {"mask": ids, "IDS": ids})
    with pytest.raises(TypeError, match=r"example_input\['ids'\]: expected a tensor, got a list"):
        st.partition(TakesAny(), 2, {"ids": ["a"]})
    with pytest.raises(TypeError, match=r"columns: expected a sequence of names, got 'ids'"):
        st.partition(Named(), 2, {"ids": ids}, columns="ids")
    with pytest.raises(ValueError, match=r"columns: of a list of blocks the first takes the whole"):
        st.partition([nn.ReLU(), nn.ReLU()], 2, {"ids": ids}, columns=["ids"])


@pytest.mark.processes
class TestOverRanks:
    def test_all_cut_where_rank_0_has_measured(self):
        (ends, seconds), *others = run_ranks(rank_programs.partitions, 3, (6, 6, 6))
        assert ends[0] == 1  # rank 0 was slow before that block
        assert max(seconds) == seconds[0]
        assert others == [(ends, seconds)] * 2

    def test_another_model_is_an_error(self):
        for here, said in zip((6, 5), run_ranks(rank_programs.partitions, 2, (6, 5)), strict=True):
            assert said.startswith(f"model: it has {here} blocks here, and on other ranks 5 to 6")


def cut_in_four():
    return cut_at([nn.Linear(3, 3) for _ in range(4)], [1, 2, 3, 4])


def made_of(stages):
    return st.Pipeline(stages, sgd, LOSS)


@pytest.mark.parametrize("through", [None, copy.deepcopy, torch.compile, "pickle"])
@pytest.mark.parametrize(
    ("order", "where"),
    [
        ((0, 1, 3, 2), r"stages\[2\]: it is stage 3 of the 4 .* comes after stage 1 of 4"),
        ((1, 0, 2, 3), r"stages\[0\]: it is stage 1 of the 4 .* stage 0 is not before it"),
        ((0, 1, 3), r"stages\[2\]: it is stage 3 of the 4 .* comes after stage 1 of 4"),
        ((1, 2, 3), r"stages\[0\]: it is stage 1 of the 4 .* stage 0 is not before it"),
        ((0, 1), r"stages\[1\]: it is stage 1 of the 4 .* stage 2 does not come after it"),
    ],
)
def test_stages_of_a_cut_have_an_order(order, where, through):
    stages = cut_in_four()
    if through == "pickle":
        stages = pickle.loads(pickle.dumps(stages))
    elif through is not None:
        stages = [through(stage) for stage in stages]
    with pytest.raises(ValueError, match=where):
        made_of([stages[k] for k in order])
    made_of(stages)


def test_a_stage_stands_once():
    first, second, *_ = cut_in_four()
    with pytest.raises(ValueError, match=r"stages\[2\]: it is stage 1 .* after stage 1 of 4"):
        made_of([first, second, copy.deepcopy(second)])


def test_own_modules_among_the_stages_of_a_cut():
    def own():
        return nn.Linear(3, 3)

    def stages(*indices):
        four = cut_in_four()
        return [four[k] for k in indices]

    made_of([own(), *stages(0, 1, 2, 3), own()])
    made_of([*stages(0, 1), own(), *stages(2, 3)])
    made_of([*stages(0, 1), own(), *stages(3)])  # in place of a stage
    made_of([*stages(0, 1, 2), own()])
    made_of([own(), *stages(2, 3)])
    made_of([*stages(0, 1, 2, 3), *stages(0, 1, 2, 3)])  # two models, one after the other
    with pytest.raises(ValueError, match=r"stages\[3\]: it is stage 2 .* after stage 3 of 4"):
        made_of([own(), *stages(3), own(), *stages(2)])
