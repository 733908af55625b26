"""Cutting a model into stages: measure its blocks, decide where to cut, make the stages."""

from spectrain_ext.partitioning.automatic import Partition, partition
from spectrain_ext.partitioning.cut import Cut, StageEstimate, cut
from spectrain_ext.partitioning.graph import GraphStage, from_pipe
from spectrain_ext.partitioning.profile import BlockProfile, Profile, Tie, measure
from spectrain_ext.partitioning.slices import Slice, cut_at
from spectrain_ext.partitioning.traced import TracedStage

__all__ = [
    "BlockProfile",
    "Cut",
    "GraphStage",
    "Partition",
    "Profile",
    "Slice",
    "StageEstimate",
    "Tie",
    "TracedStage",
    "cut",
    "cut_at",
    "from_pipe",
    "measure",
    "partition",
]
