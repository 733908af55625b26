"""Trains one method with one seed and measures it."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from spectrain_ext import Pipeline
from spectrain_ext.cli.selection import build_pipeline, stages_of
from spectrain_ext.cli.settings import TrainSettings
from spectrain_ext.cli.workload import (
    build_stages,
    make_scheduler,
    mean_loss,
    synchronize,
)
from spectrain_ext.data import Split, count_batches, training_batches
from spectrain_ext.method import find_method
from spectrain_ext.report import Run

_TEST_BATCH = 256


def count_updates(settings: TrainSettings, data: Split) -> int:
    """Minibatches of one run."""
    return count_batches(len(data.train_inputs), settings.batch_size, settings.epochs)


def train_once(
    settings: TrainSettings, name: str, seed: int, data: Split, advance: Callable[[], None]
) -> Run:
    """Train method ``name`` from the weights and in the batch order of ``seed``, then test it.

    Weights and order depend on ``seed`` and ``settings`` alone, so methods can be compared.
    ``advance`` is called once per minibatch.

    Raises:
        StageError: training failed inside a stage.
    """
    torch.manual_seed(seed)
    method = find_method(name)
    stages = stages_of(method, settings)
    pipe = build_pipeline(
        settings,
        method,
        build_stages(settings, stages, seed, data),
        devices=settings.devices[:stages],
        scheduler=make_scheduler(settings, count_updates(settings, data)),
    )
    pipe.train()
    batches = training_batches(
        data,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        seed=seed,
        augmented=settings.augment,
    )
    losses: list[Tensor] = []
    synchronize(settings.devices)
    start = time.perf_counter()
    for result in pipe.run(batches):
        losses.append(result.loss)
        advance()
    synchronize(settings.devices)
    seconds = time.perf_counter() - start
    accuracy, loss = _test(pipe, data, settings.devices[0])
    run = Run(
        method=name,
        seed=seed,
        test_accuracy=accuracy,
        test_loss=loss,
        minibatches_per_second=len(losses) / seconds,
        weight_version_bytes=pipe.weight_version_bytes,
        losses=tuple(torch.stack(losses).tolist()),
    )
    pipe.release()
    return run


def _test(pipe: Pipeline, data: Split, first_device: str) -> tuple[float, float]:
    """Accuracy and mean loss over all targets of the test part."""
    pipe.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for inputs, targets in zip(
            data.test_inputs.split(_TEST_BATCH), data.test_targets.split(_TEST_BATCH), strict=True
        ):
            outputs = pipe(data.prepare(inputs).to(first_device)).cpu()
            loss += mean_loss(outputs, targets).item() * targets.numel()
            correct += int((outputs.argmax(dim=-1) == targets).sum())
    targets_in_all = data.test_targets.numel()
    return correct / targets_in_all, loss / targets_in_all
