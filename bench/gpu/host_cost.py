"""Measures the CPU cost per instruction of four stages on one GPU, with negligible GPU work.

First in microseconds by method, then of single calls, then by function and by call of CUDA.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import bench_pipeline as bp
import torch
from torch.profiler import ProfilerActivity, profile

import spectrain_ext as st
from spectrain_ext.transport import new_stream

from .cases import Cases
from .scale import Scale

_WIDTH, _ROUNDS = 16, 5
#: Methods of the profiles; calls of a sample of single calls; seconds between samples of functions.
_PROFILED, _CALLS, _INTERVAL_S = ("auto", "vanilla", "spectrain"), 2000, 5e-4
_SHOWN = 40
_PACKAGE = f"{bp.PACKAGE}{os.sep}"


def host_cost(cases: Cases, scale: Scale) -> None:
    """Run a case per method, after the modules alone; then the single calls, and the profiles."""
    batches = bp.make_batches(_WIDTH, scale.device)

    def median_us(run: Callable[[], object]) -> float:
        run()

        def to_the_end() -> None:
            run()
            scale.wait()

        return _median_us(to_the_end, scale)

    alone = bp.make_stages(_WIDTH, scale.device)
    base = cases.run(
        "modules", lambda: {"median_us": median_us(lambda: bp.modules_only(alone, batches))}
    )

    def pipeline(method: str) -> st.Pipeline:
        stages = bp.make_stages(_WIDTH, scale.device)
        return bp.make_pipeline(stages, method, devices=[scale.device] * bp.STAGES)

    def of(method: str) -> dict[str, float | None]:
        pipe = pipeline(method)
        median = median_us(lambda: bp.run(pipe, batches))
        pipe.release()
        microbatch = median / pipe.places[0].microbatches
        own = (microbatch - base["median_us"]) / bp.INSTRUCTIONS if base else None
        return {"median_us": median, "own_cost_us_per_action": own}

    def profiled(method: str) -> dict[str, Any]:
        pipe = pipeline(method)
        bp.run(pipe, batches)
        scale.wait()
        instructions = bp.INSTRUCTIONS * pipe.places[0].microbatches
        found = {
            "functions": _functions(lambda: bp.run(pipe, batches), instructions),
            "calls": _calls_of_cuda(lambda: bp.run(pipe, batches), instructions, scale),
        }
        pipe.release()
        return found

    # The most important comparisons first.
    first = ("auto", "1f1b", "vanilla", "spectrain")
    chosen = sorted(bp.METHODS, key=lambda m: m not in first)[: scale.few]
    for method in chosen[: len(first)]:
        cases.run(method, lambda m=method: of(m))  # type: ignore[misc]
    cases.run("single calls", lambda: _single_calls(scale))
    for method in _PROFILED[: scale.few]:
        cases.run(f"profile of {method}", lambda m=method: profiled(m))  # type: ignore[misc]
    for method in chosen[len(first) :]:
        cases.run(method, lambda m=method: of(m))  # type: ignore[misc]


def _functions(run: Callable[[], None], instructions: int) -> dict[str, float]:
    """Return the microseconds of an instruction by function: the innermost one of the package.

    By samples, which hardly change the times: a profiler of calls would make short functions seem
    expensive. What torch does within a function counts for that function.
    """
    counts: Counter[str] = Counter()
    with _sampled(counts):
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
    total = max(1, sum(counts.values()))
    us = seconds / instructions * 1e6
    return {name: us * n / total for name, n in counts.most_common(_SHOWN)}


@contextmanager
def _sampled(counts: Counter[str]) -> Iterator[None]:
    """Inside, another thread notes again and again where this one is."""
    ended, watched = threading.Event(), threading.get_ident()
    interval = sys.getswitchinterval()

    def sample() -> None:
        while not ended.wait(_INTERVAL_S):
            counts[_place(sys._current_frames().get(watched))] += 1

    thread = threading.Thread(target=sample)
    sys.setswitchinterval(_INTERVAL_S / 10)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)


def _place(frame: FrameType | None) -> str:
    """Return the innermost function of the package, and what it calls outside of it."""
    called = ""
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if file.startswith(_PACKAGE):  # by text: the sampled thread waits meanwhile
            return f"{file.removeprefix(_PACKAGE)} {name}" + (f" > {called}" if called else "")
        called, frame = name, frame.f_back
    return called


def _calls_of_cuda(
    run: Callable[[], None], instructions: int, scale: Scale
) -> dict[str, dict[str, float]]:
    """Return, by call of CUDA's runtime, calls of an instruction and their microseconds."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * scale.on_gpu
    with profile(activities=activities) as profiler:
        run()
        scale.wait()
    found = [each for each in profiler.key_averages() if each.key.startswith("cu")]
    return {
        each.key: {
            "calls": each.count / instructions,
            "us": each.self_cpu_time_total / instructions,
        }
        for each in sorted(found, key=lambda each: -each.self_cpu_time_total)[:_SHOWN]
    }


def _single_calls(scale: Scale) -> dict[str, float]:
    """Return the microseconds of calls that a pipeline consists of, on an idle device."""
    device = torch.device(scale.devices(1)[0])
    one, other = new_stream("one", device), new_stream("other", device)
    small, copy = torch.ones(16, 16, device=device), torch.empty(16, 16, device=device)
    buffers = [torch.zeros_like(small)]
    plan = st.Plan([small], momentum_buffers=buffers)
    leaf = torch.ones(16, 16, device=device, requires_grad=True)
    generators = [torch.default_generator]

    def enter() -> None:
        with one:
            pass

    def follow() -> None:
        with one.using():
            pass
        other.wait_stream(one)

    def backward() -> None:
        (leaf * 1.0).backward(small)
        leaf.grad = None

    calls: dict[str, Callable[[], object]] = {
        "enter a stream": enter,
        "use a stream; another one waits for it": follow,
        "copy between tensors, without entering": lambda: one.copy([(copy, small)]),
        "torch's copy_": lambda: copy.copy_(small),
        "launch a kernel of torch's": lambda: torch.add(small, 1.0, out=copy),
        "launch a kernel of the package's": lambda: plan.predict_(steps=1, lr=0.1),
        "a forward and a backward of one operator": backward,
    }
    if scale.on_gpu:
        generators.append(torch.cuda.default_generators[device.index])
        stream, event = torch.cuda.Stream(device), torch.cuda.Event()

        def enter_torch() -> None:
            with torch.cuda.stream(stream):
                pass

        calls |= {
            "torch.cuda.stream": enter_torch,
            "torch.cuda.current_stream": lambda: torch.cuda.current_stream(device),
            "record an event": lambda: event.record(stream),
            "wait for an event": lambda: stream.wait_event(event),
        }
    for generator in generators:
        state = generator.get_state()
        kind = generator.device.type
        calls[f"get the state of a generator, {kind}"] = generator.get_state
        calls[f"set the state of a generator, {kind}"] = lambda g=generator, s=state: g.set_state(s)  # type: ignore[misc]
    count = _CALLS if scale.on_gpu else 3
    return {name: _median_us(call, scale, count) for name, call in calls.items()}


def _median_us(call: Callable[[], object], scale: Scale, count: int = 1) -> float:
    samples = []
    for _ in range(min(_ROUNDS, scale.rounds)):
        scale.wait()
        start = time.perf_counter()
        for _ in range(count):
            call()
        samples.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(samples)
