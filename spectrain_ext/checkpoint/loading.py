"""Loads a checkpoint into any number of stages, or into an uncut model."""

from __future__ import annotations

import copy
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spectrain_ext.errors import CheckpointError
from spectrain_ext.files import identity, present
from spectrain_ext.later import later
from spectrain_ext.peers import Peers
from spectrain_ext.pipeline.pipeline import Pipeline

from . import disk
from .documents import NAME, Json, decode, digest, dtype_of, read, tensors_in
from .parts import Item, Part, Stateful, Taken, parts_of
from .progress import Generators, SamplerState, Training
from .saving import items_of, passes_of, together
from .weights import Weights, base_of, check_trains, check_values, piece_of, weights_of

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
    Modules' ``load_state_dict`` hooks may rename, resize and compute tensors; they run once before,
    on tensors without values. A scheduler of a pipeline that was saved without one begins, at its
    own learning rates.
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
    known = {name for each in loads for name in each["names"]}
    with peers.attempt(doing, str(directory)) as taken, _unless_forged(directory):
        unknown = (weights_of(body).keys() | (base_of(body) or {}).keys()) - known
        parts = [replace(part, taken=rehearsed(part, body, unknown)) for part in parts]
        found = [part.taken for part in parts if part.taken is not None]
        taken.append([name for each in found for name in (*each.names, *each.more.values())])
        for each in found:
            body = _renamed(body, each.names)
    known.update(name for names in taken for name in names)
    with peers.attempt(doing, str(directory)), _unless_forged(directory):
        if not only_model and any("averaging" in replica for replica in body["replicas"]):
            raise ValueError(
                "was saved by an earlier version, whose averages cannot be continued; "
                "only_model=True loads the averaged weights"
            )
        views = [body if only_model else _document_for(body, part) for part in parts]
        weights: list[Item] = [Weights(part) for part in parts]
        states = [(item, item.match(view)) for item, view in zip(weights, views, strict=True)]
        base = base_of(body)
        unknown = (weights_of(body).keys() | (base or {}).keys()) - known
        if unknown:  # but for what transformers ignores
            unknown = {*later("unexpected")(unknown, [part.module for part in parts])}
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
            # Passes hear of other weights in any case.
            nothing = {**view, "stages": []} if only_model else view
            items += [(item, nothing) for item in passes_of(part).values()]
            items += [(item, view) for item in items_of(part).values() if not only_model]
        generators = Generators(parts, peers.rank, peers.size)
        if not only_model:
            items.append((generators, body))
            if isinstance(target, Pipeline):
                items.append((Training(target), body))
        states += [(item, item.match(view)) for item, view in items]
        saved = [*(state for _, state in states), body.get("extra")]
        keys = dict.fromkeys(key for each in saved for key in tensors_in(each))
        cuts = {key: p for part in parts for key, p in part.cuts.items()}
        read_now = disk.read_tensors(directory, body, keys)
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


def rehearsed(part: Part, body: Json, unknown: Set[str]) -> Taken | None:
    """Return what a module's hooks make of saved names that no rank has, and of other shapes.

    The module loads tensors without values into such tensors, and has its own back afterwards.
    None: it has all names and shapes, or does not take them, which ``Weights.match`` says.
    """
    state: Any = part.module.state_dict(keep_vars=True)
    base = base_of(body) or {}
    entries = body["tensors"]
    found = {name: entries.get(ref["$tensor"]) for name, ref in weights_of(body).items()}
    saved = {name: entry for name, entry in found.items() if entry is not None} | base
    keys, others = {key: part.names[key] for key in state}, _keys_of(part, unknown & saved.keys())
    own = [(saved.get(name, {}), state[key]) for key, name in keys.items()]
    if not others and all(entry.get("shape") == list(tensor.shape) for entry, tensor in own):
        return None
    kept = Weights(part).kept(body) - base.keys()
    keys = {key: name for key, name in keys.items() if name not in kept}
    lacking = keys.values() - saved.keys()
    own = [(saved[name], state[key]) for key, name in keys.items() if name in saved]
    fits = all(entry["shape"] == list(tensor.shape) for entry, tensor in own)
    given = {key: name for key, name in keys.items() if name in saved} | others
    best: tuple[int, Taken] | None = None
    for versions in (state._metadata, None):
        fakes: Any = OrderedDict()
        for key, name in given.items():
            shape, dtype = saved[name]["shape"], dtype_of(saved[name]["dtype"])
            fakes[key] = torch.empty(shape, dtype=dtype, device="meta")
        fakes._metadata = copy.deepcopy(versions)  # torch writes into it
        with suppress(Exception), _without_values(part.module):  # anybody's modules
            answer = part.module.load_state_dict(fakes, strict=False, assign=True)
            if {part.names.get(key) for key in answer.missing_keys} & lacking:
                continue
            sources = {each.untyped_storage()._cdata: key for key, each in fakes.items()}
            moved = {}
            here = {k: t for k, t in _slots(part.module) if k in part.names}
            for key, tensor in here.items():
                old = sources.get(tensor.untyped_storage()._cdata, key)
                if old != key and tensor.shape == fakes[old].shape:
                    moved[key] = old
            names = {given[old]: part.names[key] for key, old in moved.items()}
            refused = others.keys() & answer.unexpected_keys
            more = {k: others[k] for k in others.keys() - refused - {*moved.values()}}
            made = (lacking & {part.names[key] for key in here}) - {*names.values()}
            if best is None or len(refused) < best[0]:
                taken = Taken(moved, names, more, frozenset(made), versions)
                best = len(refused), taken
    if best is None or (fits and not (best[1].names or best[1].more or best[1].made)):
        return None
    return best[1]


def _keys_of(part: Part, unknown: Set[str]) -> dict[str, str]:
    """Return saved names by the keys that they would have in the part's module."""
    prefixes = {}
    for key, name in part.names.items():
        ours, theirs = key.split("."), name.split(".")
        while ours and theirs and ours[-1] == theirs[-1]:
            ours.pop()
            theirs.pop()
            prefixes["".join(f"{each}." for each in theirs)] = "".join(f"{o}." for o in ours)
    found = {}
    for name in unknown:
        longest = max((p for p in prefixes if name.startswith(p)), key=len, default=None)
        if longest is not None:
            found[prefixes[longest] + name.removeprefix(longest)] = name
    return found


def _slots(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, each in module.named_modules(remove_duplicate=False):
        for name, tensor in (*each._parameters.items(), *each._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor


@contextmanager
def _without_values(module: nn.Module) -> Iterator[None]:
    """Give a module tensors on the meta device; whatever its modules are given is undone."""

    def empty(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return (
            nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        )

    before = [(each, dict(vars(each))) for each in module.modules()]
    try:
        for each, _ in before:
            for kind in ("_parameters", "_buffers"):
                vars(each)[kind] = {name: empty(t) for name, t in vars(each)[kind].items()}
        yield
    finally:
        for each, attributes in before:
            vars(each).clear()
            vars(each).update(attributes)


def _renamed(body: Json, names: Mapping[str, str]) -> Json:
    """Return a document with other names of parameters and buffers."""

    def of_stage(stage: Json) -> Json:
        found = dict(stage)
        for key in {"weights", "masters", "base"} & stage.keys():
            found[key] = {names.get(name, name): value for name, value in stage[key].items()}
        for key in {"parameters", "left_out"} & stage.keys():
            found[key] = [names.get(name, name) for name in stage[key]]
        if (optimizer := stage.get("optimizer")) is not None:
            groups = [
                {**group, "params": [names.get(name, name) for name in group["params"]]}
                for group in optimizer["groups"]
            ]
            state = {names.get(name, name): value for name, value in optimizer["state"].items()}
            found["optimizer"] = {**optimizer, "groups": groups, "state": state}
        return found

    return {**body, **{key: [*map(of_stage, body[key])] for key in ("stages", "replicas")}}


def _document_for(body: Json, part: Part) -> Json:
    """Return a part's document: the state of a replica of its own is used where it fits."""
    every = [r for r in body["replicas"] if r["stage"] == part.stage and "weights" in r]
    own = [replica for replica in every if replica["replica"] == part.replica]
    alike = (
        part.apart is not None and len(every) == part.replicas and part.as_saved(body) is not None
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
