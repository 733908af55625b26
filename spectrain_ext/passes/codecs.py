"""Packs what crosses an edge, so that slow links carry fewer bytes.

A codec is an object with two methods, which are called outside of autograd:

- ``pack(tensor, backward)`` returns one new tensor of any shape and dtype. ``tensor`` has a
  floating point dtype, and any shape, strides and device. ``backward``: it is a gradient.
- ``unpack(packed, like, backward)`` returns a tensor with the shape and dtype of ``like``, on the
  device of ``packed``. ``like`` is on the meta device, with the shape, dtype and strides of the
  tensor that was packed.

If its attribute ``draws`` is true, it gets ``pack(tensor, backward, key)``: ``key`` is an integer
that is different for each packed tensor in all runs. Random numbers seeded with it are the same in
any number of processes and in a resumed run. Under a flush, a minibatch that ``CheckFinite`` skips
leaves its keys to the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor


class Codec(Protocol):
    """The interface of codecs, for your own ones.

    Example:
        >>> class Half:
        ...     def pack(self, tensor, backward):
        ...         return tensor.half()
        ...     def unpack(self, packed, like, backward):
        ...         return packed.to(like.dtype)
        >>> sgd = lambda params: st.optim.SGD(params, lr=0.1)
        >>> stages = [nn.Linear(2, 2), nn.Linear(2, 1)]
        >>> passes = [st.passes.Compress(Half())]
        >>> pipe = st.Pipeline(stages, sgd, nn.functional.mse_loss, passes=passes)
        >>> len(pipe.fit([(torch.ones(4, 2), torch.ones(4, 1))]))
        1
        >>> pipe.release()
    """

    def pack(self, tensor: Tensor, backward: bool) -> Tensor:
        """Return the tensor as it is sent."""

    def unpack(self, packed: Tensor, like: Tensor, backward: bool) -> Tensor:
        """Return the tensor as it is used, like the one that was packed."""


#: Of activations and of gradients; None: not packed.
Codecs: TypeAlias = tuple[Codec | None, Codec | None]


@dataclass(frozen=True)
class BFloat16:
    """Numbers as bfloat16, rounded to nearest; infinities and NaN are preserved.

    Example:
        >>> codec, x = st.codecs.BFloat16(), torch.tensor([[1.0, 1.001]])
        >>> codec.unpack(codec.pack(x, backward=False), x.to("meta"), backward=False)
        tensor([[1., 1.]])
    """

    def pack(self, tensor: Tensor, backward: bool) -> Tensor:
        return tensor.to(torch.bfloat16)

    def unpack(self, packed: Tensor, like: Tensor, backward: bool) -> Tensor:
        return _placed(packed, like)


@dataclass(frozen=True)
class Int8:
    """Integers from -127 to 127, with a bfloat16 scale per block, set by its largest magnitude.

    Activations are rounded to nearest. Gradients are rounded stochastically, up with the
    probability of the fraction, so that their mean is exact; ``seed`` selects the random numbers.

    A block is ``block`` consecutive elements in row-major order; the remaining ones form a shorter
    block. 64 elements take 66 bytes. A block with a number that is not finite, or is beyond
    float32's range, arrives as NaN.

    Example:
        >>> codec, x = st.codecs.Int8(), torch.tensor([[127.0, 0.4]])
        >>> codec.unpack(codec.pack(x, backward=False), x.to("meta"), backward=False)
        tensor([[127.,   0.]])
    """

    block: int = 64
    seed: int = 0

    draws: ClassVar[bool] = True
    _limit: ClassVar[int] = 127

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or isinstance(self.block, bool):
            raise TypeError(f"block: expected an int, got {self.block!r}")
        if self.block < 1:
            raise ValueError(f"block: expected at least 1, got {self.block}")

    def pack(self, tensor: Tensor, backward: bool, key: int = 0) -> Tensor:
        blocks = self._turned(_in_blocks(tensor.reshape(-1).float(), self.block), tensor.numel())
        scales = _scales(blocks, self._limit)
        steps = blocks / scales
        if backward:
            generator = torch.Generator(steps.device)
            generator.manual_seed((key + self.seed * 0x9E3779B97F4A7C15) % 2**63)
            steps = steps.add_(torch.empty_like(steps).uniform_(generator=generator)).floor_()
        else:
            steps = steps.round_()
        steps = steps.clamp_(-self._limit, self._limit)
        return _joined(scales, *self._as_bytes(steps.to(torch.int8), tensor.numel()))

    def unpack(self, packed: Tensor, like: Tensor, backward: bool) -> Tensor:
        scales, rest = _parted(packed, like, self.block)
        steps = self._from_bytes(rest)[: like.numel()].float()
        blocks = self._turned(_in_blocks(steps, self.block) * scales, like.numel())
        return _placed(blocks.view(-1)[: like.numel()], like)

    def _turned(self, blocks: Tensor, numel: int) -> Tensor:
        return blocks

    def _as_bytes(self, steps: Tensor, numel: int) -> tuple[Tensor, int]:
        return steps.view(torch.uint8), numel

    def _from_bytes(self, rest: Tensor) -> Tensor:
        return rest.view(torch.int8)


@dataclass(frozen=True)
class Int4(Int8):
    """Integers from -7 to 7, two per byte, otherwise like ``Int8``: 34 bytes for 64 elements.

    With ``hadamard``, whole blocks are multiplied by the normalized Hadamard matrix before
    rounding, and again after it, which spreads outliers of activations over their block (as in
    TAH-Quant, arXiv 2506.01352); ``block`` must then be a power of two.

    Example:
        >>> codec, x = st.codecs.Int4(), torch.tensor([[7.0, 0.4]])
        >>> codec.unpack(codec.pack(x, backward=False), x.to("meta"), backward=False)
        tensor([[7., 0.]])
    """

    hadamard: bool = False

    _limit: ClassVar[int] = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hadamard and self.block & (self.block - 1):
            raise ValueError(f"block: expected a power of two with hadamard, got {self.block}")

    def _turned(self, blocks: Tensor, numel: int) -> Tensor:
        if not self.hadamard:
            return blocks
        whole = numel // self.block
        with torch.autocast(blocks.device.type, enabled=False):
            turned = blocks[:whole] @ _hadamard(self.block, blocks.device)
        return turned if whole == len(blocks) else torch.cat((turned, blocks[whole:]))

    def _as_bytes(self, steps: Tensor, numel: int) -> tuple[Tensor, int]:
        low, high = _in_blocks(steps.view(-1) + 8, 2).view(torch.uint8).unbind(1)
        return low | high << 4, (numel + 1) // 2

    def _from_bytes(self, rest: Tensor) -> Tensor:
        return torch.stack((rest & 15, rest >> 4), 1).view(-1).view(torch.int8) - 8


def codecs_of(codec: Any) -> Codecs:
    """Return a ``codec`` argument as a pair for both directions; TypeError if it is not a codec."""
    given = codec if isinstance(codec, tuple) and not _packs(codec) else (codec, codec)
    if len(given) != 2 or not all(one is None or _packs(one) for one in given):
        raise TypeError(
            "codec: expected a value with pack() and unpack(), such as st.codecs.Int8(), a pair of "
            f"these, of activations and of gradients, or None, got {codec!r}"
        )
    return given


def _packs(codec: object) -> bool:
    methods = (getattr(codec, name, None) for name in ("pack", "unpack"))
    return all(map(callable, methods)) and not isinstance(codec, type)


def is_coded(tensor: Tensor) -> bool:
    """Whether a tensor is packed: floating point, with at least two dimensions.

    Others are counts and scales, for example. A limit by size would treat an uneven last microbatch
    differently.
    """
    return tensor.is_floating_point() and tensor.dim() > 1


def packed_bytes(
    codec: Codec | None, nbytes: float, dtype: torch.dtype = torch.float32, backward: bool = False
) -> float:
    """Return how many bytes a tensor of ``nbytes`` has when packed, measured on 65,536 zeros.

    Example:
        >>> st.codecs.packed_bytes(st.codecs.Int8(), 4096.0)
        1056.0
    """
    if codec is None:
        return nbytes
    sample = torch.zeros(2**16, dtype=dtype)
    return nbytes * codec.pack(sample, backward).nbytes / sample.nbytes


def _in_blocks(flat: Tensor, block: int) -> Tensor:
    """Return a flat tensor as [blocks, block], padded with zeros."""
    missing = -len(flat) % block
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, block)


def _scales(blocks: Tensor, limit: float) -> Tensor:
    """Return each block's largest magnitude divided by the limit, [blocks, 1], float32.

    It is rounded up to a bfloat16, so that no quotient exceeds the limit. If a number of the block
    is not finite it is NaN.
    """
    largest = torch.linalg.vector_norm(blocks, inf, 1, keepdim=True)
    # A smaller scale cannot be divided by.
    scales = (largest / limit).clamp_(min=torch.finfo(torch.bfloat16).tiny) + largest * 0
    near = scales.to(torch.bfloat16)
    above = torch.nextafter(near, torch.full_like(near, inf))
    return torch.where(near < scales, above, near).float()


@lru_cache(maxsize=8)
def _hadamard(size: int, device: torch.device) -> Tensor:
    """Return the normalized Hadamard matrix, which is symmetric and its own inverse."""
    with torch.inference_mode(False):  # it is cached
        matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
        while len(matrix) < size:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
        return matrix.mul_(size**-0.5)


def _joined(scales: Tensor, rest: Tensor, nbytes: int) -> Tensor:
    head = scales.to(torch.bfloat16).view(-1).view(torch.uint8)
    return torch.cat((head, rest.reshape(-1)[:nbytes]))


def _parted(packed: Tensor, like: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the scales, [blocks, 1], float32, and the bytes of the elements."""
    size = 2 * -(-like.numel() // block)
    return packed[:size].view(torch.bfloat16).float().view(-1, 1), packed[size:]


def _placed(values: Tensor, like: Tensor) -> Tensor:
    """Return the values with the shape, dtype and strides of another tensor, in new memory."""
    shaped = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=values.device)
    return shaped.copy_(values.view(like.shape))


#: The built-in codecs by the command line's names.
NAMES: dict[str, Codec] = {
    "bfloat16": BFloat16(),
    "int8": Int8(),
    "int4": Int4(),
    "int4-hadamard": Int4(hadamard=True),
}
