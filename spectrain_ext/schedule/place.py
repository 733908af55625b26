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
