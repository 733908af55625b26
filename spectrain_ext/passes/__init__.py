"""Optional behaviours of a pipeline, for ``Pipeline(passes=[...])``; see ``Pass`` for your own."""

from __future__ import annotations

from spectrain_ext.pipeline.passes import Pass
from spectrain_ext.schedule import Kind

from . import averaging, codecs, corrections
from .average import AverageWeights
from .compress import Compress
from .finite import CheckFinite
from .offload import OffloadActivations
from .share_loss import ShareLoss

__all__ = [
    "AverageWeights",
    "CheckFinite",
    "Compress",
    "Kind",
    "OffloadActivations",
    "Pass",
    "ShareLoss",
    "averaging",
    "codecs",
    "corrections",
]
