"""Board: where the ranks of one pipeline tell each other what they do, and which of them failed.

Three threads of a process use it during a run. The rank's own says what it does and whom it waits
for, and waits on ``changed`` alone. Another talks to the store: it publishes that, hears the
others, keeps the deadlines, and has all agree on the first cause. A call of the store may never
return, whatever its timeout is: with the keeping process stopped (SIGSTOP) none but ``set`` does
(measured with torch 2.13). So a third one guards, and ends a process whose own thread cannot.

A name is read without a lock, and what is more than one value is replaced as a whole.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any, NoReturn

from torch.distributed.distributed_c10d import Store

from spectrain_ext.errors import RankError, StageError
from spectrain_ext.interrupts import waiting

from .store import SLOW, connection
from .watch import FAILED, Beat, Cause, Watch, most_silent, suspect

#: What ranks tell all others before they open links: one that fails says that in all of these.
MEETING = "meeting"
TIES, WEIGHTS, KEYS, GPUS = (f"comparing {what}" for what in ("ties", "weights", "keys", "GPUs"))
_BEFORE_LINKS = (MEETING, TIES, WEIGHTS, KEYS, GPUS)
_LATE = "late"  # as what is said in the place of a rank that has not come


class Board:
    """One rank's side of the board: a store that all ranks read and write.

    In a run no wait outlasts its deadline, and all ranks agree on the first cause of a failure.
    Once a rank knows of one its own thread has ``grace`` to raise it; a thread that is stuck
    elsewhere cannot, and the process is ended from here.

    Args:
        store: the store; a connection of the board's own is made from it.
        rank: this rank, counted within the pipeline.
        ranks: their number.
        timeout: seconds that a wait may take.
        grace: seconds that a rank may take to end once it knows that another has failed.

    Attributes:
        changed: notified by whoever fulfils what ``wait`` waits for.
        interval: seconds between two heartbeats.
        beats: what each rank has last said.
        waits: what this rank waits for: another (None: all), what comes from there, and since when.
        cause: of a failure, the first one.

    Raises:
        RuntimeError: the store still has what this rank said in an earlier start.
        RankError: the store does not answer.
    """

    _watch: Watch

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
        self.waits: tuple[int | None, str, float] | None = None
        self.cause: Cause | None = None
        self._ended = 0  # runs
        self._away = False  # whether nobody waits for this rank any more before links are opened
        self._failure = ""  # of this rank within ``together``, which the others may not have
        self._lenient = False  # whether ranks may be waited for as long as they get on
        self._forget_beats()
        self.doing("starting")
        began, key = monotonic(), f"{MEETING}/{rank}"
        try:
            # first, as a new connection to a store that has gone is tried for a while
            said = json.loads(store.get(key)) if store.check([key]) else {_LATE: ""}
            # others block the given one, with rendezvous of process groups
            self._store = connection(store, min(timeout, grace), timeout)
            self._store.set(f"beat/{rank}", json.dumps(self.beat()))
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

    # Before links are opened.

    def meet(
        self, settings: dict[str, object], own: dict[str, object] | None = None
    ) -> list[dict[str, object]]:
        """Wait for all ranks, and check that all were given the same settings.

        Returns:
            What every rank says, by rank: its settings, and its own.

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
        store, began = self._store, monotonic()
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
        others = [f"away/{r}" for r in range(1, self.ranks) if r != culprit]
        with suppress(RuntimeError):  # of a store that has gone, or whoever does not come
            for where in _BEFORE_LINKS:
                self._store.compare_set(f"{where}/{self.rank}", "", said)
            self._store.set(f"away/{self.rank}", "")
            if self.rank == 0 and others:
                self._store.wait(others, timedelta(seconds=self.grace / 2))

    # What this rank does.

    def doing(self, *what: object) -> None:
        """Say what this rank does from here on; put into words only when somebody asks."""
        self._doing, self._since = what, monotonic()

    def action(self) -> str:
        return " ".join(map(str, self._doing))

    @contextmanager
    def run(self, starts: bool = False) -> Iterator[None]:
        """Take part in the board for the time of a run, or of its links being opened.

        Those are opened by means that cannot be interrupted. Over a link that loses packets it
        takes seconds longer for one than for others: deadlines of runs count from the end of that.

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
        self._failure, self._lenient = "", starts
        self._away = True  # who fails from here on says so by the watch
        self._forget_beats()
        self._watch = watch = Watch(self, self._store, self._ended + 1)
        watch.start()
        try:
            yield
            self._finish(starts)
        except BaseException as error:
            if not isinstance(error, RankError):
                what = str(error) if isinstance(error, StageError) else _described(error)
                self.fail(f"{self.action()}: {what}")
            raise
        finally:
            watch.stop()

    def _finish(self, starts: bool) -> None:
        """Wait for all ranks to finish the run: then nobody misses one that has gone home."""
        self.doing(self._failure or ("starting" if starts else "ending the run"))
        self._ended += 1
        watch = self._watch
        watch.finish()
        while not watch.ended:
            rank = next(iter(watch.missing), 0)
            what = f"rank {rank} {'to start' if starts else 'to end the run'}"
            self.wait(partial(self._has_ended, rank), rank, what)

    def _has_ended(self, rank: int) -> bool:
        return self._watch.ended or rank not in self._watch.missing

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Take part for the time of something that all ranks do together outside of a run.

        Inside, they wait for each other by means that cannot be interrupted: the deadline does not
        pass while the rank that keeps the others waiting has begun something new within it
        (``busy``). An exception there is expected on all ranks, as they tell each other theirs, and
        is no failure of the board; but a ConnectionError says that a rank has gone.

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
                    self.lost(None, what, error)
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
            self.waits = peer, what, began
            while not ready():
                if self.cause is not None:
                    self._raise(self.cause, what, monotonic() - began)
                with waiting():
                    self.changed.wait()
            self.waits = None

    @contextmanager
    def blocked(self, peer: int | None, what: str) -> Iterator[None]:
        """Inside, this rank waits where it cannot be interrupted.

        Args:
            peer: whom it waits for, None: all others.
            what: is waited on, for the report.
        """
        before, self.waits = self.waits, (peer, what, monotonic())
        with waiting():
            yield
        self.waits = before

    def lost_one_of(self, peers: Iterable[int], what: str, error: BaseException) -> NoReturn:
        """Raise RankError: a connection to one of these ranks has broken."""
        others = [peer for peer in peers if peer != self.rank]
        self.lost(others[0] if len(others) == 1 else None, what, error)

    def lost(self, peer: int | None, what: str, error: BaseException) -> NoReturn:
        """Raise RankError: the connection that ``what`` came by has broken.

        Args:
            peer: whose; None: one of the others, nobody says which. Who lives is heard of once per
                interval, and whoever has gone is not.
        """
        since = self.waits[2] if self.waits is not None else monotonic()
        silent = 0.0
        if peer is None:
            with self.changed:
                self.changed.wait_for(lambda: self.cause is not None, 4 * self.interval)
            peer, silent = most_silent(self.beats, self.rank)
            if silent <= 2 * self.interval:
                peer = None
        cause = Cause(self.rank, f"{self.action()}: {_described(error)}")
        if peer is not None:
            cause = Cause(peer, f"{self.beats[peer]}: its connection was closed without a word")
        self._raise(cause, what, monotonic() - since, error)

    # The first cause.

    def fail(self, reason: str) -> None:
        self._agree(Cause(self.rank, reason))

    def _raise(
        self, mine: Cause, what: str | None, waited: float, error: BaseException | None = None
    ) -> NoReturn:
        cause = self._agree(mine)
        raise RankError(self.rank, self.action(), cause.rank, cause.reason, what, waited) from error

    def _agree(self, mine: Cause) -> Cause:
        """Put a cause on the board; returns the one that was there first.

        Rank 0 may keep the store: it stays until all that still live know the cause.
        """
        watch = self._watch
        with self.changed:
            if self.cause is None:
                watch.found = mine
                watch.wake.set()
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
                self._watch.must_end_by = monotonic() + self.grace
                self._watch.wake.set()
            self.changed.notify_all()

    def without_store(self) -> Cause:
        return Cause(0, f"{self.beats[0]}: the store that it keeps does not answer")

    # What its watch asks.

    def _forget_beats(self) -> None:
        self.beats = [Beat(b"", monotonic()) for _ in range(self.ranks)]

    def beat(self) -> dict[str, object]:
        """What the others are told."""
        waits = None if self._failure else self.waits
        return {
            "doing": self.action(),
            "busy": monotonic() - self._since,
            "waits": None if waits is None else waits[:2],
            "ended": self._ended,
            "knows": self.cause is not None,
        }

    def overdue(self) -> Cause | None:
        """Whom this rank has waited for too long."""
        waits = self.waits
        if waits is None or monotonic() - waits[2] <= self.timeout:
            return None
        if self._failure:
            return Cause(self.rank, self._failure)
        patience = max(3 * self.interval, self.timeout / 2)
        cause, busy = suspect(self.beats, self.rank, waits[0], patience)
        return None if self._lenient and busy <= self.timeout else cause

    def last_words(self) -> str:
        """Why this process is ended."""
        cause, waits = self.cause or self.without_store(), self.waits
        what, waited = (None, 0.0) if waits is None else (waits[1], monotonic() - waits[2])
        report = RankError(self.rank, self.action(), cause.rank, cause.reason, what, waited)
        return f"{report}; this rank did not end by itself within {self.grace:.0f} s"


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
