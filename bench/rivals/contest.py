"""Measures an operation and its rivals in turn, so that disturbances affect all of them.

pytest-benchmark measures one test after the other. Minutes may lie between two rivals, and on a
shared machine the memory may then be twice as fast for one of them. This module therefore samples
round by round and passes the times to its statistics (bench_operators.py) or stores them
(gpu/operators.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from turns import take_turns

from .copies import LIMIT, copied_bytes, copies
from .in_torch import compiled, rivals
from .machine import free_bytes
from .on_device import device_rivals
from .operations import Call, Operation, ours
from .workloads import Streams, Workload, dtype_of

COMPILED_TENSORS = 10  # with more, torch.compile takes minutes


@dataclass(frozen=True)
class Settings:
    """Measurement settings.

    Attributes:
        device: "cpu", or a CUDA device.
        case_s: seconds for the samples of one contest (an operation on a workload).
        sample_s: minimum seconds of a sample.
        compile: whether to measure torch.compile, for up to ten tensors.
        memory_bytes: limit for the tensors; None: most of the free memory.
        least: minimum number of rounds.
    """

    device: str = "cpu"
    case_s: float = 0.7
    sample_s: float = 5e-4
    compile: bool = False
    memory_bytes: int | None = None
    least: int = 5


class TooLarge(Exception):
    """A workload's tensors do not fit."""


@dataclass(frozen=True)
class Times:
    """Seconds of a contestant's call, one value per sample, and its description (`about`)."""

    seconds: list[float]
    about: dict[str, Any]

    def as_benchmark(self) -> dict[str, Any]:
        """Return an entry of pytest-benchmark's JSON."""
        s = self.seconds
        quarters = statistics.quantiles(s, n=4) if len(s) > 1 else s * 3
        stats = {"median": statistics.median(s), "iqr": quarters[2] - quarters[0], "min": min(s)}
        return {"stats": {**stats, "rounds": len(s)}, "extra_info": self.about}


class OnHost:
    """A call timed by the wall clock, repeated to fill a sample."""

    how = "clock"

    def __init__(self, call: Call, sample_s: float) -> None:
        self._call = call
        call()
        self._repeat = 1
        self._repeat = _times(sample_s, self.sample(), 100_000)

    def sample(self) -> float:
        call = self._call
        start = time.perf_counter()
        for _ in range(self._repeat):
            call()
        return (time.perf_counter() - start) / self._repeat


class OnDevice:
    """Calls on rotating sets of tensors, timed by CUDA events, replayed from a graph if possible.

    A graph excludes the CPU's cost. Calls that cannot be captured are launched normally.
    """

    def __init__(self, calls: Sequence[Call], sample_s: float) -> None:
        for call in calls:
            call()
        torch.cuda.synchronize()
        self._calls = calls
        self._graph = _capture(calls)
        self.how = "events" if self._graph is None else "graph"
        self._repeat = 1
        self._repeat = _times(sample_s, self.sample() * len(calls), 1000)

    def sample(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(self._repeat):
            if self._graph is not None:
                self._graph.replay()
            else:
                for call in self._calls:
                    call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / self._repeat / len(self._calls)


def _times(sample_s: float, once_s: float, most: int) -> int:
    return max(1, min(most, int(sample_s / max(once_s, 1e-7))))


def _capture(calls: Sequence[Call]) -> Any:
    graph: Any = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except (RuntimeError, ValueError):
        torch.cuda.synchronize()
        return None
    return graph


Contestant = OnHost | OnDevice


def makers(
    operation: Operation, settings: Settings
) -> dict[str, Callable[[Streams], dict[str, Call]]]:
    """Return factories of the calls of each kind, by name, for a set of tensors."""
    return {
        "ours": lambda s: ours(operation, s),
        "rival": lambda s: {**rivals(operation, s), **device_rivals(operation, s)},
        "copy": lambda s: copies(operation.bytes_moved(s.work), settings.device),
    }


def compiles(work: Workload, settings: Settings) -> bool:
    """Return whether torch.compile takes part."""
    few = work.count <= COMPILED_TENSORS
    return settings.compile and few and work.precision.name in ("fp32", "mixed")


def names(operation: Operation, work: Workload, settings: Settings) -> list[str]:
    """Return the names of a contest's contestants."""
    few = Workload(work.name, ((0,),) * min(work.count, 2), work.precision)
    s = Streams(few, settings.device)
    found = [name for make in makers(operation, settings).values() for name in make(s)]
    return [*found, "torch.compile"] if compiles(work, settings) else found


def contest(operation: Operation, work: Workload, settings: Settings) -> dict[str, Times]:
    """Measure an operation's implementations, and copies of as many bytes, by name.

    Raises:
        TooLarge: the tensors need more memory than free or allowed.
    """
    needed = bytes_needed(operation, work)
    limit = settings.memory_bytes or int(0.85 * free_bytes(settings.device))
    if needed > limit:
        raise TooLarge(f"needs {needed / 2**30:.1f} GiB, {limit / 2**30:.1f} may be used")
    on_cpu, nbytes = settings.device == "cpu", operation.bytes_moved(work)
    count = 1 if on_cpu else _sets(operation, work, settings.device)
    sets = [Streams(work, settings.device) for _ in range(count)]
    kinds: dict[str, str] = {}
    calls: dict[str, list[Call]] = {}
    for kind, make in makers(operation, settings).items():
        for s in sets:
            for name, call in make(s).items():
                kinds[name] = kind
                calls.setdefault(name, []).append(call)
    compile_s: dict[str, float] = {}
    if compiles(work, settings):
        name = "torch.compile"
        kinds[name] = "rival"
        calls[name], compile_s[name] = compiled(operation, sets)
    contestants: dict[str, Contestant] = {
        name: OnHost(each[0], settings.sample_s) if on_cpu else OnDevice(each, settings.sample_s)
        for name, each in calls.items()
    }
    samples = {name: each.sample for name, each in contestants.items()}
    times = take_turns(samples, settings.case_s, settings.least)
    found = {}
    for name, seconds in times.items():
        about = {
            "operation": operation.name,
            "workload": work.name,
            "precision": work.precision.name,
            "name": name,
            "kind": kinds[name],
            "bytes": copied_bytes(nbytes) if kinds[name] == "copy" else nbytes,
            "elements": work.elements,
            "tensors": work.count,
            "how": contestants[name].how,
        }
        if name in compile_s:
            about["compile_s"] = round(compile_s[name], 2)
        found[name] = Times(seconds, about)
    return found


def bytes_needed(operation: Operation, work: Workload) -> int:
    """Return the bytes of the streams, the rivals' state, and the yardstick."""
    streams = sum(dtype_of(work, letter).itemsize for letter in operation.letters)
    scratch = 4 * ("u" in operation.letters) + 4 * (work.precision.name == "mixed") + 4
    return work.elements * (streams + scratch) + min(LIMIT, operation.bytes_moved(work))


def _sets(operation: Operation, work: Workload, device: str) -> int:
    """Return the number of sets of tensors to rotate, so that none is in the L2 cache when used."""
    l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 2**26
    fitting = int(0.6 * free_bytes(device)) // max(1, bytes_needed(operation, work))
    count = sets_needed(operation.bytes_moved(work), l2)
    # Hundreds of tensors need thousands of launches per set, which dominate over caches.
    return max(1, min(count, fitting, 64 if work.count <= 10 else 4))


def sets_needed(nbytes: int, l2_bytes: int) -> int:
    """Return the number of sets that puts four times the L2 cache between two uses of one."""
    return max(2, -(-4 * l2_bytes // max(1, nbytes)) + 1)
