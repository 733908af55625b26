"""Trains one method with one seed and measures it."""

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from spectrain_ext import Pipeline, optim
from spectrain_ext.cli.settings import TrainSettings
from spectrain_ext.data import Split, shuffled_batches
from spectrain_ext.models import residual_mlp
from spectrain_ext.report import Run


def build_pipeline(settings: TrainSettings, method: str, seed: int, data: Split) -> Pipeline:
    """Return the pipeline of ``method`` with the initial weights that ``seed`` gives.

    Raises:
        ValueError: ``method`` cannot work with these settings (a prediction needs momentum).
    """
    stages = residual_mlp(
        settings.stages,
        features=data.features,
        width=settings.width,
        classes=data.classes,
        seed=seed,
    )
    return Pipeline(
        stages,
        optimizer=lambda parameters: _optimizer(settings, parameters),
        loss_fn=nn.functional.cross_entropy,
        method=method,
        devices=list(settings.devices),
        microbatches=settings.microbatches,
    )


def train_once(
    settings: TrainSettings, method: str, seed: int, data: Split, advance: Callable[[], None]
) -> Run:
    """Train ``method`` from the weights and in the batch order that ``seed`` gives, then test it.

    Weights and order depend on ``seed`` and ``settings`` alone, so methods can be compared.
    ``advance`` is called once per minibatch.

    Raises:
        StageError: training failed inside a stage.
    """
    torch.manual_seed(seed)
    pipe = build_pipeline(settings, method, seed, data)
    pipe.train()
    batches = shuffled_batches(
        data.train_inputs,
        data.train_targets,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        seed=seed,
    )
    losses: list[Tensor] = []
    _synchronize(settings.devices)
    start = time.perf_counter()
    for result in pipe.run(batches):
        losses.append(result.loss)
        advance()
    _synchronize(settings.devices)
    seconds = time.perf_counter() - start
    accuracy, loss = _evaluate(pipe, data, settings.devices[0])
    run = Run(
        method=method,
        seed=seed,
        test_accuracy=accuracy,
        test_loss=loss,
        minibatches_per_second=len(losses) / seconds,
        weight_version_bytes=pipe.weight_version_bytes,
        losses=tuple(torch.stack(losses).tolist()),
    )
    pipe.release()
    return run


def _optimizer(settings: TrainSettings, parameters: Iterable[nn.Parameter]) -> optim.SGD:
    return optim.SGD(
        parameters,
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.nesterov,
    )


def _evaluate(pipe: Pipeline, data: Split, first_device: str) -> tuple[float, float]:
    pipe.eval()
    with torch.no_grad():
        outputs = pipe(data.test_inputs.to(first_device)).cpu()
    loss = nn.functional.cross_entropy(outputs, data.test_targets).item()
    correct = (outputs.argmax(dim=1) == data.test_targets).sum().item()
    return correct / len(data.test_targets), loss


def _synchronize(devices: Iterable[str]) -> None:
    """Wait for CUDA devices, so that the clock sees work and not its launch."""
    for device in set(devices):
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
