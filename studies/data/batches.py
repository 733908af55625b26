"""The order of minibatches: a pure function of the seed, so that every method sees the same one."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .images import augment, draw_variations
from .split import Split


def count_batches(samples: int, batch_size: int, epochs: int) -> int:
    """Return how many minibatches :func:`shuffled_batches` yields."""
    return epochs * -(-samples // batch_size)


def shuffled_batches(
    inputs: Tensor, targets: Tensor, *, batch_size: int, epochs: int, seed: int, begin: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``(inputs, targets)`` minibatches, every sample once per epoch in a new random order.

    The last minibatch of an epoch holds what is left and may be smaller. The first ``begin``
    minibatches are left out, at the cost of drawing the orders of their epochs. The global random
    state is neither read nor changed.
    """
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        parts = torch.randperm(len(inputs), generator=generator).split(batch_size)
        for rows in parts[max(0, begin - epoch * len(parts)) :]:
            yield inputs[rows], targets[rows]


def training_batches(
    data: Split,
    *,
    batch_size: int,
    epochs: int,
    seed: int,
    augmented: bool = False,
    begin: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield :func:`shuffled_batches` of the training part, prepared for a model.

    ``augmented`` images are shifted and mirrored at random, by the seed as well; leaving out the
    first ``begin`` minibatches does not change the others.

    Raises:
        ValueError: ``augmented`` data that are no images.
    """
    if augmented and data.kind != "images":
        raise ValueError(f"augmented: {data.name} has no images, but {data.kind}")
    samples = len(data.train_inputs)
    generator = torch.Generator().manual_seed(seed)
    per_epoch = count_batches(samples, batch_size, 1)
    for index in range(begin if augmented else 0):
        last = index % per_epoch == per_epoch - 1
        draw_variations(samples - (per_epoch - 1) * batch_size if last else batch_size, generator)
    for inputs, targets in shuffled_batches(
        data.train_inputs,
        data.train_targets,
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
        begin=begin,
    ):
        yield data.prepare(augment(inputs, generator) if augmented else inputs), targets
