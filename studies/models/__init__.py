"""Models of the command line, as lists of pipeline stages."""

from .mlp import residual_mlp, snn
from .text import gpt, residual_lstm, speedrun
from .vision import inception_v4, resnet, vgg

__all__ = [
    "gpt",
    "inception_v4",
    "residual_lstm",
    "residual_mlp",
    "resnet",
    "snn",
    "speedrun",
    "vgg",
]
