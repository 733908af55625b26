"""Seeds the models' initial weights and cuts models into stages of equal length."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from spectrain_ext.rng import RNG_LOCK


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator in the block; restore its state afterwards."""
    with RNG_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def parts_of(layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    return (module for layer in layers for module in layer.modules())


def draw_convolutions(layers: Iterable[nn.Module]) -> None:
    """Draw the weights of convolutions as torchvision does."""
    for module in parts_of(layers):
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def cut_evenly(layers: Sequence[nn.Module], stages: int) -> list[nn.Module]:
    """Return ``stages`` contiguous groups of ``layers`` whose lengths differ by at most one."""
    if not 1 <= stages <= len(layers):
        raise ValueError(f"stages must be between 1 and the {len(layers)} layers, got {stages}")
    ends = [(k + 1) * len(layers) // stages for k in range(stages)]
    groups = [layers[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [group[0] if len(group) == 1 else nn.Sequential(*group) for group in groups]
