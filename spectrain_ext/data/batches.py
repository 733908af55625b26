"""The order of minibatches: a pure function of the seed, so that every method sees the same one."""

from collections.abc import Iterator

import torch
from torch import Tensor


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
