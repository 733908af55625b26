"""Tests values that are not tensors: inner, because a limit of 256 MiB is lowered for a test."""

from __future__ import annotations

from collections import Counter, deque
from pathlib import Path
from pprint import pformat
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoint_cases import nest
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn

from spectrain_ext.checkpoint import CheckpointError, load, save

plain = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text(),
    lambda inner: (
        some.lists(inner)
        | some.lists(inner).map(tuple)
        | some.dictionaries(some.text() | some.integers() | some.tuples(some.integers()), inner)
    ),
    max_leaves=20,
)


def through(directory: Path, value: Any) -> Any:
    """Return an extra value after a save and a load."""
    save(directory / "c", nn.Module(), extra=value, overwrite=True)
    return load(directory / "c", nn.Module()).extra


@settings(max_examples=settings.default.max_examples // 4)
@given(some.lists(plain, max_size=4))
def test_there_and_back(tmp_path_factory: pytest.TempPathFactory, value: list[Any]) -> None:
    found = through(tmp_path_factory.getbasetemp(), value)
    assert found == value
    # tuples stay tuples, and -0.0 is not 0.0; keys come in order
    assert pformat(found) == pformat(value)


def test_kinds(tmp_path: Path) -> None:
    values = [
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
        torch.tensor(1j),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.zeros(0, 2, dtype=torch.bfloat16),
    ]
    for found, value in zip(through(tmp_path, values), values, strict=True):
        assert type(found) is type(value)
        assert repr(found) == repr(value)
        assert getattr(found, "dtype", None) == getattr(value, "dtype", None)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"a": [1, object()]}, r"extra\.a\[1\]: a checkpoint cannot hold a builtins\.object"),
        (nest(1, 101), "extra.*more than 100 containers"),
        (torch.eye(1).to_sparse(), r"extra: .* a torch\.Tensor that is not dense"),
        ({"a": b"x"}, r"extra\.a: a checkpoint cannot hold a builtins\.bytes"),
        (np.datetime64("2020"), r"extra: a checkpoint cannot hold a numpy\.datetime64"),
        (torch.ones(1, 1).max(0), r"extra: .* hold a torch\.return_types\.max"),
    ],
    ids=["object", "deep", "sparse", "bytes", "date", "named tuple"],
)
def test_refused(tmp_path: Path, value: object, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        save(tmp_path / "c", nn.Module(), extra=value)


def test_a_document_is_not_written_that_could_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spectrain_ext.checkpoint.documents._LARGEST", 10**4)
    with pytest.raises(CheckpointError, match="bytes, expected less than 10000"):
        save(tmp_path / "c", nn.Module(), extra="x" * 10**4)
    assert not list(tmp_path.iterdir())
