"""Reads and writes schedules as CSV files in the format of torch.distributed.pipelining.

One row per stage, one cell per step: ``2F3`` is the forward of microbatch 3 on stage 2, ``2B3`` its
backward, ``2I3`` and ``2W3`` the backward's halves, for the input and the weights. An empty cell is
an idle step. Microbatches are counted over all minibatches. Updates have no cell: one follows the
last backward of every minibatch. Cells of communication (``2RECV_F3``, ``2SEND_B3``) are skipped,
because lowering adds a schedule's own.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike

from spectrain_ext.files import read_text
from spectrain_ext.schedule import Instruction, Kind, bounded
from spectrain_ext.schedule.order import validate

_CELL = re.compile(r"([0-9]{1,9})([A-Z_]+?)([0-9]{0,9})")
_LARGEST = 1 << 26  # bytes of a file
_MOST = 10_000  # stages
_KINDS = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "I": Kind.BACKWARD_INPUT,
    "W": Kind.BACKWARD_WEIGHTS,
}
# Data parallelism and messages are not part of these schedules; the waits are torch 2.15's.
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
        actions: per stage; finite, or endless with ``minibatches``.
        microbatches: per minibatch: microbatch j of minibatch i is number ``i*microbatches + j``.
        minibatches: the length of the run.

    Raises:
        ScheduleError: a stage has other instructions than forwards, backwards and updates, or an
            update is missing.

    Example:
        >>> from spectrain_ext.simulation import streams, write_csv
        >>> write_csv("1f1b.csv", streams("1f1b", [2, 1], 2), microbatches=2, minibatches=1)
        >>> Path("1f1b.csv").read_text().splitlines()
        ['0F0,0F1,0B0,0B1', '1F0,1B0,1F1,1B1']
    """
    letters = {kind: letter for letter, kind in _KINDS.items()}
    rows = [
        [
            f"{k}{letters[kind]}{i * microbatches + j}"
            for kind, i, j in bounded(run, k, minibatches)
            if kind is not Kind.UPDATE
        ]
        for k, run in enumerate(actions)
    ]
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def read_csv(
    path: str | PathLike[str], *, microbatches: int | None = None
) -> list[list[Instruction]]:
    r"""Return the instructions of every stage of a file, checked by ``validate``.

    Args:
        path: the file.
        microbatches: per minibatch: an update follows the last backward of each. None: the file is
            one minibatch.

    Raises:
        ScheduleError: the schedule cannot run; names the stage and the instruction.
        ValueError: a cell is not understood, or a row has more than one stage; or the file is not
            UTF-8, or has more than 64 MiB or 10,000 rows.

    Example:
        >>> from spectrain_ext.simulation import read_csv
        >>> _ = Path("1f1b.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
        >>> first, last = read_csv("1f1b.csv")
        >>> str(first[-1])
        'update of minibatch 0'
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
        microbatches = 1 + max((number for row in cells for _, number in row), default=0)
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
        stage, name, number = int(match[1]), match[2], match[3]
        if stage != k:
            raise ValueError(f"{where}: expected stage {k} only, as in {k}F0, got {text[:40]!r}")
        if name in _IGNORED:
            continue
        if name not in _KINDS or not number:
            raise ValueError(f"{where}: expected a forward or a backward, got {text[:40]!r}")
        yield _KINDS[name], int(number)


def _with_updates(row: Iterable[tuple[Kind, int]], microbatches: int) -> Iterator[Instruction]:
    """Yield a row's instructions, with an update after each minibatch's last backward."""
    left: dict[int, int] = {}  # minibatch -> backwards left before its update
    for kind, number in row:
        i, j = divmod(number, microbatches)
        yield Instruction(kind, i, j)
        if kind is Kind.BACKWARD or kind is Kind.BACKWARD_WEIGHTS:
            left[i] = left.get(i, microbatches) - 1
            if not left[i]:
                yield Instruction(Kind.UPDATE, i)
