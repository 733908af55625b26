"""Joins the commands in ``spectrain``, also for ``python -m spectrain_ext.tools.commands``."""

from typing import Any

import click

from spectrain_ext._C import build_info

from .doctor import doctor
from .options import printable
from .plan_command import plan_command
from .timeline_command import timeline


class Group(click.Group):
    """Escapes control characters in errors, which may quote files."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except click.ClickException as error:
            vars(error)["message"] = printable(error.message)  # the same error, with its context
            raise


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(build_info()["version"], prog_name="spectrain")
def main() -> None:
    """Asynchronous pipeline training with predicted weights."""


main.add_command(doctor)
main.add_command(timeline)
main.add_command(plan_command)

if __name__ == "__main__":
    main(prog_name="spectrain")
