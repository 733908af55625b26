"""Records in the stages of a cut what one stage alone does not show of the whole model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import ref

from torch import Tensor, nn


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
