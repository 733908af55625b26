"""Tests pipelines with codecs on their edges."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce

import pytest
import torch
from helpers import value_programs
from helpers.pipeline_cases import batches, losses, mse, sgd, tanh_stages
from torch import nn

import spectrain_ext as st
from spectrain_ext.codecs import NAMES, BFloat16, Float8, Int4, Int8
from spectrain_ext.rng import mixed_seed

pytestmark = pytest.mark.usefixtures("float64")

every_codec = pytest.mark.parametrize("codec", NAMES.values(), ids=list(NAMES))
TURNED = NAMES["int4-hadamard"]


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
    drawn = (
        [reduce(mixed_seed, (backward, True, *key, 0), 0)] if getattr(codec, "draws", False) else []
    )
    packed = codec.pack(tensor, backward, *drawn)
    return codec.unpack(packed, torch.empty_like(tensor, device="meta"), backward)


def by_hand(stages, codecs, data, microbatches=1):
    """Train synchronously and return the losses."""
    optimizers = [torch.optim.SGD(stage.parameters(), lr=0.05, momentum=0.9) for stage in stages]
    found = []
    for i, (x, y) in enumerate(data):
        total = 0.0
        parts = zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True)
        for j, (value, target) in enumerate(parts):
            for k, stage in enumerate(stages):
                if k:
                    value = Rounded.apply(value, codecs, (k - 1, i, j))
                value = stage(value)
            loss = mse(value, target) / microbatches
            loss.backward()
            total += loss.item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found.append(total)
    return found


PAIRS = [
    *((codec, codec) for codec in NAMES.values()),
    (BFloat16(), None),
    (None, Int4(block=16, hadamard=True)),
    (Float8(), Int8(seed=3)),
]


@pytest.mark.parametrize(
    ("codecs", "more"),
    [
        *((codecs, {"method": "1f1b", "microbatches": 2}) for codecs in PAIRS),
        (PAIRS[-1], {"method": "sync"}),
        (PAIRS[2], {"method": "zb-h1", "microbatches": 2}),
    ],
    ids=str,
)
def test_edges_are_rounded_by_hand(codecs, more):
    stages, data = tanh_stages(3, width=9), batches(6, size=8, width=9)
    hand = copy.deepcopy(stages)
    given = codecs[0] if codecs[0] == codecs[1] else codecs
    pipe = st.Pipeline(stages, sgd(), mse, codec=given, **more)
    found = [loss.item() for loss in losses(pipe, data)]
    assert found == pytest.approx(by_hand(hand, codecs, data, more.get("microbatches", 1)), 1e-9)
    for stage, its in zip(stages, hand, strict=True):
        torch.testing.assert_close(stage.state_dict(), its.state_dict(), rtol=1e-9, atol=1e-12)
    if codecs[0] is not None:
        value, target = data[0]
        expected = value
        for k, stage in enumerate(hand):
            expected = stage(rounded(codecs[0], expected, False, (0,)) if k else expected)
        assert pipe.evaluate(data[:1])["loss"] == pytest.approx(mse(expected, target).item())
        output = pipe(value)
        torch.testing.assert_close(output, expected)
        output.sum().backward()  # calls have a graph, in which edges are identities
        assert stages[0][0].weight.grad.any()


def trained(codec=None, stages=None, **more):
    torch.manual_seed(3)
    made = stages() if stages else dropping()
    pipe = st.Pipeline(made, sgd(), mse, codec=codec, **more)
    return losses(pipe, batches(6, size=6, width=9)), pipe


def dropping():
    return [nn.Sequential(stage, nn.Dropout(0.2)) for stage in tanh_stages(3, width=9)]


def same_bits(found, expected):
    (its, pipe), (wanted, other) = found, expected
    assert its == wanted
    for name, tensor in other.state_dict().items():
        assert torch.equal(pipe.state_dict()[name], tensor), name


def test_other_ways_to_the_same_bits():
    codec = TURNED
    plain = trained(codec, method="pipedream")
    for more in ({"recompute": True}, {"recompute": 1}, {"offload": "activations"}):
        same_bits(trained(codec, method="pipedream", **more), plain)
    same_bits(trained(codec, method="pipedream", on_nonfinite="skip"), plain)
    one, other = (trained(codec, partial(rectified, way), method="auto") for way in (False, True))
    same_bits(one, other)
    assert trained(codec)[0] != trained()[0]
    same_bits(trained((None, None)), trained())


def rectified(in_place):
    return [nn.Sequential(nn.ReLU(in_place), *tanh_stages(1, width=9)) for _ in range(3)]


def test_no_draw_of_a_stage_changes():
    """Neither a stage's draws nor the caller's change; dropout is the same."""
    (_, plain), before = trained(), torch.get_rng_state()
    _, pipe = trained(Int4())
    assert torch.equal(torch.get_rng_state(), before)
    for found, expected in zip(pipe.random, plain.random, strict=True):
        assert torch.equal(found.states()[0], expected.states()[0])


def test_a_resumed_run_has_the_bits_of_one_that_went_on(tmp_path):
    data = batches(10, size=6, width=9)

    def made():
        torch.manual_seed(3)
        return st.Pipeline(dropping(), sgd(), mse, codec=Int4(), microbatches=2)

    one = made()
    expected = [*losses(one, data[:5]), *losses(one, data[5:])]
    first, second = made(), made()
    found = losses(first, data[:5])
    st.checkpoint.save(tmp_path / "half", first)
    st.checkpoint.load(tmp_path / "half", second)
    found += losses(second, data[5:])
    same_bits((found, second), (expected, one))
    # A count restarted in a run would repeat the first minibatches' draws.
    third = made()
    third.minibatches = 5
    assert losses(third, data[:5]) != expected[:5]


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_values_with_other_members(form):
    """Masks have one dimension; values without a gradient get none."""
    settings = {"method": "1f1b", "microbatches": 2, "codec": BFloat16()}
    plain = value_programs.together(3, [6, 6, 5], "tuple", dtype=torch.bfloat16, **settings)
    settings["codec"] = None
    found = value_programs.together(3, [6, 6, 5], form, dtype=torch.bfloat16, **settings)
    assert found[0] == plain[0]
    coded = {**settings, "codec": Int8()}
    assert value_programs.together(3, [6, 6, 5], form, **coded)[0] != plain[0]


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
    SEEN.clear()
    data = batches(4, size=4, width=6)
    stages = tanh_stages(3, width=6)
    pipe = st.Pipeline(copy.deepcopy(stages), sgd(), mse, codec=Halved(), microbatches=2)
    found = losses(pipe, data)
    assert len({key for key, _, _ in SEEN}) == len(SEEN) == 2 * 2 * 2 * 4
    assert sum(backward for _, backward, _ in SEEN) == len(SEEN) // 2
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
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse, codec=codec, microbatches=1)
    with pytest.raises(st.StageError) as caught:
        losses(pipe, batches(5))
    assert (caught.value.stage, caught.value.action) == (stage, action)
    assert isinstance(caught.value.__cause__, cause)
    assert text in caught.value.reason


@pytest.mark.parametrize("codec", [8, Int8, "int8", (Int8(),), (Int8(), 8), (None, None, None)])
def test_what_is_no_codec(codec):
    with pytest.raises(TypeError, match=r"codec: expected a value with pack\(\) and unpack\(\)"):
        st.Pipeline(tanh_stages(2), sgd(), mse, codec=codec)


# On a GPU


@pytest.mark.cuda
@every_codec
def test_stages_on_a_gpu(codec):
    """Losses are close to those of the CPU, which has other random numbers."""
    data, stages = batches(6, size=16, width=16), tanh_stages(3, width=16)

    def run(device):
        mine, devices = copy.deepcopy(stages), [device] * 3
        pipe = st.Pipeline(mine, sgd(), mse, "auto", devices=devices, codec=codec)
        return [result.loss.item() for result in pipe.run(data)]

    assert run("cuda:0") == pytest.approx(run("cpu"), rel=0.1)
