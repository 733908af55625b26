"""Checks that a bad call raises an error that names the argument, and changes nothing."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def _tensors(x: object) -> Iterator[Tensor]:
    """Yield every tensor in nested arguments that has accessible memory."""
    if isinstance(x, Tensor):
        if x.layout == torch.strided and x.device.type == "cpu" and not isinstance(x, FakeTensor):
            yield x
    elif isinstance(x, (Mapping, list, tuple)):
        for y in x.values() if isinstance(x, Mapping) else x:
            yield from _tensors(y)


def _states(tensors: list[Tensor]) -> list[tuple[bytes, int]]:
    """The bytes of whole storages (bytes(storage) would read them one by one), and the versions."""
    storages = [t.untyped_storage() for t in tensors]
    return [
        (ctypes.string_at(s.data_ptr(), s.nbytes()) if s.nbytes() else b"", t._version)
        for s, t in zip(storages, tensors, strict=True)
    ]


def raises(
    error: type[Exception] | tuple[type[Exception], ...],
    names: str,
    call: Callable[[], object],
    watched: object,
    *says: str,
) -> None:
    """Check that the call raises ``error`` with ``names`` and ``says`` and changes nothing."""
    tensors = list(_tensors(watched))
    before = _states(tensors)
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "frame #" not in message, f"a C++ stack trace is no message: {message[:200]!r}"
    assert re.search(names, message), f"{message!r} does not name {names}"
    for word in says:
        assert word in message, f"{message!r} does not say {word!r}"
    assert _states(tensors) == before, "a tensor or its version counter changed"
