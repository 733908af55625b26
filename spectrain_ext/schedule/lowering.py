"""Lowering: what else a stage does around the instructions of its schedule, in which order.

A schedule says what a stage computes. From that, and from where the stage is, follows the rest:

    instruction            becomes
    forward                [pull,] load forward weights, receive activation, forward,
                           send activation | loss
    backward               load backward weights, [receive gradient,] backward, [send gradient]
    backward of the input  load weights of the input's backward, [receive gradient,]
                           backward of the input, [send gradient]
    backward of the        load backward weights, backward of the weights
    weights
    update                 update

Stage 0 pulls a minibatch before its first microbatch, and sends no gradient; the last stage
computes the loss instead of sending an activation, and receives no gradient. An evaluation has no
backwards: where one would be, the word that a microbatch is through goes from stage to stage.

``spectrain timeline --instructions`` prints what comes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from .instructions import Instruction, Kind
from .place import Place

#: What a kind of instruction becomes; where minibatches are pulled, another for microbatch 0.
Table = Mapping[Kind, tuple[Kind, ...]]

_LOADS: Table = {
    Kind.FORWARD: (Kind.LOAD_FORWARD, Kind.FORWARD),
    Kind.BACKWARD: (Kind.LOAD_BACKWARD, Kind.BACKWARD),
    Kind.BACKWARD_INPUT: (Kind.LOAD_BACKWARD_INPUT, Kind.BACKWARD_INPUT),
    Kind.BACKWARD_WEIGHTS: (Kind.LOAD_BACKWARD, Kind.BACKWARD_WEIGHTS),
    Kind.UPDATE: (Kind.UPDATE,),
}
_EVALUATION: Table = {
    Kind.FORWARD: (Kind.LOAD_FORWARD, Kind.FORWARD),
    Kind.BACKWARD: (),
    Kind.UPDATE: (Kind.UPDATE,),
}


def lower(
    instructions: Iterable[Instruction], place: Place, evaluates: bool = False
) -> Iterator[Instruction]:
    """All that a stage does, lazily.

    Args:
        instructions: of its schedule.
        place: the stage's.
        evaluates: whether it only goes forward.
    """
    table = add_edges(_EVALUATION if evaluates else _LOADS, place)
    first = add_pull(table, place)
    new = tuple.__new__  # half the time of a call of the class

    def lowered(instruction: Instruction) -> list[Instruction]:
        kind, i, j = instruction
        kinds = table[kind] if j else first[kind]
        return [new(Instruction, (each, i, j)) for each in kinds]

    return chain.from_iterable(map(lowered, instructions))


def add_edges(table: Table, place: Place) -> Table:
    """Receive before, and send after, what has a neighbour there; the last stage's is the loss."""
    is_first, is_last = place.stage == 0, place.stage == place.stages - 1
    found = dict(table)
    *loads, forward = table[Kind.FORWARD]
    out = Kind.LOSS if is_last else Kind.SEND_ACTIVATION
    found[Kind.FORWARD] = (*loads, Kind.RECEIVE_ACTIVATION, forward, out)
    for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        if kind in table:
            loads, computes = [*table[kind][:-1]], table[kind][-1:]
            receive = () if is_last else (Kind.RECEIVE_GRADIENT,)
            send = () if is_first else (Kind.SEND_GRADIENT,)
            found[kind] = (*loads, *receive, *computes, *send)
    return found


def add_pull(table: Table, place: Place) -> Table:
    """On stage 0, what the forward of a minibatch's first microbatch becomes."""
    if place.stage:
        return table
    return {**table, Kind.FORWARD: (Kind.PULL, *table[Kind.FORWARD])}
