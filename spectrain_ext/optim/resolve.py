"""Resolver: which Rows a step or a prediction of each group runs over, kept while they are true."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from spectrain_ext.optim.momentum import (
    KEY,
    check_dtypes,
    converted,
    empty_like,
    fits,
    loaded_dtype,
)
from spectrain_ext.optim.rows import Rows

Group = Mapping[str, Any]
State = Mapping[Tensor, dict[str, Any]]


@dataclass(slots=True)
class _Resolved:
    params: list[Tensor]
    with_momentum: bool
    idle: list[Tensor]  # parameters that need no row as yet
    rows: list[Rows]


class Resolver:
    """Resolves the groups of one optimizer; ``state`` is always that optimizer's.

    It does not refer to the optimizer: that would be a cycle, and dropping the optimizer would no
    longer free its memory at once.
    """

    def __init__(self, momentum_dtype: torch.dtype | None) -> None:
        self._momentum_dtype = momentum_dtype
        self._for_step: dict[int, _Resolved] = {}
        self._for_prediction: dict[int, _Resolved] = {}
        self._seen: tuple[Any, ...] = ()
        self._generation = 0

    def generation(self, state: State) -> int:
        """Count how often an entry of ``state`` came, went or was replaced."""
        if len(self._seen) != len(state) or not all(map(is_, state.values(), self._seen)):
            self._seen = tuple(state.values())
            self._generation += 1
        return self._generation

    def count_change(self) -> int:
        """Count a change that was made inside an entry; every Rows then looks again."""
        self._generation += 1
        return self._generation

    def for_step(self, index: int, group: Group, state: State, with_momentum: bool) -> list[Rows]:
        """Return the rows of a step: with momentum, parameters that have a gradient or a buffer."""
        known = self._for_step.get(index)
        if (
            known is None
            or known.with_momentum != with_momentum
            or not all(p.grad is None for p in known.idle)
            or not self._still_true(known, group, state)
        ):
            chosen = [
                i
                for i, p in enumerate(group["params"])
                if not with_momentum or p.grad is not None or buffer_of(state, p) is not None
            ]
            known = self._resolve(index, group, state, chosen, with_momentum)
            self._for_step[index] = known
        return known.rows

    def for_prediction(self, index: int, group: Group, state: State) -> list[Rows]:
        """Return the rows of a prediction in place: parameters with a buffer, each with a stash."""
        known = self._for_prediction.get(index)
        if known is None or not self._still_true(known, group, state):
            params = group["params"]
            chosen = [i for i, p in enumerate(params) if buffer_of(state, p) is not None]
            known = self._resolve(index, group, state, chosen, with_momentum=True, stash=True)
            self._for_prediction[index] = known
        return known.rows

    def keep_new_buffers(self, rows: Rows, active: Sequence[bool], state: State) -> None:
        """Put the buffers that a step has just begun into ``state``."""
        first = rows.first_step()
        if first is False or rows.buffers is None:
            return
        for row, (p, buffer) in enumerate(zip(rows.params, rows.buffers, strict=True)):
            if active[row] and (first is True or first[row]):
                state[p][KEY] = buffer
        self.count_change()

    def _still_true(self, known: _Resolved, group: Group, state: State) -> bool:
        params = group["params"]
        generation = self.generation(state)
        return (
            len(params) == len(known.params)
            and all(map(is_, params, known.params))
            and all(
                rows.storage_unchanged() and rows.state_unchanged(state, generation)
                for rows in known.rows
            )
            and (not known.with_momentum or all(buffer_of(state, p) is None for p in known.idle))
        )

    def _resolve(
        self,
        index: int,
        group: Group,
        state: State,
        chosen: Sequence[int],
        with_momentum: bool,
        stash: bool = False,
    ) -> _Resolved:
        params: list[Tensor] = group["params"]
        replaced: dict[Tensor, Tensor] = {}

        def buffer(i: int, p: Tensor) -> Tensor:
            where = f"parameter {i} of group {index}"
            check_dtypes(where, p.dtype, None)
            found = buffer_of(state, p)
            if found is None:
                return empty_like(p, loaded_dtype(p.dtype, p.dtype, self._momentum_dtype))
            if isinstance(found, Tensor) and fits(p, found):
                return found
            saved = getattr(found, "dtype", p.dtype)
            dtype = loaded_dtype(p.dtype, saved, self._momentum_dtype)
            replaced[p] = converted(where, p, found, dtype)
            return replaced[p]

        def make(group_index: int, indices: list[int], found: list[Tensor]) -> Rows:
            return Rows(
                group_index,
                indices,
                found,
                found,
                list(map(buffer, indices, found)) if with_momentum else None,
                stashed=[empty_like(p, p.dtype) for p in found] if stash else None,
            )

        rows = by_device(index, chosen, [params[i] for i in chosen], make)
        for p, new in replaced.items():
            state[p][KEY] = new
        generation = self.count_change()
        for each in rows:
            each.state_unchanged(state, generation)
        busy = set(chosen)
        idle = [p for i, p in enumerate(params) if i not in busy]
        return _Resolved(list(params), with_momentum, idle, rows)


def buffer_of(state: State, p: Tensor) -> Any:
    """Return the momentum that ``state`` holds for a parameter, None if there is none."""
    # Not state[p]: the optimizer's state is a defaultdict, and looking must not add an entry.
    entry = state.get(p)
    return None if entry is None else entry.get(KEY)


def by_device(
    group: int,
    indices: Sequence[int],
    params: Sequence[Tensor],
    make: Callable[[int, list[int], list[Tensor]], Rows],
) -> list[Rows]:
    """Make one Rows for each device that parameters of a group are on (a plan has one device)."""
    found: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
    for index, p in zip(indices, params, strict=True):
        listed = found.setdefault(p.device, ([], []))
        listed[0].append(index)
        listed[1].append(p)
    return [make(group, *listed) for listed in found.values()]
