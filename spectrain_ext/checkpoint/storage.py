"""Storage: torch.distributed.checkpoint's files, committed at once and verified when read.

Every process lets DCP work for itself alone: among several, DCP exchanges pickles. It keeps an
index of its own in ``.metadata``, a pickle that its reader executes. That is written, so that DCP's
tools can read a checkpoint of ours, and never read: the index is in ``checkpoint.json``.
"""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from spectrain_ext.errors import CheckpointError

from . import documents
from .archive import read_tensor
from .documents import Json
from .files import commit_directory, partial, sync_directory, write_file

_BLOCK = 1 << 20

# DCP tells everybody that it takes the process for one that trains alone.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or un")


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
        rank: of this process; the first one coordinates.
        body: the document, without what only DCP knows.
        committed: called on the coordinator once the checkpoint has its name.

    Attributes:
        busy: entered while this process writes and the others may wait for it.
    """

    busy: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, path: Path, rank: int, body: Json, committed: Callable[[], None]) -> None:
        super().__init__(partial(path), sync_files=True)
        self._final = path
        self._rank = rank
        self._body = body
        self._committed = committed

    def write(self, tensors: Mapping[str, Tensor]) -> Json:
        """Write this process's tensors; returns each one's entry in the document."""
        self._entries: Json = {}
        with self.busy(), plain_errors():
            state_dict_saver.save(nested(tensors), storage_writer=self, no_dist=True)
        return self._entries

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Called by DCP with this process's plan: its files have the process's number."""
        before = [SavePlan([])] * self._rank
        return super().prepare_global_plan([*before, *plans])[self._rank :]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called by DCP when this process's tensors have been written: digest each."""
        directory = Path(self.path)
        for result in (result for found in results for result in found):
            known = metadata.state_dict_metadata[result.index.fqn]
            place = result.storage_data
            assert isinstance(known, TensorStorageMetadata), "a state_dict of tensors only"
            with (directory / place.relative_path).open("rb") as stream:
                digest = _sha256(stream, place.offset, place.length)
            self._entries[result.index.fqn] = {
                "dtype": str(known.properties.dtype).removeprefix("torch."),
                "shape": list(known.size),
                "file": place.relative_path,
                "start": place.offset,
                "bytes": place.length,
                "sha256": digest,
            }
        sync_directory(directory)

    def commit(self, found: list[Json]) -> None:
        """On the coordinator, with what every ``write`` returned: the indices, and the name."""
        with self.busy():
            tensors = {key: entry for entries in found for key, entry in entries.items()}
            self._write_index(tensors)
            directory = Path(self.path)
            files = {path.name: path.stat().st_size for path in directory.glob("*.distcp")}
            content = documents.written({**self._body, "tensors": tensors, "files": files})
            write_file(directory / documents.NAME, content)
            commit_directory(self._final)
            self._committed()

    def _write_index(self, tensors: Json) -> None:
        """Write DCP's own."""
        known: dict[str, Any] = {}
        results = []
        for key, entry in tensors.items():
            index, known[key] = _indexed(key, entry)
            place = _StorageInfo(entry["file"], entry["start"], entry["bytes"])
            results.append(WriteResult(index, entry["bytes"], place))
        paths = {key: tuple(key.split(".", 1)) for key in tensors}
        super().finish(Metadata(known, planner_data=paths), [results])


def _indexed(key: str, entry: Json) -> tuple[MetadataIndex, TensorStorageMetadata]:
    """What DCP's index has of a whole tensor."""
    shape = torch.Size(entry["shape"])
    origin = torch.Size([0] * len(shape))
    properties = TensorProperties(dtype=documents.dtype_of(entry["dtype"]))
    chunk = ChunkStorageMetadata(origin, shape)
    return MetadataIndex(key, origin, 0), TensorStorageMetadata(properties, shape, [chunk])


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

    def read(
        self, tensors: Mapping[str, Tensor], busy: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Fill the tensors with those of their names."""
        with busy(), plain_errors():
            state_dict_loader.load(nested(tensors), storage_reader=self, no_dist=True)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Make DCP's index from the document's."""
        known: dict[str, Any] = {}
        places: dict[MetadataIndex, _Place] = {}
        for key, entry in self._tensors.items():
            index, known[key] = _indexed(key, entry)
            places[index] = _Place(entry["file"], entry["start"], entry["bytes"])
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
def plain_errors() -> Iterator[None]:
    """Turn DCP's exception, which is no Exception and carries all tracebacks, into its cause."""
    try:
        yield
    except CheckpointException as error:
        ((cause, _),) = error.failures.values()
        raise cause from error
