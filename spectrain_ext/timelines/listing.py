"""Listing: what one stage does under a method, instruction by instruction, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from spectrain_ext.method import (
    Method,
    Window,
    find_method,
    microbatches_of,
    places_of,
    rules_at,
)
from spectrain_ext.schedule import (
    Entries,
    Kind,
    Ledger,
    bounded,
    find_generator,
    lower,
)

_LOADS = (Kind.LOAD_FORWARD, Kind.LOAD_BACKWARD, Kind.LOAD_BACKWARD_INPUT)


def instructions_of(
    method: str | Method,
    stages: int,
    stage: int,
    minibatches: int,
    *,
    microbatches: int | Literal["auto"] = "auto",
    window: Window = None,
) -> Iterator[str]:
    """The instructions of a stage in a run, a line each, with the weights that they load.

    Args:
        method: a name, or a Method; of one that changes its first phase.
        stages: their number.
        stage: which of them, counted from 0.
        minibatches: the length of the run.
        microbatches: parts per minibatch; ``"auto"``: what is usual for the method.
        window: as for ``Pipeline``.

    Raises:
        ValueError: an argument is out of range, or the method is not defined for these.
    """
    method = find_method(method)
    if not 0 <= stage < stages:
        raise ValueError(f"stage: expected one of 0 to {stages - 1}, got {stage}")
    parts = microbatches_of(method, stages) if microbatches == "auto" else microbatches
    places = places_of(method, stages, parts, window)
    place, generate = places[stage], find_generator(method.schedule)
    ledger = Ledger(
        stage,
        rules_at(method, place),
        microbatches=parts,
        entries=Entries(generate(places[0])),
    )
    for instruction in bounded(generate(place), stage, minibatches):
        ((version, horizon),) = ledger.enter([instruction])
        for each in lower([instruction], place):
            line = f"{each.kind.value:<36} {each.minibatch}"
            if parts > 1 and each.kind not in (Kind.PULL, Kind.UPDATE):
                line += f".{each.microbatch}"
            if each.kind in _LOADS:
                ahead = f", predicted {horizon} ahead" if horizon else ""
                line = f"{line:<44} version {version}{ahead}"
            elif each.kind is Kind.UPDATE:
                line = f"{line:<44} makes version {version}"
            yield line
