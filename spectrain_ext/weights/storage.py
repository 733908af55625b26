"""Storage: the memory of a stage's weights: the true ones, and a buffer for each other version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from spectrain_ext import _C
from spectrain_ext.operators.plan import Plan
from spectrain_ext.transport import Buffer, Event

from .flat import Flat

if TYPE_CHECKING:
    from spectrain_ext.operators.corrections import Correction
    from spectrain_ext.optim import PredictionSink
    from spectrain_ext.optim.foreign import Updater


# Of a buffer's plans those that copy no other buffer.
_EXTRAPOLATION, _ROUNDING = -1, -2


class Content(NamedTuple):
    """What a buffer of weights holds.

    Attributes:
        version: updates made in this run.
        law: how it is predicted from there; None: it is the version itself.
        rates: the learning rates that the law is evaluated at, where it does not have its own.
    """

    version: int
    law: Any = None  # hashable
    rates: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """W + steps*(W - W_before): the last change of the weights, so many times over."""

    steps: float


class VersionBuffer:
    """A buffer that holds one version of a stage's weights at a time.

    Attributes:
        flat: the memory.
        views: of the parameters, in their order.
        memory: stands for it where streams are checked.
        content: what it holds; None: nothing of use.
        written: the event of the last write, on the stream that writes weights.
        read: that of the last computation with it, on the stream that computes.
        followed: whether that stream has waited for the last write.
        sink: where the optimizer writes predictions into it.
    """

    def __init__(self, name: str, flat: Flat, params: Sequence[Tensor]) -> None:
        self.flat = flat
        self.views = [flat.views[p] for p in params]
        self.memory = Buffer(name)
        self.content: Content | None = None
        self.written: Event | None = None
        self.read: Event | None = None
        self.followed = True
        self.sink: PredictionSink | None = None
        self.plans: dict[int, Plan] = {}  # by the address of what is copied here: no cycle
        self._params = params
        self._watch: _C.Watch | None = None

    def bind(self) -> None:
        """Point the parameters here."""
        for p, view in zip(self._params, self.views, strict=True):
            p.data = view
        if self._watch is None:  # it remembers addresses
            self._watch = _C.Watch(tuple(self._params))

    def in_place(self) -> bool:
        """Whether the parameters still are here."""
        return self._watch is not None and self._watch.in_place()


class Storage:
    """Buffers that a stage's parameters and its optimizer are bound to.

    Versions stay where they are: to compute with one is to point the parameters at its buffer. The
    true weights have a *master* buffer where others are computed with; elsewhere they are a version
    like any other, and an update first copies them to another buffer if this one is still wanted.
    Between runs the parameters are in the *home* buffer, with the true weights.

    Args:
        params: the parameters.
        optimizer: holds exactly these.
        master: whether the true weights have a buffer of their own.
        master_dtype: the dtype of that buffer and of the optimizer's state for 16-bit parameters;
            None: the parameters'.
        before: whether the true weights of one update before are kept as well.
        versions: buffers to compute with, at least 1.
        averaging: keep the average of all before instead: what it keeps of itself with an update.
        correction: of the optimizer's steps. One that reads stale weights wants a master.

    Attributes:
        home: the first of the buffers to compute with.
        pool: all of them.
        true: the buffer of the true weights: the master, or one of the pool.
        bound: the buffer that the parameters are in.
        predicts: whether the optimizer writes predictions.
        addresses: of every flat buffer's memory: which of a version's it is, and its first element.
    """

    predicts = False

    def __init__(
        self,
        params: Sequence[Tensor],
        optimizer: Updater,
        *,
        master: bool,
        master_dtype: torch.dtype | None = None,
        before: bool = False,
        versions: int = 1,
        averaging: float = 0.0,
        correction: Correction | None = None,
    ) -> None:
        def wide(p: Tensor) -> torch.dtype:
            return true_dtype(p, master_dtype)

        def of_state(p: Tensor) -> torch.dtype:
            return optimizer.momentum_dtype(p) if master_dtype is None else wide(p)

        self.params = params
        self.optimizer = optimizer
        self._correction = correction
        self._averaging = averaging
        self.pool: list[VersionBuffer] = []
        self.addresses: dict[int, tuple[int, int]] = {}
        for _ in range(versions):
            self.new_buffer()
        self.home = self.bound = self.true = self.pool[0]
        self._running = False
        self.master: VersionBuffer | None = None
        keys = (*optimizer.buffer_keys, *(() if correction is None else correction.buffers))
        state = {key: Flat(params, of_state) for key in keys}
        self._state = {key: flat.views for key, flat in state.items()}
        self._state_flats = list(state.values())
        self.before: Flat | None = None
        self.ahead: Flat | None = None  # an extrapolation that no kernel rounds
        self._stash: Plan | None = None  # of the true weights into ``before``
        #: whether parameters can be pointed at the true weights
        self.same_dtype = all(wide(p) == p.dtype for p in params)
        if not master:
            return
        self.true = self.master = self._made("master weights", Flat(params, wide))
        if not self.same_dtype:
            for m, p in zip(self.master.views, params, strict=True):
                m.copy_(p.detach())
        if before:
            self.before = Flat(params, wide)
            self.ahead = None if self.same_dtype else Flat(params, wide)
            self._stash = Plan(self.master.flat.buffers, stashed=self.before.buffers)

    def new_buffer(self) -> VersionBuffer:
        """One more buffer to compute with."""
        number = len(self.pool)
        made = self._made(f"weights {number}", Flat(self.params))
        self.pool.append(made)
        return made

    def _made(self, name: str, flat: Flat) -> VersionBuffer:
        for n, buffer in enumerate(flat.buffers):
            address = buffer.untyped_storage().data_ptr()
            self.addresses[address] = n, int(buffer.storage_offset())
        return VersionBuffer(name, flat, self.params)

    def bind(self) -> None:
        """Move the parameters and the optimizer here; RuntimeError if it is bound elsewhere."""
        optimizer = self.optimizer
        optimizer.bind(self.true.flat.views, self._state)
        for p, view in zip(self.params, self.home.views, strict=True):
            view.copy_(p.detach())
        self.point(self.home)
        sink = None if self.master is None else self.sink_of(self.home)
        self.predicts = sink is not None
        if self._correction is not None:
            optimizer.correct(self._correction, sink)

    def unbind(self) -> None:
        """Give parameters (they hold the true weights now) and state ordinary storage.

        A parameter that has left is left alone.
        """
        for n, p in enumerate(self.params):
            if p.data_ptr() in self._addresses_of(n):
                p.data = p.detach().clone(memory_format=torch.preserve_format)
        if self.optimizer.is_bound_to(self._state):
            self.optimizer.unbind()

    def flats(self) -> list[Flat]:
        """All memory of weights."""
        found = [buffer.flat for buffer in self.pool]
        more = [None if self.master is None else self.master.flat, self.before, self.ahead]
        return [*found, *(flat for flat in more if flat is not None)]

    def buffers(self) -> list[Tensor]:
        """All memory, that of the optimizer's state as well."""
        return [buffer for flat in (*self.flats(), *self._state_flats) for buffer in flat.buffers]

    def version_buffers(self) -> list[VersionBuffer]:
        """The master and the buffers to compute with."""
        return self.pool if self.master is None else [self.master, *self.pool]

    def in_place(self) -> bool:
        """Whether all parameters are where they are bound; a parameter replaced is not seen."""
        return self.bound.in_place()

    def point(self, buffer: VersionBuffer) -> None:
        """Compute with what is in a buffer from here on."""
        self.bound = buffer
        buffer.bind()

    # A run.

    def begin(self) -> None:
        """Take what the parameters hold, in the home buffer, as the true weights."""
        for buffer in self.pool:
            buffer.content = None
        if self.master is None:
            self._running = True
            return
        if self.same_dtype:
            self._copy(self.home, self.master)
        else:
            # Where a parameter is as it was written, its master still has more digits than it.
            for p, true in zip(self.home.views, self.master.views, strict=True):
                same = true.to(p.dtype) == p
                true.copy_(torch.where(same, true, p.to(true.dtype)))
        if self._stash is not None:
            self._stash.stash()
        self._running = True

    def end(self) -> None:
        """Have the parameters in the home buffer, with the true weights.

        An end without a begin does nothing: the home buffer then has what counts.
        """
        if self.master is None:
            if self.true is not self.home:
                self.move_true(self.home)
        elif self._running:
            self.write_true(self.home)
        self._running = False
        if not self.in_place():  # some have left, or the way to a buffer was cut short
            for n, p in enumerate(self.params):
                if p.data_ptr() in self._addresses_of(n):
                    p.data = self.home.views[n]
            self.bound = self.home
        elif self.bound is not self.home:
            self.point(self.home)
        for buffer in self.pool:
            buffer.content = None

    def _addresses_of(self, n: int) -> set[int]:
        """Where the n-th parameter may be."""
        return {buffer.views[n].data_ptr() for buffer in self.version_buffers()}

    def true_weights(self) -> Mapping[Tensor, Tensor]:
        """Where the true weights are: parameter -> tensor; between runs in the home buffer."""
        return (self.true if self._running else self.home).flat.views

    # An update.

    def before_update(self) -> None:
        """Prepare for an update."""
        if self._stash is None:
            return
        if self._averaging:
            assert self.before is not None
            pairs = zip(self.before.buffers, self.true.flat.buffers, strict=True)
            for old, now in pairs:
                old.lerp_(now, 1.0 - self._averaging)
        else:
            self._stash.stash()

    def move_true(self, buffer: VersionBuffer) -> None:
        """Without a master: have the next update make the true weights in another buffer."""
        self._copy(self.true, buffer)
        self._hold_true_in(buffer)

    def _hold_true_in(self, buffer: VersionBuffer) -> None:
        if self.true is not buffer:
            self.true = buffer
            self.optimizer.update_in(buffer.flat.views)

    def sink_of(self, buffer: VersionBuffer) -> PredictionSink | None:
        """Where the optimizer writes predictions into a buffer; None: it makes none."""
        if buffer.sink is None:
            buffer.sink = self.optimizer.prediction_sink(buffer.flat.views)
        return buffer.sink

    # What a buffer is to hold.

    def write(self, content: Content, buffer: VersionBuffer) -> None:
        """Make it from the true weights."""
        law = content.law
        if law is None:
            self.write_true(buffer)
        elif isinstance(law, Difference):
            self._extrapolate(law.steps, buffer)
        else:
            sink = self.sink_of(buffer)
            assert sink is not None
            sink.write(law)

    def _extrapolate(self, steps: float, buffer: VersionBuffer) -> None:
        outs = buffer if self.ahead is None else self.home
        plan = outs.plans.get(_EXTRAPOLATION)
        if plan is None:
            assert self.before is not None
            views = self.ahead.views if self.ahead is not None else outs.flat.views
            plan = outs.plans[_EXTRAPOLATION] = Plan(
                self.true.views,
                stashed=[self.before.views[p] for p in self.params],
                outs=[[views[p] for p in self.params]],
            )
        plan._native.extrapolate(steps, 0, None, None)  # it may look back
        if self.ahead is not None:
            self._round([self.ahead.views[p] for p in self.params], buffer, _ROUNDING)

    def write_true(self, buffer: VersionBuffer) -> None:
        """Copy the true weights to a buffer, rounded where that is narrower."""
        if self.same_dtype:
            self._copy(self.true, buffer)
        else:
            self._round(self.true.views, buffer, id(self.true))

    def _copy(self, source: VersionBuffer, target: VersionBuffer) -> None:
        plan = target.plans.get(id(source))
        if plan is None:
            plan = target.plans[id(source)] = Plan(source.flat.buffers, stashed=target.flat.buffers)
        plan.stash()

    def _round(self, source: Sequence[Tensor], target: VersionBuffer, key: int) -> None:
        plan = target.plans.get(key)
        if plan is None:
            plan = target.plans[key] = Plan(source, outs=[target.views])
        plan.write_out()

    def move(self, weights: Iterable[Tensor], version: int) -> None:
        """Make these the true weights, in the order of the parameters, right after an update.

        Args:
            weights: of the parameters' shapes, in any dtype.
            version: of these; what is predicted from there moves as far.
        """
        predicted = [
            buffer
            for buffer in self.pool
            if buffer is not self.true
            and buffer.content is not None
            and buffer.content.version == version
        ]
        for n, new in enumerate(weights):
            old = self.true.views[n]
            for buffer in predicted:
                view = buffer.views[n]
                view.copy_(view + (new - old))
            old.copy_(new)


def true_dtype(p: Tensor, master_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a parameter's true weights."""
    return p.dtype if master_dtype is None or p.dtype.itemsize != 2 else master_dtype
