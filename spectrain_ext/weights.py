"""StageWeights: a stage's true weights, the weights it computes with, and the kept versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from .method import Backward
from .plan import Plan

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from .optim import PredictingOptimizer

ALIGNMENT = 256  # bytes: vector loads, and what matrix libraries ask of their operands


class Flat:
    """One buffer per dtype, and in it one view per parameter, with its shape and strides.

    Args:
        params: the parameters that the layout is made for.
        dtype_of: the dtype of each parameter's view; its own where not given.
    """

    def __init__(
        self, params: Sequence[Tensor], dtype_of: Callable[[Tensor], torch.dtype] | None = None
    ) -> None:
        dtypes = [p.dtype if dtype_of is None else dtype_of(p) for p in params]
        offsets: list[int] = []
        sizes: dict[torch.dtype, int] = {}
        for p, dtype in zip(params, dtypes, strict=True):
            offset = sizes.get(dtype, 0)
            offsets.append(offset)
            step = ALIGNMENT // dtype.itemsize
            sizes[dtype] = offset + -(-p.numel() // step) * step
        buffers = {dtype: _aligned(size, dtype, params[0].device) for dtype, size in sizes.items()}
        self.buffers = list(buffers.values())
        self.views: dict[Tensor, Tensor] = {}
        for p, dtype, offset in zip(params, dtypes, offsets, strict=True):
            buffer = buffers[dtype]
            # empty_like keeps the strides of every dense layout and closes the gaps of any other.
            strides = torch.empty_like(p, device="meta").stride()
            self.views[p] = buffer.as_strided(p.shape, strides, buffer.storage_offset() + offset)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, gaps between parameters included."""
        return sum(buffer.nbytes for buffer in self.buffers)


def _aligned(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    spare = ALIGNMENT // dtype.itemsize
    buffer = torch.zeros(size + spare, dtype=dtype, device=device)
    shift = -buffer.data_ptr() % ALIGNMENT // dtype.itemsize
    return buffer[shift : shift + size]


class Content(NamedTuple):
    """What a buffer of weights holds: a version, predicted ahead at some learning rates."""

    version: int
    horizon: int
    lrs: tuple[float, ...] | None  # per parameter group; None where the horizon is 0


class _Kept:
    """A buffer for one version that a minibatch in flight still needs."""

    def __init__(self, working: Flat, params: Sequence[Tensor]) -> None:
        self.flat = Flat(params)
        self.plan = Plan(working.buffers, stashed=self.flat.buffers)


class StageWeights:
    """The weights of one stage that has trainable parameters.

    The parameters are views of the *working* buffer for as long as the stage is bound; kernels
    overwrite it behind autograd's back, so that a backward meets whatever weights are in it. Where
    weights are predicted the true ones live in a *master* buffer; elsewhere they are a version like
    any other, in the working buffer at every update. The working buffer is a cache of one entry:
    loading what it holds costs nothing, and what it holds is kept before it is overwritten if it is
    still needed: by a minibatch in flight, or because it is the true weights.

    Args:
        module: the stage.
        optimizer: holds exactly the stage's trainable parameters.
        scheduler: stepped after every update, or None.
        window: minibatches the stage may have in flight.
        forward_horizon: updates by which forward weights are predicted ahead.
        backward: the kind of weights the backward meets, see ``Method``.
        backward_horizon: updates by which ``backward="predict"`` predicts ahead.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: PredictingOptimizer,
        scheduler: LRScheduler | None,
        *,
        window: int,
        forward_horizon: int,
        backward: Backward,
        backward_horizon: int,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._names: dict[Tensor, str] = {
            p: name for name, p in module.named_parameters() if p.requires_grad
        }
        self.params = list(self._names)
        self._forward_horizon = forward_horizon
        self._backward_horizon = backward_horizon if backward == "predict" else 0
        # One minibatch in flight has the same version forward and backward.
        self._stashes = backward == "stash" and window > 1
        self._reuses_forward = backward == "stash"
        self._window = window
        self._working: Flat | None = None
        self._kept: dict[Content, _Kept] = {}
        self.bind()

    # Storage.

    @property
    def bound(self) -> bool:
        """Whether the parameters are views of the working buffer now."""
        return self._working is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the working buffer, the master and the kept versions."""
        flats = [self._working, self._master]
        flats += [kept.flat for kept in (*self._free, *self._kept.values())]
        return sum(flat.nbytes for flat in flats if flat is not None)

    def bind(self) -> None:
        """Move the parameters into the working buffer and the optimizer onto the true weights."""
        working = Flat(self.params)
        predicts = self._forward_horizon > 0 or self._backward_horizon > 0
        self._master = Flat(self.params) if predicts else None
        state = {
            key: Flat(self.params, self.optimizer.momentum_dtype).views
            for key in self.optimizer.buffer_keys
        }
        self.optimizer.bind(None if self._master is None else self._master.views, state)
        for p, view in working.views.items():
            view.copy_(p.detach())
            p.data = view
        self._working = working
        self._addresses = [p.data_ptr() for p in self.params]
        self._sink = None
        self._master_plan = None
        if self._master is not None:
            self._sink = self.optimizer.prediction_sink({p: p.detach() for p in self.params})
            self._master_plan = Plan(working.buffers, stashed=self._master.buffers)
        kept = self._window - 1 if self._stashes else 0
        self._free = [_Kept(working, self.params) for _ in range(kept)]
        self.begin()

    def unbind(self) -> None:
        """Give parameters (they hold the true weights now) and state ordinary storage."""
        for p in self.params:
            p.data = p.detach().clone(memory_format=torch.preserve_format)
        self.optimizer.unbind()
        self._working = self._master = self._sink = self._master_plan = None
        self._free.clear()
        self._kept.clear()

    def in_place(self) -> bool:
        """Whether all parameters are where they were bound; a parameter replaced is not seen."""
        return [p.data_ptr() for p in self.params] == self._addresses

    def check(self, stage: int) -> None:
        """Raise RuntimeError if a parameter is no longer a view of the working buffer."""
        if self._working is None:
            return
        now = dict(self.module.named_parameters())
        for p, view in self._working.views.items():
            name = self._names[p]
            if (
                now.get(name) is not p
                or p.data_ptr() != view.data_ptr()
                or p.dtype != view.dtype
                or p.stride() != view.stride()
            ):
                raise RuntimeError(
                    f"stages[{stage}]: parameter {name!r} left the pipeline's flat buffer, as by "
                    ".to() or load_state_dict(assign=True); change parameters in place, or call "
                    "release() first and build a new Pipeline afterwards"
                )

    # A run.

    def begin(self) -> None:
        """Take what the parameters hold as version 0."""
        self._version = 0
        self._held: Content | None = Content(0, 0, None)
        self._in_flight: dict[int, Content] = {}  # minibatch -> what its backward must find again
        self._needed: Counter[Content] = Counter()
        self._lr_moves = False
        if self._master_plan is not None:
            self._master_plan.stash()
        self.drop_gradients()

    def end(self) -> None:
        """Put the true weights back into the parameters and forget the minibatches in flight."""
        self.optimizer.write_with_next_step(None)
        if self._master_plan is not None:
            self._master_plan.restore_()
        elif not self.holds(self._true):
            self.load(self._true)
        self._free.extend(self._kept.values())
        self._kept.clear()
        self._needed.clear()
        self._in_flight.clear()
        self.drop_gradients()
        # A graph that the caller made before the run must not meet the new weights unnoticed.
        increment_version(self.params)

    def drop_gradients(self) -> None:
        """Forget all gradients; autograd then hands over its next ones without a copy."""
        for p in self.params:
            p.grad = None

    def true_weights(self) -> Mapping[Tensor, Tensor]:
        """Where the true weights are: parameter -> tensor, not to be written."""
        assert self._working is not None
        if self._master is not None:
            return self._master.views
        if self.holds(self._true):
            return self._working.views
        return self._kept[self._true].flat.views

    # Loads. What is wanted is asked for first, so that the caller need not prepare for a load that
    # does nothing.

    def for_forward(self, minibatch: int) -> Content:
        """What the forward of a minibatch computes with, now."""
        content = self._content(self._forward_horizon)
        if self._reuses_forward:
            self._in_flight[minibatch] = content
            self._needed[content] += 1
        return content

    def for_backward(self, minibatch: int) -> Content:
        """What the backward of a minibatch computes with, now."""
        if self._reuses_forward:
            return self._in_flight[minibatch]
        return self._content(self._backward_horizon)

    def holds(self, content: Content) -> bool:
        """Whether the working buffer holds it already."""
        return self._held == content

    def load(self, content: Content) -> None:
        """Make the working buffer hold it."""
        held = self._held
        if held is not None and (held in self._kept or not self._is_needed(held)):
            held = None  # no loss
        kept = self._kept.pop(content, None)
        if kept is None:
            if held is not None:
                self._keep(held)
            self._write(content.horizon)
        elif held is not None:
            kept.plan.swap_()
            self._kept[held] = kept
        else:
            kept.plan.restore_()
            if self._needed[content]:
                self._kept[content] = kept
            else:
                self._free.append(kept)
        self._held = content

    def forget(self, minibatch: int) -> None:
        """The minibatch's backward weights are loaded: it will not ask for them again."""
        content = self._in_flight.pop(minibatch, None)
        if content is not None:
            self._needed[content] -= 1
            if not self._needed[content]:
                del self._needed[content]
                if content in self._kept and not self._is_needed(content):
                    self._free.append(self._kept.pop(content))

    def _content(self, horizon: int) -> Content:
        return Content(self._version, horizon, self._lrs() if horizon else None)

    def _lrs(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for group in self.optimizer.param_groups)

    @property
    def _true(self) -> Content:
        return Content(self._version, 0, None)

    def _is_needed(self, content: Content) -> bool:
        return self._needed[content] > 0 or (self._master is None and content == self._true)

    def _keep(self, held: Content) -> None:
        """Copy what the working buffer holds to a buffer of its own."""
        assert self._working is not None
        kept = self._free.pop() if self._free else _Kept(self._working, self.params)
        kept.plan.stash()
        self._kept[held] = kept

    def _write(self, horizon: int) -> None:
        assert self._sink is not None and self._master_plan is not None
        if horizon:
            self._sink.write(horizon)
        else:
            self._master_plan.restore_()

    # The update.

    def update(self, forward_is_next: bool) -> None:
        """Step the optimizer and the scheduler.

        Where a forward is what the stage loads next, the step writes that forward's weights in the
        same pass over memory, unless a scheduler is about to change the learning rate that they are
        predicted with.
        """
        writes_forward = self._sink is not None and forward_is_next and not self._lr_moves
        if self._master is None and not self.holds(self._true):
            self.load(self._true)
        held = self._held
        overwrites = writes_forward or self._master is None
        if overwrites and held is not None and self._needed[held] and held not in self._kept:
            self._keep(held)
        before = self._lrs()
        if writes_forward:
            self._held = None  # unknown, should the step raise
            self.optimizer.write_with_next_step(self._sink, self._forward_horizon)
        self.optimizer.step()
        self._version += 1
        after = self._lrs()  # a hook may have changed them
        if self._master is None or (writes_forward and after == before):
            self._held = self._content(self._forward_horizon)
        if self.scheduler is not None:
            self.scheduler.step()
            self._lr_moves = self._forward_horizon > 0 and self._lrs() != after
        self.drop_gradients()
