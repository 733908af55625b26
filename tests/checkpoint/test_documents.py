"""Tests the JSON form of values that are not tensors; values that need pickle are rejected."""

from __future__ import annotations

import json
from collections import Counter, deque

import numpy as np
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


@pytest.mark.parametrize(
    "value",
    [
        Counter({3: 1, 5: 2}),
        deque([1, (2, None)], maxlen=3),
        deque(),
        torch.Size([3, 0]),
        torch.bfloat16,
        np.float32(0.1),
        np.float64("nan"),
        np.uint64(2**64 - 1),
        np.bool_(True),
        torch.tensor(0.5),
        torch.tensor([0.1]),
        torch.tensor([[3]]),
    ],
    ids=repr,
)
def test_kinds(value):
    (found,) = through([value])
    assert type(found) is type(value)
    assert repr(found) == repr(value)
    assert getattr(found, "dtype", None) == getattr(value, "dtype", None)


@pytest.mark.parametrize(
    "forged",
    [
        {"$deque": [[1, 2], 1]},
        {"$deque": [[1], True]},
        {"$deque": [1]},
        {"$size": [1.5]},
        {"$size": [-1]},
        {"$dtype": "Tensor"},
        {"$dtype": ["float32"]},
        {"$numpy": ["object", 1]},
        {"$numpy": ["int8", 300]},
        {"$numpy": ["float32", "1"]},
        {"$scalar": ["float32", [1, 2]]},
        {"$scalar": ["float32", [[None]]]},
    ],
    ids=str,
)
def test_forged(forged):
    with pytest.raises(ValueError, match=r"\$|expected|dtype|int8"):
        decode(forged)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"a": [1, object()]}, r"it\.a\[1\]: a checkpoint cannot hold a builtins\.object"),
        ((lambda: 0,), r"it\[0\]: a checkpoint cannot hold a builtins\.function"),
        (torch.zeros(2), r"it: a checkpoint cannot hold a torch\.Tensor of 2 elements"),
        (torch.eye(1).to_sparse(), r"it: .* a torch\.Tensor that is not dense"),
        ({"a": b"x"}, r"it\.a: a checkpoint cannot hold a builtins\.bytes"),
        (np.datetime64("2020"), r"it: a checkpoint cannot hold a numpy\.datetime64"),
        (torch.ones(1, 1).max(0), r"it: a checkpoint cannot hold a torch\.return_types\.max"),
    ],
    ids=["object", "function", "tensor", "sparse", "bytes", "date", "named tuple"],
)
def test_refused(value, match):
    with pytest.raises(TypeError, match=match):
        encode(value, "it")
