"""Computes losses on the last stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from spectrain_ext.errors import placed
from spectrain_ext.rng import RNG_LOCK
from spectrain_ext.transport import Buffer, Point, Receiver, Slot, callers_stream
from spectrain_ext.transport.message import tensors_in
from spectrain_ext.weights.storage import whole

from .compute import missing
from .module_state import ModuleBuffers
from .passes import Handler, hooks
from .source import check_count
from .stage import NOTHING
from .stage_run import StageRun
from .tape import NOTHING_SENT, LossPart, Tape, Targets, called, packed

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


class _Minibatch:
    """The losses of a minibatch's microbatches so far."""

    def __init__(self, targets: Targets) -> None:
        self.targets, self.result = targets, Buffer("result")
        self._losses: Tensor | None = None  # their sum
        self.count: Tensor | None = None  # the divisor of the sum; None: it is the mean
        self.kept: list[Any] = []  # by microbatch, the values of ``keep``
        self.samples: list[int] = []  # by microbatch

    def add(self, loss: Tensor, count: Tensor | None) -> None:
        if self._losses is None:
            self._losses, self.count = loss, count
            return
        if (count is None) != (self.count is None):
            raise TypeError(
                "loss_fn must return a pair (sum, count) for all microbatches of a minibatch, "
                "or for none"
            )
        self._losses = self._losses + loss
        if count is not None and self.count is not None:
            self.count = self.count + count

    @property
    def total(self) -> Tensor:
        assert self._losses is not None
        return self._losses

    def mean(self) -> Tensor:
        return self.total if self.count is None else mean_of(self.total, self.count)


class Losses:
    """Computes the losses of one run on the last stage, and queues the results for the caller."""

    def __init__(
        self,
        last: StageRun,
        loss_fn: LossFn,
        keep: Keep | None,
        results: deque[Result],
        has_count: bool,  # whether ``count`` gives the divisors of the losses in advance
        held: bool,  # whether the results wait for other replicas
    ) -> None:
        self._last, self._loss_fn, self._results = last, loss_fn, results
        self._has_count, self._held = has_count, held
        self._finished = hooks(last.stage.passes, "finished")
        self._keep = keep
        # By minibatch, until the other replicas' arrive: loss, count and kept values.
        self.own: dict[int, tuple[Tensor, Tensor | None, Any]] = {}
        self._now: _Minibatch | None = None
        # Results that the caller has not got: when they are computed, and their memory.
        self._made: dict[int, tuple[Point, Buffer]] = {}

    def loss(self, i: int, j: int) -> None:
        """Compute a microbatch's loss; the last one of a minibatch completes its result."""
        compute, shares = self._last.compute, self._last.cursor.shares[i]
        stage, tape = self._last.stage, compute.tapes[i, j]
        if j == 0:
            edge = self._last.edges.targets[0]
            self._now = _Minibatch(Targets(edge, received_target(edge)))
        now, ends = self._now, j == len(shares) - 1
        assert now is not None
        with stage.computing(writes=(now.targets.slot.buffer, tape.buffer, now.result)):
            now.add(*self._computed(i, j, tape, now, shares[j]))
            now.samples.append(compute.samples)
            if ends:
                mean = now.mean()
                for note in self._finished:
                    note(i, mean)
                loss = (now.total if self._held else mean).clone()  # the graph may need that
                kept = now.kept[0] if now.kept else None
                if len(now.kept) > 1:
                    kept = _joined(now.kept, now.samples if self._has_count else shares)
        if not ends:
            return
        if self._held:
            self.own[i] = loss, now.count, kept
        else:
            self.give(Result(i, loss, kept, now.count), now.result)
        self._now = None

    def _computed(
        self, i: int, j: int, tape: Tape, now: _Minibatch, share: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return a microbatch's part of the loss and its count, and prepare its backward."""
        compute, stage, loss_fn = self._last.compute, self._last.stage, self._loss_fn
        graph, output, target = compute.keeps_graph, tape.output, now.targets.parts[j]
        module_buffers: Sequence[ModuleBuffers] = ()
        with (
            NOTHING if torch.is_grad_enabled() == graph else torch.set_grad_enabled(graph),
            RNG_LOCK,
            stage.random,
            compute.follows,
        ):
            for call in compute.calls:
                call(i, j, loss_fn, NOTHING_SENT)
            if not graph:
                module_buffers = [ModuleBuffers(loss_fn)]
            returned = called(loss_fn, output=output, target=target)
            loss, count = checked_loss(returned, stage.device)
            if self._keep is not None:
                now.kept.append(_kept(self._keep, output, target))
            count = None if self._has_count else count
            # The loss's weight in that of the minibatch; a sum is divided later.
            weight = share if count is None else 1.0
            part = loss.detach() if weight == 1.0 else loss.detach() * weight
            if self._has_count and not weight:
                part = part * nan  # the mean of nothing
            for note in compute.lost:
                note(i, j, part)
        if graph:
            check_dependence(loss, output)
        again = partial(_loss_again, loss_fn, target, stage.device)
        made = LossPart(now.targets, weight, count, module_buffers, again)
        tape.receive_loss(made, loss if graph else output)
        return part, count

    def give(self, result: Result, buffer: Buffer) -> None:
        """Queue a result whose tensors are computed where the stage computes."""
        self._made[result.index] = self._last.stage.compute.mark(), buffer
        self._results.append(result)

    def deliver(self, result: Result) -> None:
        """Let work on the caller's stream use a result."""
        stage = self._last.stage
        computed, buffer = self._made.pop(result.index)
        if not stage.immediate:
            caller = callers_stream(stage.device)
            caller.wait(computed)
            caller.reads(buffer)
            tensors = (result._loss, result.count, *tree_leaves(result.kept))
            given = [tensor for tensor in tensors if tensor is not None]
            caller.lend([tensor for tensor in given if tensor.device == stage.device])


def measuring(last: StageRun, measure: Callable[..., Any]) -> Handler:
    """Return the step of an evaluation that measures an output of the last stage."""
    stage, compute, edges = last.stage, last.compute, last.edges

    def step(i: int, j: int) -> None:
        tape, slot = compute.tapes.pop((i, j)), received_target(edges.targets[j])
        message, writes = slot.message, (slot.buffer, tape.buffer)
        with stage.computing(writes=writes), torch.no_grad(), RNG_LOCK, compute.numbers:
            copies = [None if t is None else t.clone() for t in message.tensors]
            called(measure, output=tape.output, target=packed(message, copies))
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


def _loss_again(
    loss_fn: Callable[..., Any], target: Any, device: torch.device, output: Any
) -> Tensor:
    loss, _ = checked_loss(loss_fn(output, target), device)
    check_dependence(loss, output)
    return loss


# Checks.


def checked_loss(returned: object, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the loss, a real 0-d tensor, and its count if it is a sum."""
    loss: Any = returned
    count: Any = None
    if isinstance(returned, tuple) and len(returned) == 2:
        loss, count = returned
    loss, count = whole(loss), whole(count)
    if not isinstance(loss, Tensor):
        raise TypeError(
            "loss_fn must return a 0-d tensor, or a pair (sum, count), got a "
            f"{type(returned).__name__}: return the tensor, not its item(), or a tuple of two"
        )
    if loss.is_complex():
        raise TypeError(f"loss_fn must return a real number, got {loss.dtype}: take its abs()")
    if loss.dim():
        raise ValueError(
            "loss_fn must return a scalar (a 0-d tensor), got shape "
            f"{tuple(loss.shape)}: take its mean"
        )
    if count is None:
        return loss, None
    # The count becomes a float64 tensor, without a CPU wait for the device.
    if isinstance(count, Tensor) and count.numel() == 1 and not count.is_complex():
        if count.requires_grad:
            raise ValueError(
                "loss_fn returned a pair, which is (sum, count), and the count requires a "
                "gradient: return two losses as one, their sum, and a sum of weights without its "
                "graph, by detach()"
            )
        if not count.is_cpu:
            return loss, count.detach().reshape(()).to(device, torch.float64, non_blocking=True)
        count = count.item()
    if isinstance(count, (int, float)):
        check_count(count, "loss_fn returned a pair, which is (sum, count), and the count")
        return loss, torch.full((), count, dtype=torch.float64, device=device)
    what = f"shape {tuple(count.shape)}" if isinstance(count, Tensor) else type(count).__name__
    raise TypeError(
        f"the count of a pair (sum, count) must be a number or a 0-d tensor, got {what}; keep= "
        "takes what is returned beside a loss"
    )


def check_dependence(loss: Tensor, output: object) -> None:
    """Raise ValueError if the loss does not depend on the output by autograd."""
    if not loss.requires_grad and any(tensor.requires_grad for tensor in tensors_in(output)):
        raise ValueError(
            "loss_fn returned a loss that does not depend on the output by autograd: compute it "
            "from the output, without detach(), no_grad() or argmax()"
        )
