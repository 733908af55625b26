"""Simulates how long a minibatch takes in a method's schedule, bubbles included."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from spectrain_ext.cli.doctor import threads
from spectrain_ext.cli.options import method_of
from spectrain_ext.method import Method, Window, find_method
from spectrain_ext.simulation import summarize
from spectrain_ext.timelines import simulate_method

from .looks import REFERENCE
from .pipelines import synchronize
from .settings import TrainSettings, microbatches_in, stages_of, window_of
from .workload import Maker, stages_in

# measurements per stage; the fastest counts, because other processes may use the machine
_TIMED = 9
_ENOUGH = 1.0  # seconds per stage
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
    places = [torch.device(name) for name in devices]
    value, target = next(iter(workload.train))
    target = target.to(places[-1])
    forward, backward = [], []
    with threads(settings.threads):
        for k, (module, place) in enumerate(zip(modules, places, strict=True)):
            module.to(place)
            value = value.detach().to(place)
            ahead, back = [], []
            for _ in range(_TIMED):
                inputs = value.clone()
                if inputs.is_floating_point():
                    inputs.requires_grad_()
                synchronize([place])
                began = time.perf_counter()
                output = module(inputs)
                if k == stages - 1:
                    output = workload.loss(output, target)
                synchronize([place])
                done = time.perf_counter()
                output.backward(torch.ones_like(output))
                synchronize([place])
                ahead.append(done - began)
                back.append(time.perf_counter() - done)
                if sum(ahead) + sum(back) > _ENOUGH:
                    break
            value = output
            forward.append(min(ahead))
            backward.append(min(back))
    return Work(forward, backward)


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
