"""LinkEnds: the ends of one stage's edges to other ranks, by what goes there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spectrain_ext.pipeline.batch import SplitDim
from spectrain_ext.pipeline.edges import StageEdges
from spectrain_ext.pipeline.stage import Stage
from spectrain_ext.pipeline.tie_ends import depth_of
from spectrain_ext.schedule import Place, Replicas
from spectrain_ext.transport import Receiver

from .board import Board
from .ends import Inlet, Outlet
from .links import Link, Links, Traffic

_TOO_MANY = {
    Traffic.ACTIVATIONS: "the previous rank sends a microbatch that nothing here takes",
    Traffic.GRADIENTS: "the next rank sends a gradient that nothing here waits for",
    Traffic.TARGETS: "rank 0 sends a target that nothing here takes",
    Traffic.TIED_WEIGHTS: "tied weights come that nothing here takes",
    Traffic.TIED_GRADIENTS: "gradients of tied weights come that nothing here waits for",
}


class LinkEnds:
    """A stage's ends of its links, by what goes there and the seat at the other end, or the tie.

    Args:
        stage: one of the rank's stages.
        places: of all stages' replicas.
        later: of every stage, by how many microbatches it puts backwards off (``put_off_by``).
        replicas: of all stages.
        links: the groups that the rank's edges go by.
        board: what the ranks know of each other.
        evaluates: whether they only go forward.

    Attributes:
        into, out: the ends.
    """

    def __init__(
        self,
        stage: Stage,
        places: Sequence[Place],
        later: Sequence[int],
        replicas: Replicas,
        links: Links,
        board: Board,
        evaluates: bool,
    ) -> None:
        self._stage, self._replicas = stage, replicas

        def depth(what: Traffic, link: Link) -> int:
            """A window and one, as between stages of one process.

            To one of several replicas goes a part of what the stage has in flight. Rank 0 sends
            inputs and targets of a whole minibatch when it begins it, and the receiver uses one to
            the end of its backward: so there are those of stage 0's window and of one more. The
            targets of a minibatch go as one message, but in an evaluation.
            """
            earlier, receiver = min(link.stages), max(link.stages)
            if what.tied:
                return depth_of(places[earlier], later[receiver])
            if what in (Traffic.INPUTS, Traffic.TARGETS):
                minibatches = -(-places[0].window // places[0].microbatches) + 1
                parts = places[receiver].microbatches
                if what is Traffic.TARGETS and not evaluates:
                    return minibatches - (-later[receiver] // parts)
                return minibatches * parts + later[receiver]
            more = later[receiver] if what is Traffic.ACTIVATIONS else 1
            return places[earlier].window + more

        self.into = {
            what: {
                at: Inlet(link, stage.device, stage.compute, depth(what, link), board)
                for at, link in into.items()
                if link.stages[1] == stage.index
            }
            for what, into in links.into.items()
        }
        self.out = {
            what: {
                at: Outlet(link, stage.device, depth(what, link), board)
                for at, link in out.items()
                if link.stages[0] == stage.index
            }
            for what, out in links.out.items()
        }

    def inlets(self) -> Iterator[Inlet]:
        for inlets in self.into.values():
            yield from inlets.values()

    def edges(
        self, replica: int, microbatches: int, apart: bool, split_dim: SplitDim
    ) -> StageEdges:
        """What goes by links, for so many microbatches of this replica's: those of its neighbours.

        Its l-th microbatch here of a minibatch is microbatch replica + l * replicas of all.
        """
        runs, k = self._replicas.runs, self._stage.index
        into, out = self.into, self.out
        count = self._replicas.counts[k]
        mine = [replica + j * count for j in range(microbatches)]
        made = StageEdges(replica=replica, count=count, apart=apart, split_dim=split_dim)
        if k:
            made.inputs = [into[Traffic.ACTIVATIONS][runs(k - 1, n)] for n in mine]
            made.to_previous = [out[Traffic.GRADIENTS][runs(k - 1, n)] for n in mine]
        elif into[Traffic.INPUTS]:
            made.inputs = [*into[Traffic.INPUTS].values()] * microbatches
        if k < self._replicas.stages - 1:
            made.to_next = [out[Traffic.ACTIVATIONS][runs(k + 1, n)] for n in mine]
            made.gradients = [into[Traffic.GRADIENTS][runs(k + 1, n)] for n in mine]
        else:
            made.targets = [*into[Traffic.TARGETS].values()] * microbatches
        return made

    # A run.

    def begin(self) -> None:
        for inlet in self.inlets():
            inlet.begin()

    def end(self, *traffic: Traffic) -> None:
        """Tell who receives this that there is no more."""
        for what in traffic:
            for outlet in self.out[what].values():
                outlet.end()

    def close(self, heard: Receiver | None) -> None:
        """Hear that all has been sent, and say so to the previous stage.

        Args:
            heard: an inlet at which this has been heard.
        """
        for what, said in _TOO_MANY.items():
            for inlet in self.into[what].values():
                if inlet is not heard and inlet.receive() is not None:
                    raise RuntimeError(said)
        self.end(Traffic.GRADIENTS)

    def flush(self) -> None:
        """Wait until all has been sent."""
        for outlets in self.out.values():
            for outlet in outlets.values():
                outlet.flush()
