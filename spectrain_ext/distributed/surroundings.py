"""Surroundings: what is around one stage of a rank, in a run: batches, neighbours, replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import nan

import torch
from torch import Tensor

from spectrain_ext.interrupts import callers
from spectrain_ext.pipeline.averaging import Averaged
from spectrain_ext.pipeline.batch import (
    Microbatch,
    hand_in,
    samples_of,
    shares_of,
    sizes_of,
    split,
)
from spectrain_ext.pipeline.cursor import Extent
from spectrain_ext.pipeline.losses import Keep, Losses, LossFn, Result
from spectrain_ext.pipeline.neighbourhood import Ready, Work
from spectrain_ext.pipeline.observer import Observer, watched
from spectrain_ext.pipeline.stage import Handler, Stage
from spectrain_ext.pipeline.tie_ends import End, tied
from spectrain_ext.schedule import Kind
from spectrain_ext.transport import Buffer, Edge

from .collectives import GradientSum
from .edges import Arrangement, DistributedEdges
from .inlet import Inlet
from .links import Traffic
from .wire import Header


class Surroundings:
    """What one stage of this rank is connected to: its neighbours, its replicas, the caller.

    The message that there are no more minibatches follows the last one from stage to stage.
    Gradients come back with the minibatch's loss, if it is shared; where stages have replicas, each
    with that of its own microbatch, and replicas add them up.

    The schedule of a replica counts its own microbatches.

    Rank 0 alone has batches. It sends inputs to stage 0's other replicas, and targets to the last
    stage; the samples and parts of a minibatch go along with all messages of its forwards.

    Args:
        stage: the stage.
        arranged: what it has in common with the rank's others.
        loss_fn: of the last stage; an evaluation has it measure.
        total: what sums gradients over the stage's replicas, if it has any.
        averaged: what averages their weights instead.
        leads: whether the rank hears of a minibatch here first, and so of how long the run is.
        reports: whether the rank's results come from here.
        ended: is called when that is known to be over.

    Attributes:
        stage: as given.
        edges: its ends of its edges.
        own: the edges that the caller's batches come in by.
        results: that wait for the caller.
        heard_end: the inlet at which the end of the run has been heard.
    """

    def __init__(
        self,
        stage: Stage,
        arranged: Arrangement,
        loss_fn: LossFn,
        total: GradientSum | None,
        averaged: Averaged | None,
        leads: bool,
        reports: bool,
        ended: Callable[[], None],
    ) -> None:
        self.stage, self._arranged = stage, arranged
        self.seats, self._board = arranged.seats, arranged.board
        self._sum, self._averaged = total, averaged
        self._leads, self._reports, self._ended = leads, reports, ended
        self._several = len(self.seats.stages_on(self._board.rank)) > 1
        self._microbatches = arranged.places[0].microbatches * self.seats.counts[0]
        self.edges = DistributedEdges(stage, arranged)
        self._batch = Buffer("the caller's batch")
        place = arranged.places[stage.index]
        depth = place.window + place.microbatches
        self._inputs = self._targets = None
        into = self.edges.into
        self._dealt_in = next(iter(into[Traffic.INPUTS].values()), None)
        if self._dealt_in is not None:
            stage.inputs = self._dealt_in
        elif not into[Traffic.ACTIVATIONS]:
            name = "edge batch -> 0"
            self._inputs = Edge(name, None, stage.device, stage.compute, depth)
            stage.inputs = self._inputs
        if not into[Traffic.GRADIENTS] and not into[Traffic.TARGETS]:
            name = "edge batch -> loss"
            depth += arranged.later[stage.index] - 1
            self._targets = Edge(name, None, stage.device, stage.compute, depth)
            stage.targets = self._targets
        self.own = [edge for edge in (self._inputs, self._targets) if edge is not None]

        self._own_losses: dict[int, Tensor] = {}  # which those of other replicas are added to
        held = None if total is None else self._own_losses
        self._losses = Losses(stage, loss_fn, len(arranged.places), held)
        self.results = self._losses.results

    # A run.

    def begin(self, batches: Iterator[object], extent: Extent, keep: Keep | None) -> None:
        self._batches, self._extent = batches, extent
        self._losses.begin(extent, keep)
        self._forwarded = 0  # minibatches whose forwards have all been sent
        self._said_end = self._told_end = False
        self.heard_end: Inlet | None = None
        self._known: dict[int, Header] = {}  # of each minibatch what goes along with it
        self._loss_of: dict[int, float] = {}  # minibatch -> its loss, as far as it is known
        self._part_of: dict[tuple[int, int], float] = {}  # microbatch -> its part of the loss
        self._own_losses.clear()
        self.edges.begin()
        if self._sum is not None:
            self._sum.begin()

    def end(self) -> None:
        if self._sum is not None:
            self._sum.end()
        self._losses.end()

    def work(self, trace: Observer | None, ties: Sequence[End]) -> Work:
        """What the stage does in the run.

        Args:
            trace: looks on.
            ties: the ends of its ties.
        """
        stage = self.stage
        self._ties = ties
        handlers = {**stage.handlers(), Kind.PULL: self._pull, Kind.LOSS: self._losses.loss}
        handlers = tied(handlers, ties)
        if self._averaged is not None:
            handlers = self._averaged.around(handlers)
        before: dict[Kind, Ready] = {
            Kind.RECEIVE_ACTIVATION: self._expect_activation,
            Kind.SEND_ACTIVATION: self._label_activation,
            Kind.LOSS: self._expect_target,
            Kind.RECEIVE_GRADIENT: self._expect_gradient,
            Kind.SEND_GRADIENT: self._label_gradient,
            Kind.UPDATE: self._add_up,
        }
        after: dict[Kind, Handler] = {
            Kind.PULL: self._pulled,
            Kind.SEND_ACTIVATION: self._sent_activation,
            Kind.LOSS: self._computed_loss,
            Kind.UPDATE: self._updated,
        }
        if self._sum is not None:
            for kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHTS):
                before[kind], after[kind] = self._expect_sum, self._send_sum
        found = watched(trace, stage, handlers)
        return {
            kind: (self._begins(kind, before.get(kind)), _followed(handler, after.get(kind)))
            for kind, handler in found.items()
        }

    def _begins(self, kind: Kind, before: Ready | None) -> Ready:
        """Say that an action begins, and do what comes before it."""
        board, turn, what = self._board, self.edges.turn, kind.value
        if self._arranged.evaluates:
            what = f"evaluation, {_THROUGH.get(kind, what)}"
        if self._several:
            what = f"stage {self.stage.index}, {what}"

        def begins(i: int, j: int) -> bool:
            board.check()
            board.doing(what, "of minibatch", i, "microbatch", turn(j))
            return before is None or before(i, j)

        return begins

    def _is_last(self, i: int, j: int) -> bool:
        return j == len(self._extent.shares[i]) - 1

    # Batches, and what is heard of them.

    def _pull(self, i: int, j: int) -> None:
        """Begin a minibatch: with the caller's batch on rank 0, elsewhere with what it has sent."""
        if self._dealt_in is not None:
            header = self._dealt_in.wait()
            if header.end:
                self._extent.stop()
            else:
                self._deal(i, header)
            return
        try:
            with callers():
                batch = next(self._batches)
        except StopIteration:
            self._extent.stop()
            return
        parts = self._split(batch, i)
        for k, count in enumerate(self.seats.counts):
            if len(parts) < count and not self._arranged.evaluates:
                raise ValueError(
                    f"batches[{i}]: it makes {len(parts)} microbatches, and stage {k} has {count} "
                    "replicas, each of which needs one; leave such a minibatch out, or make it "
                    "larger"
                )
        known = Header(len(parts), 0.0 if self._arranged.evaluates else samples_of(parts))
        self._deal(i, known)
        for n, part in enumerate(parts):
            inputs, targets = self.edges.outlets_of_batch(n)
            if inputs is not None:
                inputs.label(known)
            hand_in(inputs or self._inputs, part.input, self._batch)
            hand_in(targets or self._targets, part.target, self._batch)

    def _pulled(self, i: int, j: int) -> None:
        if self._extent.minibatches is not None:
            self._ended()

    def _split(self, batch: object, i: int) -> list[Microbatch]:
        """The parts of a batch; for replicas that evaluate, batches are the parts of a tuple."""
        if not (self._arranged.evaluates and self.seats.dealt):
            return split(batch, i, self._microbatches, self._arranged.split_dim)
        assert isinstance(batch, tuple)
        return [split(one, n, 1)[0] for n, one in enumerate(batch, i * len(batch))]

    def _deal(self, i: int, known: Header) -> None:
        """The run is one minibatch longer, if this rank has a part in it."""
        samples = int(known.value)
        mine = self.edges.dealt(shares_of(samples, known.parts))
        if self._arranged.apart:  # a minibatch of its own
            own = sum(self.edges.dealt(sizes_of(samples, known.parts)))
            mine = shares_of(own, len(mine))
        if mine:
            self._known[i] = known
            if self._leads:
                self._extent.add(mine)

    def _expect_activation(self, i: int, j: int) -> bool:
        """Wait for a microbatch; whether there is one."""
        inlet = self.edges.now.inputs
        if inlet is None:
            return True
        header = inlet.wait()
        if header.end:
            self.heard_end = inlet
            self._extent.stop()
            self._ended()
            return False
        if j == 0:
            self._deal(i, header)
        return True

    def _label_activation(self, i: int, j: int) -> bool:
        """Tell the next rank along with the tensors."""
        outlet = self.edges.now.to_next
        assert outlet is not None
        outlet.label(self._known[i])
        return True

    def _sent_activation(self, i: int, j: int) -> None:
        self._forwarded += self._is_last(i, j)
        self.say_end()

    def say_end(self) -> None:
        """To the other replicas once it is known, to the next ranks once they have had all."""
        if self._extent.minibatches is None:
            return
        if not self._told_end:
            self.edges.end(Traffic.INPUTS, Traffic.TARGETS)
            self._told_end = True
        if not self._said_end and self._extent.minibatches == self._forwarded:
            self.edges.end(Traffic.ACTIVATIONS)
            self._said_end = True

    # Losses. Without replicas the minibatch's goes along with its last gradient, as it is. With
    # them nobody knows it so early: every gradient goes with its own microbatch's part.

    def _expect_target(self, i: int, j: int) -> bool:
        inlet = self.edges.now.targets
        if inlet is not None and inlet.wait().end:
            raise RuntimeError("rank 0 has ended its run, and this one misses a target")
        return True

    def _computed_loss(self, i: int, j: int) -> None:
        if self._arranged.share_loss:
            if self.seats.dealt:
                self._pass_on(i, j, self._losses.part.item())
            elif self.results:
                self._loss_of[i] = self.results[-1].loss.item()
        self._say_result(i)

    def _expect_gradient(self, i: int, j: int) -> bool:
        inlet = self.edges.now.gradients
        assert inlet is not None
        header = inlet.wait()
        if header.end:
            raise RuntimeError("the next rank has ended its run, and this one misses a gradient")
        if self.seats.dealt:
            self._pass_on(i, j, header.value)
            self._loss_of[i] = self._loss_of.get(i, 0.0) + header.value
        else:
            self._loss_of[i] = header.value
        return True

    def _pass_on(self, i: int, j: int, loss: float) -> None:
        if self.edges.now.to_previous is not None:
            self._part_of[i, j] = loss

    def _label_gradient(self, i: int, j: int) -> bool:
        """Tell the previous rank along with the tensors."""
        loss = self._part_of.pop((i, j), nan) if self.seats.dealt else self._loss_of.get(i, nan)
        outlet = self.edges.now.to_previous
        assert outlet is not None
        outlet.label(Header(self._known[i].parts, loss))
        return True

    # The sum over the stage's replicas.

    def _expect_sum(self, i: int, j: int) -> bool:
        if self._sum is not None and self._is_last(i, j):
            self._sum.expect()
        return True

    def _send_sum(self, i: int, j: int) -> None:
        if self._sum is not None and self._is_last(i, j):
            self._sum.send_rest()
            self.stage.compute.record(self.stage.computed)

    def _add_up(self, i: int, j: int) -> bool:
        """Add up over the stage's replicas, then put the norms of all stages together."""
        stage = self.stage
        for end in self._ties:
            end.before_update(i)
        if self._sum is not None:
            loss = self._own_losses.pop(i, None)
            if loss is not None:
                self._loss_of[i] = loss.item()
            stage.predict.wait(stage.computed)
            total = self._sum.finish(self._loss_of.get(i, nan), stage.predict)
            self._loss_of[i] = total
            if loss is not None:
                kept = self._losses.kept.pop(i, None)
                self.results.append(Result(i, torch.full_like(loss, total), kept))
        norm = stage.global_norm
        if norm is not None:
            stage.give_norm(i)
            return norm.complete(i)
        return True

    def _updated(self, i: int, j: int) -> None:
        del self._known[i]
        loss = self._loss_of.pop(i, nan)
        if self._reports and self.edges.now.to_next is not None:
            shared = torch.tensor(loss, dtype=torch.float64) if self._arranged.share_loss else None
            self.results.append(Result(i, shared))
        self._say_result(i)

    def _say_result(self, i: int) -> None:
        if self.results:
            self._board.doing("the caller's loop, which has the result of minibatch", i)


#: What an evaluation does by actions of training, in words.
_THROUGH = {
    Kind.LOSS: "metrics",
    Kind.RECEIVE_GRADIENT: "hear that the next stage is through",
    Kind.SEND_GRADIENT: "tell the previous stage that this one is through",
    Kind.UPDATE: "end",
}


def _followed(handler: Handler, after: Handler | None) -> Handler:
    if after is None:
        return handler

    def both(i: int, j: int) -> None:
        handler(i, j)
        after(i, j)

    return both
