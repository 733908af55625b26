"""Writes a checkpoint's directory atomically, and verifies tensors on reading.

Every process writes two safetensors files: one of weights under the model's names, which other
tools can read, and one of all other tensors. The document, ``checkpoint.json``, lists each tensor's
file and what safetensors cannot express: complex dtypes and the order of strides.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spectrain_ext.errors import CheckpointError
from spectrain_ext.files import (
    MODEL_INDEX,
    discard,
    identity,
    new_draft,
    present,
    recover,
    replace_directory,
    sync_directory,
    write_new,
)

from . import documents
from .documents import Json

#: Prefix of weights' names in a document; their own files omit it.
WEIGHTS = "model."
_METADATA = {"format": "pt"}  # Hugging Face's tools require it

# The directory


def taken(path: Path, overwrite: bool) -> str | None:
    """Return why ``path`` is neither free nor a checkpoint that may be replaced; else None."""
    while os.path.lexists(found := present(path)):
        if not overwrite:
            return f"path: {path} exists; overwrite=True replaces it"
        before = identity(found)
        reason = more_than_checkpoint(found)
        if reason is None:
            return None
        if identity(found) == before:
            return f"path: {path} {reason}; overwrite=True replaces only checkpoints"
    return None


def more_than_checkpoint(path: Path) -> str | None:
    """Return why a path is not only a checkpoint, which may be damaged, or an empty directory."""
    if path.is_symlink() or not path.is_dir():
        return "is no checkpoint"
    try:
        entries = list(os.scandir(path))
    except OSError as error:
        return f"cannot be read, {error.strerror}"
    document = b""
    with suppress(CheckpointError):
        document = documents.content(path)
    if entries and f'"{documents.FORMAT}"'.encode() not in document:
        return "is no checkpoint"
    for entry in entries:
        named = documents.DATA.fullmatch(entry.name) and f'"{entry.name}"'.encode() in document
        known = named or entry.name in (documents.NAME, MODEL_INDEX)
        if not (known and entry.is_file(follow_symlinks=False)):
            return f"holds {entry.name!r}, which is no file of the checkpoint"
    return None


def begin(path: Path, draft: Path) -> None:
    """Make a draft's directory, to be committed as ``path``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        recover(path)
        draft.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"path: {path} cannot be written, {error.strerror}: {error.filename}"
        ) from error


def drop(path: Path) -> None:
    """Remove a checkpoint; while it is being removed, it has the name of a draft."""
    draft = new_draft(path)
    with suppress(FileNotFoundError):  # another process removes it
        path.rename(draft)
    discard(path, draft)


def commit(
    path: Path, draft: Path, overwrite: bool, body: Json, tensors: Json, files: Mapping[str, int]
) -> None:
    """Write the document of all processes' files, and rename the draft to ``path``."""
    weights = {key: entry for key, entry in tensors.items() if key.startswith(WEIGHTS)}
    if len({entry["file"] for entry in weights.values()}) > 1:
        sizes = (
            math.prod(entry["shape"]) * documents.dtype_of(entry["dtype"]).itemsize
            for entry in weights.values()
        )
        places = {_name_in_file(key): entry["file"] for key, entry in weights.items()}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": places}
        write_new(draft / MODEL_INDEX, json.dumps(index, indent=1).encode())
    content = documents.file_content({**body, "tensors": tensors, "files": files})
    write_new(draft / documents.NAME, content)
    sync_directory(draft)
    reason = taken(path, overwrite)  # again: writing takes a while
    if reason is None and overwrite:
        replace_directory(path, draft)
    elif reason is None:
        try:
            draft.rename(path)
        except OSError:
            reason = taken(path, overwrite)  # another process was faster
            if reason is None:
                raise
    if reason is not None:
        raise FileExistsError(reason)
    sync_directory(path.parent)
    discard(path, draft)


# Tensors


def _name_in_file(key: str) -> str:
    name = key.removeprefix(WEIGHTS)
    return key if name == "__metadata__" else name  # safetensors reserves it


def write_tensors(draft: Path, name: str, tensors: Mapping[str, Tensor]) -> tuple[Json, int]:
    """Write a file of tensors; return their entries in the document, and the file's size."""
    file = draft / name
    entries: Json = {}
    # Holds CPU copies of all tensors that are on a device or not contiguous, at the same time.
    content: dict[str, Tensor] = {}
    places: set[int] = set()
    for key, tensor in tensors.items():
        plain = _plain(tensor)
        entry = described(tensor)
        if not plain.is_contiguous():
            strides = plain.stride()
            entry["order"] = sorted(range(plain.dim()), key=strides.__getitem__, reverse=True)
        plain = _stored(plain)
        if plain.data_ptr() in places:  # safetensors refuses one tensor with two names
            plain = plain.clone()
        places.add(plain.data_ptr())
        entries[key] = entry | {"file": name, "sha256": _sha256(plain)}
        content[_name_in_file(key)] = plain
    save_file(content, file, metadata=_METADATA)
    file.chmod(file.parent.stat().st_mode & 0o666)  # safetensors lets only the owner read it
    with file.open("rb") as written:
        os.fsync(written.fileno())
        size = os.fstat(written.fileno()).st_size
    sync_directory(file.parent)
    return entries, size


def described(tensor: Tensor, by_value: bool = False) -> Json:
    """Return a tensor's dtype and shape for a document, and the SHA-256 of its values."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    entry: Json = {"dtype": dtype, "shape": list(tensor.shape)}
    if by_value:
        entry["sha256"] = _sha256(_stored(_plain(tensor)))
    return entry


def _plain(tensor: Tensor) -> Tensor:
    """Resolve lazy conjugation and negation, which the bytes do not show."""
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def _stored(plain: Tensor) -> Tensor:
    """Return what a file holds of a plain tensor."""
    return (torch.view_as_real(plain) if plain.is_complex() else plain).contiguous()


def _sha256(tensor: Tensor) -> str:
    content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content).hexdigest()


# Reading


def read_tensors(path: Path, body: Json, keys: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors one at a time, on the CPU, after verifying their SHA-256."""
    by_file: dict[str, list[str]] = {}
    for key in keys:
        by_file.setdefault(body["tensors"][key]["file"], []).append(key)
    for name, members in by_file.items():
        file = path / name
        if not documents.DATA.fullmatch(name):
            raise CheckpointError(f"{path / documents.NAME}: {name!r} is no file of a checkpoint")
        if file.exists() and not file.is_file():
            raise CheckpointError(f"{file}: expected a plain file")
        try:
            with safe_open(file, framework="pt") as opened:
                if opened.metadata() != _METADATA:
                    raise CheckpointError(f"{file}: damaged, its header has changed")
                for key in members:
                    yield key, _read_tensor(file, opened, key, body["tensors"][key])
        except (SafetensorError, OSError, KeyError) as error:
            raise CheckpointError(f"{file}: damaged, {error}") from error


def _read_tensor(file: Path, opened: Any, key: str, entry: Json) -> Tensor:
    tensor: Tensor = opened.get_tensor(_name_in_file(key))  # of which nothing has been read
    dtype, shape = documents.dtype_of(entry["dtype"]), entry["shape"]
    stored = (dtype.to_real(), [*shape, 2]) if dtype.is_complex else (dtype, shape)
    if (tensor.dtype, list(tensor.shape)) != stored:
        raise CheckpointError(f"{file}: holds something else than the tensor {key!r}")
    tensor = tensor.clone()  # a mapped tensor would change with the file
    if _sha256(tensor) != entry["sha256"]:
        raise CheckpointError(f"{file}: damaged, the SHA-256 of {key!r} is not what was saved")
    if dtype.is_complex:
        tensor = torch.view_as_complex(tensor)
    if (order := entry.get("order")) is not None:
        back = sorted(range(tensor.dim()), key=order.__getitem__)
        tensor = tensor.permute(order).contiguous().permute(back)
    return tensor
