"""The group that holds the commands."""

from typing import Any

import click

from spectrain_ext import __version__
from spectrain_ext.cli.bench import bench
from spectrain_ext.cli.doctor import doctor
from spectrain_ext.cli.printable import printable
from spectrain_ext.cli.timeline import timeline
from spectrain_ext.cli.train import train


class _Group(click.Group):
    """Errors repeat what files say; a terminal is told no more than text."""

    def invoke(self, context: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(context)
        except click.ClickException as error:
            vars(error)["message"] = printable(error.message)  # the same error, with its context
            raise


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="spectrain")
def main() -> None:
    """Asynchronous pipeline training with predicted weights."""


main.add_command(train)
main.add_command(doctor)
main.add_command(bench)
main.add_command(timeline)
