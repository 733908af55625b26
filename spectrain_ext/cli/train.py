"""``spectrain train``: several methods on the same data, then a table and a picture."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from click.core import ParameterSource
from rich.console import Console
from rich.markup import escape

from spectrain_ext.errors import CheckpointError, RankError, StageError
from spectrain_ext.experiments.data.split import Split
from spectrain_ext.experiments.observation import Observation, logged
from spectrain_ext.experiments.presets import DATA_SETS, DEFAULT_MODEL, MODELS, models_for, preset
from spectrain_ext.experiments.results import summarize
from spectrain_ext.experiments.selection import all_asked, choose_methods, fitting, microbatches_for
from spectrain_ext.experiments.settings import (
    TrainSettings,
    choose_devices,
    choose_replicas,
    choose_window,
    finite,
)
from spectrain_ext.experiments.train_runs import report, train_all
from spectrain_ext.experiments.workload import build_stages, load_data
from spectrain_ext.experiments.world import World
from spectrain_ext.extras import require_matplotlib, require_tensorboard
from spectrain_ext.schedule import Replicas

_POSITIVE = click.IntRange(min=1)
_COUNT = click.IntRange(min=0)
_OPTIMIZERS = ("sgd", "adam", "adamw", "nadam")


class _OnceToldCommand(click.Command):
    """Of several processes that were given the same, only the first complains of it."""

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        """Parse the arguments."""
        try:
            return super().make_context(*args, **more)
        except click.UsageError as error:
            if World.of_environment().first:
                raise
            raise click.exceptions.Exit(error.exit_code) from error


@click.command(
    cls=_OnceToldCommand,
    context_settings={"show_default": True},
    epilog="What has no default here depends on --data, --model and --quick; results.json has what "
    "was used. Finished runs are kept in --out: the same command with the same --out goes on "
    "where it was interrupted, and trains what more seeds or methods add.",
)
@click.option("--data", type=click.Choice(DATA_SETS), default="digits")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="File or folder of cifar10 (torchvision's, or a tar of JPEG files) or text (*.txt).",
)
@click.option(
    "--model",
    type=click.Choice(MODELS),
    help="[default: residual-mlp for digits, resnet for cifar10, gpt for text]",
)
@click.option(
    "--stages",
    type=_POSITIVE,
    default=8,
    help="Parts the model is cut into; under torchrun as many as there are processes.",
)
@click.option(
    "--method",
    "-m",
    "method_names",
    multiple=True,
    metavar="NAME",
    help="A method, or several with commas, or all; may be repeated.  "
    "[default: sync,vanilla,pipedream,spectrain,spectrain-stash]",
)
@click.option(
    "--devices",
    default="cpu",
    help="One device, or several with commas (cuda:0,cuda:1): each takes a run of stages. Under "
    "torchrun cuda is the one of the process's local rank.",
)
@click.option("--seeds", type=_POSITIVE, help="Train with seeds 0 to this, less one.")
@click.option("--seed", "seed_list", type=int, multiple=True, help="Exactly this seed; repeatable.")
@click.option("--epochs", type=_POSITIVE)
@click.option("--batch-size", type=_POSITIVE)
@click.option(
    "--microbatches",
    type=_POSITIVE,
    default=1,
    help="Parts of every minibatch; one per stage where a method named needs them.",
)
@click.option(
    "--replicas",
    "replicas_text",
    metavar="NUMBERS",
    help="Processes of each stage under torchrun, one number or one per stage with commas, which "
    "deal the microbatches out among themselves.  [default: 1]",
)
@click.option(
    "--window",
    "window_text",
    metavar="WINDOW",
    help="Microbatches in flight per stage: classic, wide, a number, or one per stage with "
    "commas.  [default: the method's]",
)
@click.option(
    "--clip-norm",
    type=click.FloatRange(min=0, min_open=True),
    help="Largest norm of a stage's gradient.  [default: none, or the method's]",
)
@click.option(
    "--recompute",
    is_flag=True,
    help="Keep only inputs, and run a stage's forward again before its backward.",
)
@click.option("--width", type=_POSITIVE, help="Width of the model.")
@click.option(
    "--depth", type=_POSITIVE, help="Its blocks; 11, 13, 16, 19 for vgg16, 18 or more for resnet."
)
@click.option("--context", type=_POSITIVE, help="Characters of text in a sequence.")
@click.option("--train-samples", type=_POSITIVE, help="Train on so many samples.")
@click.option("--test-samples", type=_POSITIVE, help="Test with so many samples.")
@click.option("--augment", is_flag=True, help="Shift and mirror training images at random.")
@click.option(
    "--optimizer", type=click.Choice(_OPTIMIZERS), help="[default: adamw for gpt, else sgd]"
)
@click.option("--lr", type=float, callback=finite)
@click.option("--momentum", type=float, callback=finite, default=0.9, help="Of SGD.")
@click.option("--weight-decay", type=float, callback=finite)
@click.option("--nesterov", is_flag=True, help="Nesterov momentum, of SGD.")
@click.option("--lr-schedule", type=click.Choice(["constant", "cosine"]))
@click.option("--warmup", type=_COUNT, help="Updates over which the learning rate rises.")
@click.option("--threads", type=_POSITIVE, default=1, help="CPU threads; small models want one.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for results.json, losses.png and timelines.  [default: runs/train-<date>-<time>]",
)
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for decoded images.  [default: data-cache beside --out]",
)
@click.option(
    "--checkpoint-every",
    type=_POSITIVE,
    metavar="MINIBATCHES",
    help="Drain and save after so many; an interrupted run then goes on from there. Needs --out.",
)
@click.option(
    "--checkpoint-seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Likewise after so long, where the clock decides what is computed.",
)
@click.option("--metrics", is_flag=True, help="Write figures of every stage to metrics.jsonl.")
@click.option(
    "--tensorboard",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write them for TensorBoard into this folder.",
)
@click.option("--verbose", "-v", is_flag=True, help="Show the log: what begins, ends, fails.")
@click.option("--quick", is_flag=True, help="Sizes that take minutes at most, and one seed.")
@click.pass_context
def train(
    context: click.Context,
    /,
    method_names: Sequence[str],
    model: str | None,
    devices: str,
    seeds: int | None,
    seed_list: Sequence[int],
    replicas_text: str | None,
    window_text: str | None,
    out: Path | None,
    cache_dir: Path | None,
    metrics: bool,
    tensorboard: Path | None,
    verbose: bool,
    quick: bool,
    **options: Any,
) -> None:
    """Train a pipeline with several methods and compare them.

    All methods start from the same weights and see the same minibatches under the same settings.
    """
    world = World.of_environment()
    console = Console(quiet=not world.first)
    asked = _Asked(
        method_names, model, devices, seeds, seed_list, replicas_text, window_text, quick, options
    )
    with logged(verbose, console, world), world.joined(cuda="cuda" in devices):
        with world.agreed():
            if tensorboard is not None:
                _require_tensorboard()
            settings, left_out = _settle(context, asked, world, console)
            if settings.keeps_checkpoints and out is None:
                raise click.UsageError(
                    "checkpoints need --out: there the same command finds them again"
                )
        folder = Path(world.tell(str(out or Path("runs") / time.strftime("train-%Y%m%d-%H%M%S"))))
        data = _load(settings, cache_dir or folder.parent / "data-cache", world)
        for name, reason in left_out.items():
            console.print(f"Left out: [bold]{name}[/] ({escape(reason)})", highlight=False)
        with world.agreed():
            if world.first:
                _make_folder(folder)
        observation = Observation(folder / "metrics.jsonl" if metrics else None, tensorboard)
        with _training(settings.threads, folder, console, world):
            runs = train_all(settings, data, folder, console, world, observation)
        results = summarize(runs)
        if world.first:
            report(folder, settings, data, results, left_out, console, world)


@dataclasses.dataclass
class _Asked:
    """The command line, as far as it does not say where files are."""

    method_names: Sequence[str]
    model: str | None
    devices: str
    seeds: int | None
    seed_list: Sequence[int]
    replicas_text: str | None
    window_text: str | None
    quick: bool
    options: dict[str, Any]


def _settle(
    context: click.Context, asked: _Asked, world: World, console: Console
) -> tuple[TrainSettings, dict[str, str]]:
    """Fill in what was not given, check all of it; returns what is left out as well."""
    options = asked.options
    replicas = choose_replicas(asked.replicas_text, world.size)
    if replicas is not None:
        world.seats = Replicas(replicas)
    options["stages"] = stages = _choose_stages(context, options["stages"], world)
    model = _choose_model(options["data"], asked.model)
    _check_data_dir(options["data"], options["data_dir"])
    defaults = preset(options["data"], model, quick=asked.quick)
    for field in dataclasses.fields(defaults):
        if field.name != "seeds" and options[field.name] is None:
            options[field.name] = getattr(defaults, field.name)
    chosen = choose_methods(asked.method_names)
    leave_out = all_asked(asked.method_names)
    if not leave_out and not _given(context, "microbatches"):
        options["microbatches"] = microbatches_for(chosen, stages, replicas)
        if options["microbatches"] > 1:
            needs = "a named method needs" if replicas is None else "methods and replicas need"
            console.print(f"Microbatches: {options['microbatches']}, which {needs}.")
    settings = TrainSettings(
        model=model,
        methods=chosen,
        seeds=tuple(dict.fromkeys(asked.seed_list)) or tuple(range(asked.seeds or defaults.seeds)),
        devices=choose_devices(asked.devices, stages, world.local_rank),
        replicas=replicas,
        window=choose_window(asked.window_text, stages),
        **options,
    )
    _check_optimizer(context, settings)
    try:
        require_matplotlib()
        return fitting(settings, leave_out=leave_out)
    except (ModuleNotFoundError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def _load(settings: TrainSettings, cache: Path, world: World) -> Split:
    """Read the data on every rank, the first of a machine before others, and try the model."""
    data = None
    for turn in (True, False):
        with world.agreed():
            if (world.local_rank == 0) == turn:
                try:
                    data = load_data(settings, cache)
                    build_stages(settings, settings.stages, settings.seeds[0], data)
                except (ModuleNotFoundError, ValueError, OSError) as error:
                    raise click.ClickException(str(error)) from error
    assert data is not None
    return data


def _require_tensorboard() -> None:
    try:
        require_tensorboard()
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from error


@contextmanager
def _training(threads: int, folder: Path, console: Console, world: World) -> Iterator[None]:
    """Inside there are so many threads, and failures are told in words, by the right rank."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    except (StageError, RankError, CheckpointError) as error:
        if world.tells(error):
            raise click.ClickException(_in_words(error)) from error
        raise click.exceptions.Exit(1) from error
    except KeyboardInterrupt:
        told = f"Finished runs are kept. To go on: the same again, with --out {folder}"
        console.print(told, markup=False)
        if world.first:
            raise
        raise click.exceptions.Exit(1) from None
    finally:
        torch.set_num_threads(threads_before)


def _choose_stages(context: click.Context, stages: int, world: World) -> int:
    if not world.together:
        return stages
    there = world.seats.stages
    if _given(context, "stages") and stages != there:
        what = "one for each process that torchrun started"
        if world.seats.dealt:
            counts = ",".join(map(str, world.seats.counts))
            what = f"for {world.size} processes and --replicas {counts}"
        raise click.BadParameter(f"expected {there}, {what}, got {stages}", param_hint="'--stages'")
    return there


def _given(context: click.Context, option: str) -> bool:
    return context.get_parameter_source(option) is not ParameterSource.DEFAULT


def _choose_model(data: str, model: str | None) -> str:
    if model is None:
        return DEFAULT_MODEL[data]
    if model not in models_for(data):
        raise click.BadParameter(
            f"{model} cannot be trained on {data}; its models are {', '.join(models_for(data))}",
            param_hint="'--model'",
        )
    return model


def _check_data_dir(data: str, path: Path | None) -> None:
    if data == "digits" and path is not None:
        raise click.BadParameter(
            "the digits come with scikit-learn; --data cifar10 and text are read from files",
            param_hint="'--data-dir'",
        )
    if data != "digits" and path is None:
        raise click.BadParameter(
            f"--data {data} is read from files: --data-dir names their folder",
            param_hint="'--data-dir'",
        )


def _check_optimizer(context: click.Context, settings: TrainSettings) -> None:
    """Refuse options that the chosen data and optimizer would leave without effect."""
    if settings.optimizer != "sgd":
        for option in ("momentum", "nesterov"):
            if _given(context, option):
                raise click.BadParameter(
                    f"is SGD's, and the optimizer is {settings.optimizer}: --optimizer sgd",
                    param_hint=f"'--{option}'",
                )
    if settings.augment and settings.data != "cifar10":
        raise click.BadParameter(
            f"varies images, and --data {settings.data} has none", param_hint="'--augment'"
        )


def _make_folder(folder: Path) -> None:
    """Make the folder to write to; found out before training, not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(
            f"cannot make the folder {folder}: {error.strerror}", param_hint="'--out'"
        ) from error


def _in_words(error: StageError | RankError | CheckpointError) -> str:
    cause = error.__cause__
    if cause is None or not isinstance(error, StageError):  # others have the cause in their words
        return str(error)
    return f"{error} ({type(cause).__name__}: {cause})"
