"""Ledger: an optimizer's parameters and their state in one list, read again once it has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from spectrain_ext import _C

from .rule import Group, Rule, Scalars
from .state import (
    Saved,
    State,
    check_dtypes,
    converted,
    empty_like,
    fits,
    loaded_dtype,
    named,
    read_entry,
)


class Ledger:
    """Every parameter of an optimizer under one number, its position, with its state.

    Torch keeps state in dicts that anybody may change at any time: so each use asks ``look`` first,
    which costs some list comparisons while nothing has changed. Scalar state (a step count) lives
    in one tensor for all parameters, whose elements ``state[p]`` holds: counting a step of all of
    them is one operation.

    It does not refer to the optimizer: that would be a cycle, and dropping the optimizer would no
    longer free its memory at once.
    """

    def __init__(self, rule: Rule[Any], state_dtype: torch.dtype | None) -> None:
        self.rule = rule
        self.state_dtype = state_dtype
        self.home: Mapping[Tensor, tuple[Tensor, ...]] | None = None  # bound buffers
        self.version = 0
        self.params: list[Tensor] = []
        self.groups: list[int] = []
        self.buffers: list[tuple[Tensor, ...] | None] = []  # None: never updated
        self._places: list[str] = []
        self._counts: dict[str, Tensor] = {}
        self._values: dict[str, list[float]] = {}
        self.forget()

    def forget(self) -> None:
        """Read everything again at the next look."""
        self._seen: tuple[Any, ...] | None = None

    def look(self, groups: Sequence[Group], state: State) -> int:
        """Make sure that all of this is true now; return a number that changes with it.

        Raises ValueError or TypeError for a state that does not fit its parameter.
        """
        if (
            self._seen is None
            or not _C.same((groups, state), self._seen)
            or any(self._counts[key].tolist() != values for key, values in self._values.items())
        ):
            self._read(groups, state)
        return self.version

    def where(self, position: int) -> str:
        return self._places[position]

    def scalars(self, position: int) -> Scalars:
        return tuple(values[position] for values in self._values.values())

    def buffers_of(self, position: int) -> tuple[Tensor, ...]:
        """Return the buffers of a parameter; new ones where it was never updated."""
        found, p = self.buffers[position], self.params[position]
        if found is not None:
            return found
        if self.home is not None:
            return self.home[p]
        dtype = loaded_dtype(p.dtype, p.dtype, self.state_dtype)
        return tuple(empty_like(p, dtype).zero_() for _ in self.rule.buffers)

    def cohort(self, position: int) -> tuple[int, bool, Scalars]:
        """Return what parameters share that the same numbers apply to."""
        started = self.buffers[position] is not None
        return self.groups[position], started, self.scalars(position)

    def count(self, positions: Sequence[int], scalars: Scalars) -> None:
        """Give parameters new scalar state."""
        if not positions:
            return
        first, last = positions[0], positions[-1] + 1
        for column, value in zip(self._counts.values(), scalars, strict=True):
            if last - first == len(positions):  # positions ascend
                column[first:last].fill_(value)
            else:
                column.index_fill_(0, torch.tensor(positions, device="cpu"), value)

    def count_of(self, position: int) -> dict[str, Tensor]:
        """Return the scalar state of a parameter as torch keeps it, sharing memory."""
        return {key: column[position] for key, column in self._counts.items()}

    def counted(self) -> None:
        """Note that the scalar state is as it should be."""
        self._values = {key: column.tolist() for key, column in self._counts.items()}

    def _read(self, groups: Sequence[Group], state: State) -> None:
        self.forget()
        rule = self.rule
        sizes = [len(group["params"]) for group in groups]
        params: list[Tensor] = list(chain.from_iterable(group["params"] for group in groups))
        self._places = [where for where, _ in named(groups)]
        saved: list[Saved | None] = []
        for where, p in zip(self._places, params, strict=True):
            check_dtypes(where, p.dtype, None)
            # Not state[p]: it is a defaultdict, and looking must not add an entry.
            saved.append(read_entry(where, rule, p, state.get(p) or {}))

        self.groups = [index for index, size in enumerate(sizes) for _ in range(size)]
        self.params = params
        self.buffers = [
            None if found is None else self._settled(p, found.buffers)
            for p, found in zip(params, saved, strict=True)
        ]
        self._take_scalars([None if found is None else found.scalars for found in saved])
        noted: dict[Tensor, dict[str, Any]] = {}
        numbers = {key: column.unbind() for key, column in self._counts.items()}
        for i, (p, buffers) in enumerate(zip(params, self.buffers, strict=True)):
            entry = state.get(p)
            if buffers is None:
                if self.home is not None:
                    for view in self.home[p]:
                        view.zero_()  # so that the prediction is the weights themselves
                if entry is not None:
                    noted[p] = dict.fromkeys(rule.keys)
                continue
            assert entry is not None
            entry.update(zip(rule.buffers, buffers, strict=True))
            for key, column in numbers.items():
                kept = entry[key]
                if not isinstance(kept, Tensor) or kept.data_ptr() != column[i].data_ptr():
                    entry[key] = column[i]
            noted[p] = {key: entry[key] for key in rule.keys}
        self.version += 1
        # Last: from here on it is true.
        self._seen = (
            tuple({"params": tuple(group["params"])} for group in groups),
            tuple(noted.get(p, entry) for p, entry in state.items()),
        )

    def _settled(self, p: Tensor, buffers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the buffers where they belong, in a layout and dtype that the kernels take."""
        if self.home is not None:
            for view, buffer in zip(self.home[p], buffers, strict=True):
                if view is not buffer:
                    view.copy_(buffer)
            return self.home[p]
        dtype = loaded_dtype(p.dtype, buffers[0].dtype, None)
        if all(fits(p, buffer) and buffer.dtype == dtype for buffer in buffers):
            return buffers
        dtype = loaded_dtype(p.dtype, buffers[0].dtype, self.state_dtype)
        return tuple(converted(p, buffer, dtype) for buffer in buffers)

    def _take_scalars(self, saved: Sequence[Scalars | None]) -> None:
        for n, (key, initial) in enumerate(self.rule.scalars.items()):
            values = [initial if found is None else found[n] for found in saved]
            column = self._counts.get(key)
            if column is None or len(column) != len(values):
                # torch.optim's choice: float32 unless the default is float64.
                wide = torch.get_default_dtype() == torch.float64
                dtype = torch.float64 if wide else torch.float32
                self._counts[key] = column = torch.empty(len(values), dtype=dtype, device="cpu")
            column.copy_(torch.tensor(values, dtype=torch.float64, device="cpu"))
        self.counted()
