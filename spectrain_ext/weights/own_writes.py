"""Notices parameters that somebody writes in place while a stage computes with other weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

import torch
from torch import Tensor

from .storage import Storage, local_part

_VERSION = attrgetter("_version")  # 30 us for 300 parameters
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class OwnWrites:
    """Writes of a stage's module into its own weights, in one run.

    A module may write its weights in a forward, as ``nn.Embedding(max_norm=1.0)`` does. It then
    writes the version that the stage computes with. What it has added there is added to the true
    weights too. To know what it adds, all weights are copied before the first forward of a run, and
    later those that it has written so far. Autograd's version counters tell of writes, but not of
    those through ``.data``.
    """

    def __init__(self, storage: Storage, names: Mapping[Tensor, str], idle: bool) -> None:
        self._storage, self._names = storage, names  # of the module's parameters that learn
        self._idle = idle  # whether the stage computes with the true weights, so nothing is lost
        self._params = list(names)
        self._counters = self._count()
        self._copied = [] if idle else self._params  # before forwards; all before the first one
        self._old: dict[Tensor, Tensor] = {}  # the copies of one forward
        self._bits: dict[Tensor, list[int]] = {}
        self.copies = not idle  # whether ``before`` has to be called
        self.known = False  # whether the module has written weights in this run

    def before(self) -> None:
        """Copy the weights that a forward may write."""
        self._old = {p: local_part(p).detach().clone() for p in self._copied}
        if not self.known:
            self._copied, self.copies = [], False

    def after(self) -> bool:
        """Whether the forward has written weights; ``carry_over`` has to follow then."""
        if [*map(_VERSION, self._params)] != self._counters:  # as _count does; a call less
            return True
        self._old = {}
        return False

    def written(self) -> str:
        """Return the name of a parameter that was written."""
        return self._names[self._changed()[0]]

    def carry_over(self, version: int) -> None:
        """Change the true weights, of this version, as the forward has changed the bound ones."""
        changed, old = self._changed(), self._old
        self._old, self._counters = {}, self._count()
        self._copied = list(dict.fromkeys((*self._copied, *changed)))
        self.copies = self.known = True
        for p in changed:
            if not self._storage.carry_over(local_part(p), old.get(p), version):
                raise RuntimeError(
                    f"parameter {self._names[p]!r} was changed in place, in a forward but not in "
                    "the first one of the run, or by another stage than the one that trains it, so "
                    "the true weights cannot follow; change weights in every forward, in a hook of "
                    "the optimizer's step, or between runs"
                )

    # Writes by others: the caller in the loop, hooks of modules.

    def lend(self) -> None:
        """Prepare for ``check``: in autograd's anomaly mode, look at all bits of the weights."""
        looks = torch.is_anomaly_enabled() and not self._idle
        self._bits = self._all_bits() if looks else {}

    def check(self, stage: int) -> None:
        """Raise RuntimeError if a parameter was written outside of a forward."""
        counters = [*map(_VERSION, self._params)]
        if self._idle or (counters == self._counters and not self._bits):
            self._counters = counters
            return
        bits, self._bits = self._bits, {}
        now = self._all_bits() if bits else {}
        for p in (*self._changed(), *(p for p in bits if bits[p] != now[p])):
            raise RuntimeError(
                f"stages[{stage}]: parameter {self._names[p]!r} was changed in place, and the "
                "true weights do not follow, since the stage may hold predicted or older ones; "
                "change weights in a hook of the optimizer's step, or end the run before"
            )

    def acknowledge(self, params: Iterable[Tensor]) -> None:
        """Take changes of these for known: whoever has made them has got an error."""
        told = set(params)
        now = zip(self._params, self._counters, self._count(), strict=True)
        self._counters = [new if p in told else old for p, old, new in now]

    def _all_bits(self) -> dict[Tensor, list[int]]:
        views = [buffer.flat.views for buffer in self._storage.version_buffers()]
        parts = {p: local_part(p) for p in self._names}
        return {
            p: [int(held[part].view(_BITS[part.element_size()]).sum()) for held in views]
            for p, part in parts.items()
            if part in views[0]
        }

    def _count(self) -> list[int]:
        return [*map(_VERSION, self._params)]  # a DTensor's, not its shard's

    def _changed(self) -> list[Tensor]:
        before, now = self._counters, self._count()
        if now == before:
            return []
        found = zip(self._params, before, now, strict=True)
        return [p for p, old, new in found if old != new]
