"""Documents: everything of a checkpoint that is no tensor, as JSON that is checked when read."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrain_ext.errors import CheckpointError

FORMAT = "spectrain_ext.checkpoint"
VERSION = 1
NAME = "checkpoint.json"

Json = dict[str, Any]


def encode(value: object, where: str) -> Any:
    """Return ``value`` in JSON's types; tuples, counters and the like are objects with one "$" key.

    Raises:
        TypeError: something that only pickle could hold; the message says where.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encode(member, f"{where}[{k}]") for k, member in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(member, f"{where}[{k}]") for k, member in enumerate(value)]}
    if isinstance(value, Mapping):
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        if plain and not isinstance(value, Counter):
            return {key: encode(member, f"{where}.{key}") for key, member in value.items()}
        pairs = [[encode(k, where), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {"$counter" if isinstance(value, Counter) else "$dict": pairs}
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"$scalar": [str(value.dtype).removeprefix("torch."), value.item()]}
    raise TypeError(
        f"{where}: a checkpoint cannot hold a {type(value).__module__}.{type(value).__qualname__}; "
        "numbers, strings, None, and lists, tuples and dicts of them can be saved"
    )


def decode(value: Any) -> Any:
    """Return what ``encode`` was given. Nothing but plain containers and numbers comes out."""
    if isinstance(value, list):
        return [decode(member) for member in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (tag, held), *_ = value.items()
        if tag == "$tuple":
            return tuple(decode(member) for member in held)
        if tag == "$dict":
            return {decode(key): decode(member) for key, member in held}
        if tag == "$counter":
            return Counter({decode(key): decode(member) for key, member in held})
        if tag == "$scalar":
            return torch.tensor(held[1], dtype=dtype_of(held[0]))
    return {key: decode(member) for key, member in value.items()}


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of that name; ValueError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


def written(body: Json) -> bytes:
    """Return the file's content: the body and its digest."""
    body = {"format": FORMAT, "version": VERSION, **body}
    text = json.dumps({"sha256": _digest(body), "checkpoint": body}, indent=1, sort_keys=True)
    return text.encode() + b"\n"


def read(directory: Path) -> Json:
    """Return the body of a checkpoint's document.

    Raises:
        CheckpointError: the file is missing, damaged, of another format, or of a later version.
    """
    path = directory / NAME
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read, {error.strerror}") from error
    try:
        whole = json.loads(text)
        body, digest = whole["checkpoint"], whole["sha256"]
        named, version = body["format"], body["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged, it is no checkpoint document: {error}") from None
    if named != FORMAT:
        raise CheckpointError(f"{path}: expected the format {FORMAT!r}, got {named!r}")
    if version != VERSION:
        raise CheckpointError(f"{path}: expected version {VERSION}, got {version!r}")
    if digest != _digest(body):
        raise CheckpointError(f"{path}: damaged, its SHA-256 is not what it says")
    _check(body, path)
    return dict(body)


def _digest(body: Json) -> str:
    return hashlib.sha256(
        json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


# What a body holds: its keys, and those of each member of a list or mapping.
_SHAPE: dict[str, tuple[type, dict[str, type | tuple[type, ...]] | None]] = {
    "minibatches": (int, None),
    "files": (dict, None),
    "tensors": (
        dict,
        {
            "dtype": str,
            "shape": list,
            "file": str,
            "start": int,
            "bytes": int,
            "sha256": str,
        },
    ),
    "stages": (
        list,
        {"stage": int, "parameters": list, "optimizer": (dict, type(None)), "random": list},
    ),
    "processes": (list, {"random": list}),
    "replicas": (list, {"stage": int, "replica": int, "random": list}),
}


def _check(body: Json, path: Path) -> None:
    for key, (kind, members) in _SHAPE.items():
        found = body.get(key, [] if key == "replicas" else None)  # older ones have none
        if not isinstance(found, kind):
            raise CheckpointError(
                f"{path}: {key}: expected a {kind.__name__}, got {type(found).__name__}"
            )
        if members is None:
            continue
        rows: Any = found
        for name, entry in rows.items() if kind is dict else enumerate(rows):
            for field, wanted in members.items():
                if not isinstance(entry, dict) or not isinstance(entry.get(field), wanted):
                    raise CheckpointError(f"{path}: {key}[{name!r}]: bad or missing {field!r}")
    for name, size in body["files"].items():
        if Path(name).name != name or not isinstance(size, int):
            raise CheckpointError(f"{path}: files: {name!r} is no file of a checkpoint")
    for name, entry in body["tensors"].items():
        sizes = (*entry["shape"], entry["start"], entry["bytes"])
        if entry["file"] not in body["files"] or not all(
            isinstance(n, int) and n >= 0 for n in sizes
        ):
            raise CheckpointError(f"{path}: tensors[{name!r}]: bad place or shape")
        try:
            dtype_of(entry["dtype"])
        except ValueError as error:
            raise CheckpointError(f"{path}: tensors[{name!r}]: {error}") from None
    for stage in body["stages"]:
        optimizer = stage["optimizer"]
        if optimizer is not None and not (
            isinstance(optimizer.get("groups"), list)
            and all(
                isinstance(group, dict)
                and isinstance(group.get("params"), list)
                and isinstance(group.get("options"), dict)
                for group in optimizer["groups"]
            )
            and isinstance(optimizer.get("scalars"), dict)
        ):
            raise CheckpointError(f"{path}: stages: bad optimizer of stage {stage['stage']}")
