"""Merges the traces of several ranks on one time axis.

python -m spectrain_ext.timelines.merging OUT.json RANK0.json RANK1.json ...
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spectrain_ext.files import read_json

_BASE = "baseTimeNanoseconds"
_LARGEST = 1 << 30  # bytes of a trace
_OTHERS = 10**8  # above the numbers of processes and stages


def merge_traces(path: str | Path, parts: Sequence[str | Path]) -> None:
    """Merge the traces of several ranks into one, in Chrome's JSON format.

    Ranks on one machine share its clock. Between machines the alignment is as good as their clocks
    agree, often within milliseconds.

    Args:
        parts: one file per rank, in order: from ``write_trace`` with ``origin``, or from
            ``torch.profiler``'s ``export_chrome_trace``.

    Raises:
        ValueError: a file is not such a trace, does not say when it began, or exceeds 1 GiB.

    Example:
        >>> from spectrain_ext.timelines import merge_traces, simulate_method, write_trace
        >>> for rank in range(2):
        ...     write_trace(f"rank{rank}.json", simulate_method("1f1b", 2, 3), origin=float(rank))
        >>> merge_traces("all.json", ["rank0.json", "rank1.json"])
    """
    documents = [_read(Path(part)) for part in parts]
    first = min((document[_BASE] for document in documents), default=0)
    events: list[dict[str, Any]] = []
    taken: dict[Any, int] = {}
    for rank, (part, document) in enumerate(zip(parts, documents, strict=True)):
        shift = (document[_BASE] - first) / 1000.0
        try:
            events += [_moved(event, shift, taken, rank) for event in document["traceEvents"]]
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise ValueError(f"{Path(part)}: expected events of a trace: {error!r}") from error
    merged = {"traceEvents": events, "displayTimeUnit": "ms", _BASE: first}
    try:
        text = json.dumps(merged)
    except RecursionError as error:
        raise ValueError("parts: an event is nested too deeply") from error
    Path(path).write_text(text + "\n", encoding="utf-8")


def _moved(event: Any, shift: float, taken: dict[Any, int], rank: int) -> dict[str, Any]:
    if not isinstance(event, dict):
        raise TypeError(f"an event is a {type(event).__name__}")
    moved = dict(event)
    if "ts" in moved:
        moved["ts"] = float(moved["ts"]) + shift
        if not math.isfinite(moved["ts"]):
            raise ValueError("a time that is not finite")
    pid = moved.get("pid")
    if "pid" in moved and taken.setdefault(pid, rank) != rank:  # as replicas have the same
        moved["pid"] = pid + rank * _OTHERS if isinstance(pid, int) else f"{pid}, rank {rank}"
    if moved.get("name") == "process_name":
        moved["args"] = {"name": f"rank {rank}: {moved['args']['name']}"}
    return moved


def _read(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path, _LARGEST)
    except ValueError as error:
        raise ValueError(f"{path}: expected a trace in JSON: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ValueError(f"{path}: expected a trace with traceEvents")
    if type(document.get(_BASE)) is not int or not 0 <= document[_BASE] < 1 << 63:
        raise ValueError(f"{path}: does not say when it began; write_trace needs origin=")
    return document


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        merge_traces(arguments[0], arguments[1:])
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
