"""The steps of each instruction: loads, receives, sends and other work around it.

``spectrain timeline --instructions`` prints them in the order in which a stage runs them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from .instructions import Kind
from .place import Place

#: What each instruction consists of, in order. A stage runs the steps that it, or one of its
#: passes, has a handler for.
ORDER: Mapping[Kind, tuple[Kind, ...]] = {
    Kind.FORWARD: (
        Kind.PULL,
        Kind.RECEIVE_ACTIVATION,
        Kind.LOAD_FORWARD,
        # After the receive, which may find that the run has ended.
        Kind.SEND_TIED_WEIGHTS,
        Kind.RECEIVE_TIED_WEIGHTS,
        Kind.FORWARD,
        Kind.LOSS,
        Kind.MEASURE,
        Kind.SEND_ACTIVATION,
    ),
    Kind.BACKWARD: (
        Kind.RECEIVE_GRADIENT,
        Kind.LOAD_BACKWARD,
        Kind.LOAD_TIED_WEIGHTS,
        Kind.RECOMPUTE,
        Kind.EXPECT_SUM,
        Kind.BACKWARD,
        Kind.FREE_TIED_WEIGHTS,
        Kind.CHECK_GRADIENT,
        Kind.SEND_GRADIENT,
        # In an evaluation only: the notice that a batch is finished goes back to stage 0.
        Kind.RECEIVE_WORD,
        Kind.SEND_WORD,
    ),
    Kind.BACKWARD_INPUT: (
        Kind.RECEIVE_GRADIENT,
        Kind.LOAD_BACKWARD_INPUT,
        Kind.LOAD_TIED_WEIGHTS,
        Kind.RECOMPUTE,
        Kind.BACKWARD_INPUT,
        Kind.CHECK_GRADIENT,
        Kind.SEND_GRADIENT,
    ),
    Kind.BACKWARD_WEIGHTS: (
        Kind.LOAD_BACKWARD,
        Kind.LOAD_TIED_WEIGHTS,
        Kind.EXPECT_SUM,
        Kind.BACKWARD_WEIGHTS,
        Kind.FREE_TIED_WEIGHTS,
    ),
    Kind.UPDATE: (
        Kind.SEND_TIED_GRADIENTS,
        Kind.ADD_TIED_GRADIENTS,
        Kind.SUM_GRADIENTS,
        Kind.DIVIDE,
        Kind.CHECK_FINITE,
        Kind.SEND_NORM,
        Kind.AGREE,
        Kind.CLIP,
        Kind.CHANGE_GRADIENTS,
        Kind.SEND_WEIGHTS,
        Kind.UPDATE,
        Kind.AVERAGE,
        Kind.REPORT,
    ),
}

#: Steps of evaluations alone; some wait for messages that never arrive in a training.
_OF_EVALUATION = Kind.MEASURE, Kind.RECEIVE_WORD, Kind.SEND_WORD
STEPS_OF_TRAINING = tuple(
    dict.fromkeys(step for row in ORDER.values() for step in row if step not in _OF_EVALUATION)
)

_NEEDS_NO_MESSAGE = Kind.PULL, Kind.LOAD_FORWARD, Kind.LOAD_BACKWARD, Kind.LOAD_BACKWARD_INPUT


def steps(
    kind: Kind, handled: Container[Kind], blocks: bool = False, first: bool = True
) -> list[Kind]:
    """Return the steps of an instruction on a stage, in order.

    Args:
        kind: the instruction's kind.
        handled: the steps that the stage has handlers for.
        blocks: whether a receive blocks; the stage then loads weights before it, not after.
        first: whether this is the minibatch's first microbatch, for which the batch is pulled.
    """
    found = [step for step in ORDER[kind] if step in handled and (first or step is not Kind.PULL)]
    return sorted(found, key=lambda step: step not in _NEEDS_NO_MESSAGE) if blocks else found


def plain_steps(place: Place) -> set[Kind]:
    """Return the steps that a stage of a plain training has handlers for."""
    found = {Kind.RECEIVE_ACTIVATION, *_NEEDS_NO_MESSAGE, *ORDER}
    if place.stage > 0:
        found.remove(Kind.PULL)
        found.add(Kind.SEND_GRADIENT)
    if place.stage == place.stages - 1:
        return {*found, Kind.LOSS}
    return {*found, Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT}
