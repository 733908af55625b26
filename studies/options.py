"""Options that both commands have."""

from __future__ import annotations

from pathlib import Path

import click

data_dir = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="File or folder of cifar10 (torchvision's, or a tar of JPEG files) or text (.txt).",
)

workload = click.option(
    "--workload",
    metavar="MODULE:FUNCTION",
    help="What is trained, of your own instead of --data: a function that returns a "
    "studies.Workload, see docs/train.md.",
)
