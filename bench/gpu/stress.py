"""Checks that randomly delayed streams, which would expose a missing wait, change no bit.

Before each piece of work its stream gets a delay on the device. That work runs late, and work that
does not wait for it reads or writes too early.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.transport import streams

from .cases import Cases
from .exact import same
from .scale import Scale

Batch = tuple[Tensor, Tensor]
_CLASSES = 10


class Delays:
    """Delays streams at random: half of them not at all, the others by a limited time."""

    def __init__(self, scale: Scale) -> None:
        self.delayed = 0  # pieces of work
        self._longest = int(scale.delay_s * _cycles_per_second()) if scale.on_gpu else 0
        self._stream: Any = streams.CudaStream if scale.on_gpu else streams.Stream

    @contextmanager
    def seeded(self, seed: int, device: str | None = None) -> Iterator[None]:
        """Delay streams inside the block by times from the seed, on all devices or one."""
        chance, of = random.Random(seed), self._stream
        using, copy = of.using, of.copy
        self.delayed = 0

        def late(stream: Any) -> None:
            self.delayed += 1
            if chance.random() < 0.5:
                share, on = chance.random(), getattr(stream, "_stream", None)  # of CUDA
                if on is None:
                    self.sleep(share)
                elif device in (None, str(on.device)):
                    stream._advance()  # what came before is not late
                    with torch.cuda.stream(on):
                        self.sleep(share)

        def late_using(stream: Any, **buffers: Any) -> Any:
            late(stream)
            return using(stream, **buffers)

        def late_copy(stream: Any, pairs: Any, **buffers: Any) -> None:
            late(stream)
            copy(stream, pairs, **buffers)

        of.using, of.copy = late_using, late_copy
        try:
            yield
        finally:
            of.using, of.copy = using, copy

    def sleep(self, share: float = 1.0) -> None:
        """Occupy the device's current stream for a share of the longest delay."""
        if self._longest:
            torch.cuda._sleep(int(share * self._longest))


def _cycles_per_second() -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    start.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    return 20_000_000 / (float(start.elapsed_time(end)) / 1e3)


_MANY = ("auto", "pipedream-2bw", "error-feedback")


@dataclass(frozen=True)
class Setup:
    """A pipeline, and the places of its stages and batches."""

    method: str = "spectrain"
    devices: tuple[str, ...] = ()
    width: int = 0
    norm: bool = False
    recompute: bool = False
    batches: str = "device"  # or "pageable", "pinned"
    tied: bool = False  # the last stage shares a weight with the first
    mapping: bool = False  # batches are dicts and are evaluated too

    def stages(self) -> list[nn.Module]:
        """Return the same stages each time."""
        torch.manual_seed(11)
        w = self.width
        norms = [nn.BatchNorm1d(w) if self.norm else nn.Identity() for _ in self.devices[1:]]
        middle = [nn.Sequential(nn.Linear(w, w), norm, nn.Tanh()) for norm in norms]
        stages: list[nn.Module] = [*middle, nn.Linear(w, _CLASSES)]
        if self.tied:
            stages[-1] = nn.Sequential(nn.Linear(w, w), stages[-1])
            stages[-1][0].weight = middle[0][0].weight
        if self.mapping:
            stages[0] = nn.Sequential(_Input(), stages[0])
        return stages

    def pipeline(self) -> st.Pipeline:
        """Return the pipeline with an optimizer that suits the method."""

        def optimizer(params: list[nn.Parameter]) -> Any:
            return st.optim.SGD(
                params, lr=0.02, momentum=0.9, smoothed=self.method == "spectrain-smoothed"
            )

        return st.Pipeline(
            self.stages(),
            optimizer=optimizer,
            loss_fn=_loss,
            method=self.method,
            devices=list(self.devices),
            microbatches="auto" if self.method in _MANY else 1,
            recompute=self.recompute,
        )

    def data(self, scale: Scale) -> Iterator[Batch | dict[str, Tensor]]:
        """Yield batches one at a time without keeping them, so that only the pipeline does."""
        count, _, examples = scale.stress
        gen = torch.Generator().manual_seed(5)
        there, pins = self.batches == "device", self.batches == "pinned" and scale.on_gpu
        made = []
        for _ in range(count):
            x = torch.randn(examples, self.width, generator=gen)
            y = torch.randint(0, _CLASSES, (examples,), generator=gen)
            made.append((x.to(self.devices[0]), y.to(self.devices[-1])) if there else (x, y))
        for x, y in made:
            x, y = (x.pin_memory(), y.pin_memory()) if pins else (x.clone(), y.clone())
            yield {"x": x, "y": y} if self.mapping else (x, y)

    def train(self, scale: Scale) -> dict[str, Tensor]:
        """Return losses and final state."""
        pipe = self.pipeline()
        losses = torch.stack([r.loss.detach().cpu() for r in pipe.run(self.data(scale))])
        if self.mapping:
            measured = pipe.evaluate(self.data(scale))["loss"]
            losses = torch.cat([losses, losses.new_tensor([measured])])
        state = {k: v.detach().cpu().clone() for k, v in pipe.state_dict().items()}
        pipe.release()
        return {"losses": losses, **state}


class _Input(nn.Module):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"]


def _loss(output: Tensor, target: Tensor | dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, target["y"] if isinstance(target, dict) else target)


def stress_methods(cases: Cases, scale: Scale) -> None:
    """Test every method on wide stages, seed by seed."""
    # Methods with different schedules first.
    first = ("spectrain", "pipedream", "gpipe", "pipedream-2bw", "lwp-w")
    methods = [*first, *(m for m in st.methods() if m not in first)][: scale.few]
    _compare(cases, scale, {m: _of_method(m, scale) for m in methods})


def _of_method(method: str, scale: Scale) -> Setup:
    count = 1 if method == "xgrad" else 4
    return Setup(method, (_device(scale),) * count, scale.stress[1])


def stress_options(cases: Cases, scale: Scale) -> None:
    """Test stages alternating between GPU and CPU, recomputation with BatchNorm, CPU batches."""
    gpu, narrow = _device(scale), max(8, scale.stress[1] // 8)
    setups = {
        "recomputing, BatchNorm": Setup("spectrain", (gpu,) * 4, narrow, True, True),
        "cuda and cpu in turn": Setup("spectrain", (gpu, "cpu", gpu, "cpu"), narrow),
        "cpu, then cuda": Setup("pipedream", ("cpu", gpu, gpu), narrow),
        "tied weights": Setup("auto", (gpu,) * 4, narrow, tied=True),
        "tied weights, evaluated": Setup("spectrain", (gpu,) * 3, narrow, tied=True, mapping=True),
        "pinned mappings": Setup("auto", (gpu,) * 4, narrow, batches="pinned", mapping=True),
        "pageable batches": Setup("spectrain", (gpu,) * 4, narrow, batches="pageable"),
        "pinned batches": Setup("spectrain", (gpu,) * 4, narrow, batches="pinned"),
        "pinned batches, BatchNorm": Setup("spectrain", (gpu,) * 3, narrow, True, batches="pinned"),
    }
    _compare(cases, scale, setups)


def _device(scale: Scale) -> str:
    return "cuda:0" if scale.on_gpu else "cpu"


def _compare(cases: Cases, scale: Scale, setups: dict[str, Setup]) -> None:
    delays = Delays(scale)
    expected: dict[str, dict[str, Tensor]] = {}

    def undelayed(name: str) -> dict[str, Any]:
        expected[name] = setups[name].train(scale)
        same(setups[name].train(scale), expected[name])
        return {"repeated": "the same bits"}

    def delayed(name: str, seed: int) -> dict[str, Any]:
        if name not in expected:  # otherwise an earlier process of this part computed it
            expected[name] = setups[name].train(scale)
        with delays.seeded(seed):
            found = setups[name].train(scale)
        if not delays.delayed:
            raise AssertionError("no work was issued: nothing was late")
        same(found, expected[name])
        return {"works": delays.delayed}

    for seed in range(scale.seeds):
        for name in setups:
            if seed == 0:
                cases.run(f"{name}, no delays", lambda n=name: undelayed(n))  # type: ignore[misc]
            cases.run(f"{name}, seed {seed}", lambda n=name, s=seed: delayed(n, s))  # type: ignore[misc]
