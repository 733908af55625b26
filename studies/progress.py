"""Shows progress: a bar in a terminal, otherwise a line from time to time (as in batch logs)."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

if TYPE_CHECKING:
    from torch import Tensor

_EVERY = 10.0  # seconds between lines


class Progress:
    """The progress of ``runs`` runs of ``per_run`` minibatches each, shown inside its ``with``."""

    def __init__(
        self,
        console: Console,
        per_run: int,
        runs: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            _Rate(),
            TimeRemainingColumn(),
        )
        self._bar = RichProgress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=per_run * runs)
        self._console, self._clock = console, clock
        self._per_run, self._left = per_run, per_run * runs
        self._began = self._told = clock()
        self._done = self._fresh = self._here = 0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begin(self, method: str, seed: str) -> None:
        """Begin a run; ``seed`` is its position among the seeds, for example ``1/5``."""
        self._bar.update(self._task, description=f"seed {seed} [bold]{escape(method)}[/]")
        self._label = f"{method}, seed {seed}"
        self._here = 0

    def skip(self, minibatches: int) -> None:
        """Count minibatches that were finished earlier."""
        self._bar.advance(self._task, minibatches)
        self._left -= minibatches

    def advance(self, loss: Tensor) -> None:
        if self._console.is_terminal:
            self._bar.advance(self._task)
            return
        self._here += 1
        self._done += 1
        self._fresh += 1
        self._left -= 1
        now = self._clock()
        if now - self._told < _EVERY:
            return
        rate = self._fresh / (now - self._told)
        # methods differ in speed: assume that the rest takes as long per minibatch as the work done
        left = timedelta(seconds=round(self._left * (now - self._began) / self._done))
        self._console.print(
            f"{self._label}: minibatch {self._here} of {self._per_run}, "
            f"loss {loss.item():.4g}, {rate:.3g} minibatches/s, {left} left",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        self._told, self._fresh = now, 0


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.0f}/s")
