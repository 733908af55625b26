"""Cuts any model that torch.export can trace into stages with training and evaluation graphs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import eq
from typing import Any

from torch import Tensor, nn

from spectrain_ext.modules import is_valueless, slots_of, untouched
from spectrain_ext.partitioning import (
    NO_LOSS,
    Profile,
    Tie,
    blaming_example,
    check_stages,
    measure,
    slices_of,
)
from spectrain_ext.transport import Value

from .outline import (
    BY_POSITION,
    SPLIT_HINT,
    Columns,
    columns_in,
    evaluated,
    has_two_lists,
    hooked,
    is_pretrained,
    run_pretrained,
)
from .own_loss import OwnLoss, own_loss
from .programs import Graph, Mode, Port, Slot, State, TracedStage
from .tracing import MODE_NAMES, TracedModel, traces


class _Assembly:
    """Makes stages from a model's traces."""

    def __init__(self, model: nn.Module, by_mode: dict[Mode, TracedModel | str]) -> None:
        self._training = model.training
        self._names: dict[Tensor, list[str]] = {}  # all names of each parameter and module buffer
        self._transient: set[str] = set()  # names of buffers that are not saved
        for owner, key, name, tensor in slots_of(model):
            self._names.setdefault(tensor, []).append(name)
            if key in owner._non_persistent_buffers_set:
                self._transient.add(name)
        first, traces = next(iter(by_mode.items()))
        assert not isinstance(traces, str)
        self._first, self._first_name = traces, MODE_NAMES[first]
        self._users: dict[Tensor, set[int]] = {}  # the stages that need a tensor
        self._modes: dict[Mode, TracedModel | str] = {}
        for mode, trace in by_mode.items():
            if not isinstance(trace, str):
                trace = self._mismatch(trace, MODE_NAMES[mode]) or trace
            self._modes[mode] = trace
            for k, (_, state) in enumerate(trace if not isinstance(trace, str) else ()):
                for tensor in state.values():
                    self._users.setdefault(tensor, set()).add(k)
        near = 0
        for tensor in self._names:  # one that no graph uses stays with the one before it
            near = max(self._users.setdefault(tensor, {near}))

    def stages(self) -> list[TracedStage]:
        return [self._stage(k) for k in range(len(self._first))]

    def _stage(self, k: int) -> TracedStage:
        part = State()
        slots: dict[Tensor, Slot] = {}
        for tensor in self._names:  # in the model's order
            if k in self._users[tensor]:
                for name in self._names_at(k, tensor):
                    slot = _put(part, name, tensor, name not in self._transient)
                    slots.setdefault(tensor, slot)
        named = len(slots)
        modes: dict[Mode, Graph | str] = {}
        for mode, trace in self._modes.items():
            if isinstance(trace, str):
                modes[mode] = trace
                continue
            program, state = trace[k]
            for tensor in state.values():
                if tensor not in slots:
                    # A constant of the code is not saved, but moves with the stage.
                    slots[tensor] = _put(part, f"_constants.{len(slots) - named}", tensor, False)
            modes[mode] = program, [slots[tensor] for tensor in state.values()]
        return TracedStage(part, modes, self._training)

    def _names_at(self, k: int, tensor: Tensor) -> list[str]:
        """Return the names of a tensor on one of its stages; all its names are used somewhere."""
        # The graph has one name for a tied tensor, so the stages' own names are unknown. The first
        # stage gets the first name, and so on; the last stage gets those left.
        names, users = self._names[tensor], sorted(self._users[tensor])
        if len(users) == 1 or not isinstance(tensor, nn.Parameter):
            return names
        at = min(users.index(k), len(names) - 1)
        return names[at:] if k == users[-1] else names[at : at + 1]

    def _mismatch(self, trace: TracedModel, mode: str) -> str | None:
        """Return why its stages cannot replace those of the first trace, or None."""
        first, first_mode = self._first, self._first_name
        if len(trace) != len(first):
            return (
                f"{mode} the model has {len(trace)} stages, and {len(first)} {first_mode}; cut at "
                "submodules that it calls in both, or evaluate the whole model"
            )
        for k, ((program, state), (other, _)) in enumerate(zip(trace, first, strict=True)):
            here, there = program.inputs, other.inputs
            if not _alike(here, there):
                return (
                    f"{mode} stage {k} takes {', '.join(map(str, here))}, and {first_mode} "
                    f"{', '.join(map(str, there))}; cut where both are alike, or evaluate the "
                    "whole model"
                )
            for tensor in state.values():
                elsewhere = self._users.get(tensor, {k})
                if k not in elsewhere and tensor in self._names:
                    return (
                        f"{mode} {self._names[tensor][0]!r} belongs to stage {k}, otherwise to "
                        f"stage {min(elsewhere)}; move the split, or evaluate the whole model"
                    )
        return None


def _alike(here: Sequence[Port], there: Sequence[Port]) -> bool:
    """Whether the same tensors pass; several must also have the same sources."""
    return len(here) == len(there) and all(
        a.dtype == b.dtype and a.shape == b.shape and (len(here) == 1 or a.source == b.source)
        for a, b in zip(here, there, strict=True)
    )


def _put(root: nn.Module, name: str, tensor: Tensor, persistent: bool) -> Slot:
    *path, leaf = name.split(".")
    owner = root
    for atom in path:
        if atom not in owner._modules:
            setattr(owner, atom, State())
        owner = owner.get_submodule(atom)
    if isinstance(tensor, nn.Parameter):
        setattr(owner, leaf, tensor)
    else:
        owner.register_buffer(leaf, tensor, persistent)
    return owner, leaf


# Where to cut


class Traceable:
    """A model to cut before submodules that it calls once, or at ``split_points``."""

    narrow: tuple[Tie, ...] = ()

    def __init__(
        self,
        model: nn.Module,
        n_stages: int,
        example: Value,
        split_points: Sequence[str] | None,
        kept: tuple[str, ...],  # columns for the loss
        planned: Sequence[str] | None,  # the plan's names of blocks
    ) -> None:
        if is_valueless(model):
            raise ValueError(
                f"model: a {type(model).__name__} on the meta device cannot be traced; make it "
                "with values, or give a list of blocks"
            )
        self.model, self._example = model, example
        self.columns: Columns | None = None
        self.value, self._output = example, None
        if is_pretrained(model):
            accepted, self._output = run_pretrained(model, example, kept)
            self.columns = accepted.narrowed(example)
        elif isinstance(example, Mapping):
            self.columns = columns_in(model, example, kept)
        if self.columns is not None:
            self.value = tuple(self.columns.of(example).values())
        self.run = partial((self.columns or BY_POSITION).run, model)
        self._begins: Sequence[str] | None = None  # where blocks may begin; None: at split_points
        self.blocks: Sequence[nn.Module]
        if split_points is not None:
            self._calls()
            check_stages(n_stages, len(split_points) + 1)
            self.names = [str(index) for index in range(len(split_points) + 1)]
            self.blocks = self._split(split_points)
            return
        levels = list(_levels(model, self._calls()))
        if planned is None:
            self._begins, self.blocks = self._finest_cut(levels, n_stages)
        else:  # nothing is traced, and the blocks are the submodules
            names = max(levels, key=lambda level: sum(map(eq, _block_names(level), planned)))
            self._begins, self.blocks = names, [model.get_submodule(name) for name in names]
        self.names = _block_names(self._begins)
        self.narrow = tuple(
            Tie(index - 1, index, f"{block.takes} tensors pass before block {index}")
            for index, block in enumerate(self.blocks)
            if index and isinstance(block, TracedStage) and block.takes > 1
        )

    def _split(self, points: Sequence[str], once: bool = False) -> list[TracedStage]:
        """Trace the model and cut it before submodules; the model is unchanged."""
        modules = dict(self.model.named_modules())
        for name in points:
            if name not in modules or not name:
                raise ValueError(f"split_points: the model has no submodule {name!r}")
        arguments: Any = self.value if isinstance(self.value, tuple) else (self.value,)
        begins = {modules[name] for name in points}
        by_mode = traces(self.model, self.columns or BY_POSITION, arguments, begins, once)
        return _Assembly(self.model, by_mode).stages()

    def stages(self, ends: Sequence[int]) -> list[nn.Module]:
        if self._begins is None:
            return slices_of(dict(zip(self.names, self.blocks, strict=True)), ends)
        # Each stage is traced as one graph.
        return [*self._split([self._begins[end] for end in ends[:-1]])]

    def measure(self, repeats: int = 5) -> Profile:
        return measure(self.blocks, self.value, repeats=repeats)

    def loss_of(self, stages: Sequence[nn.Module]) -> OwnLoss | str:
        first = next(m for m in stages[0].modules() if isinstance(m, TracedStage))
        first.columns = self.columns
        if self.columns is None or self._output is None:
            return NO_LOSS
        return own_loss(self.model, self.columns, self._example, self._output)

    def _calls(self) -> dict[nn.Module, int]:
        """Run the model; return how often each module is called, in the order of first calls."""
        model, example = self.model, self.value
        for index, argument in enumerate(example if isinstance(example, tuple) else (example,)):
            if not isinstance(argument, Tensor):
                raise TypeError(
                    f"example_input: expected a tensor or a tuple of tensors, got a "
                    f"{type(argument).__name__} at {index}"
                )
        calls: dict[nn.Module, int] = {}
        running: list[nn.Module] = []

        def begin(module: nn.Module, *_: object) -> None:
            calls[module] = calls.get(module, 0) + 1
            running.append(module)

        def end(*_: object) -> None:
            running.pop()

        try:
            with hooked(model.modules(), begin, end), evaluated(model), untouched(model):
                self.run(example)
        except Exception as error:
            names = {module: name for name, module in model.named_modules()}
            name = names[running[-1]] if running else ""
            where = f"{type(model).__name__}{f' in its {name!r}' * bool(name)}"
            with blaming_example(where, example):
                raise error
        return calls

    def _finest_cut(
        self, levels: Sequence[Sequence[str]], n_stages: int
    ) -> tuple[Sequence[str], Sequence[nn.Module]]:
        """Cut before as many submodules as possible; return their names, and the blocks."""
        why: Exception | None = None
        most = 1
        # First the innermost modules with parameters of their own. If torch.export fails, or a
        # value cannot be passed on, then the modules around them.
        for names in levels:
            if len(names) < n_stages:
                most = max(most, len(names))
                continue
            try:
                blocks = self._split(names[1:], once=True)
            except ValueError as error:  # for example a value that cannot be passed on
                why = error
                continue
            except RuntimeError as error:
                raise RuntimeError(f"{error}; {SPLIT_HINT}") from error
            if len(blocks) == len(names):
                return names, blocks
        if why is not None:
            raise ValueError(f"model: {why}; {SPLIT_HINT}") from why
        raise ValueError(
            f"n_stages: expected 1 to {most} (the blocks), got {n_stages}; {SPLIT_HINT}"
        )


def _block_names(names: Sequence[str]) -> list[str]:
    """Return names of blocks; the whole model, whose name is empty, is "0"."""
    return [name or str(index) for index, name in enumerate(names)]


def _levels(model: nn.Module, calls: Mapping[nn.Module, int]) -> Iterator[list[str]]:
    """Yield lists of submodules that may begin a block, in call order, the finest list first."""
    names = {module: name for name, module in model.named_modules() if name}
    once = {names[module] for module, count in calls.items() if count == 1 and module in names}
    inner = [names[m] for m in calls if names.get(m) in once and m._parameters]
    depth = max((name.count(".") + 1 for name in inner), default=0)
    before: list[str] = []
    for level in range(depth + has_two_lists(model), 0, -1):
        if level > depth:  # the blocks of the lists, such as encoder.layers.0
            around = dict.fromkeys(re.sub(r"(\.\d+)\..*", r"\1", name) for name in inner)
        else:
            around = dict.fromkeys(".".join(name.split(".")[:level]) for name in inner)
        # A module that contains other candidates does not begin a block.
        outer = {name for name in around if any(n.startswith(name + ".") for n in around)}
        level_names = [name for name in around if name not in outer and name in once]
        if level_names and level_names != before:
            yield level_names
        before = level_names
    yield [""]  # the whole model
