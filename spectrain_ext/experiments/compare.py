"""Trains one method with one seed and measures it."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from spectrain_ext.method import find_method

from .data.batches import count_batches, training_batches
from .data.split import Split
from .observation import Observation
from .results import Run
from .resuming import Keeper
from .selection import build_pipeline, stages_of
from .settings import TrainSettings
from .workload import build_stages, make_scheduler, mean_loss, synchronize
from .world import World

_TEST_BATCH = 256


def count_updates(settings: TrainSettings, data: Split) -> int:
    """Minibatches of one run."""
    return count_batches(len(data.train_inputs), settings.batch_size, settings.epochs)


def train_once(
    settings: TrainSettings,
    name: str,
    seed: int,
    data: Split,
    advance: Callable[[int], None],
    world: World,
    observation: Observation,
    checkpoints: Path,
) -> Run | None:
    """Train method ``name`` from the weights and in the batch order of ``seed``, then test it.

    Weights and order depend on ``seed`` and ``settings`` alone, so methods can be compared. Where
    there are several processes each trains its stage.

    Args:
        settings: of the comparison.
        name: of the method.
        seed: of weights and order.
        data: to train on, and to test with.
        advance: told how many minibatches have been done since it was last called.
        world: the processes that have a part in it.
        observation: who looks on.
        checkpoints: the folder of this run's checkpoints, if the settings ask for any.

    Returns:
        The run on rank 0, None on others.

    Raises:
        StageError: training failed inside a stage.
        RankError: another rank failed.
        CheckpointError: a checkpoint could not be read or written.
    """
    torch.manual_seed(seed)
    method = find_method(name)
    count = stages_of(method, settings)
    stages = build_stages(settings, count, seed, data)
    total = count_updates(settings, data)
    pipe = build_pipeline(
        settings,
        method,
        stages,
        devices=[world.device(name) for name in settings.devices[:count]],
        scheduler=make_scheduler(settings, total),
        stage=world.stage if world.together else None,
    )
    pipe.train()
    keeper = None
    done, losses, seconds = 0, list[float](), 0.0
    if settings.keeps_checkpoints:
        every, interval = settings.checkpoint_every, settings.checkpoint_seconds
        keeper = Keeper(checkpoints, pipe, world, every, interval)
        keeper.restore()
        done, losses, seconds = keeper.minibatches, keeper.losses, keeper.seconds
        advance(done)
    # between the first and the last stage nobody looks at them
    has_loss = world.stage == world.seats.stages - 1
    feeds = has_loss or world.stage == 0
    with observation.of(pipe, name, seed, start=done) as metrics:
        while done < total:
            batches: Iterator[object] = training_batches(
                data,
                batch_size=settings.batch_size,
                epochs=settings.epochs,
                seed=seed,
                augmented=settings.augment,
                begin=done,
            )
            if keeper is not None:
                batches = keeper.segment(batches)
            fresh: list[Tensor] = []
            synchronize(pipe.devices)
            began = time.perf_counter()
            for result in pipe.run(batches if feeds else (), trace=metrics):
                done += 1
                if has_loss:
                    fresh.append(result.loss)
                advance(1)
                world.tell_others("training with", name, "after minibatch", done)
            synchronize(pipe.devices)
            seconds += time.perf_counter() - began
            losses += world.from_last(torch.stack(fresh).tolist() if has_loss else [])
            if keeper is not None and done < total:
                keeper.save(done, losses, seconds)
    version_bytes = world.sum(pipe.weight_version_bytes)
    pipe.release()
    world.collect(stages)
    with world.alone("testing") as told:
        if not world.first:
            return None
        device = pipe.devices[0]
        model = nn.Sequential(*stages).to(device) if world.together else pipe
        accuracy, loss = _test(model, data, device, told)
    return Run(
        method=name,
        seed=seed,
        test_accuracy=accuracy,
        test_loss=loss,
        minibatches_per_second=total / seconds,
        weight_version_bytes=version_bytes,
        losses=tuple(losses),
    )


def _test(
    model: nn.Module, data: Split, device: torch.device, told: Callable[..., None]
) -> tuple[float, float]:
    """Accuracy and mean loss over all targets of the test part."""
    model.eval()
    loss, correct, done = 0.0, 0, 0
    with torch.no_grad():
        for inputs, targets in zip(
            data.test_inputs.split(_TEST_BATCH), data.test_targets.split(_TEST_BATCH), strict=True
        ):
            told("testing after", done, "of", len(data.test_inputs), "samples")
            done += len(inputs)
            outputs = model(data.prepare(inputs).to(device)).cpu()
            loss += mean_loss(outputs, targets).item() * targets.numel()
            correct += int((outputs.argmax(dim=-1) == targets).sum())
    targets_in_all = data.test_targets.numel()
    return correct / targets_in_all, loss / targets_in_all
