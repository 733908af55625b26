"""Merges the traces of several ranks on one time axis."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_BASE = "baseTimeNanoseconds"
_OTHERS = 10**8  # above the numbers of processes and stages


def merge_traces(path: str | Path, parts: Sequence[str | Path]) -> None:
    """Merge the traces of several ranks into one, in Chrome's JSON format.

    Ranks on one machine share its clock. Between machines the alignment is as good as their clocks
    agree, often within milliseconds.

    Args:
        parts: one file per rank, in order: from ``write_trace`` with ``origin``, or from
            ``torch.profiler``'s ``export_chrome_trace``.

    Raises:
        ValueError: a file is not such a trace, or does not say when it began.

    Example:
        >>> from spectrain_ext.timelines import merge_traces, simulate_method, write_trace
        >>> for rank in range(2):
        ...     write_trace(f"rank{rank}.json", simulate_method("1f1b", 2, 3), origin=float(rank))
        >>> merge_traces("all.json", ["rank0.json", "rank1.json"])
    """
    documents = [_read(Path(part)) for part in parts]
    first = min((document[_BASE] for document in documents), default=0)
    events: list[dict[str, Any]] = []
    rank_of: dict[Any, int] = {}  # of a process in the traces
    for rank, document in enumerate(documents):
        for event in document["traceEvents"]:
            if "ts" in event:
                event["ts"] += (document[_BASE] - first) / 1000.0
            pid = event.get("pid")
            if (
                "pid" in event and rank_of.setdefault(pid, rank) != rank
            ):  # as replicas have the same
                other = isinstance(pid, int)
                event["pid"] = pid + rank * _OTHERS if other else f"{pid}, rank {rank}"
            if event.get("name") == "process_name":
                event["args"] = {"name": f"rank {rank}: {event['args']['name']}"}
            events.append(event)
    merged = {"traceEvents": events, "displayTimeUnit": "ms", _BASE: first}
    Path(path).write_text(json.dumps(merged) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        if "traceEvents" not in document:
            raise ValueError("it has no traceEvents")
    except ValueError as error:
        raise ValueError(f"{path}: expected a trace in JSON: {error}") from error
    if _BASE not in document:
        raise ValueError(f"{path}: does not say when it began; write_trace needs origin=")
    return document
