"""Trains one method with one seed and measures it."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from spectrain_ext.cli.selection import build_pipeline, stages_of
from spectrain_ext.cli.settings import TrainSettings
from spectrain_ext.cli.workload import (
    build_stages,
    make_scheduler,
    mean_loss,
    synchronize,
)
from spectrain_ext.cli.world import World
from spectrain_ext.data import Split, count_batches, training_batches
from spectrain_ext.method import find_method
from spectrain_ext.report import Run

_TEST_BATCH = 256


def count_updates(settings: TrainSettings, data: Split) -> int:
    """Minibatches of one run."""
    return count_batches(len(data.train_inputs), settings.batch_size, settings.epochs)


def train_once(
    settings: TrainSettings,
    name: str,
    seed: int,
    data: Split,
    advance: Callable[[], None],
    world: World,
) -> Run | None:
    """Train method ``name`` from the weights and in the batch order of ``seed``, then test it.

    Weights and order depend on ``seed`` and ``settings`` alone, so methods can be compared.
    ``advance`` is called once per minibatch. Where there are several processes each trains its
    stage; a method that has fewer stages than there are processes is trained by rank 0 alone.

    Returns:
        The run on rank 0, None on others.

    Raises:
        StageError: training failed inside a stage.
        RankError: another rank failed.
    """
    torch.manual_seed(seed)
    method = find_method(name)
    count = stages_of(method, settings)
    if count != settings.stages:
        if not world.first:
            return None
        world = World()
    stages = build_stages(settings, count, seed, data)
    pipe = build_pipeline(
        settings,
        method,
        stages,
        devices=[world.device(name) for name in settings.devices[:count]],
        scheduler=make_scheduler(settings, count_updates(settings, data)),
        rank=world.rank if world.together else None,
    )
    pipe.train()
    batches = training_batches(
        data,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        seed=seed,
        augmented=settings.augment,
    )
    # between the first and the last stage nobody looks at them
    feeds = world.rank in (0, world.size - 1)
    has_loss = world.rank == world.size - 1
    minibatches = 0
    losses: list[Tensor] = []
    synchronize(pipe.devices)
    start = time.perf_counter()
    for result in pipe.run(batches if feeds else ()):
        minibatches += 1
        if has_loss:
            losses.append(result.loss)
        advance()
    synchronize(pipe.devices)
    seconds = time.perf_counter() - start
    version_bytes = world.sum(pipe.weight_version_bytes)
    numbers = world.from_last(torch.stack(losses).tolist() if has_loss else [])
    pipe.release()
    world.collect(stages)
    if not world.first:
        return None
    device = pipe.devices[0]
    model = nn.Sequential(*stages).to(device) if world.together else pipe
    accuracy, loss = _test(model, data, device)
    return Run(
        method=name,
        seed=seed,
        test_accuracy=accuracy,
        test_loss=loss,
        minibatches_per_second=minibatches / seconds,
        weight_version_bytes=version_bytes,
        losses=tuple(numbers),
    )


def _test(model: nn.Module, data: Split, device: torch.device) -> tuple[float, float]:
    """Accuracy and mean loss over all targets of the test part."""
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for inputs, targets in zip(
            data.test_inputs.split(_TEST_BATCH), data.test_targets.split(_TEST_BATCH), strict=True
        ):
            outputs = model(data.prepare(inputs).to(device)).cpu()
            loss += mean_loss(outputs, targets).item() * targets.numel()
            correct += int((outputs.argmax(dim=-1) == targets).sum())
    targets_in_all = data.test_targets.numel()
    return correct / targets_in_all, loss / targets_in_all
