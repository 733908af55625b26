"""Computes losses on the last stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from spectrain_ext.errors import placed
from spectrain_ext.rng import RNG_LOCK
from spectrain_ext.transport import Buffer, Message, Receiver, Slot, callers_stream
from spectrain_ext.weights.storage import whole

from .edges import missing
from .passes import Handler, hooks
from .stage import NOTHING
from .stage_run import StageRun
from .tape import (
    ModuleBuffers,
    Tape,
    Targets,
    called,
    check_dependence,
    checked_loss,
    packed,
)

NO_INPUTS = Message(())

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

    _targets: Targets  # of the minibatch
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
        self._keep = keep
        # By minibatch, until the other replicas' arrive: loss, count and kept values.
        self.own: dict[int, tuple[Tensor, Tensor | None, Any]] = {}
        self._parts: list[Any] = []  # of the minibatch: what is kept
        self._samples: list[int] = []  # of the minibatch

    def loss(self, i: int, j: int) -> None:
        """Compute a microbatch's loss; the last one of a minibatch completes its result."""
        compute, shares = self._last.compute, self._last.cursor.shares[i]
        stage, tape = self._last.stage, compute.tapes[i, j]
        if j == 0:
            self._targets, self._count = self._receive_targets(), None
        targets = tape.targets = self._targets
        tape.arrived, tape.target = targets.slot, targets.parts[j]
        with stage.computing(writes=(tape.arrived.buffer, tape.buffer)):
            part, count = self._computed(i, j, tape, shares[j])
            if j and (count is None) != (self._count is None):
                raise TypeError(
                    "loss_fn must return a pair (sum, count) for all microbatches of a minibatch, "
                    "or for none"
                )
            self._sum = part if j == 0 else self._sum + part
            if count is not None:
                self._count = count if j == 0 else self._count + count
            if j == len(shares) - 1:
                mean = self._sum if count is None else mean_of(self._sum, self._count)
                for note in self._finished:
                    note(i, mean)
        if not stage.immediate:
            stage.compute.record(stage.computed)
        self._samples.append(compute.samples)
        if j == len(shares) - 1:
            self._append_result(i, self._samples if self._counted else shares, mean)

    def _receive_targets(self) -> Targets:
        edge = self._last.edges.targets[0]
        slot = received_target(edge)
        with self._last.stage.computing(reads=(slot.buffer,)):
            return Targets(edge, slot)

    def _computed(self, i: int, j: int, tape: Tape, share: float) -> tuple[Tensor, Tensor | None]:
        """Return a microbatch's part of the loss and its count, and prepare its backward."""
        compute, stage, loss_fn = self._last.compute, self._last.stage, self._loss_fn
        graph = compute.keeps_graph
        with (
            NOTHING if torch.is_grad_enabled() == graph else torch.set_grad_enabled(graph),
            RNG_LOCK,
            stage.random,
            compute.follows,
        ):
            for call in compute.calls:
                call(i, j, loss_fn, NO_INPUTS)
            if not graph:
                tape.module_buffers.append(ModuleBuffers(loss_fn))
                tape.loss_fn = loss_fn
            returned = called(loss_fn, output=tape.output, target=tape.target)
            loss, count = checked_loss(returned, stage.device)
            if self._keep is not None:
                self._parts.append(_kept(self._keep, tape.output, tape.target))
            tape.count = None if self._counted else count
            # The loss's weight in that of the minibatch; a sum is divided later.
            weight = tape.weight = share if tape.count is None else 1.0
            part = loss.detach() if weight == 1.0 else loss.detach() * weight
            if self._counted and not weight:
                part = part * nan  # the mean of nothing
            for note in compute.lost:
                note(i, j, part)
        if graph:
            check_dependence(loss, tape.output)
            tape.output = loss
        return part, tape.count

    def _append_result(self, i: int, shares: Sequence[float], mean: Tensor) -> None:
        """Make a result that work on the caller's stream may use."""
        last, buffer, parts = self._last.stage, Buffer("result"), self._parts
        self._parts, self._samples = [], []
        with last.computing(writes=(buffer,)):
            loss = (self._sum if self._held else mean).clone()  # the graph may need the original
            count, kept = self._count, parts[0] if parts else None
            if len(parts) > 1:
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


def measuring(last: StageRun, measure: Callable[..., Any]) -> Handler:
    """Return the step of an evaluation that measures an output of the last stage."""
    stage, compute, edges = last.stage, last.compute, last.edges

    def step(i: int, j: int) -> None:
        tape, slot = compute.tapes.pop((i, j)), received_target(edges.targets[j])
        message, writes = slot.message, (slot.buffer, tape.buffer)
        with stage.computing(writes=writes), torch.no_grad(), RNG_LOCK, compute.numbers:
            copies = [None if t is None else t.clone() for t in message.tensors]
            called(measure, output=tape.output, target=packed(message, copies))
        stage.compute.record(stage.computed)
        edges.targets[j].free(slot)
        stage.compute.writes(tape.buffer)  # freed

    return step


def received_target(edge: Receiver) -> Slot:
    return edge.receive() or missing("the run has ended where batches come in, and a target")


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
        return tree_map(lambda tensor: whole(tensor).detach().clone(), value)


def _joined(parts: list[Any], shares: Sequence[float]) -> Any:
    """Return the mean of 0-d tensors, weighted by shares; concatenate other tensors."""
    total = sum(shares)

    def join(*tensors: Tensor) -> Tensor:
        if tensors[0].dim():
            return torch.cat(tensors)
        weighted = [t * (share / total) for t, share in zip(tensors, shares, strict=True)]
        return torch.stack(weighted).sum()

    return tree_map(join, *parts)
