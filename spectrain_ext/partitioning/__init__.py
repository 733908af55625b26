"""Cuts a model into stages: measures its blocks, chooses the cuts, makes the stages.

model --> its form --> seconds and bytes --> ends of stages --> stages (--> values)
          BlockList    profile.py            cut.py             the form    materializing.py
          Decoder
          Traceable
"""

from typing import TYPE_CHECKING, Any

from .blocks import mark_ties
from .cut import Cut, cut
from .profile import BlockProfile, Profile, Tie, measure
from .programs import TracedStage
from .stages import Partition, cut_at, partition, profile_of

if TYPE_CHECKING:
    from .materializing import materialize

__all__ = [
    "BlockProfile",
    "Cut",
    "Partition",
    "Profile",
    "Tie",
    "TracedStage",
    "cut",
    "cut_at",
    "mark_ties",
    "materialize",
    "measure",
    "partition",
    "profile_of",
]


def __getattr__(name: str) -> Any:
    if name != "materialize":  # loaded when it is used
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .materializing import materialize

    return materialize
