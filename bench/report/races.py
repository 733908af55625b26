"""Methods of the study against `1f1b`: updates to a loss times the time of an update."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .frontier import STUDY

SHARES = (0.5, 0.75, 1.0)  # of synchronous training's updates
METHODS = ("auto", "spectrain", "spectrain-stash", "pipedream", "pipedream-2bw", "vanilla")
WORKLOADS = ("text", "digits")


@dataclass(frozen=True)
class Race:
    """A method of the study beside synchronous training with a flush, as `1f1b` runs it.

    Attributes:
        gap: of the loss after as many updates, less 1: low, mean and high.
        updates: to synchronous training's losses, over its own; by share.
        beyond: of which shares only a lower bound is known: as many updates were not enough.
        bubble: of `1f1b` with M = N, over the slowest stage's work on a minibatch.
        time: of a minibatch, over that of `1f1b` with M = N.
    """

    workload: str
    stages: int
    method: str
    microbatches: int
    delay: int
    seeds: int
    gap: tuple[float, float, float]
    updates: dict[float, float]
    beyond: frozenset[float]
    bubble: float
    time: float

    def to_loss(self, share: float) -> float:
        """Time to the loss, over that of `1f1b`."""
        return self.updates[share] * self.time

    def shown(self, share: float) -> str:
        return f"{'> ' if share in self.beyond else ''}{self.to_loss(share):.2f}"

    def won(self, share: float) -> bool:
        """The loss was reached, and sooner."""
        return share not in self.beyond and self.to_loss(share) < 1.0

    def lost(self, share: float) -> bool:
        return self.to_loss(share) >= 1.0

    @property
    def idle(self) -> float:
        """What a flush of `1f1b` leaves every stage idle for, in microbatches.

        It is the same for all M: a minibatch takes (1 + idle/M) times its slowest stage's work.
        """
        return self.stages * self.bubble

    def even(self, share: float, idle: float) -> str:
        """Microbatches per flush from which on `1f1b` is as quick to the loss."""
        extra = self.updates[share] - 1.0
        if extra <= 0.0:
            return "not known" if share in self.beyond else "none"
        return f"{'at most ' if share in self.beyond else ''}{math.ceil(idle / extra - 1e-9):,}"


def races(results: Path) -> list[Race]:
    """Every row of the study with a method of this package."""
    found = []
    for workload in WORKLOADS:
        rows = json.loads((results / STUDY / f"{workload}.json").read_text())["rows"]
        flush = {row["stages"]: row["time"] for row in rows if row["contender"] == "sync"}
        found += [race(workload, row, flush[row["stages"]]) for row in rows]
    order = {name: place for place, name in enumerate(METHODS)}
    return sorted(
        (r for r in found if r.method in order),
        key=lambda r: (WORKLOADS.index(r.workload), r.stages, r.delay, order[r.method]),
    )


def race(workload: str, row: dict[str, Any], flush: float) -> Race:
    """A row of the study, beside the time of a minibatch with a flush."""
    # how long the runs were that did not get there, of synchronous training's updates
    length = 1.5 if row["microbatches"] < row["stages"] - 1 else 1.0
    ratios = {share: row["updates"][str(share)] for share in SHARES}
    gap = row["gap"]
    return Race(
        workload,
        row["stages"],
        row["contender"],
        row["microbatches"],
        row["delay"],
        len(row["losses"]),
        (gap["low"], gap["mean"], gap["high"]),
        {share: length / share if ratio is None else ratio for share, ratio in ratios.items()},
        frozenset(share for share, ratio in ratios.items() if ratio is None),
        flush - 1.0,
        row["time"] / flush,
    )
