"""Defines ``Stage``: what a stage has as long as its pipeline exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from spectrain_ext.optim.guards import SaveGuard
from spectrain_ext.rng import StageRandom
from spectrain_ext.transport import DONE, Buffer, Point, Stream, new_stream
from spectrain_ext.weights import StageWeights
from spectrain_ext.weights.own_writes import OwnWrites
from spectrain_ext.weights.storage import Storage, VersionBuffer

from .names import bare
from .passes import Pass

NOTHING = nullcontext()


class Stage:
    """One stage: its module, weights, random numbers, passes, and two streams.

    One stream computes, the other one predicts and updates weights, except for updates that overlap
    with no computation. What a run does with a stage, and what is half done, is in a ``StageRun``.

    Attributes:
        index: the stage's number, from 0.
        module: the stage.
        device: where it is.
        weights: None if it has no trainable parameters.
        random: its random numbers.
        passes: its copies of the passes of this phase: the pipeline's, then the method's.
        late: the updates by which its gradients are late in this phase.
        recomputes: whether the whole forward runs again before the backward.
        compute, predict: the streams.
        updated_on: that of the last update.
        weight_gradients, optimizer_state, module_buffers: stand for this memory, which the two
            streams and the caller use in turn.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: torch.device,
        weights: StageWeights | None,
        processes: Any,  # see ``Pass.on``
        replica: int = 0,
        recomputes: bool = False,
    ) -> None:
        self.index, self.module, self.device, self.weights = index, module, device, weights
        self.compute = new_stream(f"compute stream of stage {index}", device)
        self.predict = new_stream(f"prediction stream of stage {index}", device)
        self.updated_on = self.predict
        # On the CPU, work is done once it has been issued.
        self.immediate = self.compute.immediate and self.predict.immediate
        self.weight_gradients = Buffer(f"weight gradients of stage {index}")
        self.optimizer_state = Buffer(f"optimizer state of stage {index}")
        self.module_buffers = Buffer(f"module buffers of stage {index}")
        self._shared: tuple[Buffer, ...] = (self.module_buffers,)
        self._no_weights = Buffer(f"weights of stage {index}, which has none")
        # The last update on the compute stream, and whether it and uses of weights are marked.
        self._changed: Point = DONE
        self._marks_uses = False
        self._used = False  # whether this run has computed
        self._lends = False  # weights, to copies in other stages
        self.random = StageRandom(index, device, replica)
        self.recomputes = recomputes
        replicas = processes.replicas.counts[index]
        self._replicated = replicas > 1 and not processes.own_minibatches
        self.guard = SaveGuard(
            "a run of this pipeline has not ended, and its stages may hold predicted weights; do "
            "this inside `with pipe.weights():`, or take the pipeline's own state_dict()"
        )
        self._learning = _learning(module)
        self.guarded: list[nn.Parameter] = []  # in a run: all that learn
        self._aside: list[tuple[nn.Parameter, Tensor]] = []  # gradients, between two results
        self.skipped = 0  # updates that passes have left out, in all runs
        self.undone = 0  # of these, by all stages together: all is as if they had never come
        self.clipped: Tensor | None = None  # the norm that was clipped last, on ``predict``
        self.peak = 0  # the most microbatches in flight at once, in any run
        self.in_place: bool | None = None  # whether the module modifies its input; None: unknown
        self._processes = processes
        self._copies: dict[int, tuple[Pass, Pass]] = {}  # passes and their copies, by id
        self.passes: list[Pass] = []
        self.late = 0

    @property
    def storage(self) -> Storage | None:
        return None if self.weights is None else self.weights.storage

    # Memory and streams.

    @property
    def working(self) -> Buffer:
        """Stands for the memory of the weights that the module has now."""
        storage = self.storage
        return self._no_weights if storage is None else storage.bound.memory

    @property
    def memory(self) -> tuple[Buffer, ...]:
        """All versions of the weights, and the optimizer's state."""
        versions = () if self.storage is None else self.storage.version_buffers()
        return (self.optimizer_state, *(version.memory for version in versions))

    @property
    def shared(self) -> tuple[Buffer, ...]:
        """The memory that the caller may use between two instructions."""
        return (*self.memory, *self._shared)

    def share(self, buffer: Buffer) -> None:
        self._shared = (*self._shared, buffer)

    def note_lending(self) -> None:
        self._lends = True

    @property
    def updates_apart(self) -> bool:
        """Whether passes or other stages use the prediction stream for its updates."""
        return bool(self.passes) or self._lends

    def computing(
        self, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = (), weights: bool = False
    ) -> AbstractContextManager[object]:
        """Issue work to the compute stream in a ``with`` block, for these buffers.

        ``weights``: it reads the working weights too. On the CPU nothing needs ordering.
        """
        if self.immediate:
            return NOTHING
        if weights:
            reads = (self.working, *reads)
            if self._marks_uses and self.storage is not None:
                self.storage.bound.read = DONE  # whoever writes it has to wait for this use
        return self.compute.using(reads=reads, writes=writes)

    def note_use(self) -> None:
        """Note that computation has used the weights that the module has now."""
        self._used = True
        if self._marks_uses and self.storage is not None:
            self.storage.bound.read = self.compute.mark()

    def note_update(self, stream: Stream) -> None:
        self.updated_on = stream
        if self._marks_uses and stream is self.compute:
            self._changed = stream.mark()

    def wait_for_uses(self, *buffers: VersionBuffer, again: bool = True) -> None:
        """Order the prediction stream's next work after updates, and after uses of these buffers.

        ``again``: whether there will probably be more such work. Most stages never have any: their
        updates write all weights. So uses are marked only after this was called once, and until
        then the prediction stream waits for all computation.
        """
        if self._marks_uses:
            for point in (self._changed, *(buffer.read for buffer in buffers)):
                self.predict.wait(point)
        elif self._used:
            self.predict.wait_stream(self.compute)
            self._marks_uses = again and not self.immediate

    @contextmanager
    def changing_gradients(self, wide: bool = False) -> Iterator[list[Tensor]]:
        """Allow changes of gradients, and reads of weights, between a backward and the update.

        ``wide``: first give gradients the dtype of their true weights, see ``master_dtype``.
        Yields the gradients of the stage's trainable parameters, without those that have none.
        """
        params = () if self.weights is None else self.weights.params
        self.predict.wait_stream(self.compute)
        buffers = {"reads": self.memory, "writes": (self.weight_gradients,)}
        with self.predict.using(**buffers), torch.no_grad():
            if wide and self.weights is not None:
                self.predict.lend(self.weights.widen_gradients())
            yield [p.grad for p in params if p.grad is not None]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let an observer read the weights in a ``with`` block, ordered with all writes to them."""
        # Not on the stream that computes: this waits for no other stage and no communication.
        self.wait_for_uses()
        with self.predict.using(reads=self.memory), torch.no_grad():
            yield

    def carry_own_writes(self, own: OwnWrites) -> None:
        """Change the true weights as the module has changed those that it computes with."""
        weights = self.weights
        assert weights is not None
        if self._replicated:
            raise RuntimeError(
                f"parameter {bare(own.written())!r} was changed in place in a forward, and "
                "replicas with other samples would not change it alike; leave that to a hook of "
                "the optimizer's step, or train without replicas"
            )
        self.predict.wait_stream(self.compute)
        with self.predict.using(writes=self.memory), torch.no_grad():
            own.carry_over(weights.versions.version)
        self.weights_written()

    def weights_written(self) -> None:
        """Order later computation after all weights written so far."""
        self.compute.wait_stream(self.predict)

    # Passes.

    def use_passes(self, passes: Sequence[Pass], late: int) -> None:
        """Have these passes from the next run on, in a phase in which gradients are so late."""
        self.late = late
        for each in passes:
            if id(each) not in self._copies:
                self._copies[id(each)] = each, each.on(self, self._processes)
        self.passes = [self._copies[id(each)][1] for each in passes]

    def forget_passes_but(self, passes: Sequence[Pass]) -> None:
        kept = {id(each) for each in passes}
        self._copies = {key: copy for key, copy in self._copies.items() if key in kept}

    @property
    def every_pass(self) -> list[Pass]:
        """Its copies of the passes of all phases."""
        return [copy for _, copy in self._copies.values()]

    @property
    def skips(self) -> bool:
        """Whether a pass leaves out the update of the minibatch that the stage is finishing."""
        return any([each.skips for each in self.passes])

    def note_skipped(self, by_all: bool) -> None:
        self.skipped += 1
        self.undone += by_all

    def continue_after(self, undone: int) -> None:
        """Continue a training in which so many minibatches were undone."""
        self.undone = undone

    # What runs have seen.

    def note_in_flight(self, microbatches: int) -> None:
        self.peak = max(self.peak, microbatches)

    def note_clipped(self, norm: Tensor | None) -> None:
        self.clipped = norm

    def note_in_place(self, in_place: bool) -> None:
        self.in_place = in_place

    # A run holds the weights: what the caller may do with them meanwhile is guarded.

    def check(self) -> None:
        """Raise RuntimeError if a parameter has left its flat buffer."""
        if self.weights is not None:
            self.weights.check(self.index)

    def check_flags(self) -> None:
        """Raise RuntimeError if other parameters are trained than when the stage was made."""
        now = _learning(self.module)
        if now != self._learning:
            name = min(now ^ self._learning)
            raise RuntimeError(
                f"stages[{self.index}]: parameter {bare(name)!r} was "
                f"{'unfrozen' if name in now else 'frozen'} since the pipeline was made; save a "
                "checkpoint, release() this pipeline, make a new one of the stages, and load the "
                "checkpoint into that"
            )
        if self.weights is not None and not self.weights.has_same_groups():
            raise RuntimeError(
                f"stages[{self.index}]: its {type(self.weights.optimizer).__name__} holds other "
                "parameters than when the pipeline was made, as after add_param_group; release() "
                "this pipeline, and make a new one of stages with the new parameters"
            )

    def hold_weights(self, factor: Callable[[int], float] | None) -> None:
        """Begin a run with the weights that the module has; ``factor``: see ``StageWeights``."""
        weights, self._used = self.weights, False
        self.guarded = [p for p in self.module.parameters() if p.requires_grad]
        if weights is None:
            return
        for stream in (self.compute, self.predict):
            stream.lend(weights.buffers())
        with self.predict.using(writes=self.memory):
            moves = any(each.moves_weights for each in self.passes)
            weights.begin(factor, moves, self._replicated)
        self.weights_written()
        self.guard.put(self.guarded)

    def let_go_of_weights(self) -> None:
        """Put the true weights back into the module; may be repeated, or called without a run."""
        self._aside = []
        if self.weights is not None:
            self.weights.guard.take()
            self.predict.wait_stream(self.compute)
            with self.predict.using(writes=self.memory):
                self.weights.end()
            self.guard.take(self.guarded)

    def lend(self) -> None:
        """Put gradients in flight and optimizers out of reach, before the caller gets control."""
        self._aside = [(p, gradient) for p in self.guarded if (gradient := p.grad) is not None]
        for p, _ in self._aside:
            p.grad = None
        if self.weights is not None:
            self.weights.guard.put()
            if self.weights.own_writes is not None:
                self.weights.own_writes.lend()

    def take_back(self) -> None:
        """Undo ``lend``; RuntimeError if the caller has moved a parameter or made a gradient."""
        weights = self.weights
        if weights is not None:
            # Comparing a few addresses costs less than ``check``.
            if weights.storage is not None and not weights.storage.in_place():
                self.check()
            weights.guard.take()
            if weights.own_writes is not None:
                weights.own_writes.check(self.index)
        for p in self.guarded:
            if p.grad is not None:
                names = [name for name, each in self.module.named_parameters() if each is p]
                raise RuntimeError(
                    f"stages[{self.index}]: parameter {', '.join(names)!r} got a gradient in the "
                    "loop, as by backward() of a penalty, which no update would use; add the "
                    "penalty to loss_fn, or compute gradients by torch.autograd.grad"
                )
        for p, gradient in self._aside:
            p.grad = gradient
        self._aside = []


def _learning(module: nn.Module) -> set[str]:
    return {name for name, p in module.named_parameters() if p.requires_grad}
