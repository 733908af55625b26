"""The picture of a run: bandwidth over size under the roof of the best copy, and shares of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spectrain_ext.extras import require_matplotlib

from .operations import OURS
from .report import Report, Row

# Okabe and Ito's colours, distinguishable with any colour vision.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX*<>hp"


def draw(path: Path, report: Report) -> None:
    """Draw the rows of the first precision in `report` into a PNG or SVG, by the name's ending.

    Left: GB/s over the bytes moved, this package's plans as marks, rivals as small dots, the best
    copy of the same run as the roof. Right: the largest workload, times as shares of the copy.

    Raises:
        ValueError: nothing was measured.
    """
    if not report.rows:
        raise ValueError("nothing was measured that could be drawn")
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14.5, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    rows = [row for row in report.rows if row.precision == report.rows[0].precision]
    _roofline(left, rows)
    _shares(right, rows)
    about = report.environment
    device = about.get("gpu") or f"{about['cpu']}, {about['threads']} thread(s)"
    figure.suptitle(f"{device}; torch {about['torch']}; {about['date'][:10]}", fontsize=10)
    figure.savefig(path, dpi=130)


def _roofline(axes: Any, rows: list[Row]) -> None:
    roof: dict[int, float] = {}
    for row in rows:
        if row.kind == "copy":
            roof[row.bytes] = max(roof.get(row.bytes, 0.0), row.gb_per_s)
    sizes = sorted(roof)
    axes.plot(sizes, [roof[n] for n in sizes], color="black", lw=1.2, label="best copy", zorder=1)
    rivals = [row for row in rows if row.kind == "rival"]
    axes.scatter(
        [r.bytes for r in rivals],
        [r.gb_per_s for r in rivals],
        s=7,
        color="#999999",
        label="rivals",
        zorder=2,
    )
    names = list(dict.fromkeys(row.operation for row in rows))
    for i, name in enumerate(names):
        mine = [r for r in rows if r.operation == name and r.implementation == "Plan"]
        axes.scatter(
            [r.bytes for r in mine],
            [r.gb_per_s for r in mine],
            s=30,
            marker=_MARKERS[i % len(_MARKERS)],
            color=_COLOURS[i % len(_COLOURS)],
            label=name,
            zorder=3,
        )
    axes.set(xscale="log", yscale="log", xlabel="bytes that must move", ylabel="GB/s")
    axes.set_title("bandwidth over size, under the roof of a copy of as many bytes", fontsize=9)
    axes.grid(alpha=0.25, which="major")
    axes.legend(fontsize=7, ncols=2)


def _shares(axes: Any, rows: list[Row]) -> None:
    measured = [row for row in rows if row.kind in ("ours", "rival") and row.share is not None]
    if not measured:
        return
    largest = max(measured, key=lambda row: row.elements)
    rows = [row for row in measured if row.workload == largest.workload]
    names = list(dict.fromkeys(row.operation for row in rows))
    at = {name: len(names) - 1 - i for i, name in enumerate(names)}
    best: dict[str, Row] = {}
    for row in rows:
        slower = row.operation in best and row.median_us >= best[row.operation].median_us
        if row.implementation in OURS and not slower:
            best[row.operation] = row
    rivals = list(dict.fromkeys(r.implementation for r in rows if r.kind == "rival"))
    for i, name in enumerate(rivals):
        shown = [row for row in rows if row.implementation == name]
        axes.scatter(
            [row.share for row in shown],
            [at[row.operation] for row in shown],
            s=26,
            marker=_MARKERS[1 + i % (len(_MARKERS) - 1)],
            color=_COLOURS[1 + i % (len(_COLOURS) - 1)],
            alpha=0.75,
            label=name,
        )
    axes.scatter(
        [row.share for row in best.values()],
        [at[name] for name in best],
        s=45,
        color=_COLOURS[0],
        label="spectrain_ext",
        zorder=3,
    )
    axes.axvline(1.0, color="black", lw=1.2, label="best copy")
    axes.set_yticks([at[name] for name in names], names, fontsize=8)
    axes.set(xlabel="share of the best copy's bandwidth", xlim=(0, None))
    axes.set_title(f"{largest.workload}: share of the copy (the bytes needed / time)", fontsize=9)
    axes.grid(alpha=0.25, axis="x")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
