"""Shuffles minibatches in an order that can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from spectrain_ext.rng import mixed_seed


class ShuffledSampler(Sampler[list[int]]):
    """A resumable ``batch_sampler`` that yields each minibatch's indices in a new order per epoch.

    Each iteration yields the rest of the current epoch, or the next epoch. The order depends only
    on the seed and the epoch, so it is the same in all processes, and resuming costs one
    permutation.

    Args:
        samples: size of the data set.
        batch_size: samples per minibatch.
        seed: determines the order.
        drop_last: leave out an epoch's last minibatch if it is smaller.

    Attributes:
        position: number of minibatches yielded in all epochs.

    Raises:
        ValueError: the sizes leave an epoch without a minibatch.

    Example:
        >>> sampler = st.checkpoint.ShuffledSampler(10, 4, seed=1)
        >>> [len(indices) for indices in sampler]
        [4, 4, 2]
        >>> sampler.epoch, sampler.position
        (1, 3)
        >>> loader = torch.utils.data.DataLoader(range(10), batch_sampler=sampler)
    """

    def __init__(
        self, samples: int, batch_size: int, *, seed: int = 0, drop_last: bool = False
    ) -> None:
        for name, value in (("samples", samples), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if drop_last and samples < batch_size:
            raise ValueError(
                f"batch_size: expected at most {samples} (samples) with drop_last, got {batch_size}"
            )
        self.position = 0
        self._samples = samples
        self._batch_size = batch_size
        self._seed = seed
        self._drop_last = drop_last

    def __len__(self) -> int:
        """Minibatches per epoch."""
        whole, rest = divmod(self._samples, self._batch_size)
        return whole + (rest > 0 and not self._drop_last)

    @property
    def epoch(self) -> int:
        """Epoch of the next minibatch, from 0."""
        return self.position // len(self)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, begin = divmod(self.position, len(self))
        generator = torch.Generator().manual_seed(mixed_seed(self._seed, epoch))
        order = torch.randperm(self._samples, generator=generator).split(self._batch_size)
        for index in range(begin, len(self)):
            self.position = epoch * len(self) + index + 1
            yield order[index].tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes, seed and position."""
        return {
            "samples": self._samples,
            "batch_size": self._batch_size,
            "drop_last": self._drop_last,
            "seed": self._seed,
            "position": self.position,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position, in the order of the saved seed.

        Raises:
            ValueError: the state has other sizes of data set or minibatch.
        """
        mine = self.state_dict()
        for key in ("samples", "batch_size", "drop_last"):
            if state_dict.get(key) != mine[key]:
                raise ValueError(f"{key}: expected {mine[key]}, got {state_dict.get(key)}")
        self._seed, self.position = int(state_dict["seed"]), int(state_dict["position"])
