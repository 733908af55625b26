"""Reads the cut of a plan, for ``partition(plan=...)``."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from spectrain_ext.errors import made_of
from spectrain_ext.files import read_json
from spectrain_ext.partitioning import BlockProfile, HasDocument, Tie, check_ends

_LARGEST = 1 << 24  # bytes of a plan's file

#: The only format of a plan's document that is accepted.
PLAN_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PlannedCut:
    model: str  # the class's name
    blocks: tuple[BlockProfile, ...]
    ends: tuple[int, ...]
    settings: Mapping[str, Any]  # keyword arguments of a pipeline

    @property
    def names(self) -> list[str]:
        return [block.name for block in self.blocks]

    @property
    def closed(self) -> tuple[Tie, ...]:
        """Ties that allow only the plan's cuts."""
        inner = set(range(1, len(self.blocks))) - set(self.ends)
        return tuple(Tie(place - 1, place, "the plan") for place in sorted(inner))

    def check(self, names: Sequence[str], n_stages: int) -> None:
        """Raise ValueError unless the plan is for these blocks and this number of stages."""
        for index, (theirs, ours) in enumerate(zip_longest(self.names, names)):
            if theirs != ours:
                planned, present = (
                    "nothing" if n is None else reprlib.repr(n) for n in (theirs, ours)
                )
                raise ValueError(
                    f"plan: it is of another model: at block {index} its "
                    f"{reprlib.repr(self.model)} of {len(self.blocks)} blocks has {planned}, this "
                    f"one of {len(names)} has {present}"
                )
        if n_stages != len(self.ends):
            raise ValueError(
                f"n_stages: expected {len(self.ends)}, as the plan has, or none, got {n_stages}"
            )


def planned_cut(plan: str | os.PathLike[str] | Mapping[str, Any] | HasDocument) -> PlannedCut:
    """Read a plan's document or file; a ValueError names the fault."""
    where = "plan"
    if isinstance(plan, (str, os.PathLike)):
        where = f"plan: {os.fspath(plan)}"
        document = read_json(plan, _LARGEST)
    elif isinstance(plan, Mapping):
        document = plan
    elif hasattr(plan, "document"):
        document = plan.document()
    else:
        kind = type(plan).__name__
        raise TypeError(
            f"plan: expected a file's name, a TrainingPlan or its document, got a {kind}"
        )
    try:
        return _planned(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        where += ": expected one that spectrain plan has written"
        raise ValueError(f"{where}: {what}") from error


def _planned(document: Mapping[str, Any]) -> PlannedCut:
    if (form := document["spectrain_plan"]) != PLAN_FORMAT:
        raise ValueError(f"spectrain_plan: expected format {PLAN_FORMAT}, got {reprlib.repr(form)}")
    blocks = made_of(BlockProfile, document["blocks"], "blocks")
    if not blocks or not all(isinstance(block.name, str) for block in blocks):
        raise ValueError("blocks: expected some, with names")
    ends = tuple(document["ends"])
    check_ends(ends, len(blocks))
    settings = dict(document["settings"])
    return PlannedCut(str(document["model"]), blocks, ends, settings)
