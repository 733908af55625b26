"""Memory: how many buffers a stage needs, counted by running its schedule without any memory."""

from __future__ import annotations

from typing import NamedTuple

from spectrain_ext.method import Choices
from spectrain_ext.schedule import Kind, Place, find_generator

from .predictor import Predictor
from .versions import Content, Entries, Versions


class StageMemory(NamedTuple):
    """What a stage holds at most.

    Attributes:
        versions: buffers of weights: working, master and kept ones.
        weight_bytes: bytes of these; the optimizer's state and gradients are not among them.
        microbatches: microbatches between the begin of their forward and the end of their backward.
    """

    versions: int
    weight_bytes: int
    microbatches: int


class Peak(NamedTuple):
    """The most that a stage holds at once in a run that is long enough.

    Attributes:
        kept: versions beside the working buffer and the master.
        microbatches: microbatches between the begin of their forward and the end of their backward.
    """

    kept: int
    microbatches: int


class _Counts:
    """A store without memory."""

    def __init__(self) -> None:
        self.kept = self.peak = 0

    def keep(self, content: Content) -> None:
        self.kept += 1
        self.peak = max(self.peak, self.kept)

    def restore(self, content: Content) -> None: ...

    def swap(self, content: Content, held: Content) -> None: ...

    def drop(self, content: Content) -> None:
        self.kept -= 1

    def write(self, content: Content) -> None: ...


def peak_of(choices: Choices, places: tuple[Place, Place], schedule: str, master: bool) -> Peak:
    """What a stage needs.

    Args:
        choices: the method at the stage.
        places: the places of stage 0 and of the stage.
        schedule: the schedule's name.
        master: whether the true weights have a buffer of their own.
    """
    entry, place = places
    counts = _Counts()
    versions = Versions(
        choices,
        place,
        Entries(entry, schedule),
        master,
        counts,
        Predictor(choices, lambda: (0.0,)),
    )
    # Two windows and some minibatches take any schedule to its steady state, and once around.
    enough = (entry.window + place.window) // place.microbatches + 6
    flying = most = 0
    ended: int | None = None
    for kind, i, j in find_generator(schedule)(place):
        if ended is not None:  # an update waits for the action after it
            starts_forward = kind in (Kind.PULL, Kind.LOAD_FORWARD)
            _update(versions, (i, j) if starts_forward else None)
            if ended == enough:
                break
            ended = None
        if kind is Kind.LOAD_FORWARD:
            _load(versions, versions.for_forward(i, j))
            flying += 1
            most = max(most, flying)
        elif kind is Kind.LOAD_BACKWARD:
            _load(versions, versions.for_backward(i, j))
        elif kind is Kind.BACKWARD:
            flying -= 1
        elif kind is Kind.UPDATE:
            ended = i
    return Peak(counts.peak, most)


def _load(versions: Versions, content: Content) -> None:
    if versions.held != content:
        versions.load(content)
    versions.settle()


def _update(versions: Versions, forward: tuple[int, int] | None) -> None:
    written = versions.step_writes(forward)
    versions.before_update(written is not None)
    versions.after_update(written)
