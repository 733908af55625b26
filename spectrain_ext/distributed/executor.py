"""RankExecutor: runs the actions of one stage, whose neighbours are in other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import nan

import torch
from torch import Tensor

from spectrain_ext.pipeline.batch import Microbatch, samples_of, shares_of, split
from spectrain_ext.pipeline.executor import Executor, Result
from spectrain_ext.pipeline.observer import Observer, watched
from spectrain_ext.pipeline.stage import Stage
from spectrain_ext.schedule import Kind, Place, Replicas
from spectrain_ext.transport import Edge, Stream

from .board import Board
from .edges import RankEdges
from .fingerprint import Fingerprint
from .gradient_sum import GradientSum
from .inlet import Inlet
from .link import Header
from .neighbours import Neighbours
from .norm import RankNorm


class DistantResult(Result):
    """A minibatch whose loss is on the last stage's ranks only."""

    def __init__(self, index: int) -> None:
        object.__setattr__(self, "index", index)

    def renumbered(self, index: int) -> DistantResult:
        """The same result under another number."""
        return DistantResult(index)

    def __repr__(self) -> str:
        return f"Result(index={self.index}, loss on the last rank)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DistantResult) and other.index == self.index

    def __hash__(self) -> int:
        return hash(self.index)

    @property
    def loss(self) -> Tensor:
        """Not here.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"minibatch {self.index}: its loss is on the last rank; DistributedPipeline(..., "
            "share_loss=True) sends it to all"
        )


class RankExecutor(Executor):
    """The executor of one rank.

    Rank 0 alone decides how long a run is: the message that there are no more minibatches follows
    the last one from rank to rank. Gradients come back with the minibatch's loss, if it is shared;
    where stages have replicas, each with that of its own microbatch, and replicas add them up.

    The schedule of a replica counts its own microbatches.

    What rank 0 knows of a batch goes along with its activations, from rank to rank: whoever takes
    targets, or other microbatches, out of a batch of its own can tell whether it is the same one.

    Args:
        stage: the rank's stage.
        loss_fn: ``(output, target) -> 0-d tensor``; used on the ranks of the last stage.
        places: the places of all stages' replicas.
        schedule: the name of the order in which they act.
        board: what the ranks know of each other.
        links: the groups that the edges go by.
        share_loss: whether every rank gets the losses.
        norm: where the ranks put their gradients' norms together, None: nowhere.
        replicas: of every stage; None: one each.
    """

    def __init__(
        self,
        stage: Stage,
        loss_fn: Callable[..., Tensor],
        places: list[Place],
        schedule: str,
        board: Board,
        links: Neighbours,
        share_loss: bool,
        norm: RankNorm | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self._board = board
        self._links = links
        self._share_loss = share_loss
        self._replicas = Replicas((1,) * len(places)) if replicas is None else replicas
        super().__init__([stage], loss_fn, places, schedule, norm)
        self._microbatches = places[0].microbatches * self._replicas.counts[0]
        # whether another rank's part of a batch comes from a batch of its own
        apart = self._replicas.stages > 1 and not (links.targets_to or links.targets_from)
        self._compares = apart or self._replicas.counts[0] > 1
        self._sum: GradientSum | None = None
        if links.circle is not None:
            params = [] if stage.weights is None else stage.weights.params
            self._sum = GradientSum(
                params, links.circle, board, stage.compute, stage.weight_gradients
            )

    def _connect(self) -> None:
        stage = self.stages[0]
        self._edges = RankEdges(stage, self.places, self._replicas, self._links, self._board)
        if not self._edges.from_previous:
            self._take_inputs()
        if not self._edges.from_next and not self._links.targets_from:
            self._take_targets()

    def _entrance(self, name: str, stage: Stage) -> Edge:
        place = self.places[stage.index]
        return Edge(name, None, stage.device, stage.compute, place.window + place.microbatches)

    def _streams(self) -> Iterator[Stream]:
        yield from super()._streams()
        for inlet in self._edges.inlets():
            yield inlet.stream

    # A run.

    def run(self, batches: Iterator[object], trace: Observer | None = None) -> Iterator[Result]:
        """Train on what arrives; yields a result per minibatch.

        On the last stage as soon as its loss has been issued, or added up over replicas, on others
        after its update there. Closing the generator ends the run of all ranks if this is rank 0;
        on another rank what is still to come is trained on without being yielded.
        """
        with self._board.run():
            yield from super().run(batches, trace)

    def _begin(self, batches: Iterator[object]) -> None:
        super()._begin(batches)
        self._forwarded = 0  # minibatches whose forwards have all been sent
        self._said_end = self._told_end = False
        self._heard_end: Inlet | None = None
        self._known: dict[int, Header] = {}  # of each minibatch what goes along with it
        self._batch_of: dict[tuple[int, int], Fingerprint] = {}  # microbatch -> its minibatch's
        self._losses: dict[int, float] = {}
        self._own_losses: dict[int, Tensor] = {}
        self._loss_of: dict[tuple[int, int], float] = {}  # microbatch -> its part of the loss
        self._edges.begin()
        if self._sum is not None:
            self._sum.begin()

    def _end(self) -> None:
        if self._sum is not None:
            self._sum.end()
        super()._end()

    def _leave(self) -> None:
        if self._board.rank == 0:
            super()._leave()

    def _steps(self, trace: Observer | None) -> Iterator[Result]:
        stage, board, results = self.stages[0], self._board, self._results
        handlers = watched(trace, stage, self._handlers_of(stage))
        self._say_end()  # the caller may have left the loop
        while (action := stage.cursor.head()) is not None:
            kind, i, j = action
            board.check()
            board.doing(kind.value, "of minibatch", i, "microbatch", self._edges.microbatch(j))
            if kind is Kind.RECEIVE_ACTIVATION and not self._expect_activation(i, j):
                continue
            if kind is Kind.RECEIVE_GRADIENT:
                self._expect_gradient(i, j)
            if kind is Kind.LOSS:
                self._expect_target(i, j)
            if self._sum is not None and kind is Kind.BACKWARD and self._is_last(i, j):
                self._sum.expect()
            if kind is Kind.UPDATE:
                self._before_update(i)
            stage.cursor.advance()
            self._label(kind, i, j)
            self._act(stage, handlers[kind], action)
            self._note(kind, i, j)
            while results:
                board.doing("the caller's loop, which has the result of minibatch", i)
                yield results.popleft()
        board.doing("ending the run")
        self._edges.close(self._heard_end)

    def _is_last(self, i: int, j: int) -> bool:
        """Whether it is the minibatch's last microbatch on this rank."""
        return j == len(self._extent.shares[i]) - 1

    # Batches, and what is heard of them.

    def _pull(self, i: int, j: int) -> None:
        told = self._edges.hear_of_batch()
        if told is not None and told.end:
            self._extent.stop()
            return
        for n, part in enumerate(self._take_batch(i, told)):
            self._hand_in(self._inputs, part.input)
            self._hand_in(self._edges.target_outlet(n) or self._targets, part.target)

    def _take_batch(self, i: int, told: Header | None) -> list[Microbatch]:
        """Take this rank's microbatches of the caller's next batch; empty: there is none.

        Args:
            i: the minibatch.
            told: what rank 0 says of it; None on rank 0.
        """
        try:
            batch = next(self._batches)
        except StopIteration:
            if told is not None:
                raise self._too_few(i) from None
            self._extent.stop()
            return []
        parts = split(batch, i, self._microbatches)
        if told is not None:
            self._check_parts(i, len(parts), told.parts)
        self._check_dealt(i, len(parts))
        known = Header(len(parts), samples_of(parts))
        if self._compares:
            known = known._replace(batch=Fingerprint.of(i, batch))
            if told is not None:
                self._check_batch(i, known.batch, told.batch)
        self._deal(i, known)
        self._edges.tell_of_batch(known)
        return parts[self._edges.replica :: self._edges.count]

    def _deal(self, i: int, known: Header) -> None:
        self._known[i] = known
        shares = shares_of(int(known.value), known.parts)
        self._extent.add(shares[self._edges.replica :: self._edges.count])

    def _check_dealt(self, i: int, parts: int) -> None:
        for k, count in enumerate(self._replicas.counts):
            if parts < count:
                raise ValueError(
                    f"batches[{i}]: it makes {parts} microbatches, and stage {k} has {count} "
                    "replicas, each of which needs one; leave such a minibatch out, or make it "
                    "larger"
                )

    def _check_batch(self, i: int, here: Fingerprint, there: Fingerprint) -> None:
        if not here.matches(there):
            raise ValueError(
                f"batches[{i}]: this is the first one that is not rank 0's, neither by its input "
                "nor by its target; every rank must go through the same batches in the same order: "
                "seed the sampler alike on all of them, as by DataLoader(..., shuffle=True, "
                "generator=torch.Generator().manual_seed(0)), or have the last stage get its "
                "targets from the first, by DistributedPipeline(..., targets_from='first')"
            )

    def _too_few(self, i: int) -> ValueError:
        return ValueError(
            f"batches: they ended after {i} minibatches, rank 0 has more; every rank must be "
            "given the same"
        )

    def _check_parts(self, i: int, here: int, told: int) -> None:
        if here != told:
            raise ValueError(
                f"batches[{i}]: it makes {here} microbatches here and {told} on rank 0; "
                "every rank must be given the same"
            )

    def _expect_activation(self, i: int, j: int) -> bool:
        """Wait for a microbatch; whether there is one."""
        if not self._edges.from_previous:
            return True
        inlet = self._edges.input(j)
        header = inlet.wait()
        if header.end:
            self._heard_end = inlet
            self._extent.stop()
            self._say_end()
            return False
        if j == 0:
            self._begin_minibatch(i, header)
        if self._edges.to_next:
            self._batch_of[i, j] = header.batch
        elif self._targets is not None:  # each microbatch: replicas of the first stage may differ
            self._check_batch(i, self._known[i].batch, header.batch)
        return True

    def _begin_minibatch(self, i: int, told: Header) -> None:
        if self._targets is None:
            self._deal(i, told)
            return
        for part in self._take_batch(i, told):
            self._hand_in(self._targets, part.target)

    def _expect_target(self, i: int, j: int) -> None:
        inlet = self._edges.target(j)
        if inlet is not None and inlet.wait().end:
            raise RuntimeError("the first stage has ended its run, and this one misses a target")

    # Losses. Without replicas the minibatch's goes along with its last gradient, as it is. With
    # them nobody knows it so early: every gradient goes with its own microbatch's part.

    def _expect_gradient(self, i: int, j: int) -> None:
        header = self._edges.gradient(j).wait()
        if header.end:
            raise RuntimeError("the next rank has ended its run, and this one misses a gradient")
        if self._replicas.dealt:
            self._pass_on(i, j, header.value)
            self._losses[i] = self._losses.get(i, 0.0) + header.value
        else:
            self._losses[i] = header.value

    def _pass_on(self, i: int, j: int, loss: float) -> None:
        if self._edges.to_previous:
            self._loss_of[i, j] = loss

    def _hand_out(self, i: int, loss: Tensor) -> None:
        if self._sum is None:
            super()._hand_out(i, loss)
        else:
            self._own_losses[i] = loss

    def _before_update(self, i: int) -> None:
        """Add up over the stage's replicas, then put the norms of all stages together."""
        stage = self.stages[0]
        if self._sum is not None:
            loss = self._own_losses.pop(i, None)
            if loss is not None:
                self._losses[i] = loss.item()
            stage.predict.wait(stage.computed)
            total = self._sum.finish(self._losses.get(i, nan), stage.predict)
            self._losses[i] = total
            if loss is not None:
                self._results.append(Result(i, torch.full_like(loss, total)))
        if self._norm is not None:
            stage.give_norm(i)

    def _label(self, kind: Kind, i: int, j: int) -> None:
        """What the neighbours learn along with the tensors."""
        if kind is Kind.SEND_ACTIVATION:
            known = self._known[i]
            batch = self._batch_of.pop((i, j), known.batch)
            self._edges.output(kind, j).label(known._replace(batch=batch))
        elif kind is Kind.SEND_GRADIENT:
            value = (
                self._loss_of.pop((i, j), nan) if self._replicas.dealt else self._losses.get(i, nan)
            )
            self._edges.output(kind, j).label(Header(self._known[i].parts, value))

    def _note(self, kind: Kind, i: int, j: int) -> None:
        """What follows from an action that has been run."""
        if kind is Kind.SEND_ACTIVATION:
            self._forwarded += self._is_last(i, j)
            self._say_end()
        elif kind is Kind.PULL:
            self._say_end()
        elif kind is Kind.BACKWARD:
            if self._sum is not None and self._is_last(i, j):
                self._sum.send_rest()
                self.stages[0].compute.record(self.stages[0].computed)
        elif kind is Kind.UPDATE:
            del self._known[i]
            loss = self._losses.pop(i, nan)
            if self._edges.to_next:
                self._results.append(
                    Result(i, torch.tensor(loss, dtype=torch.float64))
                    if self._share_loss
                    else DistantResult(i)
                )
        elif kind is Kind.LOSS and self._share_loss:
            if self._replicas.dealt:
                self._pass_on(i, j, self._part_of_loss.item())
            elif self._results:
                self._losses[i] = self._results[-1].loss.item()

    # The end.

    def _say_end(self) -> None:
        """To the other replicas once it is known, to the next ranks once they have had all."""
        if self._extent.minibatches is None:
            return
        if not self._told_end:
            self._edges.end_batches()
            self._told_end = True
        if not self._said_end and self._extent.minibatches == self._forwarded:
            self._edges.end_forward()
            self._said_end = True
