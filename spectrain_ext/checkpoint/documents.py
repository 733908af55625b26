"""Encodes everything in a checkpoint except tensors as JSON."""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
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
    """Decode a result of ``encode``; for anything else it may raise any exception.

    The result holds only plain containers, numbers, strings and the given ``tensors``.
    """
    if not isinstance(value, (list, dict)):
        return value
    if depth < 0:
        raise ValueError(f"more than {_DEEPEST} containers in one another")
    member = partial(decode, tensors=tensors, depth=depth - 1)
    if isinstance(value, list):
        return [member(each) for each in value]
    tag, held = next(iter(value.items()), ("", None))
    if not tag.startswith("$"):
        return {name: member(each) for name, each in value.items()}
    decoders: dict[str, Callable[..., Any]] = {
        "$tensor": lambda name: (tensors or {})[name],
        "$dtype": dtype_of,
        "$tuple": lambda members: tuple(map(member, members)),
        "$size": torch.Size,
        "$deque": lambda members: deque(map(member, members[0]), members[1]),
        "$dict": lambda pairs: {member(key): member(value) for key, value in pairs},
        "$counter": lambda pairs: Counter({member(key): member(value) for key, value in pairs}),
        "$scalar": lambda pair: torch.tensor(pair[1], dtype=dtype_of(pair[0])),
        "$numpy": lambda pair: np.dtype(_NUMPY[_NUMPY.index(pair[0])]).type(pair[1]),
    }
    if len(value) > 1 or tag not in decoders:
        raise ValueError(f"{tag!r} with {reprlib.repr(held)}")
    return decoders[tag](held)


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


# The file: {"sha256": digest of the body, "checkpoint": body}. A body has these keys:
#
#   format, version, torch   of the file and of the torch that saved it
#   minibatches, training    numbers; training has those of a pipeline
#   files                    name: size in bytes
#   tensors                  name: {dtype, shape, file, sha256, order?}, to which {"$tensor": name}
#                            refers; order: the dimensions by descending stride, if not contiguous
#   stages                   [{stage, parameters, left_out, weights, masters, optimizer, scheduler,
#                            passes, random, base?}]
#                            passes: {class: {of_parameters, rest}}
#                            base: {name: {dtype, shape, sha256?}}, of frozen tensors that are
#                            not saved
#   replicas                 the same of replicas with own weights, else {stage, replica, random}
#   processes                [{random, sampler}]
#   extra                    the user's


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
    """Read a checkpoint's document, verify its digest, and return its body.

    A forged body may have any form: what uses it turns every exception into a CheckpointError.
    """
    path = directory / NAME
    try:
        whole = json.loads(content(directory))
        body, expected = whole["checkpoint"], whole["sha256"]
        format_name, version = body["format"], body["version"]
        actual = digest(body)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged, it is no checkpoint document: {error}") from None
    if format_name != FORMAT:
        raise CheckpointError(
            f"{path}: expected the format {FORMAT!r}, got {reprlib.repr(format_name)}"
        )
    if version != VERSION:
        raise CheckpointError(f"{path}: expected version {VERSION}, got {reprlib.repr(version)}")
    if actual != expected:
        raise CheckpointError(f"{path}: damaged, its SHA-256 is not what it says")
    return dict(body)


def digest(body: Json) -> str:
    """Return the SHA-256 of a document, which contains those of all tensors."""
    return hashlib.sha256(
        json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
