"""Resolver: the Rows of a step and of a prediction in place, kept while they are true."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .buffers import empty_like, loaded_dtype
from .ledger import Group, Ledger, State
from .rows import Rows

Kinds = tuple[bool, ...]  # of every group: whether its rule uses the buffers now


@dataclass(slots=True)
class _Resolved:
    kinds: Kinds
    version: int
    idle: list[Tensor]  # parameters that need no row as yet
    rows: list[Rows]


class Resolver:
    """Resolves the parameters of one optimizer: one Rows per device, and kind of group."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._step: _Resolved | None = None
        self._prediction: _Resolved | None = None

    def for_step(self, groups: Sequence[Group], state: State, kinds: Kinds) -> list[Rows]:
        """Return the rows of a step: parameters that have a gradient, state, or need none."""
        known = self._step
        if (
            known is None
            or not self._still_true(known, groups, state, kinds)
            or not all(p.grad is None for p in known.idle)
        ):
            self._ledger.forget()  # parameters may have moved: their state follows them
            self._ledger.look(groups, state)
            ledger = self._ledger
            chosen = [
                i
                for i, p in enumerate(ledger.params)
                if not kinds[ledger.groups[i]]
                or p.grad is not None
                or ledger.buffers[i] is not None
            ]
            self._step = known = self._resolve(kinds, chosen)
        return known.rows

    def for_prediction(self, groups: Sequence[Group], state: State, kinds: Kinds) -> list[Rows]:
        """Return the rows of a prediction in place: parameters with state, each with a stash."""
        known = self._prediction
        if known is None or not self._still_true(known, groups, state, kinds):
            self._ledger.forget()
            self._ledger.look(groups, state)
            buffers = self._ledger.buffers
            chosen = [i for i in range(len(buffers)) if buffers[i] is not None]
            self._prediction = known = self._resolve(kinds, chosen, stash=True)
        return known.rows

    def _still_true(
        self, known: _Resolved, groups: Sequence[Group], state: State, kinds: Kinds
    ) -> bool:
        return (
            self._ledger.look(groups, state) == known.version
            and known.kinds == kinds
            and all(rows.storage_unchanged() for rows in known.rows)
        )

    def _resolve(self, kinds: Kinds, chosen: Sequence[int], stash: bool = False) -> _Resolved:
        ledger = self._ledger
        rows = []
        for with_buffers, positions in by_kind(ledger, chosen, kinds):
            params = [ledger.params[i] for i in positions]
            state = [self._buffers(i) for i in positions] if with_buffers else None
            rows.append(
                Rows(
                    ledger,
                    positions,
                    params,
                    None if state is None else list(zip(*state, strict=True)),
                    stashed=[empty_like(p, p.dtype) for p in params] if stash else None,
                )
            )
        busy = set(chosen)
        idle = [p for i, p in enumerate(ledger.params) if i not in busy]
        return _Resolved(kinds, ledger.version, idle, rows)

    def _buffers(self, position: int) -> tuple[Tensor, ...]:
        found = self._ledger.buffers[position]
        if found is not None:
            return found
        p = self._ledger.params[position]
        dtype = loaded_dtype(p.dtype, p.dtype, self._ledger.state_dtype)
        return tuple(empty_like(p, dtype).zero_() for _ in self._ledger.rule.buffers)


def by_kind(
    ledger: Ledger, positions: Sequence[int], kinds: Kinds
) -> Iterator[tuple[bool, list[int]]]:
    """Split positions by device and kind: a plan has one of each."""
    found: dict[tuple[torch.device, bool], list[int]] = {}
    for i in positions:
        found.setdefault((ledger.params[i].device, kinds[ledger.groups[i]]), []).append(i)
    for (_, with_buffers), some in found.items():
        yield with_buffers, some
