"""Allocates the buffers of a stage's weight versions, and writes versions into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from spectrain_ext import _C
from spectrain_ext.operators.calls import Lists, Role
from spectrain_ext.optim.stepper import Stepper
from spectrain_ext.optim.swaps import shift
from spectrain_ext.schedule import Rules
from spectrain_ext.transport import DONE, Buffer, Point
from spectrain_ext.transport.message import dense_strides

if TYPE_CHECKING:
    from spectrain_ext.optim.base import Updater

ALIGNMENT = 256  # bytes: for vector loads and matrix libraries


def local_part(p: Tensor) -> Tensor:
    """Return what this process has of a parameter: of a DTensor its shard, else all of it."""
    part: Tensor = getattr(p, "_local_tensor", p)
    return part


def whole(tensor: Any) -> Any:
    """Return a DTensor as a whole tensor, for which all its ranks call this; others unchanged."""
    return tensor if local_part(tensor) is tensor else tensor.full_tensor()


class Flat:
    """One buffer per dtype, with a view per parameter that has its shape and strides."""

    def __init__(
        self, params: Sequence[Tensor], dtype_of: Callable[[Tensor], torch.dtype] | None = None
    ) -> None:
        dtypes = [p.dtype if dtype_of is None else dtype_of(p) for p in params]
        offsets, sizes = _layout(params, dtypes)
        buffers = {}
        for dtype, size in sizes.items():
            spare = ALIGNMENT // dtype.itemsize
            memory = torch.zeros(size + spare, dtype=dtype, device=params[0].device)
            shift = -memory.data_ptr() % ALIGNMENT // dtype.itemsize
            buffers[dtype] = memory[shift : shift + size]
        self.buffers = list(buffers.values())
        self.views: dict[Tensor, Tensor] = {}
        for p, dtype, offset in zip(params, dtypes, offsets, strict=True):
            buffer = buffers[dtype]
            first = buffer.storage_offset() + offset
            self.views[p] = buffer.as_strided(p.shape, dense_strides(p), first)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


def flat_nbytes(params: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> int:
    return sum(size * dtype.itemsize for dtype, size in _layout(params, dtypes)[1].items())


def _layout(
    params: Sequence[Tensor], dtypes: Sequence[torch.dtype]
) -> tuple[list[int], dict[torch.dtype, int]]:
    """Return every parameter's first element in its dtype's buffer, and the buffers' sizes."""
    offsets: list[int] = []
    sizes: dict[torch.dtype, int] = {}
    for p, dtype in zip(params, dtypes, strict=True):
        offset = sizes.get(dtype, 0)
        offsets.append(offset)
        step = ALIGNMENT // dtype.itemsize
        sizes[dtype] = offset + -(-p.numel() // step) * step
    return offsets, sizes


def true_dtype(p: Tensor, master_dtype: torch.dtype | None) -> torch.dtype:
    return p.dtype if master_dtype is None or p.dtype.itemsize != 2 else master_dtype


class Content(NamedTuple):
    """The weights in a buffer: a version, or a prediction from it."""

    version: int
    law: Any = None  # the prediction law; hashable
    rates: tuple[float, ...] | None = None  # learning rates for the law, unless it has its own


@dataclass(frozen=True, slots=True)
class Difference:
    """W + steps*(W - W_before): the last change of the weights, repeated ``steps`` times."""

    steps: float


@dataclass(eq=False, slots=True)
class VersionBuffer:
    """A buffer that holds one version of a stage's weights at a time."""

    flat: Flat
    memory: Buffer  # stands for its memory
    content: Content | None = None  # None: nothing useful
    written: Point = DONE  # the last write, if it was on the stream that predicts
    read: Point = DONE  # the last use, on the stream that computes; see ``Stage.wait_for_uses``
    watch: _C.Watch | None = None  # detects parameters that left, once they were here


class Storage:
    """The buffers that a stage's parameters and its optimizer are bound to.

    Versions do not move: to compute with one, the parameters are pointed at its buffer. If the
    stage computes with other weights than the true ones, these are in a *master* buffer. Otherwise
    they are a version like any other, and an update first copies them to another buffer if this one
    is still needed. Between runs the parameters are in the *home* buffer, with the true weights.
    """

    bound: VersionBuffer  # the parameters' buffer
    true: VersionBuffer  # the master, or one of the pool

    def __init__(
        self,
        params: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        updater: Updater,
        rules: Rules,
        *,
        master: bool,
        master_dtype: torch.dtype | None = None,  # of master and state, for 16-bit parameters
        versions: int = 1,
    ) -> None:
        def wide(p: Tensor) -> torch.dtype:
            return true_dtype(p, master_dtype)

        self.params = params
        self.optimizer, self.updater = optimizer, updater
        # Whether the updater writes predictions.
        self.predicts = master and updater.predicts
        self._correction, self._averaging = rules.correction, rules.averaging
        self._running = False
        self.rate_factor = 1.0  # on the groups' learning rates, for the next update of a run
        self._plans: dict[tuple[int, int], _C.Plan] = {}  # by source and target
        # By address of a flat buffer's memory: its index in its version, and its first element.
        self.addresses: dict[int, tuple[int, int]] = {}
        self.pool: list[VersionBuffer] = []  # to compute with
        for _ in range(versions):
            self.new_buffer()
        self.home = self.bound = self.true = self.pool[0]

        def of_state(p: Tensor) -> torch.dtype:
            return updater.state_dtype(p, wide(p))

        self._state_flats = {key: Flat(params, of_state) for key in updater.buffer_keys}
        self._state = {key: flat.views for key, flat in self._state_flats.items()}
        # Whether parameters can be pointed at the true weights.
        self.same_dtype = all(wide(p) == p.dtype for p in params)
        self.master: VersionBuffer | None = None
        self.keeps_before = rules.keeps_before  # a version, or an average of changes
        self._before: Flat | None = None
        self._ahead: Flat | None = None  # for an extrapolation that no kernel rounds
        if not master:
            return
        self.true = self.master = self._made("master weights", Flat(params, wide))
        if not self.same_dtype:
            for p, view in self.master.flat.views.items():
                view.copy_(p.detach())
        if rules.keeps_before:
            self._before = Flat(params, wide)
            self._ahead = None if self.same_dtype else Flat(params, wide)

    def new_buffer(self) -> VersionBuffer:
        self.pool.append(self._made(f"weights {len(self.pool)}", Flat(self.params)))
        return self.pool[-1]

    def _made(self, name: str, flat: Flat) -> VersionBuffer:
        for n, buffer in enumerate(flat.buffers):
            address = buffer.untyped_storage().data_ptr()
            self.addresses[address] = n, int(buffer.storage_offset())
        return VersionBuffer(flat, Buffer(name))

    def bind(self) -> None:
        self.updater.bind(self.true.flat.views, self._state, self._correction)
        for p, view in self.home.flat.views.items():
            view.copy_(p.detach())
        self.point(self.home)

    def unbind(self) -> None:
        """Give parameters and state ordinary storage; the parameters hold the true weights now."""
        for p in self._parameters_here():
            p.data = p.detach().clone(memory_format=torch.preserve_format)
        if self.updater.is_bound_to(self._state):
            self.updater.unbind()

    def _parameters_here(self) -> list[Tensor]:
        views = [buffer.flat.views for buffer in self.version_buffers()]
        return [p for p in self.params if p.data_ptr() in {held[p].data_ptr() for held in views}]

    def flats(self) -> list[Flat]:
        versions = [buffer.flat for buffer in self.version_buffers()]
        return [*versions, *(flat for flat in (self._before, self._ahead) if flat is not None)]

    def buffers(self) -> list[Tensor]:
        """Return all flat buffers, with those of the optimizer's state."""
        flats = *self.flats(), *self._state_flats.values()
        return [buffer for flat in flats for buffer in flat.buffers]

    def version_buffers(self) -> list[VersionBuffer]:
        return self.pool if self.master is None else [self.master, *self.pool]

    def in_place(self) -> bool:
        """Whether all parameters are in the bound buffer; does not detect a replaced parameter."""
        watch = self.bound.watch
        return watch is not None and watch.in_place()

    def point(self, buffer: VersionBuffer) -> None:
        """Compute with the weights in a buffer from here on."""
        self.bound = buffer
        for p, view in buffer.flat.views.items():
            p.data = view
        if buffer.watch is None:  # it remembers addresses
            buffer.watch = _C.Watch(tuple(self.params))

    def in_bound(self, weight: Tensor) -> Callable[[], Tensor] | None:
        """Return a function that reads a weight in the bound buffer; None: it is no weight."""
        try:
            at = self.addresses.get(weight.untyped_storage().data_ptr())
        except (NotImplementedError, RuntimeError):  # a sparse tensor has none
            return None
        if at is None:
            return None
        number, first = at
        offset = int(weight.storage_offset()) - first
        return partial(self._in_bound, number, weight.size(), weight.stride(), offset)

    def _in_bound(
        self, number: int, size: tuple[int, ...], stride: tuple[int, ...], offset: int
    ) -> Tensor:
        buffer = self.bound.flat.buffers[number]
        return buffer.as_strided(size, stride, int(buffer.storage_offset()) + offset)

    # A run.

    def begin(self) -> None:
        """Take the weights in the home buffer as the true weights."""
        self._forget()
        if self.master is not None and self.same_dtype:
            self.copy(self.home.flat, self.master.flat)
        elif self.master is not None:
            # If a parameter is unchanged since it was written, its master still has more digits.
            for p, true in self.master.flat.views.items():
                now = self.home.flat.views[p]
                same = true.to(now.dtype) == now
                true.copy_(torch.where(same, true, now.to(true.dtype)))
        if self.updater.has_modes:
            self.updater.set_mode("train")
            if self.master is not None:
                self.copy(self.master.flat, self.home.flat)
        if self._before is not None:
            self.copy(self.true.flat, self._before)
        self._running = True

    def end(self) -> None:
        """Put the true weights into the home buffer, and the parameters there."""
        self._forget()
        # Without a begin, the home buffer already has them.
        try:
            if self._running:
                self.updater.set_mode("eval")
        finally:
            if self._running and self.true is not self.home:
                self.keep_true(self.home)
            self._running, self.rate_factor = False, 1.0
        if not self.in_place():  # some have left, or an exception interrupted ``point``
            for p in self._parameters_here():
                p.data = self.home.flat.views[p]
            self.bound = self.home
        elif self.bound is not self.home:
            self.point(self.home)

    def _forget(self) -> None:
        for buffer in self.pool:
            buffer.content = None

    def true_weights(self) -> Mapping[Tensor, Tensor]:
        """Return the true weights by parameter; between runs they are in the home buffer."""
        return (self.true if self._running else self.home).flat.views

    # An update.

    def rates(self) -> tuple[float, ...]:
        """Return the factor and the learning rates, on which predictions depend."""
        return self.rate_factor, *rates_of(self.optimizer)

    def note_before(self) -> None:
        """Keep the weights before an update, or add its change to the average of changes."""
        assert self._before is not None
        if self._averaging:
            for old, now in zip(self._before.buffers, self.true.flat.buffers, strict=True):
                old.lerp_(now, 1.0 - self._averaging)
        else:
            self.copy(self.true.flat, self._before)

    def keep_true(self, buffer: VersionBuffer) -> None:
        """Write a buffer's content, or the true weights; without a master, updates go there."""
        self.write(buffer.content or Content(0), buffer)
        if self.master is None:
            self.true = buffer
            self.updater.update_in(buffer.flat.views)

    # Contents.

    def write(self, content: Content, buffer: VersionBuffer) -> None:
        law = content.law
        if law is None:
            self.copy(self.true.flat, buffer.flat)
        elif isinstance(law, Difference):
            self._extrapolate(law.steps, buffer.flat)
        else:
            assert isinstance(self.updater, Stepper)
            self.updater.predict(buffer.flat.views, law, self.rate_factor)

    def copy(self, source: Flat, target: Flat) -> None:
        """Copy all weights, rounded if the target is narrower."""
        plan = self._plans.get((id(source), id(target)))
        if plan is None:
            read, written = source.buffers, target.buffers
            if [b.dtype for b in read] != [b.dtype for b in written]:
                read, written = [*source.views.values()], [*target.views.values()]
            plan = self._plans[id(source), id(target)] = _plan(read, written)
        plan.write_out(0, None)

    def _extrapolate(self, steps: float, target: Flat) -> None:
        before, out = self._before, target if self._ahead is None else self._ahead
        assert before is not None
        plan = self._plans.get((id(before), id(out)))
        if plan is None:
            true, old, new = ([*flat.views.values()] for flat in (self.true.flat, before, out))
            plan = self._plans[id(before), id(out)] = _plan(true, new, before=old)
        plan.extrapolate(steps, 0, None)  # may be backwards
        if out is not target:
            self.copy(out, target)

    def move(self, weights: Iterable[Tensor], version: int) -> None:
        """Make these the true weights of a version, in any dtype, right after its update."""
        # Predictions from this version are shifted by the same amount.
        others = [buffer for buffer in self.pool if buffer is not self.true and buffer.content]
        predicted = [b.flat for b in others if b.content and b.content.version == version]
        for p, new in zip(self.params, weights, strict=True):
            old = self.true.flat.views[p]
            for flat in predicted:
                flat.views[p].copy_(flat.views[p] + (new - old))
            old.copy_(new)

    def carry_over(self, p: Tensor, old: Tensor | None, version: int) -> bool:
        """Change true weights of a version as somebody has changed the bound ones from ``old``.

        Later versions change too. Returns False if ``old`` is needed and None.
        """
        bound, now = self.bound, self.bound.flat.views.get(p)
        if now is None:  # a copy of a parameter that another stage trains
            return False
        content = bound.content or Content(version)
        later = [] if self._before is None else [self._before]
        for buffer in self.version_buffers():
            after = buffer.content is not None and buffer.content.version >= content.version
            if buffer is not bound and (after or buffer is self.true):
                later.append(buffer.flat)
        if old is None and later and bound is not self.true and content == Content(version):
            old = self.true.flat.views[p].to(now.dtype, copy=True)
        if old is None:
            return not later
        for flat in later:
            shift(flat.views[p], old, now)
        return True


def rates_of(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """Return the learning rate of every parameter group, 0 if it has none."""
    try:
        return tuple([float(group["lr"]) for group in optimizer.param_groups])
    except (KeyError, TypeError):
        return tuple([float(group.get("lr") or 0.0) for group in optimizer.param_groups])


def _plan(
    weights: Sequence[Tensor], out: Sequence[Tensor], before: Sequence[Tensor] | None = None
) -> _C.Plan:
    """Prepare to copy weights, or to extrapolate them from those before."""
    lists = Lists(weights, "weights", writes=False)
    if before is not None:
        lists.add(Role.STASHED, "before", before, writes=False)
    lists.add(Role.OUT, "out", out, writes=True)
    plan = lists.plan()
    plan.keep(True)
    return plan


class SavedWeights:
    """Autograd saves the places of weights inside; a backward reads the bound buffer there.

    A forward and its backward then use different versions, each in a buffer of its own, as if one
    buffer had been overwritten in between. The bits are the same (measured for convolutions, norms
    and Linear, eager and compiled). Tensors that are not weights go through the hooks of an outer
    context, if any. Hooks of an inner context, as in ``torch.utils.checkpoint``, replace these.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._hooks: saved_tensors_hooks | None = None  # inside; if kept, these would form a cycle
        self._outer: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = None

    def __enter__(self) -> None:
        # Private in torch, 2.10 to 2.15: nothing else reports an outer context.
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._hooks = saved_tensors_hooks(self._pack, unpacked)
        self._hooks.__enter__()

    def __exit__(self, *raised: object) -> None:
        assert self._hooks is not None
        self._hooks.__exit__(*raised)
        self._hooks = None

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        weight = self._storage.in_bound(tensor)
        if weight is not None:
            return weight
        if self._outer is not None:
            pack, unpack = self._outer
            return partial(unpack, pack(tensor))
        # Not the tensor itself: if a node saved its own output, that would keep the node alive.
        return partial(unchanged, tensor.detach(), tensor._version)


def unpacked(packed: Callable[[], Tensor]) -> Tensor:
    return packed()


def unchanged(tensor: Tensor, version: int) -> Tensor:
    """Return the tensor if its version is the same; with hooks, autograd does not check that."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: a {tensor.dtype} tensor of shape {tuple(tensor.shape)} is "
            f"at version {tensor._version}; expected version {version} instead"
        )
    return tensor


# Weights in a row.


def in_a_row(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of all elements, in the widest dtype, at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return torch.cat([tensor.detach().to(dtype).reshape(-1) for tensor in tensors])


def taken_apart(row: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield a row's elements in these shapes."""
    for part, tensor in zip(row.split([t.numel() for t in like]), like, strict=True):
        yield part.view(tensor.shape)
