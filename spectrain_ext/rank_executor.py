"""RankExecutor: runs the actions of one stage, whose neighbours are in other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import nan

import torch
from torch import Tensor

from .executor import Executor, Result
from .rank_norm import RankNorm
from .schedule import Kind, Place
from .stage import Stage
from .trace import Trace
from .transport.board import Board
from .transport.inlet import Inlet
from .transport.neighbours import Neighbours
from .transport.outlet import Outlet


class DistantResult(Result):
    """A minibatch whose loss is on the last rank only."""

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
            f"minibatch {self.index}: its loss is on the last rank; from_process_group(..., "
            "share_loss=True) sends it to all"
        )


class RankExecutor(Executor):
    """The executor of one rank.

    Stage 0 alone decides how long a run is: the message that there are no more minibatches follows
    the last one from rank to rank. Gradients come back with the minibatch's loss, if it is shared.

    Args:
        stage: the rank's stage.
        loss_fn: ``(output, target) -> 0-d tensor``; used on the last rank.
        places: the places of all stages.
        schedule: the name of the order in which they act.
        board: what the ranks know of each other.
        links: the groups that the edges go by.
        share_loss: whether every rank gets the losses.
        norm: where the ranks put their gradients' norms together, None: nowhere.
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
    ) -> None:
        self._board = board
        self._links = links
        self._share_loss = share_loss
        self._from_previous: Inlet | None = None
        self._from_next: Inlet | None = None
        self._to_previous: Outlet | None = None
        self._to_next: Outlet | None = None
        super().__init__([stage], loss_fn, places, schedule, norm)

    def _connect(self) -> None:
        """Make this rank's ends of its edges, with the depths that ``Executor`` gives them."""
        stage, links, board = self.stages[0], self._links, self._board
        device, receiver = stage.device, stage.compute
        if links.from_previous is None or links.to_previous is None:
            self._take_inputs()
        else:
            depth = self.places[stage.index - 1].window + 1
            self._from_previous = Inlet(links.from_previous, device, receiver, depth, board)
            self._to_previous = Outlet(links.to_previous, device, depth, board)
            stage.inputs, stage.to_previous = self._from_previous, self._to_previous
        if links.from_next is None or links.to_next is None:
            self._take_targets()
        else:
            depth = self.places[stage.index].window + 1
            self._from_next = Inlet(links.from_next, device, receiver, depth, board)
            self._to_next = Outlet(links.to_next, device, depth, board)
            stage.gradients, stage.to_next = self._from_next, self._to_next

    # A run.

    def run(self, batches: Iterator[object], trace: Trace | None = None) -> Iterator[Result]:
        """Train on what arrives; yields a result per minibatch.

        On the last rank as soon as its loss has been issued, on others after its update there.
        Closing the generator ends the run of all ranks if this is rank 0; on another rank what is
        still to come is trained on without being yielded.
        """
        with self._board.run():
            yield from super().run(batches, trace)

    def _begin(self, batches: Iterator[object]) -> None:
        super()._begin(batches)
        self._forwarded = 0  # minibatches whose forwards have all been sent
        self._ended = False
        self._losses: dict[int, float] = {}
        for inlet in (self._from_previous, self._from_next):
            if inlet is not None:
                inlet.begin()

    def _leave(self) -> None:
        if self._from_previous is None:
            super()._leave()

    def _steps(self, trace: Trace | None) -> Iterator[Result]:
        stage, board, results = self.stages[0], self._board, self._results
        handlers = self._handlers_of(stage)
        if trace is not None:
            handlers = trace.watch(stage, handlers)
        self._say_end()  # the caller may have left the loop
        while (action := stage.cursor.head()) is not None:
            kind, i, j = action
            board.check()
            board.doing(kind.value, "of minibatch", i, "microbatch", j)
            if kind is Kind.RECEIVE_ACTIVATION and not self._expect_activation(i, j):
                continue
            if kind is Kind.RECEIVE_GRADIENT:
                self._expect_gradient(i)
            if kind is Kind.UPDATE and self._norm is not None:
                stage.give_norm(i)
            stage.cursor.advance()
            self._label(kind, i)
            self._act(stage, handlers[kind], action)
            self._note(kind, i, j)
            while results:
                board.doing("the caller's loop, which has the result of minibatch", i)
                yield results.popleft()
        board.doing("ending the run")
        self._close()

    def _expect_activation(self, i: int, j: int) -> bool:
        """Wait for a microbatch; whether there is one."""
        if self._from_previous is None:
            return True
        header = self._from_previous.wait()
        if header.end:
            self._extent.stop()
            self._say_end()
            return False
        if j == 0:
            self._begin_minibatch(i, header.parts)
        return True

    def _begin_minibatch(self, i: int, parts: int) -> None:
        if self._to_next is not None:
            self._extent.add([1 / parts] * parts)
            return
        here = self._next_batch(i)
        if not here:
            raise ValueError(
                f"batches: they ended after {i} minibatches, rank 0 has more; every rank must be "
                "given the same"
            )
        if len(here) != parts:
            raise ValueError(
                f"batches[{i}]: it makes {len(here)} microbatches here and {parts} on rank 0; "
                "every rank must be given the same"
            )
        for part in here:
            self._hand_in(self._targets, part.target)

    def _expect_gradient(self, i: int) -> None:
        assert self._from_next is not None
        header = self._from_next.wait()
        if header.end:
            raise RuntimeError("the next rank has ended its run, and this one misses a gradient")
        self._losses[i] = header.value

    def _label(self, kind: Kind, i: int) -> None:
        """What the neighbours learn along with the tensors."""
        if kind is Kind.SEND_ACTIVATION and self._to_next is not None:
            self._to_next.label(len(self._extent.shares[i]))
        elif kind is Kind.SEND_GRADIENT and self._to_previous is not None:
            self._to_previous.label(len(self._extent.shares[i]), self._losses.get(i, nan))

    def _note(self, kind: Kind, i: int, j: int) -> None:
        """What follows from an action that has been run."""
        if kind is Kind.SEND_ACTIVATION:
            self._forwarded += j == len(self._extent.shares[i]) - 1
            self._say_end()
        elif kind is Kind.PULL:
            self._say_end()
        elif kind is Kind.UPDATE:
            loss = self._losses.pop(i, nan)
            if self._to_next is not None:
                self._results.append(
                    Result(i, torch.tensor(loss, dtype=torch.float64))
                    if self._share_loss
                    else DistantResult(i)
                )
        elif kind is Kind.LOSS and self._results and self._share_loss:
            self._losses[i] = self._results[-1].loss.item()

    def _say_end(self) -> None:
        """Once the next rank has had all minibatches."""
        if self._to_next is None or self._ended:
            return
        if self._extent.minibatches == self._forwarded:
            self._to_next.end()
            self._ended = True

    def _close(self) -> None:
        """Hear that the next rank has sent all gradients, and say so to the previous one."""
        if self._from_next is not None and not self._from_next.wait().end:
            raise RuntimeError("the next rank sends a gradient that nothing here waits for")
        if self._to_previous is not None:
            self._to_previous.end()
        for outlet in (self._to_previous, self._to_next):
            if outlet is not None:
                outlet.flush()
