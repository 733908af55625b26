"""Finds a model's tensors in safetensors files, and reads them one by one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from spectrain_ext.errors import CheckpointError
from spectrain_ext.files import MODEL_INDEX, read_json

_ONE = "model.safetensors"
_LARGEST = 2**28  # bytes of an index
# By the first two letters of safetensors' name of a dtype; other names are integers.
_KINDS = dict.fromkeys(("F8", "F1", "F3", "F6", "BF"), "floating point")
_KINDS |= {"BO": "bool", "C6": "complex"}


class Source(NamedTuple):
    """The stored tensor, or several to be combined, for one tensor of the model."""

    names: tuple[str, ...]  # in the files
    make: Callable[[], Tensor]  # reads it, on the CPU


class Stored:
    """A safetensors file, or a folder with one or with an index of several."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.files = self._found()
        self._headers: dict[Path, dict[str, tuple[list[int], str]]] = {}

    def _found(self) -> dict[str, Path]:
        index = self.path / MODEL_INDEX
        if not self.path.is_dir() or (self.path / _ONE).is_file():
            file = self.path / _ONE if self.path.is_dir() else self.path
            with _opened(file) as opened:
                return dict.fromkeys(opened.keys(), file)
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
        return {key: self.path / name for key, name in files.items()}

    def look(self, key: str) -> tuple[list[int], str]:
        """Return a tensor's shape and kind of numbers."""
        file = self.files[key]
        if file not in self._headers:
            with _opened(file) as opened:
                names = opened.keys()
                slices = ((name, opened.get_slice(name)) for name in names)
                self._headers[file] = {
                    name: (list(part.get_shape()), _KINDS.get(part.get_dtype()[:2], "integer"))
                    for name, part in slices
                }
        if key not in self._headers[file]:
            raise CheckpointError(f"{file}: has no {key!r}, which the index says is there")
        return self._headers[file][key]

    def read(self, key: str) -> Tensor:
        """Return one tensor; the file stays mapped while the tensor exists."""
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
    stored: Stored, known: Set[str], pretrained: Any
) -> tuple[dict[str, Source], list[str]]:
    """Return the source for each of a model's names, and the stored tensors that match no name.

    ``pretrained``, a Hugging Face model or None, supplies older names, conversions of tensors that
    files hold in other pieces, and the prefix that a base model's files lack.
    """
    found: dict[str, Source] = {}
    pieces: dict[tuple[str, ...], list[tuple[str, str]]] = {}  # by targets: names and patterns
    left: list[str] = []
    conversions = _Conversions(pretrained)
    prefix = f"{getattr(pretrained, 'base_model_prefix', '')}."

    def own(name: str) -> str | None:
        ways = (name, prefix + name, name.removeprefix(prefix))
        return next((way for way in ways if way in known), None)

    for key in sorted(stored.files, key=_by_numbers):
        renamed, pattern = conversions.renamed(key)
        if pattern is not None:
            names = tuple(own(target) or "" for target in conversions.targets(renamed, pattern))
            if "" not in names:
                pieces.setdefault(names, []).append((key, pattern))
                continue
        name = own(renamed) or own(key)
        if name is None:
            left.append(key)
        else:
            found[name] = Source((key,), partial(stored.read, key))
    for names, given in pieces.items():
        keys = tuple(key for key, _ in given)
        for name in names:
            found[name] = Source(keys, partial(conversions.made, stored, names, given, name))
    ignored = getattr(pretrained, "_keys_to_ignore_on_load_unexpected", None) or ()
    return found, [key for key in left if not any(re.search(way, key) for way in ignored)]


class _Conversions:
    """Applies transformers' own table of renamings and conversions."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._renamings: list[Any] = []
        self._converters: dict[str, Any] = {}  # by the pattern of a stored name
        if model is not None:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter

            for each in get_model_conversion_mapping(model):
                if isinstance(each, WeightConverter):
                    self._converters.update(dict.fromkeys(each.source_patterns, each))
                else:
                    self._renamings.append(each)

    def renamed(self, key: str) -> tuple[str, str | None]:
        if self._model is None:
            return key, None
        from transformers.core_model_loading import rename_source_key

        converters = list(dict.fromkeys(self._converters.values()))
        found: tuple[str, str | None] = rename_source_key(key, self._renamings, converters)
        return found

    def targets(self, first: str, pattern: str) -> list[str]:
        patterns = self._converters[pattern].target_patterns
        return [first.replace(patterns[0], each) for each in patterns]

    def made(
        self, stored: Stored, names: tuple[str, ...], given: list[tuple[str, str]], name: str
    ) -> Tensor:
        converter = deepcopy(self._converters[given[0][1]])
        for key, pattern in given:
            converter.add_tensor(names[0], key, pattern, partial(stored.read, key))
        made = converter.convert(names[0], model=self._model, config=self._model.config)
        found: Tensor = made[name][0] if isinstance(made[name], list) else made[name]
        return found


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 2 before layer 10; pieces are combined in this order."""
    return [(int(atom), "") if atom.isdigit() else (-1, atom) for atom in name.split(".")]
