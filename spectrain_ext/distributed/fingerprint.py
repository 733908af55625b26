"""Fingerprint: tells a batch from another one, at a price that does not grow with its size."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from spectrain_ext.transport import Value, tensors_of

# Elements of a tensor that count: as many as are read in some microseconds.
_ELEMENTS = 4096
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, and as an int64
_Seen = tuple[list[int], int]  # of a tensor, its shape and its checksum


class Fingerprint(NamedTuple):
    """What is known of a batch without having it: an int64 of each side.

    Of a mapping the target's is that of its integers, such as labels and tokens, if it has any.
    """

    input: int = 0
    target: int = 0

    @staticmethod
    def of(minibatch: int, batch: object) -> Fingerprint:
        """Of a batch that ``split`` has checked: its number, sizes of tensors, a sample of bits.

        Equal values have equal fingerprints on every device and in every memory format. Where they
        are on a GPU the host waits for what the caller's stream has been given so far.
        """
        if isinstance(batch, (tuple, list)):
            return Fingerprint(*(_digest(minibatch, side) for side in batch))
        assert isinstance(batch, Mapping)
        seen = {key: _seen(tensor) for key, tensor in batch.items()}
        integers = {key: seen[key] for key, of in batch.items() if _counts(of)}
        return Fingerprint(*(_digest_of(minibatch, side) for side in (seen, integers or seen)))

    def matches(self, other: Fingerprint) -> bool:
        """Whether a target of the one batch may be used for an input of the other.

        One side is enough. Inputs of the same samples differ where ranks augment them by random
        numbers of their own, and a rank that does not use the targets may be given others.
        """
        return self.input == other.input or self.target == other.target


def _digest(minibatch: int, value: Value) -> int:
    if isinstance(value, Tensor):
        return _digest_of(minibatch, [_seen(value)])
    if isinstance(value, Mapping):
        return _digest_of(minibatch, {key: _seen(tensor) for key, tensor in value.items()})
    tensors = value if isinstance(value, list) else tensors_of(value)
    return _digest_of(minibatch, [_seen(tensor) for tensor in tensors])


def _digest_of(minibatch: int, seen: dict[str, _Seen] | list[_Seen]) -> int:
    said = sorted(seen.items()) if isinstance(seen, dict) else seen
    digest = hashlib.blake2b(f"{minibatch} {said}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _seen(tensor: Tensor) -> _Seen:
    return list(tensor.shape), _checksum(tensor)


def _counts(tensor: Tensor) -> bool:
    """Whether it has integers; a mask of bools may be the same of every batch."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _checksum(tensor: Tensor) -> int:
    """A sum, modulo 2^64, of elements as integers, each times a number that its place gives."""
    sample = _sample(tensor.detach())
    if sample.is_complex():
        sample = torch.view_as_real(sample.resolve_conj()).reshape(-1)
    integers = sample.resolve_neg().view(_INTEGERS[sample.element_size()]).to(torch.int64)
    if sample.element_size() == 8:
        # The last bits of such a sum know nothing of the first ones of its terms, which are all
        # that small whole numbers differ in as float64.
        integers = integers + (integers >> 32)
    return int((integers * _factors(len(integers), sample.device)).sum())


def _sample(tensor: Tensor) -> Tensor:
    """Elements at even distances, in the order of their indices."""
    count = tensor.numel()
    # odd: an even one would meet the same column of every row, which may be all padding
    step = -(-count // _ELEMENTS) | 1
    if step == 1:
        return tensor.reshape(-1)
    if tensor.is_contiguous():
        return tensor.view(-1)[::step]
    places, span = _places(tensor.shape, tensor.stride(), step, tensor.device)
    return tensor.as_strided((span,), (1,))[places]


@lru_cache(maxsize=32)
def _places(
    shape: torch.Size, stride: tuple[int, ...], step: int, device: torch.device
) -> tuple[Tensor, int]:
    """Where the elements are in the tensor's memory, and how far that goes."""
    indices = torch.unravel_index(torch.arange(0, shape.numel(), step, device=device), shape)
    places = torch.zeros_like(indices[0])
    for index, by in zip(indices, stride, strict=True):
        places += index * by
    return places, 1 + sum((n - 1) * by for n, by in zip(shape, stride, strict=True))


@lru_cache(maxsize=32)
def _factors(count: int, device: torch.device) -> Tensor:
    """Odd numbers without a pattern: no two elements can change places unseen."""
    factors = torch.arange(1, count + 1, device=device) * _MIX
    return ((factors ^ (factors >> 31)) * _MIX) | 1
