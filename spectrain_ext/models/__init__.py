"""Models that the command line trains, as lists of pipeline stages."""

from spectrain_ext.models.gpt import gpt
from spectrain_ext.models.partition import cut_evenly
from spectrain_ext.models.residual_lstm import residual_lstm
from spectrain_ext.models.residual_mlp import ResidualBlock, residual_mlp
from spectrain_ext.models.resnet import resnet
from spectrain_ext.models.vgg import vgg

__all__ = ["ResidualBlock", "cut_evenly", "gpt", "residual_lstm", "residual_mlp", "resnet", "vgg"]
