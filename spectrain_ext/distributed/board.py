"""Board: where the ranks of one pipeline hear of each other; all end as one.

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
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from math import inf
from time import monotonic
from typing import Any, NoReturn

from torch.distributed.distributed_c10d import Store

from spectrain_ext.errors import RankError, StageError, report_note
from spectrain_ext.interrupts import held_back, waiting

from .failures import (
    Beat,
    Cause,
    described,
    most_silent,
    suspect,
    this_process,
    wake_stopped,
)
from .report import LAST, WATCHING, Messages, Report, drop_report, new_report, part_of, place_of
from .store import SLOW, connection

FAILED = "failed"  # the first cause, under this key of the store


class Board:
    """One rank's side of a store that all ranks read and write.

    No wait outlasts ``timeout``. Once a rank knows of a failure its own thread has ``grace``
    seconds to raise it; where that is stuck elsewhere, the process is ended.
    """

    def __init__(
        self, store: Store, rank: int, ranks: int, timeout: float, grace: float = 5.0
    ) -> None:
        self.rank, self.ranks, self.timeout, self.grace = rank, ranks, timeout, grace
        self.changed = threading.Condition()  # notified by whoever fulfils what ``wait`` waits for
        self.interval = min(max(timeout / 20, 0.02), 1.0)  # seconds between two heartbeats
        self._soon = max(0.05, ranks / 1000)  # and after which a failure is heard of
        # whom this rank waits for (None: all others), for what, and since when
        self.waits: tuple[int | None, str, float] | None = None
        self.cause: Cause | None = None
        # what ends this rank's waits for its device once there is a cause, each in a thread
        self.aborts: list[Callable[[], None]] = []
        self._aborting: list[threading.Thread] = []
        # Of collectives that have begun and not ended: what they are for, and since when.
        self.under_way: dict[int, tuple[str, float]] = {}
        self._steps: deque[tuple[tuple[object, ...], float]] = deque(maxlen=LAST)
        self._messages: Messages = list
        self._error = ""  # the traceback of this rank's own exception
        self._failure = ""  # of this rank, which the others may not have
        self._lenient = False  # whether ranks may be waited for as long as they get on
        self._patience = SLOW  # seconds that the store may take for an answer
        self._others = [r for r in range(ranks) if r != rank]
        self._keys = [f"beat/{r}" for r in range(ranks)]
        # how many words it has said, and the last two: it may be one ahead of whoever hears it
        self._said: tuple[int, list[object]] = 0, []
        self._complete = 0  # words that all have said
        self._forget()
        self.doing("meeting")
        began, key = monotonic(), self._keys[rank]
        try:
            # first, as a new connection to a store that has gone is tried for a while
            outlived = store.check([key]) and store.get(key) != b""
            # others block the given one, with rendezvous of process groups; it alone talks
            self._store = connection(store, SLOW, timeout)
            self._report = Report(self._store, rank)
            for each in self._keys:  # whoever reads them would wait for one that is not there
                self._store.compare_set(each, "", "")
            self.cause = Cause.read(self._store.compare_set(FAILED, "", ""))  # before it has come
        except RuntimeError as error:
            reason, waited = self._without_store().reason, monotonic() - began
            raise RankError(rank, self.action(), 0, reason, "the store", waited) from error
        if outlived:
            raise RuntimeError(
                "the process group's store has outlived a restart, and still has what this rank "
                "said before; make the group by spectrain_ext.join_ranks(), in the place of "
                "torch.distributed.init_process_group"
            )

    def _forget(self) -> None:
        self.beats = [Beat(b"", monotonic())] * self.ranks
        self._found: Cause | None = None  # by this rank, before all agree on one
        self._listens_since: float | None = None  # for what all others say
        self._asking: float | None = None  # since when the store has not answered
        self._must_end_by = inf  # or the process is ended
        self._wake, self._over = threading.Event(), threading.Event()

    # A run.

    @contextmanager
    def run(self, starts: bool = False, messages: Messages = list) -> Iterator[None]:
        """Take part for the time of a run, or of a pipeline being made (``starts``)."""
        if self.cause is not None and not starts:
            raise RuntimeError(
                f"run: an earlier run of this pipeline has failed (rank {self.cause.rank}, "
                f"{self.cause.reason}), and what was in flight is lost; start the processes again"
            )
        self.doing("meeting" if starts else "beginning a run")
        # Links are opened by means that cannot be interrupted, and over one that loses packets that
        # takes seconds longer for one rank than for others: deadlines of runs count from its end.
        self._failure, self._lenient = "", starts
        self._forget()
        # While others still connect to the store it answers nobody for as long as that takes.
        self._patience = SLOW if starts else min(self.timeout, self.grace)
        self._store.set_timeout(timedelta(seconds=self._patience))
        self._messages = messages
        talks = threading.Thread(target=self._talk, name=WATCHING[0], daemon=True)
        guards = threading.Thread(target=self._guard, name=WATCHING[1], daemon=True)
        talks.start()
        guards.start()
        try:
            yield
            self.doing(self._failure or ("starting" if starts else "ending the run"))
            # All wait for all, and nobody misses one that has gone home. Rank 0 may keep the store:
            # it leaves when the others know that all have finished.
            self._say(None)
            to_do = "to start" if starts else "to end the run"
            self._listen(lambda beat: beat.complete if self.rank == 0 else beat.words, to_do)
        except BaseException as error:
            if not isinstance(error, RankError):
                what = str(error) if isinstance(error, StageError) else described(error)
                mine = Cause(self.rank, f"{self.action()}: {what}")
                self._error = "".join(traceback.format_exception(error))
                aborted = len(self._aborting) > 0
                cause = self._agree(mine)
                if aborted and cause.rank != self.rank and isinstance(error, Exception):
                    self._raise(cause, None, 0.0, error)  # it was computed with what had not come
                if cause.report and hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(report_note(place_of(cause.report)))
            raise
        finally:
            self._messages = list
            self._over.set()
            self._wake.set()
            guards.join(self.grace)
            self._report.outlive(talks, self.grace)
            for thread in self._aborting:  # or they would go on beside the caller's own ending
                thread.join(max(0.0, self._must_end_by - monotonic()))

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Take part for the time of something that all ranks do together outside of a run.

        An exception inside is expected on all ranks, as they tell each other theirs, and is no
        failure of the board; but a ConnectionError says that a rank has gone.
        """
        failure: Exception | None = None
        try:
            with self.run():
                self.doing(what)
                # They wait for each other by means that cannot be interrupted: the deadline does
                # not pass while whoever keeps the others waiting begins something new within it.
                self._lenient = True
                self.waits = None, what, monotonic()
                try:
                    yield
                except ConnectionError as error:
                    self.lost(None, what, error)
                except Exception as error:
                    failure = error
                    self._failure = f"{what}: {described(error)}"
                finally:
                    self.waits = None
        except RankError as report:
            if failure is not None:
                raise report from failure
            raise
        if failure is not None:
            raise failure

    # What this rank does, and what it tells the others.

    def doing(self, *what: object) -> None:
        """Say what this rank does from here on; put into words only when somebody asks."""
        self._steps.append((what, monotonic()))

    def action(self) -> str:
        return " ".join(map(str, self._steps[-1][0]))

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Inside, this rank waits for nobody, although it is within ``together``."""
        waits, self.waits = self.waits, None
        before = self._steps[-1][0]
        self.doing(what)
        try:
            yield
        finally:
            self.doing(*before)
            if waits is not None:
                self.waits = *waits[:2], monotonic()

    def gathered(self, what: str, mine: object) -> list[Any]:
        """What every rank says, by rank, of JSON's types; within a run that ``starts``."""
        self.doing(what)
        self.check()
        self._say(mine)
        self._listen(lambda beat: beat.words)
        words, own = self._said[0], json.loads(json.dumps(mine))
        return [
            own if r == self.rank else beat.last[words - beat.words - 1]
            for r, beat in enumerate(self.beats)
        ]

    def _say(self, word: object) -> None:
        words, last = self._said
        self._said = words + 1, [*last, word][-2:]

    def _listen(self, words: Callable[[Beat], int], to_do: str = "") -> None:
        """Wait until all others have come to as many words as this rank has said."""

        def has_come(rank: int) -> bool:
            return words(self.beats[rank]) >= self._said[0]

        self._listens_since = monotonic()
        self._wake.set()
        for r in self._others:
            self.wait(partial(has_come, r), r, f"rank {r} {to_do}" if to_do else None)
        self._listens_since = None

    # Waiting.

    def check(self) -> None:
        if self.cause is not None:
            self._raise(self.cause, None, 0.0)

    def wait(self, ready: Callable[[], bool], peer: int, what: str | None) -> None:
        """Wait until ``ready()``, asked whenever ``changed`` is notified, and with it held."""
        with self.changed:
            if ready():
                return
            began = monotonic()
            self.waits = peer, what or self.action(), began
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

    def lost(self, peer: int | None, what: str, error: BaseException) -> NoReturn:
        """Raise RankError: the connection to a peer has broken (None: nobody says to which)."""
        since = self.waits[2] if self.waits is not None else monotonic()
        mine = Cause(self.rank, f"{self.action()}: {described(error)}")
        if peer is None:
            # Who lives is heard of once per interval, and whoever has gone is not.
            with self.changed:
                self.changed.wait_for(lambda: self.cause is not None, 4 * self.interval)
            silent_one, silent = most_silent(self.beats, self.rank)
            peer = silent_one if silent > 2 * self.interval else None
        if peer is not None:
            reason = f"{self.beats[peer]}: its connection was closed without a word"
            mine = Cause(peer, reason, gone=True)
        self._raise(mine, what, monotonic() - since, error)

    # The first cause.

    def _raise(
        self, mine: Cause, what: str | None, waited: float, error: BaseException | None = None
    ) -> NoReturn:
        cause = self._agree(mine)
        raise self._told(cause, what, waited) from error

    def _told(self, cause: Cause, what: str | None, waited: float) -> RankError:
        action, place = self.action(), place_of(cause.report)
        return RankError(self.rank, action, cause.rank, cause.reason, what, waited, place)

    def _agree(self, mine: Cause) -> Cause:
        """Put a cause on the board; returns the one that was there first."""
        with self.changed:
            if self.cause is None:
                self._found = mine
                self._wake.set()
                self.changed.wait_for(lambda: self.cause is not None, self._patience / 2)
            # whose answer takes milliseconds
            cause = self._learn(self.cause or self._without_store())
            if self.rank == 0:  # it may keep the store, and stays until all that live know
                self.changed.wait_for(lambda: self._all_know(cause), self.grace / 2)
        return cause

    def _all_know(self, cause: Cause) -> bool:
        """Whether all others know it, but for a culprit that lives no more."""
        now = monotonic()
        return all(
            beat.knows or (r == cause.rank and (cause.gone or now - beat.heard > 3 * self.interval))
            for r, beat in enumerate(self.beats)
            if r != self.rank
        )

    def _learn(self, cause: Cause) -> Cause:
        if self.cause is None:
            part = self._part()  # while this rank's own thread is still where it is
            with self.changed:
                if self.cause is None:
                    now = monotonic()
                    self._must_end_by = now + self.grace
                    self.cause = self._report.begin(cause, part, self.beats, now + self.grace / 2)
                    self._wake.set()
                    self._abort()
                    wake_stopped(self.beats[cause.rank].process)
        with self.changed:
            self.changed.notify_all()
            assert self.cause is not None
            return self.cause

    def _abort(self) -> None:
        # All at once: one may wait for the device, and so for what another ends.
        self._aborting = [
            threading.Thread(target=_tried, args=(abort,), name="spectrain abort", daemon=True)
            for abort in self.aborts
        ]
        for thread in self._aborting:
            thread.start()

    def _part(self) -> str:
        """What this rank says in the report of a failure."""
        steps = self._steps.copy()
        try:
            begun = self.under_way.copy().values()
            return part_of(steps, self.waits, self._messages(), begun, self._error)
        except Exception as error:  # the cause matters more
            return part_of(steps, None, [], [], f"no more can be said: {described(error)}")

    def _without_store(self) -> Cause:
        return Cause(0, f"{self.beats[0]}: the store that it keeps does not answer")

    def _overdue(self) -> Cause | None:
        if held_back():  # until the end of an instruction, which may never come
            return Cause(self.rank, f"{self.action()}: KeyboardInterrupt, which waits for its end")
        absent = [r for r in self._others if not self.beats[r].text]
        limit = max(self.timeout, SLOW) if absent else self.timeout
        waits = self.waits
        if waits is None or monotonic() - waits[2] <= limit:
            return None
        if absent:
            return Cause(absent[0], f"meeting: it has not come within {limit:.1f} s")
        if self._failure:
            return Cause(self.rank, self._failure)
        patience = max(3 * self.interval, self.timeout / 2)
        cause, busy = suspect(self.beats, self.rank, waits[0], patience)
        return None if self._lenient and busy <= self.timeout else cause

    # The thread that talks.

    def _talk(self) -> None:
        try:
            while not (self._over.is_set() and self._report.ended):
                self._asking = monotonic()
                self._tell()
                self._hear()
                if self.cause is not None:
                    self._report.go_on(self.cause, self.beats, 3 * self.interval)
                self._asking = None
                self._rest()
                self._wake.clear()
            self._tell()
        except Exception:  # whatever: this thread keeps the deadlines
            if not self._over.is_set():
                self._learn(self._without_store())

    def _rest(self) -> None:
        """Until the next round, or until there is a cause."""
        end = monotonic() + self._pause()
        while (left := end - monotonic()) > self._soon:
            if self._wake.wait(self._soon):
                return
            self._asking = monotonic()
            if self._store.get(FAILED):
                return
            self._asking = None
        self._wake.wait(left)

    def _pause(self) -> float:
        """Seconds until the next round: less and less often while this rank listens."""
        since = self._listens_since
        if self.cause is not None:
            return min(self.interval / 4, self._soon / 2)
        if since is None:
            return self.interval
        return min(max(0.0002, (monotonic() - since) / 16), 0.2, self.interval)

    def _tell(self) -> None:
        waits = None if self._failure else self.waits
        words, last = self._said
        knows = self.cause is not None
        if knows:
            self._report.post(self._part)
        self._complete = max(self._complete, self._all_have_said())
        said = {
            "doing": self.action(),
            "busy": monotonic() - self._steps[-1][1],
            "waits": None if waits is None else waits[:2],
            "words": words,
            "last": last,
            "complete": self._complete,
            "knows": knows,
            "reported": knows and self._report.reported,
            "process": this_process(),
        }
        self._store.set(self._keys[self.rank], json.dumps(said))

    def _all_have_said(self) -> int:
        """How many words, as far as it has been heard in this run."""
        return min((self._said[0], *(self.beats[r].words for r in self._others)))

    def _hear(self) -> None:
        """Hear what others do, and agree with them on a cause."""
        *texts, failed = self._store.multi_get([*self._keys, FAILED])
        now = monotonic()
        beats = [
            beat if text == beat.text else Beat.read(text, now)
            for text, beat in zip(texts, self.beats, strict=True)
        ]
        before, self.beats = self.beats, beats
        if self._all_have_said() > self._complete:
            self._tell()
        # After a failure what matters is also who is silent.
        if self.cause or any(a.news != b.news for a, b in zip(beats, before, strict=True)):
            with self.changed:
                self.changed.notify_all()
        mine = None if failed else self._found or self._overdue()
        if mine is not None:
            mine = mine._replace(found=self.rank, report=new_report())
            failed = self._store.compare_set(FAILED, "", json.dumps(mine))
        cause = Cause.read(failed)
        if mine is not None and cause != mine:
            drop_report(mine.report)
        if cause is not None and self.cause is None:
            self._learn(cause)

    # The thread that guards.

    def _guard(self) -> None:
        """Keep the deadlines when all other threads are stuck."""
        while not self._over.wait(self.interval):
            asking = self._asking
            limit = max(self.timeout, self._patience) + 2 * self.interval
            if asking is not None and monotonic() - asking > limit:
                self._learn(self._without_store())
            # one that has said nothing yet makes its own part, and hears of it when it comes
            if self._said[0] and monotonic() > self._must_end_by:
                sys.stderr.write(self._last_words() + "\n")
                sys.stderr.flush()
                os._exit(1)

    def _last_words(self) -> str:
        cause, waits = self.cause or self._without_store(), self.waits
        what, waited = (None, 0.0) if waits is None else (waits[1], monotonic() - waits[2])
        error = self._told(cause, what, waited)
        return f"{error}; this rank did not end by itself within {self.grace:.0f} s"


def _tried(abort: Callable[[], None]) -> None:
    with suppress(Exception):  # the report is another's; a rank that stays stuck is ended
        abort()
