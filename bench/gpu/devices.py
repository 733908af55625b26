"""Tests transfers between several GPUs in one process, and pipelines against the CPU's bits."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from torch import Tensor

from spectrain_ext.transport import Buffer, Edge, Message, callers_stream, new_stream

from .cases import Cases
from .exact import Exact, same
from .scale import Scale
from .stress import Delays

_MESSAGES = 40
#: Bytes of a copy: less than a word, not a multiple of one, and a large activation.
_SIZES = (1, 4097, 2**26)
_METHODS = ("auto", "spectrain", "1f1b", "pipedream")


def devices(cases: Cases, scale: Scale) -> None:
    """Run copies both ways, then pipelines over two and more devices, some with delays."""
    delays = Delays(scale)
    cases.run("peer access", lambda: _access(scale))
    for a, b in _pairs(scale.gpus)[: scale.few]:
        cases.run(f"copies {a} -> {b}", lambda a=a, b=b: _copies(a, b, scale))  # type: ignore[misc]
        cases.run(f"order {a} -> {b}", lambda a=a, b=b: _order(a, b, delays, scale))  # type: ignore[misc]
    for late in (None, 0, 1):
        for count in sorted(c for c in scale.processes if c <= scale.gpus):
            for method in _METHODS[: scale.few]:
                who = "" if late is None else f", device {late} is late"
                cases.run(
                    f"{method} over {count} devices{who}",
                    lambda m=method, n=count, k=late: _pipeline(m, n, k, delays, scale),  # type: ignore[misc]
                )


def _pairs(count: int) -> list[tuple[int, int]]:
    """Return both directions between the first two devices, all neighbours, then the ends."""
    found = [(k, k + 1) for k in range(count - 1)] + [(0, count - 1)]
    both = [pair for a, b in found for pair in ((a, b), (b, a))]
    return list(dict.fromkeys(both))


def _access(scale: Scale) -> dict[str, Any]:
    """Return which devices reach each other's memory without going through the CPU."""
    every = range(scale.gpus)
    if not scale.on_gpu:
        return {"reaches": [[True] * len(every)] * len(every)}
    can = torch.cuda.can_device_access_peer
    return {"reaches": [[a == b or can(a, b) for b in every] for a in every]}


def _copies(a: int, b: int, scale: Scale) -> dict[str, float]:
    """Check that every byte arrives, and measure the speed of large copies."""
    source, target = _two(a, b, scale)
    stream = new_stream("copies", source, target)
    best = float("inf")
    for size in _SIZES if scale.on_gpu else _SIZES[:2]:
        sent = torch.randint(256, (size,), dtype=torch.uint8)
        there, here = sent.to(source), torch.zeros(size, dtype=torch.uint8, device=target)
        scale.wait()
        for _ in range(3):
            start = time.perf_counter()
            with stream.using():
                here.copy_(there, non_blocking=True)
            stream.synchronize()
            best = min(best, (time.perf_counter() - start) / size)
        if not torch.equal(here.cpu(), sent):
            raise AssertionError(f"{size} bytes from {source} to {target} arrived as others")
    return {"gb_per_s": 1e-9 / best}


def _order(a: int, b: int, delays: Delays, scale: Scale) -> dict[str, int]:
    """Check that messages arrive whole and in order, even if writer, copy or reader is delayed."""
    source, target = _two(a, b, scale)
    writer, reader = new_stream("writer", source), new_stream("reader", target)
    depth, elements = 3, scale.message[0] * scale.message[1] // 4
    edge = Edge("edge", source, target, reader, depth)
    with delays.seeded(a * 31 + b):
        ready = writer.event()
        with writer.using():
            value = torch.zeros(elements, device=source)
        with reader.using():
            read = torch.zeros(_MESSAGES, 2, device=target)
        sent = Buffer("value")
        waiting = 0
        edge.begin()
        for i in range(_MESSAGES):
            with writer.using(writes=(sent,)):
                value.fill_(i + 1)
            writer.record(ready)
            writer.wait(edge.send(Message((value,)), sent, ready))
            waiting += 1
            if waiting == depth or i == _MESSAGES - 1:
                for _ in range(waiting):
                    _read(edge, reader, read, i + 1 - waiting)
                    waiting -= 1
        reader.synchronize()
    for device in (source, target):
        callers_stream(device).synchronize()
    expected = torch.arange(1.0, _MESSAGES + 1)[:, None].expand(-1, 2)
    if not torch.equal(read.cpu(), expected):
        raise AssertionError(f"expected messages 1 to {_MESSAGES}, got {read.cpu().tolist()}")
    if not delays.entered:
        raise AssertionError("no stream was entered: nothing was late")
    return {"messages": _MESSAGES, "streams_entered": delays.entered}


def _read(edge: Edge, reader: Any, read: Tensor, i: int) -> None:
    slot = edge.receive()
    assert slot is not None and slot.message is not None
    tensor = slot.message.tensors[0]
    assert tensor is not None
    with reader.using(reads=(slot.buffer,)):
        read[i, 0], read[i, 1] = tensor.min(), tensor.max()
    edge.free(slot)


def _two(a: int, b: int, scale: Scale) -> tuple[torch.device, torch.device]:
    found = scale.devices(max(a, b) + 1)
    return torch.device(found[a]), torch.device(found[b])


def _pipeline(
    method: str, count: int, late: int | None, delays: Delays, scale: Scale
) -> dict[str, Any]:
    """Place stages on devices in turn, so that every message crosses; two devices have two each."""
    stages, several = max(4, count), method in ("auto", "1f1b")
    minibatches = 24 if scale.on_gpu else 6
    exact = Exact(method, stages, microbatches=stages if several else 1, minibatches=minibatches)
    places = list(itertools.islice(itertools.cycle(scale.devices(count)), exact.stages))
    expected = exact.on_cpu()
    with delays.seeded(count, places[late] if late is not None else None):
        same(exact.train(places), expected)
    return {"bits": "the CPU's", "streams_entered": delays.entered}
