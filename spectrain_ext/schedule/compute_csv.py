"""Schedules as CSV files, in the format of torch.distributed.pipelining.

One row per stage, one cell per step: ``2F3`` is the forward of microbatch 3 on stage 2, ``2B3`` its
backward, an empty cell an idle step; of a backward in two halves ``2I3`` is that of the input and
``2W3`` that of the weights. Microbatches are counted over all minibatches; there is no
word for an update, which comes after the last backward of every minibatch. Files that name
communication as well (``2RECV_F3``, ``2SEND_B3``) can be read, not written.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from typing import NamedTuple

from spectrain_ext.files import read_text

from .generators import bounded
from .instructions import COMPUTE, Instruction, Kind, ScheduleError
from .order import validate

_CELL = re.compile(r"([0-9]{1,9})([A-Z_]+?)([0-9]{0,9})")
_LARGEST = 1 << 26  # bytes of a file
_MOST = 10_000  # stages
_TURNS = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "I": Kind.BACKWARD_INPUT,
    "W": Kind.BACKWARD_WEIGHTS,
}
_EDGES = {
    "RECV_F": Kind.RECEIVE_ACTIVATION,
    "SEND_F": Kind.SEND_ACTIVATION,
    "RECV_B": Kind.RECEIVE_GRADIENT,
    "SEND_B": Kind.SEND_GRADIENT,
}
_KINDS = _TURNS | _EDGES
# Data parallelism within a stage is no concern of a pipeline's schedule, and when a send has left
# is its transport's; the waits are torch 2.15's.
_IGNORED = frozenset(
    {"UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD", "WAIT_SEND_F", "WAIT_SEND_B"}
)


def write_csv(
    path: str | PathLike[str],
    actions: Sequence[Iterable[Instruction]],
    *,
    microbatches: int,
    minibatches: int | None = None,
) -> None:
    """Write the forwards and backwards of every stage.

    Args:
        path: the file.
        actions: of every stage; finite, or endless with ``minibatches``.
        microbatches: parts per minibatch: microbatch j of minibatch i is number
            ``i*microbatches + j``.
        minibatches: the length of the run.

    Raises:
        ScheduleError: something is missing around a forward or a backward.
    """
    letters = {kind: letter for letter, kind in _TURNS.items()}
    n = len(actions)
    rows = [
        [
            f"{k}{letters[kind]}{i * microbatches + j}"
            for kind, i, j in bounded(actions[k], k, minibatches)
            if kind is not Kind.UPDATE
        ]
        for k in range(n)
    ]
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def read_csv(
    path: str | PathLike[str], *, microbatches: int | None = None
) -> list[list[Instruction]]:
    """The actions of every stage of a file, checked by ``validate``.

    Args:
        path: the file.
        microbatches: parts per minibatch, so that there is an update after the last backward of
            each; None: all of the file is one minibatch.

    Raises:
        ScheduleError: the schedule cannot be run; names the stage and the action.
        ValueError: a cell is not understood, or stands for what these schedules do not have: more
            than one stage per row; or the file is no UTF-8, or has more than 64 MiB or 10,000 rows.
    """
    text = read_text(path, _LARGEST)
    rows: list[list[_Cell]] = []
    try:
        for cells in csv.reader(io.StringIO(text, newline="")):
            if len(rows) == _MOST:
                raise ValueError(f"expected at most {_MOST} rows, got more")
            rows.append(list(_cells(cells, len(rows))))
    except csv.Error as error:
        raise ValueError(f"row {len(rows)}: expected cells and commas: {error}") from error
    n = len(rows)
    if microbatches is None:
        microbatches = 1 + max((cell.part for row in rows for cell in row), default=0)
    elif microbatches < 1:
        raise ValueError(f"microbatches: expected at least 1, got {microbatches}")
    if any(cell.kind in _EDGES.values() for row in rows for cell in row):
        for k, row in enumerate(rows):
            _check_edges(row, k, n, microbatches)
        for k in range(n - 1):
            _check_order(rows, k, k + 1, "F", microbatches)
            _check_order(rows, k + 1, k, "B", microbatches)
    actions = [list(_actions(row, microbatches)) for row in rows]
    validate(actions)
    return actions


class _Cell(NamedTuple):
    kind: Kind
    part: int


def _cells(row: Sequence[str], k: int) -> Iterator[_Cell]:
    for column, text in enumerate(row):
        where = f"row {k}, column {column}"
        if not text.strip():
            continue
        match = _CELL.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{where}: expected a cell like {k}F0, got {text[:40]!r}")
        stage, name, part = int(match[1]), match[2], match[3]
        if stage != k:
            raise ValueError(f"{where}: expected stage {k} only, as in {k}F0, got {text[:40]!r}")
        if name in _IGNORED:
            continue
        if name not in _KINDS or not part:
            raise ValueError(f"{where}: expected a forward or a backward, got {text[:40]!r}")
        yield _Cell(_KINDS[name], int(part))


def _actions(row: Iterable[_Cell], microbatches: int) -> Iterator[Instruction]:
    """A row's forwards and backwards, and an update after the last backward of each minibatch."""
    left: dict[int, int] = {}  # minibatch -> backwards to come before its update
    for kind, part in row:
        if kind not in COMPUTE:
            continue
        i, j = divmod(part, microbatches)
        yield Instruction(kind, i, j)
        if kind is Kind.BACKWARD or kind is Kind.BACKWARD_WEIGHTS:
            left[i] = left.get(i, microbatches) - 1
            if not left[i]:
                yield Instruction(Kind.UPDATE, i)


def _check_edges(row: Sequence[_Cell], k: int, n: int, microbatches: int) -> None:
    """Every forward and backward of a row has its receive before it, and its send after it."""
    where = {cell: position for position, cell in enumerate(row)}
    for cell, position in where.items():
        needed: list[tuple[Kind, bool]] = []
        if cell.kind is Kind.FORWARD:
            needed += [(Kind.RECEIVE_ACTIVATION, True)] * (k > 0)
            needed += [(Kind.SEND_ACTIVATION, False)] * (k < n - 1)
        elif cell.kind is Kind.BACKWARD or cell.kind is Kind.BACKWARD_INPUT:
            needed += [(Kind.RECEIVE_GRADIENT, True)] * (k < n - 1)
            needed += [(Kind.SEND_GRADIENT, False)] * (k > 0)
        for kind, before in needed:
            found = where.get(_Cell(kind, cell.part))
            if found is None or (found < position) != before:
                i, j = divmod(cell.part, microbatches)
                side = "before" if before else "after"
                turn = Instruction(cell.kind, i, j)
                raise ScheduleError(
                    k, Instruction(kind, i, j), f"missing: expected {side} the {turn}"
                )


def _check_order(
    rows: Sequence[Sequence[_Cell]], source: int, target: int, way: str, microbatches: int
) -> None:
    """Both ends of an edge name the same microbatches in the same order."""
    send, receive = _EDGES[f"SEND_{way}"], _EDGES[f"RECV_{way}"]
    sent = [cell.part for cell in rows[source] if cell.kind is send]
    received = [cell.part for cell in rows[target] if cell.kind is receive]
    for position in range(max(len(sent), len(received))):
        pair = sent[position : position + 1], received[position : position + 1]
        if pair[0] == pair[1]:
            continue
        if not pair[1]:
            reason = f"missing: stage {source} sends it"
            wanted = pair[0][0]
        else:
            found = divmod(pair[0][0], microbatches) if pair[0] else None
            instead = f"minibatch {found[0]}, microbatch {found[1]}" if found else "nothing further"
            reason = f"stage {source} sends {instead} at this point"
            wanted = pair[1][0]
        raise ScheduleError(target, Instruction(receive, *divmod(wanted, microbatches)), reason)
