"""DistributedEdges: the edges of one rank to its neighbours, of which a microbatch has one each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from spectrain_ext.pipeline.stage import Stage
from spectrain_ext.schedule import Place, Replicas
from spectrain_ext.transport import Buffer, Message

from .board import Board
from .inlet import Inlet
from .link import Header
from .neighbours import Neighbours
from .outlet import Outlet

_Part = TypeVar("_Part")


class Ends(NamedTuple):
    """The ends that one microbatch uses; None where there is no neighbour."""

    inputs: Inlet | None
    targets: Inlet | None
    gradients: Inlet | None
    to_next: Outlet | None
    to_previous: Outlet | None


class DistributedEdges:
    """This rank's ends of its edges, by the rank at the other end.

    The rank's l-th microbatch of a minibatch is microbatch replica + l * replicas of all.

    Args:
        stage: the rank's stage.
        places: the places of all stages' replicas.
        seats: the replicas of all stages.
        links: the groups that the edges go by.
        board: what the ranks know of each other.

    Attributes:
        from_previous, from_next, to_previous, to_next: the ends.
        now: those of the microbatch whose turn it is; the stage uses them.
    """

    def __init__(
        self,
        stage: Stage,
        places: list[Place],
        seats: Replicas,
        links: Neighbours,
        board: Board,
    ) -> None:
        self._stage = stage
        self._seats = seats
        self._replica = seats.seat(board.rank)[1]
        self._count = seats.counts[stage.index]
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
        if links.from_next:
            depth = places[stage.index].window + 1
            for rank, link in links.from_next.items():
                self.from_next[rank] = Inlet(link, device, receiver, depth, board)
            for rank, link in links.to_next.items():
                self.to_next[rank] = Outlet(link, device, depth, board)
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
        self._ends = [self._at(j) for j in range(places[stage.index].microbatches)]
        self._set(self._ends[0])

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

    def _at(self, j: int) -> Ends:
        runs, k, n = self._seats.runs, self._stage.index, self._replica + j * self._count
        return Ends(
            self.from_previous[runs(k - 1, n)] if self.from_previous else None,
            self._targets_from[runs(0, n)] if self._targets_from else None,
            self.from_next[runs(k + 1, n)] if self.from_next else None,
            self.to_next[runs(k + 1, n)] if self.to_next else None,
            self.to_previous[runs(k - 1, n)] if self.to_previous else None,
        )

    def turn(self, j: int) -> int:
        """Have the stage use the edges of its j-th microbatch; returns which of all that is."""
        if self._seats.dealt:
            self._set(self._ends[j])
        return self._replica + j * self._count

    def _set(self, ends: Ends) -> None:
        stage, self.now = self._stage, ends
        if ends.inputs is not None:
            stage.inputs = ends.inputs
        if ends.targets is not None:
            stage.targets = ends.targets
        stage.gradients = ends.gradients
        stage.to_next, stage.to_previous = ends.to_next, ends.to_previous

    def dealt(self, parts: list[_Part]) -> list[_Part]:
        """Those of a minibatch's parts that are this rank's."""
        return parts[self._replica :: self._count]

    def target_outlet(self, j: int) -> Outlet | None:
        """Where the target of the j-th microbatch goes; None: it stays here, or is not wanted."""
        if not self._targets_to:
            return None
        number = self._replica + j * self._count
        return self._targets_to[self._seats.runs(self._seats.stages - 1, number)]

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
