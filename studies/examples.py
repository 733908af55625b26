"""Provides the presets' models at their own sizes as blocks with an example batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from .builtin import build_stages
from .settings import DATA_SETS, DEFAULT_MODEL, models_for, settle

_CLASSES = {"digits": 10, "cifar10": 10, "text": 65}  # text: the characters of tiny Shakespeare
_SAMPLE: dict[str, tuple[int, ...]] = {"digits": (64,), "cifar10": (3, 32, 32)}
# other models: the depth plus two
_LAYERS = {"vgg16": 16, "resnet": 10, "inception-v4": 21, "snn": 8}
_DEPTH = 6
_SAMPLES = 16  # size of the measured microbatch


def blocks_and_batch(model: str, samples: int) -> tuple[list[nn.Module], Tensor]:
    """Return a model of ``settings.MODELS`` with one block per layer, and a batch for it."""
    data = next(
        (data for data, usual in DEFAULT_MODEL.items() if usual == model),
        next(data for data in DATA_SETS if model in models_for(data)),
    )
    folder = None if data == "digits" else Path()  # not read
    settings = settle({"data": data, "model": model, "data_dir": folder})
    sample = _SAMPLE.get(data, (settings.context,))
    layers = _LAYERS.get(model, (settings.depth or _DEPTH) + 2)
    blocks = build_stages(settings, layers, 0, math.prod(sample), _CLASSES[data])
    if data == "text":
        return blocks, torch.randint(_CLASSES[data], (samples, *sample))
    return blocks, torch.randn(samples, *sample)


def _example(model: str) -> Callable[[], tuple[list[nn.Module], Tensor]]:
    return partial(blocks_and_batch, model, _SAMPLES)


vgg16, resnet, inception_v4 = map(_example, ("vgg16", "resnet", "inception-v4"))
residual_mlp, gpt, lstm = map(_example, ("residual-mlp", "gpt", "lstm"))
snn, speedrun = map(_example, ("snn", "speedrun"))
