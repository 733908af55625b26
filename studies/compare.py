"""Trains every method with every seed; interrupted comparisons continue."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from spectrain_ext.tools.commands.doctor import threads
from spectrain_ext.tools.commands.options import method_of

from .pipelines import build_pipeline, synchronize
from .progress import Progress
from .report import Comparison, describe, versions
from .results import Run, RunFile
from .settings import TrainSettings, stages_of
from .workload import Batch, epochs_of, source_of_method, stages_in, tested


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
                if run is None:
                    run = train_once(settings, name, seed, asked, progress)
                    file.write(run)
                else:
                    found += 1
                    progress.skip(per_run)
                runs.append(run)
    if found:
        asked.console.print(
            f"{found} of {len(runs)} runs were finished before and read from {asked.folder}"
        )
    return runs


def train_once(
    settings: TrainSettings, name: str, seed: int, asked: Comparison, progress: Progress
) -> Run:
    """Train a method with the weights and batch order of ``seed``, then test it."""
    torch.manual_seed(seed)
    method = method_of(name)
    count = stages_of(method, settings)
    workload = asked.make(settings, method, count, seed)
    stages = stages_in(workload, count)
    pipe = build_pipeline(settings, method, workload, stages, devices=settings.devices[:count])
    pipe.train()
    began = 0.0

    def timed() -> Iterator[Batch]:
        """Yield all batches, and start the clock at the first one."""
        nonlocal began
        for batch in epochs_of(workload.train, settings.epochs):
            began = began or time.perf_counter()
            yield batch

    losses: list[Tensor] = []
    for result in pipe.run(timed()):
        losses.append(result.loss)
        progress.advance(result.loss)
    synchronize(pipe.devices)
    seconds = time.perf_counter() - began
    version_bytes = pipe.weight_version_bytes
    pipe.release()
    accuracy, loss = tested(pipe, workload.test, workload.loss, pipe.devices[0])
    return Run(
        method=method.name,
        seed=seed,
        test_accuracy=accuracy,
        test_loss=loss,
        minibatches_per_second=len(losses) / seconds,
        weight_version_bytes=version_bytes,
        losses=tuple(torch.stack(losses).tolist()),
    )
