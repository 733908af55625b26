"""Place: where a stage stands in its pipeline, all that schedules and methods ask about it."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """One stage of one pipeline.

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

    @property
    def flushing_window(self) -> int:
        """Microbatches that 1F1B with a flush begins before a backward, if there are as many."""
        return self.stages - self.stage


class ReplicaPlace(Place):
    """One replica of a stage that has several, or whose neighbours have.

    ``window`` and ``microbatches`` are the replica's own share.
    """

    __slots__ = ()

    @property
    def flushing_window(self) -> int:
        """The window: it knows how many replicas the later stages have."""
        return self.window
