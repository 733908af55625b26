"""Tests codecs: their encoding of tensors, and pipelines with them on their edges."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import pytest
import torch
from helpers.passes import with_passes
from helpers.pipeline_cases import batches, close, losses, mse, sgd, tanh_stages, torch_sgd
from helpers.random_modules import Function
from hypothesis import given
from hypothesis import strategies as some
from oracle.definition import Oracle
from torch import nn

import spectrain_ext as st
from spectrain_ext.passes import Compress
from spectrain_ext.passes.codecs import NAMES, BFloat16, Int4, Int8, packed_bytes
from spectrain_ext.rng import mixed_seed

pytestmark = pytest.mark.usefixtures("float64")

every_codec = pytest.mark.parametrize("codec", NAMES.values(), ids=list(NAMES))
both_ways = pytest.mark.parametrize("backward", [False, True])
TURNED = NAMES["int4-hadamard"]


def there_and_back(codec, tensor, backward=False, **key):
    packed = codec.pack(tensor, backward, **key)
    return codec.unpack(packed, torch.empty_like(tensor, device="meta"), backward)


@given(
    shape=some.lists(some.integers(0, 40), min_size=2, max_size=3),
    name=some.sampled_from([*NAMES]),
    dtype=some.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    turned=some.booleans(),
    backward=some.booleans(),
)
def test_shapes_strides_dtypes_and_bytes(shape, name, dtype, turned, backward):
    codec = NAMES[name]
    tensor = torch.randn(shape, dtype=torch.float64).to(dtype)
    tensor = tensor.transpose(0, 1) if turned else tensor
    kept = tensor.clone()
    packed = codec.pack(tensor, backward)
    n = tensor.numel()
    assert torch.equal(tensor, kept)
    bits = {"bfloat16": 16, "int8": 8}.get(name, 4)
    block = math.inf if name == "bfloat16" else 64
    assert packed.nbytes == math.ceil(n * bits / 8) + 2 * math.ceil(n / block)
    found = codec.unpack(packed, torch.empty_like(tensor, device="meta"), backward)
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    assert found.stride() == torch.empty_like(tensor).stride()
    flat = codec.pack(tensor.contiguous(), backward)  # row-major order, independent of strides
    assert torch.equal(flat.flatten(), packed.contiguous().flatten())


@both_ways
def test_what_can_be_represented_arrives_as_it_was(backward):
    numbers = torch.tensor([2.0**e for e in range(-60, 60)])
    assert torch.equal(there_and_back(BFloat16(), numbers, backward), numbers)
    for codec, limit in ((Int8(), 127), (Int4(), 7), (Int8(block=5), 127), (Int4(block=5), 7)):
        steps = torch.randint(-limit, limit + 1, (200,))
        steps[:: codec.block] = limit
        for scale in (2.0**-100, 0.75, 3.0 * 2.0**100):
            values = steps.float() * scale
            assert torch.equal(there_and_back(codec, values, backward), values)


@both_ways
def test_errors_are_half_a_step_to_nearest_and_less_than_one_otherwise(backward):
    values = torch.randn(130, dtype=torch.float32) * torch.logspace(-6, 6, 130)
    for codec, limit in ((Int8(), 127), (Int4(), 7)):
        found = there_and_back(codec, values, backward)
        for its, block in zip(found.split(64), values.split(64), strict=True):
            step = block.abs().max() / limit * (1 + 2**-7)  # a bfloat16, rounded up
            assert (its - block).abs().max() <= step * (1 if backward else 0.5)
    found = there_and_back(BFloat16(), values, backward)
    assert ((found - values).abs() <= values.abs() * 2**-8).all()


@every_codec
@both_ways
def test_zeros_stay_and_what_is_tiny_or_huge_is_no_harm(codec, backward):
    assert not there_and_back(codec, torch.zeros(3, 70), backward).any()
    for size in (1e-45, 1e-38, 3e37):
        found = there_and_back(codec, torch.full((3, 70), size, dtype=torch.float32), backward)
        assert found.isfinite().all()
        assert (found - size).abs().max() <= max(size / 7, 1.2e-38)


@both_ways
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(bad, backward):
    values = torch.randn(200)
    values[70] = bad
    found = there_and_back(BFloat16(), values, backward)
    assert torch.equal(found.isfinite(), values.isfinite())
    assert torch.equal(found[70:71].nan_to_num(), values[70:71].bfloat16().double().nan_to_num())
    for codec in (Int8(), Int4(), TURNED):
        found = there_and_back(codec, values, backward)
        at, block = 64, 64
        assert found[at : at + block].isnan().all()
        assert found[:at].isfinite().all()
        assert found[at + block :].isfinite().all()


@pytest.mark.parametrize("codec", [Int8(), Int4(), TURNED], ids=str)
def test_gradients_are_right_in_the_mean_and_drawn_by_their_key(codec):
    values, draws = torch.randn(100), 500
    before = torch.get_rng_state()
    found = [there_and_back(codec, values, True, key=key) for key in range(draws)]
    assert torch.equal(torch.get_rng_state(), before)
    again = there_and_back(codec, values, True, key=7)
    assert torch.equal(again, found[7])
    assert not torch.equal(again, found[8])
    other = type(codec)(seed=1)
    assert not torch.equal(there_and_back(other, values, True, key=7), again)
    # A step's error has a deviation of at most half a step.
    step = values.abs().max() / (127 if codec == Int8() else 7) * (2 if codec == TURNED else 1)
    assert (torch.stack(found).mean(0) - values).abs().max() < 5 * step / 2 / draws**0.5
    forward = [there_and_back(codec, values, key=key) for key in range(2)]
    assert torch.equal(*forward)


def test_ties_go_to_even_and_the_hadamard_matrix_spreads_outliers():
    values = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert there_and_back(Int8(), values).tolist() == [127.0, 0.0, 2.0, 2.0, 0.0, -2.0]
    values = torch.randn(256)
    values[::64] = 50.0
    errors = [(there_and_back(c, values) - values).norm() for c in (Int4(), TURNED)]
    assert errors[1] < errors[0] / 1.5


def test_values_of_codecs():
    assert Int8(block=64) == Int8()
    assert Int4() != Int8()
    assert repr(Int4(hadamard=True)) == "Int4(block=64, seed=0, hadamard=True)"
    assert packed_bytes(None, 640) == 640
    assert packed_bytes(Int8(), 256 * 10**9) == 66 * 10**9
    assert packed_bytes(Int4(), 256, backward=True) == 34
    assert packed_bytes(BFloat16(), 256, torch.float16) == 256
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"block: expected at least 1, got {wrong}"):
            Int8(block=wrong)
    with pytest.raises(TypeError, match=r"block: expected an int, got 2\.0"):
        Int8(block=2.0)
    with pytest.raises(ValueError, match="block: expected a power of two with hadamard, got 48"):
        Int4(block=48, hadamard=True)


@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name in NAMES if name != "int4-hadamard"])
def test_a_gpu_packs_as_the_cpu_does(name):
    codec, tensor = NAMES[name], torch.randn(40, 70)
    packed = codec.pack(tensor.cuda(), False)
    assert torch.equal(packed.cpu(), codec.pack(tensor, False))
    like = torch.empty_like(tensor, device="meta")
    found = codec.unpack(packed, like, False)
    assert found.is_cuda
    assert torch.equal(found.cpu(), there_and_back(codec, tensor))


class Rounded(torch.autograd.Function):
    """A manual edge: packs an activation, and its gradient on the way back."""

    @staticmethod
    def forward(ctx, value, codecs, key):
        ctx.codecs, ctx.key = codecs, key
        return rounded(codecs[0], value, False, key)

    @staticmethod
    def backward(ctx, gradient):
        stage, *more = ctx.key
        return rounded(ctx.codecs[1], gradient, True, (stage + 1, *more)), None, None


def rounded(codec, tensor, backward, key):
    """Pack and unpack the first tensor of a message."""
    if codec is None:
        return tensor.clone()
    draws = getattr(codec, "draws", False)
    drawn = {"key": reduce(mixed_seed, (backward, True, *key, 0), 0)} if draws else {}
    return there_and_back(codec, tensor, backward, **drawn)


class Rounding(nn.Module):
    """Stands before a stage for its edge, whose messages it counts."""

    def __init__(self, k, m, codecs):
        super().__init__()
        self.edge, self.m, self.codecs, self.count = k - 1, m, codecs, -1

    def forward(self, value):
        self.count += 1
        return Rounded.apply(value, self.codecs, (self.edge, *divmod(self.count, self.m)))


PAIRS = [
    *((codec, codec) for codec in NAMES.values()),
    (BFloat16(), None),
    (None, Int4(block=16, hadamard=True)),
    (Int4(), Int8(seed=3)),
]


@pytest.mark.parametrize(
    ("codecs", "more"),
    [
        *((codecs, {"method": "1f1b", "microbatches": 2}) for codecs in PAIRS),
        (PAIRS[-1], {"method": "pipedream", "microbatches": 1}),
        (PAIRS[2], {"method": "zb-h1", "microbatches": 2}),
    ],
    ids=str,
)
def test_edges_are_rounded_by_hand(codecs, more):
    stages, data = tanh_stages(3, width=9), batches(6, size=8, width=9)
    edges = [[], *([Rounding(k, more["microbatches"], codecs)] for k in (1, 2))]
    parts = [nn.Sequential(*edge, stage) for edge, stage in zip(edges, stages, strict=True)]
    oracle = Oracle(parts, torch_sgd(), mse, **more)
    given = codecs[0] if codecs[0] == codecs[1] else codecs
    pipe = st.Pipeline(stages, sgd(), mse, **with_passes({"codec": given, **more}))
    close(losses(pipe, data), oracle.run(data))
    for stage, part in zip(stages, oracle.stages, strict=True):
        close(stage.state_dict(), part[-1].state_dict())
    if codecs[0] is not None:
        value, target = data[0]
        expected = value
        for k, stage in enumerate(stages):
            expected = stage(rounded(codecs[0], expected, False, (0,)) if k else expected)
        assert pipe.evaluate(data[:1])["loss"] == pytest.approx(mse(expected, target).item())
        output = pipe(value)
        torch.testing.assert_close(output, expected)
        output.sum().backward()  # calls have a graph, in which edges are identities
        assert stages[0][0].weight.grad.any()


def trained(codec=None, in_place=False, **more):
    """Return losses, weights and random numbers."""
    torch.manual_seed(3)
    layers = tanh_stages(3, width=9)
    made = [nn.Sequential(nn.ReLU(in_place), stage, nn.Dropout(0.2)) for stage in layers]
    pipe = st.Pipeline(made, sgd(), mse, **with_passes({"codec": codec, **more}))
    found = losses(pipe, batches(6, size=6, width=9))
    states = [random.states()[0] for random in pipe.random]
    return [*found, *pipe.state_dict().values()], [*states, torch.get_rng_state()]


def test_other_ways_to_the_same_bits_and_the_draws_of_a_run_without():
    plain, numbers = trained(TURNED, method="pipedream")
    for more in (
        *({"recompute": True}, {"offload": "activations"}),
        *({"on_nonfinite": "skip"}, {"in_place": True}),
    ):
        found, drawn = trained(TURNED, method="pipedream", **more)
        assert all(map(torch.equal, [*found, *drawn], [*plain, *numbers])), more
    without, drawn = trained(method="pipedream")
    assert without[0] != plain[0]
    assert all(map(torch.equal, drawn, numbers))  # neither a stage's draws nor the caller's change
    assert all(map(torch.equal, trained((None, None), method="pipedream")[0], without))


def test_masks_and_what_has_one_dimension_cross_as_they_are():
    sent, got = [], []

    def first(x, linear):
        value = linear(x), x > 0, x[:, 0]
        sent.append([tensor.clone() for tensor in value])
        return value

    def last(value):
        got.append([tensor.clone() for tensor in value])
        return value[0] * value[1]

    stages = [Function(first, nn.Linear(5, 5)), Function(last), *tanh_stages(1)]
    pipe = st.Pipeline(stages, sgd(), mse, passes=[Compress(Int4())], microbatches=2)
    losses(pipe, data := batches(3, size=4))
    pipe.evaluate(data)
    for its, found in zip(sent, got, strict=True):
        assert [torch.equal(a, b) for a, b in zip(its, found, strict=True)] == [False, True, True]


@dataclass(frozen=True)
class Halved:
    """A user-defined codec, which draws random numbers and records its input."""

    def pack(self, tensor, backward, key):
        assert not tensor.requires_grad
        assert not torch.is_grad_enabled()
        SEEN.append((key, backward, tensor.clone()))
        return torch.view_as_complex(tensor.float().unflatten(-1, (-1, 2)).contiguous())

    def unpack(self, packed, like, backward):
        assert like.is_meta
        return torch.view_as_real(packed).flatten(-2).to(like.dtype)

    draws = True


SEEN = []


def test_a_codec_of_ones_own():
    """No two tensors of its messages have the same key, in training and evaluation."""

    def to_two(value, stage):
        value = stage(value)
        return value, value / 2

    SEEN.clear()
    data = batches(4, size=4, width=6)
    first, second, third = tanh_stages(3, width=6)
    stages = [
        Function(to_two, first),
        Function(lambda value, stage: to_two(sum(value), stage), second),
        Function(lambda value, stage: stage(sum(value)), third),
    ]
    pipe = st.Pipeline(
        copy.deepcopy(stages), sgd(), mse, passes=[Compress(Halved())], microbatches=2
    )
    found = losses(pipe, data)
    assert len(SEEN) == 2 * 2 * 2 * 2 * 4
    assert sum(backward for _, backward, _ in SEEN) == len(SEEN) // 2
    pipe.evaluate(data)
    assert len({key for key, _, _ in SEEN}) == len(SEEN) == 64 + 2 * 2 * 4
    plain = losses(st.Pipeline(stages, sgd(), mse, microbatches=2), data)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)


@dataclass(frozen=True)
class Wrong:
    """Changes what it packs or unpacks."""

    change: Callable
    unpacks: bool

    def pack(self, tensor, backward):
        return tensor if self.unpacks else self.change(tensor)

    def unpack(self, packed, like, backward):
        return self.change(packed) if self.unpacks else packed

    def __repr__(self):
        return "Wrong()"


OF_EDGE = "codec: expected float64 [3, 5] on cpu of Wrong(), got"


@pytest.mark.parametrize(
    ("stage", "action", "change", "cause", "text"),
    [
        (0, "send activation", lambda t: t.tolist(), TypeError, "of Wrong(), got a list"),
        (0, "send activation", lambda t: 1 / 0, ZeroDivisionError, "division"),
        (2, "send gradient", lambda t: t.to("meta"), ValueError, "a tensor on cpu, got meta"),
        (1, "receive activation", lambda t: t.float(), ValueError, OF_EDGE + " float32 [3, 5] on"),
        (1, "receive activation", lambda t: None, TypeError, "of Wrong(), got a NoneType"),
        (1, "receive gradient", lambda t: t[:-1], ValueError, OF_EDGE + " float64 [2, 5] on cpu"),
    ],
)
def test_a_wrong_codec_is_its_stages_error(stage, action, change, cause, text):
    wrong = Wrong(change, action.startswith("receive"))
    codec = (wrong, None) if "activation" in action else (None, wrong)
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse, passes=[Compress(codec)], microbatches=1)
    with pytest.raises(st.StageError) as caught:
        losses(pipe, batches(5))
    assert (caught.value.stage, caught.value.action) == (stage, action)
    assert isinstance(caught.value.__cause__, cause)
    assert text in caught.value.reason


@pytest.mark.cuda
@every_codec
def test_stages_on_a_gpu(codec):
    """Losses are close to those of the CPU, which has other random numbers."""
    data, stages = batches(6, size=16, width=16), tanh_stages(3, width=16)

    def run(device):
        mine, devices = copy.deepcopy(stages), [device] * 3
        pipe = st.Pipeline(mine, sgd(), mse, "auto", devices=devices, passes=[Compress(codec)])
        return [result.loss.item() for result in pipe.run(data)]

    assert run("cuda:0") == pytest.approx(run("cpu"), rel=0.1)
