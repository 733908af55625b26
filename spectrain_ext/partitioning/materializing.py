"""Fills stages on the meta device with values from files or from an initializer."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from spectrain_ext.errors import CheckpointError, differing, kind_of
from spectrain_ext.rng import RNG_LOCK, mixed_seed

from .outline import is_pretrained
from .stored import Source, Stored, sources_of

Initializer = Callable[[nn.Module], object]

#: The new tensors of those that several stages share, because stages may be filled one by one.
_made: Any = WeakIdKeyDictionary()


def materialize(
    stages: nn.Module | Iterable[nn.Module],
    source: str | os.PathLike[str] | None = None,
    *,
    init: Initializer | None = None,
    device: torch.device | str | int = "cpu",
    strict: bool = True,
) -> None:
    """Load or initialize the values of stages on the meta device, in place.

    A model made under ``torch.device("meta")`` takes no memory. Cut it with ``partition`` or
    ``cut_at``; then each process fills only its own stage. Tensors that are not on the meta device
    are loaded from ``source`` as well, and moved to ``device``.

    Each module is initialized with its own generator, seeded from ``torch.initial_seed()`` and the
    module's name in the uncut model. So weights depend neither on the cuts nor on the process. They
    differ from those that the whole model would draw, and the caller's generators are unchanged.
    Tied parameters take the earlier stage's value.

    Args:
        stages: a stage, several, or a ``Partition``.
        source: a ``model.safetensors``, or a folder with one or with a
            ``model.safetensors.index.json``, as ``save_pretrained`` and ``checkpoint.save`` write
            them, under the uncut model's names. Only the stages' own tensors are read, one at a
            time, and converted to their dtype on the meta device. None: initialize all tensors.
        init: called with each module that has tensors to initialize and with the modules around it,
            inner ones first; it sets their values in place. With a ``source``, it initializes what
            the files lack. None: use ``reset_parameters()``, or a Hugging Face model's
            ``_init_weights``; a saved tensor that the files lack is then an error.
        device: where to put the stages.
        strict: refuse files with tensors that the whole model does not have.

    Raises:
        CheckpointError: a file cannot be read; a tensor is missing, unexpected, or of another shape
            or kind of numbers; or two names of a tied parameter have different values. The message
            names it.
        ValueError: nothing sets a parameter or buffer; the message names it.

    After an exception the stages are unchanged.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> first, last = st.partitioning.cut_at(model, [2, 3])
        >>> st.materialize(last)
        >>> last[0].weight.device, first[0].weight.device
        (device(type='cpu'), device(type='meta'))
    """
    filler = _Filler(
        [stages] if isinstance(stages, nn.Module) else list(stages), torch.device(device), init
    )
    if source is not None:
        filler.find(Stored(source), strict)
    with ExitStack() as undo, torch.no_grad():
        undo.callback(filler.undo)
        filler.allocate()
        filler.initialize()
        filler.read()
        undo.pop_all()
    filler.keep()


@dataclass(eq=False)
class _StageTensor:
    old: Tensor
    shown: str  # description for errors
    names: list[str] = field(default_factory=list)  # in the uncut model, earliest stage's first
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    saved: bool = False
    source: Source | None = None
    new: Tensor | None = None

    def put(self, tensor: Tensor) -> None:
        self.new = tensor
        for module, key in self.places:
            setattr(module, key, tensor)  # setattr, because an LSTM keeps references of its own


class _Filler:
    def __init__(
        self, stages: Sequence[nn.Module], device: torch.device, init: Initializer | None
    ) -> None:
        self._stages = stages
        self._device = device
        self._init = init
        self._tensors: dict[int, _StageTensor] = {}
        self._own: dict[nn.Module, list[_StageTensor]] = {}
        self._where: object = None
        self._empty: dict[_StageTensor, int] = {}  # to be initialized, with their version counters
        # What initialized them
        self._homes: dict[_StageTensor, tuple[nn.Module, str, Initializer]] = {}
        self._overwritten: list[_StageTensor] = []  # by another module that shares them
        for stage in stages:
            self._collect(stage)

    def _collect(self, stage: nn.Module) -> None:
        tied = getattr(stage, "tied_names", {})
        for path, module in stage.named_modules(remove_duplicate=False):
            for key, tensor in chain(module._parameters.items(), module._buffers.items()):
                if tensor is None:
                    continue
                name = f"{path}.{key}" if path else key
                kind = "parameter" if key in module._parameters else "buffer"
                shown = f"{_called(stage)}: {kind} {name!r}"
                held = self._tensors.setdefault(id(tensor), _StageTensor(tensor, shown))
                held.names += tied.get(name) or [_full_name(stage, name)]
                held.places.append((module, key))
                if (origin := _origin(module)) is not module:
                    held.places.append((origin, key))
                held.saved |= key not in module._non_persistent_buffers_set
                own = self._own.setdefault(module, [])
                if held not in own:
                    own.append(held)

    # From files

    def find(self, stored: Stored, strict: bool) -> None:
        """Match tensors with the files' entries and check them; reads only values of ties."""
        self._where = stored.path
        known = {name for held in self._tensors.values() for name in held.names}
        known = known.union(*(getattr(stage, "cut_names", ()) for stage in self._stages))
        modules = (module for stage in self._stages for module in stage.modules())
        pretrained = next(filter(is_pretrained, modules), None)
        sources, left = sources_of(stored, known, pretrained)
        for held in self._tensors.values():
            found = {sources[n].names: sources[n] for n in held.names if n in sources}
            for (key, *more), source in found.items():
                if not more:
                    _check(held, stored.files[key], key, *stored.look(key))
                first = held.source = held.source or source
                dtype = held.old.dtype
                if source is not first and not first.make().to(dtype).equal(
                    source.make().to(dtype)
                ):
                    raise CheckpointError(f"{stored.path}: {differing(first.names[0], key)}")
            if held.source is None and held.saved and self._init is None:
                raise CheckpointError(
                    f"{stored.path}: has no {held.names[0]!r}, expected of shape "
                    f"{list(held.old.shape)}; init= initializes what files lack"
                )
        if strict and left:
            shape, _ = stored.look(left[0])
            raise CheckpointError(
                f"{stored.path}: has {left[0]!r} of shape {shape}, which the model has not "
                f"({len(left)} such tensors); strict=False leaves them out"
            )

    def allocate(self) -> None:
        for held in self._tensors.values():
            old = held.old
            if (made := _made.get(old)) is not None:
                held.source = None
                new = made.to(self._device)
            elif old.is_meta or held.source is not None:
                new = torch.empty_like(old, device=self._device)
            else:
                new = old.to(self._device)
            if isinstance(old, nn.Parameter) and not isinstance(new, nn.Parameter):
                new = nn.Parameter(new, old.requires_grad)
            if made is None and old.is_meta and held.source is None:
                if _is_marked_by_nan(new):
                    new.fill_(torch.nan)
                self._empty[held] = new._version
            held.put(new)

    def read(self) -> None:
        for held in self._tensors.values():
            if held.source is not None and held.new is not None:
                value = held.source.make()
                names = ", ".join(held.source.names)
                _check(held, self._where, names, value.shape, kind_of(value.dtype))
                held.put(held.new)  # an outer module's initializer may have replaced it
                held.new.copy_(value)
                del value  # unmap it before the next one

    def keep(self) -> None:
        """Remember the new tensors for stages that share them and are filled later."""
        for module in self._own:
            vars(module).pop("origin", None)
        for held in self._tensors.values():
            if held.new is not held.old and len(held.names) > 1:
                _made[held.old] = held.new

    def undo(self) -> None:
        for held in self._tensors.values():
            held.put(held.old)

    # By an initializer

    def initialize(self) -> None:
        with RNG_LOCK, _generators(self._device) as generators:
            self._generators, self._seed = generators, torch.initial_seed()
            for stage in self._stages:
                self._initialize_module(stage, "", stage, _reset)
            self._note_initialized(list(self._empty))
            for held in self._overwritten:  # the earliest stage's module decides
                if held in self._homes:
                    self._call(*self._homes[held])
        for held in self._empty:
            raise ValueError(
                f"{held.shown} is on the meta device, and nothing gives it a value; give an init= "
                "that does, or make it outside of the meta device, as accelerate's "
                "init_empty_weights does with buffers"
            )

    def _initialize_module(
        self, module: nn.Module, path: str, stage: nn.Module, own: Initializer
    ) -> bool:
        """Initialize a module's children, then itself; return whether anything was empty."""
        subject = _origin(module)
        own = getattr(subject, "_init_weights", own) if is_pretrained(subject) else own
        needed = False
        for name, child in module.named_children():
            needed |= self._initialize_module(child, f"{path}{name}.", stage, own)
        mine = self._own.get(module, [])
        here = [held for held in mine if held in self._empty]
        if not here and not needed:
            return False
        name = _full_name(stage, f"{path}x")[:-2] if path else ""
        if here and all(len(held.names) > 1 for held in here):  # tied: use its home's name
            name = here[0].names[0].rpartition(".")[0]
        transient = here and not any(held.saved for held in here)
        for way in (own, self._init) if transient else (self._init or own,):
            if way is not None and (not here or any(held in self._empty for held in here)):
                self._call(subject, name, way)
                for held in self._note_initialized(here):
                    self._homes[held] = (subject, name, way)
        self._overwritten += [held for held in mine if held in self._homes and held not in here]
        return True

    def _call(self, module: nn.Module, name: str, way: Initializer) -> None:
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        for generator in self._generators:
            generator.manual_seed(mixed_seed(self._seed, number))
        with self._device:
            way(module)

    def _note_initialized(self, some: Sequence[_StageTensor]) -> list[_StageTensor]:
        """Return those that have values now, and stop counting them as empty."""
        found = []
        for held in some:
            for module, key in held.places:
                now = getattr(module, key)
                if now is not held.new and not now.is_meta:
                    held.put(now)  # replaced by the initializer: use it in all places
            if not self._is_empty(held):
                del self._empty[held]
                found.append(held)
        return found

    def _is_empty(self, held: _StageTensor) -> bool:
        assert held.new is not None
        if _is_marked_by_nan(held.new):
            return bool(held.new.sum().isnan())
        return held.new._version == self._empty[held]


def _is_marked_by_nan(tensor: Tensor) -> bool:
    """Whether to mark it empty by NaN: ``p.data.normal_()`` leaves the version unchanged."""
    return tensor.is_floating_point() and tensor.itemsize > 1


@contextmanager
def _generators(device: torch.device) -> Iterator[list[torch.Generator]]:
    """Yield the generators that initializers draw from, and restore them afterwards."""
    found = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        found.append(torch.cuda.default_generators[index])
    states = [generator.get_state() for generator in found]
    try:
        yield found
    finally:
        for generator, state in zip(found, states, strict=True):
            generator.set_state(state)


def _reset(module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(reset := getattr(module, name, None)):
            reset()
            return


def _origin(module: nn.Module) -> nn.Module:
    """Return the model's module whose tensors a traced stage holds, or the module itself."""
    found: nn.Module = vars(module).get("origin", module)
    return found


def _full_name(stage: nn.Module, name: str) -> str:
    full_name = getattr(stage, "full_name", None)
    return full_name(name) if callable(full_name) else name


def _called(stage: nn.Module) -> str:
    place = getattr(stage, "cut_place", None)
    return type(stage).__name__ if place is None else f"stage {place[0]}"


def _check(held: _StageTensor, where: object, name: str, shape: Sequence[int], kind: str) -> None:
    if list(shape) != list(held.old.shape):
        raise CheckpointError(
            f"{where}: {name!r} has shape {list(shape)}, expected {list(held.old.shape)} for "
            f"{held.shown}"
        )
    if kind != kind_of(held.old.dtype):
        raise CheckpointError(
            f"{where}: {name!r} is {kind}, expected {kind_of(held.old.dtype)} for {held.shown}"
        )
