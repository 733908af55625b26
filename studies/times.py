"""Simulates methods: how long a minibatch takes, bubbles included, and timelines on one axis."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from spectrain_ext.extras import picture
from spectrain_ext.method import Method, find_method, microbatches_of
from spectrain_ext.schedule import Kind
from spectrain_ext.tools.commands.doctor import threads
from spectrain_ext.tools.commands.options import method_of
from spectrain_ext.tools.simulation import Span, summarize
from spectrain_ext.tools.timelines import devices_under, simulate_method
from spectrain_ext.tools.timelines.timeline import (
    COMPUTED,
    TimelineRows,
    draw_legend,
    draw_rows,
    finish_axes,
)

from .looks import REFERENCE
from .pipelines import synchronize
from .settings import TrainSettings, microbatches_in, stages_of
from .workload import Maker, stages_in

# measurements per stage; the fastest counts, because other processes may use the machine
_LEAST, _TIMED = 3, 9
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
    """Measure each stage's work for a minibatch in turn, with warm caches."""
    workload = make(settings, find_method(REFERENCE), stages, 0)
    modules = stages_in(workload, stages)
    value, target = next(iter(workload.train))
    forward, backward = [], []
    with threads(settings.threads):
        for k, (module, name) in enumerate(zip(modules, devices, strict=True)):
            place = torch.device(name)
            module.to(place)
            value, target = value.detach().to(place), target.to(place)
            ahead, back = [], []
            for _ in range(_TIMED):
                inputs = value.clone().requires_grad_(value.is_floating_point())
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
                if len(ahead) >= _LEAST and sum(ahead) + sum(back) > _ENOUGH:
                    break
            value = output
            forward.append(min(ahead))
            backward.append(min(back))
    return Work(forward, backward)


def minibatch_time(method: Method, microbatches: int, work: Work) -> float:
    """Return the seconds of a minibatch in a method's schedule, with one device per stage.

    A method with several stages per device (``chunks``) has fewer devices by that factor. A
    microbatch takes its share of a minibatch's work; updates, predictions and copies take no time.
    """
    stages = len(work.forward)
    spans = simulate_method(
        method,
        stages,
        _SIMULATED + 2 * stages // microbatches,
        microbatches=microbatches,
        forward=[f / microbatches for f in work.forward],
        backward=[b / microbatches for b in work.backward],
    )
    return summarize(spans).period


def relative_times(settings: TrainSettings, make: Maker) -> dict[str, float]:
    """Return, by method, the time of a minibatch over the slowest stage's work: 1 has no bubble."""
    counted = [(m, stages_of(m, settings)) for m in map(method_of, settings.methods)]
    work = {
        n: measured_work(settings, make, n, settings.devices[:n])
        for n in {settings.stages, *(n for _, n in counted)}
    }
    slowest = work[settings.stages].slowest
    found = {}
    for method, n in counted:
        period = minibatch_time(method, microbatches_in(method, settings), work[n])
        found[method.name] = period / slowest / method.chunks
    return found


# Timelines

_ROUNDING = 1.0 + 1e-9  # tolerance for sums of durations
_TALLEST = 30.0  # inches of rows at most


def draw_methods_together(
    path: Path,
    methods: Sequence[tuple[Method, str]],
    stages: int,
    microbatches: int | Literal["auto"] = "auto",
) -> None:
    """Draw the start of the schedules of methods, each with the colour of its name, into ``path``.

    A minibatch's forward takes one unit on every stage and its backward two; a microbatch takes its
    share. Updates and predictions take no time.
    """
    until = 6.0 * max(stages, 4)  # two minibatches without any overlap
    runs = []
    for method, color in methods:
        parts = microbatches_of(method, stages) if microbatches == "auto" else microbatches
        spans = simulate_method(
            method,
            stages,
            int(until / 3.0) + 2,
            microbatches=parts,
            forward=1.0 / parts,
            backward=2.0 / parts,
        )
        drawn = [span for span in spans if span.start <= until * _ROUNDING]
        devices = devices_under(method, stages)
        name = f"{method.name}, M = {parts}" if parts > 1 else method.name
        if devices is not None:
            name += f", on {1 + max(devices)} devices"
        runs.append((name, color, drawn, TimelineRows(drawn, devices), devices))
    counts = [len(rows) for *_, rows, _ in runs]
    row = min(0.12, _TALLEST / sum(counts))
    height = 0.9 + sum(0.3 + row * count for count in counts)
    with picture(path, 12.0, height) as figure:
        title = (
            f"The same time under every method: {stages} stages, simulated without costs of "
            "updates, predictions and copies"
        )
        figure.suptitle(title, fontsize=10, parse_math=False, x=0.01, ha="left")
        panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=counts)
        for axes, (name, color, drawn, rows, _) in zip(panels[:, 0], runs, strict=True):
            draw_rows(axes, drawn, rows, (0.0, until), False, edge=0.2)
            axes.set_yticks([])
            finish_axes(axes, (0.0, until), len(rows))
            axes.tick_params(axis="x", length=3, labelbottom=axes is panels[-1, 0])
            busy = sum(max(0.0, min(s.end, until) - s.start) for s in drawn if s.kind in COMPUTED)
            count = _ended(drawn, until)
            said = f"{count} minibatch{'es' * (count != 1)} ended, "
            said += f"idle {100 * (1 - busy / (until * len(rows))):.0f} %"
            axes.set_title(
                name, fontsize=9, color=color, weight="bold", loc="left", pad=2, parse_math=False
            )
            axes.set_title(said, fontsize=8, color="#555555", loc="right", pad=2)
        what = "devices" if any(devices for *_, devices in runs) else "stages"
        unit = "time, in forwards of a minibatch"
        panels[-1, 0].set_xlabel(f"{unit}; rows are {what}, the first on top")
        draw_legend(figure, [span for _, _, drawn, *_ in runs for span in drawn], False, "idle")


def _ended(drawn: Sequence[Span], until: float) -> int:
    """Return the minibatches that all stages have updated with."""
    stages = 1 + max(span.stage for span in drawn)
    updates = Counter(
        s.stage for s in drawn if s.kind is Kind.UPDATE and s.end <= until * _ROUNDING
    )
    return min(updates[k] for k in range(stages))
