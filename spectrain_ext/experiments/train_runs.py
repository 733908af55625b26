"""The runs of ``spectrain train``, one by one, and the report at their end."""

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from spectrain_ext._C import build_info
from spectrain_ext.method import find_method
from spectrain_ext.timelines.method_timeline import draw_method_timelines

from .compare import count_updates, train_once
from .data.batches import count_batches
from .data.split import Split
from .metric import ACCURACY, PERPLEXITY
from .observation import Observation
from .picture import draw_losses
from .results import MethodResult, Run, write_results
from .resuming import forget
from .selection import stages_of
from .settings import TrainSettings
from .store import RunStore
from .table import comparison_table
from .world import World

# A run knows its method and seed, and does not depend on where the data lay.
_NOT_OF_A_RUN = ("methods", "seeds", "data_dir")


class _Rate(ProgressColumn):
    """Minibatches per second, of late."""

    def render(self, task: Task) -> Text:
        """Return the rate, empty as long as it is not known."""
        return Text("" if task.speed is None else f"{task.speed:.0f}/s")


def train_all(
    settings: TrainSettings,
    data: Split,
    folder: Path,
    console: Console,
    world: World,
    observation: Observation,
) -> list[Run]:
    """Train every method with every seed; finished runs are read from ``folder``, new ones kept.

    Returns:
        The runs on rank 0; on others none.

    Raises:
        StageError: training failed inside a stage; the runs before it are kept.
        RankError: another rank failed; likewise.
        CheckpointError: a checkpoint could not be read or written; likewise.
    """
    store = RunStore(folder / "runs", {**describe(settings, data, world), **_versions()})
    per_run = count_updates(settings, data)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
    )
    runs = []
    found = 0
    with Progress(*columns, console=console, disable=not world.first) as progress:
        task = progress.add_task("", total=per_run * len(settings.seeds) * len(settings.methods))
        # seeds outside: when it is interrupted or watched, the methods advance together
        for number, seed in enumerate(settings.seeds, start=1):
            for method in settings.methods:
                label = f"seed {number}/{len(settings.seeds)} [bold]{method}[/]"
                progress.update(task, description=label)
                run = store.find(method, seed) if world.first else None
                checkpoints = folder / "checkpoints" / store.path(method, seed).stem
                if world.tell(run is not None):
                    found += 1
                    progress.advance(task, per_run)
                else:
                    world.renew()
                    checkpoints = Path(world.tell(str(checkpoints)))
                    # with fewer stages than the settings say it has nothing for other ranks to do
                    cut = stages_of(find_method(method), settings) == settings.stages
                    with world.part(cut, f"training with {method}") as part:
                        if part is not None:
                            run = train_once(
                                settings,
                                method,
                                seed,
                                data,
                                lambda count: progress.advance(task, count),
                                part,
                                observation,
                                checkpoints,
                            )
                    if run is not None:
                        store.save(run)
                if run is not None:
                    forget(checkpoints)
                    runs.append(run)
    if found:
        told = f"{found} of {len(runs)} runs were finished before and read from {folder}"
        console.print(told, markup=False)
    return runs


def report(
    folder: Path,
    settings: TrainSettings,
    data: Split,
    results: Sequence[MethodResult],
    left_out: Mapping[str, str],
    console: Console,
    world: World,
) -> None:
    """Write results.json, losses.png and the methods' timelines, and print the table."""
    per_epoch = count_batches(len(data.train_inputs), settings.batch_size, 1)
    seeds = len(settings.seeds)
    metric = PERPLEXITY if data.kind == "text" else ACCURACY
    about = describe(settings, data, world)
    about |= {"methods": settings.methods, "seeds": settings.seeds}
    if left_out:
        about["left_out"] = dict(left_out)
    write_results(folder / "results.json", results, settings=about, versions=_versions())
    draw_losses(
        folder / "losses.png",
        results,
        title=f"{data.name}, {settings.model} in {settings.stages} stages, batch "
        f"{settings.batch_size}, {settings.optimizer}, lr {settings.lr:g}; "
        f"{f'median and range of {seeds} seeds' if seeds > 1 else '1 seed'}",
        window=max(1, per_epoch // 2),
        metric=metric,
    )
    # what trains the uncut model has no timeline of the pipeline
    found = [find_method(name) for name in settings.methods]
    draw_method_timelines(
        folder / "timelines",
        [method for method in found if stages_of(method, settings) == settings.stages],
        settings.stages,
        microbatches=settings.microbatches,
        window=settings.window,
    )
    console.print(
        comparison_table(
            results,
            test_samples=len(data.test_inputs),
            metric=metric,
            processes=world.seats.counts,
        )
    )
    for told in (
        f"losses:  {folder / 'losses.png'}",
        f"timelines: {folder / 'timelines'}",
        f"numbers: {folder / 'results.json'}",
    ):
        console.print(told, highlight=False, markup=False, soft_wrap=True)


def describe(settings: TrainSettings, data: Split, world: World) -> dict[str, object]:
    """What a run depends on besides its method and seed: settings, data, number of processes.

    The last is for its throughput; losses are the same.
    """
    values = dataclasses.asdict(settings)
    return {
        **{name: value for name, value in values.items() if name not in _NOT_OF_A_RUN},
        "processes": world.size,
        "data_name": data.name,
        "data_sha256": data.fingerprint,
        "train_samples": len(data.train_inputs),
        "test_samples": len(data.test_inputs),
    }


def _versions() -> dict[str, str]:
    return {
        "spectrain_ext": build_info()["version"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }
