"""Adds the loads, receives, sends and other work around a schedule's instructions, in order.

``spectrain timeline --instructions`` prints the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .instructions import Kind
from .place import Place

#: What each kind of instruction becomes.
Table = Mapping[Kind, tuple[Kind, ...]]


class Duties(NamedTuple):
    pulls: bool | None = None  # takes the caller's batches; None: on stage 0
    blocks: bool = False  # while receiving
    evaluates: bool = False  # runs forwards only
    recomputes: bool = False  # before a backward
    lends: bool = False  # later stages have copies of its weights
    borrows: bool = False  # has copies of weights of earlier stages
    sums: bool = False  # gradients over its replicas
    divides: bool = False  # gradients, where losses are sums
    clips: bool = False
    checks: bool = False  # whether loss and gradients are finite
    tells_norm: bool = False  # other stages need it to clip or to agree on an update
    averages: bool = False  # weights over its replicas
    reports: bool = False  # notifies the caller that a minibatch has ended


def tables(place: Place, duties: Duties) -> tuple[Table, Table]:
    """Return what instructions become: for a minibatch's first microbatch, and for the others."""
    later = _evaluation(place) if duties.evaluates else _training(place, duties)
    pulls = place.stage == 0 if duties.pulls is None else duties.pulls
    first = {**later, Kind.FORWARD: (Kind.PULL, *later[Kind.FORWARD])} if pulls else later
    return first, later


def _training(place: Place, does: Duties) -> Table:
    is_last = place.stage == place.stages - 1
    receive_gradient = _if(not is_last, Kind.RECEIVE_GRADIENT)
    # Without a flush this stage updates first: the gradient notifies the previous one.
    tells = does.checks and not does.tells_norm and place.stage > 0
    send_gradient = (
        *_if(tells, Kind.CHECK_GRADIENT),
        *_if(place.stage > 0, Kind.SEND_GRADIENT),
    )

    def begin(load: Kind, receive: Sequence[Kind]) -> tuple[Kind, ...]:
        # Where a receive blocks, load before it: the stage would only wait meanwhile.
        return (load, *receive) if does.blocks else (*receive, load)

    return {
        Kind.FORWARD: (
            *begin(Kind.LOAD_FORWARD, [Kind.RECEIVE_ACTIVATION]),
            # After the receive, which may find that the run has ended.
            *_if(does.lends, Kind.SEND_TIED_WEIGHTS),
            *_if(does.borrows, Kind.RECEIVE_TIED_WEIGHTS),
            Kind.FORWARD,
            Kind.LOSS if is_last else Kind.SEND_ACTIVATION,
        ),
        Kind.BACKWARD: (
            *begin(Kind.LOAD_BACKWARD, receive_gradient),
            *_if(does.borrows, Kind.LOAD_TIED_WEIGHTS),
            *_if(does.recomputes, Kind.RECOMPUTE),
            *_if(does.sums, Kind.EXPECT_SUM),
            Kind.BACKWARD,
            *_if(does.borrows, Kind.FREE_TIED_WEIGHTS),
            *send_gradient,
        ),
        Kind.BACKWARD_INPUT: (
            *begin(Kind.LOAD_BACKWARD_INPUT, receive_gradient),
            *_if(does.borrows, Kind.LOAD_TIED_WEIGHTS),
            *_if(does.recomputes, Kind.RECOMPUTE),
            Kind.BACKWARD_INPUT,
            *send_gradient,
        ),
        Kind.BACKWARD_WEIGHTS: (
            Kind.LOAD_BACKWARD,
            *_if(does.borrows, Kind.LOAD_TIED_WEIGHTS),
            *_if(does.sums, Kind.EXPECT_SUM),
            Kind.BACKWARD_WEIGHTS,
            *_if(does.borrows, Kind.FREE_TIED_WEIGHTS),
        ),
        Kind.UPDATE: (
            *_if(does.borrows, Kind.SEND_TIED_GRADIENTS),
            *_if(does.lends, Kind.ADD_TIED_GRADIENTS),
            *_if(does.sums, Kind.SUM_GRADIENTS),
            *_if(does.divides, Kind.DIVIDE),
            *_if(does.checks, Kind.CHECK_FINITE),
            *_if(does.tells_norm, Kind.SEND_NORM),
            *_if(does.checks and does.tells_norm, Kind.AGREE),
            *_if(does.clips, Kind.CLIP),
            *_if(does.averages, Kind.SEND_WEIGHTS),
            Kind.UPDATE,
            *_if(does.averages, Kind.AVERAGE),
            *_if(does.reports, Kind.REPORT),
        ),
    }


def _evaluation(place: Place) -> Table:
    is_last = place.stage == place.stages - 1
    return {
        Kind.FORWARD: (
            Kind.RECEIVE_ACTIVATION,
            Kind.FORWARD,
            Kind.MEASURE if is_last else Kind.SEND_ACTIVATION,
        ),
        Kind.BACKWARD: (  # stages pass on the message that a microbatch has ended
            *_if(not is_last, Kind.RECEIVE_WORD),
            *_if(place.stage > 0, Kind.SEND_WORD),
        ),
        Kind.UPDATE: (),
    }


def _if(wanted: bool, kind: Kind) -> tuple[Kind, ...]:
    return (kind,) if wanted else ()
