"""Data, model, loss and optimizer of ``spectrain train``, from its settings."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from spectrain_ext import optim
from spectrain_ext.method import Method
from spectrain_ext.optim import PredictingOptimizer

from .data.cifar import load_cifar10
from .data.digits import load_digits
from .data.split import Split
from .data.text import load_text
from .models import gpt, residual_lstm, residual_mlp, resnet, vgg
from .models.building import cut_evenly
from .settings import TrainSettings


def load_data(settings: TrainSettings, cache: Path) -> Split:
    """Read the data set; decoded images are kept below ``cache``.

    Raises:
        FileNotFoundError, ValueError: a file is missing or not what it should be.
        ModuleNotFoundError: an extra is missing; the message names it.
    """
    if settings.data == "digits":
        data = load_digits()
    else:
        assert settings.data_dir is not None
        if settings.data == "text":
            data = load_text(settings.data_dir, context=settings.context)
        else:
            data = load_cifar10(settings.data_dir, cache=cache)
    return data.first(settings.train_samples, settings.test_samples)


def build_stages(settings: TrainSettings, stages: int, seed: int, data: Split) -> list[nn.Module]:
    """Return the model, cut into ``stages``; its weights do not depend on how it is cut.

    Raises:
        ValueError: a depth or width that the model cannot have, or more stages than layers.
    """
    width, depth = settings.width, settings.depth
    if settings.model == "residual-mlp":
        # a block for every stage beyond eight, in every method's model
        blocks = max(6, settings.stages - 2) if depth is None else depth
        layers = residual_mlp(
            blocks + 2,
            features=data.features,
            width=width,
            depth=blocks,
            classes=data.classes,
            seed=seed,
        )
        if data.kind == "images":
            layers[0] = nn.Sequential(nn.Flatten(), layers[0])
        return cut_evenly(layers, stages)
    if settings.model == "vgg16":
        return vgg(stages, depth=depth or 16, width=width, classes=data.classes, pool=1, seed=seed)
    if settings.model == "resnet":
        return resnet(
            stages,
            depth=depth or 18,
            width=width,
            classes=data.classes,
            small_images=True,
            seed=seed,
        )
    if settings.model == "lstm":
        return residual_lstm(
            stages, vocabulary=data.classes, width=width, depth=depth or 6, seed=seed
        )
    return gpt(
        stages,
        vocabulary=data.classes,
        context=settings.context,
        width=width,
        depth=depth or 6,
        seed=seed,
    )


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats per target: ``(..., classes)`` against int64 ``(...)``."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def make_optimizer(
    settings: TrainSettings, method: Method, parameters: Iterable[nn.Parameter]
) -> PredictingOptimizer:
    """Return the optimizer that the settings name.

    A method whose momentum is an average gets an average, and a learning rate larger by
    ``1 / (1 - momentum)``, with which an average makes the updates that a sum makes.
    """
    lr, decay = settings.lr, settings.weight_decay
    if settings.optimizer == "sgd":
        ema = method.direction == "ema" and settings.momentum < 1
        return optim.SGD(
            parameters,
            lr=lr / (1 - settings.momentum) if ema else lr,
            momentum=settings.momentum,
            weight_decay=decay,
            nesterov=settings.nesterov,
            ema=ema,
        )
    if settings.optimizer == "adam":
        return optim.Adam(parameters, lr=lr, weight_decay=decay)
    if settings.optimizer == "adamw":
        return optim.AdamW(parameters, lr=lr, weight_decay=decay)
    return optim.NAdam(parameters, lr=lr, weight_decay=decay)


def make_scheduler(
    settings: TrainSettings, updates: int
) -> Callable[[PredictingOptimizer], LambdaLR] | None:
    """Return what makes a stage's learning-rate scheduler; None: the rate is constant.

    The rate rises linearly over ``warmup`` updates, then stays or falls as half a cosine to 0 at
    the end of all ``updates``.
    """
    if settings.lr_schedule == "constant" and not settings.warmup:
        return None

    def factor(update: int) -> float:
        if update < settings.warmup:
            return (update + 1) / (settings.warmup + 1)
        if settings.lr_schedule == "constant":
            return 1.0
        done = (update - settings.warmup) / max(1, updates - settings.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return lambda optimizer: LambdaLR(optimizer, factor)


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for CUDA devices, so that the clock sees work and not its launch."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
