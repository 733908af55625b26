"""DistributedEdges: the edges of one stage, of which a microbatch has one of each traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from spectrain_ext.pipeline.batch import SplitDim
from spectrain_ext.pipeline.stage import Stage
from spectrain_ext.pipeline.tie_ends import depth_of
from spectrain_ext.schedule import Place, Replicas

from .board import Board
from .inlet import Inlet
from .links import Link, Links, Traffic
from .outlet import Outlet

_Part = TypeVar("_Part")

_TOO_MANY = {
    Traffic.ACTIVATIONS: "the previous rank sends a microbatch that nothing here takes",
    Traffic.GRADIENTS: "the next rank sends a gradient that nothing here waits for",
    Traffic.TARGETS: "rank 0 sends a target that nothing here takes",
    Traffic.TIED_WEIGHTS: "tied weights come that nothing here takes",
    Traffic.TIED_GRADIENTS: "gradients of tied weights come that nothing here waits for",
}


class Arrangement(NamedTuple):
    """What all stages of a rank have in common.

    Attributes:
        places: of all stages' replicas.
        split_dim: along which dimensions minibatches are cut.
        later: of every stage, by how many microbatches it puts backwards off (``put_off_by``).
        seats: the replicas of all stages.
        links: the groups that the rank's edges go by.
        board: what the ranks know of each other.
        apart: whether each replica trains on a minibatch of its own.
        share_loss: whether every rank gets the losses.
        evaluates: whether this is for an evaluation.
    """

    places: list[Place]
    split_dim: SplitDim
    later: Sequence[int]
    seats: Replicas
    links: Links
    board: Board
    apart: bool
    share_loss: bool
    evaluates: bool = False


class Ends(NamedTuple):
    """The ends that one microbatch uses; None where there is no neighbour."""

    inputs: Inlet | None
    targets: Inlet | None
    gradients: Inlet | None
    to_next: Outlet | None
    to_previous: Outlet | None


class DistributedEdges:
    """A stage's ends of its edges, by what goes there and the seat at the other end, or the tie.

    Its l-th microbatch here of a minibatch is microbatch replica + l * replicas of all.

    Args:
        stage: one of the rank's stages.
        arranged: what they have in common.

    Attributes:
        into, out: the ends.
        now: those of the microbatch whose turn it is; the stage uses them.
    """

    def __init__(self, stage: Stage, arranged: Arrangement) -> None:
        places, later, board = arranged.places, arranged.later, arranged.board
        self._stage = stage
        self._seats = arranged.seats
        self._replica = arranged.seats.seat(board.rank)[1]
        self._count = arranged.seats.counts[stage.index]

        def depth(what: Traffic, link: Link) -> int:
            """A window and one, as between stages of one process.

            To one of several replicas goes a part of what the stage has in flight. Rank 0 sends
            inputs and targets of a whole minibatch when it begins it, and the receiver uses one to
            the end of its backward: so there are those of stage 0's window and of one more.
            """
            earlier, receiver = min(link.stages), max(link.stages)
            if what.tied:
                return depth_of(places[earlier], later[receiver])
            if what in (Traffic.INPUTS, Traffic.TARGETS):
                minibatches = -(-places[0].window // places[0].microbatches) + 1
                return minibatches * places[receiver].microbatches + later[receiver]
            more = later[receiver] if what is Traffic.ACTIVATIONS else 1
            return places[earlier].window + more

        self.into = {
            what: {
                at: Inlet(link, stage.device, stage.compute, depth(what, link), board)
                for at, link in into.items()
                if link.stages[1] == stage.index
            }
            for what, into in arranged.links.into.items()
        }
        self.out = {
            what: {
                at: Outlet(link, stage.device, depth(what, link), board)
                for at, link in out.items()
                if link.stages[0] == stage.index
            }
            for what, out in arranged.links.out.items()
        }
        self._ends = [self._at(j) for j in range(places[stage.index].microbatches)]
        self._use(self._ends[0])

    def inlets(self) -> Iterator[Inlet]:
        for inlets in self.into.values():
            yield from inlets.values()

    # Whose turn it is: the neighbour that runs the same microbatch.

    def _at(self, j: int) -> Ends:
        runs, k, n = self._seats.runs, self._stage.index, self._replica + j * self._count
        into, out = self.into, self.out
        return Ends(
            into[Traffic.ACTIVATIONS].get(runs(k - 1, n)) if k else None,
            into[Traffic.TARGETS].get(0),
            into[Traffic.GRADIENTS].get(runs(k + 1, n)) if out[Traffic.ACTIVATIONS] else None,
            out[Traffic.ACTIVATIONS].get(runs(k + 1, n)) if out[Traffic.ACTIVATIONS] else None,
            out[Traffic.GRADIENTS].get(runs(k - 1, n)) if k else None,
        )

    def turn(self, j: int) -> int:
        """Have the stage use the edges of its j-th microbatch; returns which of all that is."""
        if self._seats.dealt:
            self._use(self._ends[j])
        return self._replica + j * self._count

    def _use(self, ends: Ends) -> None:
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

    def outlets_of_batch(self, n: int) -> tuple[Outlet | None, Outlet | None]:
        """Where rank 0 sends input and target of microbatch n of all; None: it stays here."""
        runs, last = self._seats.runs, self._seats.stages - 1
        inputs, targets = self.out[Traffic.INPUTS], self.out[Traffic.TARGETS]
        return inputs.get(runs(0, n)), targets.get(runs(last, n))

    # A run.

    def begin(self) -> None:
        for inlet in self.inlets():
            inlet.begin()

    def end(self, *traffic: Traffic) -> None:
        """Tell who receives this that there is no more."""
        for what in traffic:
            for outlet in self.out[what].values():
                outlet.end()

    def close(self, heard: Inlet | None) -> None:
        """Hear that all has been sent, and say so to the previous stage.

        Args:
            heard: an inlet at which this has been heard.
        """
        for what, said in _TOO_MANY.items():
            for inlet in self.into[what].values():
                if inlet is not heard and not inlet.wait().end:
                    raise RuntimeError(said)
        self.end(Traffic.GRADIENTS)

    def flush(self) -> None:
        """Wait until all has been sent."""
        for outlets in self.out.values():
            for outlet in outlets.values():
                outlet.flush()
