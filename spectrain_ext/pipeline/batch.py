"""Checks the caller's batches and splits them into microbatches."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from spectrain_ext.transport.message import (
    Message,
    Microbatches,
    flattened,
    places_in,
    referred,
    refused,
    tensors_in,
)

#: The dimension of the samples: of all tensors of a batch, or of each part of it; None: not split.
SplitDim = int | tuple[Any, ...] | list[Any] | Mapping[str, Any]
_Dims = list[int | None]  # of the tensors of an input, or of a target


class Microbatch(NamedTuple):
    """One part of a minibatch."""

    input: Message
    target: Message
    samples: int


class _Batch(NamedTuple):
    """A batch that has been checked, or one microbatch of a list."""

    where: str
    values: tuple[Any, Any]  # for a mapping, both are all of it
    input: Message
    target: Message


def split(
    batch: object,
    minibatch: int,
    microbatches: int,
    split_dim: SplitDim = 0,
    objects: bool = True,  # whether it may contain objects other than tensors and constants
    trains: bool = True,  # whether gradients are computed, none of which goes back to the batch
) -> list[Microbatch]:
    """Check a batch and split it into parts whose sizes differ by at most one, or use its own."""
    where = f"batches[{minibatch}]"
    cut = microbatches_in(batch, where, warns=microbatches > 1)
    if cut is not None:
        if len(cut) > microbatches:
            raise ValueError(
                f"{where}: expected a list of at most {microbatches} microbatches, as many as the "
                f"pipeline was made for, got {len(cut)}"
            )
        members = [_checked(one, f"{where}[{n}]", objects, trains) for n, one in enumerate(cut)]
        samples = [_samples(member, _dims_of(member, split_dim)) for member in members]
        return [Microbatch(*m[2:], n) for m, n in zip(members, samples, strict=True)]
    whole = _checked(batch, where, objects, trains)
    if microbatches == 1:
        _warn_of_another_dim(whole, split_dim)
    dims = _dims_of(whole, split_dim)
    count = _samples(whole, dims, agree=microbatches > 1)
    parts = min(microbatches, count)
    if parts < 2:
        return [Microbatch(whole.input, whole.target, count)]
    least, more = divmod(count, parts)
    sizes = [least + (j < more) for j in range(parts)]
    inputs = cut_message(whole.input, sizes, dims[0])
    targets = inputs if whole.target is whole.input else cut_message(whole.target, sizes, dims[1])
    return list(map(Microbatch, inputs, targets, sizes))


def microbatches_in(batch: object, where: str, warns: bool = False) -> list[Any] | None:
    """Return the microbatches of a batch that the caller has cut; None: it is in one piece."""
    if not isinstance(batch, list):
        return None
    if isinstance(batch, Microbatches) or len(batch) != 2:
        if not batch or not all(isinstance(one, Mapping) or is_pair(one) for one in batch):
            raise _no_batch(batch, where)
        return batch
    first, second = batch
    remedy = (
        "write the pair as a tuple, or two microbatches as spectrain_ext.Microbatches([..., ...])"
    )
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        if first.keys() & second.keys():
            raise ValueError(
                f"{where}: a list of two mappings with keys in common may be a pair (input, "
                f"target) or two microbatches; {remedy}"
            )
    elif warns and is_pair(first) and is_pair(second):
        warnings.warn(
            f"{where}: a list of two pairs is taken for one pair (input, target); {remedy}",
            stacklevel=2,
        )
    return None


def is_pair(batch: object) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def _no_batch(batch: object, where: str) -> TypeError:
    kind = type(batch).__name__
    if isinstance(batch, (tuple, list)):
        kind += f" of length {len(batch)}"
    return TypeError(
        f"{where}: expected a pair (input, target), a mapping of names to tensors that is both, or "
        f"a list of such microbatches, got a {kind}"
    )


def _checked(batch: Any, where: str, objects: bool, trains: bool) -> _Batch:
    if isinstance(batch, Mapping):
        values, sides = (batch, batch), [_message(batch, where, objects, trains)] * 2
    elif is_pair(batch):
        values = x, y = tuple(batch)
        sides = [_message(x, f"{where}: the input", objects, trains)]
        sides.append(_message(y, f"{where}: the target", objects, trains))
    else:
        raise _no_batch(batch, where)
    if not (sides[0].tensors or sides[1].tensors):
        raise TypeError(f"{where}: expected a tensor in it, got {batch!r}")
    return _Batch(where, values, *sides)


def _message(value: object, where: str, objects: bool, trains: bool) -> Message:
    tensors: list[Tensor] = []
    form = flattened(value, where, tensors, referred if objects else refused)
    for n, tensor in enumerate(tensors):
        if tensor.is_meta:
            raise ValueError(
                f"{where}: a tensor of shape {tuple(tensor.shape)} is on the meta device and has "
                "no values"
            )
        if trains and tensor.requires_grad:
            raise ValueError(
                f"{where}{[*places_in(form)][n]} requires a gradient, and none goes back to a "
                "batch: make the modules that it comes from a part of the first stage, or of the "
                "last one for a target; or give detach() of it"
            )
    detached = tuple([tensor.detach() for tensor in tensors])
    return Message(detached, (False,) * len(detached), form)


# The dimensions of the samples.


def sides_of(split_dim: SplitDim) -> tuple[Any, Any]:
    """Return the dimensions of the input and of the target; a mapping is both."""
    if isinstance(split_dim, (tuple, list)) and len(split_dim) == 2:
        return split_dim[0], split_dim[1]
    if isinstance(split_dim, (int, Mapping)) and not isinstance(split_dim, bool):
        return split_dim, split_dim
    raise ValueError(
        "split_dim: expected an int, a pair (of the input, of the target), or a mapping of names "
        f"to ints, got {split_dim!r}"
    )


def _dims_of(batch: _Batch, split_dim: SplitDim) -> tuple[_Dims, _Dims]:
    """Return the dimensions of the tensors of the batch's input, and of its target."""
    of_input, of_target = sides_of(split_dim)
    if batch.input is batch.target and of_input != of_target:
        raise ValueError(
            f"split_dim: {batch.where} is a mapping, input and target in one; expected an int, or "
            f"a mapping of names, got {split_dim!r}"
        )
    value, target = batch.values
    return _dims(of_input, value, "the input"), _dims(of_target, target, "the target")


def _dims(split_dim: Any, value: Any, side: str) -> _Dims:
    """Return the dimension of every tensor in an input, a target or a part of one."""
    if split_dim is None or (isinstance(split_dim, int) and not isinstance(split_dim, bool)):
        return [split_dim for _ in tensors_in(value)]
    expected = "an int or None"
    if isinstance(value, Mapping):
        if isinstance(split_dim, Mapping) and split_dim.keys() <= value.keys():
            dims = [split_dim.get(name, 0) for name in value]
            members = zip(dims, value.values(), value, strict=True)
            return [d for dim, one, name in members for d in _dims(dim, one, f"{side}[{name!r}]")]
        expected += f", or a mapping of names among {', '.join(map(repr, value))}"
    elif isinstance(value, (tuple, list)):
        if isinstance(split_dim, (tuple, list)) and len(split_dim) == len(value):
            numbered = enumerate(zip(split_dim, value, strict=True))
            return [d for n, (dim, one) in numbered for d in _dims(dim, one, f"{side}[{n}]")]
        expected += f", or {len(value)} of them"
    raise ValueError(f"split_dim: of {side} expected {expected}, got {split_dim!r}")


def _size(tensor: Tensor, dim: int | None) -> int | None:
    """Return the tensor's size there, -1 without that dimension, None if it is not split."""
    if dim is None or not tensor.dim():
        return None
    return tensor.shape[dim] if -tensor.dim() <= dim < tensor.dim() else -1


def _common(sizes: Sequence[int | None]) -> int | None:
    """Return the size that tensors of size 1 are broadcast to, that of most if they differ."""
    known = [size for size in sizes if size is not None and size >= 0]
    if len(set(known)) < 2:  # the usual case: counting takes 10 us
        return known[0] if known else None
    counts = Counter(size for size in known if size != 1)
    return counts.most_common(1)[0][0]


def samples_in(value: object, split_dim: Any = 0) -> int | None:
    """Return the samples of a target, or of tensors; None: no tensor has that dimension."""
    dims = _dims(split_dim, value, "the target")
    return _common(list(map(_size, tensors_in(value), dims)))


def _samples(batch: _Batch, dims: tuple[_Dims, _Dims], agree: bool = True) -> int:
    """Return the number of samples; raise ValueError unless all tensors ``agree`` on it."""
    tensors = [t for t in (*batch.input.tensors, *batch.target.tensors) if t is not None]
    both = [*dims[0], *dims[1]]
    sizes = [_size(tensor, dim) for tensor, dim in zip(tensors, both, strict=True)]
    common = _common(sizes)
    samples = 1 if common is None else common
    if not agree or all(size in (None, 1, samples) for size in sizes):
        return samples
    mapping = batch.input is batch.target
    names = [*places_in(batch.input.form, "the batch" if mapping else "the input")]
    names += names if mapping else places_in(batch.target.form, "the target")
    first = next(n for n, size in enumerate(sizes) if size is not None and size != 1)
    known = sizes[first] if sizes[first] != -1 else samples
    other = next(n for n, size in enumerate(sizes) if size not in (None, 1, known))
    than = "" if other == first else f"{names[first]} has {sizes[first]}, "
    raise ValueError(
        f"{batch.where}: its tensors must have the same size in dimension {both[other]}, that of "
        f"samples, or 1; {than}{names[other]} has shape {tuple(tensors[other].shape)}; split_dim= "
        "names other dimensions, or None for what is not to be cut"
    )


def _warn_of_another_dim(batch: _Batch, split_dim: SplitDim) -> None:
    if split_dim != 0 or not batch.input.tensors or not batch.target.tensors:
        return
    first, other = batch.input.tensors[0], batch.target.tensors[0]
    assert first is not None and other is not None
    shape, of_target = first.shape, other.shape
    if len(shape) > 1 and of_target and shape[0] != of_target[0] == shape[1]:
        warnings.warn(
            f"{batch.where}: the input has shape {tuple(shape)} and the target {tuple(of_target)}, "
            "so that the samples seem to lie along dimension 1 of the input; give split_dim=(1, 0)",
            stacklevel=3,
        )


# Parts.


def cut_message(message: Message, sizes: Sequence[int], dims: _Dims) -> list[Message]:
    if not message.tensors:
        return [message] * len(sizes)
    samples, columns = sum(sizes), []
    for tensor, dim in zip(message.tensors, dims, strict=True):
        assert tensor is not None
        if dim is not None and _size(tensor, dim) == samples:
            columns.append(tensor.split(list(sizes), dim))
        else:
            columns.append((tensor,) * len(sizes))
    _, flags, form = message
    return [Message(tensors, flags, form) for tensors in zip(*columns, strict=True)]
