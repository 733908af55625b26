"""Models that the command line trains, as lists of pipeline stages."""

from .gpt import gpt
from .residual_lstm import residual_lstm
from .residual_mlp import residual_mlp
from .resnet import resnet
from .vgg import vgg

__all__ = ["gpt", "residual_lstm", "residual_mlp", "resnet", "vgg"]
