"""What really ran at the same time: a profiler's trace of wide stages on one device."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .cases import Cases, write
from .scale import Scale
from .stress import Setup

#: (begin, end, stream, kind) of something that ran on the device, in microseconds.
Span = tuple[float, float, str, str]


def traced(cases: Cases, scale: Scale, out: Path) -> None:
    """Two and four stages; the traces themselves go to traces.tar.gz."""
    for count in (2, 4):
        cases.run(f"{count} stages", lambda n=count: _trace(n, scale, out))  # type: ignore[misc]
    files = sorted(out.glob("trace-*.json.gz"))
    if files:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for path in files:
                archive.add(path, path.name)
        write(out / "traces.tar", packed.getvalue())


def _trace(count: int, scale: Scale, out: Path) -> dict[str, Any]:
    device = "cuda:0" if scale.on_gpu else "cpu"
    minibatches, width, examples = scale.traced
    setup = Setup("spectrain", (device,) * count, width)
    pipe = setup.pipeline()
    x = torch.randn(examples, width, device=device)
    y = torch.randint(0, 10, (examples,), device=device)
    for _ in pipe.run([(x, y)] * minibatches):
        pass
    scale.wait()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * scale.on_gpu
    with profile(activities=activities) as profiler:
        for _ in pipe.run([(x, y)] * minibatches):
            pass
        scale.wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        text = path.read_bytes()
    write(out / f"trace-{count}.json.gz", gzip.compress(text))
    pipe.release()
    return {"minibatches": minibatches, "width": width, "examples": examples} | overlap(
        spans(json.loads(text)["traceEvents"])
    )


def spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    """What a trace says ran on the device."""
    found = []
    for event in events:
        category = str(event.get("cat", "")).lower()
        if event.get("ph") != "X" or category not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        name = str(event.get("name", ""))
        if category == "gpu_memcpy":
            kind = "copy"
        elif "spectrain" not in name:
            kind = "compute"
        else:
            kind = "prediction" if "Predict" in name else "update"
        begin = float(event["ts"])
        stream = str(event.get("args", {}).get("stream", event.get("tid")))
        found.append((begin, begin + float(event.get("dur", 0.0)), stream, kind))
    return found


def overlap(ran: list[Span]) -> dict[str, Any]:
    """Times in microseconds, and shares of the time in which the device did anything."""
    if not ran:
        return {"kernels": 0}
    changes = sorted(
        [(begin, 1, stream, kind) for begin, end, stream, kind in ran if end > begin]
        + [(end, -1, stream, kind) for begin, end, stream, kind in ran if end > begin],
        key=lambda change: (change[0], change[1]),
    )
    streams: dict[str, int] = {}
    kinds: dict[str, int] = {}
    busy = together = 0.0
    alone: dict[str, float] = {}
    pairs: dict[str, float] = {}
    last = changes[0][0] if changes else 0.0
    for now, step, stream, kind in changes:
        active = sorted(k for k, n in kinds.items() if n)
        passed = now - last
        last = now
        if active:
            busy += passed
            together += passed * (sum(n > 0 for n in streams.values()) > 1)
            for k in active:
                alone[k] = alone.get(k, 0.0) + passed
            for i, a in enumerate(active):
                for b in active[i + 1 :]:
                    pairs[f"{a} and {b}"] = pairs.get(f"{a} and {b}", 0.0) + passed
        streams[stream] = streams.get(stream, 0) + step
        kinds[kind] = kinds.get(kind, 0) + step
    whole = changes[-1][0] - changes[0][0] if changes else 0.0
    return {
        "kernels": len(ran),
        "streams": len(streams),
        "whole_us": round(whole, 2),
        "busy_us": round(busy, 2),
        "two_streams_share": round(together / busy, 4) if busy else None,
        "us_by_kind": {k: round(t, 2) for k, t in sorted(alone.items())},
        "share_together": {k: round(t / busy, 4) for k, t in sorted(pairs.items())},
    }
