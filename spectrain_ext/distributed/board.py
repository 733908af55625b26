"""Board: where the ranks of one pipeline meet, and what they do together; all end as one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any

from torch.distributed.distributed_c10d import Store

from spectrain_ext.errors import RankError, StageError

from .store import SLOW, come, connection
from .watch import FAILED, Cause, Watch, described

#: What ranks tell all others before they open links: one that fails says that in all of these.
MEETING = "meeting"
TIES, WEIGHTS, KEYS, GPUS = (f"comparing {what}" for what in ("ties", "weights", "keys", "GPUs"))
_BEFORE_LINKS = (MEETING, TIES, WEIGHTS, KEYS, GPUS)
_LATE = "late"  # as what is said in the place of a rank that has not come


class Board(Watch):
    """One rank's side of a store that all ranks read and write.

    Raises:
        RuntimeError: the store still has what this rank said in an earlier start.
        RankError: the store does not answer.
    """

    def __init__(
        self, store: Store, rank: int, ranks: int, timeout: float, grace: float = 5.0
    ) -> None:
        super().__init__(rank, ranks, timeout, grace)
        self._away = False  # whether nobody waits for this rank any more before links are opened
        key = f"{MEETING}/{rank}"
        with self._reaching_store(MEETING):
            # first, as a new connection to a store that has gone is tried for a while
            outlived = store.check([key]) and _LATE not in json.loads(store.get(key))
            # others block the given one, with rendezvous of process groups
            self._store = connection(store, min(timeout, grace), timeout)
            self._store.set(f"beat/{rank}", json.dumps(self._beat()))
            if rank == 0:
                self._store.set(FAILED, "")
        if outlived:
            raise RuntimeError(
                "the process group's store has outlived a restart, and still has what this rank "
                "said before; give init_process_group a store whose prefix is "
                "TORCHELASTIC_RESTART_COUNT, as docs/checkpoints.md does"
            )

    # Before links are opened.

    def meet(
        self, settings: dict[str, object], own: dict[str, object] | None = None
    ) -> list[dict[str, object]]:
        """What every rank says, by rank: settings, in which all must agree, and its own.

        Raises:
            ValueError: names the setting, and a rank that was given another.
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

        ``where`` is one of ``_BEFORE_LINKS``. Should a rank fail before it comes here, or not come
        in time, all who wait raise a RankError that names the same one.
        """
        store = self._store
        limit = max(self.timeout, SLOW) if where == MEETING else self.timeout
        keys = [f"{where}/{r}" for r in range(self.ranks)]
        with self._reaching_store(where):
            store.compare_set(keys[self.rank], "", json.dumps({"said": mine}))
            if not come(store, keys, limit):
                # said in the place of whoever is missing: all hear it at once
                late = json.dumps({_LATE: f"it has not come within {limit:.1f} s"})
                for key in keys:
                    store.compare_set(key, "", late)
            found = [json.loads(text) for text in store.multi_get(keys)]
        for r, theirs in enumerate(found):
            if "said" not in theirs:
                (reason,) = theirs.values()
                failure = RankError(self.rank, where, r, f"{where}: {reason}")
                self.turn_away(failure)
                raise failure
        return [theirs["said"] for theirs in found]

    @contextmanager
    def _reaching_store(self, where: str) -> Iterator[None]:
        began = monotonic()
        try:
            yield
        except RuntimeError as error:
            cause, waited = self.without_store(), monotonic() - began
            raise RankError(self.rank, where, 0, cause.reason, "the store", waited) from error

    def turn_away(self, error: BaseException) -> None:
        """Tell those who wait for this rank before links are opened that it does not come.

        Rank 0 may keep the store: it stays a moment, until the others have turned away as well.
        """
        if self._away:
            return
        self._away = True
        said = json.dumps({"failed": described(error)})
        culprit = error.culprit if isinstance(error, RankError) else None
        others = [f"away/{r}" for r in range(1, self.ranks) if r != culprit]
        with suppress(RuntimeError):  # of a store that has gone, or whoever does not come
            for where in _BEFORE_LINKS:
                self._store.compare_set(f"{where}/{self.rank}", "", said)
            self._store.set(f"away/{self.rank}", "")
            if self.rank == 0 and others:
                come(self._store, others, self.grace / 2)

    # What goes on.

    @contextmanager
    def run(self, starts: bool = False) -> Iterator[None]:
        """Take part for the time of a run, or of its links being opened (``starts``).

        These are opened by means that cannot be interrupted. Over a link that loses packets it
        takes seconds longer for one than for others: deadlines of runs count from the end of that.
        An exception inside is the failure of this rank, unless another has failed before.
        """
        if self.cause is not None:
            raise RuntimeError(
                f"run: an earlier run of this pipeline has failed (rank {self.cause.rank}, "
                f"{self.cause.reason}), and what was in flight is lost; start the processes again"
            )
        self.doing("starting" if starts else "beginning a run")
        self._away = True  # who fails from here on says so by the watch
        self._start(lenient=starts)
        try:
            yield
            self.doing(self._failure or ("starting" if starts else "ending the run"))
            self._finish("to start" if starts else "to end the run")
        except BaseException as error:
            if not isinstance(error, RankError):
                what = str(error) if isinstance(error, StageError) else described(error)
                self._agree(Cause(self.rank, f"{self.action()}: {what}"))
            raise
        finally:
            self._stop()

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Take part for the time of something that all ranks do together outside of a run.

        Inside, they wait for each other by means that cannot be interrupted: the deadline does not
        pass while the rank that keeps the others waiting has begun something new within it
        (``busy``). An exception there is expected on all ranks, as they tell each other theirs, and
        is no failure of the board; but a ConnectionError says that a rank has gone.
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
                    self._failure = f"{what}: {described(error)}"
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
