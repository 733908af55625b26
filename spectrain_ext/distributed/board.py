"""Board: where the ranks of one pipeline tell each other what they do, and which of them failed."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import inf
from time import monotonic

from torch.distributed.distributed_c10d import Store

from spectrain_ext.errors import RankError, StageError

from .blame import Beat, Cause, most_silent, seconds_stuck, suspect

_FAILED = "failed"


class Board:
    """One rank's side of the board: a store that all ranks read and write.

    During a run a thread of its own tells the others what this rank does and hears what they do
    (their heartbeats), so that no wait outlasts its deadline and all ranks agree on the first
    cause. Once it knows of a failure the rank's own thread has ``grace`` to raise it; a thread that
    is stuck elsewhere cannot, and the process is ended from here.

    Args:
        store: the store; connections of the board's own are made from it.
        rank: this rank, counted within the pipeline.
        ranks: their number.
        timeout: seconds that a wait may take.
        grace: seconds that a rank may take to end once it knows that another has failed.
        end: ends the process; it is given the report.

    Attributes:
        changed: notified by whoever fulfils what ``wait`` waits for.

    Raises:
        RuntimeError: the store still has what this rank said in an earlier start.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        timeout: float,
        grace: float = 5.0,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self.rank, self.ranks, self.timeout, self.grace = rank, ranks, timeout, grace
        self.changed = threading.Condition()
        self._end = end or _end_process
        self._interval = min(max(timeout / 20, 0.02), 1.0)
        self._patience = max(3 * self._interval, timeout / 2)
        patience = timedelta(seconds=min(timeout, grace))
        # A call blocks its connection: the thread's calls must not wait for the other's.
        self._store, self._threads_store = _connection(store), _connection(store)
        self._patient_store = store  # ranks may start minutes apart
        for connection in (self._store, self._threads_store):
            connection.set_timeout(patience)
        if self._store.check([f"settings/{rank}"]):
            raise RuntimeError(
                "the process group's store has outlived a restart, and still has what this rank "
                "said before; give init_process_group a store whose prefix is "
                "TORCHELASTIC_RESTART_COUNT, as docs/checkpoints.md does"
            )
        if rank == 0:
            self._store.set(_FAILED, "")
        self._keys = [f"beat/{r}" for r in range(ranks)]
        self._came = self._opened = False  # in ``meet``, in ``begin``
        self._beats: list[Beat] = []
        self._said = 0
        self._phase = 0  # twice the number of finished runs, one more between the two
        self._doing: tuple[object, ...] = ("starting",)
        self._failure = ""  # of this rank within ``together``, which the others may not have
        self._lenient = False  # whether ranks may be waited for as long as they get on
        self._since = monotonic()
        self._waits: tuple[int | None, str, float] | None = None  # rank None: all others
        self._cause: Cause | None = None
        self._asking: float | None = None  # since when the thread waits for the store
        self._wake = threading.Event()
        self._hurried: float | None = None  # since when
        self._parting = False
        self._over = threading.Event()  # of the run
        self._must_end_by: float | None = None

    def meet(self, settings: dict[str, object]) -> None:
        """Wait for all ranks, and check that all were given the same.

        Raises:
            RankError: another has failed before it came here.
            ValueError: another was given something else; names the rank and the setting.
        """
        mine = json.dumps(settings)
        self._came = True
        self._store.set(f"settings/{self.rank}", mine)
        keys = [f"settings/{r}" for r in range(self.ranks)]
        self._patient_store.wait(keys)
        for r, text in enumerate(self._patient_store.multi_get(keys)):
            theirs = json.loads(text)
            if "failed" in theirs:
                raise RankError(self.rank, "meeting", r, f"meeting: {theirs['failed']}")
            for name, value in json.loads(mine).items():
                if theirs.get(name) != value:
                    raise ValueError(
                        f"{name}: rank {self.rank} has {value!r} and rank {r} has "
                        f"{theirs.get(name)!r}; all must have the same"
                    )

    def begin(self) -> None:
        """Wait until all ranks have opened their edges: deadlines count from here on.

        Over a link that loses packets opening them can take seconds longer for one than for others.

        Raises:
            RankError: another has failed in that.
        """
        self._opened = True
        self._store.set(f"opened/{self.rank}", "")
        keys = [f"opened/{r}" for r in range(self.ranks)]
        self._patient_store.wait(keys)
        for r, reason in enumerate(self._patient_store.multi_get(keys)):
            if reason:
                raise RankError(self.rank, "starting", r, f"starting: {reason.decode()}")

    def turn_away(self, error: BaseException) -> None:
        """Tell those who wait in ``meet`` or ``begin`` that this rank does not come."""
        if not self._came:
            self._store.set(f"settings/{self.rank}", json.dumps({"failed": _described(error)}))
        elif not self._opened:
            self._store.set(f"opened/{self.rank}", _described(error))

    # What this rank does.

    def doing(self, *what: object) -> None:
        """Say what this rank does from here on; put into words only when somebody asks."""
        self._doing, self._since = what, monotonic()

    def action(self) -> str:
        """What this rank does, in words."""
        return " ".join(map(str, self._doing))

    @contextmanager
    def run(self) -> Iterator[None]:
        """Take part in the board for the time of a run.

        An exception inside is the failure of this rank, unless another has failed before; a
        RankError then takes its place only if it is one.

        Raises:
            RuntimeError: an earlier run has failed.
        """
        if self._cause is not None:
            raise RuntimeError(
                f"run: an earlier run of this pipeline has failed (rank {self._cause.rank}, "
                f"{self._cause.reason}), and what was in flight is lost; start the processes again"
            )
        self.doing("beginning a run")
        self._failure = ""
        self._lenient = False
        self._beats = [Beat(b"", monotonic()) for _ in range(self.ranks)]
        self._asking = self._must_end_by = None
        self._hurried, self._parting = None, False
        self._over = over = threading.Event()
        threads = [
            threading.Thread(target=self._watch, args=(over,), name="spectrain board", daemon=True),
            threading.Thread(target=self._guard, args=(over,), name="spectrain guard", daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            yield
            self._finish()
        except GeneratorExit:  # the caller has left the loop, the run has been drained
            self._finish()
            raise
        except BaseException as error:
            if not isinstance(error, RankError):
                what = str(error) if isinstance(error, StageError) else _described(error)
                self.fail(f"{self.action()}: {what}")
            raise
        finally:
            over.set()
            self._wake.set()
            for thread in threads:
                thread.join(self.grace)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Take part for the time of something that all ranks do together outside of a run.

        Inside, they wait for each other by means that cannot be interrupted: the deadline is the
        thread's, and does not pass while the rank that keeps the others waiting has begun something
        new within it (``busy``). An exception there is expected on all ranks, as they tell each
        other theirs, and is no failure of the board; but a ConnectionError says that a rank has
        gone.

        Raises:
            RankError: a rank has failed, or the deadline has passed.
            RuntimeError: an earlier run has failed.
        """
        failure: Exception | None = None
        try:
            with self.run():
                self.doing(what)
                self._lenient = True
                self._waits = None, what, monotonic()
                try:
                    yield
                except ConnectionError as error:
                    self._lost_any(what, error)
                except Exception as error:
                    failure = error
                    self._failure = f"{what}: {_described(error)}"
                finally:
                    self._waits = None
        except RankError as report:
            if failure is not None:
                raise report from failure
            raise
        if failure is not None:
            raise failure

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Inside, this rank waits for nobody, although it is within ``together``."""
        waits, self._waits = self._waits, None
        before = self._doing
        self.doing(what)
        try:
            yield
        finally:
            self.doing(*before)
            if waits is not None:
                self._waits = *waits[:2], monotonic()

    def _finish(self) -> None:
        """Wait for all ranks to finish the run: then nobody misses one that has gone home.

        Rank 0 may keep the store, and leaves when all others have heard that all have finished.
        """
        self.doing(self._failure or "ending the run")
        self._hurried = monotonic()
        self._wake.set()
        for needed in range(2 if self.rank == 0 else 1):
            self._phase += 1
            goal = self._phase
            for r in range(self.ranks):
                if r != self.rank and (needed == 0 or self._beats[r].phase < goal):
                    self._wait_for_phase(r, goal)
        if self.rank != 0:
            self._parting = True
            self._phase += 1
            said = self._said
            self.wait(lambda: self._said > said + 1, 0, "the store")

    def _wait_for_phase(self, rank: int, phase: int) -> None:
        self.wait(lambda: self._beats[rank].phase >= phase, rank, f"rank {rank} to end the run")

    # Waiting.

    def check(self) -> None:
        """Raise RankError if it is known that a rank has failed."""
        if self._cause is not None:
            self._raise(self._cause, None, 0.0)

    def wait(self, ready: Callable[[], bool], peer: int, what: str) -> None:
        """Wait until ``ready()``, which is asked again whenever ``changed`` is notified.

        Args:
            ready: asked with ``changed`` held.
            peer: the rank that has to do something for it.
            what: is waited on, for the report.

        Raises:
            RankError: a rank has failed, or the deadline has passed.
        """
        with self.changed:
            if ready():
                return
            began = monotonic()
            self._waits = (peer, what, began)
            while not ready() and self._cause is None:
                left = began + self.timeout - monotonic()
                if left <= 0 and (left := self.timeout - self._stuck()) <= 0:
                    break
                self.changed.wait(left)
            cause = None if ready() else self._cause
            if ready():
                self._waits = None
                return
        waited = monotonic() - began
        self._raise(cause or self._agree(self._suspect(peer)), what, waited)

    @contextmanager
    def blocked(self, peer: int | None, what: str) -> Iterator[None]:
        """Inside, this rank waits where it cannot be interrupted; its deadline is the thread's.

        Args:
            peer: whom it waits for, None: all others.
            what: is waited on, for the report.
        """
        self._waits = (peer, what, monotonic())
        yield
        self._waits = None

    def lost(self, peer: int, what: str, error: BaseException) -> None:
        """Raise RankError: the connection that ``what`` came by has broken."""
        since = self._waits[2] if self._waits is not None else monotonic()
        reason = f"{self._beats[peer]}: its connection was closed without a word"
        cause = self._agree(Cause(peer, reason))
        try:
            self._raise(cause, what, monotonic() - since)
        except RankError as report:
            raise report from error

    def _lost_any(self, what: str, error: BaseException) -> None:
        """Raise RankError: a connection to one of the others has broken, nobody says which.

        Who lives is heard of once per interval; whoever has gone is not.
        """
        since = monotonic()
        with self.changed:
            self.changed.wait_for(lambda: self._cause is not None, 4 * self._interval)
        rank, silent = most_silent(self._beats, self.rank)
        if silent > 2 * self._interval:
            cause = Cause(rank, f"{self._beats[rank]}: its connection was closed without a word")
        else:
            cause = Cause(self.rank, f"{self.action()}: {_described(error)}")
        try:
            self._raise(self._agree(cause), what, monotonic() - since)
        except RankError as report:
            raise report from error

    def lost_one_of(self, peers: Iterable[int], what: str, error: BaseException) -> None:
        """Raise RankError: a connection to one of these ranks has broken."""
        others = [peer for peer in peers if peer != self.rank]
        if len(others) == 1:
            self.lost(others[0], what, error)
        self._lost_any(what, error)

    def fail(self, reason: str) -> None:
        """Tell all ranks that this one has failed."""
        self._agree(Cause(self.rank, reason))
        self._stay()

    def _raise(self, cause: Cause, what: str | None, waited: float) -> None:
        self._stay()
        raise RankError(self.rank, self.action(), cause.rank, cause.reason, what, waited)

    # The first cause.

    def _agree(self, mine: Cause) -> Cause:
        """Put a cause on the board; returns the one that was there first."""
        with self.changed:
            if self._cause is not None:
                return self._cause
            self._must_end_by = monotonic() + self.grace
        silent = self._silence()
        if silent is None:
            try:
                said = self._store.compare_set(_FAILED, "", json.dumps(mine))
                mine = Cause.read(said) or mine
            except (RuntimeError, ValueError):  # the store has gone with the rank that kept it
                mine = self._without_store()
        else:
            mine = silent
        self._learn(mine)
        return mine

    def _learn(self, cause: Cause) -> None:
        with self.changed:
            if self._cause is None:
                self._cause = cause
                self._must_end_by = monotonic() + self.grace
            self.changed.notify_all()
        self._wake.set()

    def _silence(self) -> Cause | None:
        """The store answers within milliseconds, or its keeper has stopped."""
        asking = self._asking
        if asking is not None and monotonic() - asking > self.grace / 4:
            return self._without_store()
        return None

    def _without_store(self) -> Cause:
        last = self._beats[0] if self._beats else "before its first run"
        return Cause(0, f"{last}: the store that it keeps does not answer")

    def _suspect(self, peer: int | None) -> Cause:
        if self._failure:
            return Cause(self.rank, self._failure)
        return suspect(self._beats, self.rank, peer, self._patience)

    def _stuck(self) -> float:
        """Seconds since whoever keeps the others waiting has got on; infinity where none may."""
        if not self._lenient or self._failure:
            return inf
        return seconds_stuck(self._beats, self.rank, self._patience)

    def _stay(self) -> None:
        """Rank 0 may keep the store: it stays until all that still live have read the cause."""
        cause = self._cause
        if self.rank != 0 or cause is None:
            return
        until = monotonic() + self.grace / 2
        try:
            while monotonic() < until:
                missing = [r for r in range(1, self.ranks) if not self._store.check([f"seen/{r}"])]
                if not any(r != cause.rank or self._lives(r) for r in missing):
                    return
                self._wake.wait(self._interval / 4)
        except RuntimeError:
            pass

    def _lives(self, rank: int) -> bool:
        """Whether the rank has been heard of just now, even if its own thread is stuck."""
        return bool(self._beats) and monotonic() - self._beats[rank].heard < 3 * self._interval

    # The threads.

    def _watch(self, over: threading.Event) -> None:
        """Talk with the others; a store whose keeper has stopped lets this wait for ever."""
        store = self._threads_store
        try:
            while not over.is_set():
                self._asking = monotonic()
                self._say(store)
                self._hear(store)
                self._keep_deadline(store)
                if self._cause is not None:
                    store.set(f"seen/{self.rank}", "1")
                self._asking = None
                self._pause()
        except (RuntimeError, ValueError):
            if self._parting:  # rank 0 has heard what it waits for, and left before its answer came
                with self.changed:
                    self._said += 2
                    self.changed.notify_all()
            elif not over.is_set():
                self._learn(self._without_store())

    def _guard(self, over: threading.Event) -> None:
        """Keep the deadlines when all other threads are stuck."""
        while not over.wait(self._interval):
            asking = self._asking
            if asking is not None and monotonic() - asking > self.timeout + 2 * self._interval:
                self._learn(self._without_store())
            if self._must_end_by is not None and monotonic() > self._must_end_by:
                self._leave()
                return

    def _keep_deadline(self, store: Store) -> None:
        """Of a wait that the rank's own thread does not end: it cannot, or is about to."""
        waits = self._waits
        if waits is None or self._cause is not None:
            return
        late = self.timeout + 2 * self._interval
        if monotonic() - waits[2] > late and self._stuck() > late:
            mine = self._suspect(waits[0])
            said = store.compare_set(_FAILED, "", json.dumps(mine))
            self._learn(Cause.read(said) or mine)

    def _pause(self) -> None:
        pause = self._interval
        if self._hurried is not None and self._cause is None:
            # Less often where others take long: every 2 ms would take a core's time from them.
            pause = min(pause, max(0.002, (monotonic() - self._hurried) / 20))
        self._wake.wait(pause)
        self._wake.clear()

    def _say(self, store: Store) -> None:
        now, waits = monotonic(), None if self._failure else self._waits
        beat = {
            "count": self._said,
            "phase": self._phase,
            "doing": self.action(),
            "busy": now - self._since,
            "waits": None if waits is None else waits[:2],
        }
        store.set(f"beat/{self.rank}", json.dumps(beat))

    def _hear(self, store: Store) -> None:
        known = [
            r for r in range(self.ranks) if self._beats[r].text or store.check([self._keys[r]])
        ]
        *texts, failed = store.multi_get([*(self._keys[r] for r in known), _FAILED])
        now = monotonic()
        with self.changed:
            for r, text in zip(known, texts, strict=True):
                if text != self._beats[r].text:
                    self._beats[r] = Beat.read(text, now)
            self._said += 1
            self.changed.notify_all()
        cause = Cause.read(failed)
        if cause is not None and self._cause is None:
            self._learn(cause)

    def _leave(self) -> None:
        """End the process: its own thread has not ended the run in time."""
        cause = self._cause or self._without_store()
        waits = self._waits
        what, waited = (None, 0.0) if waits is None else (waits[1], monotonic() - waits[2])
        report = RankError(self.rank, self.action(), cause.rank, cause.reason, what, waited)
        self._end(f"{report}; this rank did not end by itself within {self.grace:.0f} s")


def _connection(store: Store) -> Store:
    """A connection of its own to the same store."""
    made: Store = store.clone()  # type: ignore[attr-defined]
    return made


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _end_process(report: str) -> None:
    sys.stderr.write(report + "\n")
    sys.stderr.flush()
    os._exit(1)
