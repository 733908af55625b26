"""Saves a training's complete state as an atomic checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spectrain_ext.files import discard, new_draft
from spectrain_ext.peers import Peers
from spectrain_ext.pipeline.pipeline import Pipeline
from spectrain_ext.weights.storage import whole

from . import disk
from .disk import WEIGHTS, described
from .documents import Json, Keep, encode
from .optimizer_state import OptimizerState
from .parts import Item, Part, Stateful, TrainableOnly, check_trainable_only, parts_of
from .progress import (
    Generators,
    PassState,
    SamplerState,
    SchedulerState,
    Training,
    stage_states,
)
from .weights import Weights

#: Tensors by their names in a checkpoint, and whether this process writes them.
Given = dict[str, tuple[Tensor, bool]]


def save(
    path: str | os.PathLike[str],
    target: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Stateful | None = None,
    minibatches: int | None = None,
    sampler: Stateful | None = None,
    extra: object = None,
    overwrite: bool = False,
    only_model: bool = False,
    trainable_only: TrainableOnly = False,
) -> None:
    """Write a checkpoint atomically: ``path`` exists only once it is complete.

    All ranks of a ``DistributedPipeline`` call this with the same ``path`` on a shared file system.
    Any other module is saved by the process that calls this.

    Args:
        path: the directory to make, with its parents.
        target: a ``Pipeline`` between two runs, or any module.
        optimizer: of a module; a pipeline has its own.
        scheduler: of a module; a pipeline has its own.
        minibatches: number of minibatches trained on, which ``load`` returns. None: the pipeline's
            own count, and 0 for a module.
        sampler: object whose state is saved too.
        extra: a value of JSON types, tuples and tensors, as ``state_dict()`` of an average of
            weights. Of several processes, that of the first is saved.
        overwrite: replace a checkpoint at ``path``, which stays complete until the new one is.
        only_model: save only parameters and module buffers, without optimizers, schedulers and
            float32 masters. ``load(only_model=True)`` and any reader of ``model.safetensors`` or
            its index can read them.
        trainable_only: save no frozen parameters, but their names, dtypes and shapes, which
            ``load`` compares with those of its target. ``"verified"``: the SHA-256 of their values
            too, for which every save and load reads them all. Module buffers are saved, as training
            changes running statistics, except in modules with arrays of integers, booleans or 8-bit
            numbers: packed weights, masks and indices are constants.

    Raises:
        FileExistsError: the path exists; with ``overwrite``, it is a file, a link or a directory
            that is not a checkpoint or holds other files, too.
        RuntimeError: a run of the pipeline has not ended.
        TypeError: state that is neither a tensor nor a JSON value; the message says where.
        ValueError: an optimizer or scheduler is given together with a pipeline; or another
            ``trainable_only``, or one for a module without trainable parameters.
        CheckpointError: writing failed, or another process has saved to ``path`` meanwhile without
            ``overwrite``; the message names the process and the reason. A checkpoint at ``path`` is
            unchanged.
        RankError: in a ``DistributedPipeline``, another rank failed or exceeded ``timeout``.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> st.checkpoint.save("checkpoint", model, minibatches=100, extra={"epoch": 3})
        >>> sorted(path.name for path in Path("checkpoint").iterdir())
        ['checkpoint.json', 'model.safetensors', 'state.safetensors']
    """
    path = Path(path).absolute()
    tensors: dict[str, Tensor] = {}
    preparing, writing = f"preparing {path.name}", (f"writing {path.name}", str(path))
    with together(target, f"saving {path.name}") as peers:
        is_first, draft = peers.rank == 0, None
        try:
            # Each attempt either lets the processes compute together or does what may fail in one
            # of them, never both: one that failed would leave the others waiting.
            with peers.attempt(preparing) as begun:
                check_trainable_only(trainable_only, target)
                parts = parts_of(target, optimizer, scheduler)
                if only_model:
                    bare: Any = {"optimizer": None, "scheduler": None, "masters": {}}
                    parts = [replace(part, passes=(), **bare) for part in parts]
                parts = [replace(p, trainable_only=trainable_only) for p in parts]
                if is_first:
                    begun.append([disk.taken(path, overwrite), new_draft(path).name])
            reason, name = begun[0]
            if reason is not None:
                raise FileExistsError(reason)
            draft = path.with_name(name)
            with peers.attempt(preparing):
                apart = [part.apart for part in parts]
                averages = [None if own is None else own.evaluated_weights()() for own in apart]
            given: Given = {}
            with peers.attempt(preparing) as shared:
                document = _document(parts, averages, peers, sampler, given)
                shared.append(document.pop("shared"))
                if minibatches is None:
                    minibatches = target.minibatches if isinstance(target, Pipeline) else 0
                training = Training(target).state() if isinstance(target, Pipeline) else None
                document |= {"minibatches": minibatches, "training": training}
                keep_extra = _keeper(given if is_first else {})  # only that of the first is saved
                document |= {"extra": encode(extra, "extra", keep_extra, "extra")}
                document |= {"torch": str(torch.__version__)}
                if is_first:
                    disk.begin(path, draft)
            _check_shared(shared)
            with peers.attempt(preparing) as documents:
                for key, (tensor, takes) in given.items():
                    all_of_it = whole(tensor)
                    if takes:
                        tensors[key] = all_of_it
                for _, entry, tensor in (each for part in parts for each in part.by_value):
                    entry.update(described(whole(tensor), by_value=True))
                documents.append(document | {"keys": list(tensors)})
            with peers.attempt(*writing) as written:
                entries: Json = {}
                files: dict[str, int] = {}
                for name, keys in _file_names(documents, peers.rank).items():
                    content = {key: tensors[key] for key in keys}
                    added, files[name] = disk.write_tensors(draft, name, content)
                    entries |= added
                written.append((entries, files))
            with peers.attempt(*writing):
                if is_first:
                    entries = {key: entry for each, _ in written for key, entry in each.items()}
                    files = {name: size for _, each in written for name, size in each.items()}
                    disk.commit(path, draft, overwrite, _merged(documents), entries, files)
        except BaseException:
            if is_first and draft is not None:
                discard(path, draft)
            raise


def together(target: nn.Module, doing: str) -> AbstractContextManager[Peers]:
    """Return a context for the processes that save or load, which are a pipeline's."""
    return target.together(doing) if isinstance(target, Pipeline) else nullcontext(Peers())


def passes_of(part: Part) -> dict[str, PassState]:
    """Return the state of a stage's passes, by their classes' names."""
    found: dict[str, PassState] = {}
    for n, each in enumerate(part.passes):  # of all phases, which may have some of one class
        kind = type(each)
        before = sum(type(other) is kind for other in part.passes[:n])
        name = kind.__name__ + f" {before + 1}" * bool(before)
        found[name] = PassState(part, each, name)
    return found


def items_of(part: Part) -> dict[str, Item]:
    """Return a stage's optimizer and scheduler, by their keys in a document."""
    found: dict[str, Item] = {}
    if part.optimizer is not None:
        found["optimizer"] = OptimizerState(part, part.optimizer)
    if part.scheduler is not None:
        found["scheduler"] = SchedulerState(part, part.scheduler)
    return found


def _document(
    parts: Sequence[Part],
    averages: Iterable[Sequence[Tensor] | None],
    peers: Peers,
    sampler: Stateful | None,
    given: Given,
) -> Json:
    """Return the document of a process's stages, and add their tensors to ``given``."""
    takes = _dealt(parts[0])
    keep = _keeper(given, takes=takes)
    stages: list[Json] = []
    replicas: list[Json] = []
    for part, values in zip(parts, averages, strict=True):
        average = _averaged(part, values, keep)
        owner = f"stage{part.stage}" + (f".replica{part.replica}" if part.replica else "")
        states = enumerate(stage_states(part))
        content: Json = {
            "stage": part.stage,
            "random": [keep(f"random.{owner}.{k}", state) for k, state in states],
        }
        # Only the first replica is saved, except for random numbers.
        if average is None and part.replica == 0:
            stages.append(content | _of_stage(part, keep))
            continue
        content["replica"] = part.replica
        if average is not None:  # the average is shared; each replica also saves its own state
            content |= _of_stage(part, _keeper(given, f"replica{part.replica}.", takes))
            if part.replica == 0:
                kept = dict(content["passes"])
                kept.pop(type(part.apart).__name__, None)  # of the replica's own weights
                stages.append({**content, **average, "passes": kept})
        replicas.append(content)
    shared = {key: list(tensor.shape) for key, (tensor, _) in given.items()}
    shares = [parts[0].stage, parts[0].replica, shared if parts[0].shards > 1 else {}]
    if parts[0].shard:  # the first one's document has the same
        stages, replicas = [], []
    alone = _keeper(given)
    process: Json = {
        "random": Generators(parts, peers.rank, peers.size).saved(alone),
        "sampler": None if sampler is None else SamplerState(sampler, peers.rank).saved(alone),
    }
    return {"stages": stages, "replicas": replicas, "process": process, "shared": shares}


def _check_shared(found: Sequence[list[Any]]) -> None:
    """Raise ValueError if ranks that share a stage, whose tensors they deal out, have others."""
    firsts: dict[tuple[int, int], tuple[int, Json]] = {}
    for rank, (stage, replica, shapes) in enumerate(found):
        first, others = firsts.setdefault((stage, replica), (rank, shapes))
        if shapes != others:
            key = min(k for k in {**shapes, **others} if shapes.get(k) != others.get(k))
            one, other = (each.get(key, "none") for each in (others, shapes))
            raise ValueError(
                f"ranks {first} and {rank} share stage {stage}, and {key!r} has the shape {one} on "
                f"the one and {other} on the other; give them the same optimizers, and freeze the "
                "same parameters"
            )


def _dealt(part: Part) -> Callable[[Tensor], bool]:
    """Return who keeps the next tensor of a stage: of the ranks that share it, the least loaded."""
    held = [0] * part.shards

    def takes(tensor: Tensor) -> bool:
        least = held.index(min(held))
        held[least] += tensor.nbytes
        return least == part.shard

    return takes


def _keeper(
    given: Given,
    prefix: str = "",
    takes: Callable[[Tensor], bool] = lambda tensor: True,  # whether this process writes one
) -> Keep:
    known: set[str] = set()

    def keep(key: str, tensor: Tensor) -> Json:
        key = prefix + key
        while key in known or key in given:  # names with dots may coincide with nested ones
            key += "'"
        known.add(key)
        given[key] = tensor, takes(tensor)
        return {"$tensor": key}

    return keep


def _of_stage(part: Part, keep: Keep) -> Json:
    items = {key: item.saved(keep) for key, item in items_of(part).items()}
    found = {name: item.saved(keep) for name, item in passes_of(part).items()}
    passes = {name: state for name, state in found.items() if state}
    own = {"optimizer": None, "scheduler": None, "passes": passes}
    return {**own, **Weights(part).saved(keep), **items}


def _averaged(part: Part, values: Sequence[Tensor] | None, keep: Keep) -> Json | None:
    """Return a stage's weights with their averages over replicas, on its first replica."""
    if part.weights is None or values is None:
        return None
    if part.replica:
        return {}
    with part.weights.holding(values):
        return Weights(part).saved(lambda key, tensor: keep(key, tensor.clone()))


def _file_names(found: Sequence[Json], rank: int) -> dict[str, list[str]]:
    """Return the files that a process writes, with the keys of their tensors."""
    names: dict[str, list[str]] = {}
    for kind in ("model", "state"):
        owners = {}
        for owner, document in enumerate(found):
            keys = [k for k in document["keys"] if k.startswith(WEIGHTS) == (kind == "model")]
            if keys:
                owners[owner] = keys
        if rank in owners:
            number, count = list(owners).index(rank) + 1, len(owners)
            shard = f"-{number:05d}-of-{count:05d}" if count > 1 else ""
            names[f"{kind}{shard}.safetensors"] = owners[rank]
    return names


def _merged(found: Sequence[Json]) -> Json:
    """Merge the documents of all processes; take common entries from the first."""
    return {
        **{key: found[0][key] for key in ("minibatches", "training", "extra", "torch")},
        **{key: [e for document in found for e in document[key]] for key in ("stages", "replicas")},
        "processes": [document["process"] for document in found],
    }
