"""The table that ends a comparison of methods."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from .metric import ACCURACY, Metric, value_text
from .results import MethodResult


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
            value_text(result, result.test_loss, result.test_loss_std, 3),
            f"{result.minibatches_per_second:.0f}",
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
