"""The group that holds the commands."""

import click

from spectrain_ext import __version__
from spectrain_ext.cli.bench import bench
from spectrain_ext.cli.doctor import doctor
from spectrain_ext.cli.timeline import timeline
from spectrain_ext.cli.train import train


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="spectrain")
def main() -> None:
    """Asynchronous pipeline training with predicted weights."""


main.add_command(train)
main.add_command(doctor)
main.add_command(bench)
main.add_command(timeline)
