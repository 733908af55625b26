"""Selects the weights that a stage computes with; loads and updates run on their own stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from spectrain_ext.optim.state import SaveGuard
from spectrain_ext.rng import RNG_LOCK
from spectrain_ext.schedule import Kind
from spectrain_ext.transport import Buffer, Event, Stream, new_stream
from spectrain_ext.weights import StageWeights
from spectrain_ext.weights.storage import Content, SavedWeights, Storage, VersionBuffer

from .edges import Cursor
from .names import bare
from .passes import Pass

NOTHING = nullcontext()


class Loads:
    """A stage's module and weights, and its two streams: one computes, one loads and updates."""

    cursor: Cursor  # the stage's position in the run
    max_norm: float | None = None  # the largest gradient norm; None: no clipping
    counts: dict[int, Tensor]  # by minibatch: what its loss is divided by, where losses are sums
    divisor: Tensor | None = None  # of the last update
    clips_globally = False  # whether by the norm of all stages' gradients
    global_norm: GlobalNorm | None = None  # exchanged by all stages; None: not needed
    passes: Sequence[Pass] = ()

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: torch.device,
        weights: StageWeights | None,  # None: no trainable parameters
    ) -> None:
        self.index = index
        self.weights = weights
        self.module = module
        self.device = device
        self.compute = new_stream(f"compute stream of stage {index}", device)
        self.predict = new_stream(f"prediction stream of stage {index}", device)
        self.computed = self.compute.event()
        self.loaded = self.predict.event()
        # Used in turn by the two streams and the caller.
        self.weight_gradients = Buffer(f"weight gradients of stage {index}")
        self.optimizer_state = Buffer(f"optimizer state of stage {index}")
        self.module_buffers = Buffer(f"module buffers of stage {index}")
        self._shared: tuple[Buffer, ...] = (self.module_buffers,)
        self._no_weights = Buffer(f"weights of stage {index}, which has none")
        self._gradients_read: tuple[Event, list[Tensor | None]] | None = None
        # On the CPU, work is done once it has been issued.
        self.immediate = self.compute.immediate and self.predict.immediate
        # Stands for the memory of all computations, on the CPU only.
        self._untracked = Buffer(f"memory of stage {index}") if self.immediate else None
        self.guard = SaveGuard(
            "a run of this pipeline has not ended, and its stages may hold predicted weights; take "
            "the pipeline's own state_dict(), which has the true ones, or save after the loop"
        )
        self._learning = _learning(module)
        self._guarded: list[nn.Parameter] = []
        self._aside: list[tuple[nn.Parameter, Tensor]] = []  # gradients, between two results
        self._follows: AbstractContextManager[object] = NOTHING

    def train_by(
        self,
        max_norm: float | None,
        clips_globally: bool,
        global_norm: GlobalNorm | None,
    ) -> None:
        self.max_norm, self.clips_globally = max_norm, clips_globally
        self.global_norm = global_norm

    @property
    def storage(self) -> Storage | None:
        return None if self.weights is None else self.weights.storage

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
        """What the caller may use between two instructions."""
        return (*self.memory, *self._shared)

    def share(self, buffer: Buffer) -> None:
        self._shared = (*self._shared, buffer)

    def computing(
        self, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> AbstractContextManager[object]:
        """Inside, work is issued to the compute stream; on the CPU nothing needs ordering."""
        return NOTHING if self.immediate else self.compute.using(reads=reads, writes=writes)

    # A run.

    def check(self) -> None:
        """Raise RuntimeError if a parameter has left its flat buffer."""
        if self.weights is not None:
            self.weights.check(self.index)

    def check_flags(self) -> None:
        """Raise RuntimeError if a parameter was frozen or unfrozen since the stage was made."""
        now = _learning(self.module)
        if now != self._learning:
            name = min(now ^ self._learning)
            raise RuntimeError(
                f"stages[{self.index}]: parameter {bare(name)!r} was "
                f"{'unfrozen' if name in now else 'frozen'} since the pipeline was made; save a "
                "checkpoint, release() this pipeline, make a new one of the stages, and load the "
                "checkpoint into that"
            )

    @property
    def skips(self) -> bool:
        """Whether a pass leaves out the update of the minibatch that the stage is finishing."""
        return any(each.skips for each in self.passes)

    def begin_weights(self, follows: bool = False) -> None:
        """Start a run with the weights that the module holds; ``follows``: use SavedWeights."""
        weights = self.weights
        self._follows = NOTHING
        self._guarded = [p for p in self.module.parameters() if p.requires_grad]
        if weights is None:
            return
        for stream in (self.compute, self.predict):
            stream.lend(weights.buffers())
        with self.predict.using(writes=self.memory):
            weights.begin(any(each.moves_weights for each in self.passes))
        self.weights_written()
        # Where the backward uses other weights, the forward's graph must find those.
        if (follows or weights.differs_in_backward) and weights.storage is not None:
            self._follows = SavedWeights(weights.storage)
        self.guard.put(self._guarded)

    def end_weights(self) -> None:
        """Put the true weights back into the module; may be repeated, or called without a begin."""
        self._aside = []
        if self.weights is not None:
            self.weights.guard.take()
            self._gradients_read = None
            with self.predict.using(writes=self.memory):
                self.weights.end()
            self.predict.record(self.loaded)
            self.guard.take(self._guarded)

    def lend(self) -> None:
        """Before the caller gets control: put gradients in flight and optimizers out of reach."""
        self._aside = [(p, gradient) for p in self._guarded if (gradient := p.grad) is not None]
        for p, _ in self._aside:
            p.grad = None
        if self.weights is not None:
            self.weights.guard.put()

    def take_back(self) -> None:
        """Undo ``lend``; RuntimeError if the caller has made a gradient."""
        if self.weights is not None:
            self.weights.guard.take()
        for p in self._guarded:
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

    def weights_written(self) -> None:
        """Order later computation after all weights written so far."""
        self.predict.record(self.loaded)
        self.compute.wait(self.loaded)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, an observer may read the weights, ordered with all writes to them."""
        # On the stream that writes them: this waits for no other stage and no communication.
        with self.predict.using(reads=self.memory), torch.no_grad():
            yield

    # Instructions: loads.

    def load_forward(self, i: int, j: int) -> None:
        if self.weights is not None:
            self._load(self.weights, self.weights.versions.for_forward(i, j))

    def load_backward(self, i: int, j: int) -> None:
        if self.weights is not None:
            self._load(self.weights, self.weights.versions.for_backward(i, j))

    def load_backward_input(self, i: int, j: int) -> None:
        if self.weights is not None:
            self._load(self.weights, self.weights.versions.for_backward(i, j, ends=False))

    def _load(self, weights: StageWeights, content: Content) -> None:
        """Compute with these weights from here on; write them first unless a buffer holds them."""
        versions, storage = weights.versions, weights.storage
        assert storage is not None
        buffer = versions.find(content)
        if buffer is None:
            buffer = versions.room(content)
            predict = self.predict
            if buffer.read is not None:
                predict.wait(buffer.read)
            reads = self.optimizer_state, storage.true.memory
            with predict.using(reads=reads, writes=(buffer.memory,)):
                storage.write(content, buffer)
            self._written(buffer)
        if not buffer.awaited:
            assert buffer.written is not None
            self.compute.wait(buffer.written)
            buffer.awaited = True
        if buffer is not storage.bound:
            storage.point(buffer)

    def _written(self, *buffers: VersionBuffer) -> None:
        """Record that these were written on the prediction stream."""
        if self.immediate:
            return
        for buffer in buffers:
            if buffer.written is None:
                buffer.written = self.predict.event()
            self.predict.record(buffer.written)
            buffer.awaited = False
        self.predict.record(self.loaded)

    def _has_computed(self) -> None:
        """Record that the bound weights have been read."""
        if self.immediate:
            return
        compute = self.compute
        compute.record(self.computed)
        if self.storage is not None:
            buffer = self.storage.bound
            if buffer.read is None:
                buffer.read = compute.event()
            compute.record(buffer.read)

    # Instructions around an update.

    @contextmanager
    def changing_gradients(self) -> Iterator[list[Tensor]]:
        """Inside, gradients may be read and changed in place, between backward and update.

        Yields the gradients of the stage's trainable parameters, without those that have none.
        """
        params = () if self.weights is None else self.weights.params
        self.predict.wait(self.computed)
        with self.predict.using(writes=(self.weight_gradients,)), torch.no_grad():
            yield [p.grad for p in params if p.grad is not None]

    def divide(self, i: int, j: int) -> None:
        """Divide the gradients of sums by the count of the minibatch."""
        self.divisor = self.counts.pop(i, None)
        if self.divisor is None or self.weights is None:
            return
        with self.changing_gradients() as gradients:
            if gradients:  # if the count is 0, they are zeros
                torch._foreach_div_(gradients, self.divisor + (self.divisor == 0))

    def send_norm(self, i: int, j: int) -> None:
        assert self.global_norm is not None
        predict, buffer = self.predict, Buffer(f"gradient norm of stage {self.index}")
        predict.wait(self.computed)
        params = () if self.weights is None else self.weights.params
        with predict.using(reads=(self.weight_gradients,), writes=(buffer,)):
            norm = gradient_norm(params, self.device).double()
            told = max([each.tells(i) for each in self.passes], default=0.0)
            norm = torch.stack([norm, torch.full_like(norm, told)])
        self.global_norm.give(i, self.index, norm, buffer, predict)

    def clip(self, i: int, j: int) -> None:
        weights = self.weights
        if weights is None or self.max_norm is None or self.skips:
            return
        self.predict.wait(self.computed)
        if self.clips_globally:
            assert self.global_norm is not None
            norm = self.global_norm.take(i, self.predict, self.device)
        with self.predict.using(writes=(self.weight_gradients,)):
            if not self.clips_globally:
                norm = gradient_norm(weights.params, self.device)
            # Multiplies by min(1, max_norm / (norm + 1e-6)), without a CPU wait.
            nn.utils.clip_grads_with_norm_(weights.params, self.max_norm, norm)

    def update(self, i: int, j: int) -> None:
        """Step the optimizer, unless a pass skips that; write the next forward's weights."""
        weights = self.weights
        if weights is None:
            return
        following = self.cursor.peek()
        forward = None
        if following is not None and following.kind is Kind.FORWARD:
            forward = following.minibatch, following.microbatch
        storage = weights.storage
        moves, left_out = (weights.moves, weights.rates_move), self.skips
        update = weights.versions.begin_update(forward, *moves, left_out)
        step = weights.skip if left_out else weights.step
        assert storage is not None
        if self.immediate:
            with RNG_LOCK:  # a hook may draw random numbers
                step(update)
            return
        predict = self.predict
        predict.wait(self.computed)
        changed = {storage.true, update.kept or storage.true, update.room or storage.true}
        gradients = [p.grad for p in weights.params]
        reads = [self.weight_gradients]
        if update.stale is not None and update.stale not in changed:
            reads.append(update.stale.memory)
        writes = [self.optimizer_state, *(buffer.memory for buffer in changed)]
        with predict.using(reads=reads, writes=writes), RNG_LOCK:
            step(update)
        self._written(*changed)
        # Held until the compute stream has waited for the step, as it would reuse their memory.
        self._gradients_read = self.loaded, gradients

    def _free_gradients(self) -> None:
        """Let the compute stream reuse the memory of gradients that an update has read."""
        if self._gradients_read is not None:
            stepped, _ = self._gradients_read
            self.compute.wait(stepped)
            self.compute.writes(self.weight_gradients)
            self._gradients_read = None


def _learning(module: nn.Module) -> set[str]:
    return {name for name, p in module.named_parameters() if p.requires_grad}


# Clipping, by the gradient norm of a stage or of all stages.


def gradient_norm(params: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the 2-norm of all gradients, 0-d, in float32 or wider; one launch per dtype."""
    gradients = [p.grad for p in params if p.grad is not None]
    if not gradients:
        return torch.zeros((), device=device)
    norms: list[Tensor] = []
    for dtype in dict.fromkeys(g.dtype for g in gradients):
        alike = [g for g in gradients if g.dtype == dtype]
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        norms += torch._foreach_norm(alike, 2, dtype=wide)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


class GlobalNorm:
    """The norm of a minibatch's gradient over all stages: each stage gives its own and waits.

    With it goes a number that passes tell, of which all stages get the largest. Only for schedules
    that flush: no stage gives its next norm before all have used this one.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._minibatch: int | None = None
        self._given: dict[int, tuple[Tensor, Buffer, Stream]] = {}

    def give(self, i: int, stage: int, norm: Tensor, buffer: Buffer, stream: Stream) -> None:
        """Give a stage's own norm of minibatch i and its number, float64 [2], of a stream."""
        if i != self._minibatch:  # all streams have used the last one's
            self._minibatch = i
            self._given = {}
        self._given[stage] = norm, buffer, stream

    def has(self, stages: Iterable[int]) -> bool:
        """Whether these stages have given theirs for the current minibatch."""
        return all(stage in self._given for stage in stages)

    def complete(self, i: int) -> bool:
        return i == self._minibatch and len(self._given) == self._stages

    def take(self, i: int, stream: Stream, device: torch.device) -> Tensor:
        """Return the norm over all stages, computed on one stage's stream."""
        given = self._taken(i, stream, device)
        with stream.using():
            total: Tensor = torch.linalg.vector_norm(given[:, 0])
        return total

    def told(self, i: int, stream: Stream, device: torch.device) -> float:
        """Return the largest number of all stages. Synchronizes."""
        given = self._taken(i, stream, device)
        with stream.using():
            return float(given[:, 1].amax())

    def _taken(self, i: int, stream: Stream, device: torch.device) -> Tensor:
        assert self.complete(i)
        # Sorted, so that the bits do not depend on the order.
        given = [self._given[stage] for stage in sorted(self._given)]
        for _, _, other in given:
            written = other.event()
            other.record(written)
            stream.wait(written)
        with stream.using(reads=[buffer for _, buffer, _ in given]):
            norms = [norm.to(device, torch.float64, non_blocking=True) for norm, *_ in given]
            return torch.stack(norms)

    def reset(self) -> None:
        self._minibatch = None
        self._given = {}
