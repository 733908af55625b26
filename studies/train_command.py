"""``studies train``: trains several methods on the same data and prints a table and a picture."""

import time
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from spectrain_ext.errors import StageError
from spectrain_ext.extras import require_matplotlib
from spectrain_ext.method import find_method
from spectrain_ext.tools.commands.options import (
    FEW,
    MANY,
    POSITIVE,
    names,
    own_failures,
    plain_console,
)

from .builtin import maker_of
from .compare import train_all
from .looks import REFERENCE
from .options import command_errors, data_dir, finite, workload
from .pipelines import choice, fitting
from .report import Comparison, report
from .settings import ALL, AUTO, DATA_SETS, DEFAULT_METHODS, MODELS, STAGES, settle
from .workload import stages_in

_COUNT = click.IntRange(0, POSITIVE.max)
_OPTIMIZERS = ("sgd", "adam", "adamw", "nadam")


@click.command(
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
@click.option("--stages", type=FEW, default=STAGES, help="Number of stages.")
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
    help="One device, or several with commas (cuda:0,cuda:1): each gets contiguous stages.",
)
@click.option("--seeds", type=FEW, help="Number of seeds, from 0 on.")
@click.option("--epochs", type=POSITIVE, help="Passes over the training data.")
@click.option("--batch-size", type=POSITIVE, help="Samples of a minibatch.")
@click.option(
    "--microbatches",
    type=FEW,
    help="Microbatches per minibatch.  [default: 1; one per stage for auto, pipedream-2bw, "
    "error-feedback, gpipe, 1f1b]",
)
@click.option(
    "--clip-norm",
    type=click.FloatRange(min=0, min_open=True),
    callback=finite,
    help="Largest norm of a stage's gradient.  [default: none, or the method's]",
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
    help="Folder for results.json and pictures.  [default: runs/train-<date>-<time>]",
)
@click.option("--quick", is_flag=True, help="Sizes that take minutes at most, and one seed.")
def train(out: Path | None, quick: bool, **asked: Any) -> None:
    """Train a pipeline with several methods and compare them.

    All methods start from the same weights and train on the same minibatches with the same
    settings.
    """
    console = plain_console()
    folder = out or Path("runs") / time.strftime("train-%Y%m%d-%H%M%S")
    with command_errors():
        settings = settle(asked, quick=quick)
        require_matplotlib()
        with own_failures(*([settings.workload] if settings.workload else [])):
            settings, left_out = fitting(settings, leave_out=ALL in asked["methods"])
    if AUTO in settings.methods:
        console.print(choice(settings), soft_wrap=True)
    with command_errors():
        make = maker_of(settings, folder.parent / "data-cache")
        first = make(settings, find_method(REFERENCE), settings.stages, settings.seeds[0])
        stages_in(first, settings.stages)
    for name, reason in left_out.items():
        console.print(Text.assemble("Left out: ", (name, "bold"), f" ({reason})"))
    try:  # before training
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(
            f"cannot make the folder {folder}: {error.strerror}", param_hint="'--out'"
        ) from error
    wanted = Comparison(settings, make, first, folder, console)
    try:
        runs = train_all(wanted)
    except StageError as error:
        cause = error.__cause__
        because = "" if cause is None else f" ({type(cause).__name__}: {cause})"
        raise click.ClickException(f"{error}{because}") from error
    except KeyboardInterrupt:
        console.print(f"Finished runs are kept. To go on: the same again, with --out {folder}")
        raise
    report(wanted, runs, left_out)
