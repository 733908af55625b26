"""Saves a training's progress: schedulers, averaging, random numbers and the pipeline's counts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from spectrain_ext.passes import AverageWeights
from spectrain_ext.pipeline.pipeline import Pipeline
from spectrain_ext.rng import RNG_LOCK, States

from .documents import Json, Keep, decode_at, tensors_in
from .parts import Item, Part, Stateful

_DEVICE = re.compile(r"cpu|cuda[0-9]{1,4}")
_LARGEST = 1 << 16  # bytes of a generator's state


class SchedulerState(Item):
    """The learning-rate scheduler of one stage."""

    def __init__(self, part: Part, scheduler: Stateful) -> None:
        self.what = f"the scheduler of stage {part.stage}"
        self._part = part
        self._scheduler = scheduler

    def state(self) -> Any:
        return self._scheduler.state_dict()

    def match(self, body: Json) -> Any:
        own = set(self._part.parameter_names().values())
        found = [
            (stage["stage"], stage["scheduler"])
            for stage in body["stages"]
            if stage["scheduler"] is not None and own & set(stage["parameters"])
        ]
        if not found:
            raise ValueError(
                f"has no scheduler for stage {self._part.stage}; only_model=True loads without"
            )
        first, state = found[0]
        for other, its_state in found[1:]:
            if its_state != state:
                raise ValueError(
                    f"the schedulers of its stages {first} and {other} differ, and stage "
                    f"{self._part.stage} has parts of both"
                )
        self._check(decode_at(self.what, state))
        return state

    def _check(self, state: Any) -> None:
        """Validate the state: torch's schedulers set any key as an attribute, even methods."""
        where, own = f"the state of {self.what}", self._scheduler
        if not isinstance(state, dict):
            raise ValueError(f"{where}: expected a dict, got a {type(state).__name__}")
        now = own.state_dict()
        for key, value in state.items():
            free = isinstance(key, str) and not hasattr(own, key)
            if not (alike(value, now[key]) if key in now else free):
                raise ValueError(f"{where}: {key!r} does not fit {type(own).__name__}")
        torchs = type(own).__module__.startswith("torch.optim")
        _check_keys(where, state, now, type(own).__name__, exactly=torchs)

    def put(self, state: Any) -> None:
        self._scheduler.load_state_dict(state)


class Training(Item):
    """A pipeline's numbers of minibatches, and the phase of its method."""

    what = "the progress of training"

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe

    def state(self) -> dict[str, int]:
        pipe, stage = self._pipe, self._pipe._executor.stages[0]
        return {"minibatches": pipe.minibatches, "phase": pipe.phase, "undone": stage.undone}

    def match(self, body: Json) -> Any:
        """Return the progress; a module's checkpoint has only ``save``'s argument."""
        return body["training"] or {"phase": 0, "undone": 0, "minibatches": body["minibatches"]}

    def put(self, state: Any) -> None:
        self._pipe.minibatches = state["minibatches"]
        for stage in self._pipe._executor.stages:
            stage.continue_after(state["undone"])


class Generators(Item):
    """The generators of a process's stages, and its own."""

    what = "the generators of random numbers"

    def __init__(self, parts: Sequence[Part], rank: int, size: int) -> None:
        self._parts = parts
        self._size = size
        self._rank = rank
        self.all_found = False  # set by ``match``: whether all generators in use are restored

    def state(self) -> dict[str, Any]:
        stages = [stage_states(part) for part in self._parts]
        return {"stages": stages, "process": self._process_states()}

    def saved(self, keep: Keep) -> Json:
        """Return the process's generators by device; stages save their own."""
        states = self._process_states()
        return {key: keep(f"random.process{self._rank}.{key}", t) for key, t in states.items()}

    def match(self, body: Json) -> Json:
        """Return the saved states, or none of them if one does not fit."""
        found = [self._of_stage(part, body) for part in self._parts]
        stages = [states for states in found if states is not None]
        if len(stages) < len(found) or not _are_states(stages, body):
            return {}
        process: Json = {}
        # A process's generators are valid only for the same number of processes.
        same_processes = len(body["processes"]) == self._size
        if same_processes:
            process = body["processes"][self._rank]["random"]
            if not all(map(_DEVICE.fullmatch, process)) or not _are_states(process, body):
                return {}
        own = all(part.random is not None for part in self._parts)
        self.all_found = same_processes or own
        return {"stages": stages, "process": process}

    @staticmethod
    def _of_stage(part: Part, body: Json) -> list[Json] | None:
        """Return a stage's saved states, if its parameters and replicas are as saved."""
        stage = part.as_saved(body)
        if stage is None:
            return None
        others = {r["replica"]: r["random"] for r in body["replicas"] if r["stage"] == part.stage}
        saved: dict[int, list[Json]] = {0: stage["random"], **others}
        mine = saved.get(part.replica, [])
        alike = len(saved) == part.replicas and len(mine) == len(stage_states(part))
        return mine if alike else None

    def put(self, state: Any) -> None:
        if not state:
            return
        for part, states in zip(self._parts, state["stages"], strict=True):
            for k, (found, now) in enumerate(zip(states, stage_states(part), strict=True)):
                if found.shape != now.shape:
                    raise ValueError(f"generator {k} of stage {part.stage}: it is no such state")
                if k == 0:  # the CPU's: set_state checks the content
                    torch.Generator().set_state(found)
            if part.random is not None:
                part.random.set_states(states)
        with RNG_LOCK:
            for device, found in state["process"].items():
                if device == "cpu":
                    torch.set_rng_state(found)
                elif int(device.removeprefix("cuda")) < torch.cuda.device_count():  # else missing
                    torch.cuda.set_rng_state(found, int(device.removeprefix("cuda")))

    def _process_states(self) -> dict[str, Tensor]:
        devices = {p.device for part in self._parts for p in part.module.parameters()}
        used = sorted(d.index for d in devices if d.type == "cuda" and d.index is not None)
        with RNG_LOCK:  # another thread's pipeline may have set a stage's state
            states = {"cpu": torch.get_rng_state()}
            return states | {f"cuda{k}": torch.cuda.get_rng_state(k) for k in used}


def stage_states(part: Part) -> States:
    return [] if part.random is None else part.random.states()


def _are_states(references: Any, body: Json) -> bool:
    entries = [body["tensors"][name] for name in tensors_in(references)]
    return all(
        entry["dtype"] == "uint8" and len(entry["shape"]) == 1 and entry["shape"][0] <= _LARGEST
        for entry in entries
    )


class AveragingState(Item):
    """The averaging state of one stage's replica; empty before it has begun."""

    def __init__(self, part: Part, averaged: AverageWeights) -> None:
        self.what = f"the averaging of stage {part.stage}"
        self.key = f"averaging.stage{part.stage}"
        self._stage = part.stage
        self._averaged = averaged

    def state(self) -> list[Any]:
        return [*self._averaged.state()]

    def match(self, body: Json) -> Any:
        """Return this replica's averaging state; the entry of the average has none."""
        found = next(
            (s.get("averaging") for s in body["stages"] if s["stage"] == self._stage), None
        )
        state, updates = found if isinstance(found, list) and len(found) == 2 else ({}, 0)
        if not (isinstance(state, dict) and type(updates) is int and updates >= 0):
            raise ValueError(f"{self.what}: expected a number of updates, got {updates!r}")
        return [state, updates]

    def put(self, state: Any) -> None:
        """Load a state; ValueError if it belongs to another kind of averaging."""
        self._averaged.load_state(*state)

    def undo(self) -> Callable[[], object]:
        return self._averaged.undo()


def _check_keys(where: str, state: Any, now: Any, kind: str, exactly: bool) -> None:
    """Raise ValueError for nested dicts whose keys differ from this scheduler's."""
    if isinstance(state, (list, tuple)) and isinstance(now, (list, tuple)) and now:
        for k, member in enumerate(state):
            _check_keys(f"{where}[{k}]", member, now[min(k, len(now) - 1)], kind, exactly)
    if not (isinstance(state, dict) and isinstance(now, dict)):
        return
    fixed = [  # keys with an underscore vary between versions of torch
        {key for key in keys if isinstance(key, str) and key[:1] != "_"} for keys in (state, now)
    ]
    # torch's own have exactly these keys; others may add some with their first step.
    missing, more = fixed[1] - fixed[0], fixed[0] - fixed[1] if exactly else set()
    said = [f"has no {_listed(missing)}, which {kind} has"] if missing else []
    said += [f"has {_listed(more)}, which {kind} has not"] if more else []
    if said:
        raise ValueError(
            f"{where}: {'; '.join(said)}; expected that of such a scheduler (only_model=True loads "
            "without)"
        )
    for key in state.keys() & now.keys():
        inside = exactly and key == "_schedulers"
        _check_keys(f"{where}.{key}", state[key], now[key], kind, inside)


def _listed(keys: Set[str]) -> str:
    return ", ".join(map(repr, sorted(keys)))


def alike(value: Any, current: Any) -> bool:
    """Whether both are numbers, strings, sequences or mappings; None is like anything."""
    if value is None or current is None:
        return True
    for kinds in ((Real, Tensor), (str,), (list, tuple), (Mapping,)):
        if isinstance(value, kinds) or isinstance(current, kinds):
            return isinstance(value, kinds) and isinstance(current, kinds)
    return type(value) is type(current)
