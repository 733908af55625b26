"""Tests the JSON form of values that are not tensors; values that need pickle are rejected."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from spectrain_ext.checkpoint.documents import decode, encode

plain = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text(),
    lambda inner: (
        some.lists(inner)
        | some.lists(inner).map(tuple)
        | some.dictionaries(some.text() | some.integers() | some.tuples(some.integers()), inner)
    ),
    max_leaves=20,
)


def through(value):
    return decode(json.loads(json.dumps(encode(value, "it"))))


@given(plain)
def test_there_and_back(value):
    assert through(value) == value
    assert repr(through(value)) == repr(value)  # tuples stay tuples, and -0.0 is not 0.0


def test_counters_and_scalars():
    found = through({"milestones": Counter({3: 1, 5: 2}), "lr": torch.tensor(0.5)})
    assert found["milestones"] == Counter({3: 1, 5: 2})
    assert type(found["milestones"]) is Counter
    assert torch.equal(found["lr"], torch.tensor(0.5))


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"a": [1, object()]}, r"it\.a\[1\]: a checkpoint cannot hold a builtins\.object"),
        ((lambda: 0,), r"it\[0\]: a checkpoint cannot hold a builtins\.function"),
        (torch.zeros(2), r"it: a checkpoint cannot hold a torch\.Tensor"),
        ({"a": b"x"}, r"it\.a: a checkpoint cannot hold a builtins\.bytes"),
    ],
    ids=["object", "function", "tensor", "bytes"],
)
def test_refused(value, match):
    with pytest.raises(TypeError, match=match):
        encode(value, "it")
