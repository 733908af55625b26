"""Holds a data set split into a training and a test part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

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

    def tests(self) -> Tests:
        """Return the test minibatches."""
        return Tests(self)


class Tests:
    """Minibatches of the test part in order, prepared for a model."""

    def __init__(self, data: Split) -> None:
        self._data = data

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data = self._data
        parts = zip(
            data.test_inputs.split(_TEST_BATCH), data.test_targets.split(_TEST_BATCH), strict=True
        )
        for inputs, targets in parts:
            yield data.prepare(inputs), targets
