"""Tests that every call of an operator equals its definition to the bit and changes nothing else.

The products of options are in helpers/ops_options.py: rules, ways to call (functions, plans,
groups), types, layouts, sizes, numbers, laws, a step's options and numbers of threads. Every pair
of options that can be combined occurs. test_library.py compares torch.ops with the functions.
"""

from __future__ import annotations

import math

import hypothesis.strategies as hs
import numpy as np
import pytest
import torch
from helpers import ops_reference as ref
from helpers.covering import Row as Options
from helpers.ops_calls import PRODUCTS
from helpers.ops_options import DTYPES
from helpers.ops_tensors import World, values
from hypothesis import assume, given, settings
from torch import Tensor

import spectrain_ext as st

_ROWS = {name: axes.covering() for name, (_, axes) in PRODUCTS.items()}
_EVERY = [(name, i) for name, rows in _ROWS.items() for i in range(len(rows))]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Only calls of operators take more, see `World.check`; the fixture of all tests resets it."""
    torch.set_num_threads(1)


def _check(name: str, options: Options, seed: int, device: str = "cpu") -> None:
    PRODUCTS[name][0](World(options, seed, device), options)


@devices
@pytest.mark.parametrize(("name", "row"), _EVERY)
def test_every_pair_of_options(name: str, row: int, device: str) -> None:
    _check(name, _ROWS[name][row], row, device)


@pytest.mark.parametrize("name", PRODUCTS)
def test_no_required_pair_is_left_out(name: str) -> None:
    """Excluded pairs are listed beside the factors; each of the others is in a row above."""
    axes = PRODUCTS[name][1]
    assert axes.required.keys() == {pair for row in _ROWS[name] for pair in axes.pairs(row)}
    assert all(map(axes.fits, _ROWS[name]))


@hs.composite
def _options(draw: hs.DrawFn, name: str, fixed: Options | None = None) -> Options:
    """Draw any combination that is not excluded, factor by factor."""
    axes = PRODUCTS[name][1]
    options: Options = {key: x for key, x in (fixed or {}).items() if key in axes.values}
    for key in axes.values:
        if key not in options:
            fitting = [x for x in axes.values[key] if axes.fits({**options, key: x})]
            assume(fitting)
            options[key] = draw(hs.sampled_from(fitting), label=key)
    assume(axes.fits(options))
    return {key: options[key] for key in axes.values}


@pytest.mark.parametrize("name", PRODUCTS)
@given(data=hs.data(), seed=hs.integers(0, 2**32 - 1))
def test_any_combination(name: str, data: hs.DataObject, seed: int) -> None:
    _check(name, data.draw(_options(name), label="options"), seed)


_OF_WORLDS = ("way", "dtypes", "layout", "sizes", "values", "threads")


@settings(max_examples=settings().max_examples // 3)
@given(data=hs.data(), seed=hs.integers(0, 2**32 - 1))
def test_calls_of_one_plan_in_any_order(data: hs.DataObject, seed: int) -> None:
    """With other numbers, other gradients and both rules of moments on the same tensors."""
    drawn = [("way", ["plan", "groups"]), ("sizes", ["vectors", "many"]), ("threads", [1, 2])]
    start: Options = {key: data.draw(hs.sampled_from(some), label=key) for key, some in drawn}
    start = data.draw(_options("step", {**start, "predictions": "two passes", "values": "normal"}))
    world = World(start, seed)
    fixed = {key: start[key] for key in _OF_WORLDS}
    for name in data.draw(hs.lists(hs.sampled_from(list(PRODUCTS)), min_size=2, max_size=6)):
        PRODUCTS[name][0](world, data.draw(_options(name, fixed)))


@devices
@pytest.mark.parametrize("name", PRODUCTS)
def test_more_bytes_than_a_cache_holds(name: str, device: str) -> None:
    rows = [row for row in _ROWS[name] if row["sizes"] == "parallel"][:4]
    for seed, row in enumerate(rows):
        _check(name, {**row, "sizes": "streamed", "values": "normal"}, seed, device)


def test_comparisons_fail_when_they_should() -> None:
    one, nan = torch.tensor([1.0]), torch.tensor([math.nan])
    with pytest.raises(AssertionError, match="differ"):
        ref.assert_same(torch.tensor([0.0]), torch.tensor([-0.0]), "zeros")
    with pytest.raises(AssertionError, match="differ"):
        ref.assert_same(nan, one, "nan")
    ref.assert_same(nan, -nan, "any NaN matches any NaN")
    with pytest.raises(AssertionError, match="differ"):
        ref.assert_bits(nan, -nan, "but not to the bit")


# What no product has: a thousand tensors, other sequences, and what autograd knows.


@devices
@pytest.mark.parametrize("count", [999, 1000, 1001, 3000])
def test_many_tensors_get_the_bits_of_a_few(count: int, device: str) -> None:
    """All types mixed; a kernel's table moves at about a thousand rows."""
    rng = np.random.default_rng(count)
    lists: list[list[Tensor]] = [[], [], [], []]
    for i in range(count):
        types = DTYPES["all"][i % len(DTYPES["all"])]
        n = int(rng.integers(0, 40))
        for stream, dtype in zip(
            lists, (types.weights, types.grads, types.state, types.outs[0]), strict=True
        ):
            stream.append(values(rng, "normal", n, dtype))
    together = [[t.to(device, copy=True) for t in stream] for stream in lists]
    w, g, v, out = together
    st.sgd_step_(w, g, v, lr=0.1, momentum=0.9, weight_decay=0.01, predict=[(3.0, out)])
    for at in range(0, count, 100):
        w, g, v, out = (stream[at : at + 100] for stream in lists)
        st.sgd_step_(w, g, v, lr=0.1, momentum=0.9, weight_decay=0.01, predict=[(3.0, out)])
    for name, many, few in zip(("w", "g", "v", "out"), together, lists, strict=True):
        ref.assert_lists(many, few, name, exact=True)


def test_tuples_and_generators() -> None:
    module = torch.nn.Linear(4, 3)
    v = tuple(torch.randn_like(p) for p in module.parameters())
    expected = list(st.predict(list(module.parameters()), v, lr=0.1, steps=2.0))
    predicted = st.predict(module.parameters(), v, lr=0.1, steps=2.0)
    ref.assert_lists(list(predicted), expected, "params")
    assert not any(t.requires_grad for t in (*predicted, *st.stash(module.parameters())))


def test_strides_of_dimensions_of_size_one_do_not_matter() -> None:
    """Autograd hands out gradients whose strides differ there."""
    w, v = torch.randn(4, 1, 3), torch.randn(4, 1, 3)
    odd = torch.empty(12).as_strided((4, 1, 3), (3, 77, 1))
    st.restore_(odd, w)
    assert torch.equal(odd, w)
    plan, expected = st.Plan(w, grads=v), w - odd
    plan.refresh(odd)
    plan.sgd_step_(lr=1.0, momentum=0.0)
    assert torch.equal(w, expected)


def test_backward_after_a_plan_uses_the_weights_that_are_there_now() -> None:
    """Documented: the input's gradient is computed with the new weights, and nothing raises."""
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    loss = (w @ x).sum()
    new = torch.randn(4, 4)
    st.Plan(w, stashed=new).restore_()
    loss.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, new.sum(0))


def test_inference_tensors_have_no_counter_and_are_taken() -> None:
    with torch.inference_mode():
        w, v = torch.zeros(5), torch.ones(5)
        st.predict_(w, v, lr=0.5, steps=1.0)
        assert w.tolist() == [-0.5] * 5
