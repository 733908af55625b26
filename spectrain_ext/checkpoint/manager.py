"""Saves checkpoints at intervals during training, and restores the newest one."""

from __future__ import annotations

import copy
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spectrain_ext.files import interrupted, recover
from spectrain_ext.pipeline.loops import Segment, segments, warn_unless_begun
from spectrain_ext.pipeline.losses import Keep, Result
from spectrain_ext.pipeline.pipeline import Pipeline

from .disk import drop, more_than_checkpoint
from .loading import Loaded, load
from .parts import Stateful, TrainableOnly, check_trainable_only
from .sampler import ShuffledSampler
from .saving import save, together

if TYPE_CHECKING:
    from spectrain_ext.pipeline import Observer

_logger = logging.getLogger(__name__)

NAME = re.compile(r"minibatch-[0-9]{8,18}")


class CheckpointManager:
    """A directory of checkpoints of one training run.

    Each save drains the pipeline, which changes the results of asynchronous methods, because the
    stages refill with fresher weights. With ``every_minibatches`` the drains come at fixed
    minibatches, so a resumed training gives the same bits as one that was never stopped. With
    ``every_seconds`` they depend on the clock.

    Args:
        directory: holds ``minibatch-00000100``, ...
        pipe: the pipeline to save.
        sampler: determines the order of the data; saved and loaded too.
        every_minibatches: save after this many minibatches.
        every_seconds: save at the first minibatch after this many seconds.
        keep: number of checkpoints to keep. Older ones are removed once a newer one is complete,
            except those to which somebody has added files.
        trainable_only: as for ``st.checkpoint.save``.

    Attributes:
        minibatches: number of minibatches trained on in all runs.
        pipe: as given.
        sampler: as given; after a run, a ``ShuffledSampler`` has training's position in all
            processes.
        directory: the absolute path.

    Raises:
        ValueError: an argument out of range.

    Example:
        >>> model = [nn.Linear(4, 4), nn.Linear(4, 1)]
        >>> pipe = st.Pipeline(model, lambda p: st.optim.SGD(p, lr=0.1), nn.functional.mse_loss)
        >>> manager = st.checkpoint.CheckpointManager("run", pipe, every_minibatches=2)
        >>> manager.restore()  # returns None: there is no checkpoint yet
        >>> batches = [(torch.ones(8, 4), torch.ones(8, 1))] * 4
        >>> [result.index for result in manager.run(batches)]
        [0, 1, 2, 3]
        >>> sorted(path.name for path in Path("run").iterdir())
        ['minibatch-00000002', 'minibatch-00000004']
        >>> manager.restore().minibatches
        4
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        pipe: Pipeline,
        *,
        sampler: Stateful | None = None,
        every_minibatches: int | None = None,
        every_seconds: float | None = None,
        keep: int = 3,
        trainable_only: TrainableOnly = False,
    ) -> None:
        check_trainable_only(trainable_only, pipe)
        for name, value, least in (
            ("every_minibatches", every_minibatches, 1),
            ("every_seconds", every_seconds, 0),
            ("keep", keep, 1),
        ):
            if value is not None and not value >= least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        self._is_first = getattr(pipe, "rank", 0) == 0  # of several processes
        self.directory = Path(directory).absolute()
        self.pipe = pipe
        self.minibatches = 0
        self.sampler = sampler
        self._every = every_minibatches
        self._seconds = every_seconds
        self._keep = keep
        self._trainable_only: TrainableOnly = trainable_only
        self._failed = False
        # A loader with workers reads the sampler ahead of training, so its position is this offset
        # plus the minibatches trained on.
        self._offset = self._position()
        self._last = (0, time.monotonic())

    # Resuming

    def latest(self) -> Path | None:
        """Return the newest checkpoint, or None."""
        checkpoints = self._checkpoints()
        return checkpoints[-1] if checkpoints else None

    def restore(self) -> Loaded | None:
        """Load the newest checkpoint; return None and change nothing if there is none.

        Raises:
            CheckpointError: the checkpoint is damaged or does not fit; the message names the file.
                Remove its directory to restore the one before.
        """
        doing = "looking for the newest checkpoint"
        with together(self.pipe, doing) as peers, peers.attempt(doing) as names:
            names.append(str(self._recover() or ""))
        found = names[0]
        if not found:
            return None
        loaded = load(found, self.pipe, sampler=self.sampler)
        if self._is_first:
            _logger.info("checkpoint loaded: %s", found)
        self.minibatches = loaded.minibatches
        self._offset = self._position() - self.minibatches
        self._failed = False
        self._last = (self.minibatches, time.monotonic())
        return loaded

    def _recover(self) -> Path | None:
        """Clean up after a save that did not finish; return the newest checkpoint (on rank 0)."""
        if not self._is_first:
            return None
        for path in interrupted(self.directory):
            if NAME.fullmatch(path.name):
                recover(path)
        return self.latest()

    # Training

    def run(
        self,
        batches: Iterable[object] | None,
        *,
        trace: Observer | Sequence[Observer] | None = None,
        keep: Keep | None = None,
        extra: Callable[[], object] | None = None,
    ) -> Iterator[Result]:
        """Train like ``pipe.run``, and drain and save whenever a save is due.

        All processes call this. Rank 0 decides when to save and when the run ends.

        Args:
            batches: as for ``pipe.run``.
            trace: as for ``pipe.run``.
            keep: as for ``pipe.run``.
            extra: called in all processes before a save; its result is saved too.

        Yields:
            Results, numbered over all runs and restarts. Leaving the loop finishes the microbatches
            in flight, and saves if a save is due. If that fails after ``break``, the next use of
            the pipeline raises the error.

        Raises:
            CheckpointError: a save failed. The checkpoints before it are intact. Otherwise as
                ``pipe.run``.
        """
        begun: list[bool] = []
        return warn_unless_begun(self._run(batches, trace, keep, extra, begun), begun)

    def _run(
        self,
        batches: Iterable[object] | None,
        trace: Observer | Sequence[Observer] | None,
        keep: Keep | None,
        extra: Callable[[], object] | None,
        begun: list[bool],
    ) -> Iterator[Result]:
        begun.append(True)
        self._rewind()  # undoes what a loader read ahead before the last run failed

        def counted() -> Iterator[object]:
            for batch in () if batches is None else batches:
                self.minibatches += 1
                yield batch

        def ends(taken: int) -> bool:
            return taken > 0 and self._is_first and self._due()

        def run(segment: Iterable[object]) -> Iterator[Result]:
            results = self.pipe.run(segment, trace=trace, keep=keep)
            self._failed = True  # until the run has ended
            return results

        def follow(segment: Segment, left: bool) -> int | None:
            """Save if due; return None if this was the last run in any process."""
            last = segment.exhausted or left
            with together(self.pipe, "counting the minibatches of a run") as peers:
                found = peers.all_gather((self.minibatches, self._due(), last))
                # rank 0 feeds the run, so only it has counted the minibatches
                self.minibatches, due, _ = found[0]
                more = None
                if due:
                    with peers.attempt("calling extra for a checkpoint"):
                        more = extra() if extra is not None else None
            self._failed = False
            if due:
                self.save(more)
            if not any(ended for _, _, ended in found):
                return self.minibatches
            self._rewind()
            return None

        with self.pipe._callers_loop:
            yield from segments(counted(), ends, run, follow, self.minibatches)

    def _rewind(self) -> None:
        """Set the sampler to training's position: only rank 0's loader advances its own."""
        if isinstance(self.sampler, ShuffledSampler):
            self.sampler.position = self._offset + self.minibatches

    def _due(self) -> bool:
        minibatches, moment = self._last
        if self.minibatches == minibatches:
            return False
        if self._every is not None and self.minibatches % self._every == 0:
            return True
        return self._seconds is not None and time.monotonic() - moment >= self._seconds

    def save(self, extra: object = None) -> Path:
        """Save now, and return the checkpoint's path.

        Raises:
            RuntimeError: a run has not ended; or the last one failed, and the stages may have made
                different numbers of updates. In that case call ``restore`` first.
            CheckpointError, FileExistsError, TypeError: as for ``st.checkpoint.save``.
        """
        self.pipe.check_drained("save")
        if self._failed:
            raise RuntimeError(
                "save: the last run failed, and its stages may have made different numbers of "
                "updates; restore() first"
            )
        path, sampler = self.directory / f"minibatch-{self.minibatches:08d}", self.sampler
        if isinstance(sampler, ShuffledSampler):
            sampler = copy.copy(sampler)
            sampler.position = self._offset + self.minibatches
        save(
            path,
            self.pipe,
            minibatches=self.minibatches,
            sampler=sampler,
            extra=extra,
            overwrite=True,
            trainable_only=self._trainable_only,
        )
        doing = "removing older checkpoints"
        with together(self.pipe, doing) as peers, peers.attempt(doing, str(self.directory)):
            if self._is_first:
                self._remove_older(path)
        self._last = (self.minibatches, time.monotonic())
        return path

    def _remove_older(self, path: Path) -> None:
        """Remove checkpoints beyond ``keep``."""
        _logger.info("checkpoint saved: %s", path)
        for old in self._checkpoints()[: -self._keep]:
            if old == path or not os.path.lexists(old):  # another job may have removed it
                continue
            reason = more_than_checkpoint(old)
            if reason is None:
                drop(old)
                _logger.info("checkpoint removed: %s", old)
            else:
                _logger.warning("checkpoint kept: %s %s", old, reason)

    def _checkpoints(self) -> list[Path]:
        """Return all checkpoints, oldest first; an incomplete one has another name."""
        paths = self.directory.glob("minibatch-*")
        named = (path for path in paths if NAME.fullmatch(path.name))
        return sorted(named, key=lambda path: int(path.name.rpartition("-")[2]))

    def _position(self) -> int:
        return self.sampler.position if isinstance(self.sampler, ShuffledSampler) else 0
