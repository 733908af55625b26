"""Ties over ranks: what they agree on, before any of them trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from spectrain_ext.pipeline.names import bare, full_names
from spectrain_ext.pipeline.ties import Copy, Member, Tie, check_look, look_of, names_of, ties_of
from spectrain_ext.schedule import Replicas

from .board import TIES, Board


def copies_here(copies: Sequence[Copy]) -> dict[str, object]:
    """What a rank says of its copies to all others, of JSON's types."""
    return {"copies": [[*copy.member, look_of(copy.held)] for copy in copies]}


def agreed(
    board: Board,
    seats: Replicas,
    modules: Mapping[int, nn.Module],
    copies: Sequence[Copy],
    found: Sequence[Mapping[str, Any]],
) -> list[Tie]:
    """The ties of all stages. Every rank calls this, and all come to the same end.

    Args:
        modules: this rank's stages, by index.
        copies: that these have; they learn what checkpoints call their homes' parameters.
        found: what every rank has said.

    Raises:
        ValueError: a home has no such parameter, or another kind of; or a stage has several
            replicas and is one of the two.
    """
    asked = [(Member(*said), look) for rank in found for *said, look in rank["copies"]]
    if not asked:
        return []
    mine: dict[str, dict[str, object]] = {}  # by stage, whose number JSON would make a text as well
    for k, module in modules.items():
        known: dict[str, object] = {}
        for p, names in names_of(module).items():
            for name in names:
                found_as = full_names(module, names, f"{k}.")
                known[bare(name)] = known[name] = look_of(p), [*found_as.values()]
        wanted = {member.home_name for member, _ in asked if member.home == k}
        mine[str(k)] = {name: known[name] for name in sorted(wanted & known.keys())}
    said = board.gathered(TIES, mine)
    own = {(copy.stage, copy.names[0]): copy for copy in copies}
    for member, look in asked:
        counts = [seats.counts[k] for k in (member.home, member.copy)]
        if max(counts) > 1:
            raise ValueError(
                f"replicas: {member}; a stage with tied weights has one replica, these have "
                f"{counts[0]} and {counts[1]}. Untie them: tie_word_embeddings=False in a Hugging "
                "Face configuration"
            )
        by_name = said[seats.ranks_of(member.home)[0]][str(member.home)]
        there = by_name.get(member.home_name, (None, []))
        check_look(member, look, there[0])
        if member.copy in modules:
            own[member.copy, member.name].elsewhere = there[1]
    return ties_of(member for member, _ in asked)


def seats_of(tie: Tie, seats: Replicas) -> tuple[int, int, bool]:
    """The seat of its home and that of the copies, and whether these get gradients."""
    return seats.runs(tie.home, 0), seats.runs(tie.copy, 0), tie.trained
