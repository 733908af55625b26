"""Defines what a pass may use of a stage, of a run, and of the processes that a pipeline spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spectrain_ext.rng import StageRandom
from spectrain_ext.schedule import Replicas
from spectrain_ext.transport import Buffer, Stream
from spectrain_ext.weights import StageWeights

from .norms import GlobalNorm


class StageView(Protocol):
    """A stage, which lasts as long as its pipeline.

    On CUDA the CPU issues work to two streams: ``compute`` for forwards and backwards, ``predict``
    for loads and updates. The contexts below are on the right one, after all earlier uses of what
    they read and write.

    Attributes:
        index: its number, from 0.
        module: what computes; ``device``: where it is.
        weights: None if it has nothing to train. ``params`` are its trainable parameters,
            ``optimizer`` theirs, ``newest()`` the true weights, which ``move(weights)`` changes
            right after an update, for a pass that sets ``moves_weights``. ``keep()`` keeps the
            weights that the module has now: it returns them by parameter, and what lets them go.
            ``rate_factor`` is the method's factor on the learning rates of the next update.
        random: its random numbers.
        late: the updates by which its gradients are late under the present method.
        recomputes: whether backwards run its forward again.
        compute, predict: its streams.
        weight_gradients, module_buffers: stand for this memory.
    """

    index: int
    module: nn.Module
    device: torch.device
    weights: StageWeights | None
    random: StageRandom
    late: int
    recomputes: bool
    compute: Stream
    predict: Stream
    weight_gradients: Buffer
    module_buffers: Buffer

    @property
    def passes(self) -> Sequence[Any]:
        """Its copies of the passes, which are ``Pass`` objects."""

    @property
    def memory(self) -> tuple[Buffer, ...]:
        """All versions of the weights, and the optimizer's state."""

    @property
    def skips(self) -> bool:
        """Whether a pass leaves out the update of the minibatch that the stage is finishing."""

    def changing_gradients(self, wide: bool = False) -> AbstractContextManager[list[Tensor]]:
        """Allow changes of gradients, and reads of weights, between a backward and the update.

        ``wide``: first give gradients the dtype of their true weights, see ``master_dtype``.
        Yields the gradients of the stage's trainable parameters, without those that have none.
        """

    def reading(self) -> AbstractContextManager[None]:
        """Allow reads of weights and optimizer state in a ``with`` block."""

    def computing(
        self, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = (), weights: bool = False
    ) -> AbstractContextManager[object]:
        """Issue work to ``compute`` in a ``with`` block, for these buffers."""

    def weights_written(self) -> None:
        """Order later computation after all weights written so far."""


class RunView(Protocol):
    """A stage in one run.

    Attributes:
        trains: whether it is a training.
        norm: what all stages exchange before an update, under a schedule that flushes, if a pass
            defines ``tells``; else None, unless clipping needs it.
    """

    trains: bool
    norm: GlobalNorm | None

    @property
    def is_first(self) -> bool:
        """Whether no gradient goes back from here."""

    @property
    def is_last(self) -> bool:
        """Whether the stage computes losses."""

    @property
    def divisor(self) -> Tensor | None:
        """The divisor of the loss of the minibatch that is being finished; None: it is a mean."""

    def number_of(self, i: int) -> int:
        """Return a minibatch's number in all runs, without those of which nothing remained."""

    def microbatches_of(self, i: int) -> int:
        """Return how many microbatches of a minibatch this replica of the stage has."""

    def microbatch_of(self, j: int) -> int:
        """Return the number, in the minibatch, of the j-th microbatch of this replica."""

    def input_gradients(self) -> tuple[list[Tensor], Buffer]:
        """Return what the next send gives back, and the buffer that stands for its memory."""


class ProcessesView(Protocol):
    """The processes of a pipeline.

    Attributes:
        replicas: how many replicas each stage has (``counts``), and whether any has several
            (``dealt``).
        sharded: whether parameters are DTensors, of tensor parallelism.
    """

    replicas: Replicas
    sharded: bool

    def largest(self, number: float) -> float:
        """Return the largest of the numbers that a stage's replicas give."""

    def exchange(self, message: Tensor) -> Callable[[], Sequence[Tensor]]:
        """Begin to send a message to a stage's replicas; the call waits for theirs, in order."""
