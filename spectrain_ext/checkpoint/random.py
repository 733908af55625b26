"""Saves the random number generators of stages and of the process."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spectrain_ext.rng import RNG_LOCK, States

from .documents import Json, Keep, tensors_in
from .parts import Item, Part

_DEVICE = re.compile(r"cpu|cuda[0-9]{1,4}")
_LARGEST = 1 << 16  # bytes of a generator's state


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
        _set_process_states(state["process"])

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


def _set_process_states(states: Mapping[str, Tensor]) -> None:
    """Set the default generators; states of missing devices are ignored."""
    with RNG_LOCK:
        for device, state in states.items():
            if device == "cpu":
                torch.set_rng_state(state)
            elif int(device.removeprefix("cuda")) < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, int(device.removeprefix("cuda")))
