"""Runs the commands of ``python -m studies``."""

from __future__ import annotations

import click

from spectrain_ext.tools.commands.__main__ import Group

from .slow_links import slow_links
from .study_command import study
from .train_command import train


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Train methods side by side and compare them."""


main.add_command(train)
main.add_command(study)
main.add_command(slow_links)

if __name__ == "__main__":
    main(prog_name="python -m studies")
