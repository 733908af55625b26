"""save: everything that training goes on from, in one step from nothing to whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import optimizers, random
from .documents import Json, encode
from .files import begin_directory, discard, partial
from .parts import Part, Scheduler, parts_of
from .processes import busy, gathered, rank_and_size, settled, together
from .storage import AtomicWriter, holds_checkpoint


class Sampler(Protocol):
    """Knows where in the data training is."""

    def state_dict(self) -> dict[str, Any]:
        """Return what ``load_state_dict`` takes: JSON's types and tuples."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Go on from there."""


class Saving:
    """A checkpoint on its way to the disk; ``wait`` for it before the process ends."""

    def __init__(self, future: Future[None], path: Path) -> None:
        self._future = future
        self.path = path

    def done(self) -> bool:
        """Whether it is finished, or has failed."""
        return self._future.done()

    def wait(self) -> None:
        """Return once the checkpoint has its name; raises what ``save`` would have raised."""
        self._future.result()


def save(
    path: str | os.PathLike[str],
    target: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Scheduler | None = None,
    minibatches: int = 0,
    sampler: Sampler | None = None,
    extra: object = None,
    overwrite: bool = False,
    first_stage: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint; afterwards it is whole, and until then it is not there.

    Args:
        path: the directory to make; its parent is made where it is missing.
        target: a ``Pipeline`` between two runs, or any module.
        optimizer: of a module; a pipeline has its own.
        scheduler: likewise.
        minibatches: how many have been trained on so far, for whoever loads.
        sampler: its state is saved.
        extra: anything of JSON's types, and tuples.
        overwrite: replace a checkpoint of this name.
        first_stage: index of the target's first stage, where the processes of a group hold stages
            of one model; None: what a pipeline says, 0 for a module. Every process calls this
            function with its own stages, and the same ``path`` on a file system they share.
        process_group: these processes, with a CPU backend; None: all.

    Raises:
        FileExistsError: the path exists; with ``overwrite``, it is no checkpoint but a file, a
            link, or a directory of something else.
        RuntimeError: a run of the pipeline has not ended.
        TypeError: state that is neither a tensor nor what JSON holds, with its place.
        ValueError: two processes that have the same stage, or the same parameter.
        CheckpointError: it could not be written; the message names the process and its reason. What
            was at ``path`` is still there.
        RankError: of a pipeline over processes: another rank has failed, or let this one wait for
            longer than the pipeline's ``timeout``.
        ConnectionError: of modules in several processes: another process has ended.
    """
    with together(target, f"saving {Path(path).name}"):
        prepare(
            path,
            target,
            optimizer=optimizer,
            scheduler=scheduler,
            minibatches=minibatches,
            sampler=sampler,
            extra=extra,
            overwrite=overwrite,
            first_stage=first_stage,
            process_group=process_group,
        ).write()


class Prepared:
    """All that a checkpoint will hold; the tensors are still those that training goes on with."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        writer: AtomicWriter,
        target: nn.Module,
        path: Path,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._tensors = tensors
        self._writer = writer
        self._target = target
        self._path = path
        self._group = group

    def write(self) -> None:
        """Write it, and return when it has its name."""
        self._writer.busy = busy(self._target, f"writing {self._path.name}")
        self._write(self._tensors)

    def write_behind(self) -> Saving:
        """Copy the tensors now, and write them in a thread."""
        copies = {key: t.detach().to("cpu", copy=True) for key, t in self._tensors.items()}
        thread = ThreadPoolExecutor(1, "spectrain checkpoint")
        future = thread.submit(self._write, copies)
        thread.shutdown(wait=False)
        return Saving(future, self._path)

    def _write(self, tensors: dict[str, Tensor]) -> None:
        """Every process its own tensors, the first one then the indices of all."""
        writer, what = self._writer, str(self._path)
        rank, _ = rank_and_size(self._group)
        try:
            found = settled(lambda: writer.write(tensors), self._group, what)
            settled(lambda: writer.commit(found) if rank == 0 else None, self._group, what)
        except BaseException:
            if rank == 0:
                discard(partial(self._path))
            raise


def prepare(
    path: str | os.PathLike[str],
    target: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Scheduler | None = None,
    minibatches: int = 0,
    sampler: Sampler | None = None,
    extra: object = None,
    overwrite: bool = False,
    first_stage: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    committed: Callable[[], None] = lambda: None,
) -> Prepared:
    """Check and collect what ``save`` writes; ``committed`` is called when it has its name."""
    directory = Path(path).absolute()
    rank, _ = rank_and_size(process_group)
    tensors: dict[str, Tensor] = {}

    def collect() -> Json:
        parts = parts_of(target, optimizer, scheduler, first_stage)
        if rank == 0:
            _check_free(directory, overwrite)
        found, document = _collected(parts, rank)
        tensors.update(found)
        sampled = None if sampler is None else encode(sampler.state_dict(), "sampler")
        document |= {
            "minibatches": minibatches,
            "extra": encode(extra, "extra"),
            "torch": str(torch.__version__),
            "sampler": sampled,
        }
        if rank == 0:
            begin_directory(directory)
        return document

    try:
        body = _merged(gathered(collect, process_group))
    except BaseException:
        if rank == 0:
            discard(partial(directory))
        raise
    writer = AtomicWriter(directory, rank, body, committed)
    return Prepared(tensors, writer, target, directory, process_group)


def _check_free(directory: Path, overwrite: bool) -> None:
    """Only a checkpoint is replaced, and that is found out before anything is written."""
    if not os.path.lexists(directory):
        return
    if not overwrite:
        raise FileExistsError(f"path: {directory} exists; overwrite=True replaces it")
    if not (directory.is_dir() and not directory.is_symlink() and holds_checkpoint(directory)):
        raise FileExistsError(f"path: {directory} is no checkpoint; overwrite=True replaces these")


def _collected(parts: list[Part], rank: int) -> tuple[dict[str, Tensor], Json]:
    """Return the tensors of a process's stages, and what it has to say about them."""
    tensors: dict[str, Tensor] = {}
    stages = []
    replicas = []
    for part in parts:
        if part.replica:  # the first one has the same, but for random numbers
            generators = random.stage_states(part)
            tensors.update(generators)
            replicas.append(
                {"stage": part.stage, "replica": part.replica, "random": list(generators)}
            )
            continue
        tensors.update((f"model.{name}", tensor.detach()) for name, tensor in part.tensors())
        tensors.update((f"master.{name}", tensor) for name, tensor in part.wide().items())
        state, optimizer = optimizers.saved(part)
        tensors.update(state)
        generators = random.stage_states(part)
        tensors.update(generators)
        where = f"scheduler of stage {part.stage}"
        stages.append(
            {
                "stage": part.stage,
                "parameters": list(part.parameter_names().values()),
                "optimizer": optimizer,
                "scheduler": None
                if part.scheduler is None
                else encode(part.scheduler.state_dict(), where),
                "random": list(generators),
            }
        )
    process = random.process_states(rank, parts)
    tensors.update(process)
    # a view that only notes that it is conjugated or negated is not what its bytes say
    tensors = {key: tensor.resolve_conj().resolve_neg() for key, tensor in tensors.items()}
    return tensors, {
        "stages": stages,
        "replicas": replicas,
        "random": list(process),
        "keys": list(tensors),
    }


def _merged(found: list[Json]) -> Json:
    """Join what the processes said; the first one speaks for all where they agree."""
    owners: dict[object, int] = {}
    for rank, document in enumerate(found):
        stages = [f"stage {stage['stage']}" for stage in document["stages"]]
        for what in (*stages, *map(repr, document["keys"])):
            if owners.setdefault(what, rank) != rank:
                raise ValueError(
                    f"first_stage: {what} is saved by process {owners[what]} and process {rank}"
                )
    return {
        "minibatches": found[0]["minibatches"],
        "extra": found[0]["extra"],
        "torch": found[0]["torch"],
        "stages": [stage for document in found for stage in document["stages"]],
        "replicas": [replica for document in found for replica in document["replicas"]],
        "processes": [{"random": d["random"], "sampler": d["sampler"]} for d in found],
    }
