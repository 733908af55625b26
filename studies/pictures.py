"""Draws the training losses of methods over minibatches and over simulated time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from spectrain_ext.extras import picture

from .looks import REFERENCE, Look, looks
from .results import ACCURACY, MethodResult, Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HIGHEST = 1e3
_DIVERGED = 10.0  # multiple of the first loss
_BAND = 0.08  # opacity; six overlapping bands stay distinguishable
# In shares of the axes' height: the distance between labels, and the highest label.
_GAP, _TOP = 0.048, 0.94


class _Line(NamedTuple):
    """A method's smoothed losses: the median of the seeds, and the band around it."""

    result: MethodResult
    look: Look
    median: list[float]
    low: list[float]
    high: list[float]

    def plot(self, axes: Axes, x: Sequence[float]) -> None:
        reference = self.result.method == REFERENCE
        color = self.look.color
        width, order = (1.8, 3) if reference else (1.4, 4)
        axes.plot(
            x, self.median, color=color, linestyle=self.look.dashes, linewidth=width, zorder=order
        )
        if len(self.result.runs) > 1:
            axes.fill_between(x, self.low, self.high, color=color, alpha=_BAND, linewidth=0)


class _Label(NamedTuple):
    """A text beside the picture, and the point that it labels."""

    text: str
    look: Look
    x: float
    y: float


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
    seeds, its band their range. Losses above 1,000 or not finite count as 1,000; the axis ends at
    ten times the first losses. The labels show the methods' ``metric`` in the order in which the
    lines end.
    """
    lines = _lines(results, window)
    labels = []
    for line in lines:
        if line.median:
            text = f"{line.result.method}  {metric.text(line.result)}{metric.unit}"
            labels.append(_Label(text, line.look, len(line.median), line.median[-1]))
    with _picture(path, title, window, metric, labels, "at the end, on test data") as axes:
        for line in lines:
            line.plot(axes, range(1, len(line.median) + 1))
        axes.set_xlabel("minibatch (one update of every stage each)")
        axes.margins(x=0.01)


def draw_losses_over_time(
    path: Path,
    results: Sequence[MethodResult],
    times: Mapping[str, float],
    *,
    title: str,
    window: int,
    metric: Metric = ACCURACY,
) -> None:
    """Draw the losses over simulated time; ``times`` are those of a minibatch, in a common unit."""
    lines = _lines(results, window)
    ends = {line.result.method: len(line.median) * times[line.result.method] for line in lines}
    # A method several times slower than all others is cut off, to leave room for them.
    longest = max(ends.values(), default=1.0)
    second = max((end for end in ends.values() if end < longest), default=longest)
    until = longest if longest < 1.5 * second else 1.08 * second
    labels = []
    for line in lines:
        name, pace = line.result.method, times[line.result.method]
        text = f"{name}  {pace:.2f}"
        seen = len(line.median)
        if ends[name] > until:
            text += f", all {seen} at {ends[name]:,.0f}"
            seen = int(until / pace)
        if seen:
            labels.append(_Label(text, line.look, pace * seen, line.median[seen - 1]))
    heading = "simulated time of a minibatch\n(1: no bubble)"
    with _picture(path, title, window, metric, labels, heading) as axes:
        for line in lines:
            pace = times[line.result.method]
            x = [pace * (i + 1) for i in range(len(line.median))]
            line.plot(axes, x)
            if x and x[-1] <= until:
                axes.plot(x[-1:], line.median[-1:], "o", color=line.look.color, markersize=4)
        axes.set_xlim(0, until)
        axes.set_xlabel(
            "simulated time, with one device per stage\n"
            "(1 is the slowest stage's work on one minibatch; bubbles included)"
        )


def _lines(results: Sequence[MethodResult], window: int) -> list[_Line]:
    found = []
    drawn = looks(result.method for result in results)
    for result in results:
        smoothed = [_trailing_mean(run.losses, window) for run in result.runs]
        columns = [sorted(column) for column in zip(*smoothed, strict=True)]
        median = [statistics.median(column) for column in columns]
        low, high = ([column[end] for column in columns] for end in (0, -1))
        found.append(_Line(result, drawn[result.method], median, low, high))
    return found


@contextmanager
def _picture(
    path: Path, title: str, window: int, metric: Metric, labels: Sequence[_Label], heading: str
) -> Iterator[Axes]:
    with picture(path, 10.0, 5.4) as figure:
        axes = figure.add_subplot()
        yield axes
        axes.set_yscale("log")
        axes.yaxis.get_major_locator().set_params(subs=(1.0, 2.0, 5.0))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.set_ylabel(
            f"training loss ({metric.loss_unit}),\nmean of the last {window} minibatches"
        )
        axes.set_title(title, fontsize=10, parse_math=False, loc="left")
        axes.grid(True, which="major", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        # A diverging run leaves the picture; it does not compress the others.
        first = [float(line.get_ydata()[0]) for line in axes.lines if len(line.get_ydata())]
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, min(top, _DIVERGED * max(first, default=top)))
        _write_labels(axes, labels, heading)


def _write_labels(axes: Axes, labels: Sequence[_Label], heading: str) -> None:
    """Write labels beside the picture where lines end, each with a connecting line."""
    to_axes = axes.transData + axes.transAxes.inverted()
    top = axes.get_ylim()[1]
    labels = [label._replace(y=min(label.y, top)) for label in labels]
    heights = [float(to_axes.transform((label.x, label.y))[1]) for label in labels]
    order = sorted(range(len(labels)), key=lambda number: -heights[number])
    gap = min(_GAP, _TOP / max(1, len(labels)))
    at: dict[int, float] = {}
    above = _TOP + gap
    for rank, number in enumerate(order):
        below = gap * (len(order) - 1 - rank)  # the room needed by the labels below
        at[number] = above = max(below, min(heights[number], above - gap))
    top = max(at.values(), default=_TOP) + gap
    place = 1.035, top - gap / 3
    axes.annotate(
        heading, place, xycoords="axes fraction", va="bottom", fontsize=8, color="#555555"
    )
    for number, label in enumerate(labels):
        color = label.look.color
        axes.annotate(
            label.text,
            xy=(label.x, label.y),
            xytext=(1.035, at[number]),
            textcoords="axes fraction",
            va="center",
            color=color,
            fontsize=9 if gap == _GAP else 7,
            annotation_clip=False,
            arrowprops={
                **{"arrowstyle": "-", "color": color, "alpha": 0.5, "linewidth": 0.7},
                **{"shrinkA": 1, "shrinkB": 0, "relpos": (0.0, 0.5)},
            },
        )


def _trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of the last ``window`` values at every position, or of all so far."""
    finite = [min(value, _HIGHEST) if math.isfinite(value) else _HIGHEST for value in values]
    means = []
    total = 0.0
    for position, value in enumerate(finite):
        total += value
        if position >= window:
            total -= finite[position - window]
        means.append(max(total, 0.0) / min(position + 1, window))
    return means
