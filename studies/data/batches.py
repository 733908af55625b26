"""Orders minibatches by the seed alone, so that every method trains on the same ones."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .images import augment
from .split import Split


def count_batches(samples: int, batch_size: int, epochs: int) -> int:
    """Return the number of minibatches in ``epochs`` epochs."""
    return epochs * -(-samples // batch_size)


class Batches:
    """Minibatches of the training part, prepared for a model, in a new random order every epoch.

    An epoch has every sample once; its last minibatch may be smaller. Torch's global random state
    is neither read nor changed.
    """

    def __init__(self, data: Split, *, batch_size: int, seed: int, augmented: bool = False) -> None:
        if augmented and data.kind != "images":
            raise ValueError(f"augmented: {data.name} has no images, but {data.kind}")
        self._data, self._size, self._augmented = data, batch_size, augmented
        self._orders = torch.Generator().manual_seed(seed)
        self._variations = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return count_batches(len(self._data.train_inputs), self._size, 1)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data = self._data
        order = torch.randperm(len(data.train_inputs), generator=self._orders)
        for rows in order.split(self._size):
            inputs = data.train_inputs[rows]
            if self._augmented:
                inputs = augment(inputs, self._variations)
            yield data.prepare(inputs), data.train_targets[rows]
