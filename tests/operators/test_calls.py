"""Tests that every call of an operator equals its definition to the bit and changes nothing else.

The products of options are in helpers/ops_options.py: rules, ways to call (functions, plans,
groups), types, layouts, sizes, numbers, laws, a step's options and numbers of threads. Every pair
of options that can be combined occurs. test_library.py compares torch.ops with the functions.
"""

from __future__ import annotations

import math

import hypothesis.strategies as hs
import pytest
import torch
from helpers import ops_reference as ref
from helpers.covering import Row as Options
from helpers.ops_calls import PRODUCTS
from helpers.ops_tensors import World
from hypothesis import assume, given, settings

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
            values = [x for x in axes.values[key] if axes.fits({**options, key: x})]
            assume(values)
            options[key] = draw(hs.sampled_from(values), label=key)
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
    start: Options = {key: data.draw(hs.sampled_from(values), label=key) for key, values in drawn}
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
