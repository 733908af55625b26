"""load: a checkpoint into as many stages as there are here, or into a plain model."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spectrain_ext.errors import CheckpointError

from . import documents, optimizers, random
from .documents import Json, decode
from .parts import Part, Scheduler, parts_of
from .processes import busy, gathered, rank_and_size, settled, together
from .saving import Sampler
from .storage import VerifyingReader, check_files


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a checkpoint said beside the state that was put in place.

    Attributes:
        minibatches: as given to ``save``.
        extra: likewise.
        random: whether the generators of random numbers go on where they were. A stage's do where
            the stages are those that were saved, a process's (a module uses these) where the
            processes are as many as well; else they are left alone.
    """

    minibatches: int
    extra: Any
    random: bool


def load(
    path: str | os.PathLike[str],
    target: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Scheduler | None = None,
    sampler: Sampler | None = None,
    only_model: bool = False,
    first_stage: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Put a checkpoint's state in place: parameters, module buffers, optimizers, schedulers.

    The target may be cut into other stages than what was saved, or not at all: parameters are found
    by their names in the whole model. An optimizer may be one of torch's where one of
    ``spectrain_ext.optim`` was saved, and the other way round.

    Args:
        path: the directory.
        target: a ``Pipeline`` between two runs, or any module.
        optimizer: of a module, to be loaded into; None: its state is left in the checkpoint. A
            pipeline has its own.
        scheduler: likewise.
        sampler: to be loaded into.
        only_model: load parameters and module buffers and nothing else, as to fine-tune; the rest
            is not checked either.
        first_stage: as for ``save``.
        process_group: as for ``save``.

    Raises:
        CheckpointError: a file that is missing, truncated or changed, or contents that do not fit
            the target (the message names file and key). Everything is as it was then.
        RuntimeError: a run of the pipeline has not ended.
        ValueError: an optimizer or scheduler beside a pipeline.
        RankError, ConnectionError: as for ``save``.

    Nothing in a checkpoint is executed: neither pickle nor ``torch.load`` is used, everything that
    is no tensor is JSON. Numbers keep their kind: a float64 weight loads into a float32 one, a
    complex or an integer one does not.
    """
    directory = Path(path).absolute()
    with together(target, f"loading {directory.name}"):
        return _load(
            directory, target, optimizer, scheduler, sampler, only_model, first_stage, process_group
        )


def _load(
    directory: Path,
    target: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Scheduler | None,
    sampler: Sampler | None,
    only_model: bool,
    first_stage: int | None,
    process_group: dist.ProcessGroup | None,
) -> Loaded:
    rank, size = rank_and_size(process_group)
    plans: list[_Plan] = []

    def names() -> list[str]:
        body = documents.read(directory)
        check_files(directory, body)
        parts = parts_of(target, optimizer, scheduler, first_stage, bind=True)
        plans.append(_Plan(directory, body, parts, rank, only_model))
        return plans[0].model_keys

    known = [name for found in gathered(names, process_group) for name in found]
    here = plans[0]
    gathered(lambda: here.match(known, size, sampler is not None), process_group)
    extra = decode(here.body.get("extra"))
    tensors = {key: _empty(here.body["tensors"][key]) for key in here.tensor_keys()}
    reader = VerifyingReader(directory, here.body)
    if not only_model:
        # What nobody reads, such as the generators of other cuts, each process checks a part of.
        read = {key for keys in gathered(lambda: list(tensors), process_group) for key in keys}
        unread = sorted(here.body["tensors"].keys() - read)
        gathered(lambda: reader.verify(unread[rank::size]), process_group)
    working = busy(target, f"reading {directory.name}")
    settled(lambda: reader.read(tensors, working), process_group, str(directory))
    gathered(lambda: here.apply(tensors, sampler), process_group)
    return Loaded(here.body["minibatches"], extra, here.random)


def _domain(dtype: torch.dtype) -> str:
    """What numbers a dtype is of: within one a wider or narrower one is only more or less exact."""
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating point"
    return "bool" if dtype is torch.bool else "integer"


def _weights(part: Part) -> list[tuple[Tensor, Tensor]]:
    """All tensors of a part, each with a copy in host memory."""
    held = [tensor for _, tensor in part.tensors()] + list(part.masters.values())
    return [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in held]


def _put_back(before: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for tensor, value in before:
            tensor.copy_(value)


def _empty(entry: Json) -> Tensor:
    return torch.empty(entry["shape"], dtype=documents.dtype_of(entry["dtype"]))


class _Plan:
    """What is wanted of a checkpoint, checked against what there is."""

    def __init__(
        self, directory: Path, body: Json, parts: list[Part], rank: int, only_model: bool
    ) -> None:
        self.path = directory
        self.body = body
        self.parts = parts
        self._rank = rank
        self.model_keys = [f"model.{name}" for part in parts for name, _ in part.tensors()]
        self._only_model = only_model
        self.wanted: list[optimizers.Wanted | None] = [None] * len(parts)
        self.schedulers: list[Any] = [None] * len(parts)
        self.sampler: Any = None
        self.random_keys: list[str] = []
        self.random = False

    def match(self, known: Iterable[str], size: int, sampled: bool) -> None:
        """Find what belongs where; ``known`` are the model's keys in all processes."""
        for part in self.parts:
            self._check_model(part)
        self._check_nothing_left(known)
        if sampled:
            self.sampler = self._sampler_state()
        if self._only_model:
            return
        self.wanted = [
            None if part.optimizer is None else optimizers.wanted(part, self.body, self.path)
            for part in self.parts
        ]
        self.schedulers = [self._scheduler(part) for part in self.parts]
        self.random_keys, self.random = random.matching(self.body, self.parts, self._rank, size)

    def _check_model(self, part: Part) -> None:
        saved = self.body["tensors"]
        for name, tensor in part.tensors():
            entry = saved.get(f"model.{name}")
            if entry is None:
                raise CheckpointError(f"{self.path}: has no {name!r}, which stage {part.stage} has")
            entries = (entry, saved.get(f"master.{name}", entry))
            if any(found["shape"] != list(tensor.shape) for found in entries):
                raise CheckpointError(
                    f"{self.path}: {name!r} has shape {entry['shape']}, expected "
                    f"{list(tensor.shape)}"
                )
            for found in entries:
                if _domain(documents.dtype_of(found["dtype"])) != _domain(tensor.dtype):
                    raise CheckpointError(
                        f"{self.path}: {name!r} is {found['dtype']}, which does not fit into "
                        f"{str(tensor.dtype).removeprefix('torch.')}"
                    )

    def _check_nothing_left(self, known: Iterable[str]) -> None:
        """Refuse a checkpoint of a larger model than all processes' parts together."""
        left = {key for key in self.body["tensors"] if key.startswith("model.")} - set(known)
        if left:
            name = min(left).removeprefix("model.")
            raise CheckpointError(
                f"{self.path}: has {name!r}, which the model has not ({len(left)} such tensors)"
            )

    def _scheduler(self, part: Part) -> Any:
        """The state of the scheduler that the part's parameters had."""
        if part.scheduler is None:
            return None
        own = set(part.parameter_names().values())
        found = [
            (stage["stage"], stage["scheduler"])
            for stage in self.body["stages"]
            if stage.get("scheduler") is not None and own & set(stage["parameters"])
        ]
        if not found:
            raise CheckpointError(
                f"{self.path}: has no scheduler for stage {part.stage}; only_model=True loads "
                "without"
            )
        first, state = found[0]
        for other, its_state in found[1:]:
            if its_state != state:
                raise CheckpointError(
                    f"{self.path}: the schedulers of its stages {first} and {other} differ, and "
                    f"stage {part.stage} has parts of both"
                )
        found_state = decode(state)
        self._check_scheduler(part, found_state)
        return found_state

    def _check_scheduler(self, part: Part, state: Any) -> None:
        """Torch's put whatever they are given among their attributes, methods included."""
        assert part.scheduler is not None
        where = f"{self.path}: the state of the scheduler of stage {part.stage}"
        if not isinstance(state, dict):
            raise CheckpointError(f"{where}: expected a dict, got a {type(state).__name__}")
        now = part.scheduler.state_dict()
        for key, value in state.items():
            fits = (
                optimizers.alike(value, now[key])
                if key in now
                else (isinstance(key, str) and not hasattr(part.scheduler, key))
            )
            if not fits:
                raise CheckpointError(
                    f"{where}: {key!r} does not fit {type(part.scheduler).__name__}"
                )

    def _source(self, name: str, dtype: torch.dtype) -> str:
        """What to load for a parameter or module buffer: where it is wide enough, the master."""
        saved = self.body["tensors"]
        key, wide = f"model.{name}", f"master.{name}"
        narrow = documents.dtype_of(saved[key]["dtype"]).itemsize < dtype.itemsize
        return wide if narrow and wide in saved else key

    def _sources(self, part: Part) -> Iterator[str]:
        for name, now in part.tensors():
            yield self._source(name, now.dtype)
        for p, name in part.parameter_names().items():
            if p in part.masters:
                yield self._source(name, part.masters[p].dtype)

    def tensor_keys(self) -> list[str]:
        """Return the names of all tensors to be read."""
        keys = dict.fromkeys(source for part in self.parts for source in self._sources(part))
        for wanted in self.wanted:
            if wanted is not None:
                for entry in wanted.tensors.values():
                    keys.update(dict.fromkeys(entry.values()))
        keys.update(dict.fromkeys(self.random_keys))
        return list(keys)

    def apply(self, tensors: dict[str, Tensor], sampler: Sampler | None) -> None:
        """Put it all in place, or nothing of it."""
        self._check_random(tensors)
        with ExitStack() as undo:
            for part, wanted in zip(self.parts, self.wanted, strict=True):
                if wanted is not None:
                    assert part.optimizer is not None
                    undo.callback(part.optimizer.load_state_dict, part.optimizer.state_dict())
                    with self._fitting(f"the optimizer of stage {part.stage}"):
                        part.optimizer.load_state_dict(wanted.state_dict(tensors))
            for part, state in zip(self.parts, self.schedulers, strict=True):
                if part.scheduler is not None and state is not None:
                    before = copy.deepcopy(part.scheduler.state_dict())
                    undo.callback(part.scheduler.load_state_dict, before)
                    with self._fitting(f"the scheduler of stage {part.stage}"):
                        part.scheduler.load_state_dict(state)
            if sampler is not None:
                undo.callback(sampler.load_state_dict, sampler.state_dict())
                with self._fitting("the sampler"):
                    sampler.load_state_dict(self.sampler)
            for part in self.parts:
                undo.callback(_put_back, _weights(part))
                with self._fitting(f"stage {part.stage}"):
                    self._apply_model(part, tensors)
            if self.random_keys:
                self._apply_random(tensors, undo)
            undo.pop_all()

    @contextmanager
    def _fitting(self, what: str) -> Iterator[None]:
        """Inside, what an object says of its state is said of the checkpoint."""
        try:
            yield
        except Exception as error:
            raise CheckpointError(f"{self.path}: does not fit {what}: {error}") from error

    def _apply_model(self, part: Part, tensors: dict[str, Tensor]) -> None:
        names = part.names
        part.module.load_state_dict(
            {
                key: tensors[self._source(names[key], now.dtype)]
                for key, now in part.module.state_dict().items()
            }
        )
        for p, name in part.parameter_names().items():
            if p in part.masters:
                master = part.masters[p]
                master.copy_(tensors[self._source(name, master.dtype)])

    def _apply_random(self, tensors: dict[str, Tensor], undo: ExitStack) -> None:
        for part in self.parts:
            if part.random is not None:
                undo.callback(part.random.set_states, part.random.states())
                part.random.set_states([tensors[key] for key in random.stage_states(part)])
        own = f"random.process{self._rank}."
        states = {k: tensors[k] for k in self.random_keys if k.startswith(own)}
        undo.callback(
            random.set_process_states, self._rank, random.process_states(self._rank, self.parts)
        )
        with self._fitting("the generators of random numbers"):
            random.set_process_states(self._rank, states)

    def _check_random(self, tensors: dict[str, Tensor]) -> None:
        for part in self.parts if self.random_keys else ():
            for key, now in random.stage_states(part).items():
                if tensors[key].shape != now.shape:
                    raise CheckpointError(f"{self.path}: {key!r} is not the state of a generator")
        for key in self.random_keys:
            if key.endswith((".cpu", ".0")):
                try:
                    torch.Generator().set_state(tensors[key])
                except (RuntimeError, TypeError) as error:
                    raise CheckpointError(f"{self.path}: {key!r}: {error}") from error

    def _sampler_state(self) -> Any:
        processes: Sequence[Json] = self.body["processes"]
        mine = processes[self._rank if self._rank < len(processes) else 0]
        if mine.get("sampler") is None:
            raise CheckpointError(f"{self.path}: has no state of a sampler")
        return decode(mine["sampler"])
