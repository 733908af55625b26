"""Compares a study's results with synchronous training: a table, JSON and a picture."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from spectrain_ext.extras import picture
from spectrain_ext.files import finite, replace_file
from spectrain_ext.method import delay_under, phases_of, phases_on
from spectrain_ext.schedule import flushes
from spectrain_ext.tools.commands.options import plain_table

from .contenders import contender
from .delayed import uniform_places
from .looks import looks
from .study import Cell, Curve, rates_tried, runs_of
from .times import Work, measured_work, minibatch_time
from .workload import Maker

_SHARES = (0.5, 0.75, 1.0)  # shares of the updates of synchronous training


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % confidence interval (Student's t), infinite for one seed."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        from scipy.stats import t  # type: ignore[import-untyped]

        mean = statistics.fmean(values)
        if len(values) < 2 or not math.isfinite(mean):
            return cls(mean, -math.inf, math.inf)
        half = t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
        return cls(mean, mean - half, mean + half)


@dataclass(frozen=True)
class Row:
    """One cell at its best learning rate, compared with synchronous training at its own best."""

    contender: str
    stages: int  # N
    microbatches: int  # M
    delay: int  # of stage 0, in updates
    lr: float  # with the lowest loss, or the workload's where rates are not searched
    # Test loss per seed, after as many updates as synchronous training made: the mean over the
    # tests of the last fifth of these updates, or, where rates decay, the last test of the run.
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]  # fraction predicted correctly, averaged in the same way
    gap: Interval  # loss divided by that of synchronous training, minus 1, paired by seed
    # For each share of the updates of synchronous training, the updates needed to reach its lowest
    # test loss within that share, divided by the updates in the share; the median of the seeds,
    # infinite for a seed that never reaches it. None where rates decay.
    updates: Mapping[float, float | None]
    # Simulated time of a minibatch, divided by the time without a bubble. None if no pipeline has
    # these delays.
    time: float | None
    tests: tuple[int, ...]  # updates at which the test loss was taken
    curves: tuple[tuple[float, ...], ...]  # the test losses, per seed
    clipped: float  # mean share of a stage's updates whose gradient was clipped
    rates: Mapping[str, Mapping[str, float]]  # the loss at the end, by rate tried and by seed


def rows_of(
    folder: Path, found: Mapping[Cell, float], seeds: Sequence[int], make: Maker
) -> list[Row]:
    runs = {cell: runs_of(folder, cell, lr, seeds) for cell, lr in found.items()}
    reference = {c.settings.stages: runs[c] for c in found if c.contender == "sync"}
    rows: list[Row] = []
    work: dict[int, Work] = {}
    for cell in found:
        n = cell.settings.stages
        if n not in reference:
            raise ValueError(f"contenders: {n} stages have no 'sync' to be compared with")
        if n not in work:
            work[n] = measured_work(cell.settings, make, n, ["cpu"] * n)
        mine, sync = runs[cell], reference[n]
        end = cell.total if cell.decays else cell.updates
        ends = [_at(curve, end) for curve in mine.values()]
        pairs = [(curve, sync[seed]) for seed, curve in mine.items() if seed in sync]
        rows.append(
            Row(
                cell.contender,
                n,
                cell.microbatches,
                _delay(cell),
                found[cell],
                tuple(loss for loss, _ in ends),
                tuple(accuracy for _, accuracy in ends),
                Interval.of([_at(a, end)[0] / b.loss - 1.0 for a, b in pairs]),
                {share: _updates(cell, pairs, share) for share in _SHARES},
                _time_of(cell, work[n]),
                max((_moments(curve) for curve in mine.values()), key=len),
                tuple(tuple(loss for _, loss, _ in curve.points) for curve in mine.values()),
                statistics.fmean(curve.clipped for curve in mine.values()),
                {
                    f"{lr:.4g}": {str(seed): curve.loss for seed, curve in runs.items()}
                    for lr, runs in rates_tried(folder, cell).items()
                },
            )
        )
    return sorted(rows, key=lambda row: (row.stages, row.delay, row.contender != "sync"))


def _moments(curve: Curve) -> tuple[int, ...]:
    return tuple(update for update, _, _ in curve.points)


def _updates(cell: Cell, pairs: Sequence[tuple[Curve, Curve]], share: float) -> float | None:
    if cell.decays:
        return None
    until = share * cell.updates
    return statistics.median(updates_to(a, least(b, until)) / until for a, b in pairs)


def _at(curve: Curve, updates: int) -> tuple[float, float]:
    for update, loss, accuracy in curve.points:
        if update >= updates:
            return loss, accuracy
    return math.inf, 0.0  # the run diverged earlier


def least(curve: Curve, updates: float) -> float:
    return min(loss for update, loss, _ in curve.points if update <= updates)


def updates_to(curve: Curve, loss: float) -> float:
    """Return the updates to reach a loss, interpolated between two points."""
    last, before = 0, math.inf
    for update, value, _ in curve.points:
        if value <= loss:
            if not math.isfinite(before):
                return update
            return last + (update - last) * (before - loss) / (before - value)
        last, before = update, min(before, value)
    return math.inf


def _time_of(cell: Cell, work: Work) -> float | None:
    """Return the simulated time of a minibatch over the slowest device's work on it.

    Methods that flush use as many microbatches as stages here, as they would in practice. A method
    with two phases changes halfway.
    """
    asked = contender(cell.contender)
    if asked.uniform:
        return None
    times = []
    for phase in phases_of(asked.method):
        each = cell.microbatches // asked.replicas
        parts = cell.settings.stages if flushes(phase.schedule) else each
        time = minibatch_time(replace(phase, then=None), parts, work)
        times.append(time / (work.slowest * phase.chunks))
    return statistics.fmean(times)


def _delay(cell: Cell) -> int:
    """Return the largest delay of a forward in any phase, in updates."""
    asked, n = contender(cell.contender), cell.settings.stages
    if asked.uniform:
        phases = uniform_places(asked.method, n, n - 1)
    else:
        phases = phases_on(asked.method, n, cell.microbatches // asked.replicas)
    return max(delay_under(phase.schedule, place) for phase, places in phases for place in places)


def frontier_table(rows: Sequence[Row]) -> Table:
    table = plain_table(
        f"Against sync, at the learning rates below: means over {len(rows[0].losses)} "
        "seeds; the gap with its 95 % interval; updates to sync's loss at 50, 75 and 100 % of its "
        "updates, relative to sync's (medians); simulated time of a minibatch",
        *("N", "M", "delay", "method", "lr", "test\nloss", "gap %", "updates", "time"),
    )
    for row in rows:
        gap = row.gap
        table.add_row(
            *map(str, (row.stages, row.microbatches, row.delay, row.contender)),
            f"{row.lr:.3g}",
            f"{statistics.fmean(row.losses):.4f}",
            "-"
            if row.contender == "sync"
            else f"{100 * gap.mean:+.2f} ± {100 * (gap.high - gap.mean):.2f}",
            " ".join(_ratio(row.updates[share]) for share in _SHARES),
            _ratio(row.time),
        )
    return table


def _ratio(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.2f}"


def write_rows(path: Path, rows: Iterable[Any], about: Mapping[str, Any]) -> None:
    """Write rows as JSON; numbers that are not finite become null."""
    document = {**about, "rows": [finite(row) for row in rows]}
    replace_file(path, f"{json.dumps(document, indent=1, allow_nan=False)}\n".encode())


def draw_gaps(path: Path, rows: Sequence[Row], title: str) -> None:
    with picture(path, 8.0, 4.8) as figure:
        axes = figure.add_subplot()
        axes.axhline(0.0, color="black", linewidth=1.0)
        names = list(dict.fromkeys(row.contender for row in rows if row.delay))
        for number, (name, look) in enumerate(looks(names).items()):
            mine = sorted((r for r in rows if r.contender == name), key=lambda r: r.delay)
            mine = [row for row in mine if math.isfinite(row.gap.mean)]
            beside = 1.3 ** (number / max(1, len(names) - 1) - 0.5)  # keeps error bars apart
            halves = [100 * (row.gap.high - row.gap.mean) for row in mine]
            axes.errorbar(
                [row.delay * beside for row in mine],
                [100 * row.gap.mean for row in mine],
                [half if math.isfinite(half) else 0.0 for half in halves],
                color=look.color,
                linestyle=look.dashes,
                marker="o",
                markersize=3,
                label=name,
            )
        axes.set_xscale("log", base=2)
        delays = sorted({row.delay for row in rows if row.delay})
        axes.set_xticks(delays, [str(delay) for delay in delays])
        axes.minorticks_off()
        axes.set_yscale("symlog", linthresh=2.0)
        marks = [-5, -2, -1, 0, 1, 2, 5, 10, 20, 50]
        axes.set_yticks(marks, [f"{mark:+d}" if mark else "0" for mark in marks])
        axes.set_xlabel("delay of the first stage, in updates")
        axes.set_ylabel("test loss above synchronous training's, %")
        axes.set_title(title, fontsize=10, parse_math=False)
        axes.grid(True, which="major", alpha=0.3)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
