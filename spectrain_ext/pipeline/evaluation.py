"""Evaluation: forwards of the true weights through the stages, and what is measured of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from math import fsum, lcm
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from spectrain_ext.errors import placed
from spectrain_ext.schedule import Place, Replicas

from .batch import SplitDim, samples_in, sides_of
from .executor import Executor


@runtime_checkable
class Updated(Protocol):
    """A metric with a state, such as those of torchmetrics."""

    def update(self, output: Any, target: Any) -> object:
        """Take in the outputs of a batch."""

    def compute(self) -> Tensor | float:
        """The metric of all that was taken in."""


#: ``(output, target) -> mean over the samples of a batch``, or an object with a state.
Metric = Callable[[Any, Any], "Tensor | float"] | Updated


# What is measured.


class Measured(NamedTuple):
    """What one process has measured, in JSON's types.

    Attributes:
        samples: of each batch.
        values: by metric, of each batch.
        computed: by metric, of all batches.
    """

    samples: list[int]
    values: dict[str, list[float]]
    computed: dict[str, float]


class Measures:
    """The metrics of an evaluation, where the last stage is.

    Args:
        metrics: by name.
        apart: whether there are other processes, which measure nothing.
        split_dim: along which dimensions batches' samples lie.

    Raises:
        TypeError: not a mapping of names to metrics.
        ValueError: a metric that would wait for the other processes.
    """

    def __init__(
        self, metrics: Mapping[str, Metric], apart: bool = False, split_dim: SplitDim = 0
    ) -> None:
        self._target_dim = sides_of(split_dim)[1]
        if not isinstance(metrics, Mapping):
            raise TypeError(
                f"metrics: expected a mapping of names to metrics, got {type(metrics).__name__}"
            )
        for name, metric in metrics.items():
            if not isinstance(name, str):
                raise TypeError(f"metrics: expected str as names, got {name!r}")
            kind = metric if isinstance(metric, type) else None  # not made yet
            if kind is not None or not (isinstance(metric, Updated) or callable(metric)):
                got = type(metric).__name__ if kind is None else f"the class {kind.__name__}"
                raise TypeError(
                    f"metrics[{name!r}]: expected a function (output, target), or an object with "
                    f"update and compute, got {got}"
                )
            if apart and getattr(metric, "sync_on_compute", False):  # as torchmetrics has it
                raise ValueError(
                    f"metrics[{name!r}]: its compute() would wait for all processes, of which one "
                    "has seen all batches; make it with sync_on_compute=False"
                )
        self._objects = {n: m for n, m in metrics.items() if isinstance(m, Updated)}
        self._functions = {
            n: m for n, m in metrics.items() if not isinstance(m, Updated) and callable(m)
        }
        self._samples: list[int] = []
        self._values: dict[str, list[Tensor | float]] = {name: [] for name in self._functions}
        for metric in self._objects.values():
            if callable(reset := getattr(metric, "reset", None)):
                reset()

    @property
    def stateful(self) -> bool:
        """Whether one process has to see all batches."""
        return bool(self._objects)

    def __call__(self, output: Any, target: Any) -> None:
        """Measure a batch."""
        found = samples_in(target, self._target_dim)
        found = samples_in(output) if found is None else found
        count = 1 if found is None else found
        if not count:  # of which there is no mean
            return
        self._samples.append(count)
        for name, metric in self._functions.items():
            with placed(f"in metrics[{name!r}]"):
                self._values[name].append(_number(metric(output, target)))
        for name, held in self._objects.items():
            with placed(f"in metrics[{name!r}]"):
                held.update(output, target)

    def told(self) -> Measured:
        """What has been measured; waits for it."""
        computed = {}
        for name, held in self._objects.items():
            if self._samples:
                with placed(f"in metrics[{name!r}]"):
                    computed[name] = float(_number(held.compute()))
        return Measured(
            self._samples, {n: list(map(float, v)) for n, v in self._values.items()}, computed
        )


def mean_of(names: Iterable[str], told: Sequence[Measured]) -> dict[str, float]:
    """The metrics of all batches, whichever processes have measured them.

    Means are weighted by samples, and summed without rounding: in any order the same.

    Raises:
        ValueError: nobody has measured a batch.
    """
    total = sum(sum(one.samples) for one in told)
    if not total:
        raise ValueError("batches: expected at least one to evaluate, got none")
    found: dict[str, float] = {}
    for one in told:
        for name in one.values:
            terms = [
                value * samples
                for each in told
                for value, samples in zip(each.values.get(name, ()), each.samples, strict=False)
            ]
            found[name] = _sum(terms) / total
        found.update(one.computed)
    return {name: found[name] for name in [*names, *found] if name in found}


def _sum(terms: Sequence[float]) -> float:
    try:
        return fsum(terms)
    except (OverflowError, ValueError):  # infinities of both signs
        return sum(terms)


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


# A run of the stages.


def evaluator(executor: Executor) -> Executor:
    """What goes forward with the stages of a pipeline: by edges of their own, on their streams."""
    replicas = executor.connections.replicas
    parts = [lcm(*replicas.counts) // count for count in replicas.counts]
    # Two minibatches more than the next stage has, which hides the way there and back; a replica
    # without a part in the last one hears of that before anybody misses its word.
    places = [
        Place(k, replicas.stages, (2 * (replicas.stages - k) - 1) * part, part)
        for k, part in enumerate(parts)
    ]
    # No stage gets ahead of the last one by more than its window: what comes back is the word that
    # a batch is through, with memory for as many messages.
    connections = executor.connections.evaluating(places)
    return Executor(executor.stages, places, "1f1b-async", connections)


def minibatches(batches: Iterable[object], replicas: Replicas, alone: bool) -> Iterator[object]:
    """What an evaluation takes for minibatches: the caller's batches, one by one.

    Replicas get tuples of batches, to deal them out; ``alone``: of one, for the first replicas.
    """
    given = iter(batches)
    if not replicas.dealt:
        return given
    each = 1 if alone else lcm(*replicas.counts)
    return iter(lambda: tuple(islice(given, each)), ())


def digest_of_buffers(module: nn.Module) -> str:
    """The same for modules whose buffers have the same bits."""
    digest = hashlib.blake2b(digest_size=8)
    for name, buffer in module.named_buffers():
        flat = buffer.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{name} {tuple(buffer.shape)} {buffer.dtype}".encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def undisturbed(devices: Iterable[torch.device]) -> Iterator[None]:
    """After it torch's generators are where they were: a loader draws where it begins."""
    generators = [torch.default_generator]
    for device in {device for device in devices if device.type == "cuda"}:
        generators.append(torch.cuda.default_generators[device.index])
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
