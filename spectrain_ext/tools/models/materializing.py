"""Fills stages on the meta device with values from safetensors files or from an initializer."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from spectrain_ext.cutting import cut_of
from spectrain_ext.errors import CheckpointError, differing, kind_of
from spectrain_ext.files import MODEL_INDEX, read_json
from spectrain_ext.modules import slots_of
from spectrain_ext.rng import RNG_LOCK, mixed_seed

from .outline import is_pretrained

_ONE = "model.safetensors"
_LARGEST = 2**28  # bytes of an index
# By the first two letters of safetensors' name of a dtype; other names are integers.
_KINDS = dict.fromkeys(("F8", "F1", "F3", "F6", "BF"), "floating point")
_KINDS |= {"BO": "bool", "C6": "complex"}

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
        strict: refuse files with tensors that the whole model does not have, except those that
            transformers ignores for a Hugging Face model.

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
        source = Path(source)
        filler.find(Stored(source), strict)
    with torch.no_grad():
        try:
            filler.allocate()
            filler.initialize()
            filler.read(source)
        except BaseException:
            filler.undo()
            raise
    filler.keep()


class Source(NamedTuple):
    """The stored tensor, or several to be combined, for one tensor of the model."""

    names: tuple[str, ...]  # in the files
    make: Callable[[], Tensor]  # reads it, on the CPU


@dataclass(eq=False)
class _StageTensor:
    old: Tensor
    new: Tensor
    shown: str  # description for errors
    names: list[str] = field(default_factory=list)  # in the uncut model, earliest stage's first
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    saved: bool = False
    source: Source | None = None

    def put(self, tensor: Tensor) -> None:
        self.new = tensor
        for module, key in self.places:
            setattr(module, key, tensor)  # setattr, because an LSTM keeps references of its own


class _Filler:
    def __init__(
        self, stages: Sequence[nn.Module], device: torch.device, init: Initializer | None
    ) -> None:
        self._stages, self._device, self._init = stages, device, init
        self._tensors: dict[int, _StageTensor] = {}
        self._by_module: dict[nn.Module, list[_StageTensor]] = {}
        self._empty: dict[_StageTensor, int] = {}  # to be initialized, with their version counters
        for stage in stages:
            cut = cut_of(stage)
            called = f"stage {cut.index}" if cut.count else type(stage).__name__
            for module, key, name, tensor in slots_of(stage):
                kind = "parameter" if key in module._parameters else "buffer"
                shown = f"{called}: {kind} {name!r}"
                held = self._tensors.setdefault(id(tensor), _StageTensor(tensor, tensor, shown))
                held.names += cut.tied_names.get(name) or [cut.full_name(name)]
                held.places.append((module, key))
                held.saved |= key not in module._non_persistent_buffers_set
                own = self._by_module.setdefault(module, [])
                if held not in own:
                    own.append(held)

    # From files

    def find(self, stored: Stored, strict: bool) -> None:
        """Match tensors with the files' entries and check them; reads only values of ties."""
        known = {name for held in self._tensors.values() for name in held.names}
        known = known.union(*(cut_of(stage).names for stage in self._stages))
        pretrained = _pretrained_in(self._stages)
        sources, left = sources_of(stored, known, pretrained)
        may_lack = getattr(pretrained, "_keys_to_ignore_on_load_missing", None) or ()
        for held in self._tensors.values():
            if pretrained is not None and not held.saved:
                continue  # as transformers, whose old files have some of these
            by_keys = {sources[n].names: sources[n] for n in held.names if n in sources}
            for (key, *more), source in by_keys.items():
                if not more:
                    _check(held, stored.files[key], key, *stored.look(key))
                first = held.source = held.source or source
                dtype = held.old.dtype
                same = source is first or first.make().to(dtype).equal(source.make().to(dtype))
                if not same:
                    raise CheckpointError(f"{stored.path}: {differing(first.names[0], key)}")
            lacks = held.source is None and held.saved and self._init is None
            if lacks and not any(re.search(way, held.names[0]) for way in may_lack):
                raise CheckpointError(
                    f"{stored.path}: has no {held.names[0]!r}, expected of shape "
                    f"{list(held.old.shape)}; init= initializes what files lack"
                )
        left = unexpected(left, self._stages)
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

    def read(self, source: object) -> None:
        for held in self._tensors.values():
            if held.source is not None:
                value = held.source.make()
                names = ", ".join(held.source.names)
                _check(held, source, names, value.shape, kind_of(value.dtype))
                held.put(held.new)  # an outer module's initializer may have replaced it
                held.new.copy_(value)
                del value  # unmap it before the next one

    def keep(self) -> None:
        for held in self._tensors.values():
            if held.new is not held.old and len(held.names) > 1:
                _made[held.old] = held.new

    def undo(self) -> None:
        for held in self._tensors.values():
            held.put(held.old)

    # By an initializer

    def initialize(self) -> None:
        others = [self._device] if self._device.type == "cuda" else []
        with RNG_LOCK, torch.random.fork_rng(others):
            self._seed = torch.initial_seed()
            for stage in self._stages:
                self._initialize_module(stage, "", stage, _reset)
            self._note_initialized(list(self._empty))
        for held in self._empty:
            raise ValueError(
                f"{held.shown} is on the meta device, and nothing gives it a value; give an init= "
                "that does, or make it outside of the meta device, as accelerate's "
                "init_empty_weights does with buffers"
            )

    def _initialize_module(
        self, module: nn.Module, path: str, stage: nn.Module, default: Initializer
    ) -> bool:
        """Initialize a module's children, then itself; return whether anything was empty."""
        default = getattr(module, "_init_weights", default) if is_pretrained(module) else default
        needed = False
        for name, child in module.named_children():
            needed |= self._initialize_module(child, f"{path}{name}.", stage, default)
        tensors = self._by_module.get(module, [])
        empty = [held for held in tensors if held in self._empty]
        if not empty and not needed:
            return False
        name = cut_of(stage).full_name(f"{path}x")[:-2] if path else ""
        if empty and all(len(held.names) > 1 for held in empty):  # tied: use its home's name
            name = empty[0].names[0].rpartition(".")[0]
        # Another module that shares a tensor, or a file, has decided about it.
        decided = [(h, h.new.clone()) for h in tensors if h not in empty and h.source is None]
        transient = empty and not any(held.saved for held in empty)
        for initialize in (default, self._init) if transient else (self._init or default,):
            if initialize is not None and (not empty or any(held in self._empty for held in empty)):
                self._call(module, name, initialize)
                self._note_initialized([held for held in empty if held in self._empty])
        for held, value in decided:
            held.put(held.new)
            held.new.copy_(value)
        return True

    def _call(self, module: nn.Module, name: str, initializer: Initializer) -> None:
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        seed = mixed_seed(self._seed, number)
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)
        with self._device:
            initializer(module)

    def _note_initialized(self, candidates: Sequence[_StageTensor]) -> None:
        """Stop counting those as empty that have values now."""
        for held in candidates:
            for module, key in held.places:
                present = getattr(module, key)
                if present is not held.new and not present.is_meta:
                    held.put(present)  # replaced by the initializer: use it in all places
            if _is_marked_by_nan(held.new):
                is_empty = bool(held.new.sum().isnan())
            else:
                is_empty = held.new._version == self._empty[held]
            if not is_empty:
                del self._empty[held]


def _is_marked_by_nan(tensor: Tensor) -> bool:
    """Whether to mark it empty by NaN: ``p.data.normal_()`` leaves the version unchanged."""
    return tensor.is_floating_point() and tensor.itemsize > 1


def _reset(module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(reset := getattr(module, name, None)):
            reset()
            return


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


# Files


class Stored:
    """A safetensors file, or a folder with one or with an index of several."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._headers: dict[Path, dict[str, tuple[list[int], str]]] = {}
        index = self.path / MODEL_INDEX
        if not self.path.is_dir() or (self.path / _ONE).is_file():
            file = self.path / _ONE if self.path.is_dir() else self.path
            with _opened(file) as opened:
                self.files = dict.fromkeys(opened.keys(), file)
            return
        if not index.is_file():
            raise CheckpointError(f"{self.path}: expected {_ONE} or {MODEL_INDEX} there")
        try:
            places = read_json(index, _LARGEST)["weight_map"]
            files = {str(key): str(name) for key, name in places.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: cannot be read, {error!r}") from error
        for key, name in files.items():
            if Path(name).name != name:
                raise CheckpointError(f"{index}: {key!r} is in {name!r}, which is no file's name")
        self.files = {key: self.path / name for key, name in files.items()}

    def look(self, key: str) -> tuple[list[int], str]:
        """Return a tensor's shape and kind of numbers."""
        file = self.files[key]
        if file not in self._headers:
            with _opened(file) as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                self._headers[file] = {
                    name: (list(part.get_shape()), _KINDS.get(part.get_dtype()[:2], "integer"))
                    for name, part in slices.items()
                }
        if key not in self._headers[file]:
            raise CheckpointError(f"{file}: has no {key!r}, which the index says is there")
        return self._headers[file][key]

    def read(self, key: str) -> Tensor:
        # Opened for each tensor: what has been read of a mapped file stays in memory.
        with _opened(self.files[key]) as opened:
            tensor: Tensor = opened.get_tensor(key)
            return tensor


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: cannot be read, {error}") from error


def sources_of(
    stored: Stored,
    known: Set[str],
    # A Hugging Face model, which knows older names, conversions of tensors that files hold in other
    # pieces, and the prefix that a base model's files lack; or None.
    pretrained: Any,
) -> tuple[dict[str, Source], list[str]]:
    """Return the source for each of a model's names, and the stored tensors that match no name."""
    renamings: list[Any] = []
    converters: dict[str, Any] = {}  # by the pattern of a stored name
    if pretrained is not None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key

        for each in get_model_conversion_mapping(pretrained):
            if isinstance(each, WeightConverter):
                converters.update(dict.fromkeys(each.source_patterns, each))
            else:
                renamings.append(each)
    distinct = list(dict.fromkeys(converters.values()))
    sources: dict[str, Source] = {}
    pieces: dict[tuple[str, ...], list[tuple[str, str]]] = {}  # by targets: names and patterns
    left: list[str] = []
    prefix = f"{getattr(pretrained, 'base_model_prefix', '')}."

    def own(name: str) -> str | None:
        ways = (name, prefix + name, name.removeprefix(prefix))
        return next((way for way in ways if way in known), None)

    def combined(names: tuple[str, ...], parts: list[tuple[str, str]], name: str) -> Tensor:
        converter = deepcopy(converters[parts[0][1]])
        for key, pattern in parts:
            converter.add_tensor(names[0], key, pattern, partial(stored.read, key))
        made = converter.convert(names[0], model=pretrained, config=pretrained.config)[name]
        tensor: Tensor = made[0] if isinstance(made, list) else made
        return tensor

    for key in sorted(stored.files, key=_by_numbers):
        renamed, pattern = key, None
        if pretrained is not None:
            renamed, pattern = rename_source_key(key, renamings, distinct)
        if pattern is not None:
            first, *_ = targets = converters[pattern].target_patterns
            names = tuple(own(renamed.replace(first, target)) or "" for target in targets)
            if all(names):
                pieces.setdefault(names, []).append((key, pattern))
                continue
        name = own(renamed) or own(key)
        if name is None:
            left.append(key)
        else:
            sources[name] = Source((key,), partial(stored.read, key))
    for names, parts in pieces.items():
        keys = tuple(key for key, _ in parts)
        for name in names:
            sources[name] = Source(keys, partial(combined, names, parts, name))
    return sources, left


def unexpected(names: Iterable[str], stages: Sequence[nn.Module]) -> list[str]:
    """Return the names that the model has not, without those that transformers ignores."""
    pretrained = _pretrained_in(stages)
    ignored = list(getattr(pretrained, "_keys_to_ignore_on_load_unexpected", None) or ())
    if pretrained is not None:
        here = {name for stage in stages for name, _ in stage.named_buffers()}
        here.update(*(cut_of(stage).names for stage in stages))
        for buffer in ("rotary_emb.inv_freq", "position_ids"):  # once saved, and in other places
            if any(name.endswith(buffer) for name in here):
                ignored.append(rf"(^|\.){re.escape(buffer)}$")
    return [name for name in names if not any(re.search(way, name) for way in ignored)]


def _pretrained_in(stages: Iterable[nn.Module]) -> Any:
    """Return the first Hugging Face model in these, or None."""
    return next(filter(is_pretrained, chain.from_iterable(s.modules() for s in stages)), None)


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 2 before layer 10; pieces are combined in this order."""
    return [(int(atom), "") if atom.isdigit() else (-1, atom) for atom in name.split(".")]
