"""1F1B without flush: the steady schedule that every method here shares; a window of 1 makes it synchronous."""

from __future__ import annotations

from collections.abc import Iterator

from .actions import Action, Kind


def one_f_one_b(stage: int, stages: int, window: int, microbatches: int = 1) -> Iterator[Action]:
    """The endless stream of actions of one stage: ``window`` forwards, then backward, update, forward in turn.

    Four stages with their classic windows 4, 3, 2, 1, time to the right, ``b`` a backward with its update:

        stage 0   F0 F1 F2 F3          b0 F4 b1 F5 b2 F6
        stage 1      F0 F1 F2       b0 F3 b1 F4 b2 F5
        stage 2         F0 F1    b0 F2 b1 F3 b2 F4
        stage 3            F0 b0 F1 b1 F2 b2 F3

    So the forward of minibatch i follows the update of minibatch i - window, and its backward the update of i - 1.
    Every stage follows its own stream; what it has to wait for is the arrival of its inputs. A run of M minibatches
    is the stream without the actions of minibatches >= M, which gives warm-up and drain without a word about them.

    Args:
        stage: the stage's index k, counted from 0.
        stages: the number of stages N.
        window: minibatches that the stage may have in flight, at least 1.
        microbatches: parts that a minibatch is split into, at least 1; one update follows the last part's backward.
    """
    first, last = stage == 0, stage == stages - 1
    parts = range(microbatches)

    def forward(i: int) -> Iterator[Action]:
        if first:
            yield Action(Kind.PULL, i)
        yield Action(Kind.LOAD_FORWARD, i)
        for j in parts:
            yield Action(Kind.RECEIVE_ACTIVATION, i, j)
            yield Action(Kind.FORWARD, i, j)
            yield Action(Kind.LOSS if last else Kind.SEND_ACTIVATION, i, j)

    def backward(i: int) -> Iterator[Action]:
        yield Action(Kind.LOAD_BACKWARD, i)
        for j in parts:
            if not last:
                yield Action(Kind.RECEIVE_GRADIENT, i, j)
            yield Action(Kind.BACKWARD, i, j)
            if not first:
                yield Action(Kind.SEND_GRADIENT, i, j)
        yield Action(Kind.UPDATE, i)

    for i in range(window):
        yield from forward(i)
    i = 0
    while True:
        yield from backward(i)
        yield from forward(i + window)
        i += 1
