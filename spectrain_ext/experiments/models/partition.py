"""Cutting a list of layers into contiguous pipeline stages."""

from collections.abc import Sequence

from torch import nn


def cut_evenly(layers: Sequence[nn.Module], stages: int) -> list[nn.Module]:
    """Return ``stages`` contiguous groups of ``layers`` whose lengths differ by at most one.

    A group of one layer is that layer itself, a longer one an ``nn.Sequential``.

    Raises:
        ValueError: there are fewer layers than stages, or no stage at all.
    """
    if not 1 <= stages <= len(layers):
        raise ValueError(f"stages must be between 1 and the {len(layers)} layers, got {stages}")
    ends = [(k + 1) * len(layers) // stages for k in range(stages)]
    groups = [layers[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [group[0] if len(group) == 1 else nn.Sequential(*group) for group in groups]
