"""What ``spectrain train`` was asked to do, after validation."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import torch

from spectrain_ext.method import parse_window

Window = Literal["classic", "wide"] | int | tuple[int, ...] | None


@dataclass(frozen=True)
class TrainSettings:
    """The same for every method and seed of one comparison.

    ``devices`` has one entry per stage; ``replicas`` too, and is None where all have one. ``depth``
    None is the model's own, ``train_samples`` and ``test_samples`` None are all.
    """

    data: str
    data_dir: Path | None
    model: str
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    stages: int
    devices: tuple[str, ...]
    epochs: int
    batch_size: int
    microbatches: int
    window: Window
    clip_norm: float | None
    recompute: bool
    width: int
    depth: int | None
    context: int
    train_samples: int | None
    test_samples: int | None
    augment: bool
    optimizer: str
    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool
    lr_schedule: str
    warmup: int
    threads: int
    checkpoint_every: int | None = None
    checkpoint_seconds: float | None = None
    replicas: tuple[int, ...] | None = None

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether a run can go on where it was interrupted."""
        return self.checkpoint_every is not None or self.checkpoint_seconds is not None


def choose_devices(given: str, stages: int, local_rank: int = 0) -> tuple[str, ...]:
    """Return one device name per stage from a list with commas, of at most ``stages`` names.

    Fewer devices than stages take contiguous runs of stages each. ``local_rank`` is the number of
    the CUDA device that is meant where none is given.

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
        index = local_rank if device.index is None else device.index
        if device.type == "cuda" and index >= torch.cuda.device_count():
            raise click.BadParameter(
                f"entry {position} is {name!r}, but torch sees {torch.cuda.device_count()} CUDA "
                "devices ('spectrain doctor' says why)",
                param_hint=hint,
            )
    return tuple(names[stage * len(names) // stages] for stage in range(stages))


def choose_replicas(given: str | None, processes: int) -> tuple[int, ...] | None:
    """Return the replicas of every stage from one number for all, or one per stage with commas.

    Args:
        given: the text; None: one for each.
        processes: how many there are.

    Returns:
        The numbers, which add up to the processes; None where all are 1.

    Raises:
        click.BadParameter: something else, or they do not add up.
    """
    if given is None:
        return None
    hint = "'--replicas'"
    try:
        numbers = tuple(int(number) for number in given.split(","))
        if min(numbers) < 1:
            raise ValueError
    except ValueError as error:
        raise click.BadParameter(
            f"expected a number of at least 1, or one per stage with commas, got {given!r}",
            param_hint=hint,
        ) from error
    if len(numbers) == 1:
        if processes % numbers[0]:
            raise click.BadParameter(
                f"{numbers[0]} for every stage do not divide the number of processes, {processes}"
                + ("" if processes > 1 else "; torchrun starts more: see docs/distributed.md"),
                param_hint=hint,
            )
        numbers *= processes // numbers[0]
    if sum(numbers) != processes:
        raise click.BadParameter(
            f"{given} are {sum(numbers)} processes, and there are {processes}: torchrun "
            f"--nproc-per-node {sum(numbers)} -m spectrain_ext.cli train",
            param_hint=hint,
        )
    return None if max(numbers) == 1 else numbers


def choose_window(given: str | None, stages: int) -> Window:
    """Return ``Pipeline``'s ``window`` from a name, a number, or a number per stage with commas.

    Raises:
        click.BadParameter: none of these, a number below 1, or not one for every stage.
    """
    if given is None:
        return None
    hint = "'--window'"
    try:
        window = parse_window(given)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=hint) from error
    if isinstance(window, str):
        return window
    numbers = (window,) if isinstance(window, int) else window
    if len(numbers) not in (1, stages) or min(numbers) < 1:
        raise click.BadParameter(
            f"expected 1 or {stages} numbers for {stages} stages, at least 1 each, got {given!r}",
            param_hint=hint,
        )
    return window


def finite(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Click callback: a finite number that is not negative, or None where none was given."""
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise click.BadParameter(f"expected a finite number of at least 0, got {value}")
    return value
