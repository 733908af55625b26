"""What a comparison ends in: a table, a picture of the losses, timelines and numbers."""

import dataclasses
import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spectrain_ext._C import build_info
from spectrain_ext.extras import require_matplotlib
from spectrain_ext.timelines.method_timeline import draw_method_timelines

from .data.batches import count_batches
from .data.split import Split
from .imported import method_of
from .results import MethodResult, Run, summarize, write_results
from .settings import TrainSettings, stages_of
from .world import World

# Okabe and Ito's colours, distinguishable with any colour vision; dashes tell the lines apart in
# print as well, and lines of the same colour. The reference is black.
REFERENCE = ("#000000", "solid")
_COLORS = ("#D55E00", "#E69F00", "#0072B2", "#56B4E9", "#009E73", "#CC79A7")
_DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = (
    (0, (5, 1.5)),
    (0, (3, 1, 1, 1)),
    "solid",
    (0, (6, 1)),
    (0, (1, 1)),
    (0, (4, 1, 1, 1, 1, 1)),
)
_LEGEND_ROWS = 10
_HIGHEST = 1e3
# A run knows its method and seed, and does not depend on where the data lay.
_NOT_OF_A_RUN = ("methods", "seeds", "data_dir")


@dataclass(frozen=True)
class Metric:
    """What a comparison is judged by.

    Attributes:
        figure: its name in ``Run``.
        scale: what it is multiplied with.
        heading: for a table's column.
        unit: behind a value in running text, "" for none.
        digits: after the point.
        higher_is_better: which way.
        loss_unit: the unit of losses.
    """

    figure: str
    scale: int
    heading: str
    unit: str
    digits: int
    higher_is_better: bool
    loss_unit: str

    def mean(self, result: MethodResult) -> float:
        """Over the seeds, in the unit of the heading."""
        return self.scale * result.mean(self.figure)

    def text(self, result: MethodResult) -> str:
        """Mean, and deviation where there are several seeds; or how many of them diverged."""
        return _text(result, self.figure, self.digits, self.scale)

    def best(self, results: Sequence[MethodResult]) -> float | None:
        """The best mean of several methods; the reference, which overlaps nothing, is no rival."""
        means = [self.mean(result) for result in results if result.method != "sync"]
        finite = [mean for mean in means if math.isfinite(mean)]
        if len(means) < 2 or not finite:
            return None
        return max(finite) if self.higher_is_better else min(finite)


def _text(result: MethodResult, figure: str, digits: int, scale: int = 1) -> str:
    """``mean ± deviation``; or, for a mean that is not finite, how many seeds diverged."""
    several = len(result.runs) > 1
    mean = scale * result.mean(figure)
    if not math.isfinite(mean):
        diverged = sum(not math.isfinite(run.test_loss) for run in result.runs)
        return f"{diverged} of {len(result.runs)} diverged" if several else "diverged"
    deviation = f" ± {scale * result.deviation(figure):.{digits}f}" if several else ""
    return f"{mean:.{digits}f}{deviation}"


ACCURACY = Metric(
    figure="test_accuracy",
    scale=100,
    heading="test\naccuracy %",
    unit=" %",
    digits=1,
    higher_is_better=True,
    loss_unit="nats",
)
PERPLEXITY = Metric(
    figure="perplexity",
    scale=1,
    heading="test\nperplexity",
    unit=" perplexity",
    digits=2,
    higher_is_better=False,
    loss_unit="nats per character",
)


def report(
    folder: Path,
    settings: TrainSettings,
    data: Split,
    runs: Sequence[Run],
    left_out: Mapping[str, str],
    console: Console,
    world: World,
) -> None:
    """Write results.json, losses.png and the methods' timelines, and print the table."""
    results = summarize(runs)
    per_epoch = count_batches(len(data.train_inputs), settings.batch_size, 1)
    seeds = len(settings.seeds)
    metric = PERPLEXITY if data.kind == "text" else ACCURACY
    about = describe(settings, data, world)
    about |= {"methods": settings.methods, "seeds": settings.seeds}
    if left_out:
        about["left_out"] = dict(left_out)
    write_results(folder / "results.json", results, settings=about, versions=versions())
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
    found = [method_of(name) for name in settings.methods]
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


def comparison_table(
    results: Sequence[MethodResult],
    *,
    test_samples: int,
    metric: Metric = ACCURACY,
    processes: Sequence[int] = (),
) -> Table:
    """Return one row per method; with several seeds, mean and standard deviation.

    ``test_samples`` says what a single test sample is worth in the accuracy column, ``processes``
    how many each stage had; none: one had all of them.
    """
    seeds = len(results[0].runs) if results else 0
    table = Table(
        title=f"Same initial weights, minibatches and settings; {_plural(seeds)}",
        title_justify="left",
        caption=_caption(seeds, test_samples, metric, processes),
        caption_justify="left",
    )
    table.add_column("method", style="bold", no_wrap=True)
    # several lines each, so that five columns fit into a terminal of 80
    unit = metric.loss_unit.replace(" per ", "\nper ")
    for heading in (
        metric.heading,
        f"test loss\n{unit}",
        "mini-\nbatches/s",
        "weight versions\npeak KiB",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    best = metric.best(results)
    for result in results:
        table.add_row(
            Text(result.method),
            Text(
                metric.text(result),
                style="bold green" if metric.mean(result) == best else "",
            ),
            _text(result, "test_loss", 3),
            f"{result.mean('minibatches_per_second'):.0f}",
            f"{result.weight_version_bytes / 1024:.0f}",
        )
    return table


def _caption(seeds: int, test_samples: int, metric: Metric, processes: Sequence[int]) -> str:
    share = "a stage each"
    if max(processes, default=1) > 1:
        share = f"{' + '.join(map(str, processes))} for the stages"
    sentences = [
        "One process runs all stages in turn, so minibatches/s is no throughput comparison: it is "
        "what a method costs, not what its overlap gains on several devices."
        if sum(processes) <= 1
        else f"{sum(processes)} processes, {share}: minibatches/s is rank 0's. A method without "
        "stages ran on rank 0 alone.",
    ]
    if metric is ACCURACY:
        sentences.append(f"One test sample is {100 / test_samples:.1g} points of accuracy.")
    sentences.append(
        f"Mean ± standard deviation over {_plural(seeds)}."
        if seeds > 1
        else "A single seed says little: --seeds 5 shows the spread."
    )
    return " ".join(sentences)


def _plural(seeds: int) -> str:
    return f"{seeds} seed" if seeds == 1 else f"{seeds} seeds"


def draw_losses(
    path: Path,
    results: Sequence[MethodResult],
    *,
    title: str,
    window: int,
    metric: Metric = ACCURACY,
) -> None:
    """Draw the training losses of ``results`` over updates into a PNG at ``path``.

    Each run is smoothed by a trailing mean over ``window`` minibatches. A line is the median of the
    seeds, its band their whole range. Losses count as 1,000 when they are above it or not finite.
    The legend has the methods' ``metric``.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    # no pyplot: it would choose a backend and keep global state
    figure = Figure(figsize=(8.0, 4.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    number = 0
    for result in results:
        reference = result.method == "sync"
        color, dashes = REFERENCE if reference else line_of(number)
        number += not reference
        smoothed = [_trailing_mean(run.losses, window) for run in result.runs]
        columns = [sorted(column) for column in zip(*smoothed, strict=True)]
        updates = range(1, len(columns) + 1)
        axes.plot(
            updates,
            [statistics.median(column) for column in columns],
            color=color,
            linestyle=dashes,
            linewidth=2.4 if reference else 1.8,
            zorder=4 if reference else 3,
            label=f"{result.method}{' (reference)' if reference else ''}: "
            f"{metric.text(result)}{metric.unit}",
        )
        if len(result.runs) > 1:
            axes.fill_between(
                updates,
                [column[0] for column in columns],
                [column[-1] for column in columns],
                color=color,
                alpha=0.1,
                linewidth=0,
            )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("minibatch (one update of every stage each)")
    axes.set_ylabel(f"training loss ({metric.loss_unit}),\nmean of the last {window} minibatches")
    axes.set_title(title, fontsize=10, parse_math=False)
    axes.grid(True, which="major", alpha=0.3)
    axes.margins(x=0.01)
    axes.legend(
        frameon=False,
        fontsize=9 if len(results) <= _LEGEND_ROWS else 7,
        ncols=-(-len(results) // _LEGEND_ROWS) or 1,
        title="at the end, on test data",
        title_fontsize=9,
    )
    figure.savefig(path)


def line_of(number: int) -> tuple[str, str | tuple[int, tuple[float, ...]]]:
    """Colour and dashes of a method; the first 36 are all different."""
    turn, color = divmod(number, len(_COLORS))
    return _COLORS[color], _DASHES[(color + turn) % len(_DASHES)]


def _trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last ``window`` values at every position; of all so far at the beginning."""
    finite = [min(value, _HIGHEST) if math.isfinite(value) else _HIGHEST for value in values]
    means = []
    total = 0.0
    for position, value in enumerate(finite):
        total += value
        if position >= window:
            total -= finite[position - window]
        means.append(max(total, 0.0) / min(position + 1, window))
    return means


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


def versions() -> dict[str, str]:
    """What else it depends on."""
    return {
        "spectrain_ext": build_info()["version"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }
