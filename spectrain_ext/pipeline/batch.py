"""Minibatch: the caller's (input, target) pair, checked and split into microbatches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spectrain_ext.transport import Buffer, Sender, Value, callers_stream

from .tape import activation


class Microbatch(NamedTuple):
    """One part of a minibatch."""

    input: Value
    target: Value
    share: float  # of the minibatch's samples


def split(batch: object, minibatch: int, microbatches: int) -> list[Microbatch]:
    """Check a batch and cut it along dimension 0 into parts whose sizes differ by at most one.

    A minibatch with fewer samples than microbatches is cut into as many parts as it has samples.

    Raises:
        TypeError: the batch is not a pair, or a member is neither a tensor nor a tuple of tensors.
        ValueError: it is to be cut, and its tensors do not have the same size in dimension 0.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        what = type(batch).__name__
        if isinstance(batch, (tuple, list)):
            what += f" of length {len(batch)}"
        raise TypeError(f"batches[{minibatch}]: expected a pair (input, target), got a {what}")
    value = _value(batch[0], f"batches[{minibatch}][0] (input)")
    target = _value(batch[1], f"batches[{minibatch}][1] (target)")
    if microbatches == 1:
        return [Microbatch(value, target, 1.0)]

    samples = None
    for name, side in (("input", value), ("target", target)):
        for tensor in side if isinstance(side, tuple) else (side,):
            size = tensor.shape[0] if tensor.dim() else None
            samples = size if samples is None else samples
            if size is None or size != samples:
                raise ValueError(
                    f"batches[{minibatch}]: to be split into microbatches, its tensors must have "
                    f"the same size in dimension 0; the first has {samples}, one of the {name} has "
                    f"shape {tuple(tensor.shape)}"
                )
    parts = max(1, min(microbatches, samples or 0))
    return [
        Microbatch(x, y, share)
        for x, y, share in zip(
            _cut(value, parts), _cut(target, parts), shares_of(samples or 0, parts), strict=True
        )
    ]


def shares_of(samples: int, parts: int) -> list[float]:
    """The shares of the parts that ``split`` makes of so many samples."""
    each, more = divmod(samples, parts)
    return [(each + (j < more)) / samples if samples else 1.0 for j in range(parts)]


def samples_of(parts: list[Microbatch]) -> int:
    """The samples of a minibatch that ``split`` has cut; 0 of one that it has not."""
    return sum(_size(part.input) for part in parts) if len(parts) > 1 else 0


def hand_in(edge: Sender | None, value: Value, batch: Buffer) -> None:
    """Send a side of the caller's batch where it is used, if that is in this process."""
    if edge is None:
        return
    tensors = value if isinstance(value, tuple) else (value,)
    callers = {tensor.device: callers_stream(tensor.device) for tensor in tensors}
    given = []
    for caller in callers.values():
        caller.writes(batch)
        given.append(caller.event())
        caller.record(given[-1])
    read = edge.send(activation(value).without_gradient(), batch, *given)
    # From host to device nobody waits: the call has read pageable memory when it returns, and
    # torch's allocator keeps pinned memory until it has been read.
    for device, caller in callers.items():
        if device.type != "cpu" or edge.target.type == "cpu":
            caller.wait(read)


def _value(value: object, where: str) -> Value:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (tuple, list)) and value and all(isinstance(v, Tensor) for v in value):
        return tuple(value)
    raise TypeError(f"{where}: expected a tensor or a tuple of tensors, got {type(value).__name__}")


def _size(value: Value) -> int:
    return (value[0] if isinstance(value, tuple) else value).shape[0]


def _cut(value: Value, parts: int) -> list[Value]:
    if isinstance(value, Tensor):
        return list(torch.tensor_split(value, parts))
    return list(zip(*(torch.tensor_split(tensor, parts) for tensor in value), strict=True))
