"""Initial weights that are a function of the seed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spectrain_ext.rng import TURN


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch draws on the CPU what ``seed`` gives; afterwards its state is what it was."""
    with TURN, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
