"""RankEdges: the edges of one rank to its neighbours, of which a microbatch has one each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from spectrain_ext.pipeline.stage import Stage
from spectrain_ext.schedule import Kind, Place, Replicas
from spectrain_ext.transport import Buffer, Message

from .board import Board
from .fans import FanIn, FanOut
from .inlet import Inlet
from .link import Header
from .neighbours import Neighbours
from .outlet import Outlet


class RankEdges:
    """This rank's ends of its edges, by the rank at the other end.

    The rank's l-th microbatch of a minibatch is microbatch replica + l * replicas of all.

    Args:
        stage: the rank's stage; its edges to neighbours are set.
        places: the places of all stages' replicas.
        replicas: of every stage.
        links: the groups that the edges go by.
        board: what the ranks know of each other.

    Attributes:
        replica: which of its stage's this rank is.
        count: how many there are.
        replicas: as given.
        from_previous, from_next, to_previous, to_next: the ends.
    """

    def __init__(
        self,
        stage: Stage,
        places: list[Place],
        replicas: Replicas,
        links: Neighbours,
        board: Board,
    ) -> None:
        self._stage = stage
        self.replicas = replicas
        self.replica = replicas.seat(board.rank)[1]
        self.count = replicas.counts[stage.index]
        self.from_previous: dict[int, Inlet] = {}
        self.from_next: dict[int, Inlet] = {}
        self.to_previous: dict[int, Outlet] = {}
        self.to_next: dict[int, Outlet] = {}
        self._from_first: Inlet | None = None
        self._to_replicas: list[Outlet] = []
        self._targets_from: dict[int, Inlet] = {}
        self._targets_to: dict[int, Outlet] = {}
        device, receiver = stage.device, stage.compute
        # As deep as ``Executor`` makes them: a window and one. To one of several replicas goes a
        # part of what the stage has in flight.
        if links.from_previous:
            depth = places[stage.index - 1].window + 1
            for rank, link in links.from_previous.items():
                self.from_previous[rank] = Inlet(link, device, receiver, depth, board)
            for rank, link in links.to_previous.items():
                self.to_previous[rank] = Outlet(link, device, depth, board)
            stage.inputs = _only(self.from_previous) or FanIn(self.from_previous)
            stage.to_previous = _only(self.to_previous) or FanOut(self.to_previous)
        if links.from_next:
            depth = places[stage.index].window + 1
            for rank, link in links.from_next.items():
                self.from_next[rank] = Inlet(link, device, receiver, depth, board)
            for rank, link in links.to_next.items():
                self.to_next[rank] = Outlet(link, device, depth, board)
            stage.gradients = _only(self.from_next) or FanIn(self.from_next)
            stage.to_next = _only(self.to_next) or FanOut(self.to_next)
        # Stage 0 has no more minibatches in flight than microbatches.
        depth = places[0].window + 1
        for link in links.from_first.values():
            self._from_first = Inlet(link, device, receiver, depth, board)
        for link in links.to_replicas.values():
            self._to_replicas.append(Outlet(link, device, depth, board))
        # Those of a batch are sent as a whole; one is used to the end of its backward.
        depth += places[0].microbatches
        for rank, link in links.targets_from.items():
            self._targets_from[rank] = Inlet(link, device, receiver, depth, board)
        for rank, link in links.targets_to.items():
            self._targets_to[rank] = Outlet(link, device, depth, board)
        if self._targets_from:
            stage.targets = _only(self._targets_from) or FanIn(self._targets_from)

    def inlets(self) -> Iterator[Inlet]:
        """All that something may arrive at."""
        yield from self.from_previous.values()
        yield from self.from_next.values()
        yield from self._targets_from.values()
        if self._from_first is not None:
            yield self._from_first

    def begin(self) -> None:
        """Listen for the messages of a run."""
        for inlet in self.inlets():
            inlet.begin()

    # Whose turn it is: the neighbour that runs the same microbatch.

    def microbatch(self, j: int) -> int:
        """Which of all microbatches of its minibatch this rank's j-th one is."""
        return self.replica + j * self.count

    def input(self, j: int) -> Inlet:
        """Where the activation of the j-th microbatch arrives; ``stage.inputs`` is it."""
        inputs = self._stage.inputs
        if isinstance(inputs, FanIn):
            rank = self.replicas.runs(self._stage.index - 1, self.microbatch(j))
            return inputs.choose(rank)
        assert isinstance(inputs, Inlet)
        return inputs

    def gradient(self, j: int) -> Inlet:
        """Where the gradient of the j-th microbatch arrives; ``stage.gradients`` is it."""
        gradients = self._stage.gradients
        if isinstance(gradients, FanIn):
            rank = self.replicas.runs(self._stage.index + 1, self.microbatch(j))
            return gradients.choose(rank)
        assert isinstance(gradients, Inlet)
        return gradients

    def output(self, kind: Kind, j: int) -> Outlet:
        """Where the j-th microbatch's activation or gradient goes; the stage sends there."""
        stage = self._stage
        forward = kind is Kind.SEND_ACTIVATION
        out = stage.to_next if forward else stage.to_previous
        if isinstance(out, FanOut):
            neighbour = stage.index + (1 if forward else -1)
            return out.choose(self.replicas.runs(neighbour, self.microbatch(j)))
        assert isinstance(out, Outlet)
        return out

    # Targets, where the first stage sends them to the last.

    def target(self, j: int) -> Inlet | None:
        """Where the target of the j-th microbatch arrives; None: from the caller."""
        if not self._targets_from:
            return None
        targets = self._stage.targets
        if isinstance(targets, FanIn):
            return targets.choose(self.replicas.runs(0, self.microbatch(j)))
        assert isinstance(targets, Inlet)
        return targets

    def target_outlet(self, j: int) -> Outlet | None:
        """Where the target of the j-th microbatch goes; None: it stays here, or is not wanted."""
        if not self._targets_to:
            return None
        return self._targets_to[self.replicas.runs(self.replicas.stages - 1, self.microbatch(j))]

    # What rank 0 says to the other replicas of stage 0.

    def hear_of_batch(self) -> Header | None:
        """The next batch, or that there is none; None on a rank that nobody tells."""
        if self._from_first is None:
            return None
        header = self._from_first.wait()
        if not header.end:
            self._from_first.free(self._from_first.receive())
        return header

    def tell_of_batch(self, known: Header) -> None:
        """There is a batch, and what is known of it."""
        for outlet in self._to_replicas:
            outlet.label(known)
            outlet.send(Message((), False), Buffer("nothing"), self._stage.computed)

    # The end of a run.

    def end_batches(self) -> None:
        """Tell the other replicas that there are no more, and the last stage no more targets."""
        for outlet in (*self._to_replicas, *self._targets_to.values()):
            outlet.end()

    def end_forward(self) -> None:
        """Tell the next ranks that they have had all activations."""
        for outlet in self.to_next.values():
            outlet.end()

    def close(self, heard: Inlet | None) -> None:
        """Hear that all has been sent, and say so to the previous ranks.

        Args:
            heard: an inlet at which this has been heard.
        """
        for inlet in self.from_previous.values():
            if inlet is not heard and not inlet.wait().end:
                raise RuntimeError("the previous rank sends a microbatch that nothing here takes")
        for inlet in self.from_next.values():
            if not inlet.wait().end:
                raise RuntimeError("the next rank sends a gradient that nothing here waits for")
        for inlet in self._targets_from.values():
            if not inlet.wait().end:
                raise RuntimeError("the first stage sends a target that nothing here takes")
        for outlet in self.to_previous.values():
            outlet.end()
        for outlet in (
            *self.to_previous.values(),
            *self.to_next.values(),
            *self._to_replicas,
            *self._targets_to.values(),
        ):
            outlet.flush()


_End = TypeVar("_End", Inlet, Outlet)


def _only(ends: dict[int, _End]) -> _End | None:
    """The one of a neighbour without replicas; None if there are several."""
    return next(iter(ends.values())) if len(ends) == 1 else None
