"""``spectrain plan``: how to train a model on some devices, before they are rented."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.table import Table
from torch import nn

from spectrain_ext.extras import require_matplotlib
from spectrain_ext.planning import (
    LINKS,
    METHODS,
    Candidate,
    Layers,
    Link,
    Plan,
    find_link,
    measure_layers,
    plan,
    read_layers,
    write_layers,
    write_plan,
)
from spectrain_ext.timelines.timeline import draw_timeline
from spectrain_ext.transport import each

from .doctor import threads
from .links import measured_link
from .options import (
    POSITIVE,
    imported,
    is_imported,
    method_of,
    names,
    own_failures,
    plain_console,
    printable,
)

_TABLE = 160  # columns that the table has
_TOGETHER = 8  # processes that a link is measured with at most
_MORE = click.FloatRange(min=0, min_open=True)


def _link(context: click.Context, parameter: click.Parameter, value: str) -> Link | None:
    """The link; None: it is to be measured."""
    if value == "measured":
        return None
    try:
        return find_link(value)
    except ValueError as error:
        raise click.BadParameter(str(error).removeprefix("link: ")) from error


@click.command(
    "plan",
    short_help="Choose stages, replicas, microbatches and method for some devices.",
    context_settings={"show_default": True},
    epilog="Throughput, periods and time are simulated from measured layer times; memory and delay "
    "are counted; quality is what other workloads lost at that delay, see docs/frontier.md.",
)
@click.option(
    "--model",
    metavar="MODULE:FUNCTION",
    help="What is trained: a function that returns (model, example input); from a checkout, those "
    "of studies.examples, such as studies.examples:vgg16.",
)
@click.option(
    "--profile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the layers' times from a file instead of measuring them.",
)
@click.option(
    "--save-profile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the layers' times to a file for --profile.",
)
@click.option("--devices", type=POSITIVE, required=True, help="How many there are.")
@click.option(
    "--link",
    default="pcie3",
    metavar="LINK",
    callback=_link,
    help=f"Between any two devices: {', '.join(LINKS)}, bytes per second of each direction, or "
    f"measured: between as many processes of this machine, {_TOGETHER} at most.",
)
@click.option(
    "--batch", type=POSITIVE, default=256, help="Samples of a minibatch, over all devices."
)
@click.option(
    "--memory",
    type=_MORE,
    metavar="BYTES",
    help="Leave out what takes more of a device.  [default: no limit]",
)
@click.option(
    "--speed",
    type=_MORE,
    help="ASSUME that devices compute so many times as fast as what was measured.  [default: 1]",
)
@click.option(
    "--cores",
    type=POSITIVE,
    help="Devices are processes that share so many cores of one machine.  [default: one each]",
)
@click.option(
    "--method",
    "-m",
    "methods",
    multiple=True,
    metavar="NAME",
    default=[",".join(METHODS)],
    callback=names,
    help="Methods, with commas; module:NAME is one of your own. sync is data parallelism.",
)
@click.option(
    "--device", default="cpu", help="What the model is measured on: cpu (one thread) or cuda."
)
@click.option(
    "--state",
    type=click.IntRange(min=0),
    default=1,
    help="Optimizer state per parameter, in copies: 1 for SGD's momentum, 2 for Adam.",
)
@click.option(
    "--out",
    "-o",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for plan.json and the timeline of the fastest.  [default: none is written]",
)
def plan_command(
    model: str | None,
    profile: Path | None,
    save_profile: Path | None,
    devices: int,
    link: Link | None,
    batch: int,
    memory: float | None,
    speed: float | None,
    cores: int | None,
    methods: Sequence[str],
    device: str,
    state: int,
    out: Path | None,
) -> None:
    """Find how to train a model on some devices: stages, replicas, microbatches, window, method.

    \b
    spectrain plan --model studies.examples:vgg16 --devices 8 --link pcie3 --batch 256 --speed 100
    """
    if (model is None) == (profile is None):
        raise click.UsageError("expected --model, to be measured, or the --profile of one")
    if out is not None:
        require_matplotlib()
    try:
        layers = _measured(model, device) if profile is None else read_layers(profile)
        if save_profile is not None:
            write_layers(save_profile, layers)
        with own_failures(*methods):
            found = plan(
                layers,
                devices,
                link=measured_link(min(devices, _TOGETHER)) if link is None else link,
                batch=batch,
                memory=memory,
                speed=speed,
                cores=cores,
                methods=[_method(name) for name in methods],
                state=state,
            )
    except (ValueError, TypeError, RuntimeError, OSError, OverflowError) as error:
        raise click.ClickException(str(error)) from error
    console = plain_console()
    wide = plain_console(width=max(console.width, _TABLE))
    wide.print(_table(found))
    for line in found.assumptions:
        console.print(f"- {printable(line)}", soft_wrap=True)
    if found.left_out:
        console.print(
            f"- left out: {found.left_out} quicker ways that take more than {memory:.4g} bytes a "
            f"device, {found.least_memory:.4g} at least"
        )
    console.print(f"- {found.tried} ways looked at, {found.simulated} simulated")
    for title, best in (("fastest", found.fastest), ("soonest", found.soonest)):
        ends = ", ".join(map(str, best.ends))
        console.print(f"{title}: stages end before blocks {ends}: {best.code}", soft_wrap=True)
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            write_plan(out / "plan.json", found)
            _draw(out, found)
        except OSError as error:
            raise click.ClickException(str(error)) from error
        console.print(f"numbers and timelines: {out}", soft_wrap=True)


def _method(name: str) -> Any:
    try:
        return method_of(name)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--method'") from error


def _measured(name: str | None, device: str) -> Layers:
    assert name is not None
    model: nn.Module | Sequence[nn.Module]
    if not is_imported(name):
        raise click.BadParameter(f"expected module:function, got {name!r}", param_hint="'--model'")
    try:
        made = imported(name)()
        model, example = made
    except (ValueError, TypeError) as error:
        raise click.BadParameter(
            f"expected a function that returns (model, example input): {error}",
            param_hint="'--model'",
        ) from error
    try:
        place = torch.device(device)
        for part in [model] if isinstance(model, nn.Module) else model:
            part.to(place)
    except RuntimeError as error:
        raise click.BadParameter(str(error).splitlines()[0], param_hint="'--device'") from error
    example = each(example, lambda tensor: tensor.to(place))
    with threads(1):
        return measure_layers(model, example)


def _table(found: Plan) -> Table:
    fastest, soonest = found.fastest, found.soonest
    table = Table(
        title=f"{found.devices} devices, {found.batch} samples a minibatch, {found.link.name}",
        title_justify="left",
    )
    for heading in (
        *("", "method", "stages x\nreplicas", "M", "window", "samples/s\nsimulated"),
        *("ms, of a\nminibatch\nsimulated", "GB, of a\ndevice\ncounted", "delay\ncounted"),
        *("loss gap %\nmeasured", "at", "updates\nmeasured", "ms, of sync's\nupdate"),
    ):
        table.add_column(heading, no_wrap=True)
    for candidate in found.candidates:
        marks = [
            mark for mark, best in (("fastest", fastest), ("soonest", soonest)) if candidate is best
        ]
        soon = candidate.seconds_to_quality
        table.add_row(
            ", ".join(marks),
            candidate.method,
            _shape(candidate),
            str(candidate.microbatches),
            candidate.window or "",
            f"{candidate.throughput:.4g}",
            f"{1e3 * candidate.period:.4g}",
            f"{max(candidate.memory) / 1e9:.3g}",
            str(candidate.delay),
            *_quality(candidate),
            f"{1e3 * soon:.4g}" if math.isfinite(soon) else "",
        )
    return table


def _shape(candidate: Candidate) -> str:
    counts = candidate.replicas
    if len(set(counts)) == 1:
        return f"{len(counts)} x {counts[0]}"
    return f"{len(counts)}: {','.join(map(str, counts))}"


def _quality(candidate: Candidate) -> tuple[str, str, str]:
    quality = candidate.quality
    if quality is None:
        return "not measured", "", ""
    if not quality.where:
        return "0", "", "1"
    gaps = f"{100 * quality.low:+.1f}"
    if len(quality.where) > 1:
        gaps += f" to {100 * quality.high:+.1f}"
    never = math.isinf(quality.updates)
    return gaps, quality.where[0], "not reached" if never else f"{quality.updates:.2f}"


def _draw(folder: Path, found: Plan) -> None:
    best = found.fastest
    title = f"{best.method}, {_shape(best)}, M = {best.microbatches}, simulated"
    spans = list(found.spans(best))
    for suffix in ("svg", "png"):
        draw_timeline(
            folder / f"timeline.{suffix}", spans, title=title, communication=True, unit="seconds"
        )
