"""``studies train``: trains several methods on the same data and prints a table and a picture."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from spectrain_ext.cli.options import (
    FEW,
    MANY,
    POSITIVE,
    names,
    numbers,
    own_failures,
    plain_console,
)
from spectrain_ext.extras import require_matplotlib, require_tensorboard
from spectrain_ext.method import find_method

from .builtin import maker_of
from .compare import train_all
from .looks import REFERENCE
from .options import data_dir, finite, workload
from .pipelines import choice, fitting
from .report import Comparison, report
from .settings import ALL, AUTO, DATA_SETS, DEFAULT_METHODS, MODELS, TrainSettings, settle
from .workload import Maker, Workload, stages_in
from .world import OnceToldCommand, World, agreed, joined, logged, told

_COUNT = click.IntRange(0, POSITIVE.max)
_OPTIMIZERS = ("sgd", "adam", "adamw", "nadam")


@click.command(
    cls=OnceToldCommand,
    context_settings={"show_default": True},
    epilog="Defaults that are not shown depend on --data, --model and --quick; results.json "
    "records the values used. Finished runs are kept in --out: the same command with the "
    "same --out resumes an interrupted comparison and trains added seeds or methods.",
)
@click.option(
    "--data",
    type=click.Choice(DATA_SETS),
    help="The data set; digits come with scikit-learn, the others are read from --data-dir.  "
    "[default: digits]",
)
@data_dir
@workload
@click.option(
    "--model",
    type=click.Choice(MODELS),
    help="The model.  [default: residual-mlp for digits, resnet for cifar10, gpt for text]",
)
@click.option(
    "--stages",
    type=FEW,
    help="Number of stages; under torchrun the number of processes.  "
    f"[default: {TrainSettings.stages}]",
)
@click.option(
    "--method",
    "-m",
    "methods",
    multiple=True,
    metavar="NAME",
    callback=names,
    help="A method, or several with commas, or all; may be repeated. module:NAME is your own "
    "method or a function that returns it, from the working directory or PYTHONPATH.  "
    f"[default: {', '.join(DEFAULT_METHODS)}]",
)
@click.option(
    "--devices",
    default="cpu",
    callback=names,
    metavar="NAMES",
    help="One device, or several with commas (cuda:0,cuda:1): each gets contiguous stages. Under "
    "torchrun, cuda is the device of the process's local rank.",
)
@click.option("--seeds", type=FEW, help="Number of seeds, from 0 on.")
@click.option("--seed", type=int, multiple=True, help="Exactly this seed; may be repeated.")
@click.option("--epochs", type=POSITIVE, help="Passes over the training data.")
@click.option("--batch-size", type=POSITIVE, help="Samples of a minibatch.")
@click.option(
    "--microbatches",
    type=FEW,
    help="Microbatches per minibatch.  [default: 1; one per stage for auto, pipedream-2bw, "
    "error-feedback, gpipe, 1f1b]",
)
@click.option(
    "--replicas",
    metavar="NUMBERS",
    callback=numbers(),
    help="Processes per stage under torchrun, one number or one per stage with commas; they share "
    "the microbatches.  [default: 1]",
)
@click.option(
    "--window",
    metavar="WINDOW",
    callback=numbers("classic", "wide"),
    help="Microbatches in flight per stage: classic, wide, a number, or one per stage with "
    "commas.  [default: the method's]",
)
@click.option(
    "--clip-norm",
    type=click.FloatRange(min=0, min_open=True),
    callback=finite,
    help="Largest norm of a stage's gradient.  [default: none, or the method's]",
)
@click.option(
    "--recompute",
    is_flag=True,
    help="Keep only a stage's inputs, and repeat its forward before its backward.",
)
@click.option("--width", type=MANY, help="Width of the model.")
@click.option(
    "--depth",
    type=FEW,
    help="Blocks of the model; 11, 13, 16, 19 for vgg16, 18 or more for resnet, layers for snn.",
)
@click.option("--context", type=MANY, help="Characters of text in a sequence.")
@click.option("--train-samples", type=POSITIVE, help="Number of training samples.")
@click.option("--test-samples", type=POSITIVE, help="Number of test samples.")
@click.option("--augment", is_flag=True, help="Shift and mirror training images at random.")
@click.option(
    "--optimizer",
    type=click.Choice(_OPTIMIZERS),
    help="The optimizer.  [default: adamw for gpt, adam for inception-v4 with --quick, else sgd]",
)
@click.option("--lr", type=float, callback=finite, help="Learning rate.")
@click.option("--momentum", type=float, callback=finite, help="Momentum of SGD.  [default: 0.9]")
@click.option(
    "--weight-decay",
    type=float,
    callback=finite,
    help="L2 penalty; for adamw and nadam decoupled weight decay.",
)
@click.option("--nesterov", is_flag=True, help="Use Nesterov momentum with SGD.")
@click.option(
    "--lr-schedule",
    type=click.Choice(["constant", "cosine"]),
    help="Learning rate after --warmup: constant, or falling as a half cosine to 0.",
)
@click.option("--warmup", type=_COUNT, help="Updates over which the learning rate rises.")
@click.option("--threads", type=FEW, default=1, help="CPU threads; small models run best with one.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for results.json, pictures and timelines.  [default: runs/train-<date>-<time>]",
)
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for decoded images.  [default: data-cache next to --out]",
)
@click.option(
    "--checkpoint-every",
    type=POSITIVE,
    metavar="MINIBATCHES",
    help="Drain and save every so many minibatches, to resume after an interruption. Needs --out.",
)
@click.option(
    "--checkpoint-seconds",
    type=click.FloatRange(min=0, min_open=True),
    callback=finite,
    help="Drain and save every so many seconds; results then depend on the clock.",
)
@click.option("--metrics", is_flag=True, help="Write every stage's metrics to metrics.jsonl.")
@click.option(
    "--tensorboard",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the metrics of --metrics for TensorBoard into this folder.",
)
@click.option("--verbose", "-v", is_flag=True, help="Show the log.")
@click.option("--quick", is_flag=True, help="Sizes that take minutes at most, and one seed.")
def train(
    out: Path | None,
    cache_dir: Path | None,
    metrics: bool,
    tensorboard: Path | None,
    verbose: bool,
    quick: bool,
    seed: Sequence[int],
    **asked: Any,
) -> None:
    """Train a pipeline with several methods and compare them.

    All methods start from the same weights and train on the same minibatches with the same
    settings.
    """
    world = World.of_environment()
    console = plain_console(quiet=not world.first)
    asked["seeds"] = seed or asked["seeds"]
    cuda = any("cuda" in name for name in asked["devices"])
    with logged(verbose, console, world), joined(world, cuda):
        with agreed(world):
            settings = settle(asked, world, quick=quick)
            if settings.keeps_checkpoints and out is None:
                raise click.UsageError(
                    "checkpoints need --out: there the same command finds them again"
                )
            require_matplotlib()
            if tensorboard is not None:
                require_tensorboard()
            with own_failures(*([settings.workload] if settings.workload else [])):
                settings, left_out = fitting(settings, leave_out=ALL in asked["methods"])
        if AUTO in settings.methods:
            console.print(choice(settings), soft_wrap=True)
        given = str(out or Path("runs") / time.strftime("train-%Y%m%d-%H%M%S"))
        folder = Path(world.tell(given)[0])
        make, first = _load(settings, cache_dir or folder.parent / "data-cache", world)
        for name, reason in left_out.items():
            console.print(Text.assemble("Left out: ", (name, "bold"), f" ({reason})"))
        with agreed(world):
            if world.first:
                _make_folder(folder)
        written = folder / "metrics.jsonl" if metrics else None
        wanted = Comparison(settings, make, first, folder, console, world, written, tensorboard)
        with told(world, console, folder):
            runs = train_all(wanted)
        if world.first:
            report(wanted, runs, left_out)


def _load(settings: TrainSettings, cache: Path, world: World) -> tuple[Maker, Workload]:
    """Read the data on every rank, first on one rank of each machine, and build the model once."""
    found = None
    for turn in (True, False):
        with agreed(world):
            if (world.local_rank == 0) == turn:
                make = maker_of(settings, cache)
                first = make(settings, find_method(REFERENCE), settings.stages, settings.seeds[0])
                stages_in(first, settings.stages)
                found = make, first
    assert found is not None
    return found


def _make_folder(folder: Path) -> None:
    """Create the output folder, so that errors appear before training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(
            f"cannot make the folder {folder}: {error.strerror}", param_hint="'--out'"
        ) from error
