"""1F1B: one forward and one backward in turn, without a flush between minibatches or with one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from .actions import Action, Kind
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
    for q in count():
        if q >= place.window:
            yield from backward(place, *divmod(q - place.window, place.microbatches))
        yield from forward(place, *divmod(q, place.microbatches))


def flushing(place: Place) -> Iterator[Action]:
    """The endless actions of a stage that finishes every minibatch before it begins the next.

    As ``asynchronous`` within a minibatch, with a window of N - k or all microbatches, whichever is
    less, whatever the place says (DAPPLE, PipeDream-Flush, Megatron-LM).
    """
    parts = place.microbatches
    window = min(parts, place.stages - place.stage)
    for i in count():
        for q in range(parts + window):
            if q >= window:
                yield from backward(place, i, q - window)
            if q < parts:
                yield from forward(place, i, q)


def one_f_one_b(stage: int, stages: int, window: int, microbatches: int = 1) -> Iterator[Action]:
    """The endless actions of a stage: ``window`` forwards, then backward, update, forward in turn.

    Four stages with their classic windows 4, 3, 2, 1, time to the right, ``b`` a backward with its
    update:

        stage 0   F0 F1 F2 F3          b0 F4 b1 F5 b2 F6
        stage 1      F0 F1 F2       b0 F3 b1 F4 b2 F5
        stage 2         F0 F1    b0 F2 b1 F3 b2 F4
        stage 3            F0 b0 F1 b1 F2 b2 F3

    So the forward of minibatch i follows the update of minibatch i - window, and its backward the
    update of i - 1. Every stage follows its own stream; what it has to wait for is the arrival of
    its inputs. A run of M minibatches is the stream without the actions of minibatches >= M, which
    gives warm-up and drain without a word about them.

    Args:
        stage: the stage's index k, counted from 0.
        stages: the number of stages N.
        window: minibatches that the stage may have in flight, at least 1.
        microbatches: parts that a minibatch is split into, at least 1; one update follows the last
            part's backward.
    """
    first, last = stage == 0, stage == stages - 1
    parts = range(microbatches)
    i = 0
    while True:
        if i >= window:
            done = i - window
            yield Action(Kind.LOAD_BACKWARD, done)
            for j in parts:
                if not last:
                    yield Action(Kind.RECEIVE_GRADIENT, done, j)
                yield Action(Kind.BACKWARD, done, j)
                if not first:
                    yield Action(Kind.SEND_GRADIENT, done, j)
            yield Action(Kind.UPDATE, done)
        if first:
            yield Action(Kind.PULL, i)
        yield Action(Kind.LOAD_FORWARD, i)
        for j in parts:
            yield Action(Kind.RECEIVE_ACTIVATION, i, j)
            yield Action(Kind.FORWARD, i, j)
            yield Action(Kind.LOSS if last else Kind.SEND_ACTIVATION, i, j)
        i += 1
