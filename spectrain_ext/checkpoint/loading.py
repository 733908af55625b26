"""Loads a checkpoint into any number of stages, or into an uncut model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spectrain_ext.distributed.store import Peers
from spectrain_ext.errors import CheckpointError
from spectrain_ext.files import identity, present
from spectrain_ext.partitioning.materializing import unexpected
from spectrain_ext.pipeline.pipeline import Pipeline

from . import storage
from .documents import NAME, Json, decode, digest, read, tensors_in
from .parts import (
    Item,
    Part,
    Stateful,
    Weights,
    base_of,
    check_trains,
    check_values,
    parts_of,
    weights_of,
)
from .progress import Generators, SamplerState, Training
from .saving import items_of, together
from .sharded import piece_of

_logger = logging.getLogger(__name__)

#: How often to read a checkpoint that is replaced meanwhile.
_TRIES = 20


@dataclass(frozen=True, slots=True)
class Loaded:
    """The values that ``load`` returns.

    Attributes:
        minibatches: as given to ``save``; otherwise those that the saved pipeline was trained on.
        extra: as given to ``save``, tensors on the CPU.
        random: whether the random number generators were restored. A stage's are if the stages are
            the saved ones; a process's, which a module uses, if the number of processes is the same
            too. Otherwise they are unchanged.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> st.checkpoint.save("checkpoint", model, minibatches=100, extra={"epoch": 3})
        >>> st.checkpoint.load("checkpoint", model)
        Loaded(minibatches=100, extra={'epoch': 3}, random=True)
    """

    minibatches: int
    extra: Any
    random: bool


def load(
    path: str | os.PathLike[str],
    target: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Stateful | None = None,
    sampler: Stateful | None = None,
    only_model: bool = False,
) -> Loaded:
    """Load parameters, module buffers, optimizers and schedulers from a checkpoint.

    The target may have other cuts than the saved model, or none: parameters are matched by their
    names in the uncut model. torch's optimizers and those of ``spectrain_ext.optim`` can load each
    other's state. A float64 weight loads into a float32 one; a complex or an integer one does not.
    A scheduler of a pipeline that was saved without one begins, at its own learning rates.
    Loading executes nothing from the checkpoint: it uses safetensors and JSON, never pickle.

    A checkpoint of ``save(..., trainable_only=True)`` leaves the target's frozen weights as they
    are. The target must train the same parameters (with ``only_model`` any), and its frozen ones
    must have the names, shapes and kinds of numbers, or the saved values, of those in training.

    Args:
        path: the checkpoint's directory.
        target: a ``Pipeline`` between two runs, or any module.
        optimizer: a module's, to load into; None: its state is not loaded. A pipeline has its own.
        scheduler: a module's, to load into; None: its state is not loaded. A pipeline has its own.
        sampler: object to load the saved sampler's state into.
        only_model: load only parameters and module buffers, for example to fine-tune.

    Raises:
        CheckpointError: a file is missing, truncated or changed, or its contents do not fit the
            target (the message names file and key); or two processes load different checkpoints
            (the message names both). Nothing has changed.
        RuntimeError: a run of the pipeline has not ended.
        ValueError: an optimizer or scheduler is given together with a pipeline.
        RankError: as for ``save``.

    Example:
        >>> st.checkpoint.save("checkpoint", nn.Linear(4, 2), extra={"epoch": 3})
        >>> model = nn.Linear(4, 2)
        >>> st.checkpoint.load("checkpoint", model).extra
        {'epoch': 3}
    """
    path = Path(path).absolute()
    with together(target, f"loading {path.name}") as peers:
        tries = 0
        while True:
            before = identity(path)
            try:
                return _load(path, target, optimizer, scheduler, sampler, only_model, peers)
            except CheckpointError:  # in all processes
                with peers.attempt(f"reading {path.name}") as replaced:
                    replaced.append(identity(path) != before)
                tries += 1
                if tries == _TRIES or not any(replaced):
                    raise


def _load(
    path: Path,
    target: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Stateful | None,
    sampler: Stateful | None,
    only_model: bool,
    peers: Peers,
) -> Loaded:
    doing = f"reading {path.name}"
    with peers.attempt(doing):
        parts = parts_of(target, optimizer, scheduler, bind=True)
        directory = present(path)
    with peers.attempt(doing, str(directory)) as loads:
        with _unless_forged(directory):
            body = read(directory)
            minibatches: int = body["minibatches"]
        sha256 = digest(body)
        loads.append(
            {
                "names": [name for part in parts for name, _ in part.tensors()],
                "path": f"{directory} ({minibatches} minibatches, SHA-256 {sha256[:12]}...)",
                "sha256": sha256,
                "only_model": only_model,
            }
        )
    _check_alike(loads)
    with peers.attempt(doing, str(directory)), _unless_forged(directory):
        views = [body if only_model else _document_for(body, part) for part in parts]
        weights: list[Item] = [Weights(part) for part in parts]
        states = [(item, item.match(view)) for item, view in zip(weights, views, strict=True)]
        base = base_of(body)
        unknown = weights_of(body).keys() | (base or {}).keys()
        unknown -= {name for each in loads for name in each["names"]}
        unknown = {*unexpected(unknown, [part.module for part in parts])}
        if unknown:
            raise ValueError(
                f"has {min(unknown)!r}, which the model has not ({len(unknown)} such tensors)"
            )
        if base is not None and not only_model:
            for part in parts:
                check_trains(part, base)
        items: list[tuple[Item, Json]] = []
        if sampler is not None:
            items.append((SamplerState(sampler, peers.rank), body))
        for part, view in zip(parts, views, strict=True):
            for key, item in items_of(part).items():
                if key == "averaging" or not only_model:
                    items.append((item, view))
        generators = Generators(parts, peers.rank, peers.size)
        if not only_model:
            items.append((generators, body))
            if isinstance(target, Pipeline):
                items.append((Training(target), body))
        states += [(item, item.match(view)) for item, view in items]
        saved = [*(state for _, state in states), body.get("extra")]
        keys = dict.fromkeys(key for each in saved for key in tensors_in(each))
        cuts = {key: p for part in parts for key, p in part.cuts.items()}
        read_now = storage.read_tensors(directory, body, keys)
        tensors = {k: piece_of(t, cuts[k]) if k in cuts else t for k, t in read_now}
        extra = decode(body.get("extra"), tensors)
    with peers.attempt(doing, str(directory)), _unless_forged(directory):
        for part in parts:
            check_values(part)
    with ExitStack() as undo:  # in all processes, if one fails
        with peers.attempt(doing, str(directory)):
            _put(states, tensors, directory, undo)
        undo.pop_all()
    return Loaded(minibatches, extra, generators.all_found)


@contextmanager
def _unless_forged(directory: Path) -> Iterator[None]:
    """Turn whatever a document causes that does not fit, or that no save wrote, into one error."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{directory / NAME}: {error}") from error
    except Exception as error:  # of any kind, as a forged document may have any form
        raise CheckpointError(f"{directory / NAME}: no save writes this: {error!r}") from error


def _document_for(body: Json, part: Part) -> Json:
    """Return a part's document: an averaged replica's own state is used where it fits."""
    every = [r for r in body["replicas"] if r["stage"] == part.stage and "averaging" in r]
    own = [replica for replica in every if replica["replica"] == part.replica]
    alike = (
        part.averaged is not None
        and len(every) == part.replicas
        and part.as_saved(body) is not None
    )
    # Copies of another stage's buffers are in none of its own.
    return {**body, "stages": own, "of_all_stages": body["stages"]} if alike else body


def _check_alike(loads: Sequence[Mapping[str, Any]]) -> None:
    first = loads[0]
    for rank, other in enumerate(loads):
        for key, shown in (("sha256", "path"), ("only_model", "only_model")):
            if other[key] != first[key]:
                raise CheckpointError(
                    f"{shown}: process 0 has {first[shown]} and process {rank} has "
                    f"{other[shown]}; all must load the same"
                )


def _put(
    matched: Iterable[tuple[Item, Any]],
    tensors: Mapping[str, Tensor],
    path: Path,
    undo: ExitStack,
) -> None:
    """Load all items, each of which ``undo`` then undoes."""
    for item, state in matched:
        undo.callback(_undo, item.undo(), item.what)
        try:
            item.put(decode(state, tensors))
        except Exception as error:  # of any kind: items may be the user's objects
            raise CheckpointError(f"{path}: does not fit {item.what}: {error}") from error


def _undo(undo: Callable[[], object], what: str) -> None:
    """Undo a load; the error that is its cause counts more than one of a user's object here."""
    try:
        undo()
    except Exception:  # of any kind: items may be the user's objects
        _logger.exception("%s: its state before the failed load could not be loaded again", what)
