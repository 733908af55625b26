"""The picture of training losses: a smoothed line per method, a band for its seeds."""

import math
from collections.abc import Sequence
from pathlib import Path

from spectrain_ext.extras import require_matplotlib

from .metric import ACCURACY, Metric
from .results import MethodResult

# Okabe and Ito's colours, distinguishable with any colour vision; dashes tell the lines apart in
# print as well, and lines of the same colour. The reference is black.
_REFERENCE = ("#000000", "solid")
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
        color, dashes = _REFERENCE if reference else _line(number)
        number += not reference
        smoothed = [_trailing_mean(run.losses, window) for run in result.runs]
        columns = [sorted(column) for column in zip(*smoothed, strict=True)]
        updates = range(1, len(columns) + 1)
        axes.plot(
            updates,
            [_median(column) for column in columns],
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


def _line(number: int) -> tuple[str, str | tuple[int, tuple[float, ...]]]:
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


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
