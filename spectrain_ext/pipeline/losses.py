"""Losses: a minibatch's loss is the sum of its microbatches', and goes out to the caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from spectrain_ext.transport import Buffer, Transit, callers_stream

from .cursor import Extent
from .stage import Stage

LossFn = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, init=False)
class Result:
    """One minibatch of a run.

    Attributes:
        index: its number within the run, counted from 0.
        loss: the loss of its forward, a detached 0-d tensor on the last stage's device. On CUDA the
            caller's current stream is ordered after its computation; the host has not waited.
    """

    index: int
    _loss: Tensor | None = field(repr=False)

    def __init__(self, index: int, loss: Tensor | None) -> None:
        object.__setattr__(self, "index", index)
        object.__setattr__(self, "_loss", loss)

    @property
    def loss(self) -> Tensor:
        """The loss of its forward.

        Raises:
            RuntimeError: of a ``DistributedPipeline``, only the ranks of the last stage have it.
        """
        if self._loss is None:
            raise RuntimeError(
                f"minibatch {self.index}: its loss is on the last rank; DistributedPipeline(..., "
                "share_loss=True) sends it to all"
            )
        return self._loss

    def renumbered(self, index: int) -> Result:
        """The same result under another number."""
        return Result(index, self._loss)

    def __repr__(self) -> str:
        loss = "loss on the last rank" if self._loss is None else f"loss={self._loss}"
        return f"Result(index={self.index}, {loss})"


class Losses:
    """What the last stage computes the losses with, and the results that wait for the caller.

    Args:
        last: the last stage.
        loss_fn: ``(output, target) -> 0-d tensor``.
        depth: results whose memory the caller may still be reading.
        held: where losses wait for those of the stage's other replicas; None: there are none.

    Attributes:
        results: in order.
        part: the last microbatch's loss, times its share of the minibatch.
    """

    part: Tensor
    _sum: Tensor  # of the minibatch's parts so far
    _buffer: Buffer  # the memory of these
    _extent: Extent

    def __init__(
        self,
        last: Stage,
        loss_fn: LossFn,
        depth: int,
        held: dict[int, Tensor] | None = None,
    ) -> None:
        self.results: deque[Result] = deque()
        self._last = last
        self._loss_fn = loss_fn
        self._out = Transit(last.compute, depth)
        self._held = held

    def begin(self, extent: Extent) -> None:
        self._extent = extent

    def loss(self, i: int, j: int) -> None:
        """Compute a microbatch's loss; with the last one's the minibatch has its result."""
        loss = self._last.loss(i, j, self._loss_fn)
        shares = self._extent.shares[i]
        if j == 0:
            self._buffer = Buffer("loss")
        with self._last.compute.using(writes=(self._buffer,)):
            self.part = loss if shares[j] == 1.0 else loss * shares[j]
            self._sum = self.part if j == 0 else self._sum + self.part
        if j < len(shares) - 1:
            return
        if self._held is None:
            self._hand_out(i, self._sum)
        else:
            self._held[i] = self._sum

    def _hand_out(self, i: int, loss: Tensor) -> None:
        """Give the caller a loss in memory of its own stream."""
        last, buffer = self._last, self._buffer
        last.compute.record(last.computed)
        caller = callers_stream(last.device)
        caller.wait(last.computed)
        caller.reads(buffer)
        self.results.append(Result(i, loss.clone()))
        read = caller.event()
        caller.record(read)
        self._out.hold(read, buffer, loss)

    def end(self) -> None:
        """Forget the results that nobody has taken; may be repeated."""
        self.results.clear()
        self._out.reset()
