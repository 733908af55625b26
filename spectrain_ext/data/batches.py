"""The order of minibatches: a pure function of the seed, so that every method sees the same one."""

from collections.abc import Iterator

import torch
from torch import Tensor

from spectrain_ext.data.images import augment
from spectrain_ext.data.split import Split


def count_batches(samples: int, batch_size: int, epochs: int) -> int:
    """Return how many minibatches :func:`shuffled_batches` yields."""
    return epochs * -(-samples // batch_size)


def shuffled_batches(
    inputs: Tensor, targets: Tensor, *, batch_size: int, epochs: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``(inputs, targets)`` minibatches, every sample once per epoch in a new random order.

    The last minibatch of an epoch holds what is left and may be smaller. The global random state is
    neither read nor changed.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(inputs), generator=generator)
        for rows in order.split(batch_size):
            yield inputs[rows], targets[rows]


def training_batches(
    data: Split, *, batch_size: int, epochs: int, seed: int, augmented: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield :func:`shuffled_batches` of the training part, prepared for a model.

    ``augmented`` images are shifted and mirrored at random, by the seed as well.

    Raises:
        ValueError: ``augmented`` data that are no images.
    """
    if augmented and data.kind != "images":
        raise ValueError(f"augmented: {data.name} has no images, but {data.kind}")
    generator = torch.Generator().manual_seed(seed)
    for inputs, targets in shuffled_batches(
        data.train_inputs, data.train_targets, batch_size=batch_size, epochs=epochs, seed=seed
    ):
        yield data.prepare(augment(inputs, generator) if augmented else inputs), targets
