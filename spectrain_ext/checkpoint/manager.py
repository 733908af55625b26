"""CheckpointManager: saves every so often while a pipeline trains, and finds the last one again."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import torch.distributed as dist

from spectrain_ext.distributed.exchange import Peers
from spectrain_ext.errors import CheckpointError, RankError
from spectrain_ext.files import partial, read_bounded, remove, replace_file
from spectrain_ext.pipeline.loops import warn_unless_begun
from spectrain_ext.pipeline.losses import Keep, Result
from spectrain_ext.pipeline.observer import Observer
from spectrain_ext.pipeline.pipeline import Pipeline

from .loading import Loaded, load_from
from .memory import NAME, Memory
from .sampler import ShuffledSampler
from .saving import Prepared, Sampler, peers_of
from .storage import replaced

_logger = logging.getLogger(__name__)

LATEST = "latest"
_SAVE, _COPY = "save", "copy"  # what is due


class CheckpointManager:
    """A directory of checkpoints of one training.

    Args:
        directory: holds ``minibatch-00000100``, ... and the file ``latest``, which names one.
        pipe: what is trained.
        sampler: gives the order of the data; saved and loaded along.
        every_minibatches: save after so many minibatches.
        every_seconds: save at the first minibatch after so long.
        memory_every: also keep a copy in the hosts' memory (``/dev/shm``) after so many
            minibatches, for a restart on these hosts. None is made while a checkpoint is written
            beside training.
        keep: how many checkpoints stay; older ones are removed once a newer one is whole.
        asynchronous: write in a thread, beside training. It pays where writing takes longer than
            copying (a slow disk, a GPU), and costs a copy of all state in host memory.
        first_stage: as for ``save``.
        process_group: as for ``save``.

    Attributes:
        minibatches: how many have been trained on, over all runs.
        pipe: as given.
        sampler: as given; after a run a ``ShuffledSampler`` is where training is, in all processes.
        directory: as given, absolute.

    Raises:
        ValueError: an argument out of range.

    A save needs the pipeline drained, and draining changes what an asynchronous method computes:
    the stages refill with fresher weights. With ``every_minibatches`` the drains are part of the
    training, and one that was stopped goes on to the bit as if it had not been; with
    ``every_seconds`` they are where the clock puts them. Copies in memory are like saves in this.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        pipe: Pipeline,
        *,
        sampler: Sampler | None = None,
        every_minibatches: int | None = None,
        every_seconds: float | None = None,
        memory_every: int | None = None,
        keep: int = 3,
        asynchronous: bool = False,
        first_stage: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        for name, value, least in (
            ("every_minibatches", every_minibatches, 1),
            ("every_seconds", every_seconds, 0),
            ("memory_every", memory_every, 1),
            ("keep", keep, 1),
        ):
            if value is not None and not value >= least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        self._peers = peers_of(pipe, process_group)
        self.directory = Path(directory).absolute()
        self.pipe = pipe
        self.minibatches = 0
        self.sampler = sampler
        self._every = every_minibatches
        self._seconds = every_seconds
        self._keep = keep
        self._asynchronous = asynchronous
        self._first_stage = first_stage
        if asynchronous and self._peers.size > 1:
            # What a thread says to other processes must not get between what the caller says.
            process_group = dist.new_group(
                None if process_group is None else dist.get_process_group_ranks(process_group),
                timeout=self._peers.timeout,
                backend="gloo",
            )
        self._writing = Peers(process_group)
        self._saving: Future[None] | None = None
        self._memory_every = memory_every
        self._memory = Memory(self.directory, self.latest, self._peers, memory_every is not None)
        self._failed = False
        self._offset = self._position()
        self._last = (0, time.monotonic())

    # Going on.

    def latest(self) -> Path | None:
        """Return the newest whole checkpoint, None if there is none yet.

        Raises:
            CheckpointError: ``latest`` names none.
        """
        pointer = self.directory / LATEST
        try:
            name = read_bounded(pointer, 100).decode().strip()
        except FileNotFoundError:
            found = self._whole()  # stopped between the first checkpoint and the file
            return found[-1] if found else None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{pointer}: cannot be read: {error}") from error
        if not NAME.fullmatch(name):
            raise CheckpointError(f"{pointer}: damaged, expected a checkpoint's name, got {name!r}")
        return self.directory / name

    def restore(self) -> Loaded | None:
        """Load the newest checkpoint; None, and nothing changes, if there is none yet.

        With ``memory_every`` that is a newer copy in the hosts' memory, if there is one. One that
        is damaged is a warning, and the newest checkpoint on the disk is loaded.

        Raises:
            CheckpointError: it is damaged or does not fit. The message names the file; the older
                ones are still there for ``load``.
        """
        doing = "looking for the newest checkpoint"
        with self._peers.together(doing):
            self.wait()
            found = self._peers.gathered(lambda: str(self._recover() or ""), doing)[0]
            copy = self._memory.find()
        loaded = None
        if copy is not None:
            try:
                loaded = self._load(copy.path, functools.partial(self._memory.fetch, copy))
            except (CheckpointError, RuntimeError) as error:  # one or the other in all processes
                if isinstance(error, RankError) or not found:
                    raise
                if self._peers.rank == 0:
                    _logger.warning("the copy in the hosts' memory is left aside: %s", error)
        if loaded is None:
            if not found:
                return None
            loaded = self._load(Path(found))
            self._memory.end()
        self.minibatches = loaded.minibatches
        self._offset = self._position() - self.minibatches
        self._failed = False
        self._last = (self.minibatches, time.monotonic())
        return loaded

    def _load(self, path: Path, fetch: Callable[[list[set[str]]], None] | None = None) -> Loaded:
        with self._peers.together(f"loading {path.name}"):
            loaded = load_from(
                path,
                self.pipe,
                self._peers,
                sampler=self.sampler,
                first_stage=self._first_stage,
                fetch=fetch,
            )
        self._log("checkpoint loaded: %s", path)
        return loaded

    def _recover(self) -> Path | None:
        """Tidy up after a process that stopped in the middle of a save."""
        if self._peers.rank != 0:
            return None
        remove(partial(self.directory / LATEST))
        for leftover in sorted(self.directory.glob(".minibatch-*")):
            path = self.directory / leftover.name.strip(".").partition(".")[0]
            if not NAME.fullmatch(path.name):
                continue
            if (
                leftover == replaced(path)
                and not os.path.lexists(path)
                and not leftover.is_symlink()
            ):
                leftover.rename(path)
            elif leftover in (partial(path), replaced(path)):
                remove(leftover)
        return self.latest()

    # Training.

    def run(
        self,
        batches: Iterable[object] | None,
        *,
        trace: Observer | Sequence[Observer] | None = None,
        keep: Keep | None = None,
        extra: Callable[[], object] | None = None,
    ) -> Iterator[Result]:
        """Train like ``pipe.run``, draining and saving whenever it is time to.

        With several processes all of them call it. The first one decides when it is time, and how
        many batches there are; those in the middle need none.

        Args:
            batches: as for ``pipe.run``.
            trace: likewise.
            keep: likewise.
            extra: called in all processes before a save; what it returns is saved along.

        Yields:
            The results, numbered through over all runs and restarts. Leaving the loop finishes what
            is in flight, and saves if that is due.

        Raises:
            CheckpointError, OSError: a save failed, with ``asynchronous`` an earlier one; the
                checkpoints before it are whole. Else what ``pipe.run`` raises.
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
        self._rewind()  # what a loader asked for before the last run failed comes again
        source = iter(() if batches is None else batches)
        self._exhausted = ended = False
        while not ended:
            base = self.minibatches
            run = self.pipe.run(self._segment(source), trace=trace, keep=keep)
            self._failed = True  # unless the run gets to its end
            try:
                for result in run:
                    yield result.renumbered(base + result.index)
            except GeneratorExit:
                cast("Generator[Result, None, None]", run).close()  # finishes what is in flight
                self._drained(True, extra)
                raise
            ended = self._drained(self._exhausted, extra)

    def _drained(self, left: bool, extra: Callable[[], object] | None) -> bool:
        """Save if that is due; returns whether this was the last run of a loop in any process."""
        with self._peers.together("counting the minibatches of a run"):
            due = self._due()
            if due == _COPY and self._saving is not None and not self._saving.done():
                due = None  # rather than wait
            found = self._peers.tell((self.minibatches, due, left))
            # the first process decides how many minibatches a run has, and so has counted them
            self.minibatches, due, _ = found[0]
            more = extra() if due and extra is not None else None
        self._failed = False
        if due == _SAVE:
            self.save(more)
        elif due == _COPY:
            self._copy(more)
        ended = any(last for _, _, last in found)
        if ended:
            self._rewind()
        return ended

    def _rewind(self) -> None:
        """Let the sampler say how far training is: rank 0's loader alone asks its own."""
        if isinstance(self.sampler, ShuffledSampler):
            self.sampler.position = self._offset + self.minibatches

    def _segment(self, source: Iterator[object]) -> Iterator[object]:
        """Hand over batches until a save is due."""
        for batch in source:
            self.minibatches += 1
            yield batch
            if self._peers.rank == 0 and self._due():
                return
        self._exhausted = True

    def _due(self) -> str | None:
        minibatches, moment = self._last
        if self.minibatches == minibatches:
            return None
        if self._every is not None and self.minibatches % self._every == 0:
            return _SAVE
        if self._seconds is not None and time.monotonic() - moment >= self._seconds:
            return _SAVE
        copies = self._memory_every is not None and self.minibatches % self._memory_every == 0
        return _COPY if copies else None

    def save(self, extra: object = None) -> Path:
        """Save now; returns where.

        Raises:
            RuntimeError: a run has not ended, or the last one failed: the stages may have made
                different numbers of updates, so there is nothing to go on from. ``restore`` first.
            CheckpointError, OSError, TypeError: as ``save`` does.
        """
        self.pipe.check_drained("save")
        if self._failed:
            raise RuntimeError(
                "save: the last run failed, and its stages may have made different numbers of "
                "updates; restore() first"
            )
        path = self.directory / f"minibatch-{self.minibatches:08d}"
        with self._peers.together(f"saving {path.name}"):
            self.wait()
            self._write(path, extra, copy=False)
        self._last = (self.minibatches, time.monotonic())
        return path

    def _copy(self, extra: object) -> None:
        name = f"minibatch-{self.minibatches:08d}"
        with self._peers.together(f"copying {name} to the hosts' memory"):
            self.wait()
            path = self._memory.begin(name)
            if path is not None:
                self._write(path, extra, copy=True)
        self._last = (self.minibatches, self._last[1])

    def _write(self, path: Path, extra: object, copy: bool) -> None:
        prepared = Prepared(
            path,
            self.pipe,
            self._peers,
            minibatches=self.minibatches,
            sampler=self._positioned(),
            extra=extra,
            overwrite=True,
            first_stage=self._first_stage,
            committed=None if copy else lambda: self._committed(path),
            within=self._memory.ending(path if copy else None),
            hosts=self._memory.hosts if copy else (),
        )
        if self._asynchronous:
            self._saving = prepared.write_behind(self._writing)
        else:
            prepared.write()

    def _log(self, what: str, path: Path) -> None:
        if self._peers.rank == 0:
            _logger.info(what, path)

    def wait(self) -> None:
        """Return once nothing is being written; raises if an asynchronous save failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _committed(self, path: Path) -> None:
        """Point to a new checkpoint, and remove those that are too many."""
        replace_file(self.directory / LATEST, f"{path.name}\n".encode())
        self._log("checkpoint saved: %s", path)
        for old in self._whole()[: -self._keep]:
            if old != path:
                remove(old)
                self._log("checkpoint removed: %s", old)

    def _whole(self) -> list[Path]:
        """All checkpoints, oldest first; one has its name only when it is whole."""
        if not self.directory.is_dir():
            return []
        return sorted(
            (path for path in self.directory.iterdir() if NAME.fullmatch(path.name)),
            key=lambda path: int(path.name.rpartition("-")[2]),
        )

    # A loader with workers asks the sampler for batches that nobody has trained on yet.

    def _position(self) -> int:
        return self.sampler.position if isinstance(self.sampler, ShuffledSampler) else 0

    def _positioned(self) -> Sampler | None:
        if isinstance(self.sampler, ShuffledSampler):
            return self.sampler.at(self._offset + self.minibatches)
        return self.sampler
