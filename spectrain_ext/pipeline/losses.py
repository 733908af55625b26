"""Computes losses on the last stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from spectrain_ext.errors import placed
from spectrain_ext.transport import Buffer, callers_stream

from .passes import hooks
from .stage_run import StageRun

#: ``(output, target) -> loss``, or a pair (sum, count).
LossFn = Callable[..., Tensor | tuple[Tensor, Tensor | float]]
#: ``(output, target) -> what a result carries``: a tensor, or a dict or tuple of tensors.
Keep = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one minibatch.

    Attributes:
        index: the minibatch's number within the run, counted from 0.
        loss: the loss of its forward, a detached 0-d tensor on the last stage's device. On CUDA the
            caller's current stream waits for it; the CPU does not.
        kept: what ``run(..., keep=...)`` returned, ordered like the loss. None without ``keep``,
            and on ranks without the last stage.
        count: what the loss is the mean over, such as tokens, if ``loss_fn`` returns pairs (sum,
            count): a 0-d float64 tensor, ordered like the loss. None for other losses, and on ranks
            without the last stage.

    Example:
        >>> stages = [nn.Linear(2, 2), nn.Linear(2, 1)]
        >>> sgd = lambda params: st.optim.SGD(params, lr=0.1)
        >>> pipe = st.Pipeline(stages, sgd, nn.functional.mse_loss)
        >>> (result,) = pipe.run([(torch.ones(4, 2), torch.ones(4, 1))])
        >>> result.index, result.has_loss, result.loss.shape
        (0, True, torch.Size([]))
        >>> pipe.release()
    """

    index: int
    _loss: Tensor | None = None
    kept: Any = None
    count: Tensor | None = None

    @property
    def loss(self) -> Tensor:
        """The loss of the minibatch's forward.

        Raises:
            RuntimeError: this rank of a ``DistributedPipeline`` does not have the last stage.
        """
        if self._loss is None:
            raise RuntimeError(
                f"minibatch {self.index}: its loss is on the last rank; the pass ShareLoss "
                "sends it to all"
            )
        return self._loss

    @property
    def has_loss(self) -> bool:
        """Whether this process knows the ``loss``."""
        return self._loss is not None

    def __repr__(self) -> str:
        loss = "loss on the last rank" if self._loss is None else f"loss={self._loss}"
        return f"Result(index={self.index}, {loss})"


class Losses:
    """Computes the losses of one run on the last stage, and queues the results for the caller."""

    _sum: Tensor  # of the parts so far
    _count: Any  # what the sum is divided by, a tensor; None: nothing

    def __init__(
        self,
        last: StageRun,
        loss_fn: LossFn,
        keep: Keep | None,
        results: deque[Result],
        counted: bool,  # whether ``count`` gives the divisors of the losses in advance
        held: bool,  # whether the results wait for other replicas
    ) -> None:
        self._last, self._loss_fn, self._results = last, loss_fn, results
        self._counted, self._held = counted, held
        self._finished = hooks(last.stage.passes, "finished")
        self._keep = None if keep is None else partial(_kept, keep)
        # By minibatch, until the other replicas' arrive: loss, count and kept values.
        self.own: dict[int, tuple[Tensor, Tensor | None, Any]] = {}
        self._parts: list[Any] = []  # of the minibatch: what is kept
        self._samples: list[int] = []  # of the minibatch

    def loss(self, i: int, j: int) -> None:
        """Compute a microbatch's loss; the last one of a minibatch completes its result."""
        last, shares = self._last, self._last.cursor.shares[i]
        part, count, kept = last.compute.loss(i, j, self._loss_fn, self._keep)
        self._parts.append(kept)
        self._samples.append(last.compute.samples)
        if j == 0:
            self._count = None
        elif (count is None) != (self._count is None):
            raise TypeError(
                "loss_fn must return a pair (sum, count) for all microbatches of a minibatch, or "
                "for none"
            )
        ends = j == len(shares) - 1
        with last.stage.computing():
            self._sum = part if j == 0 else self._sum + part
            if count is not None:
                self._count = count if j == 0 else self._count + count
            mean = self._sum if count is None else mean_of(self._sum, self._count)
            if ends:
                for note in self._finished:
                    note(i, mean)
        if ends:
            self._append_result(i, self._samples if self._counted else shares, mean)

    def _append_result(self, i: int, shares: Sequence[float], mean: Tensor) -> None:
        """Make a result that work on the caller's stream may use."""
        last, buffer, parts = self._last.stage, Buffer("result"), self._parts
        self._parts, self._samples = [], []
        with last.computing(writes=(buffer,)):
            loss = (self._sum if self._held else mean).clone()  # the graph may need the original
            count, kept = self._count, parts[0]
            if len(parts) > 1 and self._keep is not None:
                kept = _joined(parts, shares)
        if not last.immediate:
            last.compute.record(last.computed)
            caller = callers_stream(last.device)
            caller.wait(last.computed)
            caller.reads(buffer)
            given = [tensor for tensor in (loss, count, *tree_leaves(kept)) if tensor is not None]
            caller.lend([tensor for tensor in given if tensor.device == last.device])
        if self._held:
            self.own[i] = loss, count, kept
        else:
            self._results.append(Result(i, loss, kept, count))


def mean_of(total: Tensor, count: Tensor) -> Tensor:
    """Return total / count in the sum's dtype; nan for a count of 0."""
    return (total / count).to(total.dtype)


def _kept(keep: Keep, output: Any, target: Any) -> Any:
    """Return ``keep``'s value without a graph, in memory of its own."""
    with torch.no_grad(), placed("in keep"):
        value = keep(output, target)
        for leaf in tree_leaves(value):
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    "keep must return a tensor, or a dict or tuple of tensors, got a "
                    f"{type(leaf).__name__}"
                )
        return tree_map(lambda tensor: tensor.detach().clone(), value)


def _joined(parts: list[Any], shares: Sequence[float]) -> Any:
    """Return the mean of 0-d tensors, weighted by shares; concatenate other tensors."""
    total = sum(shares)

    def join(*tensors: Tensor) -> Tensor:
        if tensors[0].dim():
            return torch.cat(tensors)
        weighted = [t * (share / total) for t, share in zip(tensors, shares, strict=True)]
        return torch.stack(weighted).sum()

    return tree_map(join, *parts)
