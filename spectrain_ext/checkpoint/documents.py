"""Documents: everything of a checkpoint that is no tensor, as JSON that is checked when read."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrain_ext.errors import CheckpointError
from spectrain_ext.files import read_bounded

FORMAT = "spectrain_ext.checkpoint"
VERSION = 1
NAME = "checkpoint.json"
DATA = re.compile(r"__[0-9]+_[0-9]+\.distcp")  # files of tensors, as DCP names them
_LARGEST = 1 << 28  # bytes of a document
_DEEPEST = 100  # containers in one another
_OVERHEAD = 1 << 16  # bytes around a tensor's own; torch.save has about 1,500

Json = dict[str, Any]


def encode(
    value: object,
    where: str,
    depth: int = _DEEPEST,
    name_of: Callable[[Tensor], str] | None = None,
) -> Any:
    """Return ``value`` in JSON's types; tuples, counters and the like are objects with one "$" key.

    Args:
        value: numbers, strings, None, and containers of them.
        where: it is, for errors.
        depth: containers in one another, at most.
        name_of: keeps a tensor elsewhere and gives its name; None: a tensor is a number.

    Raises:
        TypeError: something that only pickle could hold, or more than 100 containers in one
            another; the message says where.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor) and name_of is not None:
        return {"$tensor": name_of(value)}
    if isinstance(value, Tensor) and value.numel() == 1:
        number = value.item()
        return {"$scalar": [str(value.dtype).removeprefix("torch."), encode(number, where, depth)]}
    if not isinstance(value, (list, tuple, Mapping)):
        raise TypeError(
            f"{where}: a checkpoint cannot hold a {type(value).__module__}."
            f"{type(value).__qualname__}; numbers, strings, None, and lists, tuples and dicts of "
            "them can be saved"
        )
    if depth == 0:
        raise TypeError(f"{where[:80]}...: more than {_DEEPEST} containers in one another")
    if not isinstance(value, Mapping):
        members = [
            encode(member, f"{where}[{k}]", depth - 1, name_of) for k, member in enumerate(value)
        ]
        return members if isinstance(value, list) else {"$tuple": members}
    plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
    if plain and not isinstance(value, Counter):
        return {
            key: encode(member, f"{where}.{key}", depth - 1, name_of)
            for key, member in value.items()
        }
    pairs = [
        [encode(k, where, depth - 1), encode(v, f"{where}[{k!r}]", depth - 1, name_of)]
        for k, v in value.items()
    ]
    return {"$counter" if isinstance(value, Counter) else "$dict": pairs}


def decode(
    value: Any, depth: int = _DEEPEST, tensor_of: Callable[[str], object] | None = None
) -> Any:
    """Return what ``encode`` was given. Nothing but plain containers and numbers comes out.

    Args:
        value: in JSON's types.
        depth: containers in one another, at most.
        tensor_of: what stands for the tensor of a name; None: there are none.

    Raises:
        ValueError: what ``encode`` never returns.
    """
    if not isinstance(value, (list, dict)):
        return value
    if depth == 0:
        raise ValueError(f"more than {_DEEPEST} containers in one another")
    if isinstance(value, list):
        return [decode(member, depth - 1, tensor_of) for member in value]
    tag, held = next(iter(value.items()), ("", None))
    if not tag.startswith("$"):
        return {key: decode(member, depth - 1, tensor_of) for key, member in value.items()}
    if tag == "$tensor" and len(value) == 1 and isinstance(held, str) and tensor_of is not None:
        return tensor_of(held)
    if len(value) == 1 and isinstance(held, list):
        if tag == "$tuple":
            return tuple(decode(member, depth - 1, tensor_of) for member in held)
        if tag in ("$dict", "$counter"):
            return (Counter if tag == "$counter" else dict)(_pairs(held, depth - 1, tensor_of))
        if tag == "$scalar":
            return _scalar(held)
    raise ValueError(f"{tag!r} with {reprlib.repr(held)}")


def _pairs(
    held: list[Any], depth: int, tensor_of: Callable[[str], object] | None
) -> dict[Any, Any]:
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in held):
        raise ValueError("expected pairs of a key and a value")
    try:
        found = {decode(key, depth): decode(member, depth, tensor_of) for key, member in held}
    except TypeError as error:
        raise ValueError(f"a key that is none: {error}") from None
    if len(found) != len(held):
        raise ValueError("the same key twice")
    return found


def _scalar(held: list[Any]) -> Tensor:
    if len(held) != 2 or type(held[0]) is not str or type(held[1]) not in (bool, int, float):
        raise ValueError(f"expected a dtype and a number, got {reprlib.repr(held)}")
    try:
        return torch.tensor(held[1], dtype=dtype_of(held[0]))
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ValueError(f"{reprlib.repr(held)}: {error}") from None


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of that name; ValueError if there is none, or only a quantized one."""
    dtype = vars(torch).get(name)  # getattr would import submodules
    if not isinstance(dtype, torch.dtype) or name.startswith("q"):  # quantized ones need scales
        raise ValueError(f"{reprlib.repr(name)} is no dtype")
    return dtype


def written(body: Json) -> bytes:
    """Return the file's content: the body and its digest.

    Raises:
        CheckpointError: it is larger than what ``read`` takes.
    """
    body = {"format": FORMAT, "version": VERSION, **body}
    text = json.dumps({"sha256": digest(body), "checkpoint": body}, indent=1, sort_keys=True)
    if len(text) >= _LARGEST:
        raise CheckpointError(
            f"{NAME}: has {len(text)} bytes, expected less than {_LARGEST}; extra is for little"
        )
    return text.encode() + b"\n"


def read(directory: Path) -> Json:
    """Return the body of a checkpoint's document: checked, and all that is in it can be decoded.

    Raises:
        CheckpointError: the file is missing, damaged, of another format, or of a later version.
    """
    path = directory / NAME
    try:
        text = read_bounded(path, _LARGEST)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read, {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
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
        _check(body)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return dict(body)


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def digest(body: Json) -> str:
    """Return the SHA-256 of a document, which has those of all tensors."""
    return hashlib.sha256(
        json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


# What a body holds: types, lists of something, and dicts with at least these keys, or with any.
_ANY = ""
_TEXTS = [(str,)]
_OPTIMIZER = {
    "groups": [{"params": _TEXTS, "options": {_ANY: (object,)}}],
    "scalars": {_ANY: {_ANY: (object,)}},
}
_SHAPE: dict[str, Any] = {
    "minibatches": (int,),
    "files": {_ANY: (int,)},
    "tensors": {
        _ANY: {
            "dtype": (str,),
            "shape": [(int,)],
            "file": (str,),
            "start": (int,),
            "bytes": (int,),
            "sha256": (str,),
        }
    },
    "stages": [
        {
            "stage": (int,),
            "parameters": _TEXTS,
            "optimizer": (dict, type(None)),
            "random": _TEXTS,
        }
    ],
    "processes": [{"random": _TEXTS}],
    "replicas": [{"stage": (int,), "replica": (int,), "random": _TEXTS}],
}


def _check_shape(where: str, found: Any, shape: Any) -> None:
    """Raise ValueError for what is not of that shape; a bool is no int."""
    kinds = shape if isinstance(shape, tuple) else (type(shape),)
    if object not in kinds and type(found) not in kinds:
        raise ValueError(f"{where}: expected a {kinds[0].__name__}, got {type(found).__name__}")
    if isinstance(shape, list):
        for k, member in enumerate(found):
            _check_shape(f"{where}[{k}]", member, shape[0])
    elif isinstance(shape, dict):
        for key in found if _ANY in shape else shape:
            if key not in found:
                raise ValueError(f"{where}: has no {key!r}")
            _check_shape(f"{where}[{key!r}]", found[key], shape.get(key, shape.get(_ANY)))


def _check(body: Json) -> None:
    """Raise ValueError for what a checkpoint's document never has."""
    for key, shape in _SHAPE.items():
        found = body.get(key, [] if key == "replicas" else None)  # older ones have none
        _check_shape(key, found, shape)
    if not _small(body["minibatches"]):
        raise ValueError("minibatches: expected a number of minibatches")
    if "training" in body:  # of a pipeline; older ones have none
        _check_shape("training", body["training"], {"minibatches": (int,), "phase": (int,)})
        if not all(map(_small, body["training"].values())):
            raise ValueError("training: expected numbers of minibatches and of a phase")
    if not body["processes"]:
        raise ValueError("processes: expected one or more")
    _check_places(body)
    for kind in ("stages", "replicas"):
        for k, stage in enumerate(body.get(kind, ())):
            if kind == "replicas" and "averaging" in stage:  # which has what a stage has
                _check_shape(f"replicas[{k}]", stage, _SHAPE["stages"][0])
            if stage.get("optimizer") is not None:
                _check_optimizer(f"{kind}[{k}].optimizer", stage["optimizer"])
            _check_decoded(f"{kind}[{k}].scheduler", stage.get("scheduler"))
    for k, process in enumerate(body["processes"]):
        _check_decoded(f"processes[{k}].sampler", process.get("sampler"))
    _check_decoded("extra", body.get("extra"))


def _check_optimizer(where: str, optimizer: Json) -> None:
    _check_shape(where, optimizer, _OPTIMIZER)
    _check_shape(f"{where}.class", optimizer.get("class"), (str, type(None)))  # older ones: none
    options = [group["options"] for group in optimizer["groups"]]
    for values in options:
        for key, value in values.items():
            _check_decoded(f"{where}: {key!r}", value)
    for values in optimizer["scalars"].values():
        for key, value in values.items():
            _check_decoded(f"{where}: {key!r}", value, lambda name: None)


def _check_places(body: Json) -> None:
    for name, size in body["files"].items():
        if not DATA.fullmatch(name) or not _small(size):
            raise ValueError(f"files: {name!r} is no file of a checkpoint")
    places = []
    for name, entry in body["tensors"].items():
        where = f"tensors[{name!r}]"
        sizes = (*entry["shape"], entry["start"], entry["bytes"])
        if (
            entry["file"] not in body["files"]
            or len(entry["shape"]) > 64  # torch's own limit
            or not all(_small(n) for n in sizes)
            or entry["start"] + entry["bytes"] > body["files"][entry["file"]]
        ):
            raise ValueError(f"{where}: bad place or shape")
        try:
            needed = math.prod(entry["shape"]) * dtype_of(entry["dtype"]).itemsize
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if not 0 <= entry["bytes"] - needed <= _OVERHEAD:
            raise ValueError(f"{where}: {entry['bytes']} bytes for a tensor of {needed}")
        places.append((entry["file"], entry["start"], entry["start"] + entry["bytes"], name))
    places.sort()
    for (file, _, end, name), (other_file, start, _, other) in itertools.pairwise(places):
        if file == other_file and start < end:
            raise ValueError(f"tensors: {name!r} and {other!r} are in the same place")


def _small(number: object) -> bool:
    return type(number) is int and 0 <= number < 1 << 62


def _check_decoded(
    where: str, value: Any, tensor_of: Callable[[str], object] | None = None
) -> None:
    try:
        decode(value, tensor_of=tensor_of)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
