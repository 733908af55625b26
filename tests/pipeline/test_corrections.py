"""Tests corrections, T1 and T2: identities where they have no effect, and errors."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from helpers.pipeline_cases import (
    Compared,
    batches,
    close,
    float64,  # noqa: F401  # a fixture
    losses,
    mse,
    sgd,
    tanh_stages,
    torch_sgd,
)
from oracle.methods import METHODS
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import spectrain_ext as st
from spectrain_ext import corrections
from spectrain_ext.method import (
    Method,
    check,
    find_method,
    in_words,
    pipemare,
    places_of,
    rules_at,
)
from spectrain_ext.method.formulas import RatesByDelay
from spectrain_ext.schedule import Place


def stepped(correction, optimizer, updates=5):
    """Return the weights after several updates with constant gradients."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(7))
    made = optimizer([p])
    made.bind(None, {key: {p: torch.zeros(7)} for key in made.buffer_keys}, correction)
    for _ in range(updates):
        p.grad = torch.randn(7)
        made.step()
    return p.detach()


def test_a_spike_of_no_delay_is_sgd_and_of_one_is_nesterov_momentum():
    plain = sgd(weight_decay=0.1)
    spikes = [stepped(corrections.SpikeCompensation(delay), plain) for delay in (0, 1)]
    assert torch.equal(spikes[0], stepped(None, plain))
    close(spikes[1], stepped(None, sgd(weight_decay=0.1, nesterov=True)))


@pytest.mark.parametrize("delay", [0, 1, 3, 20])
def test_a_spike_takes_what_all_of_an_impulse_would_in_the_end(delay):
    """a/(1 - mu) + b = 1/(1 - mu): the sum rule, for one gradient and 399 updates."""
    p = nn.Parameter(torch.zeros(1))
    made = sgd(lr=1.0)([p])
    views = {"momentum_buffer": {p: torch.zeros(1)}}
    made.bind(None, views, corrections.SpikeCompensation(delay))
    for update in range(400):
        p.grad = torch.ones(1) if update == 0 else torch.zeros(1)
        made.step()
    assert p.item() == pytest.approx(-10.0)


def test_braking_of_no_strength_is_sgd():
    assert torch.equal(stepped(corrections.AdaptiveBraking(0.0), sgd()), stepped(None, sgd()))


@pytest.mark.parametrize("momentum", [None, torch.float32])
def test_braking_of_half_precision_has_its_angle_in_single(momentum):
    p = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    made = st.optim.SGD([p], lr=1.0, momentum=0.5, momentum_dtype=momentum)
    views = {"momentum_buffer": {p: torch.zeros(3, dtype=momentum or torch.bfloat16)}}
    made.bind(None, views, corrections.AdaptiveBraking(0.5))
    found = []
    for gradient in ([1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 4.0, 0.0]):
        p.grad = torch.tensor(gradient, dtype=torch.bfloat16)
        made.step()
        found.append(views["momentum_buffer"][p].tolist())
    # no angle; along; against; and nearly at a right angle
    assert found[:3] == [[1.0, 0.0, 0.0], [1.5, 0.0, 0.0], [-0.75, 0.0, 0.0]]
    assert found[3] == [-0.375, 4.0, 0.0]


def test_error_feedback_is_twice_an_update_less_the_one_before():
    """W' = W - lr*(2u' - u) equals a plain step plus its change from the previous step."""
    for optimizer in (sgd(weight_decay=0.1), sgd(smoothed=True, maximize=True)):
        torch.manual_seed(0)
        start = torch.randn(7)
        found = [start] + [stepped(corrections.ErrorFeedback(), optimizer, n) for n in range(1, 4)]
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(7))
        plain = optimizer([p])
        before = torch.zeros(7)
        for n in range(1, 4):
            with torch.no_grad():
                p.copy_(found[n - 1])
            p.grad = torch.randn(7)
            plain.step()
            moved = p.detach() - found[n - 1]
            close(found[n], found[n - 1] + 2 * moved - before)
            before = moved


def trained(method, optimizer=None, **more):
    torch.manual_seed(1)
    pipe = st.Pipeline(tanh_stages(4), optimizer or sgd(), mse, method, **more)
    return torch.stack(losses(pipe, batches(12, size=4)))


def without(method, **changed):
    return dataclasses.replace(find_method(method), **changed)


def test_corrections_of_no_strength_are_the_method_without_them():
    plain = trained("pipedream")
    for correction in (corrections.DelayCompensation(0.0), corrections.AdaptiveBraking(0.0)):
        method = without("pipedream", correction=lambda place, c=correction: c)
        assert torch.equal(trained(method), plain)
    for method in ("dc-asgd", "gap-aware", "braking"):
        assert not torch.equal(trained(method), plain)


def test_t1_is_over_when_its_updates_are():
    assert torch.equal(trained(without("pipemare-t1", rates=RatesByDelay(0))), trained("vanilla"))
    slow = trained(without("pipemare-t1", rates=RatesByDelay(5)))
    # The first update has lr/3 on stage 0; the minibatch after the pipeline has filled sees it.
    assert not torch.equal(slow, trained("vanilla"))
    assert torch.equal(slow[:1], trained("vanilla")[:1])


def test_t2_looks_back_to_the_weights_of_a_straight_line():
    """If every update moves weights equally, the average leads exactly D updates back."""
    pipe = st.Pipeline([nn.Linear(1, 1) for _ in range(3)], sgd(), mse, "pipemare-t2")
    weights = pipe._weights[0]
    weights.begin()
    storage, (p, _) = weights.storage, weights.params
    true = storage.master.flat.views[p]
    for _ in range(300):
        storage.before_update()
        true += 0.25
    inside = storage.home.flat.views[p]
    storage.write(weights.versions._weights(300, 2), storage.home)
    close(inside, true - 2 * 0.25)
    storage.begin()  # a run does not use an earlier run's values
    storage.write(weights.versions._weights(0, 2), storage.home)
    close(inside, true)
    weights.end()


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


@pytest.mark.parametrize("name", ["sc-lwp", "dc-asgd", "gap-aware", "pipemare-t2", "braking"])
def test_clipped_and_with_other_windows(name):
    more = {"clip_norm": 0.03, "window": "wide", "microbatches": 3}
    compared = Compared(tanh_stages(3), name, **more)
    compared.run(batches(9, size=6, last=2))
    compared.run(batches(4, size=6))


def test_a_correction_after_a_prediction():
    """Here the correction compares with the backward's weights, which are predicted."""
    method = without("spectrain-stash", correction=lambda p: corrections.DelayCompensation(0.5))
    definition = dataclasses.replace(
        METHODS["spectrain-stash"], correction=lambda *place: ("delay", 0.5)
    )
    compared = Compared(tanh_stages(3), method, definition=definition, microbatches=2)
    compared.run(batches(9, size=5, last=1))
    compared.run(batches(4, size=4))


def test_an_optimizer_of_torchs_has_t1_and_t2():
    compared = Compared(
        tanh_stages(4),
        "pipemare",
        optimizer=(torch_sgd(), torch_sgd()),
        scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, step_size=3, gamma=0.5),
    )
    compared.run(batches(9))
    compared.run(batches(5))


# Errors and messages


@pytest.mark.parametrize(
    ("method", "optimizer", "said"),
    [
        ("sc", lambda p: st.optim.AdamW(p), "'sc' is defined for sgd"),
        ("sc", sgd(nesterov=True), "parameter group 0: nesterov: is spike compensation for a"),
        ("sc", torch_sgd(), "'sc' corrects the steps of an optimizer of spectrain_ext.optim"),
        ("braking", sgd(momentum=0.0), "parameter group 0: momentum: braking needs one"),
        ("gap-aware", sgd(momentum=0.0), "parameter group 0 has momentum 0"),
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
    ("optimizer", "said"),
    [
        (sgd(momentum=0.0), "momentum: error feedback needs one"),
        (sgd(dampening=0.1), "dampening: error feedback is not defined"),
        (lambda p: st.optim.Adam(p, betas=(0.0, 0.9)), r"betas\[0\]: error feedback needs"),
    ],
)
def test_updates_that_no_momentum_tells(optimizer, said):
    with pytest.raises(ValueError, match=said):
        st.Pipeline(tanh_stages(3), optimizer, mse, "error-feedback")


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
    assert torch.equal(stepped(OwnSpike(), sgd()), stepped(corrections.SpikeCompensation(2), sgd()))


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


def test_braking_is_the_same_up_and_down():
    """Minimizing f is maximizing -f."""
    found = []
    for sign, maximize in ((1.0, False), (-1.0, True)):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(7, dtype=torch.float64))
        opt = st.optim.SGD([p], lr=0.1, momentum=0.9, maximize=maximize)
        views = {key: {p: torch.zeros_like(p)} for key in opt.buffer_keys}
        opt.bind(None, views, corrections.AdaptiveBraking(1.0))
        for _ in range(6):
            p.grad = None
            (sign * (p**4).sum()).backward()
            opt.step()
        found.append(p.detach().clone())
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


class Dispatched(TorchDispatchMode):
    """Counts torch's compute operators: on a GPU each is at least one launch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_braking_many_parameters_takes_no_more_operators():
    counts = []
    for n in (2, 40):
        params = [nn.Parameter(torch.zeros(3)) for _ in range(n)]
        made = sgd()(params)
        views = {key: {p: torch.zeros(3) for p in params} for key in made.buffer_keys}
        made.bind(None, views, corrections.AdaptiveBraking(0.5))
        for _ in range(2):
            for p in params:
                p.grad = torch.ones(3)
            with Dispatched() as counted:
                made.step()
        counts.append(counted.count)
    assert counts[0] == counts[1]


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
