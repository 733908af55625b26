"""Plans how to train a model on a number of devices and prints the candidates."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.table import Table
from torch import nn

from spectrain_ext.method import Method
from spectrain_ext.method import methods as method_names
from spectrain_ext.passes.codecs import NAMES
from spectrain_ext.tools.planning import (
    HOST_SECONDS,
    LINKS,
    METHODS,
    Layers,
    Link,
    TrainingPlan,
    find_link,
    measure_layers,
    plan,
    read_layers,
    write_layers,
    write_plan,
)
from spectrain_ext.transport import map_tensors

from .doctor import threads
from .options import (
    MANY,
    POSITIVE,
    amounts,
    completes,
    imported,
    is_imported,
    method_of,
    names,
    own_failures,
    plain_console,
    plain_table,
    printable,
    result_of,
)

_WIDEST = 10**4


def _link(
    context: click.Context, parameter: click.Parameter, value: str
) -> Link | tuple[Link, ...]:
    """Parse one link or several with commas."""
    try:
        links = tuple(map(find_link, value.split(",")))
        return links[0] if len(links) == 1 else links
    except ValueError as error:
        raise click.BadParameter(str(error).removeprefix("link: ")) from error


def _methods(
    context: click.Context, parameter: click.Parameter, value: Sequence[str]
) -> dict[str, Method]:
    try:
        return {name: method_of(name) for name in names(context, parameter, value)}
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--method'") from error


@click.command(
    "plan",
    short_help="Choose stages, replicas, microbatches and method.",
    context_settings={"show_default": True},
    epilog="Candidates are ranked by the time to a loss: the simulated period, from measured layer "
    "times, times the minibatches to that loss, measured on other workloads at the same delay (see "
    "docs/frontier.md). Memory and delay are counted.",
)
@click.option(
    "--model",
    metavar="MODULE:FUNCTION",
    help="Function that returns (model, example input). A checkout has some in studies.examples, "
    "for example studies.examples:vgg16.",
)
@click.option(
    "--profile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read layer times from this file instead of measuring them.",
)
@click.option(
    "--save-profile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write layer times to this file, for --profile.",
)
@click.option("--devices", type=MANY, required=True, help="Number of devices.")
@click.option(
    "--link",
    default="pcie3",
    metavar="LINK",
    callback=_link,
    shell_complete=completes(lambda: LINKS),
    help=f"Link between any two devices: {', '.join(LINKS)}, or bytes per second in each "
    "direction. Comma-separated: one between each two neighbours.",
)
@click.option(
    "--batch", type=POSITIVE, default=256, help="Samples per minibatch, over all devices."
)
@click.option(
    "--memory",
    metavar="BYTES",
    callback=amounts,
    help="Memory limit of a device, for example 24G; comma-separated: one per device.  "
    "[default: no limit]",
)
@click.option(
    "--speed",
    metavar="NUMBER",
    callback=amounts,
    help="ASSUME that devices compute this many times as fast as measured; comma-separated: one "
    "per device, for example 1,1,.5,.5.  [default: 1]",
)
@click.option(
    "--replicas",
    type=POSITIVE,
    help="Most replicas of a stage. A Pipeline in one process has 1.  [default: no limit]",
)
@click.option(
    "--cores",
    type=POSITIVE,
    help="Cores of one machine that all devices, being processes, share.  [default: one each]",
)
@click.option(
    "--codec",
    type=click.Choice(list(NAMES)),
    help="Codec of the messages between stages.  [default: none]",
)
@click.option(
    "--method",
    "-m",
    "methods",
    multiple=True,
    metavar="NAME",
    default=[",".join(METHODS)],
    callback=_methods,
    shell_complete=completes(method_names),
    help="Comma-separated methods. module:NAME imports your own; sync is data parallelism.",
)
@click.option(
    "--device",
    default="cpu",
    shell_complete=completes(
        lambda: ["cpu", *(f"cuda:{k}" for k in range(torch.cuda.device_count()))]
    ),
    help="Device to measure the model on: cpu (one thread) or cuda.",
)
@click.option(
    "--state",
    type=click.IntRange(min=0),
    default=1,
    help="Values of optimizer state per parameter: 1 for SGD with momentum, 2 for Adam.",
)
@click.option(
    "--host",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    help="Time that a CPU needs to issue a forward or a backward of a stage.  [default: "
    f"{HOST_SECONDS:g} for layers measured on a GPU, as on an H200; else 0]",
)
@click.option(
    "--out",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the plan to this JSON file, for st.partition(model, plan=...).",
)
def plan_command(
    model: str | None,
    profile: Path | None,
    save_profile: Path | None,
    devices: int,
    link: Link | tuple[Link, ...],
    memory: float | tuple[float, ...] | None,
    speed: float | tuple[float, ...] | None,
    codec: str | None,
    methods: dict[str, Method],
    device: str,
    out: Path | None,
    **numbers: Any,  # batch, replicas, cores, state and host, as they are for plan()
) -> None:
    """Choose stages, replicas, microbatches, window and method for training a model.

    \b
    spectrain plan --model studies.examples:vgg16 --devices 8 --link pcie3 --batch 256 --speed 100
    """
    if (model is None) == (profile is None):
        raise click.UsageError("expected --model, to be measured, or the --profile of one")
    for name, values, count in (
        ("--speed", speed, devices),
        ("--memory", memory, devices),
        ("--link", link, devices - 1),
    ):
        if isinstance(values, tuple) and len(values) != count:
            raise click.UsageError(
                f"{name} has {len(values)} numbers, and --devices {devices} needs {count}"
            )
    try:
        layers = _measured(model, device) if profile is None else read_layers(profile)
        if save_profile is not None:
            write_layers(save_profile, layers)
        with own_failures(*methods):
            planned = plan(
                layers,
                devices,
                link=link,
                memory=memory,
                speed=speed,
                methods=list(methods.values()),
                codec=None if codec is None else NAMES[codec],
                **numbers,
            )
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            write_plan(out, planned)
    except (ValueError, TypeError, RuntimeError, OSError, OverflowError) as error:
        raise click.ClickException(str(error)) from error
    console = plain_console(soft_wrap=True)
    console.print(_table(planned), soft_wrap=False)
    for line in (*_missed(planned), *_called(planned), *planned.assumptions):
        console.print(f"- {printable(line)}")
    if planned.left_out:
        console.print(
            f"- left out: {planned.left_out} faster candidates that need more memory than a device "
            f"has, {planned.least_memory:.4g} bytes at least"
        )
    console.print(f"- {planned.tried} candidates compared, {planned.simulated} simulated")
    for title, best in (("first", planned.soonest), ("fastest", planned.fastest)):
        points = ", ".join(map(repr, best.split_points))
        where = f"cut before {printable(points)}" if points else "not cut"
        console.print(f"{title}: {where}: {best.code}")
    if out is not None:
        console.print(f"st.partition(model, example_input=..., plan={str(out)!r})")


def _measured(name: str | None, device: str) -> Layers:
    assert name is not None
    if not is_imported(name):
        raise click.BadParameter(f"expected module:function, got {name!r}", param_hint="'--model'")
    try:
        model, example = result_of(f"{name!r}, called,", imported(name))
        modules = [model] if isinstance(model, nn.Module) else list(model)
        if not all(isinstance(module, nn.Module) for module in modules):
            raise ValueError(f"got a {type(model).__name__} as the model")
    except (ValueError, TypeError) as error:
        raise click.BadParameter(
            f"expected a function that returns (model, example input): {error}",
            param_hint="'--model'",
        ) from error
    try:
        place = torch.device(device)
        for module in modules:
            module.to(place)
    except (RuntimeError, AssertionError) as error:  # "Torch not compiled with CUDA enabled"
        raise click.BadParameter(str(error).splitlines()[0], param_hint="'--device'") from error

    def measure() -> Layers:
        with threads(1):
            return measure_layers(model, map_tensors(example, lambda tensor: tensor.to(place)))

    layers: Layers = result_of(f"{name!r}, measured,", measure)
    return layers


def _table(planned: TrainingPlan) -> Table:
    links = ", ".join(dict.fromkeys(link.name for link in planned.links))
    table = plain_table(
        f"{planned.devices} devices, {planned.batch} samples a minibatch, {links}",
        *("method", "stages x\nreplicas", "M", "ms per\nmini-\nbatch"),
        *("mini-\nbatches\nto a loss", "ms x\nmini-\nbatches", "GB per\ndevice", "delay"),
        gap=1,
    )
    for candidate in planned.candidates:
        counts, quality, soon = candidate.replicas, candidate.quality, candidate.seconds_to_quality
        shape = f"{len(counts)} x {counts[0]}"
        if len(set(counts)) > 1:
            shape = f"{len(counts)}: {','.join(map(str, counts))}"
        updates = "unmeasured"
        if quality is not None:
            updates = "unreached" if math.isinf(quality.updates) else f"{quality.updates:.2f}"
        cells = (
            candidate.method,
            shape,
            f"{candidate.microbatches} {candidate.window or ''}",
            f"{1e3 * candidate.period:.4g}",
            updates,
            f"{1e3 * soon:.4g}" if math.isfinite(soon) else "",
            f"{max(candidate.memory) / 1e9:.3g}",
            f"{candidate.delay}",
        )
        table.add_row(*map(printable, cells))
    return table


def _missed(planned: TrainingPlan) -> Iterator[str]:
    pairs = dict.fromkeys((each.method, each.quality) for each in planned.candidates)
    for method, quality in pairs:
        if quality is not None and math.isinf(quality.updates):
            gaps = dict.fromkeys(f"{100 * gap:+.1f}" for gap in (quality.low, quality.high))
            yield (
                f"{method} did not reach that loss on {quality.where[0]}: after as many "
                f"minibatches its test loss was {' to '.join(gaps)} % off synchronous training's"
            )


def _called(planned: TrainingPlan) -> Iterator[str]:
    """Warn where calls, and not the devices, limit the speed."""
    for each in planned.candidates:
        if each.limited_by_calls:
            stages = ", ".join(map(str, each.limited_by_calls))
            yield (
                f"LIMITED BY CALLS: {each.method}, M = {each.microbatches}: a forward or a "
                f"backward of stage {stages} takes less time than a CPU needs to issue it; larger "
                "microbatches or fewer stages may be faster"
            )
        if each.seconds_of_calls > each.period:
            yield (
                f"{each.method}, M = {each.microbatches}: one process for all devices needs "
                f"{1e3 * each.seconds_of_calls:.4g} ms a minibatch to issue them; give every "
                "device a process, by DistributedPipeline"
            )
