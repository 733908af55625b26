"""Reads an optimizer's parameter groups and state: which tensors, which rule, how many updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spectrain_ext import _C

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
    warn_of_conversion,
)

Views = Mapping[Tensor, Tensor]


@dataclass(slots=True)
class Home:
    """The tensors of a bound optimizer, see ``Stepper.bind``."""

    weights: Views  # where updates go
    state: Mapping[str, Views]  # by key
    buffers: Mapping[Tensor, tuple[Tensor, ...]]  # the same by parameter
    # Checked views by address; kept so that no address is reused.
    _checked: dict[int, Views] = field(default_factory=dict)

    @classmethod
    def checked(
        cls,
        groups: Sequence[Group],
        weights: Views | None,
        state: Mapping[str, Views],
        keys: Sequence[str],
    ) -> Home:
        weights = {p: p for _, p in named(groups)} if weights is None else weights
        if any(key not in state for key in keys):
            raise ValueError(
                f"bind: buffers must have a mapping of tensors for {' and '.join(keys)}"
            )
        buffers: dict[Tensor, tuple[Tensor, ...]] = {}
        for name, p in named(groups):
            weight = _view("master", name, p, weights)
            buffers[p] = tuple(_view(key, name, p, state[key]) for key in keys)
            for key, buffer in zip(keys, buffers[p], strict=True):
                if not fits(weight, buffer) or buffer.dtype != buffers[p][0].dtype:
                    raise ValueError(
                        f"{key} of {name} must have the shape, strides, device and dtype of its "
                        f"weights ({_described(weight)}), got {_described(buffer)}"
                    )
        return cls(weights, state, buffers)

    def check(self, groups: Sequence[Group], views: Views, argument: str) -> None:
        """Raise ValueError unless the tensors have the layout of the weights."""
        if id(views) in self._checked:
            return
        for name, p in named(groups):
            view, weight = _view(argument, name, p, views), self.weights[p]
            if view.stride() != weight.stride():
                raise ValueError(
                    f"{argument} of {name} must be {_described(weight)}, got {_described(view)}"
                )
        self._checked[id(views)] = views


class ParameterTable:
    """An optimizer's parameters, numbered by position, with their rules, groups and state.

    It holds as long as groups and state are those that were read; ``holds`` asks whether they are.
    Reading moves state to where kernels can use it, and puts it into torch's dict there.

    Attributes:
        params, names, rules, groups: by position; the names are for errors.
        buffers: by position, None if the parameter was never updated.
        counts: the scalar state of all parameters, one row per kind: ``state[p]`` has views of its
            elements, so that one operation counts a step. None: the rule has none.
        in_memory: whether kernels read counts, which are on the parameters' device; the host knows
            only that parameters with equal counts take the same steps (``capturable=True``).
        values: the counts' last known values; in memory, those that were read.
        seen_state: what the state looked like, for ``_C.same``.
    """

    def __init__(
        self,
        rule: Rule,
        state_dtype: torch.dtype | None,
        home: Home | None,
        groups: Sequence[Group],
        state: State,
        # Its counts are used again: torch's state dict has views of them.
        previous: ParameterTable | None,
    ) -> None:
        every = ruled(rule, groups)
        self.names = [name for name, _, _ in every]
        self.params = [p for _, p, _ in every]
        self.rules = [each for _, _, each in every]
        self.groups = [index for index, group in enumerate(groups) for _ in group["params"]]
        self._rule, self._state_dtype, self._home = rule, state_dtype, home
        entries = []
        for name, p, each in every:
            check_dtypes(name, p.dtype, None)
            # Not state[p]: a defaultdict would add an entry.
            entries.append(read_entry(name, each, p, state.get(p) or {}))
        self.buffers = [
            None if entry is None else self._settled(p, entry[0])
            for p, entry in zip(self.params, entries, strict=True)
        ]
        self.counts: Tensor | None = None
        self.in_memory = bool(rule.scalars) and _capturable(groups)
        self._rows: tuple[Tensor, ...] = ()  # of the counts
        self._seen_counts = 0  # their version counter
        self.values: list[list[float]] = []
        initial = tuple(rule.scalars.values())
        if rule.scalars:
            counts = [initial if entry is None else entry[1] for entry in entries]
            self._take_counts(counts, None if previous is None else previous.counts)
        noted: dict[Tensor, dict[str, Any]] = {}
        for i, (p, buffers) in enumerate(zip(self.params, self.buffers, strict=True)):
            if buffers is not None:
                noted[p] = self.put(state, i, buffers)
                continue
            noted[p] = dict.fromkeys(self.rules[i].keys)
            for view in () if home is None else home.buffers[p]:
                view.zero_()  # so that the prediction equals the weights
        self._seen_params = tuple({"params": tuple(group["params"])} for group in groups)
        self.seen_state = tuple(noted.get(p, entry) for p, entry in state.items())

    def holds(self, groups: Sequence[Group], state: State) -> bool:
        """Whether groups and state are those that were read."""
        seen = self._seen_params, self.seen_state
        return _C.same((groups, state), seen) and (self.counts is None or self.counts_hold())

    def counts_hold(self) -> bool:
        """Whether nobody else has written counts."""
        assert self.counts is not None
        if self.in_memory:
            return self.counts._version == self._seen_counts
        return bool(self.counts.tolist() == self.values)

    def scalars(self, position: int) -> Scalars:
        return tuple([values[position] for values in self.values])

    def buffers_of(self, position: int) -> tuple[Tensor, ...]:
        """Return the buffers of a parameter, new ones if it was never updated."""
        buffers, p = self.buffers[position], self.params[position]
        if buffers is not None:
            return buffers
        if self._home is not None:
            return self._home.buffers[p]
        dtype = loaded_dtype(p.dtype, p.dtype, self._state_dtype)
        return tuple(empty_like(p, dtype).zero_() for _ in self._rule.buffers)

    def put(self, state: State, position: int, buffers: Sequence[Tensor]) -> dict[str, Any]:
        """Store a parameter's state in torch's dict, sharing memory."""
        entry, rule = state[self.params[position]], self.rules[position]
        if self.counts is not None:
            entry.update(zip(rule.scalars, self.counts[:, position].unbind(), strict=True))
        entry.update(zip(rule.buffers, buffers, strict=True))
        return {key: entry[key] for key in rule.keys}

    def count(self, positions: Sequence[int], scalars: Scalars) -> None:
        """Set the scalar state of parameters, given in ascending order."""
        if not positions:
            return
        first, last = positions[0], positions[-1] + 1
        for row, values, value in zip(self._rows, self.values, scalars, strict=True):
            if last - first == len(positions):
                row[first:last].fill_(value)
                values[first:last] = [value] * len(positions)
            else:
                row.index_fill_(0, torch.tensor(positions, device="cpu"), value)
                for position in positions:
                    values[position] = value

    def count_in_memory(self, positions: Sequence[int], found_inf: Tensor | None) -> None:
        """Count a step of parameters, given in ascending order, unless it finds an infinity."""
        if not positions:
            return
        assert self.counts is not None
        (row,) = self._rows
        by = 1.0 if found_inf is None else found_inf.eq(0.0).to(row.dtype).reshape(())
        first, last = positions[0], positions[-1] + 1
        if last - first == len(positions):
            row[first:last].add_(by)
        else:
            for position in positions:
                row[position].add_(by)
        self._seen_counts = self.counts._version

    def _settled(self, p: Tensor, buffers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the buffers in their final place, with a layout and dtype that kernels support."""
        if self._home is not None:
            views = self._home.buffers[p]
            for view, buffer in zip(views, buffers, strict=True):
                if view is not buffer:
                    warn_of_conversion(buffer.dtype, view.dtype)
                    view.copy_(buffer)
            return views
        if all(fits(p, buffer) and buffer.dtype == buffers[0].dtype for buffer in buffers):
            return buffers
        dtype = loaded_dtype(p.dtype, buffers[0].dtype, self._state_dtype)
        return tuple(converted(p, buffer, dtype) for buffer in buffers)

    def _take_counts(self, saved: Sequence[Scalars], counts: Tensor | None) -> None:
        shape, device = (len(self._rule.scalars), len(saved)), torch.device("cpu")
        if self.in_memory:
            device = _device_of_all(self.params)
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "step: parameters, state or gradients are not those of the last step; before "
                    "the capture make two steps like the one to be captured"
                )
        if counts is None or counts.shape != shape or counts.device != device:
            counts = torch.empty(shape, dtype=scalar_dtype(), device=device)
        values = torch.tensor(saved, dtype=torch.float64, device="cpu")
        counts.copy_(values.reshape(shape[::-1]).T)
        self.counts, self._rows, self.values = counts, counts.unbind(), counts.tolist()
        self._seen_counts = counts._version


def _capturable(groups: Sequence[Group]) -> bool:
    """Return whether steps are counted in memory; ValueError unless in all groups or in none."""
    flags = [bool(group.get("capturable", False)) for group in groups if group["params"]]
    if any(flags) and not all(flags):
        raise ValueError(
            f"parameter group {flags.index(False)}: expected capturable=True, as in group "
            f"{flags.index(True)}: steps are counted in memory in all groups, or in none"
        )
    return any(flags)


def _device_of_all(params: Sequence[Tensor]) -> torch.device:
    devices = dict.fromkeys(p.device for p in params)
    if len(devices) > 1:
        raise ValueError(
            "capturable: expected all parameters on one device, which has their step counts, got "
            f"{', '.join(map(str, devices))}"
        )
    return next(iter(devices))


def _view(argument: str, name: str, p: Tensor, views: Views) -> Tensor:
    if p not in views:
        raise ValueError(f"{argument} has no tensor for {name}")
    view = views[p]
    if view.shape != p.shape or view.device != p.device:
        raise ValueError(f"{argument} of {name} must be {_described(p)}, got {_described(view)}")
    return view


def _described(tensor: Tensor) -> str:
    return (
        f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} "
        f"on {tensor.device}"
    )
