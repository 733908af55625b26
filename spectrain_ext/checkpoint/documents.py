"""Encodes everything in a checkpoint except tensors as JSON, and validates it on reading."""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spectrain_ext.errors import CheckpointError
from spectrain_ext.files import read_bounded

FORMAT = "spectrain_ext.checkpoint"
VERSION = 2
NAME = "checkpoint.json"
DATA = re.compile(r"(model|state)(-[0-9]{5,9}-of-[0-9]{5,9})?\.safetensors")  # files of tensors
_LARGEST = 1 << 28  # bytes of a document
_DEEPEST = 100  # nested containers
_NUMPY = [np.dtype(kind).name for kind in "?bBhHiIqQefd"]  # dtypes of NumPy's scalars

Json = dict[str, Any]
#: Stores a tensor under a name, which may get a suffix; returns its reference for the document.
Keep = Callable[[str, Tensor], Json]


def encode(
    value: object, where: str, keep: Keep | None = None, key: str = "", depth: int = _DEEPEST
) -> Any:
    """Encode ``value`` in JSON types; tuples, counters etc. become objects with one "$" key.

    ``keep`` stores tensors, under ``key`` and their path in the containers. Without it, only
    one-element tensors are allowed, which are encoded as numbers.
    """
    if isinstance(value, np.generic) and value.dtype.name in _NUMPY:
        return {"$numpy": [value.dtype.name, value.item()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Tensor) and _is_dense(value):
        if keep is not None:
            return keep(key, value)
        if value.numel() == 1 and not value.is_complex():
            return {"$scalar": [str(value.dtype).removeprefix("torch."), value.tolist()]}
    named = isinstance(value, tuple) and type(value) not in (tuple, torch.Size)
    if named or not isinstance(value, (list, tuple, deque, Mapping)):
        tensor = ""
        if isinstance(value, Tensor):
            tensor = f" of {value.numel()} elements" if _is_dense(value) else " that is not dense"
        raise TypeError(
            f"{where}: a checkpoint cannot hold a {type(value).__module__}."
            f"{type(value).__qualname__}{tensor}; numbers, strings, dtypes, None, and lists, "
            "tuples, deques and dicts of them can be saved"
        )
    if depth == 0:
        raise TypeError(f"{where[:80]}...: more than {_DEEPEST} containers in one another")

    def member(value: object, name: str) -> Any:
        return encode(value, where + name, keep, key + name, depth - 1)

    if not isinstance(value, Mapping):
        members = [member(each, f"[{k}]") for k, each in enumerate(value)]
        if isinstance(value, deque):
            return {"$deque": [members, value.maxlen]}
        if isinstance(value, tuple):
            return {"$size" if isinstance(value, torch.Size) else "$tuple": members}
        return members
    plain = all(isinstance(name, str) and not name.startswith("$") for name in value)
    if plain and not isinstance(value, Counter):
        return {name: member(each, f".{name}") for name, each in value.items()}
    pairs = [
        [encode(name, where, depth=depth - 1), member(each, f"[{name!r}]")]
        for name, each in value.items()
    ]
    return {"$counter" if isinstance(value, Counter) else "$dict": pairs}


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


def decode(value: Any, tensors: Mapping[str, object] | None = None, depth: int = _DEEPEST) -> Any:
    """Decode a result of ``encode``; ValueError for anything else.

    The result holds only plain containers, numbers, strings and the given ``tensors``.
    """
    if not isinstance(value, (list, dict)):
        return value
    if depth == 0:
        raise ValueError(f"more than {_DEEPEST} containers in one another")

    def member(value: Any) -> Any:
        return decode(value, tensors, depth - 1)

    if isinstance(value, list):
        return [member(each) for each in value]
    tag, held = next(iter(value.items()), ("", None))
    if not tag.startswith("$"):
        return {name: member(each) for name, each in value.items()}
    if len(value) == 1 and tag == "$tensor" and type(held) is str and held in (tensors or ()):
        return (tensors or {})[held]
    if len(value) == 1 and tag == "$dtype" and isinstance(held, str):
        return dtype_of(held)
    if len(value) == 1 and isinstance(held, list):
        if tag == "$tuple":
            return tuple(member(each) for each in held)
        if tag in ("$dict", "$counter"):
            return (Counter if tag == "$counter" else dict)(_pairs(held, member))
        if tag in ("$scalar", "$numpy"):
            return _number(tag, held)
        if tag == "$size" and all(type(each) is int and 0 <= each < 1 << 62 for each in held):
            return torch.Size(held)
        if tag == "$deque" and len(held) == 2 and isinstance(held[0], list):
            longest = held[1]
            if longest is None or (type(longest) is int and len(held[0]) <= longest < 1 << 62):
                return deque((member(each) for each in held[0]), longest)
    raise ValueError(f"{tag!r} with {reprlib.repr(held)}")


def decode_at(where: str, value: Any, tensors: Mapping[str, object] | None = None) -> Any:
    """Decode as ``decode`` does, with ``where`` in errors."""
    try:
        return decode(value, tensors)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _pairs(held: list[Any], member: Callable[[Any], Any]) -> dict[Any, Any]:
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in held):
        raise ValueError("expected pairs of a key and a value")
    try:
        found = {member(key): member(value) for key, value in held}
    except TypeError as error:
        raise ValueError(f"a key that is none: {error}") from None
    if len(found) != len(held):
        raise ValueError("the same key twice")
    return found


def _number(tag: str, held: list[Any]) -> Any:
    """Return NumPy's scalar, or a tensor of one element in as many lists as it has dimensions."""
    number = held[1] if len(held) == 2 and type(held[0]) is str else None
    while tag == "$scalar" and isinstance(number, list) and len(number) == 1:
        (number,) = number
    if type(number) not in (bool, int, float):
        raise ValueError(f"expected a dtype and a number, got {reprlib.repr(held)}")
    try:
        if tag == "$scalar":
            return torch.tensor(held[1], dtype=dtype_of(held[0]))
        if held[0] in _NUMPY:
            return np.dtype(held[0]).type(number)
        raise ValueError("it is no dtype of NumPy's numbers")
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{reprlib.repr(held)}: {error}") from None


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of that name; ValueError if there is none or it is quantized."""
    dtype = vars(torch).get(name)  # getattr could import submodules
    if not isinstance(dtype, torch.dtype) or name.startswith("q"):  # quantized ones need scales
        raise ValueError(f"{reprlib.repr(name)} is no dtype")
    return dtype


def tensors_in(encoded: Any) -> Iterator[str]:
    """Yield the names of all tensors referenced in a document or a part of one."""
    if isinstance(encoded, dict):
        name = encoded.get("$tensor")
        if isinstance(name, str):
            yield name
    elif not isinstance(encoded, list):
        return
    for member in encoded.values() if isinstance(encoded, dict) else encoded:
        yield from tensors_in(member)


# The file


def file_content(body: Json) -> bytes:
    """Return the file's content: the body and its digest."""
    body = {"format": FORMAT, "version": VERSION, **body}
    text = json.dumps({"sha256": digest(body), "checkpoint": body}, indent=1, sort_keys=True)
    if len(text) >= _LARGEST:
        raise CheckpointError(
            f"{NAME}: has {len(text)} bytes, expected less than {_LARGEST}; extra is for little"
        )
    return text.encode() + b"\n"


def content(directory: Path) -> bytes:
    """Return the unverified bytes of a checkpoint's document."""
    path = directory / NAME
    try:
        return read_bounded(path, _LARGEST)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read, {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def read(directory: Path) -> Json:
    """Read a checkpoint's document, verify its digest and form, and return its body."""
    path = directory / NAME
    text = content(directory)
    try:
        whole = json.loads(text, object_pairs_hook=_unique)
        body, said = whole["checkpoint"], whole["sha256"]
        named, version = body["format"], body["version"]
        found = digest(body)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged, it is no checkpoint document: {error}") from None
    if named != FORMAT:
        raise CheckpointError(f"{path}: expected the format {FORMAT!r}, got {reprlib.repr(named)}")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(f"{path}: expected version {VERSION}, got {reprlib.repr(version)}")
    if said != found:
        raise CheckpointError(f"{path}: damaged, its SHA-256 is not what it says")
    try:
        for key, form in _FORM.items():
            _check_form(key, body.get(key), form)
        if not body["processes"]:
            raise ValueError("processes: expected one or more")
        for k, replica in enumerate(body["replicas"]):
            if "averaging" in replica:  # an averaged replica has weights of its own
                _check_form(f"replicas[{k}]", replica, _STAGE)
        for name in body["files"]:
            if not DATA.fullmatch(name):
                raise ValueError(f"files: {name!r} is no file of a checkpoint")
        for name, entry in body["tensors"].items():
            _check_entry(f"tensors[{name!r}]", entry, body["files"])
        named = {*tensors_in([body["stages"], body["replicas"], body["processes"]])}
        for name in named - body["tensors"].keys():
            raise ValueError(f"has no tensor {name!r}, which it names")
        for name in body["tensors"].keys() - named:
            raise ValueError(f"tensors: nothing uses {name!r}")
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return dict(body)


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def digest(body: Json) -> str:
    """Return the SHA-256 of a document, which contains those of all tensors."""
    return hashlib.sha256(
        json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


# The form of a body: (type,), (form, None) if it may be None, lists, and dicts with at least these
# keys; the key _ANY allows any keys, and a key with "?" may be missing.
_ANY = ""
_NAMES = [(str,)]
_REFERENCE = {"$tensor": (str,)}
_REFERENCES = [_REFERENCE]
_TENSORS = {_ANY: _REFERENCE}
_SHARED = {"options": {_ANY: (object,)}, "on_device?": _NAMES}
_OPTIMIZER = {
    "class": (str,),
    "groups": [{"params": _NAMES, **_SHARED}],
    "shared?": _SHARED,
    "state": {_ANY: {_ANY: (object,)}},
}
_STAGE = {
    "stage": (int,),
    "parameters": _NAMES,
    "left_out": _NAMES,
    "weights": _TENSORS,
    "masters": _TENSORS,
    "optimizer": (_OPTIMIZER, None),
    "scheduler": (object,),
    "random": _REFERENCES,
}
_FORM: dict[str, Any] = {
    "minibatches": (int,),
    "training": ({"minibatches": (int,), "phase": (int,), "undone": (int,)}, None),
    "files": {_ANY: (int,)},
    "tensors": {_ANY: {"dtype": (str,), "shape": [(int,)], "file": (str,), "sha256": (str,)}},
    "stages": [_STAGE],
    "processes": [{"random": _TENSORS}],
    "replicas": [{"stage": (int,), "replica": (int,), "random": _REFERENCES}],
}


def _check_form(where: str, found: Any, form: Any) -> None:
    """Raise ValueError unless ``found`` has the form; numbers are ints from 0, not bools."""
    if isinstance(form, tuple) and None in form:
        if found is None:
            return
        form = form[0]
    kind = form[0] if isinstance(form, tuple) else type(form)
    if kind is not object and type(found) is not kind:
        raise ValueError(f"{where}: expected a {kind.__name__}, got {type(found).__name__}")
    if kind is int and not 0 <= found < 1 << 62:
        raise ValueError(f"{where}: expected a number from 0, got {reprlib.repr(found)}")
    if isinstance(form, list):
        for k, member in enumerate(found):
            _check_form(f"{where}[{k}]", member, form[0])
    elif isinstance(form, dict):
        for key in found if _ANY in form else form:
            name = key if _ANY in form else key.removesuffix("?")
            if name in found:
                _check_form(f"{where}[{name!r}]", found[name], form.get(key, form.get(_ANY)))
            elif name == key:
                raise ValueError(f"{where}: has no {key!r}")


def _check_entry(where: str, entry: Json, files: Json) -> None:
    rank = len(entry["shape"])
    order = entry.get("order", [*range(rank)])
    if (
        entry["file"] not in files
        or rank > 64  # torch's limit
        or not (
            isinstance(order, list) and sorted(map(repr, order)) == sorted(map(repr, range(rank)))
        )
    ):
        raise ValueError(f"{where}: bad file, shape or order")
    decode_at(where, {"$dtype": entry["dtype"]})
