"""Random: the generators of stages and of the process, as tensors that belong to one of them.

The same key with other values in another process would be taken for a copy, and dropped: keys name
the stage or the process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from spectrain_ext.rng import RNG_LOCK

from .documents import Json
from .parts import Part


class Generators:
    """Those of a process's stages, and its own.

    A stage's numbers mean nothing to a stage that computes something else, and a process's nothing
    to one of another number of processes. Stages with generators of their own need no other.

    Args:
        parts: the stages.
        rank: of this process.
        size: how many processes there are.

    Attributes:
        all_found: after ``match``, whether everything that is random here goes on.
    """

    what = "the generators of random numbers"

    def __init__(self, parts: Sequence[Part], rank: int, size: int) -> None:
        self._parts = parts
        self._size = size
        self._rank = rank
        self._keys: list[str] = []
        self.all_found = False

    def saved(self) -> tuple[dict[str, Tensor], Json]:
        """Return those of the process; its stages' are said of the stages."""
        states = process_states(self._rank, self._parts)
        return states, {"random": list(states)}

    def match(self, body: Json) -> list[str]:
        """Find the states that belong here; where one does not, none does."""
        self._keys, self.all_found = self._matching(body)
        return self._keys

    def _matching(self, body: Json) -> tuple[list[str], bool]:
        stages = {stage["stage"]: stage for stage in body["stages"]}
        alike = True
        keys: list[str] = []
        for part in self._parts:
            stage = stages.get(part.stage, {"parameters": (), "random": ()})
            mine = list(stage_states(part))
            alike &= stage["parameters"] == list(part.parameter_names().values())
            others = [r for r in body.get("replicas", ()) if r["stage"] == part.stage]
            saved = {0: stage["random"], **{r["replica"]: r["random"] for r in others}}
            alike &= len(saved) == part.replicas and set(saved.get(part.replica, ())) == set(mine)
            keys += mine
        keys = keys if alike else []
        same_processes = alike and len(body["processes"]) == self._size
        if same_processes:
            found = body["processes"][self._rank]["random"]
            known = re.compile(rf"random\.process{self._rank}\.(cpu|cuda[0-9]{{1,4}})")
            if not all(known.fullmatch(key) for key in found):
                return [], False
            keys += found
        for key in keys:
            entry = body["tensors"].get(key)
            if entry is None or entry["dtype"] != "uint8" or len(entry["shape"]) != 1:
                return [], False
        own = all(part.random is not None for part in self._parts)
        return keys, alike and (same_processes or own)

    def apply(self, tensors: Mapping[str, Tensor]) -> None:
        """Put what was found in place.

        Raises:
            ValueError, RuntimeError: it is no state of such a generator.
        """
        if not self._keys:
            return
        for part in self._parts:
            now = stage_states(part)
            for key, state in now.items():
                if tensors[key].shape != state.shape:
                    raise ValueError(f"{key!r} is not the state of a generator")
                if key.endswith(".0"):  # of the CPU; a stage itself compares sizes
                    torch.Generator().set_state(tensors[key])
            if part.random is not None:
                part.random.set_states([tensors[key] for key in now])
        own = f"random.process{self._rank}."
        _set_process_states(self._rank, {k: tensors[k] for k in self._keys if k.startswith(own)})

    def undo(self) -> Callable[[], None]:
        own = [part.random for part in self._parts if part.random is not None]
        stages = [(generators, generators.states()) for generators in own]
        process = process_states(self._rank, self._parts)

        def put_back() -> None:
            for generators, states in stages:
                generators.set_states(states)
            _set_process_states(self._rank, process)

        return put_back


def stage_states(part: Part) -> dict[str, Tensor]:
    """Return the states of a stage's own generators; each of its replicas has some."""
    states = [] if part.random is None else part.random.states()
    owner = f"stage{part.stage}" + (f".replica{part.replica}" if part.replica else "")
    return {f"random.{owner}.{k}": state for k, state in enumerate(states)}


def process_states(rank: int, parts: Sequence[Part]) -> dict[str, Tensor]:
    """Return the states of a process's default generators: the CPU's, and the devices' in use."""
    devices = {p.device for part in parts for p in part.module.parameters()}
    used = sorted(d.index for d in devices if d.type == "cuda" and d.index is not None)
    with RNG_LOCK:  # a stage of another thread's pipeline may have put its own there
        states = {f"random.process{rank}.cpu": torch.get_rng_state()}
        for index in used:
            states[f"random.process{rank}.cuda{index}"] = torch.cuda.get_rng_state(index)
    return states


def _set_process_states(rank: int, states: Mapping[str, Tensor]) -> None:
    """Put them back; those of devices that are not here are left out."""
    with RNG_LOCK:
        for key, state in states.items():
            device = key.removeprefix(f"random.process{rank}.")
            if device == "cpu":
                torch.set_rng_state(state)
            elif int(device.removeprefix("cuda")) < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, int(device.removeprefix("cuda")))
