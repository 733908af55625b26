"""Moves: the actions that make up one forward, or one backward, on one stage."""

from __future__ import annotations

from .actions import Action, Kind
from .place import Place

# A schedule has millions of actions: plain names and no keyword matching halve the time they take.
_new = tuple.__new__
_PULL, _LOAD_FORWARD, _RECEIVE_ACTIVATION = Kind.PULL, Kind.LOAD_FORWARD, Kind.RECEIVE_ACTIVATION
_FORWARD, _SEND_ACTIVATION, _LOSS = Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.LOSS
_LOAD_BACKWARD, _RECEIVE_GRADIENT = Kind.LOAD_BACKWARD, Kind.RECEIVE_GRADIENT
_BACKWARD, _SEND_GRADIENT, _UPDATE = Kind.BACKWARD, Kind.SEND_GRADIENT, Kind.UPDATE


def forward(place: Place, i: int, j: int) -> list[Action]:
    """The actions of the forward of microbatch j of minibatch i; stage 0 pulls the minibatch."""
    stage, stages, _, _ = place
    actions = [
        _new(Action, (_LOAD_FORWARD, i, j)),
        _new(Action, (_RECEIVE_ACTIVATION, i, j)),
        _new(Action, (_FORWARD, i, j)),
        _new(Action, (_LOSS if stage == stages - 1 else _SEND_ACTIVATION, i, j)),
    ]
    if stage == 0 == j:
        actions.insert(0, _new(Action, (_PULL, i, 0)))
    return actions


def backward(place: Place, i: int, j: int) -> list[Action]:
    """The actions of the backward of microbatch j of minibatch i, the last with the update."""
    stage, stages, _, microbatches = place
    actions = [_new(Action, (_LOAD_BACKWARD, i, j))]
    if stage < stages - 1:
        actions.append(_new(Action, (_RECEIVE_GRADIENT, i, j)))
    actions.append(_new(Action, (_BACKWARD, i, j)))
    if stage > 0:
        actions.append(_new(Action, (_SEND_GRADIENT, i, j)))
    if j == microbatches - 1:
        actions.append(_new(Action, (_UPDATE, i, 0)))
    return actions
