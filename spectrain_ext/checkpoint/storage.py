"""Storage: torch.distributed.checkpoint's files, committed at once and verified when read.

DCP keeps an index of its own in ``.metadata``, a pickle that its reader executes. It is written, so
that DCP's tools can read a checkpoint of ours, and never read: the index is in ``checkpoint.json``.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from spectrain_ext.checkpoint import documents
from spectrain_ext.checkpoint.archive import read_tensor
from spectrain_ext.checkpoint.documents import Json
from spectrain_ext.checkpoint.files import commit_directory, partial, sync_directory, write_file
from spectrain_ext.errors import CheckpointError

_BLOCK = 1 << 20


@dataclass(frozen=True)
class _Hashed:
    """A place in a file, as the coordinator hears of it from the process that wrote it."""

    place: Any  # has relative_path, offset, length
    sha256: str


@dataclass(frozen=True)
class _Place:
    """What DCP's reader asks where a tensor is."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class AtomicWriter(FileSystemWriter):
    """Writes beside the final name, and takes it when everything is on the disk.

    Args:
        path: the final directory.
        body: the document, without what only DCP knows.
        committed: called on the coordinator once the checkpoint has its name.

    Attributes:
        busy: entered while this process writes and the others may wait for it.
    """

    busy: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, path: Path, body: Json, committed: Callable[[], None]) -> None:
        super().__init__(partial(path), sync_files=True)
        self._final = path
        self._body = body
        self._committed = committed

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's tensors, and note the digest of each."""
        hashed: Future[list[WriteResult]] = Future()
        with self.busy():
            results = super().write_data(plan, planner).value()
            directory = Path(self.path)
            hashed.set_result([_with_digest(directory, result) for result in results])
            sync_directory(directory)
        return hashed

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: write the indices, and commit."""
        with self.busy():
            self._finish(metadata, results)

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        tensors: Json = {}
        for result in (result for found in results for result in found):
            known = metadata.state_dict_metadata[result.index.fqn]
            place = result.storage_data.place
            assert isinstance(known, TensorStorageMetadata), "a state_dict of tensors only"
            tensors[result.index.fqn] = {
                "dtype": str(known.properties.dtype).removeprefix("torch."),
                "shape": list(known.size),
                "file": place.relative_path,
                "start": place.offset,
                "bytes": place.length,
                "sha256": result.storage_data.sha256,
            }
        plain = [
            [replace(r, storage_data=r.storage_data.place) for r in found] for found in results
        ]
        super().finish(metadata, plain)
        directory = Path(self.path)
        files = {path.name: path.stat().st_size for path in directory.glob("*.distcp")}
        content = documents.written({**self._body, "tensors": tensors, "files": files})
        write_file(directory / documents.NAME, content)
        commit_directory(self._final)
        self._committed()


def _with_digest(directory: Path, result: WriteResult) -> WriteResult:
    place = result.storage_data
    with (directory / place.relative_path).open("rb") as stream:
        digest = _sha256(stream, place.offset, place.length)
    return replace(result, storage_data=_Hashed(place, digest))


def _sha256(stream: IO[bytes], start: int, length: int) -> str:
    digest = hashlib.sha256()
    stream.seek(start)
    while length > 0:
        block = stream.read(min(length, _BLOCK))
        if not block:
            break
        digest.update(block)
        length -= len(block)
    return digest.hexdigest()


class VerifyingReader(FileSystemReader):
    """Reads tensors whose bytes are those that were written, as data: nothing is unpickled.

    Args:
        directory: the checkpoint.
        body: its document.
    """

    def __init__(self, directory: Path, body: Json) -> None:
        super().__init__(directory)
        self._directory = directory
        self._tensors: Json = body["tensors"]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Make DCP's index from the document's."""
        known: dict[str, Any] = {}
        places: dict[MetadataIndex, _Place] = {}
        for key, entry in self._tensors.items():
            shape = torch.Size(entry["shape"])
            origin = torch.Size([0] * len(shape))
            properties = TensorProperties(dtype=documents.dtype_of(entry["dtype"]))
            chunk = ChunkStorageMetadata(origin, shape)
            known[key] = TensorStorageMetadata(properties, shape, [chunk])
            place = _Place(entry["file"], entry["start"], entry["bytes"])
            places[MetadataIndex(key, origin, 0)] = place
        return Metadata(known, storage_data=places)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Check the digests of all that is asked for, then read it."""
        keys = [item.storage_index.fqn for item in plan.items]
        self.verify(keys)
        for key, item in zip(keys, plan.items, strict=True):
            entry = self._tensors[key]
            path = self._directory / entry["file"]
            dtype = documents.dtype_of(entry["dtype"])
            try:
                with path.open("rb") as file:
                    tensor = read_tensor(
                        file, entry["start"], entry["bytes"], entry["shape"], dtype
                    )
            except Exception as error:  # whatever is found in a forged file
                raise CheckpointError(
                    f"{path}: holds something else than the tensor {key!r}: {error}"
                ) from error
            target = planner.resolve_tensor(item).detach()
            target.copy_(tensor)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def verify(self, keys: Iterable[str]) -> None:
        """Raise CheckpointError for a tensor whose bytes are not those that were saved."""
        for key in keys:
            self._verify(key)

    def _verify(self, key: str) -> None:
        entry = self._tensors[key]
        path = self._directory / entry["file"]
        try:
            with path.open("rb") as stream:
                found = _sha256(stream, entry["start"], entry["bytes"])
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read, {error.strerror}") from error
        if found != entry["sha256"]:
            raise CheckpointError(f"{path}: damaged, the SHA-256 of {key!r} is not what was saved")


def nested(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return them under the first part of their names; DCP joins the two again with a dot.

    DCP logs every key of the outermost dict, at 0.2 ms each.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        outer, _, inner = name.partition(".")
        found.setdefault(outer, {})[inner] = tensor
    return found


def check_files(directory: Path, body: Json) -> None:
    """Raise CheckpointError for a file that is missing or has another size than it was saved with.

    That costs nothing, and names a truncated file before anything is read.
    """
    for name, size in body["files"].items():
        path = directory / name
        try:
            found = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read, {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{path}: expected a plain file")
        if found.st_size != size:
            raise CheckpointError(f"{path}: damaged, expected {size} bytes, got {found.st_size}")


def holds_checkpoint(directory: Path) -> bool:
    """Whether it has a document, or nothing but what else a checkpoint has."""
    names = os.listdir(directory)
    return documents.NAME in names or all(
        documents.DATA.fullmatch(name) or name.startswith(".metadata") for name in names
    )


@contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """Turn DCP's exception, which is no Exception and carries all tracebacks, into ours."""
    try:
        yield
    except CheckpointException as error:
        raise as_error(error, what) from error


def as_error(error: CheckpointException, what: str) -> BaseException:
    """Return the cause itself where it says enough."""
    causes = {rank: cause for rank, (cause, _) in error.failures.items()}
    first = next(iter(causes.values()))
    if not isinstance(first, Exception) or isinstance(first, CheckpointError):
        return first
    return CheckpointError(f"{what}: {_listed(causes.items())}")


def _listed(causes: Iterable[tuple[int, BaseException]]) -> str:
    return "; ".join(f"process {rank}: {type(e).__name__}: {e}" for rank, e in causes)
