"""Place: where a stage stands in its pipeline, and who runs it where it has several replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple


class Place(NamedTuple):
    """One stage of one pipeline: all that schedules and methods ask about it.

    Of a stage with replicas, ``window`` and ``microbatches`` are one replica's own share.

    Attributes:
        stage: its index k, counted from 0.
        stages: the number of stages N.
        window: microbatches that the stage may have in flight, at least 1.
        microbatches: parts M that a minibatch is split into; one update follows the last part.
    """

    stage: int
    stages: int
    window: int
    microbatches: int = 1


class Replicas:
    """How many replicas every stage has: which rank is which, and who runs which microbatch.

    Replicas are numbered stage by stage, and each is a rank of its own; or, where
    ranks have several stages, number s is on rank s mod ranks: on rank r of R the stages r, r + R,
    r + 2R, ... Microbatch j of every minibatch is run by replica j mod r of a stage with r
    replicas: the 1F1B-RR of PipeDream (Narayanan et al., 2019).

    Args:
        counts: replicas of every stage, each at least 1.
        ranks: fewer than stages, which have one replica each; None: one for every replica.

    Attributes:
        counts: as given.
        stages: their number.
        total: the number of all replicas of all stages.
        ranks: the number of processes.
        dealt: whether any stage has more than one replica.
    """

    def __init__(self, counts: Sequence[int], ranks: int | None = None) -> None:
        self.counts = tuple(counts)
        self.stages = len(self.counts)
        self._first = [0, *accumulate(self.counts)]
        self.total = self._first[-1]
        self.ranks = self.total if ranks is None else ranks
        self.dealt = any(count > 1 for count in self.counts)

    @staticmethod
    def of(given: int | Sequence[int] | None, ranks: int) -> Replicas:
        """What was asked for, on so many ranks: a number for every stage, one for all, or None: 1.

        Raises:
            TypeError: something else than numbers.
            ValueError: a number below 1, or they do not make up the ranks.
        """
        if given is None or isinstance(given, int):
            each = 1 if given is None else given
            _check_count("replicas", each)
            if ranks % each:
                raise ValueError(f"replicas: {each} for every stage do not divide {ranks} ranks")
            return Replicas((each,) * (ranks // each))
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise TypeError(
                f"replicas: expected a number, or one per stage, got {type(given).__name__}"
            )
        for k, count in enumerate(given):
            _check_count(f"replicas[{k}]", count)
        found = Replicas(given)
        if found.ranks != ranks:
            raise ValueError(
                f"replicas: {list(given)} are {found.ranks} ranks in all, and there are {ranks}"
            )
        return found

    def check_microbatches(self, microbatches: int) -> None:
        """Raise ValueError unless every stage can deal them out evenly."""
        for k, count in enumerate(self.counts):
            if microbatches % count:
                raise ValueError(
                    f"replicas: stage {k} has {count}, which must divide the {microbatches} "
                    "microbatches of a minibatch"
                )

    def stage_and_replica(self, index: int) -> tuple[int, int]:
        """What number ``index`` of all replicas is; for a rank, what it is or has first."""
        for k in range(self.stages):
            if index < self._first[k + 1]:
                return k, index - self._first[k]
        raise IndexError(f"rank {index} of {self.total}")

    def stages_on(self, rank: int) -> list[int]:
        """The stages that a rank has."""
        return [self.stage_and_replica(n)[0] for n in range(rank, self.total, self.ranks)]

    def ranks_of(self, stage: int) -> range:
        """The ranks of a stage's replicas."""
        first = self._first[stage] % self.ranks
        return range(first, first + self.counts[stage])

    def indices_of(self, stage: int) -> range:
        """The indices of a stage's replicas among all."""
        return range(self._first[stage], self._first[stage + 1])

    def runs(self, stage: int, microbatch: int) -> int:
        """The index of the replica that runs a microbatch of every minibatch on a stage."""
        return self._first[stage] + microbatch % self.counts[stage]

    def depth(self, stage: int) -> int:
        """Replicas from this stage on, per replica of it, rounded up: N - k where all have one."""
        return -(-(self.total - self._first[stage]) // self.counts[stage])

    def edges(self) -> Iterator[tuple[int, int]]:
        """The replicas of neighbouring stages that share microbatches, as (earlier, later)."""
        for k, (a, b) in enumerate(pairwise(self.counts)):
            # They divide the microbatches: who meets whom repeats after their product.
            yield from sorted({(self.runs(k, j), self.runs(k + 1, j)) for j in range(a * b)})


def _check_count(where: str, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{where}: expected an int, got {type(count).__name__}")
    if count < 1:
        raise ValueError(f"{where}: expected at least 1, got {count}")
