"""Options that both commands have."""

from __future__ import annotations

import math
from pathlib import Path

import click

from spectrain_ext.cli.options import names

data_dir = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="File or folder of cifar10 (torchvision's, or a tar of JPEG files) or text (.txt).",
)

workload = click.option(
    "--workload",
    metavar="MODULE:FUNCTION",
    help="What is trained, of your own instead of --data: a function that returns a "
    "studies.Workload, see docs/studies.md.",
)


def numbers_listed(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> list[int] | None:
    """Numbers of at least 1 with commas, or None where none were given."""
    if value is None:
        return None
    texts = names(context, parameter, value)
    if not texts or not all(text.isdecimal() and int(text) for text in texts):
        raise click.BadParameter(
            f"expected numbers of at least 1 with commas, got {','.join(texts)!r}"
        )
    return [int(text) for text in texts]


def finite(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """A finite number that is not negative, or None where none was given."""
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise click.BadParameter(f"expected a finite number of at least 0, got {value}")
    return value
