"""Draws the simulated timeline of a method, or lists the instructions of a stage."""

from pathlib import Path
from typing import Any

import click

from spectrain_ext.method import Window, methods, microbatches_of, numbers_of
from spectrain_ext.tools.simulation import summarize
from spectrain_ext.tools.timelines.method_timeline import (
    devices_under,
    instructions_of,
    simulate_method,
)
from spectrain_ext.tools.timelines.timeline import draw_timeline, write_trace

from .options import (
    FEW,
    POSITIVE,
    completes,
    method_of,
    own_failures,
    parsed_window,
    printable,
)

_TIME = click.FloatRange(min=0.0)
_MOST_BLOCKS = 1_000_000  # more take minutes and gigabytes
_SUFFIXES = (".svg", ".png", ".json")


@click.command(
    short_help="Draw what each stage does when.", context_settings={"show_default": True}
)
@click.option(
    "--method",
    "-m",
    default="spectrain",
    shell_complete=completes(methods),
    help="Method to simulate. module:NAME imports your own; pipedream+sync@4 changes the method "
    "after 4 minibatches.",
)
@click.option("--stages", type=FEW, default=4, help="Stages of the model.")
@click.option("--minibatches", type=POSITIVE, default=8, help="Minibatches of the run.")
@click.option(
    "--microbatches", type=POSITIVE, help="Microbatches per minibatch.  [default: the method's]"
)
@click.option(
    "--window",
    metavar="WINDOW",
    callback=parsed_window,
    shell_complete=completes(lambda: ("classic", "wide")),
    help="Microbatches in flight: classic, wide, a number, or comma-separated numbers, one per "
    "stage.  "
    "[default: the method's]",
)
@click.option("--forward", type=_TIME, default=1.0, help="Duration of a microbatch's forward.")
@click.option("--backward", type=_TIME, default=2.0, help="Duration of a microbatch's backward.")
@click.option("--update", type=_TIME, default=0.0, help="Duration of an update.")
@click.option("--prediction", type=_TIME, default=0.0, help="Duration of a prediction.")
@click.option(
    "--communication",
    type=_TIME,
    default=0.0,
    help="Duration of a message to a neighbouring stage.",
)
@click.option("--versions", is_flag=True, help="Write weight versions into blocks.")
@click.option(
    "--instructions",
    is_flag=True,
    help="Print the instructions of one stage instead of drawing.",
)
@click.option("--stage", type=click.IntRange(min=0), default=0, help="Stage of --instructions.")
@click.option(
    "--out",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("timeline.svg"),
    help="File to write: a picture (.svg, .png), or a trace for Chrome and Perfetto (.json).",
)
def timeline(
    method: str,
    stages: int,
    minibatches: int,
    microbatches: int | None,
    window: Window,
    versions: bool,
    instructions: bool,
    stage: int,
    out: Path,
    **durations: Any,  # numbers: forward, backward, update, prediction and communication
) -> None:
    """Draw what each stage does when, simulated with the given durations.

    Blocks that are too narrow have no number; the picture and the output say so.

    \b
    spectrain timeline --method pipedream --stages 4 --minibatches 8 -o t.svg
    spectrain timeline --method auto --instructions --minibatches 3
    """
    if out.suffix not in _SUFFIXES:
        raise click.BadParameter(
            f"expected a name that ends in {', '.join(_SUFFIXES)}, got {out.name!r}",
            param_hint="'--out'",
        )
    try:
        numbers_of(window, stages)
    except ValueError as error:
        raise click.BadParameter(
            str(error).removeprefix("window: "), param_hint="'--window'"
        ) from error
    left_out = None
    try:
        chosen = method_of(method)
        with own_failures(method):
            count = microbatches or microbatches_of(chosen, stages)
            if instructions:
                for line in instructions_of(
                    chosen, stages, stage, minibatches, microbatches=count, window=window
                ):
                    click.echo(line)
                return
            if (blocks := 2 * stages * minibatches * count) > _MOST_BLOCKS:
                raise ValueError(
                    f"{stages} stages, {minibatches} minibatches and {count} microbatches make "
                    f"{blocks} forwards and backwards, expected at most {_MOST_BLOCKS}"
                )
            chunks = chosen.chunks
            if chunks > 1 and stages % chunks:
                raise ValueError(
                    f"stages: method {chosen.name!r} has {chunks} on every device, expected a "
                    f"multiple of {chunks}, got {stages}"
                )
            devices = devices_under(chosen, stages)
            run = chosen, stages, minibatches
            spans = list(simulate_method(*run, microbatches=count, window=window, **durations))
        name = f"{chosen.name}, {stages} stages"
        if out.suffix == ".json":
            write_trace(out, spans)
        else:
            left_out = draw_timeline(
                out,
                spans,
                title=name,
                versions=versions,
                communication=durations["communication"] > 0,
                unit="simulated time",
                devices=devices,
            )
    except (ValueError, ModuleNotFoundError, OSError) as error:
        raise click.ClickException(str(error)) from error
    summary = summarize(spans, devices)
    shares = [f"{100 * share:.0f} %" for share in summary.bubbles]
    idle = ", ".join(shares) if len(set(shares)) > 1 else f"{shares[0]} each"
    click.echo(f"{name}: {summary.makespan:g} in all, {summary.period:g} per minibatch of stage 0")
    click.echo(f"idle, by {'stage' if devices is None else 'device'}: {idle}")
    click.echo(f"{'trace' if out.suffix == '.json' else 'picture'}: {printable(str(out))}")
    if left_out:
        click.echo(left_out)
