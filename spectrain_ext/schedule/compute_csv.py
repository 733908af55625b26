"""Schedules as CSV files, in the format of torch.distributed.pipelining.

One row per stage, one cell per step: ``2F3`` is the forward of microbatch 3 on stage 2, ``2B3`` its
backward, an empty cell an idle step; of a backward in two halves ``2I3`` is that of the input and
``2W3`` that of the weights. Microbatches are counted over all minibatches; there is no
word for an update, which comes after the last backward of every minibatch. Of files that name
communication as well (``2RECV_F3``, ``2SEND_B3``) the rest is read: lowering adds a schedule's own.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike

from spectrain_ext.files import read_text

from .generators import bounded
from .instructions import Instruction, Kind
from .order import validate

_CELL = re.compile(r"([0-9]{1,9})([A-Z_]+?)([0-9]{0,9})")
_LARGEST = 1 << 26  # bytes of a file
_MOST = 10_000  # stages
_KINDS = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "I": Kind.BACKWARD_INPUT,
    "W": Kind.BACKWARD_WEIGHTS,
}
# Data parallelism within a stage is no concern of a pipeline's schedule, and messages are its
# transport's; the waits are torch 2.15's.
_IGNORED = frozenset(
    (
        *("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD", "WAIT_SEND_F", "WAIT_SEND_B"),
        *("RECV_F", "SEND_F", "RECV_B", "SEND_B"),
    )
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
    letters = {kind: letter for letter, kind in _KINDS.items()}
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
    actions = [list(_with_updates(row, microbatches)) for row in cells]
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


def _with_updates(row: Iterable[tuple[Kind, int]], microbatches: int) -> Iterator[Instruction]:
    """A row's forwards and backwards, and an update after the last backward of each minibatch."""
    left: dict[int, int] = {}  # minibatch -> backwards to come before its update
    for kind, part in row:
        i, j = divmod(part, microbatches)
        yield Instruction(kind, i, j)
        if kind is Kind.BACKWARD or kind is Kind.BACKWARD_WEIGHTS:
            left[i] = left.get(i, microbatches) - 1
            if not left[i]:
                yield Instruction(Kind.UPDATE, i)
