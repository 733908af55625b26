"""Reports a comparison: a table, pictures of losses and timelines, and a JSON file."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spectrain_ext._C import build_info
from spectrain_ext.tools.commands.options import method_of

from .looks import looks
from .pictures import draw_losses, draw_losses_over_time
from .results import (
    ACCURACY,
    METRICS,
    MethodResult,
    Metric,
    Run,
    in_words,
    summarize,
    write_results,
)
from .settings import TrainSettings, stages_of
from .times import draw_methods_together, relative_times
from .workload import Maker, Workload

# Every run records method and seed, and does not depend on the location of the data.
_NOT_OF_A_RUN = ("methods", "seeds", "data_dir")


@dataclass(frozen=True)
class Comparison:
    """What ``studies train`` was asked for."""

    settings: TrainSettings
    make: Maker
    first: Workload  # from ``make``
    folder: Path
    console: Console


def describe(settings: TrainSettings, workload: Workload) -> dict[str, object]:
    """Return what a run depends on apart from method and seed: settings and data."""
    values = dataclasses.asdict(settings)
    return {
        **{name: value for name, value in values.items() if name not in _NOT_OF_A_RUN},
        **workload.about,
    }


def versions() -> dict[str, str]:
    return {
        "spectrain_ext": build_info()["version"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }


def report(asked: Comparison, runs: Sequence[Run], left_out: Mapping[str, str]) -> None:
    """Write results.json, the pictures and the timelines, and print the table."""
    settings, first, folder = asked.settings, asked.first, asked.folder
    results = summarize(runs)
    about = describe(settings, first)
    about |= {"methods": settings.methods, "seeds": settings.seeds}
    if left_out:
        about["left_out"] = dict(left_out)
    times = relative_times(settings, asked.make)
    write_results(
        folder / "results.json", results, settings=about, versions=versions(), times=times
    )
    seeds, metric = len(settings.seeds), METRICS[first.judged]
    shown = f"median and range of {seeds} seeds" if seeds > 1 else "1 seed"
    title = f"{first.name}, {_setting(settings)}; {shown}"
    half = max(1, len(first.train) // 2)
    draw_losses(folder / "losses.png", results, title=title, window=half, metric=metric)
    draw_losses_over_time(
        folder / "losses-over-time.png", results, times, title=title, window=half, metric=metric
    )
    # methods that train the uncut model have no pipeline timeline
    found = [method_of(name) for name in settings.methods]
    drawn = [method for method in found if stages_of(method, settings) == settings.stages]
    parts = settings.microbatches
    if drawn:
        look = looks(method.name for method in found)
        colored = [(method, look[method.name].color) for method in drawn]
        draw_methods_together(folder / "timelines.png", colored, settings.stages, parts)
    asked.console.print(comparison_table(results, first.about.get("test_samples"), metric))
    for told in (
        f"losses: {folder / 'losses.png'}, {folder / 'losses-over-time.png'}",
        f"timelines: {folder / 'timelines.png'}",
        f"numbers: {folder / 'results.json'}",
    ):
        asked.console.print(told, soft_wrap=True)


def _setting(settings: TrainSettings) -> str:
    if settings.workload is not None:
        return f"{settings.workload} in {settings.stages} stages"
    return (
        f"{settings.model} in {settings.stages} stages, batch {settings.batch_size}, "
        f"{settings.optimizer}, lr {settings.lr:g}"
    )


def comparison_table(
    results: Sequence[MethodResult], test_samples: int | None, metric: Metric = ACCURACY
) -> Table:
    """Return one row per method; with several seeds, mean and standard deviation."""
    seeds = len(results[0].runs) if results else 0
    several = f"{seeds} seed{'s' * (seeds != 1)}"
    table = Table(
        title=f"Same initial weights, minibatches and settings; {several}",
        title_justify="left",
        caption=_caption(seeds, test_samples, metric),
        caption_justify="left",
    )
    table.add_column("method", style="bold", no_wrap=True)
    # several lines each, so that five columns fit an 80-column terminal
    unit = metric.loss_unit.replace(" per ", "\nper ")
    others = (f"test loss\n{unit}", "mini-\nbatches/s", "weight versions\npeak KiB")
    for heading in (metric.heading, *others):
        table.add_column(heading, justify="right", no_wrap=True)
    best = metric.best(results)
    for result in results:
        style = "bold green" if metric.mean(result) == best else ""
        table.add_row(
            Text(result.method),
            Text(metric.text(result), style=style),
            in_words(result, "test_loss", 3),
            f"{result.mean('minibatches_per_second'):.0f}",
            f"{result.weight_version_bytes / 1024:.0f}",
        )
    return table


def _caption(seeds: int, test_samples: int | None, metric: Metric) -> str:
    sentences = [
        "One process runs all stages in turn, so minibatches/s does not compare throughput: it "
        "shows the cost of a method, not the gain of its overlap on several devices."
    ]
    if metric is ACCURACY and test_samples is not None:
        sentences.append(f"One test sample is {100 / test_samples:.1g} points of accuracy.")
    sentences.append(
        "Mean ± standard deviation."
        if seeds > 1
        else "A single seed says little: --seeds 5 shows the spread."
    )
    return " ".join(sentences)
