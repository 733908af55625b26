"""Evaluates a pipeline: forwards of several batches in flight, and metrics of their outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import fsum, lcm, nan
from typing import Any

import torch
from torch import Tensor

from spectrain_ext.errors import placed
from spectrain_ext.method import find_method
from spectrain_ext.schedule import Place, Replicas
from spectrain_ext.weights.storage import whole

from .applied_method import AppliedMethod
from .batch import SplitDim, microbatches_in, samples_in, sides_of
from .processes import Processes
from .source import BatchSettings
from .wires import Wires


def evaluated(
    pipe: Any, batches: Iterable[object] | None, metrics: Mapping[str, Any] | None
) -> dict[str, float]:
    """Measure a pipeline; see ``Pipeline.evaluate``."""
    replicas, split_dim = pipe._processes.replicas, pipe._batches.split_dim
    chosen = {"loss": pipe._loss_fn} if metrics is None else metrics
    measures = _Measures(chosen, replicas.total > len(pipe.devices), split_dim)
    own_batches = pipe._own_batches(batches)
    alone = _one_replica_works(pipe, measures.stateful)
    # A loader draws random numbers when its iterator is made.
    with torch.random.fork_rng({device for device in pipe.devices if device.type == "cuda"}):
        pipe._forward_all(minibatches(own_batches, replicas, alone), measures)
    of_ranks = pipe._gather_from_ranks(measures.measured, "sharing the metrics of an evaluation")
    # Ranks that share a replica have measured the same.
    return _means_of(chosen, [of_ranks[r] for r in dict.fromkeys(row[0] for row in replicas.rows)])


def _one_replica_works(pipe: Any, stateful: bool) -> bool:
    """Whether the first replica of every stage evaluates alone."""
    stages, replicas = pipe._wires.stages, pipe._processes.replicas
    if not replicas.dealt:
        return False

    def state() -> list[Any]:
        # The module buffers of the first replica, such as running statistics, belong to the model.
        digests = []
        for stage in stages:
            buffers = [(name, digest_of(value)) for name, value in stage.module.named_buffers()]
            digests.append((stage.index, hashlib.sha256(repr(buffers).encode()).hexdigest()))
        return [stateful, digests]

    of_ranks = pipe._gather_from_ranks(state, "evaluate")
    differ = len({tuple(pair) for _, pairs in of_ranks for pair in pairs}) > replicas.stages
    # A metric with a state must see all batches.
    return differ or (replicas.counts[-1] > 1 and any(one for one, _ in of_ranks))


def wires_of(training: Wires, processes: Processes, batches: BatchSettings) -> Wires:
    """Return edges for evaluations of the stages that these edges train."""
    replicas = processes.replicas
    parts = [lcm(*replicas.counts) // count for count in replicas.counts]
    # The window limits how far a stage gets ahead of the last one; notices that a batch is finished
    # come back. A window of two more than the next stage's hides the way there and back. A replica
    # that has no batch in the last round learns this before its notice would be missed.
    places = [
        Place(k, replicas.stages, (2 * (replicas.stages - k) - 1) * part, part)
        for k, part in enumerate(parts)
    ]
    applied = AppliedMethod(find_method("vanilla"), places, [None] * len(places), False)
    ties, copies = training.tied
    return Wires(
        stages=training.stages,
        applied=applied,
        processes=processes,
        batches=batches,
        ties=ties,
        copies=copies,
        evaluates=True,  # parts are whole batches of any size
    )


def minibatches(batches: Iterable[object], replicas: Replicas, alone: bool) -> Iterator[object]:
    """Yield tuples of the caller's batches, each of which an evaluation treats as a minibatch."""
    numbered = enumerate(batches)
    cut = ((batch, microbatches_in(batch, f"batches[{n}]")) for n, batch in numbered)
    given = (one for batch, parts in cut for one in ([batch] if parts is None else parts))
    each = 1 if alone else lcm(*replicas.counts)
    return iter(lambda: tuple(islice(given, each)), ())


def digest_of(tensor: Tensor) -> str:
    """Return a digest of a tensor's dtype, shape and bits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(flat.numpy().data).hexdigest()}"


# Metrics.

#: What one process has measured, as JSON types: the samples of all batches; by function, a sum and
#: its divisor for each batch; by metric with a state, its value.
_Measured = tuple[int, dict[str, list[tuple[float, float]]], dict[str, float]]


class _Measures:
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
                    value = metric(output, target)
                    pair = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
                    self._values[name].append(
                        (_number(pair[0]), None if pair[1] is None else _number(pair[1]))
                    )

    def measured(self) -> _Measured:
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
    value = whole(value)
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


def _means_of(names: Iterable[str], measured: Sequence[_Measured]) -> dict[str, float]:
    """Return the metrics over all batches, from the measurements of all processes."""
    if not any(samples for samples, _, _ in measured):
        raise ValueError("batches: expected at least one to evaluate, got none")
    means: dict[str, float] = {}
    for _, mine, computed in measured:
        for name in mine:
            pairs = [pair for _, terms, _ in measured for pair in terms.get(name, ())]
            count = _sum([n for _, n in pairs])
            means[name] = _sum([term for term, _ in pairs]) / count if count else nan
        means.update(computed)
    return {name: means[name] for name in [*names, *means] if name in means}


def _sum(terms: Sequence[float]) -> float:
    try:
        return fsum(terms)  # without rounding: the order does not matter
    except (OverflowError, ValueError):  # infinities of both signs
        return sum(terms)
