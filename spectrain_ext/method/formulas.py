"""Formulas: how far to predict, and to clip, as functions of a stage's place."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt

from spectrain_ext.operators.corrections import Correction
from spectrain_ext.schedule import FLUSHING, Generator, Place, Rules, count_stage


def none(place: Place) -> int:
    """No update."""
    return 0


def delay(place: Place) -> int:
    """Updates between a forward and its own backward once the pipeline is full, at most."""
    return -(-(place.window - 1) // place.microbatches)


def delay_under(schedule: str | Generator, place: Place) -> int:
    """Updates between a forward and its own backward, at most, under this schedule."""
    if isinstance(schedule, str):
        # Those by name without a flush are as late as ``asynchronous``.
        return 0 if schedule in FLUSHING else delay(place)
    count = _counted if isinstance(schedule, Hashable) else _counted.__wrapped__
    return count(schedule, place)


def as_late(schedule: str | Generator, place: Place) -> Place:
    """The place with the window by which 1F1B without a flush is as late as this schedule."""
    # Rules by a delay are written for that schedule, and ask ``delay``.
    late = delay_under(schedule, place)
    if late == delay(place):
        return place
    return place._replace(window=(late - 1) * place.microbatches + 2 if late else 1)


@lru_cache(maxsize=1 << 10)
def _counted(schedule: Generator, place: Place) -> int:
    return max(count_stage(schedule, place, place, Rules(), False).delays)


def rest_of_delay(place: Place) -> int:
    """By how much later stage 0's backward comes than the stage's own, in updates.

    With it every stage predicts as far ahead as stage 0 has to. All share one loss: what the early
    ones lag is damped by what the late ones lead.
    """
    return -(-(place.window + place.stage - 1) // place.microbatches) - delay(place)


def lead_in_deep_delays(place: Place) -> int:
    """As far as stage 0 has to, less half of what the stage itself is late, rounded down.

    What it does is in docs/frontier.md, "Deep delays"; late by one update, it is the former.
    """
    return rest_of_delay(place) - delay(place) // 2


def one_per_stage(stages: int) -> int:
    """With as many microbatches as stages no forward is more than one update late."""
    return stages


def window_for_messages(k: int, n: int, m: int) -> int:
    """The classic window, and as many more as keep every forward one update late at most.

    That hides messages, which the classic window leaves the next microbatch waiting for. With
    M >= 2*N - 1 microbatches it is the wide window, with M = N the classic one.
    """
    return min(2 * (n - k) - 1, max(n, m) - k)


def spectrain_forward(place: Place) -> int:
    """Rounds until the minibatch's backward has ended on stage 0 (arXiv 1809.02839), in updates."""
    k, n, _, m = place
    return _rounded(k // 2 + n - k - 1, m)


def spectrain_backward(place: Place) -> int:
    """The rest of those rounds when the backward begins, in updates."""
    return _rounded(place.stage // 2, place.microbatches)


def xpipe_forward(place: Place) -> int:
    """XPipe's forward (Guan et al., 2019) for M microbatches per minibatch."""
    k, n, _, m = place
    return _rounded(n + m - k // 2 - 2, m)


def xpipe_backward(place: Place) -> int:
    k, _, _, m = place
    return _rounded(m + k // 2 - 1, m)


def recipe_clip(place: Place) -> float:
    """A gradient norm per stage that keeps a second-order prediction from running away."""
    return 0.57 / sqrt(place.stages)


def where_late(correction: Callable[[int], Correction]) -> Callable[[Place], Correction | None]:
    """A rule for a correction: what this makes of a stage's delay, where gradients are late."""

    def rule(place: Place) -> Correction | None:
        late = delay(place)
        return correction(late) if late else None

    return rule


@dataclass(frozen=True)
class RatesByDelay:
    """PipeMare's T1: 1/D^(power*(1 - min(t/updates, 1))) at update t of a stage with delay D, or 1.

    With infinite updates rates stay so.
    """

    updates: float  # until learning rates are their own again
    power: float = 1.0

    def __call__(self, place: Place, update: int) -> float:
        rest = 1.0 - update / self.updates if update < self.updates else 0.0
        return float(max(1, delay(place)) ** (-self.power * rest))


def _rounded(a: int, b: int) -> int:
    """a/b to the nearest whole number, halves up."""
    return (2 * a + b) // (2 * b)
