"""What ``spectrain train`` shows and keeps of a run beside its results: metrics and logs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from spectrain_ext.observation.metrics import Metrics
from spectrain_ext.pipeline.pipeline import Pipeline

from .world import World

_LOGGER = "spectrain_ext"
# Minibatches from one measurement of prediction errors to the next, counted from each checkpoint.
_ERRORS_EVERY = 10


@dataclass(frozen=True)
class Observation:
    """Where metrics go, None: nowhere.

    ``metrics`` is a file of JSON lines, ``tensorboard`` a folder that gets one folder per run.
    """

    metrics: Path | None = None
    tensorboard: Path | None = None

    @contextmanager
    def of(self, pipe: Pipeline, method: str, seed: int, start: int) -> Iterator[Metrics | None]:
        """Inside, what is to look on at a run; None where nobody asked for it.

        Args:
            pipe: the pipeline.
            method: its method's name, for the records.
            seed: likewise.
            start: minibatches that were trained on before.
        """
        if self.metrics is None and self.tensorboard is None:
            yield None
            return
        folder = None if self.tensorboard is None else self.tensorboard / f"{method}-seed{seed}"
        labels: dict[str, str | int | float] = {"method": method, "seed": seed}
        with Metrics(
            pipe,
            self.metrics,
            tensorboard=folder,
            errors_every=_ERRORS_EVERY,
            start=start,
            labels=labels,
        ) as metrics:
            yield metrics


@contextmanager
def logged(on: bool, console: Console, world: World) -> Iterator[None]:
    """Inside, the library's log is shown: rank 0's around its progress bar, others' on stderr."""
    if not on:
        yield
        return
    handler: logging.Handler
    if world.first:
        handler = RichHandler(console=console, show_path=False, markup=False)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    else:
        handler = logging.StreamHandler()
        form = f"%(asctime)s rank {world.rank} %(levelname)s %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(form))
    logger = logging.getLogger(_LOGGER)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
