"""Joins the stages of a process by edges, and orders their work with the caller's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from spectrain_ext.schedule import Kind, put_off
from spectrain_ext.transport import Edge, Receiver, Stream, callers_stream, captured

from .applied_method import AppliedMethod
from .compute import StageEdges
from .processes import Ends, Processes, Traffic
from .source import BatchSettings, BatchSource
from .stage import Stage
from .ties import Copy, TiedStages

if TYPE_CHECKING:
    from .tie_ends import Borrower, Lender


class Wires:
    """The stages of one process and their edges: for all trainings, or for all evaluations."""

    def __init__(
        self,
        stages: Sequence[Stage],
        applied: AppliedMethod,
        processes: Processes,
        batches: BatchSettings,
        ties: Sequence[TiedStages] = (),  # of all stages
        copies: Sequence[Copy] = (),
        evaluates: bool = False,
    ) -> None:
        self.stages = stages
        self._by_index = {stage.index: stage for stage in stages}
        self.applied, self.evaluates = applied, evaluates
        self._replicas, self._replica = processes.replicas, processes.replica
        self.tied = ties, copies
        depth = partial(self._depth, applied)
        self._local: dict[Ends, Edge] = {}
        self.remote = processes.remote_ends(self._by_index, depth, evaluates)
        self.tie_ends: Sequence[Lender | Borrower] = ()
        if ties:
            from .tie_ends import ends_of

            self.tie_ends = ends_of(ties, copies, self._by_index, self._edge_of_tie, evaluates)
        self.edges = {stage.index: self._edges_of(stage.index) for stage in stages}
        self.source: BatchSource | None = None
        if processes.takes_batches:
            replicas, last = self._replicas, self._replicas.stages - 1
            parts = range(applied.places[0].microbatches * replicas.counts[0])
            self.source = BatchSource(
                [self._to_shards(Traffic.INPUTS, replicas.runs(0, n)) for n in parts],
                [self._to_shards(Traffic.TARGETS, replicas.runs(last, n)) for n in parts],
                replicas=replicas,
                settings=batches,
                whole=evaluates,
                own_minibatches=processes.own_minibatches and not evaluates,
            )

    def _edges_of(self, k: int) -> StageEdges:
        """Return a stage's edges, of which this replica has every ``count``-th microbatch."""
        replicas, count = self._replicas, self._replicas.counts[k]
        microbatches = [
            self._replica + j * count for j in range(self.applied.places[k].microbatches)
        ]
        here = replicas.runs(k, self._replica)
        to_previous, to_next, gradients, targets = [], [], [], []
        if k == 0:
            inputs = [self._edge(Traffic.INPUTS, None, here)] * len(microbatches)
        else:
            previous = [replicas.runs(k - 1, n) for n in microbatches]
            inputs = [self._edge(Traffic.ACTIVATIONS, a, here) for a in previous]
            to_previous = [self._edge(Traffic.GRADIENTS, here, b) for b in previous]
        if k == replicas.stages - 1:
            targets = [self._edge(Traffic.TARGETS, None, here)] * len(microbatches)
        else:
            following = [replicas.runs(k + 1, n) for n in microbatches]
            to_next = [self._edge(Traffic.ACTIVATIONS, here, b) for b in following]
            gradients = [self._edge(Traffic.GRADIENTS, a, here) for a in following]
        return StageEdges(
            replica=self._replica,
            count=count,
            inputs=inputs,
            targets=targets,
            gradients=gradients,
            to_next=to_next,
            to_previous=to_previous,
        )

    def _to_shards(self, traffic: Traffic, b: int) -> list[Any]:
        """Return the edges of the caller's batches to all ranks that share a replica."""
        others = range(1, len(self._replicas.rows[b]))
        return [self._edge(traffic, None, b), *(self.remote[traffic, n, b] for n in others)]

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
            depth = self._depth(self.applied, (traffic, a, b))
            if self.evaluates and traffic is not Traffic.GRADIENTS:
                # Forwards only: the microbatches being computed, and the next one.
                depth = self.applied.places[to.index].microbatches + 1
            # A sender's window is closed until gradients come, or activations that follow them.
            answered = traffic in (Traffic.ACTIVATIONS, Traffic.GRADIENTS) and not self.evaluates
            end = Edge(name, source, to.device, to.compute, depth, answered)
            self._local[traffic, a, b] = end
        return end

    def follow(self, applied: AppliedMethod) -> None:
        """Carry the messages under this method from the next run on."""
        if applied is not self.applied:
            for ends, end in (*self._local.items(), *self.remote.items()):
                end.deepen(self._depth(applied, ends))
            self.applied = applied

    def _depth(self, applied: AppliedMethod, ends: Ends) -> int:
        """Return how many messages of an edge may be under way or in use at once.

        That is one more than the sender's microbatches in flight, plus those whose weight half of
        the backward the receiver puts off. When a slot is written again, the sender has then
        learned that the backward which read it has ended, and what that backward sent from the same
        memory has been copied. Batches come in whole and are used until the end of their backward:
        those of stage 0's window, and one more. Except in evaluations, the targets of a minibatch
        are one message.
        """
        traffic, _, to = ends
        method, places = applied.method, applied.places
        if traffic in (Traffic.TIED_WEIGHTS, Traffic.TIED_GRADIENTS):
            from .tie_ends import depth_of

            tie = self.tied[0][to]
            # Where horizons are counted, a tied weight may change more often.
            counts = method.forward_horizon == "counted"
            return depth_of(places[tie.home], put_off(method.schedule, places[tie.copy]), counts)
        receiver = self._replicas.stage_and_replica(to)[0]
        postponed = put_off(method.schedule, places[receiver])
        if traffic is Traffic.ACTIVATIONS:
            return places[receiver - 1].window + postponed
        if traffic is Traffic.GRADIENTS:
            return places[receiver].window + 1
        minibatches = -(-places[0].window // places[0].microbatches) + 1
        parts = places[receiver].microbatches
        if traffic is Traffic.TARGETS and not self.evaluates:
            return minibatches - (-postponed // parts)
        return minibatches * parts + postponed

    def _edge_of_tie(self, traffic: Traffic, n: int, tie: TiedStages) -> Any:
        """Return this process's end of the n-th tie's edge, or the edge if both ends are here."""
        end, here = self.remote.get((traffic, None, n)), self._by_index
        if end is None and tie.home in here and tie.copy in here:
            a, b = here[tie.home], here[tie.copy]
            if traffic is Traffic.TIED_GRADIENTS:
                a, b = b, a
            name = f"edge {a.index} -> {b.index} of {traffic.value}"
            ends = traffic, None, n
            depth = self._depth(self.applied, ends)
            end = self._local[ends] = Edge(name, a.device, b.device, b.compute, depth)
        return end

    def tie_ends_at(self, k: int) -> list[Lender | Borrower]:
        return [end for end in self.tie_ends if end.stage.index == k]

    @property
    def local_edges(self) -> Sequence[Edge]:
        """The edges whose ends are both in this process."""
        return tuple(self._local.values())

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
            # The gradients of all copies; one may put off the half of a backward that gives them.
            of_copies = [end.arrived for end in self.tie_ends_at(k) if end.arrived is not None]
            if of_copies:
                inputs[Kind.ADD_TIED_GRADIENTS] = _All(of_copies)
            yield {kind: arrived for kind, arrived in inputs.items() if arrived is not None}

    def begin(self) -> None:
        """Begin a run on these edges, which the last one has left empty."""
        for edge in self.local_edges:
            edge.begin()

    def free_storage(self) -> None:
        """Free the memory of messages, until the next run needs it."""
        for edge in self.local_edges:
            edge.free_storage()

    # The caller's stream is the one that is current at the call; it may change from call to call.
    # Work that is captured into a CUDA graph waits for no other stream; earlier work is done by
    # then.

    def captured(self) -> bool:
        """Whether the caller captures work of a device into a CUDA graph."""
        return any(captured(stage.device) for stage in self.stages)

    def streams(self) -> Iterator[Stream]:
        for stage in self.stages:
            yield stage.compute
            yield stage.predict
        for edge in self.receivers():
            yield edge.stream

    def follow_caller(self) -> None:
        """Order all later work of the stages after the caller's work so far."""
        if self.captured():
            return
        for stage in self.stages:  # the caller may have written them
            for buffer in stage.shared:
                callers_stream(stage.device).writes(buffer)
        for device in {stage.device for stage in self.stages}:
            point = callers_stream(device).mark()
            for stream in self.streams():
                stream.wait(point)

    def let_caller_follow(self) -> None:
        """Order the caller's later work after all computations and loads issued so far."""
        if self.captured():
            return
        for stage in self.stages:
            caller = callers_stream(stage.device)
            caller.wait_stream(stage.compute)
            caller.wait_stream(stage.predict)
            for buffer in stage.shared:
                caller.may_read(buffer)

    @contextmanager
    def caller_ordered(self) -> Iterator[None]:
        """Let the caller's stream use weights, optimizer state and buffers, in a ``with`` block."""
        self.let_caller_follow()
        yield
        self.follow_caller()


class _All:
    """Several queues as one, which is empty while any of them is."""

    def __init__(self, members: Sequence[Sized]) -> None:
        self._members = members

    def __len__(self) -> int:
        return int(all(self._members))
