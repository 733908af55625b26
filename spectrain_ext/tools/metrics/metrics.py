"""Measures the stages of a pipeline while it trains, and writes records."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from spectrain_ext.files import finite
from spectrain_ext.method import delay_under
from spectrain_ext.operators import distance
from spectrain_ext.pipeline import Handler, Observer, Pipeline, Stage, StageRun
from spectrain_ext.schedule import Kind, Rules, flushes
from spectrain_ext.weights import rates_of

from .trace import WORK, Action, Mark, marked, seconds_between

if TYPE_CHECKING:
    from spectrain_ext.pipeline import Result


Record = dict[str, Any]
#: Of the weights that a forward computed with, if predicted, and of the newest ones at that time.
Errors = tuple[float | None, float | None]


class Metrics(Observer, AbstractContextManager["Metrics"]):
    """Writes a record of each stage of this process every ``every`` minibatches.

    Pass it to ``Pipeline.run(batches, trace=metrics)`` and ``close`` it at the end, or use it in
    a ``with`` statement. docs/metrics.md describes the records. Training gives the same bits with
    and without it. On CUDA a record is written one window late, so that nothing waits for the
    device.

    Args:
        pipe: the pipeline to watch.
        path: a file to append JSON lines to; None: no file. Each of several processes has its own:
            ``metrics.jsonl`` becomes ``metrics-rank<k>.jsonl``.
        write: called with every record of this process, a dict, for example to draw curves.
        every: minibatches per record.
        errors_every: minibatches between two measurements of prediction errors, which keep two
            copies of a stage's weights; None: do not measure them.

    Raises:
        ValueError: a number is out of range, or both path and write are None.
        OSError: the file cannot be opened.

    Example:
        >>> pipe = st.Pipeline([nn.Linear(4, 4), nn.Linear(4, 2)],
        ...     lambda p: st.optim.SGD(p, lr=0.1, momentum=0.9), nn.functional.mse_loss)
        >>> batches = [(torch.ones(2, 4), torch.zeros(2, 2)) for _ in range(6)]
        >>> with st.Metrics(pipe, "metrics.jsonl", every=3) as metrics:
        ...     losses = [result.loss for result in pipe.run(batches, trace=metrics)]
        >>> len(Path("metrics.jsonl").read_text().splitlines())  # two windows of two stages
        4
    """

    def __init__(
        self,
        pipe: Pipeline,
        path: str | os.PathLike[str] | None = None,
        *,
        write: Callable[[Record], object] | None = None,
        every: int = 50,
        errors_every: int | None = 200,
    ) -> None:
        for name, value in (("every", every), ("errors_every", errors_every)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if path is None and write is None:
            raise ValueError("path: expected a file, or a function as write, got neither")
        self._pipe = pipe
        self._every, self._errors_every = every, errors_every
        self._begun_at = pipe.minibatches
        self._rank: int | None = getattr(pipe, "rank", None)
        self._meters: dict[int, Meter] = {}  # of the latest run, by stage
        self._write = write
        self._file = None if path is None else _opened(Path(path), self._rank)

    def begin(self, rules: Sequence[Rules], devices: Sequence[torch.device]) -> None:
        self._done = {k: meter.done for k, meter in self._meters.items()}
        self._meters = {}

    def watch(self, run: StageRun, handlers: dict[Kind, Handler]) -> dict[Kind, Handler]:
        stage, k = run.stage, run.stage.index
        if k not in self._meters:  # else the method has changed
            done = self._done.get(k, self._begun_at)
            self._meters[k] = Meter(run, self._every, done, self._flush)
        probe, late = None, not flushes(self._pipe.method.schedule)
        if stage.weights is not None and self._errors_every and late:
            rules, delay = stage.weights.rules, self._delay(stage)
            probe = Probe(stage, rules, delay, self._errors_every)
        return self._meters[k].handlers(run, handlers, probe)

    def result(self, result: Result) -> None:
        for meter in self._meters.values():
            if meter.is_last:
                meter.window.losses.append(result.loss)

    def end(self) -> None:
        for meter in self._meters.values():
            meter.end()
            self._flush(meter, late=0)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _flush(self, meter: Meter, late: int | None = None) -> None:
        if late is None:
            late = int(meter.stage.device.type == "cuda")
        while len(meter.full) > late:
            record = self._record(meter.stage, meter.full.pop(0))
            if self._file is not None:  # in one call: a killed process leaves whole lines
                self._file.write(json.dumps(finite(record), allow_nan=False).encode() + b"\n")
            if self._write is not None:
                self._write(record)

    def _delay(self, stage: Stage) -> int:
        place = next(place for place in self._pipe.places if place.stage == stage.index)
        return delay_under(self._pipe.method.schedule, place)

    def _record(self, stage: Stage, window: Window) -> Record:
        seconds = max(window.ended - window.began, 1e-9)
        busy = window.busy()
        return {
            "time": window.ended,
            "stage": stage.index,
            "rank": self._rank or 0,
            "minibatch": window.done,
            "minibatches": window.minibatches,
            "seconds": seconds,
            "minibatches_per_second": window.minibatches / seconds,
            "samples_per_second": window.samples / seconds,
            "bubble": max(0.0, 1 - sum(busy.values()) / seconds),
            "busy": busy,
            "bytes_sent": dict(zip(("next", "previous"), window.sent, strict=True)),
            "staleness": {
                "scheduled": self._delay(stage),
                "mean": _mean(window.delays),
                "max": max(window.delays, default=None),
            },
            "prediction_error": window.errors[0],
            "staleness_error": window.errors[1],
            "lr": None if stage.weights is None else list(rates_of(stage.weights.optimizer)),
            "loss": _mean([loss.item() for loss in window.losses]),
        }


def _opened(path: Path, rank: int | None) -> FileIO:
    """Open a process's file of JSON lines, to append to it."""
    if rank is not None:
        path = path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+b", buffering=0)  # noqa: SIM115  # closed by close
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":  # a stopped machine left part of a line
            file.write(b"\n")
    return file


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


# What is measured of a stage


class Probe:
    """Compares the weights of one forward in ``every`` with the true ones, one horizon later.

    This keeps two copies of the stage's weights until then, passes over them each time, and waits
    for the stage's prediction stream.
    """

    def __init__(self, stage: Stage, rules: Rules, delay: int, every: int) -> None:
        assert stage.weights is not None
        self._stage, self._weights = stage, stage.weights
        horizon = rules.forward_horizon
        self._predicts = horizon != 0
        # Without prediction: compare with the weights at the minibatch's own backward.
        self._ahead = delay if horizon == "counted" or not horizon else horizon
        self._every = every
        # The update that is compared with, and the weights: the newest, and those computed with.
        self._kept: tuple[int, list[list[Tensor]]] | None = None

    def forward(self, i: int, j: int, updates: int) -> None:
        """Copy the weights of a forward, issued after so many updates, if it is to be measured."""
        if j or i % self._every or self._kept is not None or not self._ahead:
            return
        with self._stage.reading():
            newest = self._weights.newest()
            copies = [[true.clone() for true in newest]]
            if self._predicts:
                pairs = zip(self._weights.params, newest, strict=True)
                copies.append([torch.empty_like(true).copy_(p) for p, true in pairs])
        self._kept = updates + self._ahead, copies

    def update(self, updates: int) -> Errors | None:
        """Return the errors if this update, the latest of so many, is the one predicted.

        They are norms of differences from the true weights, divided by the norm of these.
        """
        if self._kept is None or self._kept[0] != updates:
            return None
        (_, copies), self._kept = self._kept, None
        with self._stage.reading():
            now = self._weights.newest()
            _, norms = distance(now, copies)
            staleness, *prediction = (norms / get_total_norm(now).double()).tolist()
        return (prediction[0] if prediction else None), staleness


@dataclass
class Window:
    began: float  # seconds since the epoch
    ended: float = 0.0
    minibatches: int = 0  # updated from
    samples: int = 0  # in forwards
    done: int = 0  # minibatches so far, over all runs
    work: list[Action] = field(default_factory=list)
    delays: list[int] = field(default_factory=list)  # of backwards: updates since the forward
    errors: Errors = None, None  # the latest
    losses: list[Tensor] = field(default_factory=list)  # of minibatches, on the last stage
    sent: list[int] = field(default_factory=list)  # bytes to the next and to the previous stage

    def busy(self) -> dict[str, float]:
        """Return the seconds of each kind of work; on CUDA, wait until it is done."""
        marks: dict[str, list[tuple[Mark, Mark]]] = {}
        for _, kind, _, _, start, end in self.work:
            marks.setdefault(WORK[kind], []).append((start, end))
        return {name: seconds_between(pairs) for name, pairs in marks.items()}


class Meter:
    """Measures a stage in a run, in windows of ``every`` minibatches, after ``done`` others."""

    def __init__(
        self, run: StageRun, every: int, done: int, ended: Callable[[Meter], None]
    ) -> None:
        self.stage = run.stage
        self.is_last = bool(run.edges.targets)  # and has the losses
        self.done = done
        self.window = Window(time.time())
        self.full: list[Window] = []  # ended, not yet written
        self._every = every
        self._ended = ended
        self._records: list[Action] = []
        self._senders = set(run.edges.to_next), set(run.edges.to_previous)
        self._sent = self._sent_bytes()  # at the end of the window before
        self._updates = 0
        self._read_at: dict[tuple[int, int], int] = {}  # updates at a microbatch's forward

    def end(self) -> None:
        if self.window.minibatches:
            self._close()

    def handlers(
        self, run: StageRun, handlers: dict[Kind, Handler], probe: Probe | None
    ) -> dict[Kind, Handler]:
        timed = marked(run, handlers, self._records)

        def forward(i: int, j: int) -> None:
            self.window.samples += run.compute.samples
            self._read_at[i, j] = self._updates
            timed[Kind.FORWARD](i, j)
            if probe is not None:
                probe.forward(i, j, self._updates)

        def backward(kind: Kind, i: int, j: int) -> None:  # or its first half
            self.window.delays.append(self._updates - self._read_at.pop((i, j)))
            timed[kind](i, j)

        def update(i: int, j: int) -> None:
            timed[Kind.UPDATE](i, j)
            self._updates += 1
            self.done += 1
            self.window.minibatches += 1
            if probe is not None:
                self.window.errors = probe.update(self._updates) or self.window.errors
            if self.window.minibatches == self._every:
                self._close()
                self._ended(self)

        noted = {kind: partial(backward, kind) for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)}
        return {**timed, **noted, Kind.FORWARD: forward, Kind.UPDATE: update}

    def _close(self) -> None:
        window, before, self._sent = self.window, self._sent, self._sent_bytes()
        window.ended, window.done, window.work = time.time(), self.done, self._records[:]
        window.sent = [now - then for now, then in zip(self._sent, before, strict=True)]
        self._records.clear()
        self.full.append(window)
        self.window = Window(window.ended)

    def _sent_bytes(self) -> list[int]:
        return [sum(sender.sent_bytes for sender in senders) for senders in self._senders]
