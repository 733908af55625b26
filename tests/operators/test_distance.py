"""Tests distance between weight versions; their bits are in test_calls.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bad_input import raises
from helpers.foreign_arrays import Producer
from torch import Tensor

import spectrain_ext as st

_W = [torch.randn(4), torch.randn(4)]


@pytest.mark.parametrize(
    ("others", "error", "says"),
    [
        ([_W, [_W[0], torch.randn(5)]], ValueError, r"others\[1\]\[1\]: expected shape"),
        ([[_W[0], _W[1].bfloat16()]], ValueError, r"others\[0\]\[1\]: expected float32, the"),
        ([_W[:1]], ValueError, r"others\[0\]: expected as many tensors as params, 2"),
        ([_W[0]], TypeError, r"others\[0\]"),
        (_W[0], TypeError, "others: expected a sequence of lists"),
    ],
    ids=["shape", "dtype", "length", "no list", "tensor"],
)
def test_bad_input(others: Any, error: type[Exception], says: str) -> None:
    raises(error, says, lambda: st.distance(_W, others), (_W, others))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_arrays_of_other_frameworks(dtype: Any) -> None:
    now, other = (np.random.default_rng(k).standard_normal((2, 3, 5)).astype(dtype) for k in (0, 1))
    each, total = st.distance(torch.from_numpy(now), [torch.from_numpy(other)])
    now.flags.writeable = False  # it is only read
    found = st.distance(list(now), [list(other), [torch.from_numpy(a) for a in other]])
    for norms in found:
        assert type(norms) is np.ndarray and norms.dtype == np.float64
    assert found[0].shape == (2, 2)
    assert found[1].tolist() == [total.item()] * 2
    assert math.hypot(*found[0][0]) == pytest.approx(each.item(), rel=1e-14)
    assert isinstance(st.distance(now, [other])[1], np.ndarray)
    norm = st.distance([Producer(now.copy())], [[other]])[1]  # of no known framework
    assert isinstance(norm, Tensor) and norm.item() == pytest.approx(total.item(), rel=1e-14)
