"""Calls every operator with bad arguments and checks that nothing changed."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import spectrain_ext as st

SHAPE = (4, 3)
COUNT = 5  # tensors per list
BAD = 3  # the index of the bad one
NAN = math.nan


def _walk(x: object) -> Iterator[Tensor]:
    """Yield every tensor in nested arguments that has accessible memory."""
    if isinstance(x, Tensor):
        if x.layout == torch.strided and x.device.type == "cpu" and not isinstance(x, FakeTensor):
            yield x
    elif isinstance(x, Mapping):
        for y in x.values():
            yield from _walk(y)
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from _walk(y)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of the whole storage; bytes(storage) would read them one by one."""
    storage = tensor.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


class Unchanged:
    """Records the bytes of whole storages and the version counters, and compares them later."""

    def __init__(self, *arguments: object) -> None:
        self._tensors = list(_walk(arguments))
        self._bytes = [_bytes_of(t) for t in self._tensors]
        self._versions = [t._version for t in self._tensors]

    def check(self) -> None:
        for t, was, version in zip(self._tensors, self._bytes, self._versions, strict=True):
            assert _bytes_of(t) == was, "a tensor changed"
            assert t._version == version, "a version counter was bumped although nothing was done"


Lists = dict[str, Any]


@dataclass(frozen=True)
class Op:
    """An operator: its list arguments, which of them it writes, and its call."""

    name: str
    lists: tuple[str, ...]
    written: tuple[str, ...]
    call: Callable[..., object]
    scalars: tuple[tuple[str, Any], ...] = ()

    def build(self) -> Lists:
        """Return a valid argument for every list."""
        return {name: [torch.randn(SHAPE) for _ in range(COUNT)] for name in self.lists}

    def __call__(self, lists: Lists, **changes: object) -> object:
        return self.call(**lists, **{**dict(self.scalars), **changes})


def _sgd(**a: Any) -> object:
    first, second = a.pop("predict0"), a.pop("predict1")
    steps = a.pop("steps", 2.0)
    return st.sgd_step_(
        a.pop("params"),
        a.pop("grads"),
        a.pop("momentum_buffers"),
        predict=a.pop("predict", [(1.0, first), (steps, second)]),
        **a,
    )


def _adam(**a: Any) -> object:
    first, second = a.pop("predict0"), a.pop("predict1")
    steps = a.pop("steps", 2.0)
    return st.adam_step_(
        a.pop("params"),
        a.pop("grads"),
        a.pop("exp_avgs"),
        a.pop("exp_avg_sqs"),
        predict=a.pop("predict", [(1.0, first), (steps, second)]),
        **a,
    )


def _plan(**a: Any) -> object:
    first, second = a.pop("predict0"), a.pop("predict1")
    return st.Plan(a.pop("params"), outs=[first, second], **a)


_LR_STEPS = (("lr", 0.1), ("steps", 2.0))
OPS = [
    Op("predict_", ("params", "momentum_buffers"), ("params",), st.predict_, _LR_STEPS),
    Op("predict", ("params", "momentum_buffers", "out"), ("out",), st.predict, _LR_STEPS),
    Op("stash", ("params", "out"), ("out",), st.stash),
    Op("restore_", ("params", "stashed"), ("params",), st.restore_),
    Op("swap_", ("a", "b"), ("a", "b"), st.swap_),
    Op(
        "stash_predict_",
        ("params", "stashed", "momentum_buffers"),
        ("params", "stashed"),
        st.stash_predict_,
        _LR_STEPS,
    ),
    Op(
        "sgd_step_",
        ("params", "grads", "momentum_buffers", "predict0", "predict1"),
        ("params", "momentum_buffers", "predict0", "predict1"),
        _sgd,
        (("lr", 0.1), ("momentum", 0.9)),
    ),
    Op(
        "Plan",
        ("params", "momentum_buffers", "grads", "stashed", "predict0", "predict1"),
        ("params", "momentum_buffers", "stashed", "predict0", "predict1"),
        _plan,
    ),
    Op(
        "Plan of Adam",
        ("params", "exp_avgs", "exp_avg_sqs", "grads", "stashed", "predict0", "predict1"),
        ("params", "exp_avgs", "exp_avg_sqs", "stashed", "predict0", "predict1"),
        _plan,
    ),
    Op(
        "adam_step_",
        ("params", "grads", "exp_avgs", "exp_avg_sqs", "predict0", "predict1"),
        ("params", "exp_avgs", "exp_avg_sqs", "predict0", "predict1"),
        _adam,
        (("lr", 0.1), ("step", 3)),
    ),
    Op(
        "adam_predict",
        ("params", "exp_avgs", "exp_avg_sqs", "out"),
        ("out",),
        st.adam_predict,
        (*_LR_STEPS, ("step", 3)),
    ),
    Op("extrapolate", ("params", "previous", "out"), ("out",), st.extrapolate, (("steps", 2.0),)),
]
BY_NAME = {op.name: op for op in OPS}
EVERY = [(op, name) for op in OPS for name in op.lists]
#: Ways in which a list can differ from the first; gradients and the rest are compared with params.
OTHERS = [(op, name) for op in OPS for name in op.lists[1:]]


def ids(values: list[tuple[Any, ...]]) -> list[str]:
    return ["-".join(v.name if isinstance(v, Op) else str(v) for v in row) for row in values]


def pattern(op: Op, name: str, index: int | None = BAD) -> str:
    """Return argument and index as in messages: "momentum_buffers[3]", "outs[1][3]"."""
    at = "" if index is None else rf"\[{index}\]"
    if name.startswith("predict") and name[-1].isdigit():
        number = name[-1]
        return rf"(outs\[{number}\]|predict\[{number}\](\[1\]|\.out)?){at}"
    return rf"\b{name}{at}"


def raises(
    error: type[Exception] | tuple[type[Exception], ...],
    names: str,
    call: Callable[[], object],
    watched: object,
    *says: str,
) -> None:
    """Check that the call raises ``error`` with ``names`` and ``says`` and changes nothing."""
    before = Unchanged(watched)
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "frame #" not in message, (
        f"a C++ stack trace is no message for a person: {message[:200]!r}"
    )
    assert re.search(names, message), f"{message!r} does not name {names}"
    for word in says:
        assert word in message, f"{message!r} does not say {word!r}"
    before.check()
