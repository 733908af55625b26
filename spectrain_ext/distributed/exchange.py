"""Exchanges values and errors among the processes of a group."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from spectrain_ext.errors import CheckpointError

from .failures import is_broken_connection

T = TypeVar("T")


class Watched(Protocol):
    """A ``Board`` or a pipeline; ends all processes if one fails or keeps the others waiting."""

    timeout: float

    def together(self, what: str) -> AbstractContextManager[None]: ...
    def busy(self, what: str) -> AbstractContextManager[None]: ...


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
