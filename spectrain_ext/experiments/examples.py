"""Examples: the models of the presets, at their own sizes, as blocks with a batch of each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .models import gpt, inception_v4, residual_lstm, residual_mlp, resnet, snn, vgg
from .presets import DATA_SETS, DEFAULT_MODEL, models_for, preset

_CLASSES, _CHARACTERS = 10, 65  # of CIFAR-10, and of tiny Shakespeare


def blocks_and_batch(model: str, samples: int) -> tuple[list[nn.Module], Tensor]:
    """A model of ``presets.MODELS``, a block for every layer, and a batch that it takes.

    A model of several data sets has the sizes of the one that it is the default of.
    """
    data = next(
        (data for data, usual in DEFAULT_MODEL.items() if usual == model),
        next(data for data in DATA_SETS if model in models_for(data)),
    )
    sizes = preset(data, model, quick=False)
    width, depth, context = sizes.width, sizes.depth or 6, sizes.context
    if model == "residual-mlp":
        return residual_mlp(depth + 2, width=width, depth=depth), torch.randn(samples, 64)
    if model == "vgg16":
        return vgg(16, width=width, classes=_CLASSES, pool=1), torch.randn(samples, 3, 32, 32)
    if model == "resnet":
        blocks = resnet(10, width=width, classes=_CLASSES, small_images=True)
        return blocks, torch.randn(samples, 3, 32, 32)
    if model == "inception-v4":
        return inception_v4(21, width=width, classes=_CLASSES), torch.randn(samples, 3, 32, 32)
    if model == "snn":
        hidden = sizes.depth or 7
        blocks = snn(hidden + 1, features=3072, width=width, depth=hidden, classes=_CLASSES)
        return blocks, torch.randn(samples, 3, 32, 32)
    tokens = torch.randint(_CHARACTERS, (samples, context))
    if model == "lstm":
        return residual_lstm(depth + 2, vocabulary=_CHARACTERS, width=width, depth=depth), tokens
    blocks = gpt(depth + 2, vocabulary=_CHARACTERS, context=context, width=width, depth=depth)
    return blocks, tokens
