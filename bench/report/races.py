"""Methods of the study against `1f1b`: updates to a loss times the time of an update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from table import table

from spectrain_ext.extras import picture
from studies.looks import looks

from . import read

#: The study of methods over depths.
STUDY = "2026-11-22-frontier"
SHARES = (0.5, 0.75, 1.0)  # of synchronous training's updates
METHODS = ("auto", "spectrain", "spectrain-stash", "pipedream", "pipedream-2bw", "vanilla")
WORKLOADS = ("text", "digits")


@dataclass(frozen=True)
class Race:
    """A method of the study against `1f1b`: synchronous training with a flush.

    Attributes:
        updates: updates to synchronous training's losses over its own, by share.
        beyond: shares of which only a lower bound is known: the run ended before the loss.
        bubble: of `1f1b` with M = N, over the slowest stage's work on a minibatch.
        time: time of a minibatch, over that of `1f1b` with M = N.
    """

    workload: str
    stages: int
    method: str
    microbatches: int
    delay: int
    updates: dict[float, float]
    beyond: frozenset[float]
    bubble: float
    time: float

    def to_loss(self, share: float) -> float:
        """Return the time to the loss, over that of `1f1b`."""
        return self.updates[share] * self.time

    def shown(self, share: float) -> str:
        return f"{'> ' if share in self.beyond else ''}{self.to_loss(share):.2f}"

    @property
    def idle(self) -> float:
        """How long a flush of `1f1b` leaves every stage idle, in microbatches.

        This is the same for all M: a minibatch takes (1 + idle/M) times its slowest stage's work.
        """
        return self.stages * self.bubble

    def even(self, share: float, idle: float) -> str:
        """Return the microbatches per flush from which on `1f1b` reaches the loss as soon."""
        extra = self.updates[share] - 1.0
        if extra <= 0.0:
            return "not known" if share in self.beyond else "none"
        return f"{'at most ' if share in self.beyond else ''}{math.ceil(idle / extra - 1e-9):,}"


def races(results: Path) -> list[Race]:
    """Return every row of the study with one of `METHODS`."""
    found = []
    for workload in WORKLOADS:
        rows = read(results, f"{STUDY}/{workload}.json")["rows"]
        flush = {row["stages"]: row["time"] for row in rows if row["contender"] == "sync"}
        found += [race(workload, row, flush[row["stages"]]) for row in rows]
    order = {name: place for place, name in enumerate(METHODS)}
    return sorted(
        (r for r in found if r.method in order),
        key=lambda r: (WORKLOADS.index(r.workload), r.stages, r.delay, order[r.method]),
    )


def race(workload: str, row: dict[str, Any], flush: float) -> Race:
    """Compare a row of the study with the time of a minibatch with a flush."""
    # length of the runs that did not reach the loss, in synchronous training's updates
    length = 1.5 if row["microbatches"] < row["stages"] - 1 else 1.0
    ratios = {share: row["updates"][str(share)] for share in SHARES}
    return Race(
        workload,
        row["stages"],
        row["contender"],
        row["microbatches"],
        row["delay"],
        {share: length / share if ratio is None else ratio for share, ratio in ratios.items()},
        frozenset(share for share, ratio in ratios.items() if ratio is None),
        flush - 1.0,
        row["time"] / flush,
    )


def defaults(results: Path) -> list[Race]:
    """Return those of `auto` on the transformer, at most one update late."""
    return [r for r in races(results) if (r.method, r.workload, r.delay) == ("auto", "text", 1)]


def even(results: Path) -> str:
    """Microbatches per flush from which on `1f1b` reaches a loss of `text` as soon as `auto`."""
    lines = [
        [str(r.stages), f"{r.idle:.1f}", *(r.even(share, r.idle) for share in SHARES)]
        for r in defaults(results)
    ]
    heads = (f">{share:.0%} loss" for share in SHARES)
    return table("|".join([">N", ">idle microbatches", *heads]), lines)


def draw(results: Path, path: Path) -> None:
    """Draw the time to two of the losses, by depth; hollow where only a lower bound is known."""
    found = [r for r in races(results) if r.delay == 1]
    places = list(dict.fromkeys((r.workload, r.stages) for r in found))
    look = looks(METHODS)
    with picture(path, 9.0, 3.8) as figure:
        for number, share in enumerate(SHARES[:2]):
            axes = figure.add_subplot(1, 2, number + 1)
            for at, place in enumerate(places):
                beside = [r for r in found if (r.workload, r.stages) == place]
                for index, r in enumerate(beside):
                    axes.plot(
                        at + 0.13 * (index - (len(beside) - 1) / 2),
                        r.to_loss(share),
                        color=look[r.method].color,
                        marker="^" if share in r.beyond else "o",
                        fillstyle="none" if share in r.beyond else "full",
                    )
            axes.axhline(1.0, color="black", linewidth=1.0)
            axes.set_xticks(range(len(places)), [f"{name}\nN = {n}" for name, n in places])
            title = f"to the loss of synchronous training at {share:.0%} of its updates"
            axes.set_title(title, fontsize=9)
            axes.set_ylim(0.4, 1.5)
            axes.grid(True, axis="y", alpha=0.3)
        for method in METHODS:
            axes.plot([], [], "o", color=look[method].color, label=method)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.supylabel("simulated time over that of 1f1b\n(triangle: or more)", fontsize=9)
