"""Measures from a profiler's trace what really overlaps in wide stages."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import spectrain_ext as st

from .cases import Cases, write
from .exact import sgd
from .launch import run_all
from .ranks import LIMIT_S, backend_of_bodies, own_groups
from .scale import Scale
from .stress import Setup

#: (begin, end, device/stream, kind) of an activity on a device, in microseconds.
Span = tuple[float, float, str, str]
#: Bytes of all traces together; more is too large to transfer.
_LARGEST = 14 * 2**20


def traced(cases: Cases, scale: Scale, out: Path) -> None:
    """Trace stages on one device, on two, and in two processes; the traces go to traces.tar."""
    for devices in (1, 2):
        for count in (2, 4):
            name = f"{count} stages" + f" on {devices} devices" * (devices > 1)
            if devices <= scale.gpus:
                cases.run(name, lambda n=count, d=devices: _together(n, d, scale, out))  # type: ignore[misc]
            else:
                cases.put(name, "skipped", error="it needs 2 GPUs, and 1 can be used")
    cases.run("2 processes", lambda: _apart(2, scale, out))
    packed, left = io.BytesIO(), _LARGEST
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path in sorted(out.glob("trace-*.json.gz")):
            left -= path.stat().st_size + 2 * tarfile.BLOCKSIZE
            if left > 0:
                archive.add(path, path.name)
    write(out / "traces.tar", packed.getvalue())


def _together(count: int, devices: int, scale: Scale, out: Path) -> dict[str, Any]:
    setup = _setup(scale.devices(devices) * count, count, scale)
    pipe = setup.pipeline()
    text = _profiled(pipe, setup.devices, True, scale)
    pipe.release()
    return _told(text, f"{count}-{devices}", scale, out)


def _apart(ranks: int, scale: Scale, out: Path) -> dict[str, Any]:
    """Trace each rank's device; the messages are NCCL kernels or copies to host memory."""
    found = run_all(rank_main, ranks, scale, out, limit_s=LIMIT_S)
    return {"backend": found[0]["backend"], **found[1], "rank 0": found[0]}


def rank_main(rank: int, ranks: int, scale: Scale, out: Path) -> dict[str, Any]:
    device = scale.devices(rank + 1)[-1]
    setup = _setup([device] * ranks, ranks, scale)
    with own_groups():
        pipe = st.DistributedPipeline(
            setup.stages()[rank],
            sgd,
            nn.functional.cross_entropy,
            setup.method,
            device=device,
            timeout=60.0,
        )
        text = _profiled(pipe, (device, device), rank == 0, scale)
        backend = backend_of_bodies()
        del pipe
    return {"backend": backend} | _told(text, f"rank-{rank}", scale, out)


def _setup(devices: list[str], count: int, scale: Scale) -> Setup:
    return Setup("spectrain", tuple(devices[:count]), scale.traced[1])


def _profiled(pipe: st.Pipeline, places: Sequence[str], feeds: bool, scale: Scale) -> bytes:
    """Return a trace of the second of two runs."""
    minibatches, width, examples = scale.traced
    x = torch.randn(examples, width, device=places[0])
    y = torch.randint(0, 10, (examples,), device=places[-1])
    given: Any = [(x, y)] * minibatches if feeds else None
    for _ in pipe.run(given):
        pass
    scale.wait()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * scale.on_gpu
    with profile(activities=activities) as profiler:
        for _ in pipe.run(given):
            pass
        scale.wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return path.read_bytes()


def _told(text: bytes, name: str, scale: Scale, out: Path) -> dict[str, Any]:
    write(out / f"trace-{name}.json.gz", gzip.compress(text))
    sizes = dict(zip(("minibatches", "width", "examples"), scale.traced, strict=True))
    return sizes | overlap(spans(json.loads(text)["traceEvents"]))


def spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    """Return a trace's activities on the device."""
    found = []
    for event in events:
        category = str(event.get("cat", "")).lower()
        if event.get("ph") != "X" or category not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        name = str(event.get("name", ""))
        if category == "gpu_memcpy":
            kind = "copy"
        elif "nccl" in name.lower():
            kind = "message"
        elif "spectrain" not in name:
            kind = "compute"
        else:
            kind = "prediction" if "Predict" in name else "update"
        begin = float(event["ts"])
        about = event.get("args", {})
        # Streams of two devices may have the same number.
        stream = f"{about.get('device', event.get('pid'))}/{about.get('stream', event.get('tid'))}"
        found.append((begin, begin + float(event.get("dur", 0.0)), stream, kind))
    return found


def overlap(ran: list[Span]) -> dict[str, Any]:
    """Return times in microseconds, and shares of the time in which the device was active."""
    if not ran:
        return {"kernels": 0}
    changes = sorted(
        (moment, step, stream, kind)
        for begin, end, stream, kind in ran
        if end > begin
        for moment, step in ((begin, 1), (end, -1))
    )
    streams, kinds = Counter[str](), Counter[str]()
    alone, pairs = defaultdict[str, float](float), defaultdict[str, float](float)
    busy = together = devices = 0.0
    last = changes[0][0] if changes else 0.0
    for now, step, stream, kind in changes:
        active = sorted(k for k, n in kinds.items() if n)
        passed = now - last
        last = now
        if active:
            busy += passed
            running = [s for s, n in streams.items() if n]
            together += passed * (len(running) > 1)
            devices += passed * (len({s.partition("/")[0] for s in running}) > 1)
            for k in active:
                alone[k] += passed
            for a, b in combinations(active, 2):
                pairs[f"{a} and {b}"] += passed
        streams[stream] += step
        kinds[kind] += step
    whole = changes[-1][0] - changes[0][0] if changes else 0.0
    return {
        "kernels": len(ran),
        "streams": len(streams),
        "whole_us": round(whole, 2),
        "busy_us": round(busy, 2),
        "two_streams_share": round(together / busy, 4) if busy else None,
        "two_devices_share": round(devices / busy, 4) if busy else None,
        "us_by_kind": {k: round(t, 2) for k, t in sorted(alone.items())},
        "share_together": {k: round(t / busy, 4) for k, t in sorted(pairs.items())},
    }
