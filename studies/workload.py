"""What a comparison trains: data, model, loss, optimizer and pipeline, from its settings."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from spectrain_ext import optim
from spectrain_ext.cli.imported import method_of, own_failures
from spectrain_ext.distributed import DistributedPipeline
from spectrain_ext.method import Method, check, in_words, places_of
from spectrain_ext.optim import PredictingOptimizer
from spectrain_ext.pipeline.pipeline import Pipeline
from spectrain_ext.schedule import Replicas

from .data.cifar import load_cifar10
from .data.digits import load_digits
from .data.split import Split
from .data.text import load_text
from .models import gpt, inception_v4, residual_lstm, residual_mlp, resnet, snn, vgg
from .models.building import cut_evenly
from .settings import AUTO, TrainSettings, microbatches_in, stages_of, window_of

_TEST_BATCH = 256


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
    depth = settings.depth
    if settings.model == "residual-mlp" and depth is None:
        # a block for every stage beyond eight, in every method's model
        depth = max(6, settings.stages - 2)
    return build_model(
        settings.model,
        stages,
        width=settings.width,
        depth=depth,
        context=settings.context,
        features=data.features,
        classes=data.classes,
        images=data.kind == "images",
        seed=seed,
    )


def build_model(
    model: str,
    stages: int,
    *,
    width: int,
    depth: int | None,
    context: int,
    features: int,
    classes: int,
    images: bool,
    seed: int = 0,
) -> list[nn.Module]:
    """Return one of ``presets.MODELS``, cut into ``stages``.

    Args:
        model: its name.
        stages: parts.
        width: the model's own measure of it.
        depth: likewise; None: the usual one.
        context: tokens of a sample of text.
        features: numbers of any other sample.
        classes: of the targets, which are a text's characters.
        images: whether samples are images, which a residual MLP has to flatten.
        seed: decides the initial weights.

    Raises:
        ValueError: as ``build_stages``.
    """
    if model == "residual-mlp":
        blocks = 6 if depth is None else depth
        layers = residual_mlp(
            blocks + 2, features=features, width=width, depth=blocks, classes=classes, seed=seed
        )
        if images:
            layers[0] = nn.Sequential(nn.Flatten(), layers[0])
        return cut_evenly(layers, stages)
    if model == "vgg16":
        return vgg(stages, depth=depth or 16, width=width, classes=classes, pool=1, seed=seed)
    if model == "resnet":
        return resnet(
            stages, depth=depth or 18, width=width, classes=classes, small_images=True, seed=seed
        )
    if model == "inception-v4":
        return inception_v4(stages, width=width, classes=classes, seed=seed)
    if model == "snn":
        return snn(
            stages, features=features, width=width, depth=depth or 7, classes=classes, seed=seed
        )
    if model == "lstm":
        return residual_lstm(stages, vocabulary=classes, width=width, depth=depth or 6, seed=seed)
    return gpt(
        stages, vocabulary=classes, context=context, width=width, depth=depth or 6, seed=seed
    )


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats per target: ``(..., classes)`` against int64 ``(...)``."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def tested(
    model: nn.Module,
    data: Split,
    device: torch.device | str = "cpu",
    told: Callable[..., None] = lambda *words: None,
) -> tuple[float, float]:
    """Accuracy and mean loss over all targets of the test part; leaves the model in evaluation.

    ``told`` hears from time to time how far it is.
    """
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
    betas = settings.betas
    if settings.optimizer == "adam":
        return optim.Adam(parameters, lr=lr, betas=betas, weight_decay=decay)
    if settings.optimizer == "adamw":
        return optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=decay)
    return optim.NAdam(
        parameters, lr=lr, betas=betas, weight_decay=decay, decoupled_weight_decay=True
    )


def make_scheduler(
    settings: TrainSettings, updates: int
) -> Callable[[PredictingOptimizer], LambdaLR] | None:
    """Return what makes a stage's learning-rate scheduler; None: the rate is constant.

    The rate rises linearly over ``warmup`` updates, then stays or falls as half a cosine to 0 at
    the end of all ``updates``.
    """
    if settings.lr_schedule == "constant" and not settings.warmup:
        return None
    factor = factor_of(settings, updates)
    return lambda optimizer: LambdaLR(optimizer, factor)


def factor_of(settings: TrainSettings, updates: int) -> Callable[[int], float]:
    """What the learning rate is multiplied by at each of so many updates."""

    def factor(update: int) -> float:
        if update < settings.warmup:
            return (update + 1) / (settings.warmup + 1)
        if settings.lr_schedule == "constant":
            return 1.0
        done = (update - settings.warmup) / max(1, updates - settings.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for CUDA devices, so that the clock sees work and not its launch."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def build_pipeline(
    settings: TrainSettings,
    method: Method,
    modules: list[nn.Module],
    *,
    devices: Sequence[str] | None = None,
    scheduler: Callable[[PredictingOptimizer], LambdaLR] | None = None,
    stage: int | None = None,
) -> Pipeline:
    """Return the pipeline of a method, with everything that the settings say of it.

    Args:
        modules: all stages.
        devices: one per stage; None: where the stages are.
        stage: the one that is this process's; None: it has all of them.

    Raises:
        ValueError: the method does not work with the settings.
    """
    more: dict[str, Any] = {
        "scheduler": scheduler,
        "microbatches": microbatches_in(method, settings),
        "window": window_of(method, settings),
        "clip_norm": settings.clip_norm,
        "clip_scope": "stage",  # under every method, so that they differ in nothing else
        "recompute": settings.recompute,
    }

    def optimizer(parameters: list[nn.Parameter]) -> PredictingOptimizer:
        return make_optimizer(settings, method, parameters)

    if stage is None:
        return Pipeline(modules, optimizer, mean_loss, method, devices, **more)
    device = None if devices is None else devices[stage]
    return DistributedPipeline(
        modules[stage],
        optimizer,
        mean_loss,
        method,
        replicas=settings.replicas,
        device=device,
        **more,
    )


def fitting(settings: TrainSettings, *, leave_out: bool) -> tuple[TrainSettings, dict[str, str]]:
    """Return the settings with the methods that work with them, and why others do not.

    Raises:
        ValueError: a method does not work and is not to be left out; or none is left.
    """
    reasons = {name: _why_not(name, settings) for name in settings.methods}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    for name, reason in left_out.items():
        if not leave_out or len(left_out) == len(reasons):
            raise ValueError(f"method {name}: {reason}")
    kept = tuple(name for name in settings.methods if name not in left_out)
    return dataclasses.replace(settings, methods=kept), left_out


def choice(settings: TrainSettings) -> str:
    """What the method ``auto`` does with these settings, in a line."""
    method = method_of(AUTO)
    parts = microbatches_in(method, settings)
    replicas = None if settings.replicas is None else Replicas(settings.replicas)
    places = places_of(method, settings.stages, parts, settings.window, replicas)
    optimizer = make_optimizer(settings, method, [nn.Parameter(torch.zeros(1))])
    return in_words(method, places, optimizer)


def _why_not(name: str, settings: TrainSettings) -> str | None:
    """What keeps a method from working with these settings, None if nothing does."""
    method = method_of(name)
    count = stages_of(method, settings)
    try:
        with own_failures(name):
            check(
                method,
                count,
                microbatches=microbatches_in(method, settings),
                window=window_of(method, settings),
                replicas=settings.replicas if count == settings.stages else None,
                optimizer=make_optimizer(settings, method, [nn.Parameter(torch.zeros(1))]),
            )
    except ValueError as error:
        return str(error)
    return None
