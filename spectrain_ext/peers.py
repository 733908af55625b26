"""Lets processes work together: here one alone; ``distributed`` has several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from spectrain_ext.errors import CheckpointError


class Peers:
    """The processes that do something together, by rank; this process alone."""

    rank = 0
    size = 1
    _busy: Callable[[str], AbstractContextManager[object]] = nullcontext  # ``Board.busy``

    def all_gather(self, value: Any) -> list[Any]:
        """Return every process's value, by rank; ConnectionError if a process has ended."""
        return [value]

    @contextmanager
    def attempt(self, doing: str, what: str = "") -> Iterator[list[Any]]:
        """Work in every process; an error in one is raised in all.

        Yields a list, to which the work may append one value; afterwards it has those of all
        processes, by rank. With ``what``, the error is one CheckpointError in all.
        """
        values: list[Any] = []
        caught = None
        try:
            with self._busy(doing):
                yield values
            mine = {"value": values.pop() if values else None}
        except Exception as error:
            caught = error
            message = str(error) if isinstance(error, CheckpointError) else None
            mine = {"error": f"{type(error).__name__}: {error}", "message": message}
        found = self.all_gather(mine)
        errors = [(rank, answer) for rank, answer in enumerate(found) if "error" in answer]
        listed = [f"process {rank}: {answer['error']}" for rank, answer in errors]
        if errors and what:
            told = errors[0][1]["message"] or f"{what}: {'; '.join(listed)}"
            raise CheckpointError(told) from caught
        if caught is not None:
            raise caught
        if errors:
            raise RuntimeError(listed[0])
        values[:] = [answer["value"] for answer in found]
