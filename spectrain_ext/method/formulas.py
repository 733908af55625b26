"""Formulas of methods: delays, windows, horizons, norms and learning rates by a stage's place."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt

from spectrain_ext.schedule import FLUSHING, Generator, Place, Rules, count_stage


def none(place: Place) -> int:
    """Return 0 updates."""
    return 0


def delay(place: Place) -> int:
    """Return the most updates between a forward and its backward once the pipeline is full."""
    return -(-(place.window - 1) // place.microbatches)


def delay_under(schedule: str | Generator, place: Place) -> int:
    """Return the most updates between a forward and its backward under a schedule."""
    if isinstance(schedule, str):
        # Named schedules without a flush are all as late as ``asynchronous``.
        return 0 if schedule in FLUSHING else delay(place)
    count = _counted if isinstance(schedule, Hashable) else _counted.__wrapped__
    return count(schedule, place)


def as_late(schedule: str | Generator, place: Place) -> Place:
    """Return the place with the window that makes 1F1B without a flush as late as the schedule."""
    # Rules for delays assume that schedule and call ``delay``.
    late = delay_under(schedule, place)
    if late == delay(place):
        return place
    return place._replace(window=(late - 1) * place.microbatches + 2 if late else 1)


@lru_cache(maxsize=1 << 10)
def _counted(schedule: Generator, place: Place) -> int:
    return max(count_stage(schedule, place, place, Rules(), False).delays)


def rest_of_delay(place: Place) -> int:
    """Return the updates by which stage 0's backward comes later than the stage's own.

    With it every stage predicts as far ahead as stage 0. All share one loss: the lag of early
    stages is damped by the lead of late ones.
    """
    return max(0, place.latest - delay(place))


def lead_in_deep_delays(place: Place) -> int:
    """Return ``rest_of_delay`` less half of the stage's own delay, rounded down.

    For a delay of one update both are equal. docs/frontier.md shows the effect.
    """
    return rest_of_delay(place) - delay(place) // 2


def one_per_stage(stages: int) -> int:
    """Return as many microbatches as stages, so that forwards are at most one update late."""
    return stages


#: Windows that have a name. At k = 0 the classic one is PipeDream's NOAM (Narayanan et al., 2019).
WINDOWS: dict[str, Callable[[int, int, int], int]] = {
    "classic": lambda k, n, m: n - k,  # until the first one returns
    "wide": lambda k, n, m: 2 * (n - k) - 1,  # hides messages too, at twice the staleness
}
#: The usual windows of schedules by name; all others have the classic one.
WINDOWS_OF_SCHEDULES: dict[str, Callable[[int, int, int], int]] = {
    "gpipe": lambda k, n, m: m,  # a whole minibatch
    "1f1b": lambda k, n, m: min(n - k, m),  # the classic window, within one minibatch
    "zb-h1": lambda k, n, m: n,  # the classic one, and k with half a backward to come
}


def window_for_messages(k: int, n: int, m: int) -> int:
    """Return the widest window in which forwards are at most one update late, up to ``"wide"``.

    It hides messages, for which the classic window leaves the next microbatch waiting. With
    M >= 2*N - 1 microbatches it is the wide window, with M = N the classic one.
    """
    return min(2 * (n - k) - 1, max(n, m) - k)


def spectrain_forward(place: Place) -> int:
    """Return the rounds until the minibatch ends on stage 0 (arXiv 1809.02839), in updates."""
    k, n = place.stage, place.stages
    return _rounded(k // 2 + n - k - 1, place.microbatches)


def spectrain_backward(place: Place) -> int:
    """Return how many of those rounds remain when the backward begins, in updates."""
    return _rounded(place.stage // 2, place.microbatches)


def xpipe_forward(place: Place) -> int:
    """Return XPipe's forward horizon (Guan et al., 2019) for M microbatches per minibatch."""
    n, m = place.stages, place.microbatches
    return _rounded(n + m - place.stage // 2 - 2, m)


def xpipe_backward(place: Place) -> int:
    m = place.microbatches
    return _rounded(m + place.stage // 2 - 1, m)


def recipe_clip(place: Place) -> float:
    """Return a gradient norm per stage that keeps second-order predictions stable."""
    return 0.57 / sqrt(place.stages)


@dataclass(frozen=True)
class RatesByDelay:
    """PipeMare's T1: 1/D^(power*(1 - min(t/updates, 1))) at update t of a stage with delay D.

    The factor is 1 where D is at most 1. With infinite ``updates`` it stays constant.
    """

    updates: float  # until the factor is 1
    power: float = 1.0

    def __call__(self, place: Place, update: int) -> float:
        rest = 1.0 - update / self.updates if update < self.updates else 0.0
        return float(max(1, delay(place)) ** (-self.power * rest))


def _rounded(a: int, b: int) -> int:
    return (2 * a + b) // (2 * b)
