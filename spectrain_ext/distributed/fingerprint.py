"""Fingerprint: tells a batch from another one, at a price that does not grow with its size."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from spectrain_ext.transport import Value

# Elements of a tensor that count: as many as are read in some microseconds.
_ELEMENTS = 4096
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, and as an int64


class Fingerprint(NamedTuple):
    """What is known of a batch without having it: an int64 of each side."""

    input: int = 0
    target: int = 0

    @staticmethod
    def of(minibatch: int, batch: object) -> Fingerprint:
        """Of a pair that ``split`` has checked: its number, sizes of tensors, a sample of bits.

        Equal values have equal fingerprints on every device and in every memory format. Where they
        are on a GPU the host waits for what the caller's stream has been given so far.
        """
        assert isinstance(batch, (tuple, list))
        return Fingerprint(*(_digest(minibatch, side) for side in batch))

    def matches(self, other: Fingerprint) -> bool:
        """Whether a target of the one batch may be used for an input of the other.

        One side is enough. Inputs of the same samples differ where ranks augment them by random
        numbers of their own, and a rank that does not use the targets may be given others.
        """
        return self.input == other.input or self.target == other.target


def _digest(minibatch: int, value: Value) -> int:
    tensors = (value,) if isinstance(value, Tensor) else value
    text = f"{minibatch} {[(list(tensor.shape), _checksum(tensor)) for tensor in tensors]}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


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
