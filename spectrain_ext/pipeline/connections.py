"""Connects the stages of a process to one another and to the caller."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from torch import Tensor

from spectrain_ext.method import Method, phases_of, put_off_by
from spectrain_ext.schedule import Generator, Instruction, Kind, Place, Replicas
from spectrain_ext.transport import Edge, Microbatches, Receiver

from .arguments import check_hidden, hidden_use
from .batch import SplitDim, is_pair, microbatches_in
from .edges import Source, StageEdges, Traffic
from .loads import GlobalNorm
from .losses import Keep, Losses, LossFn, Result
from .passes import Handler
from .phases import widest
from .stage import Mode, Stage
from .ties import Copy, TiedStages, ties_of

if TYPE_CHECKING:
    from .tie_ends import Borrower, Lender

_logger = logging.getLogger(__name__)

#: Whether the input of an instruction has arrived; without side effects.
Ready = Callable[[int, int], bool]

#: An edge, by the replicas at both ends, numbered stage by stage; None: the caller's batches. One
#: of tied parameters: by None and the number of the tie.
_Ends = tuple[Traffic, int | None, int]


class Connections:
    """The edges between the stages of one process, what they share, and the caller's results."""

    loss_fn: LossFn
    edges: dict[int, StageEdges]  # by stage
    measure: Callable[[Any, Any], object]  # receives the output and the target of every batch
    count: Callable[[Any], float | Tensor] | None = None  # of a target: what losses are divided by
    receives_block = False  # a stage then loads weights before it receives
    takes_batches = True  # whether the caller's batches come in at this process
    own_minibatches = False  # whether each replica trains on its own minibatches
    _source: Source | None
    _losses: Losses | None
    _ties: Ties
    _phase: tuple[Method, list[Place]]
    _tied: tuple[Sequence[TiedStages], Sequence[Copy]]

    def __init__(self, stages: int, split_dim: SplitDim = 0) -> None:
        self.indices: Sequence[int] = range(stages)  # the stages of this process
        # The replicas of all stages, and the index of the one here.
        self.replicas, self.replica = Replicas((1,) * stages), 0
        self.split_dim = split_dim
        self.norm: GlobalNorm | None = GlobalNorm(stages)  # None: no phase needs it
        self.results: deque[Result] = deque()  # waiting for the caller
        self.mode = Mode.TRAIN
        self._remote: dict[_Ends, Any] = {}  # a sender or a receiver, for another process

    def connect(
        self,
        stages: list[Stage],
        of_phases: Sequence[list[Place]],  # of all stages, in each phase of the method
        method: Method,
        loss_fn: LossFn,
        copies: Sequence[Copy],  # of other stages' weights, in these stages
    ) -> None:
        self._stages, self.loss_fn, places = stages, loss_fn, widest(of_phases)
        check_hidden([hidden_use(stage.weights for stage in stages)])
        self._losses = Losses(stages[-1], loss_fn, self.results)
        self._open(ties_of(each.member for each in copies), copies, method, places)

    # Edges.

    def _open(
        self,
        ties: Sequence[TiedStages],
        copies: Sequence[Copy],
        method: Method,
        places: list[Place],
    ) -> None:
        self._by_index = {stage.index: stage for stage in self._stages}
        self._tied = ties, copies
        self._counted = any(phase.forward_horizon == "counted" for phase in phases_of(method))
        self._join(places, put_off_by(method, places))

    def _join(self, places: list[Place], postponed: Sequence[int]) -> None:
        """Make all edges of the stages here, and those of the caller's batches."""
        self._places, self._postponed = places, postponed  # see put_off_by
        self._ties = Ties(*self._tied, self._by_index, self._depth_of_tie, self._remote_ends)
        self._local: dict[_Ends, Edge] = {}
        self.edges = {stage.index: self._edges_of(stage.index) for stage in self._stages}
        self._source = None
        if self.takes_batches:
            replicas, last = self.replicas, self.replicas.stages - 1
            parts = range(places[0].microbatches * replicas.counts[0])
            self._source = Source(
                [self._edge(Traffic.INPUTS, None, replicas.runs(0, n)) for n in parts],
                [self._edge(Traffic.TARGETS, None, replicas.runs(last, n)) for n in parts],
                *(replicas, self.split_dim, self.evaluates, self.own_minibatches, self.count),
            )

    def _edges_of(self, k: int) -> StageEdges:
        """Return a stage's edges; its l-th microbatch is the minibatch's replica + l * replicas."""
        replicas, count = self.replicas, self.replicas.counts[k]
        mine = [self.replica + j * count for j in range(self._places[k].microbatches)]
        here = replicas.runs(k, self.replica)
        made = StageEdges(self.replica, count)
        if k == 0:
            made.inputs = [self._edge(Traffic.INPUTS, None, here)] * len(mine)
        else:
            before = [replicas.runs(k - 1, n) for n in mine]
            made.inputs = [self._edge(Traffic.ACTIVATIONS, a, here) for a in before]
            made.to_previous = [self._edge(Traffic.GRADIENTS, here, b) for b in before]
        if k == replicas.stages - 1:
            made.targets = [self._edge(Traffic.TARGETS, None, here)] * len(mine)
        else:
            after = [replicas.runs(k + 1, n) for n in mine]
            made.to_next = [self._edge(Traffic.ACTIVATIONS, here, b) for b in after]
            made.gradients = [self._edge(Traffic.GRADIENTS, a, here) for a in after]
        return made

    def _edge(self, what: Traffic, a: int | None, b: int) -> Any:
        """Return this process's end of an edge, or the edge if both ends are here."""
        found = self._remote.get((what, a, b)) or self._local.get((what, a, b))
        if found is None:
            here = self._by_index
            to = here[self.replicas.stage_and_replica(b)[0]]
            source = None if a is None else here[self.replicas.stage_and_replica(a)[0]].device
            name = f"edge {'batch' if a is None else a} -> {b}"
            if what is Traffic.TARGETS:
                name = "edge batch -> loss"
            depth = self._depth(what, to.index)
            if self.evaluates and what is not Traffic.GRADIENTS:
                # Forwards only: the microbatches being computed, and the next one.
                depth = self._places[to.index].microbatches + 1
            found = self._local[what, a, b] = Edge(name, source, to.device, to.compute, depth)
        return found

    def _depth(self, what: Traffic, receiver: int) -> int:
        """Return how many messages of an edge to this stage may be under way or in use at once.

        That is one more than the sender's microbatches in flight, plus those whose weight half of
        the backward the receiver puts off. When a slot is written again, the sender has then
        learned that the backward which read it has ended, and what that backward sent from the same
        memory has been copied. Batches come in whole and are used until the end of their backward:
        those of stage 0's window, and one more. Except in evaluations, the targets of a minibatch
        are one message.
        """
        places, postponed = self._places, self._postponed[receiver]
        if what is Traffic.ACTIVATIONS:
            return places[receiver - 1].window + postponed
        if what is Traffic.GRADIENTS:
            return places[receiver].window + 1
        minibatches = -(-places[0].window // places[0].microbatches) + 1
        parts = places[receiver].microbatches
        if what is Traffic.TARGETS and not self.evaluates:
            return minibatches - (-postponed // parts)
        return minibatches * parts + postponed

    def _depth_of_tie(self, home: int, copy: int) -> int:
        from .tie_ends import depth_of

        return depth_of(self._places[home], self._postponed[copy], self._counted)

    def _remote_ends(self, tie: int) -> tuple[Any, Any]:
        """Return this process's ends of a tie to another process: of weights, and of gradients."""
        weights = self._remote[Traffic.TIED_WEIGHTS, None, tie]
        return weights, self._remote.get((Traffic.TIED_GRADIENTS, None, tie))

    @property
    def evaluates(self) -> bool:
        return self.mode is not Mode.TRAIN

    def change(self, method: Method, places: list[Place]) -> None:
        self._phase = method, places

    def evaluating(self, places: list[Place]) -> Connections:
        """Return connections of the same stages for evaluations, with edges of their own."""
        made = copy(self)
        made.mode, made.own_minibatches = Mode.EVALUATE, False
        made.norm = None
        made._losses, made.results = None, deque()
        made._only_forward()
        made._join(places, [1] * len(places))  # parts are whole batches of any size
        return made

    def _only_forward(self) -> None:
        """Omit ties: in evaluations, copies in this process have the true weights."""
        self._tied = (), ()

    @property
    def local_edges(self) -> Sequence[Edge]:
        """The edges whose ends are both in this process."""
        return (*self._local.values(), *self._ties.edges)

    def receivers(self) -> Iterable[Receiver]:
        return self.local_edges

    # The instructions of a stage.

    def handlers(self, stage: Stage) -> dict[Kind, Handler]:
        """Return what a stage does in this run: its instructions consist of these steps."""
        found = stage.handlers()
        if not self.evaluates:
            found |= self._ties.handlers(stage.index)
        if self._source is not None and stage is self._stages[0]:
            found[Kind.PULL] = self._source.pull
        if self.edges[stage.index].targets:
            if self.evaluates:
                found[Kind.MEASURE] = lambda i, j: stage.measure(i, j, self.measure)
            elif self._losses is not None:
                found[Kind.LOSS] = self._losses.loss
        return found

    def ready(self, stage: Stage) -> dict[Kind, Ready]:
        """Return what a stage's instructions wait for; others wait for nothing, or block."""
        edges, k, found = self.edges[stage.index], stage.index, {}
        if not edges.inputs[0].blocks:
            found[Kind.RECEIVE_ACTIVATION] = _has(edges.inputs)
        if edges.gradients and not edges.gradients[0].blocks:
            found[Kind.RECEIVE_GRADIENT] = found[Kind.RECEIVE_WORD] = _has(edges.gradients)
        if self._ties.lenders[k]:
            found[Kind.ADD_TIED_GRADIENTS] = lambda i, j: self._ties.gradients_are_there(k)
        if stage.global_norm is not None:
            norm = stage.global_norm
            found[Kind.CLIP] = found[Kind.AGREE] = lambda i, j: norm.complete(i)
        return found

    def largest(self, number: float) -> float:
        """Return the largest of the numbers that a stage's replicas give."""
        return number

    def exchange(self, message: Tensor) -> Callable[[], Sequence[Tensor]]:
        """Begin to send a message to a stage's replicas; the call waits for theirs, in order."""
        return lambda: [message]

    def announce(self, stage: Stage) -> Callable[[Kind, int, int], None] | None:
        """Return what is called with each instruction that begins."""
        return None

    # A run.

    def run(self) -> AbstractContextManager[None]:
        """Return a context for a run."""
        return nullcontext()

    def order(
        self, schedule: Generator, places: list[Place]
    ) -> Iterator[tuple[int, Instruction]] | None:
        """Return an endless order of the stages' instructions; None: the stages take turns."""
        return None

    def begin(self, batches: Iterator[object], keep: Keep | None = None) -> None:
        for edges in self.edges.values():
            edges.ended_by = None
        for edge in self.local_edges:
            edge.begin()
        if self._source is not None:
            if (columns := self.columns) is not None:
                keep_columns = partial(without_dropped_columns, columns, self.evaluates)
                batches = map(keep_columns, batches, count())
            self._source.begin(batches, self._stages[0].pass_on_end)
        if self._losses is not None:
            self._losses.begin(keep)
        if not self.evaluates:
            self._ties.begin(*self._phase)

    @property
    def columns(self) -> Any:
        """The first stage's filter for the columns of a batch; None: it has none."""
        return getattr(self._stages[0].module, "batch_columns", None)

    def yields(self, result: Result) -> None:
        """Called before the caller gets a result."""

    def leave(self) -> None:
        """Begin no further minibatch, since the caller has left the run."""
        if self._source is not None:
            self._source.left = True

    def close(self) -> None:
        """Called when the stages have finished their instructions."""

    def end(self) -> None:
        if self.norm is not None:
            self.norm.reset()
        self.results.clear()
        self._ties.end()


def without_dropped_columns(columns: Any, several: bool, batch: Any, i: int) -> Any:
    """Return a batch, or a tuple of batches, without the columns that are dropped."""
    if several:
        numbered = enumerate(batch, i * len(batch))
        return tuple(without_dropped_columns(columns, False, one, n) for n, one in numbered)
    if (cut := microbatches_in(batch, f"batches[{i}]")) is not None:
        return Microbatches(without_dropped_columns(columns, False, one, i) for one in cut)
    if isinstance(batch, Mapping):
        kept = columns.kept(batch, f"batches[{i}]")
        if i == 0 and (dropped := [name for name in batch if name not in kept]):
            _logger.info("columns that the model does not take are dropped: %s", dropped)
        return kept
    if is_pair(batch) and isinstance(batch[0], Mapping):
        return columns.kept(batch[0], f"batches[{i}][0]"), batch[1]
    return batch


def _has(receivers: Sequence[Receiver]) -> Ready:
    only = receivers[0]
    if all(each is only for each in receivers):
        return only.has
    return lambda i, j: receivers[j].has(i, j)


# Ties.


class Ties:
    """The ends of all ties in this process, and the edges between them."""

    def __init__(
        self,
        ties: Sequence[TiedStages],  # of all stages; the rest is for this process
        copies: Sequence[Copy],
        stages: Mapping[int, Stage],
        depth: Callable[[int, int], int],  # of a tie's two stages, see ``depth_of``
        remote: Callable[[int], tuple[Any, Any]],  # of the n-th tie: for weights, for gradients
    ) -> None:
        self.edges: list[Edge] = []  # between two stages of this process
        self.lenders: dict[int, list[Lender]] = {k: [] for k in stages}
        self.borrowers: dict[int, list[Borrower]] = {k: [] for k in stages}
        for n, tie in enumerate(ties):
            from .tie_ends import Borrower, Lender

            a, b = stages.get(tie.home), stages.get(tie.copy)
            if a is not None and b is not None:
                slots = depth(tie.home, tie.copy)
                weights = self._edge(a, b, "weights", slots)
                gradients = self._edge(b, a, "gradients", slots) if tie.trained else None
            elif a is not None or b is not None:
                weights, gradients = remote(n)
            if a is not None:
                self.lenders[tie.home].append(Lender(a, tie, weights, gradients))
            if b is not None:
                self.borrowers[tie.copy].append(Borrower(b, a, tie, copies, weights, gradients))

    def _edge(self, a: Stage, b: Stage, what: str, depth: int) -> Edge:
        name = f"edge {a.index} -> {b.index} of tied {what}"
        self.edges.append(Edge(name, a.device, b.device, b.compute, depth))
        return self.edges[-1]

    def handlers(self, stage: int) -> dict[Kind, Handler]:
        lend, borrow = self.lenders[stage], self.borrowers[stage]
        found: dict[Kind, Handler] = {}
        if lend:
            found[Kind.SEND_TIED_WEIGHTS] = _each([end.send_weights for end in lend])
            found[Kind.ADD_TIED_GRADIENTS] = _each([end.add_gradients for end in lend])
        if borrow:
            found[Kind.RECEIVE_TIED_WEIGHTS] = _each([end.receive_weights for end in borrow])
            found[Kind.LOAD_TIED_WEIGHTS] = _each([end.load_weights for end in borrow])
            found[Kind.FREE_TIED_WEIGHTS] = _each([end.free_weights for end in borrow])
            found[Kind.SEND_TIED_GRADIENTS] = _each([end.send_gradients for end in borrow])
        return found

    def gradients_are_there(self, stage: int) -> bool:
        """Whether a stage's update has all gradients; a copy may put off those of its weights."""
        edges = [end.gradients for end in self.lenders[stage]]
        return all(edge is None or edge.blocks or edge.has() for edge in edges)

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


def _each(handlers: Sequence[Handler]) -> Handler:
    def run_all(i: int, j: int) -> None:
        for handler in handlers:
            handler(i, j)

    return run_all
