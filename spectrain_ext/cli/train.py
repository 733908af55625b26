"""``spectrain train``: every method on the same data, then a table and a picture."""

import dataclasses
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from spectrain_ext import StageError, __version__
from spectrain_ext.cli.compare import build_pipeline, train_once
from spectrain_ext.cli.settings import TrainSettings, choose_devices, choose_methods, finite
from spectrain_ext.data import Split, count_batches, load_digits
from spectrain_ext.report import (
    MethodResult,
    Run,
    comparison_table,
    draw_losses,
    require_matplotlib,
    summarize,
    write_results,
)

_POSITIVE = click.IntRange(min=1)


@click.command(context_settings={"show_default": True})
@click.option("--stages", type=_POSITIVE, default=8, help="Parts the model is cut into.")
@click.option(
    "--method",
    "-m",
    "method_names",
    multiple=True,
    metavar="NAME",
    help="A method, or several with commas; may be repeated.  [default: the five best known]",
)
@click.option(
    "--devices",
    default="cpu",
    help="One device, or several with commas (cuda:0,cuda:1): each takes a run of stages.",
)
@click.option("--seeds", type=_POSITIVE, default=5, help="Train with seeds 0 to this, less one.")
@click.option("--seed", "seed_list", type=int, multiple=True, help="Exactly this seed; repeatable.")
@click.option("--epochs", type=_POSITIVE, default=6)
@click.option("--batch-size", type=_POSITIVE, default=16)
@click.option("--microbatches", type=_POSITIVE, default=1, help="Parts of every minibatch.")
@click.option("--width", type=_POSITIVE, default=64, help="Width of the residual MLP.")
@click.option("--lr", type=float, callback=finite, default=0.05)
@click.option("--momentum", type=float, callback=finite, default=0.9)
@click.option("--weight-decay", type=float, callback=finite, default=0.0)
@click.option("--nesterov", is_flag=True, help="Nesterov momentum.")
@click.option("--threads", type=_POSITIVE, default=1, help="CPU threads; the model is small.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for results.json and losses.png.  [default: runs/train-<date>-<time>]",
)
@click.option("--quick", is_flag=True, help="One epoch and one seed, unless asked otherwise.")
@click.pass_context
def train(
    context: click.Context,
    /,
    method_names: Sequence[str],
    devices: str,
    seeds: int,
    seed_list: Sequence[int],
    out: Path | None,
    quick: bool,
    **options: Any,
) -> None:
    """Train a pipeline with every method and compare them.

    The data are scikit-learn's digits, the model a residual MLP. All methods start from the same
    weights and see the same minibatches under the same settings.
    """
    if quick:
        if context.get_parameter_source("epochs") is ParameterSource.DEFAULT:
            options["epochs"] = 1
        if context.get_parameter_source("seeds") is ParameterSource.DEFAULT:
            seeds = 1
    settings = TrainSettings(
        methods=choose_methods(method_names),
        seeds=tuple(dict.fromkeys(seed_list)) or tuple(range(seeds)),
        devices=choose_devices(devices, options["stages"]),
        **options,
    )
    try:
        require_matplotlib()
        data = load_digits()
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from error
    _check_methods(settings, data)
    folder = _make_folder(out)
    console = Console()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        results = summarize(_train_all(settings, data, console))
    except StageError as error:
        raise click.ClickException(_with_cause(error)) from error
    finally:
        torch.set_num_threads(threads_before)
    _report(folder, settings, data, results, console)


def _check_methods(settings: TrainSettings, data: Split) -> None:
    """Find out before training what would stop it in the middle."""
    for method in settings.methods:
        try:
            build_pipeline(settings, method, settings.seeds[0], data).release()
        except ValueError as error:
            raise click.ClickException(f"method {method}: {error}") from error


def _train_all(settings: TrainSettings, data: Split, console: Console) -> list[Run]:
    per_run = count_batches(len(data.train_inputs), settings.batch_size, settings.epochs)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    runs = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=per_run * len(settings.seeds) * len(settings.methods))
        # seeds outside: when it is interrupted or watched, the methods advance together
        for number, seed in enumerate(settings.seeds, start=1):
            for method in settings.methods:
                label = f"seed {number}/{len(settings.seeds)} [bold]{method}[/]"
                progress.update(task, description=label)
                runs.append(
                    train_once(settings, method, seed, data, lambda: progress.advance(task))
                )
    return runs


def _report(
    folder: Path,
    settings: TrainSettings,
    data: Split,
    results: Sequence[MethodResult],
    console: Console,
) -> None:
    per_epoch = count_batches(len(data.train_inputs), settings.batch_size, 1)
    seeds = len(settings.seeds)
    write_results(
        folder / "results.json",
        results,
        settings={
            "data": data.name,
            "train_samples": len(data.train_inputs),
            "test_samples": len(data.test_inputs),
            "model": "residual-mlp",
            "optimizer": "SGD",
            **dataclasses.asdict(settings),
        },
        versions=_versions(),
    )
    draw_losses(
        folder / "losses.png",
        results,
        title=f"{data.name}, residual MLP in {settings.stages} stages, batch "
        f"{settings.batch_size}, lr {settings.lr:g}, momentum {settings.momentum:g}; "
        f"{f'median and range of {seeds} seeds' if seeds > 1 else '1 seed'}",
        window=max(1, per_epoch // 2),
    )
    console.print(comparison_table(results, test_samples=len(data.test_inputs)))
    console.print(f"losses:  {folder / 'losses.png'}", highlight=False, soft_wrap=True)
    console.print(f"numbers: {folder / 'results.json'}", highlight=False, soft_wrap=True)


def _make_folder(out: Path | None) -> Path:
    """Make and return the folder to write to; found out before training, not after it."""
    folder = out or Path("runs") / time.strftime("train-%Y%m%d-%H%M%S")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(
            f"cannot make the folder {folder}: {error.strerror}", param_hint="'--out'"
        ) from error
    return folder


def _versions() -> dict[str, str]:
    return {
        "spectrain_ext": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }


def _with_cause(error: BaseException) -> str:
    cause = error.__cause__
    return f"{error} ({type(cause).__name__}: {cause})" if cause else str(error)
