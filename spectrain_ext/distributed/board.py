"""Detects failed or stuck ranks, and ends all ranks of a pipeline with one first cause.

During a run, the rank's own thread records what it does and which rank it waits for; it blocks only
on ``changed``. A talking thread exchanges heartbeats through the store, checks deadlines and agrees
on the first cause. While the process that hosts the store is stopped (SIGSTOP), no store call but
``set`` returns, whatever its timeout (measured with torch 2.13), so a guard thread ends stuck
processes. Attributes are read without a lock; those with several values are replaced as a whole.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from inspect import GEN_SUSPENDED, getgeneratorstate
from math import inf
from time import monotonic
from typing import Any, NoReturn
from uuid import uuid4
from weakref import WeakSet

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import Store

from spectrain_ext.errors import RankError, StageError, describe_error, report_note
from spectrain_ext.interrupts import deferred, held_back, waiting

from .failures import (
    LAST,
    SHARES,
    WATCHING,
    Cause,
    Heartbeat,
    Sharing,
    Waits,
    find_culprit,
    is_broken_connection,
    is_broken_inside,
    this_process,
    wake_stopped,
    write_report,
)
from .store import CONNECT_SECONDS, connection, own_store, store_at

FAILED = "failed"  # the store's key of the first cause


class Board:
    """One rank's heartbeats and waits, of ``timeout`` seconds each.

    A rank has ``grace`` seconds to raise a known failure before its process is ended. Rank 0 keeps
    the store, or another process does (``kept_elsewhere``), which may end before: then rank 0 keeps
    one more, where it can.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        timeout: float,
        grace: float = 5.0,
        kept_elsewhere: bool = False,
    ) -> None:
        self._kept_elsewhere = kept_elsewhere
        self._keeps_own = False  # whether rank 0 keeps one beside that
        self._kept: Store | None = None  # that one, on rank 0: it ends with this object
        self.rank, self.ranks, self.timeout, self.grace = rank, ranks, timeout, grace
        self.changed = threading.Condition()  # notified when a condition of ``wait`` may hold
        self.interval = min(max(timeout / 20, 0.02), 1.0)  # seconds between two heartbeats
        self._check_interval = max(0.05, ranks / 1000)  # seconds between two checks for a failure
        self.cause: Cause | None = None
        self.aborts: list[Callable[[], None]] = []  # after a failure, to end waits for the device
        self.disconnects: list[Callable[[], None]] = []  # the same for gloo; these do not block
        self._threads: list[threading.Thread] = []
        self.calling_back: set[int] = set()  # gloo's collectives, which call Python when they end
        self.latest_run: Callable[[], object] = lambda: None
        self._steps: deque[tuple[tuple[object, ...], float]] = deque(maxlen=LAST)
        self._report = ""  # the path of the report of ``cause``
        self._error = ""  # the traceback of this rank's own exception
        self._failure = ""  # an error of this rank inside ``together``
        self._call = ""  # of the pipeline
        self._waits_for_progress = False  # whether a rank that makes progress may pass the deadline
        self._patience = CONNECT_SECONDS  # seconds that the store may take to answer
        self._others = [r for r in range(ranks) if r != rank]
        self.sharing = Sharing()  # of this rank's stages, with others
        self._keys = [f"beat/{r}" for r in range(ranks)]
        self._shared: tuple[int, list[object]] = 0, []  # values for all: count, last three
        self.beats = [Heartbeat(b"", monotonic())] * ranks
        self._forget()
        _BOARDS.add(self)
        self.set_doing("meeting")
        began, met = monotonic(), list[bool | Exception]()
        limit = max(timeout, CONNECT_SECONDS)

        def meet() -> None:
            try:
                met.append(self._meet(store, began + limit))
            except Exception as error:
                met.append(error)

        # In a thread, as a store whose process is stopped holds up calls for ever.
        meeting = threading.Thread(target=meet, name="spectrain meeting", daemon=True)
        meeting.start()
        meeting.join(limit + 1.0 if kept_elsewhere else limit)
        outlived: bool | Exception | None = met[0] if met else None  # None: no answer
        error = outlived if isinstance(outlived, Exception) else None
        if outlived is None or (error is not None and is_broken_connection(error)):
            cause, waited = self._without_store(error), monotonic() - began
            raise self._rank_error(cause, "the store", waited) from error
        if isinstance(error, TimeoutError):
            late = Cause(0, f"meeting: it has not come within {limit:.1f} s")
            raise self._rank_error(late, None, 0.0) from error
        if error is not None:
            raise error
        if outlived:
            raise RuntimeError(
                "the process group's store has outlived a restart, and still has what this rank "
                "said before; make the group by spectrain_ext.join_ranks(), in the place of "
                "torch.distributed.init_process_group"
            )

    def _meet(self, store: Store, until: float) -> bool:
        """Connect to the store; return whether it has outlived a restart."""
        key = self._keys[self.rank]
        # checked first: connecting to a store that has gone takes a while to fail
        outlived = store.check([key]) and store.get(key) != b""
        # a connection of its own: rendezvous of process groups block the given one
        self._store = connection(store, CONNECT_SECONDS, self.timeout)
        if self._kept_elsewhere and not outlived:
            self._kept, where = own_store(self._store, self.rank == 0, until)
            if where is not None:
                self._store.set(key, "in another store")
                self._keeps_own = True
                patience = timedelta(seconds=CONNECT_SECONDS)
                self._store = store_at(*where, listen=False, timeout=patience)
        for each in self._keys:  # reading a missing key would block
            self._store.compare_set(each, "", "")
        self._store.compare_set(FAILED, "", "")
        return outlived

    def _forget(self) -> None:
        self.beats = [Heartbeat(b"", monotonic(), beat.doing) for beat in self.beats]
        self._found: Cause | None = None  # this rank's proposal, before all agree on one
        self._listens_since: float | None = None
        self._asking: float | None = None  # when the pending store call began
        self.waits: tuple[int | None, str, float] | None = None  # peer (None: all), what, since
        self._must_end_by = inf  # after this time the guard ends the process
        self._wake, self._over = threading.Event(), threading.Event()
        # How this rank's caller has left its loop: see ``leave``; and in which run.
        self._left: tuple[int, str, int] | None = None
        self._ends_at = inf  # the number of results after which a rank left without meaning to

    @contextmanager
    def run(self, call: str = "run", starts: bool = False) -> Iterator[None]:
        """Watch the other ranks during a call, or while a pipeline is made (``starts``)."""
        if self.cause is not None:
            raise RuntimeError(
                f"run: an earlier run of this pipeline has failed (rank {self.cause.rank}, "
                f"{self.cause.reason}), and what was in flight is lost; start the processes again"
            )
        self.set_doing("meeting" if starts else "beginning a run")
        # Opening links cannot be interrupted; with packet loss one rank may need seconds more.
        self._failure, self._waits_for_progress = "", starts
        self._forget()
        self._call = call
        # The store answers nobody while a rank is still connecting to it.
        self._patience = CONNECT_SECONDS if starts else min(self.timeout, self.grace)
        self._store.set_timeout(timedelta(seconds=self._patience))
        try:
            self.start(WATCHING[0], self._talk)
            self.start(WATCHING[1], self._guard)
            yield
            self.set_doing(self._failure or ("starting" if starts else "ending the run"))
            to_do = "to start" if starts else "to end the run"
            self._share(self._left)
            self._wait_for_all(to_do)
            self._check_left(self._shared_values())
            self._share(None)
            if self.rank == 0:  # it may host the store, so it leaves when all others have
                self._wait_for_all(to_do)
            self._call = ""
            self.set_doing("the caller's program")
        except BaseException as error:
            if is_broken_inside(error):
                self.lost(None, SHARES, error)
            if not isinstance(error, RankError):
                what = str(error) if isinstance(error, StageError) else describe_error(error)
                mine = Cause(self.rank, f"{self.doing()}: {what}")
                self._error = "".join(traceback.format_exception(error))
                aborted = self.cause is not None and len(self.aborts) > 0
                cause = self._agree(mine)
                if aborted and cause.rank != self.rank and isinstance(error, Exception):
                    self._raise(cause, None, 0.0, error)  # the abort caused this error
                if self._report:
                    error.add_note(report_note(self._report))
            raise
        finally:
            self.finish()

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Start a thread that ends with the run."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def finish(self) -> None:
        """Wait at most ``grace`` seconds until all ranks are notified and no thread is in torch."""
        self._over.set()
        self._wake.set()
        until = monotonic() + self.grace
        for thread in self._threads:
            thread.join(max(0.0, until - monotonic()))
        with self.changed:
            self.changed.wait_for(lambda: not self.calling_back, max(0.0, until - monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Watch the other ranks during work that all ranks do together outside a run.

        An exception inside does not count as a rank's failure, because the ranks tell each other
        theirs; a ConnectionError does: it means that a rank has ended.
        """
        failure: Exception | None = None
        try:
            with self.run(what):
                self.set_doing(what)
                # Uninterruptible waits: the deadline restarts when the awaited rank makes progress.
                self._waits_for_progress = True
                self.waits = None, what, monotonic()
                try:
                    yield
                except ConnectionError as error:
                    self.lost(None, what, error)
                except Exception as error:
                    failure = error
                    self._failure = f"{what}: {describe_error(error)}"
                finally:
                    self.waits = None
        except RankError as report:
            raise report from failure or report.__cause__
        if failure is not None:
            raise failure

    def set_doing(self, *what: object) -> None:
        """Record what this rank begins to do; formatted only when needed."""
        self._steps.append((what, monotonic()))

    def doing(self) -> str:
        return " ".join(map(str, self._steps[-1][0]))

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Mark this rank, inside ``together``, as not waiting for another."""
        self.waits = None
        self.set_doing(what)
        try:
            yield
        finally:
            self.waits = None, what, monotonic()

    def exchange_json(self, what: str, mine: object) -> list[Any]:
        """Exchange a JSON value, within ``run(starts=True)``; return every rank's."""
        self.set_doing(what)
        self.check()
        self._share(mine)
        self._wait_for_all()
        self.check()  # for one that comes after the others have shared theirs and given up
        return self._shared_values()

    def _share(self, value: object) -> None:
        shared, last = self._shared
        # A rank may share the two last values of a run and one of the next before others look.
        self._shared = shared + 1, [*last, value][-3:]

    def _shared_values(self) -> list[Any]:
        """Return what every rank shared when this one shared its latest value."""
        shared = self._shared[0]
        return [beat.last[shared - beat.shared - 1] for beat in self.beats]

    # A caller's loop.

    def leave(self, results: int, why: str) -> None:
        """Tell the others that the caller has left its loop after so many results.

        ``why`` is empty if the caller has meant to. Else all ranks fail, unless all leave after as
        many results.
        """
        self._left = results, why and f"{self.doing()}: {why}", self._shared[0]
        self._wake.set()

    def hand_out(self, index: int) -> None:
        """Note that the caller gets this result; fail if a rank has left without it, see above."""
        if index >= self._ends_at:
            self._check_left(self._left_now(self.beats))
        self.set_doing("the caller's loop, which has the result of minibatch", index)

    def _left_now(self, beats: Sequence[Heartbeat]) -> list[Any]:
        """Return how ranks have left this run; a heartbeat may be of the one before."""
        shared = self._shared[0]
        return [beat.left if beat.left and beat.left[2] == shared else None for beat in beats]

    def _check_left(self, left: Sequence[Any]) -> None:
        for rank, each in enumerate(left):
            if each and each[1] and not all(other and other[0] == each[0] for other in left):
                self._raise(Cause(rank, each[1]), None, 0.0)

    def _wait_for_all(self, to_do: str = "") -> None:
        """Wait until all have shared as many values as this rank, last this one, by the store."""

        def has_come(rank: int) -> bool:
            return self.beats[rank].shared >= self._shared[0]

        self._listens_since = monotonic()
        self._wake.set()
        for r in (*self._others, self.rank):
            self.wait(partial(has_come, r), r, f"rank {r} {to_do}" if to_do else None)
        self._listens_since = None

    def check(self) -> None:
        if self.cause is not None:
            self._raise(self.cause, None, 0.0)

    def wait(self, ready: Callable[[], bool], peer: int, what: str | None) -> None:
        """Wait until ``ready()``, which is called with ``changed`` held after each notification."""
        with self.changed:
            if ready():
                return
            began = monotonic()
            self.waits = peer, what or self.doing(), began
            while not ready():
                if self.cause is not None:
                    self._raise(self.cause, what, monotonic() - began)
                with waiting():
                    self.changed.wait()
            self.waits = None

    @contextmanager
    def blocked(self, peer: int | None, what: str) -> Iterator[None]:
        """Report an uninterruptible wait for a peer (None: all others)."""
        before, self.waits = self.waits, (peer, what, monotonic())
        with waiting():
            yield
        self.waits = before

    def lost(self, peer: int | None, what: str, error: BaseException) -> NoReturn:
        """Raise RankError for a broken connection to a peer (None: to an unknown one)."""
        since = self.waits[2] if self.waits is not None else monotonic()
        if isinstance(error, DistNetworkError):  # making a group needs that of the default one
            self._raise(self._without_store(error, of_group=True), what, monotonic() - since, error)
        mine = Cause(self.rank, f"{self.doing()}: {describe_error(error)}")
        if peer is None:
            # Living ranks send a heartbeat per interval.
            with self.changed:
                self.changed.wait_for(lambda: self.cause is not None, 4 * self.interval)
            silent_one = min(self._others, key=lambda r: self.beats[r].heard)
            silent = monotonic() - self.beats[silent_one].heard
            peer = silent_one if silent > 2 * self.interval else None
        if peer is not None:
            reason = f"{self.beats[peer]}: its connection was closed without a word"
            mine = Cause(peer, reason, gone=True)
        self._raise(mine, what, monotonic() - since, error)

    def _raise(
        self, mine: Cause, what: str | None, waited: float, error: BaseException | None = None
    ) -> NoReturn:
        cause = self._agree(mine)
        raise self._rank_error(cause, what, waited) from error

    def _rank_error(self, cause: Cause, what: str | None, waited: float) -> RankError:
        return RankError(
            self.rank, self.doing(), cause.rank, cause.reason, what, waited, self._report
        )

    def _agree(self, mine: Cause) -> Cause:
        """Propose a cause, and return the one that all ranks agree on."""
        with self.changed:
            if self.cause is None:
                self._found = mine
                self._wake.set()
                self.changed.wait_for(lambda: self.cause is not None, self._patience / 2)
            cause = self._accept_cause(self.cause or self._without_store())

            def informed(rank: int) -> bool:
                beat, silence = self.beats[rank], 0.0 if cause.gone else 3 * self.interval
                return beat.knows or (rank == cause.rank and monotonic() - beat.heard > silence)

            if self.rank == 0:  # it may host the store, so it stays until the others know
                self.changed.wait_for(lambda: all(map(informed, self._others)), self.grace / 2)
        return cause

    def _accept_cause(self, cause: Cause) -> Cause:
        with self.changed:
            if self.cause is None:
                self._must_end_by = monotonic() + self.grace
                beats = [*self.beats]
                beats[self.rank] = self._beat(self._inside())
                steps = self._steps.copy()
                self._report = write_report(cause, self.rank, beats, steps, self._error)
                self.cause = cause
                self._wake.set()
                for disconnect in self.disconnects:
                    disconnect()
                # In parallel: an abort may wait for device work that another abort ends.
                for abort in self.aborts:
                    with suppress(RuntimeError):  # at shutdown Python starts no more threads
                        self.start("spectrain abort", abort)
                wake_stopped(self.beats[cause.rank].process)
            self.changed.notify_all()
            return self.cause

    def _without_store(self, error: BaseException | None = None, of_group: bool = False) -> Cause:
        reason = "the store that it keeps does not answer"
        if isinstance(error, DistNetworkError):
            reason = "its process has ended, with the store that it kept"
        elif isinstance(error, (TypeError, ValueError)):
            reason = f"the store has an entry that no rank of this version writes: {error}"
        elif error is not None:
            reason += f": {describe_error(error)}"
        elsewhere = self._kept_elsewhere and (of_group or not self._keeps_own)
        place = "of the process group, not of this pipeline" if elsewhere else self.beats[0]
        return Cause(0, f"{place}: {reason}")

    def _overdue(self, inside: Waits | None) -> Cause | None:
        if held_back():  # until the instruction ends, which may never happen
            return Cause(self.rank, f"{self.doing()}: KeyboardInterrupt, which waits for its end")
        absent = [r for r in self._others if not self.beats[r].text]
        limit = max(self.timeout, CONNECT_SECONDS) if absent else self.timeout
        waits = self.waits or inside
        if waits is None or monotonic() - waits[2] <= limit:
            return None
        if absent:
            return Cause(absent[0], f"meeting: it has not come within {limit:.1f} s")
        if self._failure:
            return Cause(self.rank, self._failure)
        patience = max(3 * self.interval, self.timeout / 2)
        cause, busy = find_culprit(self.beats, self.rank, waits[0], patience)
        return None if self._waits_for_progress and busy <= self.timeout else cause

    def _talk(self) -> None:
        """Exchange heartbeats until the run is over: the talking thread."""
        try:
            while not self._over.is_set():
                self._asking = monotonic()
                inside = self._inside()
                self._publish(inside)
                self._poll(inside)
                self._asking = None
                self._rest()
                self._wake.clear()
            self._publish(self._inside())
        except Exception as error:  # of any kind: this thread keeps the deadlines
            if not self._over.is_set():
                self._accept_cause(self._without_store(error))

    def _rest(self) -> None:
        pause, since = self.interval, self._listens_since
        if self.cause is not None:
            pause = min(self.interval / 4, self._check_interval / 2)
        elif since is not None:  # ever less often
            pause = min(max(0.0002, (monotonic() - since) / 16), 0.2, self.interval)
        end = monotonic() + pause
        while (left := end - monotonic()) > self._check_interval:
            if self._wake.wait(self._check_interval):
                return
            self._asking = monotonic()
            if self._store.get(FAILED):
                return
            self._asking = None
        self._wake.wait(left)

    def _beat(self, inside: Waits | None) -> Heartbeat:
        now, waits = monotonic(), None if self._failure else self.waits or inside
        count, last = self._shared
        return Heartbeat(
            text=b"",
            heard=now,
            doing=self.doing(),
            busy=now - self._steps[-1][1],
            waits=waits and waits[:2],
            shared=count,
            last=last,
            knows=self.cause is not None,
            process=this_process(),
            left=self._left,
            call=self._call,
        )

    def _inside(self) -> Waits | None:
        """Return the wait inside a stage, unless ``waits`` says for what this rank waits."""
        return None if self.waits else self.sharing.waits(self._steps[-1][1])

    def _publish(self, inside: Waits | None) -> None:
        _, _, *sent = self._beat(inside)
        self._store.set(self._keys[self.rank], json.dumps(sent))

    def _poll(self, inside: Waits | None) -> None:
        *texts, failed = self._store.multi_get([*self._keys, FAILED])
        now, before = monotonic(), self.beats
        beats = [
            beat if text == beat.text else Heartbeat(text, now, *json.loads(text))
            for text, beat in zip(texts, before, strict=True)
        ]
        early = (left[0] for left in self._left_now(beats) if left and left[1])
        self._ends_at = min(early, default=inf)
        with self.changed:  # a rank that comes late learns of both at once
            self.beats = beats
            if failed and self.cause is None:
                self._accept_cause(Cause(*json.loads(failed)))
            # after a failure, waits also end because a rank is silent
            if self.cause or [each.shared for each in beats] != [each.shared for each in before]:
                self.changed.notify_all()
        if not failed and (mine := self._found or self._overdue(inside)) is not None:
            mine = mine._replace(report=uuid4().hex)
            failed = self._store.compare_set(FAILED, "", json.dumps(mine))
        if failed and self.cause is None:
            self._accept_cause(Cause(*json.loads(failed)))

    def _guard(self) -> None:
        """End the process if its own thread is stuck: the guard thread."""
        while not self._over.wait(self.interval):
            asking = self._asking
            limit = max(self.timeout, self._patience) + 2 * self.interval
            if asking is not None and monotonic() - asking > limit:
                self._accept_cause(self._without_store())
            # a rank that has shared nothing is still making its stages, and learns of it later
            if self._shared[0] and monotonic() > self._must_end_by:
                assert self.cause is not None
                _, what, since = self.waits or (None, None, monotonic())
                error = self._rank_error(self.cause, what, monotonic() - since)
                remark = f"this rank did not end by itself within {self.grace:.0f} s"
                print(f"{error}; {remark}", file=sys.stderr, flush=True)
                os._exit(1)


_BOARDS: WeakSet[Board] = WeakSet()
os.register_at_fork(after_in_child=_BOARDS.clear)


@atexit.register
def _leave_all() -> None:
    # A thread that returns from torch while Python shuts down aborts the process (up to Python
    # 3.13), and the program's exit code is lost.
    for board in list(_BOARDS):
        run = board.latest_run()
        if isinstance(run, Generator) and getgeneratorstate(run) == GEN_SUSPENDED:
            error = getattr(sys, "last_value", None) or RuntimeError("the program has ended")
            with suppress(BaseException):  # nobody can catch it
                run.throw(error)
        with suppress(BaseException), deferred():
            board.finish()
