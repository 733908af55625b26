"""Cuts a model into stages: measures its blocks, chooses the cuts, makes the stages.

model --> its form --> seconds and bytes --> ends of stages --> stages (--> values)
          BlockList    profile.py            cut.py             the form

``spectrain_ext.tools.models`` has the other forms, and fills stages with values.
"""

from typing import TYPE_CHECKING, Any

from spectrain_ext.cutting import Cut
from spectrain_ext.later import later

from .blocks import NO_LOSS as NO_LOSS
from .blocks import mark_ties
from .blocks import slices_of as slices_of
from .cut import Division, cut
from .cut import check_ends as check_ends
from .cut import check_stages as check_stages
from .cut import open_places as open_places
from .profile import BlockProfile, Profile, Tie, measure
from .profile import blaming_example as blaming_example
from .stages import Form as Form
from .stages import HasDocument as HasDocument
from .stages import Partition, cut_at, partition, profile_of

if TYPE_CHECKING:
    from spectrain_ext.tools.models import TracedStage, materialize

__all__ = [
    "BlockProfile",
    "Cut",
    "Division",
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
    if name not in ("TracedStage", "materialize"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return later(name)
