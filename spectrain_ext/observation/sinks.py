"""Where records go: a file of JSON lines, and TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spectrain_ext.extras import require_tensorboard
from spectrain_ext.files import finite

Record = dict[str, Any]


class JsonLines:
    """Appends to a file, one JSON object per line, each in one call.

    A process that is killed leaves whole lines; what a stopped machine left of one is ended first.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115  # closed by close
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(finite(record), allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Writes the numbers of every record as scalars ``stage<k>/<name>``, by minibatch.

    Args:
        folder: where it writes.
        labels: entries that are the same in every record, and no curves.

    Raises:
        ModuleNotFoundError: the extra ``tensorboard`` is missing.
    """

    def __init__(self, folder: Path, labels: Iterable[str] = ()) -> None:
        self._no_curves = _NO_CURVES.union(labels)
        self._writer = require_tensorboard().SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        curves = {name: value for name, value in record.items() if name not in self._no_curves}
        for name, value in _numbers(curves):
            self._writer.add_scalar(
                f"stage{record['stage']}/{name}", value, record["minibatch"], record["time"]
            )

    def close(self) -> None:
        self._writer.close()


Sink = JsonLines | TensorBoard
_NO_CURVES = frozenset(("time", "stage", "rank", "minibatch", "minibatches"))


def _numbers(record: Record) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in record.items():
        if isinstance(value, dict):
            found += [(f"{name}/{key}", part) for key, part in _numbers(value)]
        elif isinstance(value, list):
            found += [(f"{name}/{place}", part) for place, part in enumerate(value)]
        elif isinstance(value, (int, float)):
            found.append((name, value))
    return found
