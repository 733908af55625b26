"""Cutting a model into stages: measure its blocks, decide where to cut, make the stages."""

from .automatic import Partition, partition
from .cut import Cut, StageEstimate, cut
from .profile import BlockProfile, Profile, Tie, measure
from .slices import Slice, cut_at
from .traced import TracedStage

__all__ = [
    "BlockProfile",
    "Cut",
    "Partition",
    "Profile",
    "Slice",
    "StageEstimate",
    "Tie",
    "TracedStage",
    "cut",
    "cut_at",
    "measure",
    "partition",
]
