"""The measured workloads: lists of tensors of given shapes and types."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Precision:
    """The dtypes of weights, optimizer state, gradients and predictions."""

    name: str
    weights: torch.dtype
    state: torch.dtype
    grads: torch.dtype
    outs: torch.dtype


FP32 = Precision("fp32", torch.float32, torch.float32, torch.float32, torch.float32)
BF16 = Precision("bf16", torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16)
MIXED = Precision("mixed", torch.float32, torch.float32, torch.bfloat16, torch.bfloat16)
#: With bfloat16 state.
FP32_16 = Precision("fp32-16", torch.float32, torch.bfloat16, torch.float32, torch.float32)
MIXED_16 = Precision("mixed-16", torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16)
PRECISIONS = {p.name: p for p in (FP32, BF16, MIXED, FP32_16, MIXED_16)}


@dataclass(frozen=True)
class Workload:
    """A list of tensors.

    Attributes:
        name: name in tables.
        shapes: one shape per tensor.
        precision: `fp32`; `bf16`, weights with a float32 state; `mixed`, float32 master weights
            with bfloat16 gradients and predictions; `fp32-16`, `mixed-16`: with bfloat16 state.
    """

    name: str
    shapes: tuple[Shape, ...]
    precision: Precision = FP32

    @property
    def elements(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def count(self) -> int:
        return len(self.shapes)


def uneven(count: int, elements: int) -> tuple[Shape, ...]:
    """Return shapes like a network's, `elements` in total: three in four small, the rest large."""
    if count == 1:
        return ((elements,),)
    mean = max(1, elements // count)
    small = max(1, mean // 16)
    n_large = max(1, count // 4)
    large, rest = divmod(elements - (count - n_large) * small, n_large)
    if large < 1:
        raise ValueError(f"elements: expected at least one for each of {count} tensors")
    sizes = [small] * count
    for i in range(n_large):
        sizes[i * count // n_large] = large + (rest if i == 0 else 0)
    return tuple((n,) for n in sizes)


def synthetic(
    counts: Sequence[int], exponents: Iterable[int], precision: Precision = FP32
) -> list[Workload]:
    """Combine every number of tensors with every sufficient total of 2^exponent elements."""
    return [
        Workload(f"{count} x, 2^{e}" if count > 1 else f"2^{e}", uneven(count, 2**e), precision)
        for e in exponents
        for count in counts
        if 2**e >= 16 * count or count == 1
    ]


def even(count: int, elements: int, precision: Precision = FP32) -> Workload:
    """Return tensors of as many elements each."""
    return Workload(f"{count} x {elements:,}", ((elements,),) * count, precision)


# Parameter lists of real models, from the numbers of their architectures


def resnet50() -> list[Shape]:
    """ResNet-50 (He et al. 2015) for 1,000 classes: convolutions, batch norms, one linear layer."""
    shapes: list[Shape] = []

    def convolution(outputs: int, inputs: int, size: int) -> None:
        shapes.extend([(outputs, inputs, size, size), (outputs,), (outputs,)])

    convolution(64, 3, 7)
    channels = 64
    for width, blocks in zip((64, 128, 256, 512), (3, 4, 6, 3), strict=True):
        for block in range(blocks):
            convolution(width, channels, 1)
            convolution(width, width, 3)
            convolution(4 * width, width, 1)
            if block == 0:  # the shortcut changes the number of channels
                convolution(4 * width, channels, 1)
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


def gpt2() -> list[Shape]:
    """GPT-2 124M (Radford et al. 2019): 12 layers of 768, embeddings tied to the output."""
    width, layers, words, positions = 768, 12, 50257, 1024
    norm: list[Shape] = [(width,), (width,)]
    shapes: list[Shape] = [(words, width), (positions, width)]
    for _ in range(layers):
        shapes += [*norm, (width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [*norm, (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return shapes + norm


MODELS: dict[str, Callable[[], list[Shape]]] = {"ResNet-50": resnet50, "GPT-2 124M": gpt2}


def model(name: str, precision: Precision = FP32) -> Workload:
    return Workload(name, tuple(MODELS[name]()), precision)


@dataclass
class Streams:
    """The tensors of a workload, created on first use.

    Letters: w weights, v momentum (first moment), u second moment, g gradients, k kept weights, o
    and p two outputs, t float32 scratch of the gradients' shapes.
    """

    work: Workload
    device: str = "cpu"
    _made: dict[str, list[Tensor]] = field(default_factory=dict)

    def __getitem__(self, letter: str) -> list[Tensor]:
        if letter not in self._made:
            self._made[letter] = self._make(letter)
        return self._made[letter]

    def _make(self, letter: str) -> list[Tensor]:
        scale = {"v": 1e-3, "g": 1e-3, "u": 1e-6}.get(letter, 1.0)
        # A repeated block: random numbers for 2^30 elements would take longer than the measurement.
        seed = torch.Generator().manual_seed(ord(letter))
        block = torch.randn(4099, generator=seed).mul_(scale)
        block = (block.abs_() if letter == "u" else block).to(
            self.device, dtype_of(self.work, letter)
        )
        return [_filled(block, shape) for shape in self.work.shapes]


def dtype_of(work: Workload, letter: str) -> torch.dtype:
    p = work.precision
    if letter in "op":
        return p.outs
    if letter in "vut":
        return p.state
    return p.grads if letter == "g" else p.weights


def _filled(block: Tensor, shape: Shape) -> Tensor:
    elements = math.prod(shape)
    return block.repeat(-(-elements // block.numel()))[:elements].view(shape)
