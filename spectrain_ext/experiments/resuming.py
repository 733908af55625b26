"""Checkpoints of a run of ``spectrain train``: where it goes on after an interruption."""

import logging
import math
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from spectrain_ext.errors import CheckpointError
from spectrain_ext.pipeline.pipeline import Pipeline

from .world import World

_logger = logging.getLogger(__name__)
T = TypeVar("T")
_KEPT = 2  # the newest, and one more should it be damaged


class Keeper:
    """Saves a run every so often, and removes what it saved once the run is finished.

    Args:
        folder: of this run's checkpoints alone.
        pipe: what is trained.
        world: the processes that train it together.
        every: minibatches from one checkpoint to the next, None: any number.
        seconds: likewise.

    Attributes:
        minibatches: that the newest checkpoint has.
        losses: of these, on the rank that saved them, and after ``restore`` on all.
        seconds: that they took.
    """

    def __init__(
        self,
        folder: Path,
        pipe: Pipeline,
        world: World,
        every: int | None,
        seconds: float | None,
    ) -> None:
        from spectrain_ext.checkpoint import CheckpointManager  # takes as long to import as torch

        group = None
        if not world.together and dist.is_initialized():  # others wait for what this rank does
            group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._manager = CheckpointManager(folder, pipe, keep=_KEPT, process_group=group)
        self._first = world.first
        self._every, self._interval = every, seconds
        self.minibatches = 0
        self.losses: list[float] = []
        self.seconds = 0.0

    def restore(self) -> None:
        """Go on from the newest checkpoint, if there is one.

        Raises:
            CheckpointError: it is damaged, or of something else.
        """
        loaded = self._manager.restore()
        if loaded is not None:
            try:
                losses = [float(loss) for loss in loaded.extra["losses"]]
                seconds = float(loaded.extra["seconds"])
            except (TypeError, KeyError, ValueError, OverflowError) as error:
                raise CheckpointError(
                    f"{self._manager.directory}: was not saved by this command: {error!r}"
                ) from error
            self.minibatches, self.losses, self.seconds = loaded.minibatches, losses, seconds
            _logger.info("going on from minibatch %d", self.minibatches)
        self._moment = time.monotonic()

    def segment(self, batches: Iterable[T]) -> Iterator[T]:
        """Hand over batches until it is time to save; rank 0 says when that is."""
        minibatches = self.minibatches
        for batch in batches:
            yield batch
            minibatches += 1
            if self._first and self._due(minibatches):
                return

    def _due(self, minibatches: int) -> bool:
        if self._every is not None and minibatches % self._every == 0:
            return True
        return self._interval is not None and time.monotonic() - self._moment >= self._interval

    def save(self, minibatches: int, losses: list[float], seconds: float) -> None:
        """Write a checkpoint; the pipeline is drained.

        Raises:
            CheckpointError: it could not be written; the earlier one is whole.
        """
        self.minibatches, self.losses, self.seconds = minibatches, losses, seconds
        self._manager.minibatches = minibatches
        # JSON has no inf and no nan, but strings; float() reads both
        told = [loss if math.isfinite(loss) else str(loss) for loss in losses]
        self._manager.save(extra={"losses": told, "seconds": seconds})
        self._moment = time.monotonic()


def forget(folder: Path) -> None:
    """Remove a finished run's checkpoints."""
    shutil.rmtree(folder, ignore_errors=True)
