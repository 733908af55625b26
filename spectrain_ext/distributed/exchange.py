"""Peers: what the processes of a group tell one another, and do together."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from spectrain_ext.errors import CheckpointError
from spectrain_ext.files import partial, remove

T = TypeVar("T")


class Watched(Protocol):
    """A ``Board`` or a pipeline: ends all processes where one fails or keeps the others waiting."""

    timeout: float

    def together(self, what: str) -> AbstractContextManager[None]: ...
    def busy(self, what: str) -> AbstractContextManager[None]: ...


class Move(NamedTuple):
    """A file that one process has and another one is to have."""

    name: str
    size: int
    source: int
    target: int


class Peers:
    """The processes of a group (None: all there are, or this one alone)."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, watch: Watched | None = None
    ) -> None:
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._watch = group, watch

    @property
    def timeout(self) -> timedelta | None:
        """None: as long as torch says."""
        return None if self._watch is None else timedelta(seconds=self._watch.timeout)

    def together(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.together(what)

    def busy(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.busy(what)

    def tell(self, value: Any) -> list[Any]:
        """What every process gives, by rank; raises ConnectionError where one has gone."""
        if self.size == 1:
            return [value]
        try:
            # JSON, as torch's object collectives unpickle what arrives: they execute what it says.
            return [json.loads(text) for text in self._texts(json.dumps(value).encode())]
        except RuntimeError as lost:  # as torch has it
            raise ConnectionError(f"the processes have lost one another: {lost}") from lost

    def gathered(self, make: Callable[[], T], doing: str) -> list[T]:
        """What ``make`` returns, by rank; an error in one process is one in all: none waits."""
        error, found = self._attempted(make, doing)
        if error is not None:
            raise error
        for rank, answer in enumerate(found):
            if "error" in answer:
                raise RuntimeError(f"process {rank}: {answer['error']}")
        return [answer["value"] for answer in found]

    def settled(self, make: Callable[[], T], doing: str, what: str) -> list[T]:
        """The same; an error is a CheckpointError in all processes, with one message."""
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
        """What that process gives of this shape and dtype; all in the CPU's memory."""
        found = torch.empty(shape, dtype=dtype) if mine is None else mine.contiguous()
        if found.numel() and self.size > 1:
            assert self._group is not None
            # As bytes: gloo does not know all dtypes.
            body = found.view(-1).view(torch.uint8)
            try:
                dist.broadcast(body, dist.get_global_rank(self._group, rank), group=self._group)
            except RuntimeError as lost:
                raise ConnectionError(f"the processes have lost one another: {lost}") from lost
        return found

    def move(self, moves: Sequence[Move], directory: Path) -> None:
        """Send files out of a directory that each process has for itself, all at the same time.

        A file has its name when it is there as a whole. All processes give the same moves.
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
                if path.name != m.name or m.name.startswith("."):  # others may have said it
                    raise ValueError(f"{m.name!r} is no name of a file")
                contents.append(_mapped(_room(path, m.size) if comes else path, m.size, comes))

        def end() -> None:
            for path in (path for _, _, path, comes in own if comes):
                partial(path).rename(path)

        self.settled(begin, doing, what)
        try:
            works = [
                dist.irecv(content, self._global(m.source), group=self._group, tag=k)
                if comes
                else dist.isend(content, self._global(m.target), group=self._group, tag=k)
                for content, (k, m, _, comes) in zip(contents, own, strict=True)
            ]
            for work in filter(None, works):
                work.wait()
        except RuntimeError as lost:
            raise ConnectionError(f"the processes have lost one another: {lost}") from lost
        self.settled(end, doing, what)

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def _attempted(
        self, make: Callable[[], T], doing: str
    ) -> tuple[Exception | None, list[dict[str, Any]]]:
        """What failed here, and what every process says: what it has made, or why it has not."""
        error = None
        try:
            with self.busy(doing):
                mine: dict[str, Any] = {"value": make()}
        except Exception as caught:
            error = caught
            message = str(error) if isinstance(error, CheckpointError) else None
            mine = {"error": f"{type(error).__name__}: {error}", "message": message}
        return error, self.tell(mine)

    def _texts(self, mine: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._group)
        longest = max(int(size) for size in sizes)
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
        dist.all_gather(found, padded, group=self._group)
        return [
            body[: int(size)].numpy().tobytes() for body, size in zip(found, sizes, strict=True)
        ]


def _mapped(path: Path, size: int, shared: bool) -> Tensor:
    return torch.from_file(str(path), shared=shared, size=size, dtype=torch.uint8)


def _room(path: Path, size: int) -> Path:
    """Make a partial file of that size: without room an OSError here, and no signal later."""
    remove(partial(path))  # of a move that did not end
    handle = os.open(partial(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.posix_fallocate(handle, 0, size)
    finally:
        os.close(handle)
    return partial(path)
