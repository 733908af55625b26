"""Tests corrections, T1 and T2: identities where they have no effect, and errors."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial

import pytest
import torch
from helpers.pipeline_cases import Compared, batches, losses, mse, sgd, tanh_stages
from oracle.methods import METHODS
from torch import nn

import spectrain_ext as st
from spectrain_ext import corrections
from spectrain_ext.method import Method, check, find_method, in_words, pipemare, places_of, rules_at
from spectrain_ext.schedule import Place

pytestmark = pytest.mark.usefixtures("float64")


def without(method, **changed):
    return dataclasses.replace(find_method(method), **changed)


def test_a_correction_after_a_prediction():
    """Here the correction compares with the backward's weights, which are predicted."""
    method = without("spectrain-stash", correction=lambda p: corrections.DelayCompensation(0.5))
    definition = dataclasses.replace(
        METHODS["spectrain-stash"], correction=lambda *place: ("delay", 0.5)
    )
    compared = Compared(tanh_stages(3), method, definition=definition, microbatches=2)
    compared.run(batches(9, size=5, last=1))
    compared.run(batches(4, size=4))


# Errors and messages


@pytest.mark.parametrize(
    ("method", "optimizer", "said"),
    [
        ("sc", sgd(nesterov=True), "parameter group 0: nesterov: is spike compensation for a"),
        ("error-feedback", partial(st.optim.Adam, betas=(0.0, 0.9)), r"betas\[0\]: error feedback"),
        (
            without("vanilla", name="own", correction=lambda p: corrections.SpikeCompensation(2)),
            st.optim.Adam,
            r"'own': parameter group 0: SpikeCompensation\(delay=2.0\) is defined for SGD",
        ),
    ],
)
def test_optimizers_that_cannot_be_corrected(method, optimizer, said):
    """``oracle.cases`` has others."""
    with pytest.raises(ValueError, match=said):
        st.Pipeline(tanh_stages(3), optimizer, mse, method)
    with pytest.raises(ValueError, match=said):
        check(method, 3, optimizer=optimizer([nn.Parameter(torch.zeros(1))]))


def everywhere(correction):
    return lambda place: correction


_BY_ENTRY = {"forward_reads": "entry", "backward": "stash"}
_DELAY, _GAP = (everywhere(c) for c in (corrections.DelayCompensation(0.1), corrections.GapAware()))


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        ({"correction": 3}, TypeError, "correction of 'own': expected a function of a Place"),
        ({"correction": everywhere("x")}, TypeError, "expected one of .* with sgd and adam, "),
        ({"correction": everywhere(corrections.GapAware)}, TypeError, "expected one of .* <class"),
        ({"correction": _DELAY}, ValueError, r"at stage 0 of 3: DelayC.* needs backward='stash'"),
        ({"correction": _GAP, **_BY_ENTRY}, ValueError, "GapAware.* needs forward_reads='newest'"),
        ({"rates": 3}, TypeError, "rates of 'own': expected a function of a Place and"),
        ({"rates": lambda p, t: -1.0}, ValueError, r"rates of 'own' gives -1\.0 for the first"),
        ({"law": "average", "forward_horizon": lambda p: 1}, ValueError, "'average' looks back"),
        ({"law": "average", "backward": "stash"}, ValueError, "'average' looks back"),
    ],
)
def test_methods_that_contradict_themselves(changed, kind, said):
    own = Method("own", "", **changed)
    with pytest.raises(kind, match=said):
        rules_at(own, Place(0, 3, 3, 1))


class OwnSpike:
    """An object with only what ``SpikeCompensation`` needs, and the same result."""

    def sgd(self, numbers):
        return corrections.SpikeCompensation(2).sgd(numbers)

    adam = sgd


def test_a_correction_of_ones_own():
    found, stages, data = [], tanh_stages(3), batches(8)
    for made in (corrections.SpikeCompensation(2), OwnSpike()):
        own = Method("own", "", backward="stash", correction=lambda place, made=made: made)
        found.append(losses(st.Pipeline(copy.deepcopy(stages), sgd(), mse, own), data))
    assert found[0] == found[1]
    assert in_words(own, places_of(own, 3, 1)).endswith("; steps have own spike")


def test_a_correction_of_ones_own_gives_a_term():
    class Terms(corrections.StepCorrection):
        def sgd(self, numbers):
            return [numbers.term()]

    own = Method("own", "", correction=lambda place: Terms())
    with pytest.raises(
        TypeError, match=r"stages\[0\] under .*'own': parameter group 0: .* a Term, "
    ):
        st.Pipeline(tanh_stages(3), sgd(), mse, own)


def test_in_words():
    for method, said in (
        ("gap-aware", "backwards meet their forwards' weights; steps have gap aware"),
        ("pipemare", "rates begin with 0.333 of their own at the least; backwards look back"),
    ):
        method = find_method(method)
        assert in_words(method, places_of(method, 4, 1)).endswith(said)
    assert pipemare() == find_method("pipemare") != pipemare(updates=7)


def test_braking_of_16_bits_has_its_angle_in_32():
    """No angle; along; against; and nearly at a right angle."""
    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    method = Method("own", "", correction=lambda place: corrections.AdaptiveBraking(0.5))
    stage = nn.Module()
    stage.weight, stage.forward = weight, lambda x: (x * weight).sum(-1)
    more = {"method": method, "microbatches": 1}
    pipe = st.Pipeline([stage], sgd(lr=1.0, momentum=0.5), lambda output, _: output.sum(), **more)
    found = []
    for gradient in ([1.0, 0, 0], [2.0, 0, 0], [-1.0, 0, 0], [0, 4.0, 0]):
        losses(pipe, [(torch.tensor([gradient], dtype=torch.bfloat16), torch.zeros(1))])
        (state,) = pipe.optimizers[0].state.values()
        found.append(state["momentum_buffer"].tolist())
    assert found == [[1.0, 0, 0], [1.5, 0, 0], [-0.75, 0, 0], [-0.375, 4.0, 0]]


@pytest.mark.parametrize("bad", [-1, float("nan"), "x"])
@pytest.mark.parametrize("kind", [corrections.SpikeCompensation, corrections.AdaptiveBraking])
def test_bad_numbers(kind, bad):
    with pytest.raises((TypeError, ValueError), match=r"delay|strength"):
        kind(bad)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_correction_knows_the_delay_of_any_schedule(schedule):
    """With a flush there is no delay in any window: the step is plain."""
    stages, data = tanh_stages(3), batches(5, size=6)
    made = [
        losses(st.Pipeline(copy.deepcopy(stages), sgd(), mse, method, microbatches=3), data)
        for method in (schedule, dataclasses.replace(find_method("sc"), schedule=schedule))
    ]
    assert made[0] == made[1]


def test_the_delay_that_a_correction_is_given_is_counted():
    method = dataclasses.replace(find_method("wpipe"), correction=find_method("sc").correction)
    places = places_of(method, 4, 2)
    found = [rules_at(method, place).correction for place in places]
    assert found == [corrections.SpikeCompensation(1), corrections.SpikeCompensation(1), None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("longer", [1e-30, 1e-9, 1e-3, 1.0, 1e3, 1e7, 1e9, 1e30])
def test_braking_of_vectors_of_any_length(longer, dtype):
    """Compared with the product, to the precision of the addition to the momentum."""
    torch.manual_seed(0)
    v, g = torch.randn(2, 50, dtype=torch.float64).to(dtype)
    g = longer * g
    cosine = torch.cosine_similarity(v.double(), g.double() / longer, dim=0)
    expected = (1.0 - 0.5 * cosine * (longer < 1e8)) * g.double()
    apart, _ = st.distance([v], [[g]])
    corrections.AdaptiveBraking(0.5).brake_([g], [v], apart[0])
    atol = (1e-6 if dtype is torch.float32 else 1e-8) * longer + 1e-15
    torch.testing.assert_close(g.double(), expected, rtol=0.0, atol=atol)


def test_what_is_zero_or_not_finite_is_not_braked():
    for gradient, momentum in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (float("inf"), 1.0)):
        g, v = torch.full((3,), gradient), torch.full((3,), momentum)
        apart, _ = st.distance([v], [[g]])
        corrections.AdaptiveBraking(0.5).brake_([g], [v], apart[0])
        assert torch.equal(g, torch.full((3,), gradient))
