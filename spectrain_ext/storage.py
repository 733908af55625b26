"""Storage: the memory of a stage's weights: working buffer, master, kept versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from .flat import Flat
from .laws import Horizon
from .plan import Plan
from .predictor import Difference
from .versions import Content

if TYPE_CHECKING:
    from .optim import PredictingOptimizer


class _Kept:
    """A buffer for one version that outlives its overwriting in the working buffer."""

    def __init__(self, working: Flat, params: Sequence[Tensor]) -> None:
        self.flat = Flat(params)
        self.plan = Plan(working.buffers, stashed=self.flat.buffers)


class Storage:
    """Buffers that a stage's parameters and its optimizer are bound to; a ``Store`` of versions.

    Making one moves the parameters into the working buffer and the optimizer onto the true weights.

    Args:
        params: the parameters.
        optimizer: holds exactly these.
        master: whether the true weights have a buffer of their own.
        master_dtype: the dtype of that buffer and of the optimizer's state for 16-bit parameters;
            None: the parameters'.
        before: whether the true weights of one update before are kept as well.
        kept: buffers for versions that outlive their overwriting.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        optimizer: PredictingOptimizer,
        *,
        master: bool,
        master_dtype: torch.dtype | None,
        before: bool,
        kept: int,
    ) -> None:
        def wide(p: Tensor) -> torch.dtype:
            return true_dtype(p, master_dtype)

        def of_state(p: Tensor) -> torch.dtype:
            return optimizer.momentum_dtype(p) if master_dtype is None else wide(p)

        self.params = params
        self.working = Flat(params)
        self.master = Flat(params, wide) if master else None
        state = {key: Flat(params, of_state).views for key in optimizer.buffer_keys}
        optimizer.bind(None if self.master is None else self.master.views, state)
        self.optimizer = optimizer
        for p, view in self.working.views.items():
            view.copy_(p.detach())
            p.data = view
        self._addresses = [p.data_ptr() for p in params]
        self.kept: dict[Content, _Kept] = {}
        self._free = [_Kept(self.working, params) for _ in range(kept)]
        self.before: Flat | None = None
        self.ahead: Flat | None = None
        self._difference: Plan | None = None
        if self.master is not None:
            inside = [p.detach() for p in params]
            self.sink = optimizer.prediction_sink(dict(zip(params, inside, strict=True)))
            true = list(self.master.views.values())
            self._same = all(m.dtype == p.dtype for m, p in zip(true, params, strict=True))
            if self._same:
                self._master_plan = Plan(self.working.buffers, stashed=self.master.buffers)
            else:
                self._master_plan = Plan(true, outs=[inside])
                for m, p in zip(true, inside, strict=True):
                    m.copy_(p)
            if before:
                self.before = Flat(params, wide)
                old, outs = list(self.before.views.values()), inside
                if not self._same:  # no kernel extrapolates and rounds
                    self.ahead = Flat(params, wide)
                    outs = list(self.ahead.views.values())
                    self._rounding = Plan(outs, outs=[inside])
                self._difference = Plan(true, stashed=old, outs=[outs])

    def flats(self) -> list[Flat]:
        """The working buffer, the master and the kept versions."""
        flats = [self.working, self.master, self.before, self.ahead]
        flats += [kept.flat for kept in (*self._free, *self.kept.values())]
        return [flat for flat in flats if flat is not None]

    def in_place(self) -> bool:
        """Whether all parameters are where they were bound; a parameter replaced is not seen."""
        return [p.data_ptr() for p in self.params] == self._addresses

    def unbind(self) -> None:
        """Give parameters (they hold the true weights now) and state ordinary storage."""
        for p in self.params:
            p.data = p.detach().clone(memory_format=torch.preserve_format)
        self.optimizer.unbind()

    # A run.

    def begin(self) -> None:
        """Take what the parameters hold as the true weights."""
        if self.master is None:
            return
        if self._same:
            self._master_plan.stash()
        else:
            # Where a parameter is as it was written, its master still has more digits than it.
            for p, true in self.master.views.items():
                same = true.to(p.dtype) == p.detach()
                true.copy_(torch.where(same, true, p.detach().to(true.dtype)))
        self.remember()

    def end(self) -> None:
        """Forget the kept versions."""
        self._free.extend(self.kept.values())
        self.kept.clear()

    def remember(self) -> None:
        """Keep the true weights as those of one update before, if anybody asks for these."""
        if self._difference is not None:
            self._difference.stash()

    def views_of(self, content: Content) -> Mapping[Tensor, Tensor]:
        """Where a kept version is: parameter -> tensor."""
        return self.kept[content].flat.views

    # The store of ``Versions``.

    def keep(self, content: Content) -> None:
        """Copy what the working buffer holds to a buffer of its own."""
        kept = self._free.pop() if self._free else _Kept(self.working, self.params)
        kept.plan.stash()
        self.kept[content] = kept

    def restore(self, content: Content) -> None:
        """Copy what is kept to the working buffer."""
        self.kept[content].plan.restore_()

    def swap(self, content: Content, held: Content) -> None:
        """Exchange what is kept for what the working buffer holds."""
        kept = self.kept.pop(content)
        kept.plan.swap_()
        self.kept[held] = kept

    def drop(self, content: Content) -> None:
        """Let go of what is kept."""
        self._free.append(self.kept.pop(content))

    def write(self, content: Content) -> None:
        """Make it from the true weights, in the working buffer."""
        law = content.law
        if law is None:
            self.write_true()
        elif isinstance(law, Difference):
            assert self._difference is not None
            self._difference.extrapolate(steps=law.steps)
            if self.ahead is not None:
                self._rounding.write_out()
        else:
            self.sink.write(cast("Horizon", law))

    def write_true(self) -> None:
        """Copy the master to the working buffer, rounded where that is narrower."""
        assert self.master is not None
        if self._same:
            self._master_plan.restore_()
        else:
            self._master_plan.write_out()


def true_dtype(p: Tensor, master_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a parameter's true weights."""
    return p.dtype if master_dtype is None or p.dtype.itemsize != 2 else master_dtype
