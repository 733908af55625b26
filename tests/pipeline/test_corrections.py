"""Tests corrections and clipping beyond ``oracle.cases``: inner, because of a norm's overflow."""

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
from spectrain_ext.method import check, find_method, in_words, places_of, recipe_clip, rules_at
from spectrain_ext.pipeline.updates import gradient_norm
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


FED_BACK = {
    "SGD": sgd(),
    "Nesterov": sgd(nesterov=True),
    "without momentum": sgd(momentum=0.0),
    "Adam": partial(st.optim.Adam, lr=0.01),
    "AdamW": partial(st.optim.AdamW, lr=0.01, weight_decay=0.0),
    "NAdam": partial(st.optim.NAdam, lr=0.01),
    "Muon": partial(st.optim.Muon, lr=0.01, weight_decay=0.0),
    "SOAP": partial(st.optim.SOAP, lr=0.01, weight_decay=0.0),
    "torch's Adam": partial(torch.optim.Adam, lr=0.01),
    "torch's RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
}


@pytest.mark.parametrize("name", FED_BACK)
def test_error_feedback_is_twice_the_update_less_the_one_before(name):
    """W <- W + 2*d - d_before, d from gradients at the W before; saved is W - d_before.

    A loss that is not finite makes no update.
    """
    stages, data = tanh_stages(3), batches(9, size=6)
    data[4] = data[4][0], torch.full_like(data[4][1], torch.nan)
    model = copy.deepcopy(nn.Sequential(*stages))
    params = [*model.parameters()]
    optimizer = FED_BACK[name](params)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    history, expected = [[p.detach().clone() for p in params]], []
    before = [torch.zeros_like(p) for p in params]

    def put(weights):
        with torch.no_grad():
            torch._foreach_copy_(params, weights)

    for i, (x, y) in enumerate(data):
        put(history[max(0, i - 1)])
        loss = mse(model(x), y)
        grads = torch.autograd.grad(loss, params)
        expected.append(loss.detach())
        newest = history[-1]
        if loss.isfinite():
            put(newest)
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
            optimizer.step()
            scheduler.step()
            update = [p.detach() - w for p, w in zip(params, newest, strict=True)]
            newest = [w + 2 * d - b for w, d, b in zip(newest, update, before, strict=True)]
            before = update
        history.append(newest)
    put([w - d for w, d in zip(history[-1], before, strict=True)])

    by = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.8)
    skip = [st.passes.CheckFinite("skip")]
    pipe = st.Pipeline(stages, FED_BACK[name], mse, "error-feedback", scheduler=by, passes=skip)
    rtol = 1e-4 if name in ("Muon", "SOAP") else 1e-9  # these two compute in float32
    near = {"rtol": rtol, "atol": rtol / 10, "equal_nan": True}
    found = torch.stack(losses(pipe, data))
    torch.testing.assert_close(found, torch.stack(expected), **near)
    for mine, theirs in zip(pipe.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, **near)


# Errors and messages


def test_optimizers_that_cannot_be_corrected():
    """``oracle.cases`` has others."""
    spike = without("vanilla", name="own", correction=lambda p: corrections.SpikeCompensation(2))
    own = r"'own': parameter group 0: SpikeCompensation\(delay=2.0\) is defined for SGD"
    with pytest.raises(ValueError, match=own):
        st.Pipeline(tanh_stages(3), st.optim.Adam, mse, spike)
    with pytest.raises(ValueError, match=own):
        check(spike, 3, optimizer=st.optim.Adam([nn.Parameter(torch.zeros(1))]))


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
    own = st.Method("own", "", **changed)
    with pytest.raises(kind, match=said):
        rules_at(own, Place(0, 3, 3, 1))


def test_a_correction_of_ones_own():
    class OwnSpike:
        """Has only what ``SpikeCompensation`` needs, and the same result."""

        def sgd(self, numbers):
            return corrections.SpikeCompensation(2).sgd(numbers)

        adam = sgd

    found, stages, data = [], tanh_stages(3), batches(8)
    for made in (corrections.SpikeCompensation(2), OwnSpike()):
        own = st.Method("own", "", backward="stash", correction=everywhere(made))
        found.append(losses(st.Pipeline(copy.deepcopy(stages), sgd(), mse, own), data))
    assert found[0] == found[1]
    assert in_words(own, places_of(own, 3, 1)).endswith("; steps have own spike")
    said = "rates begin with 0.333 of their own at the least; backwards look back"
    pipemare = st.pipemare()
    assert in_words(pipemare, places_of(pipemare, 4, 1)).endswith(said)
    assert pipemare == find_method("pipemare") != st.pipemare(updates=7)
    OwnSpike.sgd = lambda self, numbers: [numbers.term()]
    with pytest.raises(TypeError, match=r"stages\[0\] under .*'own': parameter group 0: .* a Term"):
        st.Pipeline(stages, sgd(), mse, own)


def test_braking_of_16_bits_has_its_angle_in_32():
    """No angle; along; against; and nearly at a right angle."""
    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    method = st.Method("own", "", correction=lambda place: corrections.AdaptiveBraking(0.5))
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
def test_bad_delays(bad):
    with pytest.raises((TypeError, ValueError), match="delay"):
        corrections.SpikeCompensation(bad)


def test_the_delay_that_a_correction_is_given_is_counted():
    """With a flush there is none."""
    late = corrections.SpikeCompensation(1)
    expected = {"wpipe": [late, late, None, None], **dict.fromkeys(("1f1b", "zb-h1"), [None] * 4)}
    for name, each in expected.items():
        method = without(name, correction=find_method("sc").correction)
        assert [rules_at(method, place).correction for place in places_of(method, 4, 2)] == each


def brake(g, v):
    apart, _ = st.distance([v], [[g]])
    both = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in (g, v)]
    corrections.AdaptiveBraking(0.5).brake_([g], torch.stack([*both, apart[0, 0]])[:, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("longer", [1e-30, 1e-9, 1e-3, 1.0, 1e3, 1e7, 1e9, 1e30])
def test_braking_of_vectors_of_any_length(longer, dtype):
    """Compared with the product, to the precision of the addition to the momentum."""
    torch.manual_seed(0)
    v, g = torch.randn(2, 50, dtype=torch.float64).to(dtype)
    g = longer * g
    cosine = torch.cosine_similarity(v.double(), g.double() / longer, dim=0)
    expected = (1.0 - 0.5 * cosine * (longer < 1e8)) * g.double()
    brake(g, v)
    atol = (1e-6 if dtype is torch.float32 else 1e-8) * longer + 1e-15
    torch.testing.assert_close(g.double(), expected, rtol=0.0, atol=atol)


def test_what_is_zero_or_not_finite_is_not_braked():
    for gradient, momentum in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (float("inf"), 1.0)):
        g, v = torch.full((3,), gradient), torch.full((3,), momentum)
        brake(g, v)
        assert torch.equal(g, torch.full((3,), gradient))


@pytest.mark.parametrize(
    "method", [st.second_order(clip=recipe_clip), without("gpipe", clip=recipe_clip)]
)
def test_a_method_may_clip(method):
    """Each stage by its own norm, with a flush too."""
    norms = []
    pipe = st.Pipeline(tanh_stages(4), sgd(lr=0.5), lambda a, b: 50 * mse(a, b), method)

    def note(opt, *_):
        grads = [p.grad for group in opt.param_groups for p in group["params"]]
        norms.append(float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))))

    for opt in pipe.optimizers:
        opt.register_step_pre_hook(note)
    losses(pipe, batches(8))
    assert max(norms) <= 0.285 + 1e-9
    assert sum(norm > 0.28 for norm in norms) > 8


@pytest.mark.parametrize("scope", ["stage", "global"])
def test_large_gradients_in_float16_are_clipped(scope):
    """Their norm, 254,558, is beyond that dtype."""
    seen = []

    def note(opt, *_):
        seen.extend(p.grad.double().norm() for group in opt.param_groups for p in group["params"])

    stage = nn.Linear(6, 3, bias=False).half()
    stage.weight.register_hook(lambda gradient: torch.full_like(gradient, 60_000.0))
    more = {"method": "1f1b", "clip_norm": 1.0, "clip_scope": scope, "microbatches": 1}
    pipe = st.Pipeline([stage], sgd(), mse, **more, master_dtype=torch.float32)
    pipe.optimizers[0].register_step_pre_hook(note)
    losses(pipe, [(torch.ones(2, 6).half(), torch.ones(2, 3).half())])
    assert seen == [pytest.approx(1.0, rel=1e-2)]


def test_the_norm_of_large_16_bit_gradients_does_not_overflow():
    p = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    p.grad = torch.full((4,), 60_000.0, dtype=torch.float16)
    assert gradient_norm([p], torch.device("cpu")).item() == pytest.approx(119_968.0, rel=1e-3)
    assert gradient_norm([], torch.device("cpu")).item() == 0.0
    q = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    q.grad = torch.tensor([3 + 4j, 0j], dtype=torch.complex64)
    assert gradient_norm([q], torch.device("cpu")).abs().item() == pytest.approx(5.0)
