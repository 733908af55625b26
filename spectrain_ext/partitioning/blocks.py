"""Splits a model into blocks to cut between, and finds what blocks and stages share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import eq
from typing import Any
from weakref import ref

from torch import Tensor, nn

from spectrain_ext.transport.message import Value

from .columns import Call
from .outline import SPLIT_HINT, evaluated
from .profile import Tie, blaming_example, untouched
from .traced import TracedStage, split


class Slice(nn.Sequential):
    """A stage made of a model's consecutive blocks, the first of them with this index there."""

    def __init__(
        self, blocks: Iterable[nn.Module], first: int, names: Sequence[str] | None = None
    ) -> None:
        super().__init__(*blocks)
        self.first = first
        self._names = None if names is None else tuple(names)  # None: as in ``nn.Sequential``

    def full_name(self, name: str) -> str:
        """Return the uncut model's name of a parameter or module buffer of this stage."""
        index, _, rest = name.partition(".")
        place = int(index)
        block = self[place]
        if isinstance(block, TracedStage):  # has the model's names already
            return block.full_name(rest)
        return f"{self.first + place if self._names is None else self._names[place]}.{rest}"


class _Calls(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, value: Any) -> Any:
        return self._function(value)


def blocks_of(
    model: nn.Module | Sequence[nn.Module],
    before: Callable[[Any], Any] | None = None,
    after: Callable[[Any], Any] | None = None,
) -> dict[str, nn.Module]:
    if isinstance(model, nn.Module) and not isinstance(model, (nn.Sequential, nn.ModuleList)):
        raise TypeError(
            f"model: expected an nn.Sequential or a list of modules, got a {type(model).__name__}"
        )
    given = model._modules.items() if isinstance(model, nn.Module) else enumerate(model)
    blocks: dict[str, nn.Module] = {}
    for name, block in given:
        if not isinstance(block, nn.Module):
            raise TypeError(f"model[{name}]: expected an nn.Module, got {type(block).__name__}")
        blocks[str(name)] = block
    if not blocks:
        raise ValueError("model: expected at least one block, got none")
    if before is None and after is None:
        return blocks
    blocks = {f"blocks.{name}": block for name, block in blocks.items()}
    first = {} if before is None else {"before": _block(before, "before")}
    last = {} if after is None else {"after": _block(after, "after")}
    return {**first, **blocks, **last}


def _block(call: Callable[[Any], Any], name: str) -> nn.Module:
    owner = getattr(call, "__self__", None)
    if isinstance(owner, nn.Module) and not isinstance(call, nn.Module):
        raise TypeError(
            f"{name}: expected a module or a function, got a method of a {type(owner).__name__}, "
            "whose parameters nobody would train"
        )
    if not callable(call):
        raise TypeError(f"{name}: expected a module or a function, got {type(call).__name__}")
    return call if isinstance(call, nn.Module) else _Calls(call)


def slices_of(blocks: Mapping[str, nn.Module], ends: Sequence[int]) -> list[nn.Module]:
    names, modules = list(blocks), list(blocks.values())
    return [Slice(modules[s:e], s, names[s:e]) for s, e in zip((0, *ends[:-1]), ends, strict=True)]


def shared_of(blocks: Sequence[nn.Module]) -> tuple[Tie, ...]:
    return ties_of(
        blocks, found=lambda block: ((p, n, "weight") for n, p in block.named_parameters())
    )


def ties_of(
    blocks: Sequence[nn.Module],
    kinds: str = "blocks",
    found: Callable[[nn.Module], Iterable[tuple[object, str, str]]] | None = None,
    is_constant: Callable[[Tensor], bool] = lambda _: False,
) -> tuple[Tie, ...]:
    """Return the modules and module buffers that blocks share, which stages cannot share.

    Stages can share buffers that are constant: each has a copy.
    """
    owners: dict[object, tuple[int, str]] = {}
    ties: dict[tuple[int, int], Tie] = {}
    for index, block in enumerate(blocks):
        for part, name, kind in (found or _parts)(block):
            first, its_name = owners.setdefault(part, (index, name))
            if first != index and (first, index) not in ties:
                if isinstance(part, Tensor) and kind == "buffer" and is_constant(part):
                    continue
                if callable(known := getattr(block, "full_name", None)):
                    what = f"{kind} {known(name)!r}, which {kinds} {first} and {index} use"
                else:
                    one, other = _dotted(first, its_name), _dotted(index, name)
                    what = f"{kind} {one!r}, which is {other!r} too"
                ties[first, index] = Tie(first, index, what)
    return tuple(ties.values())


def _parts(block: nn.Module) -> Iterable[tuple[object, str, str]]:
    for name, buffer in block.named_buffers():
        yield buffer, name, "buffer"
    for name, module in block.named_modules():
        yield module, name, "module"


def _dotted(index: int, name: str) -> str:
    return f"{index}.{name}" if name else str(index)


# A model that is not a list


def block_names(names: Sequence[str]) -> list[str]:
    """Return names of blocks; the whole model, whose name is empty, is "0"."""
    return [name or str(index) for index, name in enumerate(names)]


def calls_in(model: nn.Module, example: Value, call: Call) -> dict[nn.Module, int]:
    """Run a model; return how often each module is called, in the order of first calls."""
    for index, argument in enumerate(example if isinstance(example, tuple) else (example,)):
        if not isinstance(argument, Tensor):
            raise TypeError(
                f"example_input: expected a tensor or a tuple of tensors, got a "
                f"{type(argument).__name__} at {index}"
            )
    calls: dict[nn.Module, int] = {}
    running: list[nn.Module] = []

    def begins(module: nn.Module, *_: object) -> None:
        calls[module] = calls.get(module, 0) + 1
        running.append(module)

    def ends(*_: object) -> None:
        running.pop()

    handles = [module.register_forward_pre_hook(begins) for module in model.modules()]
    handles += [module.register_forward_hook(ends) for module in model.modules()]
    try:
        with evaluated(model), untouched(model):
            call.run(model, example)
    except Exception as error:
        names = {module: name for name, module in model.named_modules()}
        name = names[running[-1]] if running else ""
        what = f"{type(model).__name__}{f' in its {name!r}' * bool(name)}"
        with blaming_example(what, example):
            raise error
    finally:
        for handle in handles:
            handle.remove()
    return calls


def finest_cut(
    model: nn.Module,
    example: Value,
    n_stages: int,
    call: Call,
    calls: Mapping[nn.Module, int],  # from calls_in
    planned: Sequence[str] | None = None,
) -> tuple[Sequence[str], Sequence[nn.Module]]:
    """Cut as finely as possible, before submodules called once; return names and blocks."""
    if planned is not None:  # nothing is traced, and the blocks are the submodules
        levels = list(_levels(model, calls))
        names = max(levels, key=lambda level: sum(map(eq, block_names(level), planned)))
        return names, [model.get_submodule(name) for name in names]
    why: Exception | None = None
    most = 1
    # First the innermost modules with parameters of their own. If torch.export fails, or a value
    # cannot be passed on, then the modules around them.
    for names in _levels(model, calls):
        if len(names) < n_stages:
            most = max(most, len(names))
            continue
        try:
            blocks = split(model, example, names[1:], once=True, call=call)
        except ValueError as error:  # for example a value that cannot be passed on
            why = error
            continue
        except RuntimeError as error:
            raise RuntimeError(f"{error}; {SPLIT_HINT}") from error
        if len(blocks) == len(names):
            return names, blocks
    if why is not None:
        raise ValueError(f"model: {why}; {SPLIT_HINT}") from why
    raise ValueError(f"n_stages: expected 1 to {most} (the blocks), got {n_stages}; {SPLIT_HINT}")


def _levels(model: nn.Module, calls: Mapping[nn.Module, int]) -> Iterator[list[str]]:
    """Yield lists of submodules that may begin a block, in call order, the finest list first."""
    names = {module: name for name, module in model.named_modules() if name}
    once = {module for module, count in calls.items() if count == 1}
    inner = [names[m] for m in calls if m in once and m in names and m._parameters]
    depth = max((name.count(".") + 1 for name in inner), default=0)
    before: list[str] = []
    modules = dict(model.named_modules())
    for level in range(depth, 0, -1):
        around = dict.fromkeys(".".join(name.split(".")[:level]) for name in inner)
        # A module that contains other candidates does not begin a block.
        outer = {name for name in around if any(n.startswith(name + ".") for n in around)}
        found = [name for name in around if name not in outer and modules[name] in once]
        if found and found != before:
            yield found
        before = found
    yield [""]  # the whole model


# What one stage alone does not show of the whole model


def mark_ties(stages: Sequence[nn.Module]) -> None:
    """Record in each stage which of its parameters an earlier stage holds too.

    ``stage.tied_parameters`` then maps their names to (first stage with the parameter, its name
    there). ``DistributedPipeline`` needs this, because it sees only its own stage; ``Pipeline``
    recognizes the shared objects.
    """
    homes: dict[nn.Parameter, tuple[int, str]] = {}
    for k, stage in enumerate(stages):
        named = list(stage.named_parameters(remove_duplicate=False))
        found = {name: homes[p] for name, p in named if p in homes}
        if found:
            stage.tied_parameters = found  # type: ignore[assignment]
        for name, p in named:
            homes.setdefault(p, (k, name))


def mark(stages: Sequence[Any], model: nn.Module | Sequence[nn.Module]) -> None:
    """Record in every stage its model, its place in the cut, the names, and copies of buffers.

    Pipelines check the places with ``check_order``. ``materialize`` uses the names to tell which
    tensors a file may hold, and under which names a tied tensor may be stored. A buffer that an
    earlier stage holds under the same name is a copy: the earlier stage saves it, and both load it.
    """
    mark_ties(stages)
    uncut = _Uncut(model) if isinstance(model, nn.Module) else None
    tied: dict[Tensor, list[str]] = {}
    buffers: set[str] = set()
    for k, stage in enumerate(stages):
        stage.cut_place, stage.uncut = (k, len(stages)), uncut
        full = {name: stage.full_name(name) for name, _ in _named_tensors(stage)}
        for name, tensor in _named_tensors(stage):
            tied.setdefault(tensor, []).append(full[name])
        own = [name for name, _ in stage.named_buffers(remove_duplicate=False)]
        stage.copied_buffers = frozenset(name for name in own if full[name] in buffers)
        buffers.update(full[name] for name in own)
    names = frozenset(chain.from_iterable(tied.values()))
    for stage in stages:
        stage.cut_names = names
        stage.tied_names = {n: tied[t] for n, t in _named_tensors(stage) if len(tied[t]) > 1}


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


def _named_tensors(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from stage.named_parameters(remove_duplicate=False)
    yield from stage.named_buffers(remove_duplicate=False)
