"""Makes the edges between the stages of a process, and of the caller's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain
from typing import TYPE_CHECKING, Any

from spectrain_ext.method import Method
from spectrain_ext.schedule import Kind, Place
from spectrain_ext.transport import Edge, Receiver

from .edges import Source, SourceSettings, StageEdges, Traffic
from .passes import Handler, in_turn
from .processes import Ends, Processes
from .stage import Stage
from .ties import Copy, TiedStages

if TYPE_CHECKING:
    from .tie_ends import Borrower, Lender


class Wires:
    """The edges of the stages of one process: for all trainings, or for all evaluations."""

    def __init__(
        self,
        stages: Sequence[Stage],
        places: list[Place],  # of all stages, in the phase of the largest windows
        postponed: Sequence[int],  # see put_off_by
        processes: Processes,
        batches: SourceSettings,
        ties: Sequence[TiedStages] = (),  # of all stages
        copies: Sequence[Copy] = (),
        counted: bool = False,  # whether horizons are: a tied weight may then change more often
        evaluates: bool = False,
    ) -> None:
        self._by_index = {stage.index: stage for stage in stages}
        self._places, self._postponed, self._evaluates = places, postponed, evaluates
        self._replicas, self._replica = processes.replicas, processes.replica
        self._counted = counted
        self.tied = ties, copies, counted
        self._local: dict[Ends, Edge] = {}
        self.remote = processes.remote_ends(self._by_index, self._depth, evaluates)
        self.ties = Ties(ties, copies, self._by_index, self._depth, self._ends_of_tie, evaluates)
        self.edges = {stage.index: self._edges_of(stage.index) for stage in stages}
        self.source: Source | None = None
        if processes.takes_batches:
            replicas, last = self._replicas, self._replicas.stages - 1
            parts = range(places[0].microbatches * replicas.counts[0])
            self.source = Source(
                [self._edge(Traffic.INPUTS, None, replicas.runs(0, n)) for n in parts],
                [self._edge(Traffic.TARGETS, None, replicas.runs(last, n)) for n in parts],
                *(replicas, batches, evaluates, processes.own_minibatches and not evaluates),
            )

    def _edges_of(self, k: int) -> StageEdges:
        """Return a stage's edges; its l-th microbatch is the minibatch's replica + l * replicas."""
        replicas, count = self._replicas, self._replicas.counts[k]
        microbatches = [self._replica + j * count for j in range(self._places[k].microbatches)]
        here = replicas.runs(k, self._replica)
        edges = StageEdges(self._replica, count)
        if k == 0:
            edges.inputs = [self._edge(Traffic.INPUTS, None, here)] * len(microbatches)
        else:
            before = [replicas.runs(k - 1, n) for n in microbatches]
            edges.inputs = [self._edge(Traffic.ACTIVATIONS, a, here) for a in before]
            edges.to_previous = [self._edge(Traffic.GRADIENTS, here, b) for b in before]
        if k == replicas.stages - 1:
            edges.targets = [self._edge(Traffic.TARGETS, None, here)] * len(microbatches)
        else:
            after = [replicas.runs(k + 1, n) for n in microbatches]
            edges.to_next = [self._edge(Traffic.ACTIVATIONS, here, b) for b in after]
            edges.gradients = [self._edge(Traffic.GRADIENTS, a, here) for a in after]
        return edges

    def _edge(self, traffic: Traffic, a: int | None, b: int) -> Any:
        """Return this process's end of an edge, or the edge if both ends are here."""
        end = self.remote.get((traffic, a, b)) or self._local.get((traffic, a, b))
        if end is None:
            here = self._by_index
            to = here[self._replicas.stage_and_replica(b)[0]]
            source = None if a is None else here[self._replicas.stage_and_replica(a)[0]].device
            name = f"edge {'batch' if a is None else a} -> {b}"
            if traffic is Traffic.TARGETS:
                name = "edge batch -> loss"
            depth = self._depth(traffic, to.index, to.index)
            if self._evaluates and traffic is not Traffic.GRADIENTS:
                # Forwards only: the microbatches being computed, and the next one.
                depth = self._places[to.index].microbatches + 1
            end = self._local[traffic, a, b] = Edge(name, source, to.device, to.compute, depth)
        return end

    def _depth(self, traffic: Traffic, sender: int, receiver: int) -> int:
        """Return how many messages of an edge to this stage may be under way or in use at once.

        That is one more than the sender's microbatches in flight, plus those whose weight half of
        the backward the receiver puts off. When a slot is written again, the sender has then
        learned that the backward which read it has ended, and what that backward sent from the same
        memory has been copied. Batches come in whole and are used until the end of their backward:
        those of stage 0's window, and one more. Except in evaluations, the targets of a minibatch
        are one message.
        """
        places, postponed = self._places, self._postponed[receiver]
        if traffic in (Traffic.TIED_WEIGHTS, Traffic.TIED_GRADIENTS):
            from .tie_ends import depth_of

            home, copy = sorted((sender, receiver))
            return depth_of(places[home], self._postponed[copy], self._counted)
        if traffic is Traffic.ACTIVATIONS:
            return places[receiver - 1].window + postponed
        if traffic is Traffic.GRADIENTS:
            return places[receiver].window + 1
        minibatches = -(-places[0].window // places[0].microbatches) + 1
        parts = places[receiver].microbatches
        if traffic is Traffic.TARGETS and not self._evaluates:
            return minibatches - (-postponed // parts)
        return minibatches * parts + postponed

    def _ends_of_tie(self, tie: int) -> tuple[Any, Any]:
        """Return this process's ends of a tie to another process: of weights, and of gradients."""
        weights = self.remote[Traffic.TIED_WEIGHTS, None, tie]
        return weights, self.remote.get((Traffic.TIED_GRADIENTS, None, tie))

    @property
    def local_edges(self) -> Sequence[Edge]:
        """The edges whose ends are both in this process."""
        return (*self._local.values(), *self.ties.edges)

    def receivers(self) -> Iterable[Receiver]:
        """Return the edges into the stages here, and between them."""
        return (
            *self.local_edges,
            *(end for end in self.remote.values() if hasattr(end, "receive")),
        )

    def inputs(self, k: int) -> Iterator[dict[Kind, Sized]]:
        """Yield what a stage's steps wait for, for each microbatch; others do not, or block."""
        edges = self.edges[k]
        for j, receiver in enumerate(edges.inputs):
            inputs = {Kind.RECEIVE_ACTIVATION: receiver.arrived}
            if edges.gradients:
                arrived = edges.gradients[j].arrived
                inputs |= {Kind.RECEIVE_GRADIENT: arrived, Kind.RECEIVE_WORD: arrived}
            if self.ties.lenders[k]:
                inputs[Kind.ADD_TIED_GRADIENTS] = self.ties.gradients_for(k)
            yield {kind: arrived for kind, arrived in inputs.items() if arrived is not None}

    def begin(self) -> None:
        """Begin a run on these edges, which the last one has left empty."""
        for edge in self.local_edges:
            edge.begin()


# Ties.


class Ties:
    """The ends of all ties in this process, and the edges between them."""

    def __init__(
        self,
        ties: Sequence[TiedStages],  # of all stages; the rest is for this process
        copies: Sequence[Copy],
        stages: Mapping[int, Stage],
        depth: Callable[[Traffic, int, int], int],
        remote: Callable[[int], tuple[Any, Any]],  # of the n-th tie: for weights, for gradients
        evaluates: bool,
    ) -> None:
        self.edges: list[Edge] = []  # between two stages of this process
        self.lenders: dict[int, list[Lender]] = {k: [] for k in stages}
        self.borrowers: dict[int, list[Borrower]] = {k: [] for k in stages}
        for n, tie in enumerate(ties):
            from .tie_ends import Borrower, Lender

            a, b = stages.get(tie.home), stages.get(tie.copy)
            if a is not None and b is not None:
                if evaluates:  # between runs a copy in the same process has the true weights
                    continue
                slots = depth(Traffic.TIED_WEIGHTS, tie.home, tie.copy)
                weights = self._edge(a, b, "weights", slots)
                gradients = self._edge(b, a, "gradients", slots) if tie.trained else None
            elif a is not None or b is not None:
                weights, gradients = remote(n)
            if a is not None:
                self.lenders[tie.home].append(Lender(a, tie, weights, gradients))
            if b is not None:
                self.borrowers[tie.copy].append(Borrower(b, a, tie, copies, weights, gradients))

    def _edge(self, a: Stage, b: Stage, tensors: str, depth: int) -> Edge:
        name = f"edge {a.index} -> {b.index} of tied {tensors}"
        self.edges.append(Edge(name, a.device, b.device, b.compute, depth))
        return self.edges[-1]

    def handlers(self, stage: int) -> dict[Kind, Handler]:
        lend, borrow = self.lenders[stage], self.borrowers[stage]
        steps: dict[Kind, Handler] = {}
        if lend:
            steps[Kind.SEND_TIED_WEIGHTS] = in_turn(*(end.send_weights for end in lend))
            steps[Kind.ADD_TIED_GRADIENTS] = in_turn(*(end.add_gradients for end in lend))
        if borrow:
            steps[Kind.RECEIVE_TIED_WEIGHTS] = in_turn(*(end.receive_weights for end in borrow))
            steps[Kind.LOAD_TIED_WEIGHTS] = in_turn(*(end.load_weights for end in borrow))
            steps[Kind.FREE_TIED_WEIGHTS] = in_turn(*(end.free_weights for end in borrow))
            steps[Kind.SEND_TIED_GRADIENTS] = in_turn(*(end.send_gradients for end in borrow))
        return steps

    def gradients_for(self, stage: int) -> Sized:
        """Return what is empty until a stage's update has all gradients of its copies."""
        # A copy may put off the second half of a backward, which gives them.
        edges = [end.gradients for end in self.lenders[stage] if end.gradients is not None]
        return _All([edge.arrived for edge in edges if edge.arrived is not None])

    # A run.

    def begin(self, method: Method, places: Sequence[Place]) -> None:
        for lender in chain(*self.lenders.values()):
            lender.begin(method, places)
        for borrower in chain(*self.borrowers.values()):
            borrower.begin(method, places)

    def bring_true(self) -> None:
        """Send the true weights to other processes: after the last instruction, or between runs."""
        remote = [end for end in chain(*self.borrowers.values()) if end.home is None]
        for borrower in remote:
            if borrower.gradients is not None:
                borrower.gradients.end()
        for lender in chain(*self.lenders.values()):
            if lender.weights not in self.edges:
                lender.send_true()
        for borrower in remote:
            borrower.take_true()

    def end(self) -> None:
        """Forget the run; may be repeated."""
        for borrower in chain(*self.borrowers.values()):
            borrower.end()


class _All:
    """Empty until none of several is."""

    def __init__(self, members: Sequence[Sized]) -> None:
        self._members = members

    def __len__(self) -> int:
        return int(all(self._members))
