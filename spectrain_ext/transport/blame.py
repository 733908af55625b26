"""Blame: what ranks say of themselves, and which of them a wait that was in vain comes down to."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
        phase: how far the rank is in beginning and ending runs.
        doing: its action.
        busy: seconds that it had been in that action.
        waits: the rank that it was waiting for, and on which edge; None if it was not waiting.
    """

    text: bytes
    heard: float
    phase: int = 0
    doing: str = "starting"
    busy: float = 0.0
    waits: tuple[int, str] | None = None

    @staticmethod
    def read(text: bytes, heard: float) -> Beat:
        """What a board wrote."""
        said = json.loads(text)
        waits = None if said["waits"] is None else (int(said["waits"][0]), str(said["waits"][1]))
        return Beat(text, heard, int(said["phase"]), str(said["doing"]), float(said["busy"]), waits)

    def __str__(self) -> str:
        return f"last known in {self.doing}"


def suspect(beats: Sequence[Beat], me: int, peer: int, patience: float) -> Cause:
    """Follow who waits for whom, to a rank that is silent or waits for nobody.

    Args:
        beats: of all ranks.
        me: this rank.
        peer: the rank that this one waits for in vain.
        patience: seconds after which a rank counts as silent.
    """
    now = monotonic()
    passed: list[int] = []
    while True:
        beat = beats[peer]
        silent = now - beat.heard
        if silent > patience:
            return Cause(peer, f"{beat}: no sign of life for {silent:.1f} s")
        if beat.waits is None:
            return Cause(peer, f"{beat.doing}: busy with it for {beat.busy + silent:.1f} s")
        passed.append(peer)
        next_one, edge = beat.waits
        if next_one == me or next_one in passed:
            circle = " -> ".join(map(str, [me, *passed, next_one]))
            return Cause(peer, f"{beat.doing}: waits on {edge}; ranks wait in a circle, {circle}")
        peer = next_one
