"""Blame: what ranks say of themselves, and which of them a wait that was in vain comes down to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import NamedTuple


class Cause(NamedTuple):
    """Which rank failed first, and what is known of it."""

    rank: int
    reason: str

    @staticmethod
    def read(text: bytes) -> Cause | None:
        """What ``json.dumps`` of a cause wrote; None for no text."""
        if not text:
            return None
        rank, reason = json.loads(text)
        return Cause(int(rank), str(reason))


class Beat(NamedTuple):
    """What a rank last said of itself.

    Attributes:
        text: as it was said.
        heard: when this rank heard it, on its own clock.
        doing: its action.
        busy: seconds that it had been in that action.
        waits: the rank that it was waiting for (None: all others), and on which edge; None if it
            was not waiting.
    """

    text: bytes
    heard: float
    doing: str = "starting"
    busy: float = 0.0
    waits: tuple[int | None, str] | None = None

    @staticmethod
    def read(text: bytes, heard: float) -> Beat:
        said = json.loads(text)
        waits = None
        if said["waits"] is not None:
            peer, edge = said["waits"]
            waits = (None if peer is None else int(peer), str(edge))
        return Beat(text, heard, str(said["doing"]), float(said["busy"]), waits)

    def __str__(self) -> str:
        return f"last known in {self.doing}"


def most_silent(beats: Sequence[Beat], me: int) -> tuple[int, float]:
    """The other rank that was heard of the longest ago, and the seconds since."""
    rank = min((r for r in range(len(beats)) if r != me), key=lambda r: beats[r].heard)
    return rank, monotonic() - beats[rank].heard


def suspect(beats: Sequence[Beat], me: int, peer: int | None, patience: float) -> Cause:
    """Follow who waits for whom, to a rank that is silent or waits for nobody.

    Args:
        beats: of all ranks.
        me: this rank.
        peer: the rank that this one waits for in vain, None: all others.
        patience: seconds after which a rank counts as silent.
    """
    return _follow(beats, me, peer, patience)[0]


def seconds_stuck(beats: Sequence[Beat], me: int, patience: float) -> float:
    """For how long the rank that keeps all waiting has been in its present action.

    Where ranks wait for one another it is the last to have begun with it: one that ends a run has
    not heard yet that all others do. Infinity if it is silent.
    """
    return _follow(beats, me, None, patience)[1]


def _follow(
    beats: Sequence[Beat], me: int, peer: int | None, patience: float
) -> tuple[Cause, float]:
    now = monotonic()
    passed: list[int] = []

    def newest(ranks: list[int]) -> float:
        return min(beats[r].busy + now - beats[r].heard for r in ranks)

    while True:
        if peer is None:
            peer = _of_all(beats, me, patience)
            if peer in passed:
                return _circle(beats, me, passed, peer, peer), newest(passed)
        beat = beats[peer]
        silent = now - beat.heard
        if silent > patience:
            return Cause(peer, f"{beat}: no sign of life for {silent:.1f} s"), inf
        if beat.waits is None:
            busy = beat.busy + silent
            return Cause(peer, f"{beat.doing}: busy with it for {busy:.1f} s"), busy
        passed.append(peer)
        next_one, _ = beat.waits
        if next_one == me or next_one in passed:
            return _circle(beats, me, passed, next_one, peer), newest(passed)
        peer = next_one


def _circle(beats: Sequence[Beat], me: int, passed: list[int], last: int, culprit: int) -> Cause:
    circle = " -> ".join(map(str, [me, *passed, last]))
    beat = beats[culprit]
    assert beat.waits is not None
    return Cause(
        culprit, f"{beat.doing}: waits on {beat.waits[1]}; ranks wait in a circle, {circle}"
    )


def _of_all(beats: Sequence[Beat], me: int, patience: float) -> int:
    """Who keeps all waiting: a silent rank, else one that waits for nobody, else not for all."""
    rank, silent = most_silent(beats, me)
    if silent > patience:
        return rank

    def free(r: int) -> int:
        waits = beats[r].waits
        return 0 if waits is None else 1 if waits[0] is not None else 2

    return min((r for r in range(len(beats)) if r != me), key=free)
