"""Minibatch: the caller's (input, target) pair or mapping, checked and split."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spectrain_ext.transport import (
    NO_HEADER,
    Buffer,
    Header,
    Sender,
    Stream,
    Value,
    as_value,
    callers_stream,
    each,
    tensors_in,
    tensors_of,
)

from .tape import activation

#: Along which dimension the samples of a batch's tensors lie: of all, or of each part of the batch.
SplitDim = int | tuple[Any, ...] | list[Any] | Mapping[str, int]


class Microbatch(NamedTuple):
    """One part of a minibatch."""

    input: Value
    target: Value
    samples: int  # 0 of a minibatch that is not cut


def split(
    batch: object, minibatch: int, microbatches: int, split_dim: SplitDim = 0
) -> list[Microbatch]:
    """Check a batch and cut it into parts whose sizes differ by at most one."""
    where = f"batches[{minibatch}]"
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        value = as_value(batch[0], f"{where}[0]", " (input)")
        target = as_value(batch[1], f"{where}[1]", " (target)")
    elif isinstance(batch, Mapping):
        value = target = as_value(batch, where)
    else:
        what = type(batch).__name__
        if isinstance(batch, (tuple, list)):
            what += f" of length {len(batch)}"
        raise TypeError(
            f"{where}: expected a pair (input, target), or a mapping of names to tensors that is "
            f"both, got a {what}"
        )
    if microbatches == 1:
        _warn_of_another_dim(where, value, target, split_dim)
        return [Microbatch(value, target, 0)]

    sides = zip(sides_of(split_dim), (value, target), ("the input", "the target"), strict=True)
    dims = [_dims(dim, side, name) for dim, side, name in sides]
    samples, first = None, ""
    for (name, tensor), dim in zip(_named(value, target), [*dims[0], *dims[1]], strict=True):
        size = tensor.shape[dim] if -tensor.dim() <= dim < tensor.dim() else None
        if samples is None:
            samples, first = size, name
        if size is None or size != samples:
            than = f"{first} has {samples}, " if name != first else ""
            raise ValueError(
                f"{where}: to be split into microbatches, its tensors must have the same size in "
                f"dimension {dim}; {than}{name} has shape {tuple(tensor.shape)}; split_dim= names "
                "other dimensions"
            )
    sizes = sizes_of(samples or 0, max(1, min(microbatches, samples or 0)))
    inputs = _cut(value, sizes, dims[0])
    targets = inputs if target is value else _cut(target, sizes, dims[1])
    return list(map(Microbatch, inputs, targets, sizes if len(sizes) > 1 else [0]))


def sides_of(split_dim: SplitDim) -> tuple[Any, Any]:
    """What it says of the input, and of the target; a mapping is both."""
    if isinstance(split_dim, (tuple, list)) and len(split_dim) == 2:
        return split_dim[0], split_dim[1]
    if isinstance(split_dim, (int, Mapping)) and not isinstance(split_dim, bool):
        return split_dim, split_dim
    raise ValueError(
        "split_dim: expected an int, a pair (of the input, of the target), or a mapping of names "
        f"to ints, got {split_dim!r}"
    )


def first_dim(split_dim: SplitDim) -> int:
    """Of the input's first tensor."""
    found = sides_of(split_dim)[0]
    members = found.values() if isinstance(found, Mapping) else found
    return found if isinstance(found, int) else next(iter(members), 0)


def _dims(split_dim: Any, value: Value, side: str) -> list[int]:
    """The dimension of every tensor of an input, of a target, or of a batch that is both."""
    count = len(tensors_of(value))
    if isinstance(split_dim, int):
        return [split_dim] * count
    if isinstance(value, dict):
        if isinstance(split_dim, Mapping) and split_dim.keys() <= value.keys():
            return [split_dim.get(name, 0) for name in value]
        expected = f"an int, or a mapping of names among {', '.join(map(repr, value))}"
    else:
        if isinstance(split_dim, (tuple, list)) and len(split_dim) == count:
            return list(split_dim)
        expected = f"an int, or {count} of them"
    raise ValueError(f"split_dim: of {side} expected {expected}, got {split_dim!r}")


def samples_in(value: object, split_dim: Any = 0) -> int | None:
    """The size of its first tensor that has one along that dimension; None: it has none."""
    tensors = [*tensors_in(value)]
    if isinstance(split_dim, int):
        dims = [split_dim] * len(tensors)
    else:
        dims = _dims(split_dim, as_value(value, "target"), "the target")
    pairs = zip(tensors, dims, strict=True)
    return next((t.shape[dim] for t, dim in pairs if -t.dim() <= dim < t.dim()), None)


def _warn_of_another_dim(where: str, value: Value, target: Value, split_dim: SplitDim) -> None:
    given, wanted = tensors_of(value)[0].shape, tensors_of(target)[0].shape
    if split_dim == 0 and len(given) > 1 and wanted and given[0] != wanted[0] == given[1]:
        warnings.warn(
            f"{where}: the input has shape {tuple(given)} and the target {tuple(wanted)}, so that "
            "the samples seem to lie along dimension 1 of the input; give split_dim=(1, 0)",
            stacklevel=2,
        )


@lru_cache(maxsize=64)  # every stage asks for those of every minibatch
def shares_of(samples: int, parts: int) -> tuple[float, ...]:
    """The shares of the parts that ``split`` makes of so many samples."""
    return tuple(n / samples if samples else 1.0 for n in sizes_of(samples, parts))


def sizes_of(samples: int, parts: int) -> list[int]:
    """The samples of the parts that ``split`` makes of so many."""
    whole, more = divmod(samples, parts)
    return [whole + (j < more) for j in range(parts)]


def hand_in(edge: Sender, value: Value, batch: Buffer, header: Header = NO_HEADER) -> None:
    """Send a side of the caller's batch where it is used."""
    message = activation(value).with_gradient(False)
    callers: dict[torch.device, Stream] = {}
    for tensor in message.tensors:
        if tensor is not None and tensor.device not in callers:
            callers[tensor.device] = callers_stream(tensor.device)
    given = []
    for caller in callers.values():
        if not caller.immediate:
            caller.writes(batch)
            given.append(caller.event())
            caller.record(given[-1])
    read = edge.send(message, batch, *given, header=header)
    # From host to device nobody waits: the call has read pageable memory when it returns, and
    # torch's allocator keeps pinned memory until it has been read.
    for device, caller in callers.items():
        if not caller.immediate and (device.type != "cpu" or edge.target.type == "cpu"):
            caller.wait(read)


def _named(value: Value, target: Value) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a batch, with what to call them."""
    for name, side in (("input", value), ("target", target)):
        if isinstance(side, Tensor):
            yield f"the {name}", side
        elif isinstance(side, dict):
            of = "" if value is target else f" of the {name}"
            yield from ((f"{key!r}{of}", tensor) for key, tensor in side.items())
        else:
            yield from ((f"{name}[{n}]", tensor) for n, tensor in enumerate(side))


def _cut(value: Value, sizes: Sequence[int], dims: Sequence[int]) -> list[Value]:
    if isinstance(value, Tensor):
        return list(value.split(list(sizes), dims[0]))
    tensors = tensors_of(value)
    parts = [t.split(list(sizes), dim) for t, dim in zip(tensors, dims, strict=True)]
    return [_like(value, part) for part in zip(*parts, strict=True)]


def joined(batches: Sequence[Value], split_dim: Any) -> Value:
    """The inputs, or the targets, of microbatches as one."""
    first = batches[0]
    if len(batches) == 1:
        return first
    tensors = zip(*map(tensors_of, batches), strict=True)
    dims = _dims(split_dim, first, "the batch")
    return _like(first, [torch.cat(t, dim) for t, dim in zip(tensors, dims, strict=True)])


def cut_targets(value: Value, sizes: Sequence[int], split_dim: Any) -> list[Value]:
    """Targets in parts of these sizes, each of memory that is dense."""
    dims = _dims(split_dim, value, "the target")
    parts = _cut(value, sizes, dims)
    return [each(part, torch.clone) for part in parts] if any(dims) else parts


def target_of(batch: Any) -> Value:
    """The target of a batch that ``split`` has checked."""
    return as_value(batch if isinstance(batch, Mapping) else batch[1], "the target")


def _like(value: Value, tensors: Sequence[Tensor]) -> Value:
    if isinstance(value, Tensor):
        return tensors[0]
    return dict(zip(value, tensors, strict=True)) if isinstance(value, dict) else tuple(tensors)
