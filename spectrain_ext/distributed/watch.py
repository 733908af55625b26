"""Watch: the two threads that look after a rank while a run takes place."""

from __future__ import annotations

import json
import os
import sys
import threading
from datetime import timedelta
from time import monotonic
from typing import Protocol

from torch.distributed.distributed_c10d import Store

from .blame import Beat, Cause

FAILED = "failed"  # the first cause, under this key of the store


class Watched(Protocol):
    """What a watch asks of the rank that it looks after, and tells it."""

    rank: int
    ranks: int
    timeout: float
    interval: float
    grace: float
    cause: Cause | None
    changed: threading.Condition

    def beat(self) -> dict[str, object]: ...
    def overdue(self) -> Cause | None: ...
    def learn(self, cause: Cause) -> None: ...
    def without_store(self) -> Cause: ...
    def last_words(self) -> str: ...


class Watch:
    """Heartbeats and deadlines of one rank in one run; ``board.py`` says who writes what.

    One thread talks with the others through the store, and hears what they do. The store may have
    stopped with its keeper and let it wait for ever: another one keeps the time of that.

    Attributes:
        beats: what each rank has last said.
        wake: set by who wants that to happen now.
        asking: since when the store has not answered.
        must_end_by: when this process is ended unless the run has ended.
    """

    def __init__(self, board: Watched) -> None:
        self._board = board
        self.beats = [Beat(b"", monotonic()) for _ in range(board.ranks)]
        self._rounds = 0
        self.wake = threading.Event()
        self.asking: float | None = None
        self.must_end_by: float | None = None
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._keys = [f"beat/{r}" for r in range(board.ranks)]

    def start(self, store: Store) -> None:
        """Begin, by a connection that nobody else uses."""
        self._threads = [
            threading.Thread(target=self._talk, args=(store,), name="spectrain board", daemon=True),
            threading.Thread(target=self._guard, name="spectrain guard", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        self.wake.set()
        for thread in self._threads:
            thread.join(self._board.grace)

    def _talk(self, store: Store) -> None:
        board = self._board
        try:
            while not self._over.is_set():
                self.asking = monotonic()
                store.set(
                    self._keys[board.rank], json.dumps({"count": self._rounds, **board.beat()})
                )
                self._hear(store)
                mine = None if board.cause is not None else board.overdue()
                if mine is not None:
                    said = store.compare_set(FAILED, "", json.dumps(mine))
                    board.learn(Cause.read(said) or mine)
                if board.cause is not None:
                    store.set(f"seen/{board.rank}", "1")
                self.asking = None
                self.wake.wait(board.interval)
                self.wake.clear()
        except (RuntimeError, ValueError):
            if not self._over.is_set():
                board.learn(board.without_store())

    def _hear(self, store: Store) -> None:
        board, beats, keys = self._board, self.beats, self._keys
        known = [r for r in range(board.ranks) if beats[r].text or store.check([keys[r]])]
        *texts, failed = store.multi_get([*(keys[r] for r in known), FAILED])
        now = monotonic()
        with board.changed:
            for r, text in zip(known, texts, strict=True):
                if text != beats[r].text:
                    beats[r] = Beat.read(text, now)
            self._rounds += 1
            board.changed.notify_all()
        cause = Cause.read(failed)
        if cause is not None and board.cause is None:
            board.learn(cause)

    def _guard(self) -> None:
        """Keep the deadlines when all other threads are stuck."""
        board = self._board
        while not self._over.wait(board.interval):
            asking = self.asking
            if asking is not None and monotonic() - asking > board.timeout + 2 * board.interval:
                board.learn(board.without_store())
            if self.must_end_by is not None and monotonic() > self.must_end_by:
                _end_process(board.last_words())
                return


#: Seconds that new connections to a store may take. Torch asks a name server for the name of each
#: address: 5 s where that does not answer (measured: for 103 connections of 6,000).
SLOW = 15.0


def connection(store: Store, patience: float, timeout: float) -> Store:
    """A connection of its own to the same store, whose calls take so many seconds at most.

    To make it takes ``timeout`` at most, or twice ``SLOW``, whatever the store's own is.
    """
    before = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=max(timeout / 2, SLOW)))  # torch tries twice
    try:
        made: Store = store.clone()  # type: ignore[attr-defined]
    finally:
        store.set_timeout(before)
    made.set_timeout(timedelta(seconds=patience))
    return made


def _end_process(report: str) -> None:
    """The rank's own thread has not ended the run in time."""
    sys.stderr.write(report + "\n")
    sys.stderr.flush()
    os._exit(1)
