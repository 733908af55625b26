"""Shows progress: a bar in a terminal, otherwise a line from time to time (as in batch logs)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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


class Progress(ABC):
    """The progress of a comparison, shown inside its ``with``."""

    def __init__(self, per_run: int, runs: int) -> None:
        self.per_run, self.total = per_run, per_run * runs

    @staticmethod
    def on(console: Console, per_run: int, runs: int, *, shown: bool) -> Progress:
        """Return the form that suits the console; not ``shown`` if another process shows it."""
        if console.is_terminal or not shown:
            return Bar(per_run, runs, console, shown)
        return Lines(per_run, runs, lambda line: console.print(line, **_PLAIN))

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    @abstractmethod
    def begin(self, method: str, seed: str) -> None:
        """Begin a run; ``seed`` is its position among the seeds, for example ``1/5``."""

    @abstractmethod
    def skip(self, minibatches: int) -> None:
        """Count minibatches that were finished earlier."""

    @abstractmethod
    def advance(self, loss: Tensor | None) -> None:
        """Count one minibatch with this loss; None if another process has the loss."""


class Bar(Progress):
    """One bar for all runs."""

    def __init__(self, per_run: int, runs: int, console: Console, shown: bool) -> None:
        super().__init__(per_run, runs)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            _Rate(),
            TimeRemainingColumn(),
        )
        self._rich = RichProgress(*columns, console=console, disable=not shown)
        self._task = self._rich.add_task("", total=self.total)

    def __enter__(self) -> Bar:
        self._rich.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._rich.stop()

    def begin(self, method: str, seed: str) -> None:
        self._rich.update(self._task, description=f"seed {seed} [bold]{escape(method)}[/]")

    def skip(self, minibatches: int) -> None:
        self._rich.advance(self._task, minibatches)

    def advance(self, loss: Tensor | None) -> None:
        self._rich.advance(self._task)


class Lines(Progress):
    """A plain line every ten seconds, passed to ``tell``."""

    def __init__(
        self,
        per_run: int,
        runs: int,
        tell: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(per_run, runs)
        self._tell, self._clock = tell, clock
        self._began = self._told = clock()
        self._left = self.total
        self._done = self._fresh = self._here = 0
        self._label = ""

    def begin(self, method: str, seed: str) -> None:
        self._label = f"{method}, seed {seed}"
        self._here = 0

    def skip(self, minibatches: int) -> None:
        self._here += minibatches
        self._left -= minibatches

    def advance(self, loss: Tensor | None) -> None:
        self._here += 1
        self._done += 1
        self._fresh += 1
        self._left -= 1
        now = self._clock()
        if now - self._told < _EVERY:
            return
        value = "" if loss is None else f" loss {loss.item():.4g},"
        rate = self._fresh / (now - self._told)
        # methods differ in speed: assume that the rest takes as long per minibatch as the work done
        left = self._left * (now - self._began) / self._done
        self._tell(
            f"{self._label}: minibatch {self._here} of {self.per_run},{value} "
            f"{rate:.3g} minibatches/s, {_duration(left)} left"
        )
        self._told, self._fresh = now, 0


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Return the rate, empty until it is known."""
        return Text("" if task.speed is None else f"{task.speed:.0f}/s")


_PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
