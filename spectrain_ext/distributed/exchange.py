"""Exchanges values, errors, tensors and files among the processes of a group."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from spectrain_ext.errors import CheckpointError
from spectrain_ext.files import partial, remove

from .failures import is_broken_connection

T = TypeVar("T")


class Watched(Protocol):
    """A ``Board`` or a pipeline; ends all processes if one fails or keeps the others waiting."""

    timeout: float

    def together(self, what: str) -> AbstractContextManager[None]: ...
    def busy(self, what: str) -> AbstractContextManager[None]: ...


class Move(NamedTuple):
    """A file to be sent from one process to another."""

    name: str
    size: int
    source: int
    target: int


class Peers:
    """The processes of a group (None: the default group, or this process alone)."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, watch: Watched | None = None
    ) -> None:
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._watch = group, watch

    @property
    def timeout(self) -> timedelta | None:
        """The watch's timeout; None: torch's default."""
        return None if self._watch is None else timedelta(seconds=self._watch.timeout)

    def together(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.together(what)

    def busy(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.busy(what)

    def all_gather(self, value: Any) -> list[Any]:
        """Return every process's value, by rank; ConnectionError if a process has ended."""
        if self.size == 1:
            return [value]
        with _connected():
            # JSON, because torch's object collectives unpickle messages, which can execute code.
            return [json.loads(text) for text in self._gather_bytes(json.dumps(value).encode())]

    def call_on_all(self, make: Callable[[], T], doing: str) -> list[T]:
        """Return every process's result of ``make``; an error in one is raised in all."""
        error, found = self._attempted(make, doing)
        if error is not None:
            raise error
        for rank, answer in enumerate(found):
            if "error" in answer:
                raise RuntimeError(f"process {rank}: {answer['error']}")
        return [answer["value"] for answer in found]

    def call_or_fail_together(self, make: Callable[[], T], doing: str, what: str) -> list[T]:
        """Return every process's result of ``make``; an error is one CheckpointError in all."""
        error, found = self._attempted(make, doing)
        reasons = {rank: answer for rank, answer in enumerate(found) if "error" in answer}
        if reasons:
            told = next(iter(reasons.values()))["message"]
            if told is None:
                listed = (f"process {rank}: {answer['error']}" for rank, answer in reasons.items())
                told = f"{what}: {'; '.join(listed)}"
            raise CheckpointError(told) from error
        return [answer["value"] for answer in found]

    def broadcast(self, rank: int, mine: Tensor | None, shape: Any, dtype: torch.dtype) -> Tensor:
        """Return the CPU tensor of this shape and dtype that process ``rank`` passes."""
        found = torch.empty(shape, dtype=dtype) if mine is None else mine.contiguous()
        if found.numel() and self.size > 1:
            assert self._group is not None
            # As bytes, because gloo does not support all dtypes.
            body = found.view(-1).view(torch.uint8)
            with _connected():
                dist.broadcast(body, dist.get_global_rank(self._group, rank), group=self._group)
        return found

    def move(self, moves: Sequence[Move], directory: Path) -> None:
        """Send files between the processes' own copies of a directory, in parallel.

        All processes pass the same moves. A file gets its name once it has arrived completely.
        """
        if not moves:
            return
        doing, what = f"sending files of {directory.name}", str(directory)
        own = [
            (k, m, directory / m.name, m.target == self.rank)
            for k, m in enumerate(moves)
            if self.rank in (m.source, m.target)
        ]
        contents: list[Tensor] = []

        def begin() -> None:
            for _, m, path, comes in own:
                if path.name != m.name or m.name.startswith("."):  # untrusted: from a peer
                    raise ValueError(f"{m.name!r} is no name of a file")
                contents.append(_mapped(_allocate(path, m.size) if comes else path, m.size, comes))

        def end() -> None:
            for path in (path for _, _, path, comes in own if comes):
                partial(path).rename(path)

        self.call_or_fail_together(begin, doing, what)
        with _connected():
            works = [
                dist.irecv(content, self._global(m.source), group=self._group, tag=k)
                if comes
                else dist.isend(content, self._global(m.target), group=self._group, tag=k)
                for content, (k, m, _, comes) in zip(contents, own, strict=True)
            ]
            for work in filter(None, works):
                work.wait()
        self.call_or_fail_together(end, doing, what)

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def _attempted(
        self, make: Callable[[], T], doing: str
    ) -> tuple[Exception | None, list[dict[str, Any]]]:
        """Return the error here, if any, and every process's value or error."""
        error = None
        try:
            with self.busy(doing):
                mine: dict[str, Any] = {"value": make()}
        except Exception as caught:
            error = caught
            message = str(error) if isinstance(error, CheckpointError) else None
            mine = {"error": f"{type(error).__name__}: {error}", "message": message}
        return error, self.all_gather(mine)

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._group)
        longest = max(int(size) for size in sizes)
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
        dist.all_gather(found, padded, group=self._group)
        return [
            body[: int(size)].numpy().tobytes() for body, size in zip(found, sizes, strict=True)
        ]


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if is_broken_connection(error):
            raise ConnectionError(f"the processes have lost one another: {error}") from error
        raise


def _mapped(path: Path, size: int, shared: bool) -> Tensor:
    return torch.from_file(str(path), shared=shared, size=size, dtype=torch.uint8)


def _allocate(path: Path, size: int) -> Path:
    """Allocate a partial file: a full disk is an OSError here instead of a SIGBUS later."""
    remove(partial(path))  # left by an interrupted move
    handle = os.open(partial(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.posix_fallocate(handle, 0, size)
    finally:
        os.close(handle)
    return partial(path)
