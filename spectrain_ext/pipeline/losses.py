"""Computes losses on the last stage, and the metrics of an evaluation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import fsum, nan
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from spectrain_ext.errors import placed
from spectrain_ext.transport import Buffer, callers_stream

from .batch import SplitDim, samples_in, sides_of
from .edges import SharedLosses
from .stage import Stage

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
                f"minibatch {self.index}: its loss is on the last rank; DistributedPipeline(..., "
                "share_loss=True) sends it to all"
            )
        return self._loss

    @property
    def has_loss(self) -> bool:
        """Whether this process knows the ``loss``."""
        return self._loss is not None

    def renumbered(self, index: int) -> Result:
        """Return the same result with another index."""
        return replace(self, index=index)

    def __repr__(self) -> str:
        loss = "loss on the last rank" if self._loss is None else f"loss={self._loss}"
        return f"Result(index={self.index}, {loss})"


class Losses:
    """Computes the losses on the last stage, and queues the results for the caller."""

    _sum: Tensor  # of the parts so far
    _count: Any  # what the sum is divided by, a tensor; None: nothing

    def __init__(
        self,
        last: Stage,
        loss_fn: LossFn,
        results: deque[Result],
        shared: SharedLosses | None = None,
        held: bool = False,
    ) -> None:
        self._last, self._loss_fn, self._results = last, loss_fn, results
        self._shared, self._held = shared, held
        # By minibatch: this replica's loss, count and kept values, until those of the others
        # arrive.
        self.own: dict[int, tuple[Tensor, Tensor | None, Any]] = {}
        self.begin()

    def begin(self, keep: Keep | None = None) -> None:
        self._keep = None if keep is None else partial(_kept, keep)
        self._parts: list[Any] = []  # of the minibatch: what is kept
        self._samples: list[int] = []  # of the minibatch

    def loss(self, i: int, j: int) -> None:
        """Compute a microbatch's loss; the last one of a minibatch completes its result."""
        last, shares = self._last, self._last.cursor.shares[i]
        part, count, kept = last.loss(i, j, self._loss_fn, self._keep)
        self._parts.append(kept)
        if last.divided:
            self._samples.append(last.samples)
        if j == 0:
            self._count = None
        elif (count is None) != (self._count is None):
            raise TypeError(
                "loss_fn must return a pair (sum, count) for all microbatches of a minibatch, or "
                "for none"
            )
        with last.computing():
            self._sum = part if j == 0 else self._sum + part
            if count is not None:
                self._count = count if j == 0 else self._count + count
            mean = self._sum if count is None else mean_of(self._sum, self._count)
        ends = j == len(shares) - 1
        if self._shared is not None:
            self._shared.computed(i, j, part, mean if ends else None)
        if ends:
            self._append_result(i, shares, mean)

    def _append_result(self, i: int, shares: Sequence[float], mean: Tensor) -> None:
        """Make a result that work on the caller's stream may use."""
        last, buffer = self._last, Buffer("result")
        parts, self._parts = self._parts, []
        if last.divided:
            shares = self._samples
        self._samples = []
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

    def end(self) -> None:
        self.own.clear()


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


# Metrics of an evaluation.

#: What one process has measured, as JSON types: the samples of all batches; by function, a sum and
#: its divisor for each batch; by metric with a state, its value.
Measured = tuple[int, dict[str, list[tuple[float, float]]], dict[str, float]]


class Measures:
    def __init__(self, metrics: Mapping[str, Any], distributed: bool, split_dim: SplitDim) -> None:
        if not isinstance(metrics, Mapping):
            raise TypeError(
                f"metrics: expected a mapping of names to metrics, got {type(metrics).__name__}"
            )
        for name, metric in metrics.items():
            if not isinstance(name, str):
                raise TypeError(f"metrics: expected str as names, got {name!r}")
            if isinstance(metric, type) or not (_has_state(metric) or callable(metric)):
                made = not isinstance(metric, type)  # a class means that the user forgot to call it
                got = type(metric).__name__ if made else f"the class {metric.__name__}"
                raise TypeError(
                    f"metrics[{name!r}]: expected a function (output, target), or an object with "
                    f"update and compute, got {got}"
                )
            if distributed and getattr(metric, "sync_on_compute", False):  # as in torchmetrics
                raise ValueError(
                    f"metrics[{name!r}]: its compute() would wait for all processes, of which one "
                    "has seen all batches; make it with sync_on_compute=False"
                )
        self._metrics, self._target_dim = dict(metrics), sides_of(split_dim)[1]
        self._states = {name: m for name, m in metrics.items() if _has_state(m)}
        self.stateful = bool(self._states)  # then one process has to see all batches
        self._samples: list[int] = []
        self._values: dict[str, list[tuple[Tensor | float, Tensor | float | None]]] = {
            name: [] for name in metrics if name not in self._states
        }
        for metric in self._states.values():
            if callable(reset := getattr(metric, "reset", None)):
                reset()

    def __call__(self, output: Any, target: Any) -> None:
        samples = samples_in(target, self._target_dim)
        samples = samples_in(output) if samples is None else samples
        samples = 1 if samples is None else samples
        if not samples:  # their mean is undefined
            return
        self._samples.append(samples)
        for name, metric in self._metrics.items():
            with placed(f"in metrics[{name!r}]"):
                if name in self._states:
                    metric.update(output, target)
                else:
                    found = metric(output, target)
                    pair = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
                    self._values[name].append(
                        (_number(pair[0]), None if pair[1] is None else _number(pair[1]))
                    )

    def measured(self) -> Measured:
        """Return what has been measured; the CPU waits for it."""
        terms = {
            name: [
                (float(value) * n, float(n)) if count is None else (float(value), float(count))
                for (value, count), n in zip(values, self._samples, strict=True)
            ]
            for name, values in self._values.items()
        }
        computed = {}
        for name, metric in self._states.items():
            if self._samples:
                with placed(f"in metrics[{name!r}]"):
                    computed[name] = float(_number(metric.compute()))
        return sum(self._samples), terms, computed


def _has_state(metric: object) -> bool:
    return hasattr(metric, "update") and hasattr(metric, "compute")


def _number(value: object) -> Tensor | float:
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.detach().reshape(())
        raise ValueError(
            f"expected a 0-d tensor of a real number, or a number, got {value.dtype} of shape "
            f"{tuple(value.shape)}"
        )
    if hasattr(value, "__float__"):
        return float(value)
    raise TypeError(f"expected a 0-d tensor or a number, got {type(value).__name__}")


def means_of(names: Iterable[str], measured: Sequence[Measured]) -> dict[str, float]:
    """Return the metrics over all batches, from the measurements of all processes."""
    if not any(samples for samples, _, _ in measured):
        raise ValueError("batches: expected at least one to evaluate, got none")
    found: dict[str, float] = {}
    for _, mine, computed in measured:
        for name in mine:
            pairs = [pair for _, terms, _ in measured for pair in terms.get(name, ())]
            count = _sum([n for _, n in pairs])
            found[name] = _sum([term for term, _ in pairs]) / count if count else nan
        found.update(computed)
    return {name: found[name] for name in [*names, *found] if name in found}


def _sum(terms: Sequence[float]) -> float:
    try:
        return fsum(terms)  # without rounding: the order does not matter
    except (OverflowError, ValueError):  # infinities of both signs
        return sum(terms)
