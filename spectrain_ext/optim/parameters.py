"""Tracks an optimizer's parameters, hyperparameters and state, and the tensors they are in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spectrain_ext import _C
from spectrain_ext.operators.laws import Law, terms_of
from spectrain_ext.operators.numbers import Term

from .state import (
    Group,
    Rule,
    Scalars,
    State,
    check_dtypes,
    converted,
    empty_like,
    fits,
    loaded_dtype,
    named,
    read_entry,
    ruled,
    scalar_dtype,
)

if TYPE_CHECKING:
    from spectrain_ext.operators.numbers import Corrected

Views = Mapping[Tensor, Tensor]

_REMEMBERED = 8  # checked laws; a training loop uses the same few
_IMMUTABLE = (float, int, str, type(None))


class Binding:
    """The tensors of each parameter's true weights and state, as given to ``bind``."""

    def __init__(
        self,
        groups: Sequence[Group],
        master: Views | None,
        state: Mapping[str, Views],  # buffers by key of the state
        keys: Sequence[str],
    ) -> None:
        self.state = state
        self._checked: dict[int, Views] = {}  # by address; kept so that no address is reused
        self.weights = {p: p for _, p in named(groups)} if master is None else master
        self.buffers: dict[Tensor, tuple[Tensor, ...]] = {}
        if any(key not in state for key in keys):
            raise ValueError(
                f"bind: buffers must have a mapping of tensors for {' and '.join(keys)}"
            )
        for where, p in named(groups):
            weight = _view("master", where, p, self.weights)
            buffers = tuple(_view(key, where, p, state[key]) for key in keys)
            for key, buffer in zip(keys, buffers, strict=True):
                if not fits(weight, buffer) or buffer.dtype != buffers[0].dtype:
                    raise ValueError(
                        f"{key} of {where} must have the shape, strides, device and dtype of its "
                        f"weights ({_described(weight)}), got {_described(buffer)}"
                    )
            self.buffers[p] = buffers

    def check(self, groups: Sequence[Group], views: Views, name: str) -> None:
        """Raise ValueError unless the tensors have the layout of the weights."""
        if id(views) in self._checked:
            return
        for where, p in named(groups):
            view, weight = _view(name, where, p, views), self.weights[p]
            if view.stride() != weight.stride():
                raise ValueError(
                    f"{name} of {where} must be {_described(weight)}, got {_described(view)}"
                )
        self._checked[id(views)] = views


class Parameters:
    """All parameters of an optimizer, numbered by position, with their state and groups."""

    # No reference to the optimizer: a cycle would keep its memory alive.
    def __init__(
        self,
        rule: Rule,
        state_dtype: torch.dtype | None = None,
        binding: Binding | None = None,
    ) -> None:
        self.rule = rule
        self.rules: list[Rule] = []  # by position
        self.binding = binding
        self._state_dtype = state_dtype
        self.params: list[Tensor] = []
        self.places: list[str] = []  # for errors
        self.groups: list[int] = []
        self.buffers: list[tuple[Tensor, ...] | None] = []  # None: never updated
        # One row per kind of scalar. ``state[p]`` holds views of the elements, so that one
        # operation counts a step of all parameters.
        self._counts: Tensor | None = None
        self._rows: tuple[Tensor, ...] = ()  # of the counts
        self._values: list[list[float]] = []  # their last known values
        self._version = 0
        self.forget()
        self.kinds: list[bool] = []  # by group: whether it has momentum
        self._numbers: list[Any] = []
        # Then: the groups' values, the factor on their learning rates, the correction of steps.
        self._numbers_of: tuple[tuple[Any, ...], ...] | None = None
        self._factor = 1.0
        self._correction: Corrected | None = None
        self._good: list[tuple[Law, bool]] = []

    # Hyperparameters of the groups.

    def check_group(self, groups: Sequence[Group], index: int) -> None:
        """Refuse what a group has: numbers out of range, a dtype, a parameter twice."""
        self.rule.read(index, groups[index])
        seen: dict[Tensor, int] = {}
        for i, p in enumerate(groups[index]["params"]):
            where = f"parameter {i} of group {index}"
            if p in seen:
                raise ValueError(f"{where} is parameter {seen[p]} of that group once more")
            seen[p] = i
            check_dtypes(where, p.dtype, self._state_dtype)

    def numbers(
        self, groups: Sequence[Group], factor: float = 1.0, correction: Corrected | None = None
    ) -> list[Any]:
        """Return the hyperparameters of every group; the same list while nothing changes."""
        seen = self._numbers_of
        same = factor == self._factor and correction is self._correction
        if seen is None or not same or not _C.same(groups, seen):
            self._numbers_of, self._factor, self._correction = None, factor, correction
            self._numbers = [self.rule.read(index, group) for index, group in enumerate(groups)]
            if factor != 1.0:
                self._numbers = [replace(n, lr=n.lr * factor) for n in self._numbers]
            if correction is not None:
                self._numbers = [_corrected(*of, correction) for of in enumerate(self._numbers)]
            self._good = []
            kinds = [numbers.has_momentum for numbers in self._numbers]
            if kinds != self.kinds:
                self.kinds, self._version = kinds, self._version + 1
            if all(map(_stays, groups)):  # no mutable values, such as a learning rate in a tensor
                self._numbers_of = tuple(tuple(group.values()) for group in groups)
        return self._numbers

    def check_law(self, groups: Sequence[Group], law: Law, has_gradient: bool) -> None:
        """Raise ValueError if a law does not fit the hyperparameters of a group."""
        if (law, has_gradient) in self._good:
            return
        for index, numbers in enumerate(self._numbers):
            try:
                terms = terms_of(law, numbers)
            except ValueError as error:
                raise ValueError(f"parameter group {index}: {error}") from None
            if terms and groups[index]["params"] and not self.kinds[index]:
                raise ValueError(
                    f"parameter group {index} has momentum 0: a prediction needs a momentum buffer"
                )
            if not has_gradient and any(term.gradient for term in terms):
                raise ValueError(
                    f"steps: {law} needs the gradient; order it with write_with_next_step"
                )
        self._good[_REMEMBERED:] = []
        self._good.insert(0, (law, has_gradient))

    # Parameters and their state.

    def forget(self) -> None:
        """Read everything again at the next call of `look`."""
        self._seen: tuple[Any, ...] | None = None

    def look(self, groups: Sequence[Group], state: State) -> int:
        """Read groups and state again if they have changed; return a number of their version."""
        # Checked at each use, because torch's state dicts may be changed by anyone at any time.
        if (
            self._seen is None
            or not _C.same((groups, state), self._seen)
            or (self._counts is not None and self._counts.tolist() != self._values)
        ):
            self._read(groups, state)
        return self._version

    def scalars(self, position: int) -> Scalars:
        return tuple(values[position] for values in self._values)

    def buffers_of(self, position: int) -> tuple[Tensor, ...]:
        """Return the buffers of a parameter, new ones if it was never updated."""
        buffers, p = self.buffers[position], self.params[position]
        if buffers is not None:
            return buffers
        if self.binding is not None:
            return self.binding.buffers[p]
        dtype = loaded_dtype(p.dtype, p.dtype, self._state_dtype)
        return tuple(empty_like(p, dtype).zero_() for _ in self.rule.buffers)

    def put(self, state: State, position: int, buffers: Sequence[Tensor]) -> dict[str, Any]:
        """Store a parameter's state in torch's dict, sharing memory."""
        entry, rule = state[self.params[position]], self.rules[position]
        if self._counts is not None:
            entry.update(zip(rule.scalars, self._counts[:, position].unbind(), strict=True))
        entry.update(zip(rule.buffers, buffers, strict=True))
        return {key: entry[key] for key in rule.keys}

    def count(self, positions: Sequence[int], scalars: Scalars) -> None:
        """Set the scalar state of parameters, given in ascending order."""
        if not positions:
            return
        first, last = positions[0], positions[-1] + 1
        for row, values, value in zip(self._rows, self._values, scalars, strict=True):
            if last - first == len(positions):
                row[first:last].fill_(value)
                values[first:last] = [value] * len(positions)
            else:
                row.index_fill_(0, torch.tensor(positions, device="cpu"), value)
                for position in positions:
                    values[position] = value

    def _read(self, groups: Sequence[Group], state: State) -> None:
        self.forget()
        every = ruled(self.rule, groups)
        self.places = [where for where, _, _ in every]
        self.params = [p for _, p, _ in every]
        self.rules = [rule for _, _, rule in every]
        self.groups = [index for index, group in enumerate(groups) for _ in group["params"]]
        entries = []
        for where, p, rule in every:
            check_dtypes(where, p.dtype, None)
            # Not state[p]: a defaultdict would add an entry.
            entries.append(read_entry(where, rule, p, state.get(p) or {}))
        self.buffers = [
            None if entry is None else self._settled(p, entry[0])
            for p, entry in zip(self.params, entries, strict=True)
        ]
        initial = tuple(self.rule.scalars.values())
        self._take_scalars([initial if entry is None else entry[1] for entry in entries])
        noted: dict[Tensor, dict[str, Any]] = {}
        for i, (p, buffers) in enumerate(zip(self.params, self.buffers, strict=True)):
            if buffers is not None:
                noted[p] = self.put(state, i, buffers)
                continue
            noted[p] = dict.fromkeys(self.rules[i].keys)
            for view in () if self.binding is None else self.binding.buffers[p]:
                view.zero_()  # so that the prediction equals the weights
        self._version += 1
        # Set last, once everything has been read.
        self._seen = (
            tuple({"params": tuple(group["params"])} for group in groups),
            tuple(noted.get(p, entry) for p, entry in state.items()),
        )

    def _settled(self, p: Tensor, buffers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the buffers in their final place, with a layout and dtype that kernels support."""
        if self.binding is not None:
            home = self.binding.buffers[p]
            for view, buffer in zip(home, buffers, strict=True):
                if view is not buffer:
                    view.copy_(buffer)
            return home
        dtype = loaded_dtype(p.dtype, buffers[0].dtype, None)
        if all(fits(p, buffer) and buffer.dtype == dtype for buffer in buffers):
            return buffers
        dtype = loaded_dtype(p.dtype, buffers[0].dtype, self._state_dtype)
        return tuple(converted(p, buffer, dtype) for buffer in buffers)

    def _take_scalars(self, saved: Sequence[Scalars]) -> None:
        if not self.rule.scalars:
            return
        shape = len(self.rule.scalars), len(saved)
        if self._counts is None or self._counts.shape != shape:
            self._counts = torch.empty(shape, dtype=scalar_dtype(), device="cpu")
            self._rows = self._counts.unbind()
        values = torch.tensor(saved, dtype=torch.float64, device="cpu")
        self._counts.copy_(values.reshape(shape[::-1]).T)
        self._values = self._counts.tolist()


def _corrected(index: int, numbers: Any, correction: Corrected) -> Any:
    where = f"parameter group {index}"
    if not hasattr(numbers, "correction"):
        raise ValueError(f"{where}: {correction} is not defined for updates of matrices")
    corrected = replace(numbers, correction=correction)
    try:
        step = corrected.setting()[-1]
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if not isinstance(step, Term):
        raise TypeError(
            f"{where}: {correction}: expected a step as a Term, such as numbers.term(), "
            f"got {step!r}"
        )
    return corrected


def _stays(group: Group) -> bool:
    for key, value in group.items():
        inside = value if type(value) is tuple else (value,)
        if key != "params" and not all(isinstance(v, _IMMUTABLE) for v in inside):
            return False
    return True


def _view(name: str, where: str, p: Tensor, views: Views) -> Tensor:
    if p not in views:
        raise ValueError(f"{name} has no tensor for {where}")
    view = views[p]
    if view.shape != p.shape or view.device != p.device:
        raise ValueError(f"{name} of {where} must be {_described(p)}, got {_described(view)}")
    return view


def _described(tensor: Tensor) -> str:
    return (
        f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} "
        f"on {tensor.device}"
    )
