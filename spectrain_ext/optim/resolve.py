"""Resolver: the Rows of an optimizer, one for each device and kind of group, kept while true."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .ledger import Ledger
from .rows import Rows
from .rule import Group, Kinds
from .state import State, empty_like


def resolved(
    ledger: Ledger,
    positions: Sequence[int],
    kinds: Kinds,
    *,
    weights: Mapping[Tensor, Tensor] | None = None,
    outs: Mapping[Tensor, Tensor] | None = None,
    stash: bool = False,
) -> list[Rows]:
    """Return new rows of the parameters at these positions.

    Args:
        ledger: where parameters and state are listed.
        positions: in it, ascending.
        kinds: of every group.
        weights: what is updated in the place of the parameters.
        outs: where predictions are written.
        stash: whether there are buffers to keep the weights in.
    """
    found: dict[tuple[torch.device, bool], list[int]] = {}
    for i in positions:
        found.setdefault((ledger.params[i].device, kinds[ledger.groups[i]]), []).append(i)
    rows = []
    for (_, with_buffers), some in found.items():
        params = [ledger.params[i] for i in some]
        state = zip(*map(ledger.buffers_of, some), strict=True) if with_buffers else None
        rows.append(
            Rows(
                ledger,
                some,
                params if weights is None else [weights[p] for p in params],
                None if state is None else list(state),
                stashed=[empty_like(p, p.dtype) for p in params] if stash else None,
                outs=None if outs is None else [outs[p] for p in params],
            )
        )
    return rows


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
        ledger, busy = self._ledger, set(chosen)
        idle = [p for i, p in enumerate(ledger.params) if i not in busy]
        return _Resolved(kinds, ledger.version, idle, resolved(ledger, chosen, kinds, stash=stash))
