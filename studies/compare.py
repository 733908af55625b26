"""Trains every method with every seed; interrupted comparisons continue."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from spectrain_ext.cli.doctor import threads
from spectrain_ext.cli.options import method_of
from spectrain_ext.errors import CheckpointError
from spectrain_ext.observation.metrics import Metrics
from spectrain_ext.pipeline.losses import Result
from spectrain_ext.pipeline.pipeline import Pipeline

from .pipelines import build_pipeline, synchronize
from .progress import Progress
from .report import Comparison, describe, versions
from .results import Run, RunFile, as_json
from .settings import TrainSettings, stages_of
from .workload import epochs_of, source_of_method, stages_in, tested

if TYPE_CHECKING:
    from spectrain_ext.checkpoint import CheckpointManager

_logger = logging.getLogger(__name__)
T = TypeVar("T")
# Minibatches between measurements of prediction errors, counted from each checkpoint.
_ERRORS_EVERY = 10
_KEPT = 2  # checkpoints: the newest, and another in case it is damaged


def train_all(asked: Comparison) -> list[Run]:
    """Train every method with every seed; read finished runs and save new ones."""
    settings = asked.settings
    about = {**describe(settings, asked.first), **versions()}
    # before training: the files may change
    abouts = {name: {**about, **source_of_method(name)} for name in settings.methods}
    per_run = settings.epochs * len(asked.first.train)
    count = len(settings.seeds) * len(settings.methods)
    runs = []
    found = 0
    with threads(settings.threads), Progress(asked.console, per_run, count) as progress:
        # seeds in the outer loop, so that all methods advance together
        for number, seed in enumerate(settings.seeds, start=1):
            for name, mine in abouts.items():
                method = method_of(name)
                progress.begin(method.name, f"{number}/{len(settings.seeds)}")
                file = RunFile(asked.folder / "runs", f"{method.name}-seed{seed}", mine, Run)
                run = file.read()
                folder = asked.folder / "checkpoints" / file.path.stem
                if run is None:
                    run = train_once(settings, name, seed, asked, progress, folder)
                    file.write(run)
                else:
                    found += 1
                    progress.skip(per_run)
                shutil.rmtree(folder, ignore_errors=True)
                runs.append(run)
    if found:
        asked.console.print(
            f"{found} of {len(runs)} runs were finished before and read from {asked.folder}"
        )
    return runs


def train_once(
    settings: TrainSettings,
    name: str,
    seed: int,
    asked: Comparison,
    progress: Progress,
    folder: Path,
) -> Run:
    """Train a method with the weights and batch order of ``seed``, then test it."""
    torch.manual_seed(seed)
    method = method_of(name)
    count = stages_of(method, settings)
    workload = asked.make(settings, method, count, seed)
    stages = stages_in(workload, count)
    pipe = build_pipeline(settings, method, workload, stages, devices=settings.devices[:count])
    pipe.train()
    log = _Log(pipe)
    run: Callable[..., Iterator[Result]] = pipe.run
    if settings.checkpoint_every is not None:
        # importing it takes as long as importing torch
        from spectrain_ext.checkpoint import CheckpointManager

        manager = CheckpointManager(
            folder, pipe, every_minibatches=settings.checkpoint_every, keep=_KEPT
        )
        log.restore(manager)
        run = partial(manager.run, extra=log.so_far)
    progress.skip(log.minibatches)
    batches = epochs_of(workload.train, settings.epochs, log.minibatches)
    with _observer(asked, pipe, method.name, seed, log.minibatches) as metrics:
        for result in run(log.timed(batches), trace=metrics):
            log.add(result)
            progress.advance(result.loss)
        log.so_far()
    version_bytes = pipe.weight_version_bytes
    pipe.release()
    accuracy, loss = tested(pipe, workload.test, workload.loss, pipe.devices[0])
    return Run(
        method=method.name,
        seed=seed,
        test_accuracy=accuracy,
        test_loss=loss,
        minibatches_per_second=settings.epochs * len(workload.train) / log.seconds,
        weight_version_bytes=version_bytes,
        losses=tuple(log.losses),
    )


def _observer(
    asked: Comparison, pipe: Pipeline, method: str, seed: int, start: int
) -> AbstractContextManager[Metrics | None]:
    """Provide an observer of a run after ``start`` minibatches, or None without metrics."""
    if asked.metrics is None and asked.tensorboard is None:
        return nullcontext()
    return Metrics(
        pipe,
        asked.metrics,
        tensorboard=asked.tensorboard and asked.tensorboard / f"{method}-seed{seed}",
        errors_every=_ERRORS_EVERY,
        start=start,
        labels={"method": method, "seed": seed},
    )


class _Log:
    """Progress of a run, which is also saved in its checkpoints."""

    def __init__(self, pipe: Pipeline) -> None:
        self.minibatches = 0
        self.losses: list[float] = []  # up to the last checkpoint
        self.seconds = 0.0  # training time without checkpoints
        self._devices = pipe.devices
        self._fresh: list[Tensor] = []
        self._began: float | None = None

    def restore(self, manager: CheckpointManager) -> None:
        loaded = manager.restore()
        if loaded is None:
            return
        try:
            self.losses = [float(loss) for loss in loaded.extra["losses"]]
            self.seconds = float(loaded.extra["seconds"])
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"{manager.directory}: was not saved by this command: {error!r}"
            ) from error
        self.minibatches = loaded.minibatches
        _logger.info("resuming from minibatch %d", self.minibatches)

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches, and start the clock at the first one."""
        for batch in batches:
            if self._began is None:
                self._began = time.perf_counter()
            yield batch

    def add(self, result: Result) -> None:
        self.minibatches += 1
        self._fresh.append(result.loss)

    def so_far(self) -> dict[str, Any]:
        """Stop the clock, read the losses, and return the checkpoint state."""
        synchronize(self._devices)
        if self._began is not None:
            self.seconds += time.perf_counter() - self._began
            self._began = None
        self.losses += torch.stack(self._fresh).tolist() if self._fresh else []
        self._fresh.clear()
        return {"losses": [as_json(loss) for loss in self.losses], "seconds": self.seconds}
