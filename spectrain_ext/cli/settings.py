"""What ``spectrain train`` was asked to do, after validation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import click
import torch

from spectrain_ext import methods


@dataclass(frozen=True)
class TrainSettings:
    """The same for every method and seed of one comparison.

    ``devices`` has one entry per stage.
    """

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    stages: int
    devices: tuple[str, ...]
    epochs: int
    batch_size: int
    microbatches: int
    width: int
    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool
    threads: int


#: What is compared where nobody asks for others.
DEFAULT_METHODS = ("sync", "vanilla", "pipedream", "spectrain", "spectrain-stash")


def choose_methods(given: Sequence[str]) -> tuple[str, ...]:
    """Return the methods named in ``given`` (an entry may list several), or the default.

    Raises:
        click.BadParameter: a name that is no method; the message lists those that exist.
    """
    known = tuple(methods())
    names = [name.strip() for entry in given for name in entry.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise click.BadParameter(
                f"unknown method {name!r}; the methods are {', '.join(known)}",
                param_hint="'--method'",
            )
    return tuple(dict.fromkeys(names)) if names else DEFAULT_METHODS


def choose_devices(given: str, stages: int) -> tuple[str, ...]:
    """Return one device name per stage from a list with commas, of at most ``stages`` names.

    Fewer devices than stages take contiguous runs of stages each.

    Raises:
        click.BadParameter: a name torch does not know, a device that is not there, or too many.
    """
    names = [name.strip() for name in given.split(",") if name.strip()]
    hint = "'--devices'"
    if not 1 <= len(names) <= stages:
        raise click.BadParameter(
            f"expected 1 to {stages} devices for {stages} stages, got {len(names)}", param_hint=hint
        )
    for position, name in enumerate(names):
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise click.BadParameter(
                f"entry {position} is {name!r}, expected cpu, cuda or cuda:<number>",
                param_hint=hint,
            ) from error
        if device.type not in ("cpu", "cuda"):
            raise click.BadParameter(
                f"entry {position} is {name!r}, expected cpu, cuda or cuda:<number>",
                param_hint=hint,
            )
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise click.BadParameter(
                f"entry {position} is {name!r}, but torch sees {torch.cuda.device_count()} CUDA "
                "devices ('spectrain doctor' says why)",
                param_hint=hint,
            )
    return tuple(names[stage * len(names) // stages] for stage in range(stages))


def finite(context: click.Context, parameter: click.Parameter, value: float) -> float:
    """Click callback: a finite number that is not negative."""
    if not (math.isfinite(value) and value >= 0):
        raise click.BadParameter(f"expected a finite number of at least 0, got {value}")
    return value
