"""Models of the command line, as lists of pipeline stages."""

from .gpt import gpt
from .inception import inception_v4
from .residual_lstm import residual_lstm
from .residual_mlp import residual_mlp
from .resnet import resnet
from .snn import snn
from .speedrun import speedrun
from .vgg import vgg

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
