"""Counts what a pipeline asks of CUDA and of torch, on a machine without a GPU.

Tensors stay on the CPU, and what is issued is computed at once. The package's own CUDA streams work
on stand-ins for torch's streams and events, which count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spectrain_ext import _C
from spectrain_ext.transport import Buffer, CudaStream, Stream, new_stream

#: What is counted, with the words of a table.
ENTERED, RECORDED, WAITED = "streams entered", "events recorded", "waits for events"
ASKED, LENT, COPIED = "current stream asked for", "tensors lent", "copies between stages"
BATCHES, KERNELS = "copies of batches", "kernels of the package"
RANDOM, BACKWARDS = "generator states read or set", "calls of autograd"
OPERATORS, ALLOCATIONS = "torch's operators", "torch's allocations"

#: Since the last ``clear``.
calls: Counter[str] = Counter()

#: Methods of a plan that launch kernels.
_LAUNCHING = "predict", "stash_predict_", "extrapolate", "stash", "restore_", "write_out", "step"


class CountedLane:
    """Stands for a ``torch.cuda.Stream``."""

    def __init__(self, device: torch.device, name: str = "") -> None:
        self.device, self.name = device, name

    def __enter__(self) -> None:
        calls[ENTERED] += 1

    def __exit__(self, *_: object) -> None: ...

    def wait_event(self, event: Any) -> None:
        calls[WAITED] += 1

    def synchronize(self) -> None: ...


class CountedEvent:
    """Stands for a ``torch.cuda.Event``."""

    def record(self, lane: Any) -> None:
        calls[RECORDED] += 1

    def synchronize(self) -> None: ...


class CountedStream(CudaStream):
    """The package's stream, whose copies are counted; only batches come from the CPU."""

    @property
    def lane(self) -> Any:
        return self._stream

    def copy(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        *,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        if "batch" in self.lane.name:
            calls[BATCHES] += len(pairs)
            super().copy(pairs, reads=reads, writes=writes)
            return
        calls[COPIED] += len(pairs)
        self._advance()  # as between tensors on CUDA
        self.copied(pairs, reads, writes)

    def copied(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
    ) -> None:
        for to, tensor in pairs:
            with torch._C._DisableTorchDispatch():  # the native copy is no operator of torch's
                to.copy_(tensor)


class _Generator:
    """Torch's generator, whose states are counted."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self.device = generator, generator.device

    def get_state(self) -> Tensor:
        calls[RANDOM] += 1
        return self._generator.get_state()

    def set_state(self, state: Tensor) -> None:
        calls[RANDOM] += 1
        self._generator.set_state(state)


class Operators(TorchDispatchMode):
    """Counts torch's operators, without views."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if "empty" in name:
            calls[ALLOCATIONS] += 1
        elif not views and "detach" not in name and "lift" not in name:
            calls[OPERATORS] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def stood_in(
    places: Sequence[torch.device],
    stream: type[CountedStream] = CountedStream,
    lane: Callable[..., Any] = CountedLane,
    event: Callable[[], Any] = CountedEvent,
    callers: Callable[[torch.device | None], Stream] | None = None,
) -> Iterator[None]:
    """Inside, new pipelines take their stages to be on these CUDA devices.

    Args:
        places: the devices of the stages.
        stream, lane, event: the classes of streams, and what stands for torch's.
        callers: returns the caller's stream for the device of a batch, or for the stages (None).
    """
    from spectrain_ext.transport import streams

    lanes = {place: lane(place, "the caller's stream") for place in places}

    def made(name: str | None) -> Stream:
        if name is None:
            calls[ASKED] += 1
            return callers(None) if callers else stream(lanes[places[-1]], own=False)
        numbers = [int(word) for word in name.split() if word.isdigit()]
        new: Any = new_stream(name, places[numbers[0] if numbers else -1])  # copies: the sender's
        new.lane.name = name
        return new

    def of_batches(device: torch.device) -> Stream:
        return callers(device) if callers else Stream()

    with ExitStack() as patches:
        for target, value in (
            ("spectrain_ext.transport.streams.CudaStream", stream),
            ("spectrain_ext.pipeline.source.callers_stream", of_batches),
            ("spectrain_ext.transport.local.callers_stream", of_batches),  # pinned copies
        ):
            patches.enter_context(patch(target, value))
        patches.enter_context(patch.object(streams, "cpu_stream", made))
        patches.enter_context(patch.object(torch.cuda, "Stream", lane))
        patches.enter_context(patch.object(torch.cuda, "Event", event))
        patches.enter_context(patch.object(torch.cuda, "stream", lambda each: each))
        patches.enter_context(patch.object(torch.Tensor, "record_stream", _lend))
        yield


def _lend(tensor: Tensor, lane: Any) -> None:
    calls[LENT] += 1


@contextmanager
def torch_counted() -> Iterator[None]:
    """Inside, count what is asked of torch and of the package's operators."""

    def counting(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            calls[what] += 1
            return call(*args, **named)

        return counted

    with ExitStack() as patches:
        for name in _LAUNCHING:
            method = counting(KERNELS, getattr(_C.Plan, name))
            patches.enter_context(patch.object(_C.Plan, name, method))
        generator: Any = _Generator(torch.default_generator)
        patches.enter_context(patch.object(torch, "default_generator", generator))
        engine = "spectrain_ext.pipeline.tape._run_backward"
        run_backward = torch.autograd.Variable._execution_engine.run_backward
        patches.enter_context(patch(engine, counting(BACKWARDS, run_backward)))
        yield
