"""Board: where the ranks of one pipeline tell each other what they do, and which of them failed.

Three threads of a process use it during a run: the rank's own, and the two of its ``Watch``. A name
is read without a lock, and what is more than one value is replaced as a whole:

    what                        is written by                          under ``changed``
    doing, since                the rank's own thread, by the action
    waits                       the rank's own thread, around a wait   in ``wait``
    failure, lenient, run       the rank's own thread
    cause                       whoever hears of it first, once        always
    watch.beats                 the talking thread, by the heartbeat   always
    watch.must_end_by           who learns the cause                   always
    watch.asking                the talking thread

``changed`` is notified of causes and beats, and by other threads of whatever ``wait`` waits for.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import inf
from time import monotonic
from typing import Any, NoReturn

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

from spectrain_ext.errors import RankError, StageError
from spectrain_ext.interrupts import waiting

from .blame import Cause, most_silent, seconds_stuck, suspect
from .watch import FAILED, SLOW, Watch, connection

#: What ranks tell all others before they open links: one that fails says that in all of these.
MEETING = "meeting"
TIES, WEIGHTS, KEYS, GPUS = (f"comparing {what}" for what in ("ties", "weights", "keys", "GPUs"))
_BEFORE_LINKS = (MEETING, TIES, WEIGHTS, KEYS, GPUS)
_LOOK = 0.1  # seconds between two looks at whether a rank has failed, where nothing else tells
_LATE = "late"  # as what is said in the place of a rank that has not come


class Board:
    """One rank's side of the board: a store that all ranks read and write.

    During a run its ``Watch`` tells the others what this rank does and hears what they do, so that
    no wait outlasts its deadline and all ranks agree on the first cause. Once it knows of a failure
    the rank's own thread has ``grace`` to raise it; a thread that is stuck elsewhere cannot, and
    the process is ended from there.

    Args:
        store: the store; connections of the board's own are made from it.
        rank: this rank, counted within the pipeline.
        ranks: their number.
        timeout: seconds that a wait may take.
        grace: seconds that a rank may take to end once it knows that another has failed.

    Attributes:
        rank, ranks, timeout, grace: as given.
        changed: notified by whoever fulfils what ``wait`` waits for.
        interval: seconds between two heartbeats.
        waits: what this rank waits for: another (None: all), what comes from there, and since when.
        cause: of a failure, the first one.

    Raises:
        RuntimeError: the store still has what this rank said in an earlier start.
        RankError: the store does not answer.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        timeout: float,
        grace: float = 5.0,
    ) -> None:
        self.rank, self.ranks, self.timeout, self.grace = rank, ranks, timeout, grace
        self.changed = threading.Condition()
        self.interval = min(max(timeout / 20, 0.02), 1.0)
        self._patience = max(3 * self.interval, timeout / 2)
        # A call blocks its connection: the watch's calls must not wait for the other's.
        self._patient_store = store
        self._watch = Watch(self)  # of a run; another one for every run
        began, key = monotonic(), f"{MEETING}/{rank}"
        try:
            # first, as a new connection to a store that has gone is tried for a while
            said = json.loads(store.get(key)) if store.check([key]) else {_LATE: ""}
            self._store = connection(store, min(timeout, grace), timeout)
            self._talking_store = connection(store, min(timeout, grace), timeout)
            if rank == 0:
                self._store.set(FAILED, "")
        except RuntimeError as error:
            self._miss_store(MEETING, began, error)
        if _LATE not in said:
            raise RuntimeError(
                "the process group's store has outlived a restart, and still has what this rank "
                "said before; give init_process_group a store whose prefix is "
                "TORCHELASTIC_RESTART_COUNT, as docs/checkpoints.md does"
            )
        self._away = False  # whether nobody waits for this rank any more before links are opened
        self._run = 0  # those that have been finished
        self._doing: tuple[object, ...] = ("starting",)
        self._since = monotonic()
        self._failure = ""  # of this rank within ``together``, which the others may not have
        self._lenient = False  # whether ranks may be waited for as long as they get on
        self.waits: tuple[int | None, str, float] | None = None
        self.cause: Cause | None = None

    def meet(
        self, settings: dict[str, object], own: dict[str, object] | None = None
    ) -> list[dict[str, object]]:
        """Wait for all ranks, and check that all were given the same.

        Args:
            settings: in which all must agree.
            own: what this rank has to say beside that.

        Returns:
            What every rank says, by rank.

        Raises:
            RankError: another has failed before it came here, or has not come in time.
            ValueError: another was given something else; names the rank and the setting.
        """
        found = self.gathered(MEETING, {**settings, **(own or {})})
        for r, theirs in enumerate(found):
            for name, value in json.loads(json.dumps(settings)).items():
                if theirs.get(name) != value:
                    raise ValueError(
                        f"{name}: rank {self.rank} has {value!r} and rank {r} has "
                        f"{theirs.get(name)!r}; all must have the same"
                    )
        return found

    def gathered(self, where: str, mine: object) -> list[Any]:
        """What every rank says, by rank, of JSON's types; all wait for one another.

        Args:
            where: of ``_BEFORE_LINKS``.
            mine: what this rank says.

        Raises:
            RankError: one has failed before it came here, or has not come in time; all who wait
                name the same one.
        """
        store, began = self._patient_store, monotonic()
        limit = max(self.timeout, SLOW) if where == MEETING else self.timeout
        keys = [f"{where}/{r}" for r in range(self.ranks)]
        try:
            store.compare_set(keys[self.rank], "", json.dumps({"said": mine}))
            try:
                store.wait(keys, timedelta(seconds=limit))
            except RuntimeError:  # said in the place of whoever is missing: all hear it at once
                late = json.dumps({_LATE: f"it has not come within {limit:.1f} s"})
                for key in keys:
                    store.compare_set(key, "", late)
            found = [json.loads(text) for text in store.multi_get(keys)]
        except RuntimeError as error:
            self._miss_store(where, began, error)
        for r, theirs in enumerate(found):
            if "said" not in theirs:
                (reason,) = theirs.values()
                failure = RankError(self.rank, where, r, f"{where}: {reason}")
                self.turn_away(failure)
                raise failure
        return [theirs["said"] for theirs in found]

    def _miss_store(self, where: str, began: float, error: RuntimeError) -> NoReturn:
        cause, waited = self.without_store(), monotonic() - began
        raise RankError(self.rank, where, 0, cause.reason, "the store", waited) from error

    def turn_away(self, error: BaseException) -> None:
        """Tell those who wait for this rank before links are opened that it does not come.

        Rank 0 may keep the store: it stays a moment, until the others have turned away as well.
        """
        if self._away:
            return
        self._away = True
        said = json.dumps({"failed": _described(error)})
        culprit = error.culprit if isinstance(error, RankError) else None
        others = [r for r in range(1, self.ranks) if r != culprit]
        with suppress(RuntimeError):  # of a store that has gone, or whoever does not come
            for where in _BEFORE_LINKS:
                self._store.compare_set(f"{where}/{self.rank}", "", said)
            self._store.set(f"away/{self.rank}", "")
            if self.rank == 0 and others:
                keys = [f"away/{r}" for r in others]
                self._patient_store.wait(keys, timedelta(seconds=self.grace / 2))

    # What this rank does.

    def doing(self, *what: object) -> None:
        """Say what this rank does from here on; put into words only when somebody asks."""
        self._doing, self._since = what, monotonic()

    def action(self) -> str:
        return " ".join(map(str, self._doing))

    @contextmanager
    def run(self, starts: bool = False) -> Iterator[None]:
        """Take part in the board for the time of a run, or of its links being opened.

        Those are opened by means that cannot be interrupted: the deadline is the thread's, as in
        ``together``. Over a link that loses packets it takes seconds longer for one than for
        others: deadlines of runs count from the end of that.

        An exception inside is the failure of this rank, unless another has failed before; a
        RankError then takes its place only if it is one.

        Raises:
            RuntimeError: an earlier run has failed.
        """
        if self.cause is not None:
            raise RuntimeError(
                f"run: an earlier run of this pipeline has failed (rank {self.cause.rank}, "
                f"{self.cause.reason}), and what was in flight is lost; start the processes again"
            )
        self.doing("starting" if starts else "beginning a run")
        self._failure = ""
        self._starts = self._lenient = starts
        self._away = True  # who fails from here on says so by the watch
        self._watch = watch = Watch(self)
        watch.start(self._talking_store)
        try:
            yield
            self._finish()
        except BaseException as error:
            if not isinstance(error, RankError):
                what = str(error) if isinstance(error, StageError) else _described(error)
                self.fail(f"{self.action()}: {what}")
            raise
        finally:
            watch.stop()

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
                self.waits = None, what, monotonic()
                try:
                    yield
                except ConnectionError as error:
                    self.lost_any(what, error)
                except Exception as error:
                    failure = error
                    self._failure = f"{what}: {_described(error)}"
                finally:
                    self.waits = None
        except RankError as report:
            if failure is not None:
                raise report from failure
            raise
        if failure is not None:
            raise failure

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Inside, this rank waits for nobody, although it is within ``together``."""
        waits, self.waits = self.waits, None
        before = self._doing
        self.doing(what)
        try:
            yield
        finally:
            self.doing(*before)
            if waits is not None:
                self.waits = *waits[:2], monotonic()

    def _finish(self) -> None:
        """Wait for all ranks to finish the run: then nobody misses one that has gone home.

        Rank 0 may keep the store, and leaves when all others have heard that all have finished.
        """
        self.doing(self._failure or ("starting" if self._starts else "ending the run"))
        to_do = "to start" if self._starts else "to end the run"
        before, self._run = self._run, self._run + 1
        self._say("ended")
        self._meet("ended", to_do)
        if self.rank == 0:
            self._meet("left", to_do)
        else:
            self._watch.stop()  # the store may be gone as soon as rank 0 has heard this
            self._say("left")
        with suppress(RuntimeError):
            for what in ("ended", "left"):  # nobody waits for these any more
                self._store.delete_key(f"{what}/{before}/{self.rank}")

    def _say(self, what: str) -> None:
        with suppress(RuntimeError):  # of a store that has gone; who waits for others hears of it
            self._store.set(f"{what}/{self._run}/{self.rank}", "")

    def _meet(self, what: str, to_do: str) -> None:
        """Wait until all others have said this."""
        keys = {f"{what}/{self._run}/{r}": r for r in range(self.ranks) if r != self.rank}
        store, began, missing = self._store, monotonic(), next(iter(keys.values()), 0)
        while keys:
            awaited = f"rank {missing} {to_do}"
            self.waits = missing, awaited, began
            try:
                with waiting():
                    store.wait(list(keys), timedelta(seconds=_LOOK))
                break
            except DistStoreError:  # some have not: has a rank failed?
                pass
            except RuntimeError as error:
                self._raise(self._agree(self.without_store()), awaited, 0.0, error)
            left = began + self.timeout - monotonic()
            if self.cause is not None or (left <= 0 and self.timeout <= self._stuck()):
                cause = self.cause or self._agree(self._suspect(missing))
                self._raise(cause, awaited, monotonic() - began)
            missing = next((r for key, r in keys.items() if not store.check([key])), missing)
        self.waits = None

    # What its watch asks.

    def beat(self) -> dict[str, object]:
        """What the others are told."""
        now, waits = monotonic(), None if self._failure else self.waits
        return {
            "doing": self.action(),
            "busy": now - self._since,
            "waits": None if waits is None else waits[:2],
        }

    def overdue(self) -> Cause | None:
        """Of a wait that the rank's own thread does not end: it cannot, or is about to."""
        waits, late = self.waits, self.timeout + 2 * self.interval
        if waits is None or monotonic() - waits[2] <= late or self._stuck() <= late:
            return None
        return self._suspect(waits[0])

    def last_words(self) -> str:
        """Why this process is ended."""
        cause, waits = self.cause or self.without_store(), self.waits
        what, waited = (None, 0.0) if waits is None else (waits[1], monotonic() - waits[2])
        report = RankError(self.rank, self.action(), cause.rank, cause.reason, what, waited)
        return f"{report}; this rank did not end by itself within {self.grace:.0f} s"

    # Waiting.

    def check(self) -> None:
        if self.cause is not None:
            self._raise(self.cause, None, 0.0)

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
            self.waits = (peer, what, began)
            while not ready() and self.cause is None:
                left = began + self.timeout - monotonic()
                if left <= 0 and (left := self.timeout - self._stuck()) <= 0:
                    break
                with waiting():
                    self.changed.wait(left)
            cause = None if ready() else self.cause
            if ready():
                self.waits = None
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
        before, self.waits = self.waits, (peer, what, monotonic())
        with waiting():
            yield
        self.waits = before

    def lost(self, peer: int, what: str, error: BaseException) -> NoReturn:
        """Raise RankError: the connection that ``what`` came by has broken."""
        since = self.waits[2] if self.waits is not None else monotonic()
        self._raise(self._agree(self._closed(peer)), what, monotonic() - since, error)

    def _closed(self, rank: int) -> Cause:
        return Cause(rank, f"{self._watch.beats[rank]}: its connection was closed without a word")

    def lost_any(self, what: str, error: BaseException) -> NoReturn:
        """Raise RankError: a connection to one of the others has broken, nobody says which.

        Who lives is heard of once per interval; whoever has gone is not.
        """
        since = monotonic()
        with self.changed:
            self.changed.wait_for(lambda: self.cause is not None, 4 * self.interval)
        rank, silent = most_silent(self._watch.beats, self.rank)
        cause = Cause(self.rank, f"{self.action()}: {_described(error)}")
        if silent > 2 * self.interval:
            cause = self._closed(rank)
        self._raise(self._agree(cause), what, monotonic() - since, error)

    def lost_one_of(self, peers: Iterable[int], what: str, error: BaseException) -> NoReturn:
        """Raise RankError: a connection to one of these ranks has broken."""
        others = [peer for peer in peers if peer != self.rank]
        if len(others) == 1:
            self.lost(others[0], what, error)
        self.lost_any(what, error)

    def fail(self, reason: str) -> None:
        self._agree(Cause(self.rank, reason))
        self._stay()

    def _raise(
        self, cause: Cause, what: str | None, waited: float, error: BaseException | None = None
    ) -> NoReturn:
        self._stay()
        raise RankError(self.rank, self.action(), cause.rank, cause.reason, what, waited) from error

    # The first cause.

    def _agree(self, mine: Cause) -> Cause:
        """Put a cause on the board; returns the one that was there first."""
        with self.changed:
            if self.cause is not None:
                return self.cause
            self._watch.must_end_by = monotonic() + self.grace
        asking = self._watch.asking
        if asking is not None and monotonic() - asking > self.grace / 4:
            mine = self.without_store()  # which answers within milliseconds, or has stopped
        else:
            try:
                said = self._store.compare_set(FAILED, "", json.dumps(mine))
                mine = Cause.read(said) or mine
            except (RuntimeError, ValueError):  # it has gone with the rank that kept it
                mine = self.without_store()
        self.learn(mine)
        return mine

    def learn(self, cause: Cause) -> None:
        with self.changed:
            if self.cause is None:
                self.cause = cause
                self._watch.must_end_by = monotonic() + self.grace
            self.changed.notify_all()
        self._watch.wake.set()

    def without_store(self) -> Cause:
        return Cause(0, f"{self._watch.beats[0]}: the store that it keeps does not answer")

    def _suspect(self, peer: int | None) -> Cause:
        if self._failure:
            return Cause(self.rank, self._failure)
        return suspect(self._watch.beats, self.rank, peer, self._patience)

    def _stuck(self) -> float:
        """Seconds since whoever keeps the others waiting has got on; infinity where none may."""
        if not self._lenient or self._failure:
            return inf
        return seconds_stuck(self._watch.beats, self.rank, self._patience)

    def _stay(self) -> None:
        """Rank 0 may keep the store: it stays until all that still live have read the cause."""
        cause = self.cause
        if self.rank != 0 or cause is None:
            return
        until = monotonic() + self.grace / 2
        try:
            while monotonic() < until:
                missing = [r for r in range(1, self.ranks) if not self._store.check([f"seen/{r}"])]
                if not any(r != cause.rank or self._lives(r) for r in missing):
                    return
                self._watch.wake.wait(self.interval / 4)
        except RuntimeError:
            pass

    def _lives(self, rank: int) -> bool:
        """Whether the rank has been heard of just now, even if its own thread is stuck."""
        return monotonic() - self._watch.beats[rank].heard < 3 * self.interval


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
