"""Watch: what ranks tell each other in a run, and whom a wait in vain comes down to.

Three threads of a process use it during a run. The rank's own says what it does and whom it waits
for, and waits on ``changed`` alone. Another talks to the store: it publishes that, hears the
others, keeps the deadlines, and has all agree on the first cause. A call of the store may never
return, whatever its timeout is: with the keeping process stopped (SIGSTOP) none but ``set`` does
(measured with torch 2.13). So a third one guards, and ends a process whose own thread cannot.

A name is read without a lock, and what is more than one value is replaced as a whole.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from time import monotonic
from typing import NamedTuple, NoReturn

from torch.distributed.distributed_c10d import Store

from spectrain_ext.errors import RankError
from spectrain_ext.interrupts import waiting

from .store import pause

FAILED = "failed"  # the first cause, under this key of the store


class Cause(NamedTuple):
    """Which rank failed first, and what is known of it."""

    rank: int
    reason: str

    @staticmethod
    def read(text: bytes) -> Cause | None:
        """What ``json.dumps`` of a cause wrote; None for no text."""
        return Cause(*json.loads(text)) if text else None


class Beat(NamedTuple):
    """What a rank last said of itself."""

    text: bytes  # as it was said
    heard: float  # when this rank heard it, on its own clock
    doing: str = "starting"
    busy: float = 0.0  # seconds that it had been doing that
    waits: tuple[int | None, str] | None = None  # for whom (None: all others), and on which edge
    ended: int = 0  # runs
    knows: bool = False  # of a failure

    @staticmethod
    def read(text: bytes, heard: float) -> Beat:
        said = json.loads(text)
        waits = said["waits"] and tuple(said["waits"])
        return Beat(text, heard, said["doing"], said["busy"], waits, said["ended"], said["knows"])

    def __str__(self) -> str:
        return f"last known in {self.doing}"


class Watch:
    """One rank in runs, and what it hears of the others; a ``Board`` begins and ends these.

    No wait outlasts ``timeout``, and all ranks agree on the first cause of a failure. Once a rank
    knows of one its own thread has ``grace`` seconds to raise it; a thread that is stuck elsewhere
    cannot, and the process is ended from here.
    """

    _store: Store  # which the talking thread alone uses in a run
    _threads: Sequence[threading.Thread]

    def __init__(self, rank: int, ranks: int, timeout: float, grace: float) -> None:
        self.rank, self.ranks, self.timeout, self.grace = rank, ranks, timeout, grace
        self.changed = threading.Condition()  # notified by whoever fulfils what ``wait`` waits for
        self.interval = min(max(timeout / 20, 0.02), 1.0)  # seconds between two heartbeats
        # whom this rank waits for (None: all others), for what, and since when
        self.waits: tuple[int | None, str, float] | None = None
        self.cause: Cause | None = None
        self._runs = 0  # that have begun
        self._failure = ""  # of this rank, which the others may not have
        self._lenient = False  # whether ranks may be waited for as long as they get on
        self._keys = [f"beat/{r}" for r in range(ranks)]
        self._rounds = 0
        self._wake, self._over = threading.Event(), threading.Event()
        self._forget()
        self.doing("starting")

    # A run.

    def _forget(self) -> None:
        self.beats = [Beat(b"", monotonic())] * self.ranks
        # others that have not ended the run, as far as is known
        self._missing = [r for r in range(self.ranks) if r != self.rank] or [0]
        self._all_ended = False
        self._said: set[str] = set()
        self._found: Cause | None = None  # by this rank, before all agree on one
        self._ends_since: float | None = None
        self._asking: float | None = None  # since when the store has not answered
        self._must_end_by = inf  # or the process is ended
        self._wake.clear()
        self._over.clear()

    def _start(self, lenient: bool) -> None:
        self._runs += 1
        self._failure, self._lenient = "", lenient
        self._forget()
        self._threads = [
            threading.Thread(target=self._talk, name="spectrain board", daemon=True),
            threading.Thread(target=self._guard, name="spectrain guard", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _finish(self, to_do: str) -> None:
        """Wait until all have finished: then nobody misses one that has gone home."""
        self._ends_since = monotonic()
        self._wake.set()
        while not self._all_ended:
            rank = self._missing[0]
            self.wait(partial(self._has_ended, rank), rank, f"rank {rank} {to_do}")

    def _has_ended(self, rank: int) -> bool:
        return self._all_ended or rank not in self._missing

    def _stop(self) -> None:
        self._over.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(self.grace)

    # What this rank does.

    def doing(self, *what: object) -> None:
        """Say what this rank does from here on; put into words only when somebody asks."""
        self._doing, self._since = what, monotonic()

    def action(self) -> str:
        return " ".join(map(str, self._doing))

    # Waiting.

    def check(self) -> None:
        if self.cause is not None:
            self._raise(self.cause, None, 0.0)

    def wait(self, ready: Callable[[], bool], peer: int, what: str) -> None:
        """Wait until ``ready()``, asked again whenever ``changed`` is notified, and with it held.

        Raises:
            RankError: a rank has failed, or ``peer`` has not done in time what it takes.
        """
        with self.changed:
            if ready():
                return
            began = monotonic()
            self.waits = peer, what, began
            while not ready():
                if self.cause is not None:
                    self._raise(self.cause, what, monotonic() - began)
                with waiting():
                    self.changed.wait()
            self.waits = None

    @contextmanager
    def blocked(self, peer: int | None, what: str) -> Iterator[None]:
        """Inside, this rank waits for a peer (None: all others) and cannot be interrupted."""
        before, self.waits = self.waits, (peer, what, monotonic())
        with waiting():
            yield
        self.waits = before

    def lost_one_of(self, peers: Iterable[int], what: str, error: BaseException) -> NoReturn:
        """Raise RankError: a connection to one of these ranks has broken."""
        others = [peer for peer in peers if peer != self.rank]
        self.lost(others[0] if len(others) == 1 else None, what, error)

    def lost(self, peer: int | None, what: str, error: BaseException) -> NoReturn:
        """Raise RankError: the connection to a peer has broken (None: nobody says to which).

        Who lives is heard of once per interval, and whoever has gone is not.
        """
        since = self.waits[2] if self.waits is not None else monotonic()
        mine = Cause(self.rank, f"{self.action()}: {described(error)}")
        if peer is None:
            with self.changed:
                self.changed.wait_for(lambda: self.cause is not None, 4 * self.interval)
            silent_one, silent = most_silent(self.beats, self.rank)
            peer = silent_one if silent > 2 * self.interval else None
        if peer is not None:
            mine = Cause(peer, f"{self.beats[peer]}: its connection was closed without a word")
        self._raise(mine, what, monotonic() - since, error)

    # The first cause.

    def _raise(
        self, mine: Cause, what: str | None, waited: float, error: BaseException | None = None
    ) -> NoReturn:
        cause = self._agree(mine)
        raise RankError(self.rank, self.action(), cause.rank, cause.reason, what, waited) from error

    def _agree(self, mine: Cause) -> Cause:
        """Put a cause on the board; returns the one that was there first.

        Rank 0 may keep the store: it stays until all that still live know the cause.
        """
        with self.changed:
            if self.cause is None:
                self._found = mine
                self._wake.set()
                self.changed.wait_for(lambda: self.cause is not None, self.grace / 2)
            cause = self.cause or self.without_store()  # whose answer takes milliseconds
            self.learn(cause)
            if self.rank == 0:
                self.changed.wait_for(lambda: self._all_know(cause), self.grace / 2)
        return cause

    def _all_know(self, cause: Cause) -> bool:
        """Whether all others know it, but for a culprit that lives no more."""
        now = monotonic()
        return all(
            beat.knows or (r == cause.rank and now - beat.heard > 3 * self.interval)
            for r, beat in enumerate(self.beats)
            if r != self.rank
        )

    def learn(self, cause: Cause) -> None:
        with self.changed:
            if self.cause is None:
                self.cause = cause
                self._must_end_by = monotonic() + self.grace
                self._wake.set()
            self.changed.notify_all()

    def without_store(self) -> Cause:
        return Cause(0, f"{self.beats[0]}: the store that it keeps does not answer")

    # The thread that talks.

    def _talk(self) -> None:
        try:
            while not self._all_ended:
                self._look_around()
                if self._over.is_set():
                    return
                if self.cause is not None:
                    self._wake.wait(self.interval / 4)
                elif self._ends_since is None:
                    self._wake.wait(self.interval)
                self._wake.clear()
                if self._ends_since is not None and self.cause is None:
                    self._meet(self._ends_since)
        except Exception:  # whatever: this thread keeps the deadlines
            if not self._over.is_set():
                self.learn(self.without_store())

    def _look_around(self) -> None:
        """Say what this rank does, hear what others do, and agree with them on a cause."""
        self._asking = monotonic()
        self._rounds += 1
        said = {"count": self._rounds, **self._beat()}
        self._store.set(self._keys[self.rank], json.dumps(said))
        *texts, failed = self._store.multi_get([*self._keys, FAILED])
        now = monotonic()
        with self.changed:
            for r, text in enumerate(texts):
                if text != self.beats[r].text:
                    self.beats[r] = Beat.read(text, now)
            missing = [r for r in self._missing if self.beats[r].ended < self._runs]
            self._missing = missing or self._missing
            self.changed.notify_all()
        mine = None if failed else self._found or self._overdue()
        if mine is not None:
            failed = self._store.compare_set(FAILED, "", json.dumps(mine))
        cause = Cause.read(failed)
        if cause is not None and self.cause is None:
            self.learn(cause)
        self._asking = None

    def _meet(self, since: float) -> None:
        """See for an interval whether all ranks have ended the run, less and less often.

        Rank 0 may keep the store, and leaves when the others know that all have ended.
        """
        everyone = range(self.ranks)
        until = monotonic() + self.interval
        while not self._wake.is_set() and (now := monotonic()) < until:
            self._asking = now
            if self._all_say("ended", everyone) and (
                self._all_say("left", everyone[1:]) or self.rank > 0
            ):
                with self.changed:
                    self._all_ended = True
                    self.changed.notify_all()
                return
            self._asking = None
            self._wake.wait(pause(now - since))

    def _all_say(self, word: str, ranks: Sequence[int]) -> bool:
        says = self.rank in ranks and word not in self._said
        self._said.add(word)
        return self._store.add(word, int(says)) >= self._runs * len(ranks)

    # The thread that guards.

    def _guard(self) -> None:
        """Keep the deadlines when all other threads are stuck."""
        while not self._over.wait(self.interval):
            asking = self._asking
            if asking is not None and monotonic() - asking > self.timeout + 2 * self.interval:
                self.learn(self.without_store())
            if monotonic() > self._must_end_by:
                sys.stderr.write(self._last_words() + "\n")
                sys.stderr.flush()
                os._exit(1)

    # What these ask.

    def _beat(self) -> dict[str, object]:
        """What the others are told."""
        waits = None if self._failure else self.waits
        return {
            "doing": self.action(),
            "busy": monotonic() - self._since,
            "waits": None if waits is None else waits[:2],
            "ended": self._runs if self._ends_since is not None else self._runs - 1,
            "knows": self.cause is not None,
        }

    def _overdue(self) -> Cause | None:
        """Whom this rank has waited for too long."""
        waits = self.waits
        if waits is None or monotonic() - waits[2] <= self.timeout:
            return None
        if self._failure:
            return Cause(self.rank, self._failure)
        patience = max(3 * self.interval, self.timeout / 2)
        cause, busy = suspect(self.beats, self.rank, waits[0], patience)
        return None if self._lenient and busy <= self.timeout else cause

    def _last_words(self) -> str:
        """Why this process is ended."""
        cause, waits = self.cause or self.without_store(), self.waits
        what, waited = (None, 0.0) if waits is None else (waits[1], monotonic() - waits[2])
        report = RankError(self.rank, self.action(), cause.rank, cause.reason, what, waited)
        return f"{report}; this rank did not end by itself within {self.grace:.0f} s"


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# Whom a wait in vain comes down to.


def most_silent(beats: Sequence[Beat], me: int) -> tuple[int, float]:
    """The other rank that was heard of the longest ago, and the seconds since."""
    rank = min((r for r in range(len(beats)) if r != me), key=lambda r: beats[r].heard)
    return rank, monotonic() - beats[rank].heard


def suspect(
    beats: Sequence[Beat], me: int, peer: int | None, patience: float
) -> tuple[Cause, float]:
    """Follow who waits for whom, to a rank that is silent or waits for nobody.

    Returns that rank, and for how long it has been in its present action: infinity if it is silent.
    Where ranks wait for one another it is the last to have begun with it: one that ends a run has
    not heard yet that all others do.
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
