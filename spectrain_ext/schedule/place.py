"""Defines a stage's place in its pipeline, and which ranks run its replicas."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from spectrain_ext.errors import check_int


class Place(NamedTuple):
    """One stage of one pipeline: all that schedules and methods need to know about it.

    With replicas ``window`` and ``microbatches`` are one replica's share.

    Attributes:
        stage: the index k, from 0.
        stages: the number of stages N.
        window: microbatches that the stage may have in flight, at least 1.
        microbatches: the number M of microbatches in a minibatch; one update follows the last.
        latest: the most updates between a forward and its backward on stage 0, the latest of all.

    Example:
        >>> from spectrain_ext.schedule import Place
        >>> Place(stage=0, stages=4, window=4, latest=3)
        Place(stage=0, stages=4, window=4, microbatches=1, latest=3)
    """

    stage: int
    stages: int
    window: int
    microbatches: int = 1
    latest: int = 0


class Replicas:
    """The number of replicas of every stage: which rank each is, and which microbatches it runs.

    Replicas are numbered stage by stage, and each is a rank. If ranks have several stages, number s
    is on rank s mod R. Replica j mod r of a stage with r replicas runs microbatch j of every
    minibatch: the 1F1B-RR of PipeDream (Narayanan et al., 2019).

    Args:
        counts: replicas of every stage, each at least 1.
        ranks: fewer than stages, which then have one replica each; None: one per replica.
        rows: the ranks of every replica by number, as many of each, if these are others: several
            share one by tensor parallelism.

    Attributes:
        counts: as given.
        stages: the number of stages.
        total: the number of all replicas.
        rows: as given.
        ranks: the number of processes.
        dealt: whether any stage has more than one replica.

    Example:
        >>> from spectrain_ext.schedule import Replicas
        >>> replicas = Replicas([2, 1])
        >>> replicas.ranks, list(replicas.ranks_of(0)), replicas.stages_on(2)
        (3, [0, 1], [1])
    """

    def __init__(
        self,
        counts: Sequence[int],
        ranks: int | None = None,
        rows: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.counts = tuple(counts)
        self.stages = len(self.counts)
        self._first = [0, *accumulate(self.counts)]
        self.total = self._first[-1]
        ranks = self.total if ranks is None else ranks
        self.rows = [(n % ranks,) for n in range(self.total)] if rows is None else rows
        self.ranks = len({rank for row in self.rows for rank in row})
        self.dealt = any(count > 1 for count in self.counts)

    @staticmethod
    def of(counts: int | Sequence[int] | None, ranks: int) -> Replicas:
        """Return replicas for this many ranks: a number for every stage, one for all, or None: 1.

        Raises:
            TypeError: not numbers.
            ValueError: a number below 1, or they do not add up to the ranks.
        """
        if counts is None or isinstance(counts, int):
            each = 1 if counts is None else counts
            check_int("replicas", each, 1)
            if ranks % each:
                raise ValueError(f"replicas: {each} for every stage do not divide {ranks} ranks")
            return Replicas((each,) * (ranks // each))
        if isinstance(counts, str) or not isinstance(counts, Sequence):
            raise TypeError(
                f"replicas: expected a number, or one per stage, got {type(counts).__name__}"
            )
        for k, count in enumerate(counts):
            check_int(f"replicas[{k}]", count, 1)
        if sum(counts) != ranks:
            raise ValueError(
                f"replicas: {list(counts)} are {sum(counts)} ranks in all, and there are {ranks}"
            )
        return Replicas(counts)

    def stage_and_replica(self, index: int) -> tuple[int, int]:
        """Return the stage and replica of a number among all."""
        k = bisect_right(self._first, index) - 1
        return k, index - self._first[k]

    def numbers_on(self, rank: int) -> list[int]:
        """Return the numbers of a rank's replicas: one of each of its stages."""
        return [n for n, row in enumerate(self.rows) if rank in row]

    def stages_on(self, rank: int) -> list[int]:
        """Return the stages of a rank."""
        return [self.stage_and_replica(n)[0] for n in self.numbers_on(rank)]

    def ranks_of(self, stage: int) -> list[int]:
        """Return the ranks of a stage: those of its first replica, then those of the next one."""
        return [rank for n in self.indices_of(stage) for rank in self.rows[n]]

    def shard_of(self, rank: int) -> int:
        """Return a rank's index among those that share a replica."""
        return self.rows[self.numbers_on(rank)[0]].index(rank)

    def indices_of(self, stage: int) -> range:
        """Return the numbers of a stage's replicas among all."""
        return range(self._first[stage], self._first[stage + 1])

    def runs(self, stage: int, microbatch: int) -> int:
        """Return the number of the replica that runs a microbatch on a stage."""
        return self._first[stage] + microbatch % self.counts[stage]

    def depth(self, stage: int) -> int:
        """Return the replicas from this stage on, per replica of it; N - k without replicas."""
        return -(-(self.total - self._first[stage]) // self.counts[stage])

    def edges(self) -> Iterator[tuple[int, int]]:
        """Yield neighbouring stages' replicas that share microbatches, as (earlier, later)."""
        for k, (a, b) in enumerate(pairwise(self.counts)):
            # The pairs repeat after the product of the counts.
            yield from sorted({(self.runs(k, j), self.runs(k + 1, j)) for j in range(a * b)})
