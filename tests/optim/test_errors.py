"""Tests what the optimizers refuse, and that nothing has changed afterwards."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.optim_cases import (
    ADAMS,
    BF16,
    F16,
    F32,
    F64,
    OF_TORCH,
    assert_bits,
    bits,
    buffers_for,
    every_optimizer,
    every_rival,
    flat_views,
    give_gradients,
    made,
    make_params,
    refuses,
    state_of,
    trained,
    values,
)
from torch import nn

import spectrain_ext as st

NAN, INF = float("nan"), float("inf")
BAD_OPTIONS: list[tuple[str, str, Any]] = [
    *(("SGD", "lr", value) for value in (-0.1, INF, torch.tensor([0.1, 0.2]))),
    *(("SGD", name, value) for name in ("weight_decay", "momentum") for value in (-0.5, NAN)),
    *(("SGD", "dampening", value) for value in (NAN, INF)),
    # dampened, or without momentum
    *(("SGD", flag, True) for flag in ("nesterov", "smoothed", "differentiable")),
    *((name, "lr", NAN) for name in ADAMS),
    *(("Adam", "betas", value) for value in ((1.0, 0.9), (0.9, -0.1), (0.9, NAN))),
    *(("Adam", "eps", value) for value in (-1e-8, INF)),
    ("AdamW", "amsgrad", True),
    ("NAdam", "capturable", True),
    ("NAdam", "momentum_decay", NAN),
]


@pytest.mark.parametrize(("name", "key", "value"), BAD_OPTIONS)
def test_bad_options(name: str, key: str, value: Any) -> None:
    """Given at once, or changed later in the second group."""
    params = make_params()
    dampened = {"dampening": 0.5} if name == "SGD" else {}
    with pytest.raises(ValueError):
        made(name, params, **{**dampened, key: value})
    groups = [{"params": params[:2]}, {"params": params[2:], **dampened}]
    optimizer = made(name, groups)
    give_gradients(params)
    optimizer.step()
    optimizer.param_groups[1][key] = value
    state = values(state_of(optimizer, params))
    for _ in range(2):
        refuses(optimizer.step, ValueError, "group 1", params, state)
    assert_bits(values(state_of(optimizer, params)), state)


def test_steps_are_counted_in_memory_in_all_groups_or_in_none() -> None:
    params = make_params()
    optimizer = made("AdamW", [{"params": params[:2]}, {"params": params[2:], "capturable": True}])
    state = values(state_of(optimizer, params))
    refuses(
        optimizer.step, ValueError, "^parameter group 0: expected capturable=True", params, state
    )
    for group in optimizer.param_groups:
        group["capturable"] = True
    counts = []
    for capturable in (True, False, True):
        for group in optimizer.param_groups:
            group["capturable"] = capturable
        give_gradients(params)
        optimizer.step()
        counts.append(optimizer.state[params[0]]["step"].item())
        assert optimizer._step_supports_amp_scaling is capturable
    assert counts == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"betas": (0.999, 0.9)}),
        ("SGD", {"momentum": 0.999}),
        ("Lion", {"betas": (0.9, 1 - 2**-9)}),
    ],
)
def test_a_bfloat16_momentum_that_would_not_move(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^parameter group 0: with state_dtype=torch\.bfloat16"):
        made(name, make_params(F32), state_dtype=BF16, **options)
    made(name, make_params(F32), state_dtype=BF16)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("AdamW", {"amsgrad": True}, "group 0: amsgrad=True is not supported"),
        ("SGD", {"momentum": 0.0, "smoothed": True}, "group 0: smoothed"),
        ("SGD", {"momentum": 1.0, "smoothed": True}, "group 0: smoothed"),
        ("SGD", {"dampening": 0.1, "smoothed": True}, "group 0: smoothed"),
        ("Muon", {"lr": -1.0}, "group 0: lr"),
        ("Muon", {"momentum": -0.5}, "group 0: momentum"),
        ("Muon", {"ns_steps": 100}, "ns_steps: expected 0 to 99, got 100"),
        ("Muon", {"ns_coefficients": (1.0, 2.0)}, "ns_coefficients: expected three"),
        ("Muon", {"adjust_lr_fn": "muP"}, "expected one of None, 'original'"),
        ("Muon", {"adamw": {"amsgrad": True}}, "amsgrad=True is not supported"),
        ("SOAP", {"betas": (1.0, 0.9), "adamw": {"betas": (0.9, 0.9)}}, r"betas\[0\]"),
        ("SOAP", {"shampoo_beta": 1.0}, "group 0: shampoo_beta"),
        ("SOAP", {"eps": -1.0}, "group 0: eps"),
        ("SOAP", {"precondition_frequency": 0}, "expected a whole number >= 1"),
        ("SOAP", {"max_dimension": 1.5}, "expected a whole number >= 0, got 1.5"),
    ],
    ids=str,
)
def test_refused_options_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(name, make_params(), **options)


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "bad"),
    [(F64, BF16, 1), (F64, F32, 1), (BF16, F16, 0), (torch.complex64, None, 1)],
    ids=str,
)
def test_bad_dtypes(dtype: torch.dtype, state_dtype: torch.dtype | None, bad: int) -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=dtype))]
    with pytest.raises(TypeError, match=f"parameter {bad} of group 0"):
        st.optim.SGD(params, lr=0.1, momentum=0.9, state_dtype=state_dtype)


def test_bad_groups_are_not_added() -> None:
    params, optimizer = trained()
    p, q = (nn.Parameter(torch.ones(2).double()) for _ in range(2))
    wide = nn.Parameter(torch.ones(2, dtype=torch.cfloat))
    for group, error, message in (
        ({"params": [p], "lr": -1.0}, ValueError, "group 1"),
        ({"params": [p], "differentiable": True}, ValueError, "group 1"),
        ({"params": [p, wide]}, TypeError, "parameter 1 of group 1"),
        ({"params": [p, q, p]}, ValueError, "parameter 2 of group 1 is parameter 0"),
        ({"params": [q, params[0]]}, ValueError, "more than one parameter group"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            refuses(partial(optimizer.add_param_group, group), error, message)
        assert len(optimizer.param_groups) == 1
    give_gradients(params)
    optimizer.step()


@every_rival
def test_gradients_that_are_refused(name: str) -> None:
    embedding, other = nn.Embedding(10, 3, sparse=True), nn.Parameter(torch.randn(4))
    optimizer = made(name, [{"params": [other]}, {"params": embedding.parameters()}])
    (embedding(torch.tensor([1, 2])).sum() + other.sum()).backward()
    weights = [other, embedding.weight]
    refuses(optimizer.step, RuntimeError, r"parameter 0 of group 1 is sparse", weights)
    embedding.weight.grad_dtype = None  # type: ignore[assignment]
    for dtype in (F64, torch.cfloat):
        embedding.weight.grad = torch.ones(10, 3, dtype=dtype)
        said = "gradient of parameter 0 of group 1 must be torch.float32"
        refuses(optimizer.step, TypeError, said, weights)
    assert not optimizer.state


MISFITS: dict[str, Callable[[dict[str, Any], dict[str, Any], str], Any]] = {
    "shape": lambda saved, entry, key: entry.update({key: torch.zeros(3)}),
    "kind": lambda saved, entry, key: entry.update({key: "moment"}),
    "groups": lambda saved, entry, key: saved["param_groups"].append(saved["param_groups"][0]),
    "rate": lambda saved, entry, key: saved["param_groups"][0].update(lr=NAN),
    "flag": lambda saved, entry, key: saved["param_groups"][0].update(differentiable=True),
    "count": lambda saved, entry, key: entry.update(step="three"),
    "half": lambda saved, entry, key: entry.pop(key),
    "others": lambda saved, entry, key: (entry.clear(), entry.update(square_avg=torch.zeros(1))),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_state_dict_that_does_not_fit(misfit: str) -> None:
    for name in ADAMS if misfit in ("count", "half", "others") else OF_TORCH:
        params, optimizer = trained(name)
        saved = copy.deepcopy(optimizer.state_dict())
        key = optimizer.stepper.buffer_keys[-1]
        MISFITS[misfit](saved, saved["state"][5], key)
        saved["state"][1][key] = torch.tensor(7.0)
        kept, group = values(state_of(optimizer, params)), dict(optimizer.param_groups[0])
        with pytest.raises((ValueError, TypeError)):
            optimizer.load_state_dict(saved)
        assert_bits(values(state_of(optimizer, params)), kept)
        assert optimizer.param_groups[0] == group
        assert not optimizer._optimizer_load_state_dict_pre_hooks  # torch's


@pytest.mark.parametrize("name", ADAMS)
def test_state_that_is_half_gone(name: str) -> None:
    params, optimizer = trained(name)
    del optimizer.state[params[3]]["exp_avg"]
    give_gradients(params)
    refuses(optimizer.step, ValueError, r"parameter 3 of group 0.*no exp_avg", params)


# Predictions.


@every_optimizer
def test_laws_that_do_not_apply(name: str) -> None:
    params, optimizer = trained(name)
    copies, bound = copy.deepcopy((params, optimizer))
    outs = flat_views(copies)
    bound.stepper.bind(None, buffers_for(bound))
    bound.stepper.predict(outs, st.laws.Linear(1))
    give_gradients(copies)
    laws, kept = st.laws, list(outs.values())
    bad: list[Any] = [-1, -1e-9, NAN, INF, laws.SecondOrder(2)]
    bad += [] if name in ("SGD", "Lion") else [laws.Geometric(2.5), laws.Geometric(65)]
    for law in bad:
        refuses(partial(optimizer.predict_, law), ValueError, "steps", params)
        if isinstance(law, float | int):
            continue
        refuses(partial(bound.stepper.predict, outs, law), ValueError, "steps", kept)
        if not isinstance(law, laws.SecondOrder):
            refuses(partial(bound.stepper.step, write=(outs, law)), ValueError, "steps", kept)
        with pytest.raises(RuntimeError, match="predict_ first"):
            optimizer.restore_()
    refuses(lambda: optimizer.predict_("far"), TypeError, "far")
    before = bits(kept)
    bound.step()  # without a prediction
    assert_bits(kept, before)


def test_calls_while_the_weights_are_predicted() -> None:
    params, optimizer = trained()
    refuses(optimizer.restore_, RuntimeError, "predict_ first", params)
    kept, state_dict = bits(params), optimizer.state_dict()
    optimizer.predict_(2)
    give_gradients(params)
    state = values(state_of(optimizer, params))
    leave = r"the weights are predicted; leave the block of predicted\(\) first, or .*restore_"
    for misuse in (
        lambda: optimizer.predict_(1),
        lambda: optimizer.step(),
        lambda: optimizer.step(closure=lambda: None),
        lambda: optimizer.load_state_dict(state_dict),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        lambda: copy.deepcopy(optimizer),
        lambda: pickle.dumps(optimizer),
        lambda: optimizer.stepper.bind(None, buffers_for(optimizer)),
    ):
        refuses(misuse, RuntimeError, leave, params)
        assert_bits(values(state_of(optimizer, params)), state)
        assert len(optimizer.param_groups) == 1
    optimizer.restore_()
    assert_bits(params, kept)
    refuses(lambda: optimizer.step(lambda: optimizer.predict_(1)), RuntimeError, leave)
    optimizer.restore_()
    assert_bits(params, kept)
    optimizer.step()


# Binding.


@pytest.mark.parametrize("name", OF_TORCH)
def test_bad_buffers(name: str) -> None:
    params, optimizer = trained(name, BF16)
    buffers, (*first, last_key) = buffers_for(optimizer), optimizer.stepper.buffer_keys
    good, last = buffers[last_key], params[5]
    bad: list[tuple[Any, Any, str]] = [
        (None, {}, last_key),
        (None, {key: good for key in first}, last_key),
        (None, {**buffers, last_key: {}}, f"{last_key} has no tensor for parameter 0"),
        ({}, buffers, "master has no tensor for parameter 0 of group 0"),
        (None, {**buffers, last_key: {p: v.cfloat() for p, v in good.items()}}, "of parameter 0"),
    ]
    if first:  # of one dtype
        bad.append((None, {**buffers, last_key: {p: v.float() for p, v in good.items()}}, last_key))
    for wrong in (torch.zeros(3, dtype=BF16), torch.zeros(1031).int(), good[last].repeat(2)[::2]):
        given = {**buffers, last_key: {**good, last: wrong}}
        bad.append((None, given, f"{last_key} of parameter 5 of group 0"))
    for master, given, message in bad:
        with pytest.raises(ValueError, match=message):
            optimizer.stepper.bind(master, given)
    assert all(view.isnan().all() for views in buffers.values() for view in views.values())
    optimizer.stepper.bind(None, buffers)
    with pytest.raises(RuntimeError, match="already"):
        optimizer.stepper.bind(None, buffers)


def test_calls_that_need_a_binding_or_none() -> None:
    params, optimizer = trained()
    outs, last, law = flat_views(params), params[5], st.laws.Linear(1)
    for use in (
        optimizer.stepper.unbind,
        lambda: optimizer.stepper.predict(outs, law),
        lambda: optimizer.stepper.step(write=(outs, law)),
        lambda: optimizer.stepper.update_in(outs),
    ):
        refuses(use, RuntimeError, r"not bound, call bind\(\) first")
    optimizer.stepper.bind(None, buffers_for(optimizer))
    refuses(lambda: optimizer.predict_(1), RuntimeError, "bound")
    more = {"params": [nn.Parameter(torch.ones(2))]}
    refuses(lambda: optimizer.add_param_group(more), RuntimeError, "unbind")
    short = {p: view for p, view in outs.items() if p is not last}
    strided = {**outs, last: torch.zeros(2062).double()[::2]}
    for views, message in ((short, "has no tensor for parameter 5"), (strided, "of parameter 5")):
        for call, name in (
            (partial(optimizer.stepper.predict, views, law), "outs"),
            (partial(optimizer.stepper.step, write=(views, law)), "outs"),
            (partial(optimizer.stepper.update_in, views), "weights"),
        ):
            refuses(call, ValueError, f"{name}.*{message}", params)
    assert all(out.isnan().all() for out in outs.values())
    give_gradients(params)
    optimizer.step()
    params[0].data = params[0].data.clone()
    refuses(optimizer.step, RuntimeError, "group 0 no longer has the storage", params)


def test_prediction_needs_momentum_in_every_group() -> None:
    params = make_params()
    groups = [{"params": params[:2]}, {"params": params[2:], "momentum": 0}]
    optimizer, outs = st.optim.SGD(groups, lr=0.1, momentum=0.9), flat_views(params)
    for predict in (optimizer.predict_, lambda s: optimizer.predicted(s).__enter__()):
        refuses(partial(predict, 1), ValueError, "group 1 has momentum 0", params)
    with pytest.raises(ValueError, match="group 1"):
        optimizer.check_can_predict()
    optimizer.stepper.bind(None, buffers_for(optimizer))
    give_gradients(params)
    optimizer.stepper.step(write=(outs, st.laws.Linear(0)))  # which is a copy
    assert_bits(outs.values(), params)
    law = st.laws.Linear(1)
    step = partial(optimizer.stepper.step, write=(outs, law))
    for write in (partial(optimizer.stepper.predict, outs, law), step):
        refuses(write, ValueError, "group 1 has momentum 0", params, outs.values())
    optimizer.param_groups[1]["momentum"] = 0.5
    optimizer.check_can_predict()
    step()
    optimizer.param_groups[1]["momentum"] = 0.0
    refuses(step, ValueError, "group 1 has momentum 0", params, outs.values())
