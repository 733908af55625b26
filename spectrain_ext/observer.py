"""Observer: what looks on while a pipeline trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from .schedule import Kind, Rules

if TYPE_CHECKING:
    from .executor import Result
    from .stage import Stage

Handler = Callable[[int, int], None]


class Observer:
    """Is given to ``Pipeline.run`` as ``trace``; sees its actions and its results.

    A run without one makes no call of any of this.
    """

    def begin(self, rules: Sequence[Rules], devices: Sequence[torch.device]) -> None:
        """A run begins.

        Args:
            rules: which weights every stage computes with.
            devices: of the stages of this process.
        """

    def watch(self, stage: Stage, handlers: dict[Kind, Handler]) -> dict[Kind, Handler]:
        """The handlers that a stage's actions are to be run by, instead of those given."""
        return handlers

    def result(self, result: Result) -> None:
        """A result that the caller is about to get."""

    def end(self) -> None:
        """The run has ended, or failed."""
