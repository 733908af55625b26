"""Holds a data set in a training and a test part, and makes minibatches of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_TEST_BATCH = 256

Kind = Literal["features", "images", "text"]


@dataclass(frozen=True)
class Split:
    """Stored inputs and targets, and the conversion to a model's input.

    ======== ================================ =================== ==========================
    kind     inputs                           targets             a model's input
    ======== ================================ =================== ==========================
    features float32 (samples, features)      int64 (samples,)    the same
    images   uint8 (samples, 3, rows, cols)   int64 (samples,)    float32, the same shape
    text     int64 (samples, length)          int64, the same     the same
    ======== ================================ =================== ==========================
    """

    name: str  # in tables and pictures
    kind: Kind
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    classes: int  # different targets; for text, the size of the vocabulary
    prepare: Callable[[Tensor], Tensor] = lambda inputs: inputs  # to a model's input
    fingerprint: str = ""  # hash of the content that was read; "": always the same

    @property
    def features(self) -> int:
        return self.train_inputs[0].numel()

    def first(self, train_samples: int | None, test_samples: int | None) -> Split:
        """Return the first samples of each part; None means all."""
        return dataclasses.replace(
            self,
            train_inputs=self.train_inputs[:train_samples],
            train_targets=self.train_targets[:train_samples],
            test_inputs=self.test_inputs[:test_samples],
            test_targets=self.test_targets[:test_samples],
        )


@dataclass(frozen=True)
class Tests:
    """Minibatches of every n-th sample of the test part in order, prepared for a model."""

    data: Split
    every: int = 1

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        both = self.data.test_inputs[:: self.every], self.data.test_targets[:: self.every]
        inputs, targets = (t.split(_TEST_BATCH) for t in both)
        return zip(map(self.data.prepare, inputs), targets, strict=True)


class Batches:
    """Minibatches of the training part, prepared for a model, in a new random order every epoch.

    An epoch has every sample once; its last minibatch may be smaller. Torch's global random state
    is neither read nor changed.
    """

    def __init__(self, data: Split, *, batch_size: int, seed: int, augmented: bool = False) -> None:
        self._data, self._size, self._augmented = data, batch_size, augmented
        self._orders = torch.Generator().manual_seed(seed)
        self._variations = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return -(-len(self._data.train_inputs) // self._size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data = self._data
        order = torch.randperm(len(data.train_inputs), generator=self._orders)
        for rows in order.split(self._size):
            inputs = data.train_inputs[rows]
            if self._augmented:
                inputs = augment(inputs, self._variations)
            yield data.prepare(inputs), data.train_targets[rows]


class Windows:
    """Minibatches of sequences that begin anywhere in the training text, drawn independently.

    An epoch has as many characters as the text.
    """

    def __init__(self, data: Split, *, batch_size: int, seed: int) -> None:
        # a sequence's targets are the characters after its inputs
        self._text = torch.cat([data.train_inputs.flatten(), data.train_targets[-1, -1:]])
        self._shape = batch_size, data.train_inputs.shape[1]
        self._starts = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        samples, length = self._shape
        return -(-len(self._text) // (samples * length))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        samples, length = self._shape
        for _ in range(len(self)):
            starts = torch.randint(len(self._text) - length, (samples, 1), generator=self._starts)
            drawn = self._text[starts + torch.arange(length + 1)]
            yield drawn[:, :-1], drawn[:, 1:]


# Images

# Mean and standard deviation of CIFAR-10's training images per channel, on the scale 0..1.
_MEAN = (0.4914, 0.4822, 0.4465)
_DEVIATION = (0.2470, 0.2435, 0.2616)
_PADDING = 4


def normalize(images: Tensor) -> Tensor:
    """Convert uint8 ``(batch, 3, rows, columns)`` to float32 of about mean 0 and variance 1."""
    mean = torch.tensor(_MEAN, device=images.device).view(3, 1, 1)
    deviation = torch.tensor(_DEVIATION, device=images.device).view(3, 1, 1)
    return images.float().div_(255).sub_(mean).div_(deviation)


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift images by up to 4 pixels each way, filling with black, and mirror half of them."""
    batch, _, rows, columns = images.shape
    padded = torch.nn.functional.pad(images, (_PADDING,) * 4)
    down, right = torch.randint(2 * _PADDING + 1, (2, batch, 1), generator=generator)
    mirrored = torch.rand(batch, 1, generator=generator) < 0.5
    row = down + torch.arange(rows)
    column = right + torch.arange(columns)
    column = torch.where(mirrored, column.flip(1), column)
    samples = torch.arange(batch).view(batch, 1, 1)
    # advanced indices around a slice move its dimension to the end
    cut = padded[samples, :, row.unsqueeze(2), column.unsqueeze(1)]
    return cut.permute(0, 3, 1, 2).contiguous()
