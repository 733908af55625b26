"""Options of several commands, and their errors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from spectrain_ext.tools.commands.options import FEW, names


class OptionError(ValueError):
    """An option has an invalid value; ``option`` is its name on the command line."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(reason.removeprefix(f"{option}: "))  # the prefix of argument errors
        self.option = option


@contextmanager
def command_errors() -> Iterator[None]:
    """Turn errors of the block into errors of the command."""
    try:
        yield
    except OptionError as error:
        raise click.BadParameter(str(error), param_hint=f"'--{error.option}'") from error
    except (ModuleNotFoundError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error


data_dir = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="File or folder of cifar10 (torchvision's, or a tar of JPEG files) or text (.txt).",
)

workload = click.option(
    "--workload",
    metavar="MODULE:FUNCTION",
    help="Your own workload instead of --data: a function that returns a studies.Workload, see "
    "docs/studies.md.",
)


def numbers_listed(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> list[int] | None:
    """Parse comma-separated numbers; None if the option is not given."""
    if value is None:
        return None
    texts = names(context, parameter, value)
    if not texts:
        raise click.BadParameter(f"expected numbers with commas, got {value!r}")
    return [FEW(text, parameter, context) for text in texts]


def finite(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Require a finite number of at least 0; None if the option is not given."""
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise click.BadParameter(f"expected a finite number of at least 0, got {value}")
    return value
