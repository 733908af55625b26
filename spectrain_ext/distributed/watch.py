"""Watch: what a rank hears of the others in a run, and whom a wait in vain comes down to."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import NamedTuple, Protocol

from torch.distributed.distributed_c10d import Store

FAILED = "failed"  # the first cause, under this key of the store
_LOOKS = 0.0005, 1 / 16  # seconds between two, and part of the wait so far, where a run ends


class Cause(NamedTuple):
    """Which rank failed first, and what is known of it."""

    rank: int
    reason: str

    @staticmethod
    def read(text: bytes) -> Cause | None:
        """What ``json.dumps`` of a cause wrote; None for no text."""
        return Cause(*json.loads(text)) if text else None


class Beat(NamedTuple):
    """What a rank last said of itself.

    Attributes:
        text: as it was said.
        heard: when this rank heard it, on its own clock.
        doing: its action.
        busy: seconds that it had been in that action.
        waits: the rank that it was waiting for (None: all others), and on which edge; None if it
            was not waiting.
        ended: the runs that it had ended.
        knows: whether it knew of a failure.
    """

    text: bytes
    heard: float
    doing: str = "starting"
    busy: float = 0.0
    waits: tuple[int | None, str] | None = None
    ended: int = 0
    knows: bool = False

    @staticmethod
    def read(text: bytes, heard: float) -> Beat:
        said = json.loads(text)
        waits = said["waits"] and tuple(said["waits"])
        return Beat(text, heard, said["doing"], said["busy"], waits, said["ended"], said["knows"])

    def __str__(self) -> str:
        return f"last known in {self.doing}"


class Watched(Protocol):
    """What a watch asks of the board that it looks after, and tells it."""

    rank: int
    ranks: int
    timeout: float
    interval: float
    grace: float
    changed: threading.Condition
    beats: list[Beat]
    cause: Cause | None

    def beat(self) -> dict[str, object]: ...
    def overdue(self) -> Cause | None: ...
    def learn(self, cause: Cause) -> None: ...
    def without_store(self) -> Cause: ...
    def last_words(self) -> str: ...


class Watch:
    """The two threads beside the rank's own in one run of a board.

    Attributes:
        wake: has the talking thread look around at once.
        found: what this rank takes for the first cause, before all agree on one.
        missing: others that have not ended the run, as far as is known.
        ended: whether all have.
        must_end_by: when this process is ended unless the watch has been stopped.
    """

    def __init__(self, board: Watched, store: Store, run: int) -> None:
        self._board, self._store, self._run = board, store, run
        self.wake = threading.Event()
        self.found: Cause | None = None
        self.missing = [r for r in range(board.ranks) if r != board.rank]
        self.ended = False
        self.must_end_by: float | None = None
        self.ends_since: float | None = None
        self._said: set[str] = set()
        self._over = threading.Event()
        self._asking: float | None = None  # since when the store has not answered
        self._keys = [f"beat/{r}" for r in range(board.ranks)]
        self._rounds = 0
        self._threads = [
            threading.Thread(target=self._talk, name="spectrain board", daemon=True),
            threading.Thread(target=self._guard, name="spectrain guard", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """This rank has ended the run: hear when all others have."""
        self.ends_since = monotonic()
        self.wake.set()

    def stop(self) -> None:
        self._over.set()
        self.wake.set()
        for thread in self._threads:
            thread.join(self._board.grace)

    # The thread that talks.

    def _talk(self) -> None:
        board = self._board
        try:
            while not self.ended:
                self._look_around()
                if self._over.is_set():
                    return
                if board.cause is not None:
                    self.wake.wait(board.interval / 4)
                elif self.ends_since is None:
                    self.wake.wait(board.interval)
                else:
                    self._meet(self.ends_since)
                self.wake.clear()
        except Exception:
            if not self._over.is_set():
                board.learn(board.without_store())

    def _look_around(self) -> None:
        """Say what this rank does, hear what others do, and agree with them on a cause."""
        board, store = self._board, self._store
        self._asking = monotonic()
        self._rounds += 1
        said = {"count": self._rounds, **board.beat()}
        store.set(self._keys[board.rank], json.dumps(said))
        *texts, failed = store.multi_get([*self._keys, FAILED])
        now = monotonic()
        with board.changed:
            for r, text in enumerate(texts):
                if text != board.beats[r].text:
                    board.beats[r] = Beat.read(text, now)
            missing = [r for r in self.missing if board.beats[r].ended < self._run]
            self.missing = missing or self.missing
            board.changed.notify_all()
        mine = None if failed else self.found or board.overdue()
        if mine is not None:
            failed = store.compare_set(FAILED, "", json.dumps(mine))
        cause = Cause.read(failed)
        if cause is not None and board.cause is None:
            board.learn(cause)
        self._asking = None

    def _meet(self, since: float) -> None:
        """See for an interval whether all ranks have ended the run, less and less often.

        Rank 0 may keep the store, and leaves when the others know that all have ended. They count
        up, and look: a wait of the store that its timeout ends may hang instead, where two
        processes wait (seen with torch 2.13 after some 20 to 100 waits).
        """
        board, everyone = self._board, range(self._board.ranks)
        until = monotonic() + board.interval
        while not self.wake.is_set() and (now := monotonic()) < until:
            self._asking = now
            if self._all_say("ended", everyone) and (
                self._all_say("left", everyone[1:]) or board.rank > 0
            ):
                with board.changed:
                    self.ended = True
                    board.changed.notify_all()
                return
            self._asking = None
            least, part = _LOOKS
            self.wake.wait(max(least, part * (now - since)))

    def _all_say(self, word: str, ranks: Sequence[int]) -> bool:
        says = self._board.rank in ranks and word not in self._said
        self._said.add(word)
        return self._store.add(word, int(says)) >= self._run * len(ranks)

    # The thread that guards.

    def _guard(self) -> None:
        """Keep the deadlines when all other threads are stuck."""
        board = self._board
        while not self._over.wait(board.interval):
            asking = self._asking
            if asking is not None and monotonic() - asking > board.timeout + 2 * board.interval:
                board.learn(board.without_store())
            if self.must_end_by is not None and monotonic() > self.must_end_by:
                sys.stderr.write(board.last_words() + "\n")
                sys.stderr.flush()
                os._exit(1)


# Whom a wait in vain comes down to.


def most_silent(beats: Sequence[Beat], me: int) -> tuple[int, float]:
    """The other rank that was heard of the longest ago, and the seconds since."""
    rank = min((r for r in range(len(beats)) if r != me), key=lambda r: beats[r].heard)
    return rank, monotonic() - beats[rank].heard


def suspect(
    beats: Sequence[Beat], me: int, peer: int | None, patience: float
) -> tuple[Cause, float]:
    """Follow who waits for whom, to a rank that is silent or waits for nobody.

    Args:
        beats: of all ranks.
        me: this rank.
        peer: the rank that this one waits for in vain, None: all others.
        patience: seconds after which a rank counts as silent.

    Returns:
        The rank to blame, and for how long it has been in its present action; infinity if it is
        silent. Where ranks wait for one another it is the last to have begun with it: one that ends
        a run has not heard yet that all others do.
    """
    now = monotonic()
    passed: list[int] = []
    while True:
        following = _of_all(beats, me, patience) if peer is None else peer
        if passed and following in (me, *passed):
            busy = min(beats[r].busy + now - beats[r].heard for r in passed)
            culprit = following if peer is None else passed[-1]
            return _circle(beats[culprit], culprit, [me, *passed, following]), busy
        beat = beats[following]
        silent = now - beat.heard
        if silent > patience:
            return Cause(following, f"{beat}: no sign of life for {silent:.1f} s"), inf
        if beat.waits is None:
            busy = beat.busy + silent
            return Cause(following, f"{beat.doing}: busy with it for {busy:.1f} s"), busy
        passed.append(following)
        peer = beat.waits[0]


def _circle(beat: Beat, culprit: int, ranks: list[int]) -> Cause:
    assert beat.waits is not None
    circle = " -> ".join(map(str, ranks))
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
