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
from itertools import zip_longest
from os import PathLike

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
    cells: list[list[tuple[Kind, int]]] = []
    try:
        for texts in csv.reader(io.StringIO(text, newline="")):
            if len(cells) == _MOST:
                raise ValueError(f"expected at most {_MOST} rows, got more")
            cells.append(list(_cells(texts, len(cells))))
    except csv.Error as error:
        raise ValueError(f"row {len(cells)}: expected cells and commas: {error}") from error
    if microbatches is None:
        microbatches = 1 + max((part for row in cells for _, part in row), default=0)
    elif microbatches < 1:
        raise ValueError(f"microbatches: expected at least 1, got {microbatches}")
    rows = [[Instruction(kind, *divmod(part, microbatches)) for kind, part in row] for row in cells]
    if any(turn.kind not in COMPUTE for row in rows for turn in row):
        for k, row in enumerate(rows):
            _check_edges(row, k, len(rows))
        for k in range(len(rows) - 1):
            _check_order(rows, k, k + 1, "F")
            _check_order(rows, k + 1, k, "B")
    actions = [list(_computed(row, microbatches)) for row in rows]
    validate(actions)
    return actions


def _cells(row: Sequence[str], k: int) -> Iterator[tuple[Kind, int]]:
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
        yield _KINDS[name], int(part)


def _computed(row: Iterable[Instruction], microbatches: int) -> Iterator[Instruction]:
    """A row's forwards and backwards, and an update after the last backward of each minibatch."""
    left: dict[int, int] = {}  # minibatch -> backwards to come before its update
    for turn in row:
        if turn.kind in COMPUTE:
            yield turn
        if turn.kind is Kind.BACKWARD or turn.kind is Kind.BACKWARD_WEIGHTS:
            i = turn.minibatch
            left[i] = left.get(i, microbatches) - 1
            if not left[i]:
                yield Instruction(Kind.UPDATE, i)


def _check_edges(row: Sequence[Instruction], k: int, n: int) -> None:
    """Every forward and backward of a row has its receive before it, and its send after it."""
    has_previous, has_next = k > 0, k < n - 1
    forward = Kind.RECEIVE_ACTIVATION, has_previous, Kind.SEND_ACTIVATION, has_next
    backward = Kind.RECEIVE_GRADIENT, has_next, Kind.SEND_GRADIENT, has_previous
    around = {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.BACKWARD_INPUT: backward}
    where = {turn: position for position, turn in enumerate(row)}
    for turn, position in where.items():
        if turn.kind not in around:
            continue
        receive, receives, send, sends = around[turn.kind]
        for needed, kind, side in ((receives, receive, "before"), (sends, send, "after")):
            other = turn._replace(kind=kind)
            found = where.get(other)
            if needed and (found is None or (found < position) != (side == "before")):
                raise ScheduleError(k, other, f"missing: expected {side} the {turn}")


def _check_order(rows: Sequence[Sequence[Instruction]], source: int, target: int, way: str) -> None:
    """Both ends of an edge name the same microbatches in the same order."""
    send, receive = _EDGES[f"SEND_{way}"], _EDGES[f"RECV_{way}"]
    sent = [turn for turn in rows[source] if turn.kind is send]
    received = [turn for turn in rows[target] if turn.kind is receive]
    for found, wanted in zip_longest(sent, received):
        if wanted is None:
            missing = found._replace(kind=receive)
            raise ScheduleError(target, missing, f"missing: stage {source} sends it")
        if found is None or found[1:] != wanted[1:]:
            instead = "nothing further"
            if found is not None:
                instead = f"minibatch {found.minibatch}, microbatch {found.microbatch}"
            reason = f"stage {source} sends {instead} at this point"
            raise ScheduleError(target, wanted, reason)
