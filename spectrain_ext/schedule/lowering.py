"""Lowering: what else a stage does around the instructions of its schedule, in which order.

A schedule says what a stage computes. The rest follows from where the stage is, and from what it
does beside that (``Duties``). Each pass below adds the instructions of one feature to a table of
what an instruction of the schedule becomes:

    instruction            becomes
    forward                [pull,] receive activation, load forward weights, [send tied weights,]
                           [receive tied weights,] forward, send activation | loss
    backward               [receive gradient,] load backward weights, [load tied weights,]
                           [recompute,] [expect the gradients that are summed,] backward,
                           [free tied weights,] [send gradient]
    backward of the input  the same with load weights of the input's backward
    backward of the        load backward weights, [load tied weights,] backward of the weights,
    weights                [free tied weights]; its summed gradients are expected as well
    update                 [send tied gradients,] [add tied gradients,] [sum gradients over
                           replicas,] [send norm,] [clip,] [send weights to replicas,] update,
                           [average weights over replicas,] [report to the caller]

Where a receive blocks, as between processes, loads come before it, which hides the time that they
take. Stage 0 pulls a minibatch before its first microbatch, and sends no gradient; the last stage
computes the loss instead of sending an activation, and receives no gradient. In an evaluation
forwards are all that is computed; where a backward would be, the word that a microbatch is through
goes from stage to stage.

``spectrain timeline --instructions`` prints what comes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from .instructions import Instruction, Kind
from .place import Place

#: What each kind of instruction of a schedule becomes.
Table = Mapping[Kind, tuple[Kind, ...]]


class Duties(NamedTuple):
    """What a stage does beside its schedule.

    Attributes:
        pulls: whether the caller's batches come in here; None: they do at stage 0.
        blocks: whether it has to wait at a receive.
        evaluates: whether it only goes forward.
        recomputes: whether a backward first runs its forward again.
        lends: whether later stages have copies of its weights.
        borrows: whether it has copies of the weights of earlier ones.
        sums: whether it adds up gradients with its replicas.
        clips: whether it clips its gradient.
        tells_norm: whether the other stages need its norm for that.
        averages: whether its weights are averaged with those of its replicas.
        reports: whether the caller hears from here that a minibatch is done with.
    """

    pulls: bool | None = None
    blocks: bool = False
    evaluates: bool = False
    recomputes: bool = False
    lends: bool = False
    borrows: bool = False
    sums: bool = False
    clips: bool = False
    tells_norm: bool = False
    averages: bool = False
    reports: bool = False


_COMPUTES: Table = {
    kind: (kind,)
    for kind in (
        *(Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHTS),
        Kind.UPDATE,
    )
}
_EVALUATION: Table = {Kind.FORWARD: (Kind.FORWARD,), Kind.BACKWARD: (), Kind.UPDATE: ()}
_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHTS)
_BEGIN_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_END_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_WEIGHTS)


def lower(
    instructions: Iterable[Instruction], place: Place, duties: Duties | None = None
) -> Iterator[Instruction]:
    """All that a stage does, lazily.

    Args:
        instructions: of its schedule.
        place: the stage's.
        duties: what it does beside them; None: nothing.
    """
    first, later = tables(place, duties or Duties())
    new = tuple.__new__  # half the time of a call of the class

    def lowered(instruction: Instruction) -> list[Instruction]:
        kind, i, j = instruction
        kinds = later[kind] if j else first[kind]
        return [new(Instruction, (each, i, j)) for each in kinds]

    return chain.from_iterable(map(lowered, instructions))


def tables(place: Place, duties: Duties) -> tuple[Table, Table]:
    """What instructions of a minibatch's first microbatch become, and those of the others."""
    if duties.evaluates:
        table = add_words(add_edges(_EVALUATION, place), place)
    else:
        if duties.blocks:
            table = add_loads(add_edges(_COMPUTES, place))
        else:
            table = add_edges(add_loads(_COMPUTES), place)
        table = add_ties(table, duties)
        if duties.recomputes:
            table = _beside(table, _BEGIN_BACKWARD, Kind.RECOMPUTE)
        table = add_update(table, duties)
    pulls = place.stage == 0 if duties.pulls is None else duties.pulls
    return (add_pull(table) if pulls else table), table


def add_edges(table: Table, place: Place) -> Table:
    """Receive before, and send after, what has a neighbour there; the last stage's is the loss."""
    found = dict(table)
    is_first, is_last = place.stage == 0, place.stage == place.stages - 1
    out = Kind.LOSS if is_last else Kind.SEND_ACTIVATION
    found[Kind.FORWARD] = (Kind.RECEIVE_ACTIVATION, *table[Kind.FORWARD], out)
    for kind in _BEGIN_BACKWARD:
        if kind in table:
            receive = () if is_last else (Kind.RECEIVE_GRADIENT,)
            send = () if is_first else (Kind.SEND_GRADIENT,)
            found[kind] = (*receive, *table[kind], *send)
    return found


def add_words(table: Table, place: Place) -> Table:
    """In an evaluation, what takes the place of losses and gradients."""
    instead = {
        Kind.LOSS: Kind.MEASURE,
        Kind.RECEIVE_GRADIENT: Kind.RECEIVE_WORD,
        Kind.SEND_GRADIENT: Kind.SEND_WORD,
    }
    return {kind: tuple(instead.get(each, each) for each in to) for kind, to in table.items()}


def add_loads(table: Table) -> Table:
    """First of all that there is so far the weights."""
    loads = {
        Kind.FORWARD: Kind.LOAD_FORWARD,
        Kind.BACKWARD: Kind.LOAD_BACKWARD,
        Kind.BACKWARD_INPUT: Kind.LOAD_BACKWARD_INPUT,
        Kind.BACKWARD_WEIGHTS: Kind.LOAD_BACKWARD,
    }
    return {kind: (loads[kind], *to) if kind in loads else to for kind, to in table.items()}


def add_ties(table: Table, duties: Duties) -> Table:
    """Weights that several stages have: from the first of them, and their gradients back there."""
    if duties.lends:
        # Not before the receive, which may find that there is no such minibatch.
        table = _beside(table, (Kind.FORWARD,), Kind.SEND_TIED_WEIGHTS)
    if duties.borrows:
        table = _beside(table, (Kind.FORWARD,), Kind.RECEIVE_TIED_WEIGHTS)
        table = _beside(table, _BACKWARDS, Kind.LOAD_TIED_WEIGHTS)
        table = _beside(table, _END_BACKWARD, Kind.FREE_TIED_WEIGHTS, after=True)
    return table


def add_update(table: Table, duties: Duties) -> Table:
    """What belongs to an update, after the last backward of the minibatch that there is."""
    before = {
        Kind.SEND_TIED_GRADIENTS: duties.borrows,
        Kind.ADD_TIED_GRADIENTS: duties.lends,
        Kind.SUM_GRADIENTS: duties.sums,
        Kind.SEND_NORM: duties.tells_norm,
        Kind.CLIP: duties.clips,
        Kind.SEND_WEIGHTS: duties.averages,
    }
    update = [kind for kind, wanted in before.items() if wanted]
    after = {Kind.AVERAGE: duties.averages, Kind.REPORT: duties.reports}
    update += [*table[Kind.UPDATE], *(kind for kind, wanted in after.items() if wanted)]
    if duties.sums:
        table = _beside(table, _END_BACKWARD, Kind.EXPECT_SUM)
    return {**table, Kind.UPDATE: tuple(update)}


def add_pull(table: Table) -> Table:
    """What the forward of a minibatch's first microbatch becomes where batches come in."""
    return {**table, Kind.FORWARD: (Kind.PULL, *table[Kind.FORWARD])}


def _beside(table: Table, kinds: Iterable[Kind], added: Kind, after: bool = False) -> Table:
    """With an instruction right before each of these, or right after."""
    return {
        kind: _put(to, to.index(kind) + after, added) if kind in kinds else to
        for kind, to in table.items()
    }


def _put(to: tuple[Kind, ...], at: int, added: Kind) -> tuple[Kind, ...]:
    return (*to[:at], added, *to[at:])
