"""Storage: a checkpoint's directory, committed at once and verified when read.

Its files are those of torch.distributed.checkpoint (DCP): archives of ``torch.save``, one after
another in a file per process, and ``.metadata``, a pickle that DCP's reader executes. That is
written, so that DCP's tools can read a checkpoint of ours, and never read: the index is in
``checkpoint.json``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from spectrain_ext.errors import CheckpointError
from spectrain_ext.files import new_file, partial, remove, sync_directory

from . import archive, documents
from .documents import Json

_BLOCK = 1 << 20

# The directory.


def replaced(path: Path) -> Path:
    """Return where a directory is kept while another takes its name."""
    return path.with_name(f".{path.name}.replaced")


def check_free(path: Path, overwrite: bool) -> None:
    """Only a checkpoint is replaced, and that is found out before anything is written."""
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise FileExistsError(f"path: {path} exists; overwrite=True replaces it")
    if path.is_symlink() or not path.is_dir() or not _holds_checkpoint(path):
        raise FileExistsError(f"path: {path} is no checkpoint; overwrite=True replaces these")


def _holds_checkpoint(path: Path) -> bool:
    """Whether it has a document, or nothing but what else a checkpoint has."""
    names = os.listdir(path)
    return documents.NAME in names or all(
        documents.DATA.fullmatch(name) or name.startswith(".metadata") for name in names
    )


def begin(path: Path) -> None:
    """Make the directory, new and empty, that is committed as ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(partial(path))  # of a save that did not end
    partial(path).mkdir()


def discard(path: Path) -> None:
    """Remove what a failed save has left, as far as that goes; the next save removes the rest."""
    shutil.rmtree(partial(path), ignore_errors=True)


# Writing.


def write_tensors(path: Path, rank: int, tensors: Mapping[str, Tensor]) -> Json:
    """Write a process's tensors; returns each one's entry in the document."""
    name = f"__{rank}_0.distcp"
    entries: Json = {}
    with new_file(partial(path) / name) as file:
        for key, tensor in tensors.items():
            content = tensor.detach().cpu()
            if content.untyped_storage().nbytes() != content.nbytes:
                content = content.clone()  # all of a storage would be saved
            start = file.tell()
            torch.save(content, file)
            length = file.tell() - start
            entries[key] = {
                "dtype": str(content.dtype).removeprefix("torch."),
                "shape": list(content.shape),
                "file": name,
                "start": start,
                "bytes": length,
                "sha256": _sha256(file, start, length),
            }
    sync_directory(partial(path))
    return entries


def commit(path: Path, body: Json, found: Iterable[Json]) -> None:
    """Write the indices of what every process has written, and give the directory its name.

    Args:
        path: the final directory, in place of what has its name.
        body: the document, but for tensors and files.
        found: what every ``write_tensors`` returned.
    """
    directory = partial(path)
    tensors = {key: entry for entries in found for key, entry in entries.items()}
    _write_index(directory, tensors)
    files = {file.name: file.stat().st_size for file in directory.glob("*.distcp")}
    content = documents.written({**body, "tensors": tensors, "files": files})
    with new_file(directory / documents.NAME) as file:
        file.write(content)
    sync_directory(directory)
    if os.path.lexists(path):
        remove(replaced(path))
        path.rename(replaced(path))
    directory.rename(path)
    sync_directory(path.parent)
    remove(replaced(path))


def _write_index(directory: Path, tensors: Json) -> None:
    """DCP's own: every tensor is one chunk."""
    known: dict[str, Any] = {}
    results = []
    for key, entry in tensors.items():
        shape = torch.Size(entry["shape"])
        origin = torch.Size([0] * len(shape))
        properties = TensorProperties(dtype=documents.dtype_of(entry["dtype"]))
        chunks = [ChunkStorageMetadata(origin, shape)]
        known[key] = TensorStorageMetadata(properties, shape, chunks)
        place = _StorageInfo(entry["file"], entry["start"], entry["bytes"])
        results.append(WriteResult(MetadataIndex(key, origin, 0), entry["bytes"], place))
    paths = {key: tuple(key.split(".", 1)) for key in tensors}
    FileSystemWriter(directory).finish(Metadata(known, planner_data=paths), [results])


def _sha256(file: BinaryIO, start: int, length: int) -> str:
    digest = hashlib.sha256()
    file.seek(start)
    while length > 0 and (block := file.read(min(length, _BLOCK))):
        digest.update(block)
        length -= len(block)
    return digest.hexdigest()


# Reading.


def read(path: Path) -> Json:
    """Return the document of a checkpoint whose files are there, with the sizes that it says.

    That costs nothing, and names a truncated file before anything is read.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    body = documents.read(path)
    for name, size in body["files"].items():
        file = path / name
        try:
            found = file.stat()
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read, {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{file}: expected a plain file")
        if found.st_size != size:
            raise CheckpointError(f"{file}: damaged, expected {size} bytes, got {found.st_size}")
    return body


def read_tensor(path: Path, body: Json, key: str) -> Tensor:
    """Return the tensor whose bytes are those that were saved, read as data.

    Raises:
        CheckpointError: they are not, or are those of something else.
    """
    entry = body["tensors"][key]
    content = verified(path, body, key)
    try:
        dtype = documents.dtype_of(entry["dtype"])
        return archive.read_tensor(content, entry["shape"], dtype)
    except Exception as error:  # whatever is found in a forged file
        raise CheckpointError(
            f"{path / entry['file']}: holds something else than the tensor {key!r}: {error}"
        ) from error


def verified(path: Path, body: Json, key: str) -> bytearray:
    """Return a tensor's bytes; CheckpointError if they are not those that were saved."""
    entry = body["tensors"][key]
    file = path / entry["file"]
    content = bytearray(entry["bytes"])
    try:
        with file.open("rb") as stream:
            stream.seek(entry["start"])
            stream.readinto(content)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read, {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise CheckpointError(f"{file}: damaged, the SHA-256 of {key!r} is not what was saved")
    return content
