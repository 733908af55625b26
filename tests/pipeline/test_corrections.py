"""Tests corrections and clipping beyond ``oracle.cases``: inner, because of a norm's overflow."""

from __future__ import annotations

import copy
import dataclasses
import math
from functools import partial

import pytest
import torch
from helpers.pipeline_cases import Compared, batches, losses, mse, sgd, tanh_stages, torch_sgd
from oracle.methods import METHODS, hybrid
from torch import nn

import spectrain_ext as st
from spectrain_ext import corrections
from spectrain_ext.method import check, find_method, in_words, places_of, recipe_clip, rules_at
from spectrain_ext.pipeline.norms import gradient_norm

pytestmark = pytest.mark.usefixtures("float64")


def without(method, **changed):
    return dataclasses.replace(find_method(method), **changed)


def adam(kind, **changed):
    return [
        partial(getattr(module, kind), lr=0.01, **changed) for module in (st.optim, torch.optim)
    ]


OPTIMIZERS = {
    "SGD": (sgd(weight_decay=0.05), torch_sgd(weight_decay=0.05)),
    "rising SGD": (sgd(lr=0.003, maximize=True), torch_sgd(lr=0.003, maximize=True)),
    **{kind: adam(kind, weight_decay=0.05) for kind in ("Adam", "AdamW", "NAdam")},
    "rising AdamW": adam("AdamW", weight_decay=0.05, maximize=True),
}
CORRECTIONS = {
    "delay": corrections.DelayCompensation(0.5),
    "gap": corrections.GapAware(0.9),
    "braking": corrections.AdaptiveBraking(0.5),
}


class Seldom(nn.Module):
    """Uses its second layer for every third minibatch, whose parameters else have no gradient."""

    def __init__(self):
        super().__init__()
        self.layers, self.forwards = nn.Sequential(*(nn.Linear(5, 5) for _ in range(2))), 0

    def forward(self, x):
        self.forwards += 1
        return torch.tanh(self.layers[: 1 + (self.forwards % 3 == 0)](x))


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [(k, name) for k in CORRECTIONS for name in OPTIMIZERS if k != "braking" or "SGD" in name],
)
@pytest.mark.parametrize("base", ["spectrain-stash", "second-order"])
def test_a_correction_after_a_prediction(base, kind, optimizer):
    """It compares with the backward's weights, which are predicted, and without gradients waits."""
    numbers = [*vars(CORRECTIONS[kind]).values()]
    definition = dataclasses.replace(
        METHODS[base], correction=lambda k, n, w, m: (kind, *numbers) if w > 1 else None
    )
    more = {"definition": definition, "optimizer": OPTIMIZERS[optimizer]}
    stages = [Seldom(), *tanh_stages(2)]
    compared = Compared(stages, without(base, name="own", passes=[CORRECTIONS[kind]]), **more)
    compared.run(batches(9, size=4))
    compared = Compared(stages, compared.pipe.method, microbatches=2, **more)
    compared.run(batches(9, size=5, last=1))
    compared.run(batches(4, size=4))


def test_a_method_corrects_in_its_own_phase():
    for first, then in (("pipedream", "gap-aware"), ("dc-asgd", "pipedream"), ("sc", "braking")):
        compared = Compared(tanh_stages(3), f"{first}+{then}@4", definition=hybrid(first, then, 4))
        compared.run(batches(9))
        compared.run(batches(3))


def test_gap_aware_continues_from_its_state():
    """As it goes on between two runs, with parameters that have had fewer gradients."""

    def made():
        torch.manual_seed(0)
        return st.Pipeline([Seldom(), *tanh_stages(2)], sgd(), mse, "gap-aware")

    pipe, other, data = made(), made(), batches(12)
    losses(pipe, data[:6])
    other.load_state_dict(pipe.state_dict())
    for mine, theirs in zip(pipe.optimizers, other.optimizers, strict=True):
        theirs.load_state_dict(mine.state_dict())
    for mine, theirs in zip(pipe._wires.stages, other._wires.stages, strict=True):
        theirs.module.load_state_dict(mine.module.state_dict())
        theirs.passes[0].load_state_dict(state := mine.passes[0].state_dict())
        assert bool(state) == bool(mine.late)
    first = pipe._wires.stages[0]
    assert first.passes[0].state_dict()["fewer"] == dict.fromkeys(
        ("layers.1.weight", "layers.1.bias"), 2
    )
    assert losses(pipe, data[6:]) == losses(other, data[6:])


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


_GAP = corrections.GapAware()


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        ({"correction": 3}, TypeError, "correction of 'own': expected a function of a Place"),
        ({"correction": everywhere("x")}, TypeError, "expected an object with sgd and adam, "),
        ({"correction": everywhere(_GAP)}, TypeError, "got GapAware.* goes into passes="),
        ({"passes": _GAP}, TypeError, "passes of 'own': expected a list of passes"),
        ({"passes": [corrections.GapAware]}, TypeError, r"'own'\[0\]: expected a .*GapAware\("),
        ({"passes": [_GAP, _GAP]}, ValueError, r"'own'\[1\]: there is another GapAware"),
        ({"passes": [_GAP]}, ValueError, r"GapAware.* needs backward='stash'"),
        (
            {"passes": [_GAP], "forward_reads": "entry", "backward": "stash"},
            *(ValueError, "GapAware.* needs forward_reads='newest'"),
        ),
        ({"rates": 3}, TypeError, "rates of 'own': expected a function of a Place and"),
        ({"rates": lambda p, t: -1.0}, ValueError, r"rates of 'own' gives -1\.0 for the first"),
        ({"law": "average", "forward_horizon": lambda p: 1}, ValueError, "'average' looks back"),
        ({"law": "average", "backward": "stash"}, ValueError, "'average' looks back"),
    ],
)
def test_methods_that_contradict_themselves(changed, kind, said):
    with pytest.raises(kind, match=said):
        st.Pipeline(tanh_stages(3), sgd(), mse, st.Method("own", "", **changed))


def test_what_cannot_be_corrected():
    brakes = st.Method("own", "", passes=[CORRECTIONS["braking"]])
    with pytest.raises(
        ValueError, match=r"stages\[0\]: parameter group 0 has no momentum, which A"
    ):
        st.Pipeline(tanh_stages(2), st.optim.Adam, mse, brakes)
    with pytest.raises(ValueError, match="there is another GapAware; give one"):
        st.Pipeline(tanh_stages(2), sgd(), mse, "gap-aware", passes=[_GAP])
    narrow = [stage.bfloat16() for stage in tanh_stages(2)]
    with pytest.raises(TypeError, match=r"stages\[0\]: Delay.*; give master_dtype=torch.float32"):
        st.Pipeline(narrow, sgd(), mse, "dc-asgd")
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse, "gap-aware")
    pipe.optimizers[0].param_groups[0]["momentum"] = 0.0
    before = copy.deepcopy(pipe.children().__next__().state_dict())
    with pytest.raises(st.StageError, match="group 0 has no momentum, which GapAware"):
        losses(pipe, batches(3))
    assert all(map(torch.equal, before.values(), next(pipe.children()).state_dict().values()))


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


def braked(gradients, momentum):
    """Return the momentum after an update by each gradient of a late stage."""
    gradients, found = torch.stack(gradients), []
    stage = nn.Module()
    stage.weight = nn.Parameter(torch.zeros_like(gradients[0]))
    stage.forward = lambda x: (x * stage.weight).sum(-1)
    method = st.Method("own", "", passes=[CORRECTIONS["braking"]])
    arguments = sgd(lr=1.0, momentum=momentum), lambda output, _: output.sum(), method
    pipe = st.Pipeline([stage, nn.Identity()], *arguments, microbatches=1)
    for _ in pipe.run([(each[None], torch.zeros(1)) for each in gradients]):
        found += [s["momentum_buffer"].clone() for s in pipe.optimizers[0].state.values()]
    return found


def test_braking_of_16_bits_has_its_angle_in_32():
    """No angle; along; against; and nearly at a right angle."""
    rows = torch.tensor([[1.0, 0, 0], [2, 0, 0], [-1, 0, 0], [0, 4, 0]], dtype=torch.bfloat16)
    found = [v.tolist() for v in braked([*rows], 0.5)]
    assert found == [[1.0, 0, 0], [1.5, 0, 0], [-0.75, 0, 0], [-0.375, 4.0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("longer", [1e-30, 1e-9, 1e-3, 1.0, 1e3, 1e7, 1e9, 1e30])
def test_braking_of_vectors_of_any_length(longer, dtype):
    """Compared with the product, to the precision of the addition to the momentum."""
    v, g = torch.randn(2, 50, dtype=torch.float64).to(dtype)
    cosine = torch.cosine_similarity(v.double(), g.double(), dim=0)
    expected = (1.0 - 0.5 * cosine * (longer < 1e8)) * (longer * g).double()
    found = braked([v, longer * g], 1e-40)[-1].double()  # nothing is left of v
    atol = (1e-6 if dtype is torch.float32 else 1e-8) * longer + 1e-15
    torch.testing.assert_close(found, expected, rtol=0.0, atol=atol)


def test_what_is_zero_or_not_finite_is_not_braked():
    for gradient, momentum in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (float("inf"), 1.0)):
        rows = [torch.full((3,), momentum), torch.full((3,), gradient)]
        assert torch.equal(braked(rows, 1e-40)[-1], rows[1] + 1e-40 * rows[0])


@pytest.mark.parametrize(
    ("kind", "name", "bad"),
    [
        (corrections.DelayCompensation, "strength", [-1.0, math.nan, math.inf, "1", None]),
        (corrections.GapAware, "decay", [-0.1, 1.0, math.nan, "1"]),
        (corrections.AdaptiveBraking, "strength", [-1.0, math.nan, "1"]),
        (corrections.SpikeCompensation, "delay", [-1, math.nan, "x"]),
    ],
)
def test_bad_numbers(kind, name, bad):
    for value in bad:
        with pytest.raises((TypeError, ValueError), match=name):
            kind(value)


def test_the_delay_that_a_correction_is_given_is_counted():
    """With a flush there is none."""
    late = corrections.SpikeCompensation(1)
    expected = {"wpipe": [late, late, None, None], **dict.fromkeys(("1f1b", "zb-h1"), [None] * 4)}
    for name, each in expected.items():
        method = without(name, correction=find_method("sc").correction)
        assert [rules_at(method, place).correction for place in places_of(method, 4, 2)] == each


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
