"""1F1B: one forward and one backward in turn, without a flush between minibatches or with one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, count

from .actions import Action
from .moves import backward, forward
from .place import Place


def asynchronous(place: Place) -> Iterator[Action]:
    """The endless actions of a stage: a window of forwards, then backward, forward in turn.

    Four stages with their classic windows 4, 3, 2, 1, time to the right, ``b`` a backward with its
    update:

        stage 0   F0 F1 F2 F3          b0 F4 b1 F5 b2 F6
        stage 1      F0 F1 F2       b0 F3 b1 F4 b2 F5
        stage 2         F0 F1    b0 F2 b1 F3 b2 F4
        stage 3            F0 b0 F1 b1 F2 b2 F3

    The figures count microbatches, those of all minibatches in one row: q = i*M + j. The forward of
    q follows the backward of q - window, and a minibatch's update the backward of its last
    microbatch. Every stage follows its own stream; what it has to wait for is the arrival of its
    inputs. A run of finite length is the stream without the actions of minibatches that do not
    exist, which gives warm-up and drain without a word about them.
    """
    return chain.from_iterable(_alternating(place))


def _alternating(place: Place) -> Iterator[tuple[Action, ...]]:
    window, parts = place.window, place.microbatches
    for q in range(window):
        yield forward(place, *divmod(q, parts))
    for q in count():
        yield backward(place, *divmod(q, parts))
        yield forward(place, *divmod(q + window, parts))


def flushing(place: Place) -> Iterator[Action]:
    """The endless actions of a stage that finishes every minibatch before it begins the next.

    As ``asynchronous`` within a minibatch, with a window of N - k or all microbatches, whichever is
    less, whatever the place says, unless it is a replica's (DAPPLE, PipeDream-Flush, Megatron-LM).
    """
    parts = place.microbatches
    window = min(parts, place.flushing_window)
    for i in count():
        for q in range(parts + window):
            if q >= window:
                yield from backward(place, i, q - window)
            if q < parts:
                yield from forward(place, i, q)
