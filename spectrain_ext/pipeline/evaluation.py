"""Evaluation: forwards of the true weights through the stages, and what is measured of them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from math import fsum, lcm
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from spectrain_ext.errors import placed
from spectrain_ext.rng import TURN
from spectrain_ext.schedule import Place, Replicas, forwards
from spectrain_ext.transport import Buffer, Message, tensors_in

from .batch import SplitDim, samples_in, sides_of
from .cursor import Cursor, Extent
from .executor import Executor
from .stage import Stage
from .tape import Tape, activation, value_of


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


# The stages.


class EvaluatingStage(Stage):
    """A stage that only goes forward, with the weights that the module holds, and without a graph.

    Between its begin and its end the module is in evaluation; then all of its modes are as before.
    Streams, edges, random numbers and buffers are others than those of training.

    Args:
        stage: the one that trains.
        evaluates: whether the module is in evaluation meanwhile; where not, it keeps its mode, and
            draws from the caller's random numbers.
    """

    def __init__(self, stage: Stage, evaluates: bool) -> None:
        super().__init__(stage.index, stage.module, stage.device, None)
        self._no_weights, self.module_buffers = stage.working, stage.module_buffers
        self._evaluates = evaluates
        self._modes: list[tuple[nn.Module, bool]] = []
        self._switched = False
        self._numbers: AbstractContextManager[object] = self.random if evaluates else nullcontext()

    def begin(self, cursor: Cursor, extent: Extent) -> None:
        super().begin(cursor, extent)
        if self._evaluates:
            self._modes = [(module, module.training) for module in self.module.modules()]
            if any(training for _, training in self._modes):
                self.module.eval()
                self._switched = True

    def end(self) -> None:
        try:
            if self._switched and self._modes[0][1]:
                self.module.train()  # which may do more than to set what follows
            self._switched = False
        finally:
            for module, training in self._modes:
                if module.training != training:
                    module.training = training
            super().end()

    def forward(self, i: int, j: int) -> None:
        """Compute the output; the receive buffer of the input is then free."""
        slot = self._received
        message = slot.message
        assert message is not None
        tape, compute = Tape(slot), self.compute
        writes = (slot.buffer, self.module_buffers, tape.buffer)  # an in-place layer, running sums
        with (
            compute.using(reads=(self.working,), writes=writes),
            torch.no_grad(),
            TURN,
            self._numbers,
        ):
            tape.output = _apart(self.module(value_of(message)), message)
        compute.record(self.computed)
        self.inputs.free(slot)
        self._tapes[i, j] = tape

    def send_activation(self, i: int, j: int) -> None:
        """Copy the output to the next stage, and let go of it."""
        assert self.to_next is not None
        tape = self._tapes.pop((i, j))
        message = activation(tape.output)
        read = self.to_next.send(message, tape.buffer, self.computed)
        self._in_transit.hold(read, tape.buffer, message)

    def loss(self, i: int, j: int, loss_fn: Callable[..., Any]) -> Tensor:
        """Have the output measured, which is no loss."""
        tape, target = self._with_target(i, j)
        message, compute = tape.target.message, self.compute
        assert message is not None
        assert self.targets is not None
        writes = tape.target.buffer, tape.buffer
        with compute.using(writes=writes), torch.no_grad(), TURN, self._numbers:
            loss_fn(tape.output, _apart(target, message))
            nothing = torch.zeros((), device=self.device)
        compute.record(self.computed)
        self.targets.free(tape.target)
        compute.writes(self._tapes.pop((i, j)).buffer)  # freed
        return nothing

    # What comes back says that a batch is through, and is empty.

    def receive_gradient(self, i: int, j: int) -> None:
        assert self.gradients is not None
        self.gradients.free(self.gradients.receive())

    def send_gradient(self, i: int, j: int) -> None:
        assert self.to_previous is not None
        self.to_previous.send(Message((), False), Buffer("nothing"), self.computed)


def _apart(value: Any, message: Message) -> Any:
    """A value that does not lie in a receive buffer: copies of its tensors that do."""
    lent = {t.untyped_storage().data_ptr() for t in message.tensors if t is not None}

    def lies_there(tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in lent

    def apart(tensor: Tensor) -> Tensor:
        return tensor.clone() if lies_there(tensor) else tensor

    if isinstance(value, Tensor):
        return apart(value)
    value = tree_map_only(Tensor, apart, value)
    if any(map(lies_there, tensors_in(value))):  # in a dataclass, which torch does not look into
        value = copy.deepcopy(value)
    return value


# A run of them.


def evaluating(executor: Executor, measure: Callable[..., Any], evaluates: bool = True) -> Executor:
    """What goes forward with the stages of a pipeline, once.

    Args:
        executor: of the pipeline; it does not run.
        measure: is given the output and the target of every batch, where the last stage is.
        evaluates: see ``EvaluatingStage``.
    """
    around, seats = executor._around, executor._around.seats
    stages: list[Stage] = [EvaluatingStage(stage, evaluates) for stage in executor.stages]
    parts = [lcm(*seats.counts) // count for count in seats.counts]
    # Two minibatches more than the next stage has, which hides the way there and back; a replica
    # without a part in the last one hears of that before anybody misses its word.
    places = [
        Place(k, seats.stages, (2 * (seats.stages - k) - 1) * part, part)
        for k, part in enumerate(parts)
    ]
    return Executor(stages, places, forwards, around.evaluating(stages, places, measure))


def minibatches(batches: Iterable[object], seats: Replicas, alone: bool) -> Iterator[object]:
    """What an evaluation takes for minibatches: the caller's batches, one by one.

    Replicas get tuples of batches, to deal them out; ``alone``: of one, for the first replicas.
    """
    given = iter(batches)
    if not seats.dealt:
        return given
    each = 1 if alone else lcm(*seats.counts)
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
