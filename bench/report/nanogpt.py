"""nanoGPT's small setting: losses at each method's best rate, over rates, and over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from table import table

from spectrain_ext.extras import picture
from studies.frontier import Interval
from studies.looks import looks

from . import read
from .quality import Row, rows_of, with_interval

#: Runs of nanoGPT's small setting in six stages.
NANOGPT = "2026-11-27-nanogpt"
#: bfloat16 moments in that setting, and Lion in the study `text`.
MOMENTS = "2026-11-29-moments"
#: By the methods' names in the studies: what the table calls them.
_NAMES = {
    "sync": "`sync`",
    "sync-nadam": "`sync` with NAdam",
    "sync-xgrad": "`sync`, one update of look-ahead (XGrad)",
    "auto": "`auto`",
    "spectrain": "`spectrain`",
    "error-feedback": "`error-feedback`: 2BW with feedback",
    "nesterov-async": "Nesterov's recipe: `pipedream` with NAdam",
    "vanilla": "`vanilla`: PACI",
    "pipedream-2bw": "`pipedream-2bw`",
}
#: Files of other settings, and what they differ in.
_VARIANTS = {"constant": "constant rates", "muon": "Muon", "10x": "ten times the parameters"}
#: By contender: what `clip_norm` is the largest norm of.
_CLIPPED = {
    "auto": "a stage",
    "auto-clip-share": "a stage, norm / root of 6",
    "auto-clip-all": "all stages",
}
_MOMENTS = (100, 200, 400, 600, 1000, 1400, 2000)


def _rows(results: Path, name: str = "cosine") -> list[Row]:
    """Return the rows in the order of their losses, those without delay first."""
    found = rows_of(results, name, NANOGPT)
    return sorted(found, key=lambda row: (row["delay"] > 0, fmean(row["losses"])))


def _at(row: Row, updates: int) -> list[float]:
    """Return the test losses after so many updates, by seed."""
    number = row["tests"].index(updates)
    return [curve[number] for curve in row["curves"]]


def _gap(row: Row, sync: Row, updates: int) -> Interval:
    """Return the loss over that of synchronous training less 1, in per cent, paired by seed."""
    pairs = zip(_at(row, updates), _at(sync, updates), strict=False)
    return Interval.of([100 * (mine / other - 1) for mine, other in pairs])


def losses(results: Path) -> str:
    """Losses of all methods at their best rates."""
    rows = _rows(results)
    sync = _sync(rows)
    half, end = _halves(sync)
    heads = (f">loss, {updates:,} updates" for updates in (half, end))
    lines = [*_published(results, sync), *_lines(rows)]
    return table("|".join(["method", ">delay", ">lr", ">seeds", *heads, ">gap %"]), lines)


def at_the_end(results: Path, *methods: str) -> list[str]:
    """Return the gaps of methods to synchronous training after the last update, in per cent."""
    rows = {row["contender"]: row for row in _rows(results)}
    sync = rows["sync"]
    return [with_interval(_gap(rows[name], sync, sync["tests"][-1])) for name in methods]


def variants(results: Path) -> str:
    """Losses of the same methods at constant rates, with Muon, and of a larger model."""
    lines = [
        [said, *line] for name, said in _VARIANTS.items() for line in _lines(_rows(results, name))
    ]
    heads = ("", "method", ">delay", ">lr", ">seeds", ">loss, half", ">loss, end", ">gap %")
    return table("|".join(heads), lines)


def _lines(rows: Sequence[Row]) -> list[list[str]]:
    sync = _sync(rows)
    half, end = _halves(sync)
    return [
        [
            *(_NAMES[row["contender"]], str(row["delay"]), f"{row['lr']:.4g}"),
            str(len(row["losses"])),
            *(f"{fmean(_at(row, updates)):.3f}" for updates in (half, end)),
            "" if row is sync else with_interval(_gap(row, sync, end)),
        ]
        for row in rows
    ]


def _sync(rows: Sequence[Row]) -> Row:
    return next(row for row in rows if row["contender"] == "sync")


def _halves(row: Row) -> tuple[int, int]:
    """Return the updates of half a run and of all of it."""
    tests = row["tests"]
    return tests[len(tests) // 2 - 1], tests[-1]


def clipping(results: Path) -> str:
    """Losses and clipped updates of `auto` by the norm that is clipped, and by whose it is."""
    rows = rows_of(results, "clip", NANOGPT)
    lines = []
    for norm in sorted({row["clip_norm"] for row in rows}):
        of = {row["contender"]: row for row in rows if row["clip_norm"] == norm}
        cells = [f"{norm:g}", str(min(len(row["losses"]) for row in of.values()))]
        for row in (of[name] for name in _CLIPPED):
            cells += [f"{fmean(row['losses']):.3f}", f"{100 * row['clipped']:.1f}"]
        lines.append(cells)
    heads = (f">{said}: loss|>clipped, %" for said in _CLIPPED.values())
    return table("|".join([">norm", ">seeds", *heads]), lines)


def moments(results: Path) -> str:
    """Losses with bfloat16 moments beside those with float32 ones."""
    rows = {row["contender"]: row for row in rows_of(results, "nanogpt", MOMENTS)}
    lines = []
    for name in ("sync", "auto"):
        wide, narrow = rows[name], rows[f"{name}-bfloat16"]
        gap = _gap(narrow, wide, wide["tests"][-1])
        cells = [f"{wide['lr']:.4g}", str(len(wide["losses"]))]
        cells += [f"{fmean(row['losses']):.3f}" for row in (wide, narrow)]
        lines.append([f"`{name}`", *cells, with_interval(gap)])
    return table("method|>lr|>seeds|>float32: loss|>bfloat16: loss|>gap %", lines)


def lion(results: Path) -> str:
    """Losses of Lion beside AdamW's by delay."""
    lines = []
    for row in sorted(rows_of(results, "text", MOMENTS), key=lambda row: row["delay"]):
        name, _, lion = row["contender"].partition("-")
        gap = Interval(*(100 * row["gap"][x] for x in ("mean", "low", "high")))
        cells = [str(row["delay"]), f"{row['lr']:.4g}", str(len(row["losses"]))]
        cells += [f"{fmean(row['losses']):.3f}", with_interval(gap) if gap.mean else ""]
        lines.append([f"`{name}`", "Lion" if lion else "AdamW", *cells])
    return table("method|optimizer|>delay|>lr|>seeds|>loss|>gap %", lines)


def _published(results: Path, sync: Row) -> list[list[str]]:
    """Return lines of nanoGPT's own code, on our test sequences, and of the published rate."""
    own = read(results, f"{NANOGPT}/published.json")
    rate = f"{own['lr']:.4g}"
    runs = sync["rates"][rate]
    return [
        ["nanoGPT's own code", "0", rate, "1", "", f"{own['loss']:.3f}", ""],
        ["`sync`", "0", rate, str(len(runs)), "", f"{fmean(runs.values()):.3f}", ""],
    ]


def rates(results: Path) -> str:
    """Losses at the end over rates: of the first seed, and means where more seeds have run."""
    rows = _rows(results)
    tried = sorted({float(lr) for row in rows for lr in row["rates"]})
    lines = []
    for row in rows:
        of = {float(lr): runs for lr, runs in row["rates"].items()}
        cells = []
        for lr in tried:
            runs = [*of.get(lr, {}).values()]
            text = f"{fmean(runs):.3f}" if runs else ""
            if len(runs) > 1:
                text += f" ({len(runs)})"
            cells.append(f"**{text}**" if lr == row["lr"] else text)
        lines.append([_NAMES[row["contender"]], *cells])
    return table("|".join(["method", *(f">{lr:.4g}" for lr in tried)]), lines)


def over_training(results: Path, name: str = "cosine") -> str:
    """Gaps to synchronous training, both at their own best rates, by updates made."""
    rows = _rows(results, name)
    sync = _sync(rows)
    lines = [
        [
            _NAMES[row["contender"]],
            *(f"{_gap(row, sync, updates).mean:+.1f}" for updates in _MOMENTS),
        ]
        for row in rows
        if row is not sync
    ]
    return table("|".join(["gap %, after", *(f">{updates:,}" for updates in _MOMENTS)]), lines)


def draw(results: Path, path: Path) -> None:
    """Draw losses over rates, and gaps over training."""
    rows = _rows(results)
    sync = _sync(rows)
    shown = [r for r in rows if not r["contender"].startswith("sync-")]
    look = looks(row["contender"] for row in shown)
    with picture(path, 9.0, 4.0) as figure:
        left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
        for row in shown:
            name = row["contender"]
            line: Mapping[str, Any] = {"color": look[name].color, "linestyle": look[name].dashes}
            of = sorted((float(lr), runs["0"]) for lr, runs in row["rates"].items() if "0" in runs)
            left.plot(*_columns(of), marker="o", markersize=3, **line)
            gaps = [(u, _gap(row, sync, u).mean) for u in sync["tests"]]
            right.plot(*_columns(gaps), label=name, **line)
        left.set_xscale("log", base=2)
        ticks = sorted({float(lr) for row in shown for lr in row["rates"]})
        left.set_xticks(ticks, [f"{lr:.4g}" for lr in ticks], fontsize=8)
        lowest = min(min(_at(row, sync["tests"][-1])) for row in shown)
        left.set_ylim(lowest - 0.02, lowest + 0.3)
        left.set_xlabel("learning rate, first seed")
        left.set_ylabel("test loss after the last update")
        right.axhline(0.0, color="black", linewidth=0.8)
        right.set_xlabel("updates, each method at its best rate")
        right.set_ylabel("test loss above that of sync, %")
        right.legend(frameon=False, fontsize=8)
        for axes in (left, right):
            axes.grid(True, alpha=0.3)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
