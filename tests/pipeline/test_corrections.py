"""Tests corrections, T1 and T2: identities where they have no effect, and errors."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from helpers.pipeline_cases import Compared, batches, close, losses, mse, sgd, tanh_stages
from oracle.methods import METHODS
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import spectrain_ext as st
from spectrain_ext import corrections
from spectrain_ext.method import Method, check, find_method, in_words, pipemare, places_of, rules_at
from spectrain_ext.schedule import Place

pytestmark = pytest.mark.usefixtures("float64")


def without(method, **changed):
    return dataclasses.replace(find_method(method), **changed)


def stepped(correction, optimizer, gradients, dtype=torch.float64):
    """Return a stage's weights before and after updates with these gradients, and the pipeline."""
    torch.manual_seed(0)
    stage = nn.Linear(gradients.shape[1], 1, bias=False, dtype=dtype)
    method = without("vanilla", correction=correction and (lambda place: correction))
    pipe = st.Pipeline([stage], optimizer, lambda output, _: output.sum(), method, microbatches=1)
    found = [stage.weight.detach().clone()]
    for gradient in gradients.to(dtype):
        losses(pipe, [(gradient[None], torch.zeros(1))])
        found.append(stage.weight.detach().clone())
    return found, pipe


def test_a_spike_of_no_delay_is_sgd_and_of_one_is_nesterov_momentum():
    plain, gradients = sgd(weight_decay=0.1), torch.randn(5, 7)
    spikes = [stepped(corrections.SpikeCompensation(d), plain, gradients)[0] for d in (0, 1)]
    expected, _ = stepped(None, plain, gradients)
    assert all(map(torch.equal, spikes[0], expected))
    close(spikes[1], stepped(None, sgd(weight_decay=0.1, nesterov=True), gradients)[0])


@pytest.mark.parametrize("delay", [0, 1, 3, 20])
def test_a_spike_takes_what_all_of_an_impulse_would_in_the_end(delay):
    """a/(1 - mu) + b = 1/(1 - mu): the sum rule, for one gradient and 299 updates."""
    gradients = torch.zeros(300, 1)
    gradients[0] = 1
    found, _ = stepped(corrections.SpikeCompensation(delay), sgd(lr=1.0), gradients)
    assert (found[-1] - found[0]).item() == pytest.approx(-10.0)


def test_braking_of_no_strength_is_sgd_and_is_the_same_up_and_down():
    """Minimizing f is maximizing -f."""
    gradients, brake = torch.randn(6, 7), corrections.AdaptiveBraking(1.0)
    plain, _ = stepped(None, sgd(), gradients)
    assert all(
        map(torch.equal, stepped(corrections.AdaptiveBraking(0.0), sgd(), gradients)[0], plain)
    )
    down, _ = stepped(brake, sgd(), gradients)
    close(stepped(brake, sgd(maximize=True), -gradients)[0], down)
    assert not torch.equal(down[-1], plain[-1])


@pytest.mark.parametrize("momentum", [None, torch.float32])
def test_braking_of_half_precision_has_its_angle_in_single(momentum):
    optimizer = sgd(lr=1.0, momentum=0.5, momentum_dtype=momentum)
    # no angle; along; against; and nearly at a right angle
    gradients = [[1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 4.0, 0.0]]
    for count, expected in enumerate(
        ([1.0, 0.0, 0.0], [1.5, 0.0, 0.0], [-0.75, 0.0, 0.0], [-0.375, 4.0, 0.0]), 1
    ):
        given = torch.tensor(gradients[:count])
        _, pipe = stepped(corrections.AdaptiveBraking(0.5), optimizer, given, torch.bfloat16)
        (state,) = pipe.optimizers[0].state.values()
        assert state["momentum_buffer"].tolist() == [expected]


def test_error_feedback_is_twice_an_update_less_the_one_before():
    """W' = W - lr*(2u' - u) equals a plain step plus its change from the previous step."""
    gradients = torch.randn(4, 7)
    for optimizer in (sgd(weight_decay=0.1), sgd(smoothed=True, maximize=True)):
        found, _ = stepped(corrections.ErrorFeedback(), optimizer, gradients)
        p = nn.Parameter(found[0].clone())
        plain, before = optimizer([p]), torch.zeros(1, 7)
        for start, end, gradient in zip(found, found[1:], gradients, strict=False):
            with torch.no_grad():
                p.copy_(start)
            p.grad = gradient[None]
            plain.step()
            moved = p.detach() - start
            close(end, start + 2 * moved - before)
            before = moved


def trained(method, optimizer=None, **more):
    torch.manual_seed(1)
    pipe = st.Pipeline(tanh_stages(4), optimizer or sgd(), mse, method, **more)
    return torch.stack(losses(pipe, batches(12, size=4)))


def test_corrections_of_no_strength_are_the_method_without_them():
    plain = trained("pipedream")
    for correction in (corrections.DelayCompensation(0.0), corrections.AdaptiveBraking(0.0)):
        method = without("pipedream", correction=lambda place, c=correction: c)
        assert torch.equal(trained(method), plain)
    for method in ("dc-asgd", "gap-aware", "braking"):
        assert not torch.equal(trained(method), plain)


def test_t1_is_over_when_its_updates_are():
    plain = trained("vanilla")
    over, slow = (trained(without("vanilla", rates=pipemare(updates=u).rates)) for u in (0, 5))
    assert torch.equal(over, plain)
    # The first update has lr/3 on stage 0; the minibatch after the pipeline has filled sees it.
    assert not torch.equal(slow, plain)
    assert torch.equal(slow[:1], plain[:1])


@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": True}, {"weight_decay": 0.1}],
    ids=str,
)
def test_without_delay_all_are_plain(options):
    """One stage; also the last of several, whose updates are vanilla's."""
    plain = trained_on_one("vanilla", options)
    for method in ("sc", "sc-lwp", "braking", "dc-asgd", "gap-aware", "pipemare"):
        assert torch.equal(trained_on_one(method, options), plain)


def trained_on_one(method, options):
    torch.manual_seed(1)
    pipe = st.Pipeline(tanh_stages(1), sgd(**options), mse, method)
    return torch.stack(losses(pipe, batches(12, size=4)))


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
        ("braking", sgd(momentum=0.0), "parameter group 0: momentum: braking needs one"),
        ("gap-aware", sgd(momentum=0.0), "parameter group 0 has momentum 0"),
        ("error-feedback", sgd(momentum=0.0), "momentum: error feedback needs one"),
        ("error-feedback", sgd(dampening=0.1), "dampening: error feedback is not defined"),
        (
            "error-feedback",
            lambda p: st.optim.Adam(p, betas=(0.0, 0.9)),
            r"betas\[0\]: error feedback needs",
        ),
        (
            without("vanilla", name="own", correction=lambda p: corrections.SpikeCompensation(2)),
            lambda p: st.optim.Adam(p),
            r"'own': parameter group 0: SpikeCompensation\(delay=2.0\) is defined for SGD",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_optimizers_that_cannot_be_corrected(method, optimizer, said):
    with pytest.raises(ValueError, match=said):
        st.Pipeline(tanh_stages(3), optimizer, mse, method)
    with pytest.raises(ValueError, match=said):
        check(method, 3, optimizer=optimizer([nn.Parameter(torch.zeros(1))]))


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        ({"correction": 3}, TypeError, "correction of 'own': expected a function of a Place"),
        (
            {"correction": lambda p: "x"},
            TypeError,
            "correction of 'own' at stage 0 of 3: expected one of .* with sgd and adam, ",
        ),
        (
            {"correction": lambda p: corrections.GapAware},
            TypeError,
            "expected one of .* <class",
        ),
        (
            {"correction": lambda p: corrections.DelayCompensation(0.1)},
            ValueError,
            r"correction of 'own' at stage 0 of 3: DelayC.* needs backward='stash'",
        ),
        (
            {
                "correction": lambda p: corrections.GapAware(),
                "forward_reads": "entry",
                "backward": "stash",
            },
            ValueError,
            r"correction of 'own' at stage 0 of 3: GapAware.* needs forward_reads='newest'",
        ),
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
    def said(method, n=4, m=1):
        return in_words(method, places_of(method, n, m))

    assert said(find_method("sc")).endswith(
        "meet the newest weights; steps have spike compensation"
    )
    assert said(find_method("gap-aware")).endswith("forwards' weights; steps have gap aware")
    assert said(pipemare()) == (
        "pipemare: 1 microbatch a minibatch, so that forwards are at most 3 updates late; learning "
        "rates begin with 0.333 of their own at the least; backwards look back"
    )
    assert pipemare() == find_method("pipemare") != pipemare(updates=7)


@pytest.mark.parametrize("bad", [-1, float("nan"), "x", True])
def test_bad_numbers(bad):
    for kind in (corrections.SpikeCompensation, corrections.AdaptiveBraking):
        if bad is not True or kind is corrections.SpikeCompensation:
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


class Dispatched(TorchDispatchMode):
    """Counts torch's compute operators: on a GPU each is at least one launch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_braking_many_parameters_takes_no_more_operators():
    counts = []
    for n in (1, 20):
        counted = Dispatched()

        def optimizer(params, counted=counted):
            made = sgd()(params)
            made.register_step_pre_hook(lambda *_: counted.__enter__() and None)
            made.register_step_post_hook(lambda *_: counted.__exit__(None, None, None))
            return made

        method = without("vanilla", correction=lambda place: corrections.AdaptiveBraking(0.5))
        pipe = st.Pipeline(tanh_stages(1, layers=n), optimizer, mse, method)
        for _ in pipe.run(batches(3)):
            counts.append(counted.count)
            counted.count = 0
    assert counts[1] == counts[2] == counts[4] == counts[5] > 0


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
