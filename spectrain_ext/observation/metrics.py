"""Measures the stages of a pipeline while it trains, and writes records."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spectrain_ext.extras import require_tensorboard
from spectrain_ext.files import finite
from spectrain_ext.method import delay_under
from spectrain_ext.pipeline.observer import Observer
from spectrain_ext.pipeline.passes import Handler
from spectrain_ext.pipeline.pipeline import Pipeline
from spectrain_ext.pipeline.stage import Stage
from spectrain_ext.pipeline.stage_run import StageRun
from spectrain_ext.schedule import Kind, Place, Rules, flushes
from spectrain_ext.weights import rates_of

from .meter import Meter, Probe, Window

if TYPE_CHECKING:
    from spectrain_ext.pipeline.losses import Result


Record = dict[str, Any]


class Metrics(Observer):
    """Writes a record of each stage of this process every ``every`` minibatches.

    Pass it to ``Pipeline.run(batches, trace=metrics)`` and ``close`` it at the end, or use it in
    a ``with`` statement. docs/metrics.md describes the records. Training gives the same bits with
    and without it. On CUDA a record is written one window late, so that nothing waits for the
    device.

    Args:
        pipe: the pipeline to watch.
        path: a file to append JSON lines to; None: no file. Each of several processes has its own:
            ``metrics.jsonl`` becomes ``metrics-rank<k>.jsonl``.
        tensorboard: a folder for TensorBoard; None: no folder. Each of several processes writes
            into ``rank<k>`` in it.
        every: minibatches per record.
        errors_every: minibatches between two measurements of prediction errors, which keep two
            copies of a stage's weights; None: do not measure them.
        start: minibatches trained on before, from a checkpoint.
        labels: more entries for every record; TensorBoard gets no curves of them.

    Raises:
        ValueError: a number is out of range, or both path and tensorboard are None.
        ModuleNotFoundError: TensorBoard is not installed; the message names the extra.
        OSError: a file cannot be opened.

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
        tensorboard: str | os.PathLike[str] | None = None,
        every: int = 50,
        errors_every: int | None = 200,
        start: int = 0,
        labels: Mapping[str, str | int | float] | None = None,
    ) -> None:
        limits = ("every", every, 1), ("errors_every", errors_every, 1), ("start", start, 0)
        for name, value, least in limits:
            if value is not None and value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        if path is None and tensorboard is None:
            raise ValueError("path: expected a file, or a folder as tensorboard, got neither")
        self._pipe = pipe
        self._every, self._errors_every, self._start = every, errors_every, start
        self._labels = dict(labels or {})
        self._rank: int | None = getattr(pipe, "rank", None)
        self._meters: dict[int, Meter] = {}
        self._sinks: list[Sink] = []
        # TensorBoard first: if it is missing, no file is made.
        if tensorboard is not None:
            folder = Path(tensorboard)
            mine = folder if self._rank is None else folder / f"rank{self._rank}"
            self._sinks.append(TensorBoard(mine, self._labels))
        if path is not None:
            file = Path(path)
            if self._rank is not None:
                file = file.with_name(f"{file.stem}-rank{self._rank}{file.suffix}")
            self._sinks.append(JsonLines(file))

    def begin(self, rules: Sequence[Rules], devices: Sequence[torch.device]) -> None:
        for meter in self._meters.values():
            meter.begin()

    def watch(self, run: StageRun, handlers: dict[Kind, Handler]) -> dict[Kind, Handler]:
        stage = run.stage
        meter = self._meters.get(stage.index)
        if meter is None:
            late = int(stage.device.type == "cuda")
            meter = Meter(stage, self._every, self._start, lambda meter: self._write(meter, late))
            self._meters[stage.index] = meter
        probe, schedule = None, self._pipe.method.schedule
        if stage.weights is not None and self._errors_every and not flushes(schedule):
            delay = delay_under(schedule, self._place_of(stage))
            probe = Probe(stage, self._pipe._rules[stage.index], delay, self._errors_every)
        return meter.handlers(run, handlers, probe)

    def result(self, result: Result) -> None:
        for meter in self._meters.values():
            if meter.is_last:
                meter.window.losses.append(result.loss)

    def end(self) -> None:
        for meter in self._meters.values():
            meter.end()
            self._write(meter, late=0)

    def close(self) -> None:
        """Close the files."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, meter: Meter, late: int) -> None:
        while len(meter.full) > late:
            record = self._record(meter.stage, meter.full.pop(0))
            for sink in self._sinks:
                sink.write(record)

    def _place_of(self, stage: Stage) -> Place:
        return next(place for place in self._pipe.places if place.stage == stage.index)

    def _record(self, stage: Stage, window: Window) -> Record:
        seconds = max(window.ended - window.began, 1e-9)
        busy = window.busy()
        place = self._place_of(stage)
        return {
            **self._labels,
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
                "scheduled": delay_under(self._pipe.method.schedule, place),
                "mean": _mean(window.delays),
                "max": max(window.delays, default=None),
            },
            "prediction_error": window.errors and window.errors.prediction,
            "staleness_error": window.errors and window.errors.staleness,
            "lr": None if stage.weights is None else list(rates_of(stage.weights.optimizer)),
            "loss": _mean([loss.item() for loss in window.losses]),
        }


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


class JsonLines:
    """Appends a line of JSON per record, each in one call: a killed process leaves whole lines."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115  # closed by close
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # a stopped machine left part of a line
                self._file.write(b"\n")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(finite(record), allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Writes the numbers of every record as scalars ``stage<k>/<name>``, by minibatch."""

    def __init__(self, folder: Path, labels: Iterable[str] = ()) -> None:
        self._no_curves = _NO_CURVES.union(labels)
        self._writer = require_tensorboard().SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        curves = {name: value for name, value in record.items() if name not in self._no_curves}
        for name, value in _numbers(curves):
            self._writer.add_scalar(
                f"stage{record['stage']}/{name}", value, record["minibatch"], record["time"]
            )

    def close(self) -> None:
        self._writer.close()


Sink = JsonLines | TensorBoard
_NO_CURVES = frozenset(("time", "stage", "rank", "minibatch", "minibatches"))


def _numbers(record: Record) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in record.items():
        if isinstance(value, dict):
            found += [(f"{name}/{key}", part) for key, part in _numbers(value)]
        elif isinstance(value, list):
            found += [(f"{name}/{place}", part) for place, part in enumerate(value)]
        elif isinstance(value, (int, float)):
            found.append((name, value))
    return found
