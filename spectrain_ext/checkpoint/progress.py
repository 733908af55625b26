"""Saves training's progress: schedulers, samplers, averagings and the pipeline's counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from numbers import Real
from typing import Any

from torch import Tensor

from spectrain_ext.method import phases_of
from spectrain_ext.pipeline.averaging import Averaged
from spectrain_ext.pipeline.pipeline import Pipeline

from .documents import Json, decode_at
from .parts import Item, Part, Stateful


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


class SamplerState(Item):
    """The position of a process in the data."""

    what = "the sampler"

    def __init__(self, sampler: Stateful, rank: int) -> None:
        self._sampler = sampler
        self._rank = rank

    def state(self) -> Any:
        return self._sampler.state_dict()

    def match(self, body: Json) -> Any:
        processes = body["processes"]
        # rank 0's, if there were fewer processes
        found = processes[self._rank if self._rank < len(processes) else 0].get("sampler")
        if found is None:
            raise ValueError("has no state of a sampler")
        decode_at(self.what, found)
        return found

    def put(self, state: Any) -> None:
        self._sampler.load_state_dict(state)


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
        found = {"phase": 0, "undone": 0, "minibatches": body["minibatches"]}
        found |= body.get("training") or {}
        undone = found["undone"]  # older checkpoints have none
        if type(undone) is not int or not 0 <= undone <= found["minibatches"]:
            raise ValueError(
                f"training['undone']: expected a number of minibatches, got {undone!r}"
            )
        return found

    def put(self, state: Any) -> None:
        self._pipe.minibatches = state["minibatches"]
        for stage in self._pipe._executor.stages:
            stage.undone = state["undone"]
        self._pipe.phase = min(state["phase"], len(phases_of(self._pipe.method)) - 1)


class AveragingState(Item):
    """The averaging state of one stage's replica; empty before it has begun."""

    def __init__(self, part: Part, averaged: Averaged) -> None:
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
