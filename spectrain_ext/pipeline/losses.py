"""Losses: a minibatch's loss is the sum of its microbatches', and goes out to the caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from spectrain_ext.errors import placed
from spectrain_ext.transport import Buffer, Transit, callers_stream

from .edges import SharedLosses
from .stage import Stage

LossFn = Callable[..., Tensor]
#: ``(output, target) -> what a result is to carry``: a tensor, or a dict or tuple of tensors.
Keep = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Result:
    """One minibatch of a run.

    Attributes:
        index: its number within the run, counted from 0.
        loss: the loss of its forward, a detached 0-d tensor on the last stage's device. On CUDA the
            caller's current stream is ordered after its computation; the host has not waited.
        kept: what ``run(..., keep=...)`` asked for, ordered like the loss; None where nothing was
            asked for, and on ranks that have not the last stage.
    """

    index: int
    _loss: Tensor | None = None
    kept: Any = None

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

    @property
    def has_loss(self) -> bool:
        """Whether ``loss`` is known here."""
        return self._loss is not None

    def renumbered(self, index: int) -> Result:
        """The same result under another number."""
        return replace(self, index=index)

    def __repr__(self) -> str:
        loss = "loss on the last rank" if self._loss is None else f"loss={self._loss}"
        return f"Result(index={self.index}, {loss})"


class Losses:
    """What the last stage computes the losses with, and the results that wait for the caller.

    Args:
        last: the last stage.
        loss_fn: ``(output, target) -> 0-d tensor``.
        depth: results whose memory the caller may still be reading.
        results: where they wait.
        shared: tells them the other ranks; None: they are told nothing.
        held: whether losses wait for those of the stage's other replicas.

    Attributes:
        own: minibatch -> this replica's loss, where they wait; and what its result will carry.
    """

    _sum: Tensor  # of the minibatch's parts so far
    _buffer: Buffer  # the memory of these

    def __init__(
        self,
        last: Stage,
        loss_fn: LossFn,
        depth: int,
        results: deque[Result],
        shared: SharedLosses | None = None,
        held: bool = False,
    ) -> None:
        self._results = results
        self._last = last
        self._loss_fn = loss_fn
        self._out = Transit(last.compute, depth)
        self._shared, self._held = shared, held
        self.own: dict[int, tuple[Tensor, Any]] = {}
        self._keeper: _Keeper | None = None

    def begin(self, keep: Keep | None = None) -> None:
        self._keeper = None if keep is None else _Keeper(keep, self._loss_fn)
        self._now = self._keeper or self._loss_fn

    def loss(self, i: int, j: int) -> None:
        """Compute a microbatch's loss; with the last one's the minibatch has its result."""
        keeper, shares = self._keeper, self._last.cursor.shares[i]
        if keeper is not None:
            keeper.asked = True
        loss = self._last.loss(i, j, self._now)
        if j == 0:
            self._buffer = Buffer("loss")
        with self._last.compute.using(writes=(self._buffer,)):
            part = loss if shares[j] == 1.0 else loss * shares[j]
            self._sum = part if j == 0 else self._sum + part
        last = j == len(shares) - 1
        if self._shared is not None:
            self._shared.computed(i, j, part, self._sum if last else None)
        if not last:
            return
        kept = None if keeper is None else keeper.take(shares, self._last)
        if self._held:
            self.own[i] = self._sum, kept
        else:
            self._hand_out(i, self._sum, kept)

    def _hand_out(self, i: int, loss: Tensor, kept: Any) -> None:
        """Give the caller a loss in memory of its own stream."""
        last, buffer = self._last, self._buffer
        last.compute.record(last.computed)
        caller = callers_stream(last.device)
        caller.wait(last.computed)
        caller.reads(buffer)
        self._results.append(Result(i, loss.clone(), kept))
        read = caller.event()
        caller.record(read)
        self._out.hold(read, buffer, loss)

    def end(self) -> None:
        """Forget the results that nobody has taken; may be repeated."""
        self.own.clear()
        self._out.reset()


class _Keeper:
    """A loss function that keeps something of every microbatch as well.

    Args:
        keep: makes it.
        loss_fn: the loss.

    Attributes:
        asked: whether the next call is of a forward, not the second one of a recomputation.
    """

    def __init__(self, keep: Keep, loss_fn: LossFn) -> None:
        self.asked = False
        self._keep = keep
        self._loss_fn = loss_fn
        self._parts: list[Any] = []

    def __call__(self, output: Any, target: Any) -> Tensor:
        loss = self._loss_fn(output, target)
        if self.asked:
            self.asked = False
            with torch.no_grad(), placed("in keep"):
                self._parts.append(_copied(self._keep(output, target)))
        return loss

    def take(self, shares: Sequence[float], last: Stage) -> Any:
        """Put the microbatches of a minibatch together, for whoever works on the caller's stream.

        Args:
            shares: of the microbatches.
            last: the last stage.
        """
        parts, self._parts = self._parts, []
        caller = callers_stream(last.device)
        with last.compute.using():
            whole = parts[0] if len(parts) == 1 else _joined(parts, shares)
        last.compute.record(last.computed)
        caller.wait(last.computed)
        caller.lend(tree_leaves(whole))
        return whole


def _copied(value: Any) -> Any:
    """Without its graph, and in memory that nothing else uses."""
    for leaf in tree_leaves(value):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                "keep must return a tensor, or a dict or tuple of tensors, got a "
                f"{type(leaf).__name__}"
            )
    return tree_map(lambda tensor: tensor.detach().clone(), value)


def _joined(parts: list[Any], shares: Sequence[float]) -> Any:
    """The mean of what has no dimensions, weighted by shares; other tensors one after another."""
    total = sum(shares)

    def join(*tensors: Tensor) -> Tensor:
        if tensors[0].dim():
            return torch.cat(tensors)
        weighted = [t * (share / total) for t, share in zip(tensors, shares, strict=True)]
        return torch.stack(weighted).sum()

    return tree_map(join, *parts)
