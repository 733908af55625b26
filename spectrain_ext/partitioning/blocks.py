"""Makes blocks and stages of a list of modules, and finds what blocks and stages share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from itertools import chain
from typing import Any
from weakref import ref

from torch import Tensor, nn

from spectrain_ext.cutting import BatchColumns, Cut, change_cut, cut_of
from spectrain_ext.modules import is_valueless, slots_of
from spectrain_ext.transport.message import Value

from .profile import Profile, Tie, measure, profile_by_parameters

#: Why a model has no loss.
NO_LOSS = "the model has no loss of its own that is known; give a loss_fn"


class Slice(nn.Sequential):
    """A stage made of a model's consecutive blocks, which have these names there."""

    def __init__(self, blocks: Iterable[nn.Module], names: Sequence[str]) -> None:
        super().__init__(*blocks)
        prefixes: dict[str, str] = {}
        for n, (block, name) in enumerate(zip(self, names, strict=True)):
            inner = cut_of(block).prefixes  # one that has the model's names already
            own = {"": f"{name}."} if inner is None else inner
            prefixes |= {f"{n}.{here}": there for here, there in own.items()}
        self.cut = Cut(prefixes=prefixes)


def blocks_of(model: nn.Module | Sequence[nn.Module]) -> dict[str, nn.Module]:
    if isinstance(model, nn.Module) and not isinstance(model, (nn.Sequential, nn.ModuleList)):
        raise TypeError(
            f"model: expected an nn.Sequential or a list of modules, got a {type(model).__name__}"
        )
    named = model._modules.items() if isinstance(model, nn.Module) else enumerate(model)
    blocks: dict[str, nn.Module] = {}
    for name, block in named:
        if not isinstance(block, nn.Module):
            raise TypeError(f"model[{name}]: expected an nn.Module, got {type(block).__name__}")
        blocks[str(name)] = block
    if not blocks:
        raise ValueError("model: expected at least one block, got none")
    return blocks


def slices_of(blocks: Mapping[str, nn.Module], ends: Sequence[int]) -> list[nn.Module]:
    names, modules = list(blocks), list(blocks.values())
    return [Slice(modules[s:e], names[s:e]) for s, e in zip((0, *ends[:-1]), ends, strict=True)]


class BlockList:
    """A list of blocks to cut between, by name."""

    narrow: tuple[Tie, ...] = ()
    columns = None

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        example: Value | None,
        kept: tuple[str, ...],  # columns for the loss
        planned: bool,
    ) -> None:
        self.names, self.blocks = list(blocks), list(blocks.values())
        self._named, self.value = blocks, example
        self.model = nn.ModuleList(self.blocks)
        self.run = partial(reduce, lambda value, block: block(value), self.blocks)
        if example is None and not planned and not is_valueless(*self.blocks):
            raise TypeError("example_input: expected a microbatch, got None")
        if kept:
            raise ValueError(
                "columns: of a list of blocks the first takes the whole batch, of which nothing is "
                f"dropped; got {list(kept)}"
            )

    def stages(self, ends: Sequence[int]) -> list[nn.Module]:
        return slices_of(self._named, ends)

    def measure(self, repeats: int = 5) -> Profile:
        if self.value is None:
            return profile_by_parameters(self.blocks)
        return measure(self.blocks, self.value, repeats=repeats)

    def loss_of(self, stages: object) -> str:
        return NO_LOSS


def ties_of(
    blocks: Sequence[nn.Module],
    kinds: str = "blocks",
    is_constant: Callable[[Tensor], bool] = lambda _: False,
    parameters: bool = False,
) -> tuple[Tie, ...]:
    """Return the modules and buffers that blocks share and cannot have copies of; or parameters."""
    owners: dict[object, tuple[int, str]] = {}
    ties: dict[tuple[int, int], Tie] = {}
    for index, block in enumerate(blocks):
        named: dict[str, Iterable[tuple[str, Any]]] = {"weight": block.named_parameters()}
        if not parameters:
            named = {"buffer": block.named_buffers(), "module": block.named_modules()}
        for kind, parts in named.items():
            for name, part in parts:
                first, its_name = owners.setdefault(part, (index, name))
                if first == index or (first, index) in ties:
                    continue
                if kind == "buffer" and is_constant(part):
                    continue
                if (cut := cut_of(block)).prefixes is not None:
                    what = f"{kind} {cut.full_name(name)!r}, which {kinds} {first} and {index} use"
                else:
                    one, other = f"{first}.{its_name}".rstrip("."), f"{index}.{name}".rstrip(".")
                    what = f"{kind} {one!r}, which is {other!r} too"
                ties[first, index] = Tie(first, index, what)
    return tuple(ties.values())


# What one stage alone does not show of the whole model


def mark_ties(stages: Sequence[nn.Module]) -> None:
    """Record in each stage's ``cut.ties`` which of its parameters an earlier stage holds too.

    ``partition`` and ``cut_at`` do this. For stages of your own see ``Cut``.
    """
    homes: dict[nn.Parameter, tuple[int, str]] = {}
    for k, stage in enumerate(stages):
        named = list(stage.named_parameters(remove_duplicate=False))
        tied = {name: homes[p] for name, p in named if p in homes}
        if tied:
            change_cut(stage, f"stages[{k}]", ties=tied)
        for name, p in named:
            homes.setdefault(p, (k, name))


def mark(
    stages: Sequence[nn.Module],
    model: nn.Module | Sequence[nn.Module],
    columns: BatchColumns | None = None,  # that the first stage takes
) -> None:
    """Record in every stage what it cannot know alone: see ``Cut``."""
    mark_ties(stages)
    origin = _Uncut(model) if isinstance(model, nn.Module) else None
    known: dict[Tensor, list[str]] = {}
    buffers: set[str] = set()
    copied: list[frozenset[str]] = []
    for stage in stages:
        full_name = cut_of(stage).full_name
        for _, _, name, tensor in slots_of(stage):
            known.setdefault(tensor, []).append(full_name(name))
        own = {name: full_name(name) for name, _ in stage.named_buffers(remove_duplicate=False)}
        copied.append(frozenset(name for name, full in own.items() if full in buffers))
        buffers.update(own.values())
    names = frozenset(chain.from_iterable(known.values()))
    for k, stage in enumerate(stages):
        change_cut(
            stage,
            f"stages[{k}]",
            index=k,
            count=len(stages),
            copied_buffers=copied[k],
            columns=None if k else columns,
            names=names,
            tied_names={n: known[t] for _, _, n, t in slots_of(stage) if len(known[t]) > 1},
            origin=origin,
        )


class _Uncut:
    """The model that stages were cut from, while it exists; copies of stages refer to none.

    Warns of the model's state_dict after other processes have trained some stages.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model: Callable[[], nn.Module | None] = ref(model) if model else lambda: None
        self._elsewhere: Sequence[int] | None = None  # None: the model has no hooks yet

    def trained_elsewhere(self, stages: Sequence[int]) -> None:
        model = self._model()
        if model is not None and self._elsewhere is None:
            model.register_state_dict_post_hook(self)
            model.register_load_state_dict_post_hook(self.loaded)
        self._elsewhere = stages

    def loaded(self, model: nn.Module, keys: Any) -> None:
        if model is self._model() and not keys.missing_keys:
            self._elsewhere = ()

    def __call__(self, model: nn.Module, state: Mapping[str, Any], *_: object) -> None:
        kept = any(isinstance(value, nn.Parameter) for value in state.values())  # by keep_vars
        if self._elsewhere and model is self._model() and not kept:
            warnings.warn(
                f"state_dict: other processes have trained stages {list(self._elsewhere)} of this "
                "model, which has their weights of before; spectrain_ext.checkpoint.save(path, "
                "pipe, only_model=True), called by all ranks, saves the whole model",
                stacklevel=3,
            )

    def __reduce__(self) -> Any:
        return _Uncut, ()
