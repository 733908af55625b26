"""Simulates how long a minibatch takes in a method's schedule, bubbles included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from spectrain_ext.cli.doctor import threads
from spectrain_ext.cli.options import method_of
from spectrain_ext.method import Method, Window, find_method
from spectrain_ext.partitioning import measure
from spectrain_ext.simulation import summarize
from spectrain_ext.timelines import simulate_method

from .looks import REFERENCE
from .settings import TrainSettings, microbatches_in, stages_of, window_of
from .workload import Maker, stages_in

_SIMULATED = 12  # minibatches


class Work(NamedTuple):
    """Seconds of a minibatch's forward and backward, by stage."""

    forward: Sequence[float]
    backward: Sequence[float]

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage, the least that a minibatch takes in any schedule."""
        return max(f + b for f, b in zip(self.forward, self.backward, strict=True))


def measured_work(
    settings: TrainSettings, make: Maker, stages: int, devices: Sequence[str]
) -> Work:
    """Measure each stage's work for a minibatch in turn, with the settings' threads."""
    workload = make(settings, find_method(REFERENCE), stages, 0)
    modules = stages_in(workload, stages)
    for module, device in zip(modules, devices, strict=True):
        module.to(device)
    value, target = next(iter(workload.train))
    modules[-1] = _WithLoss(modules[-1], workload.loss, target.to(devices[-1]))
    with threads(settings.threads):
        profile = measure(modules, value)
    forward = [block.forward_seconds or 0.0 for block in profile.blocks]
    both = [block.seconds for block in profile.blocks]
    return Work(forward, [whole - ahead for whole, ahead in zip(both, forward, strict=True)])


class _WithLoss(nn.Module):
    """The last stage, followed by the loss."""

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], Tensor], target: Any) -> None:
        super().__init__()
        self._module, self._loss, self._target = module, loss, target

    def forward(self, value: Any) -> Tensor:
        return self._loss(self._module(value), self._target)


def minibatch_time(method: Method, microbatches: int, work: Work, window: Window = None) -> float:
    """Return the seconds of a minibatch in a method's schedule, with one device per stage.

    A method with several stages per device (``chunks``) has fewer devices by that factor. A
    microbatch takes its share of a minibatch's work; updates, predictions and copies take no time.
    ``window`` is as for ``Pipeline``.
    """
    stages = len(work.forward)
    spans = simulate_method(
        method,
        stages,
        _SIMULATED + 2 * stages // microbatches,
        microbatches=microbatches,
        window=window,
        forward=[f / microbatches for f in work.forward],
        backward=[b / microbatches for b in work.backward],
    )
    return summarize(spans).period


def relative_times(
    settings: TrainSettings, make: Maker, devices: Sequence[str]
) -> dict[str, float]:
    """Return, by method, the time of a minibatch over the slowest stage's work: 1 has no bubble.

    If a device has several stages, the work of as many stages counts.
    """
    works: dict[int, Work] = {}

    def work_of(stages: int) -> Work:
        if stages not in works:
            works[stages] = measured_work(settings, make, stages, devices[:stages])
        return works[stages]

    slowest = work_of(settings.stages).slowest
    found = {}
    for method in map(method_of, settings.methods):
        parts, window = microbatches_in(method, settings), window_of(method, settings)
        work = work_of(stages_of(method, settings))
        found[method.name] = minibatch_time(method, parts, work, window) / slowest / method.chunks
    return found
