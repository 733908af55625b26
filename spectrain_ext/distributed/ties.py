"""Ties over ranks: what they agree on, and the ends that one rank's stages have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from spectrain_ext.method import Method
from spectrain_ext.pipeline.cursor import Extent
from spectrain_ext.pipeline.names import bare, full_names
from spectrain_ext.pipeline.stage import Stage
from spectrain_ext.pipeline.tie_ends import Away, End, Home, Turns, depth_of
from spectrain_ext.pipeline.ties import (
    Copy,
    Member,
    Tie,
    check_look,
    look_of,
    names_of,
    ties_of,
)
from spectrain_ext.schedule import Place, Replicas
from spectrain_ext.transport import Edge

from .board import TIES, Board
from .edges import Arrangement, DistributedEdges
from .links import Traffic

_KEY = "copies"


def said_of(copies: Sequence[Copy]) -> dict[str, object]:
    """What a rank says of its copies to all others, of JSON's types."""
    return {_KEY: [[*copy.member, look_of(copy.held)] for copy in copies]}


def agreed(
    board: Board,
    seats: Replicas,
    modules: Mapping[int, nn.Module],
    copies: Sequence[Copy],
    found: Sequence[Mapping[str, Any]],
) -> list[Tie]:
    """The ties of all stages. Every rank calls this, and all come to the same end.

    Args:
        board: what the ranks know of each other.
        seats: the replicas of all stages.
        modules: this rank's stages, by index.
        copies: that these have; they learn what checkpoints call their homes' parameters.
        found: what every rank has said.

    Raises:
        ValueError: a home has no such parameter, or another kind of; or a stage has several
            replicas and is one of the two.
    """
    asked = [(Member(*said), look) for rank in found for *said, look in rank[_KEY]]
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
    return seats.runs(tie.home, 0), seats.runs(tie.copy, 0), any(tie.trained)


class DistributedTies:
    """The ends of ties that one rank has.

    Args:
        ties: of all stages.
        copies: that the rank's stages have.
        arranged: what the rank's stages have in common.
        stages: those of the rank, each with its edges.

    Attributes:
        ends: of every one of these stages, in the order of the ties.
        edges: between two of them.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        copies: Sequence[Copy],
        arranged: Arrangement,
        stages: Sequence[tuple[Stage, DistributedEdges]],
    ) -> None:
        self._all = [edges for _, edges in stages]
        self._homes: list[Home] = []
        self._away: list[Away] = []
        self._turns: list[Turns] = []
        self.edges: list[Edge] = []
        self.ends: dict[int, list[End]] = {stage.index: [] for stage, _ in stages}
        here = {stage.index: (stage, edges) for stage, edges in stages}
        for n, tie in enumerate(ties):
            first, second = here.get(tie.home), here.get(tie.copy)
            weights = gradients = None
            if first is not None and second is not None:
                depth = depth_of(arranged.places[tie.home], arranged.later[tie.copy])
                weights = self._edge(first[0], second[0], "weights", depth)
                if any(tie.trained):
                    gradients = self._edge(second[0], first[0], "gradients", depth)
            if first is not None:
                stage, edges = first
                to = weights or edges.out[Traffic.TIED_WEIGHTS][n]
                back = gradients or edges.into[Traffic.TIED_GRADIENTS].get(n)
                self._turns.append(Turns(tie.home))
                home = Home(stage, tie, to, back, self._turns[-1])
                self._homes.append(home)
                self.ends[tie.home].append(home)
            if second is not None:
                stage, edges = second
                come = weights or edges.into[Traffic.TIED_WEIGHTS][n]
                away = gradients or edges.out[Traffic.TIED_GRADIENTS].get(n)
                self._turns.append(Turns(tie.home))
                end = Away(stage, tie, copies, come, away, self._turns[-1], keeps=True)
                self._away.append(end)
                self.ends[tie.copy].append(end)

    def _edge(self, a: Stage, b: Stage, what: str, depth: int) -> Edge:
        name = f"edge {a.index} -> {b.index} of tied {what}"
        self.edges.append(Edge(name, a.device, b.device, b.compute, depth))
        return self.edges[-1]

    def _end(self, what: Traffic) -> None:
        for edges in self._all:
            edges.end(what)

    def change(self, method: Method, places: Sequence[Place]) -> None:
        """Say what all stages train by, from the next run on, and where each is."""
        for turns in self._turns:
            turns.change(method, places)

    def begin(self, extent: Extent) -> None:
        for ends in self.ends.values():
            for end in ends:
                end.begin(extent)

    def follow(self) -> None:
        """Before an evaluation: the copies get what their homes' stages have now."""
        for home in self._homes:
            home.send_true()
        self._end(Traffic.TIED_WEIGHTS)
        for away in self._away:
            away.follow()
        self._homes, self._away, self.ends = [], [], {}

    def close(self) -> None:
        """The stages have finished their actions: the copies get the true weights."""
        if not self.ends:
            return
        self._end(Traffic.TIED_GRADIENTS)
        for home in self._homes:
            home.send_true()
        self._end(Traffic.TIED_WEIGHTS)
        for away in self._away:
            away.take_true()

    def end(self) -> None:
        """Forget the run; may be repeated."""
        for ends in self.ends.values():
            for end in ends:
                end.end()
