"""Random: the generators of stages and of the process, as tensors that belong to one of them.

The same key with other values in another process would be taken for a copy, and dropped: keys name
the stage or the process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from spectrain_ext.rng import TURN

from .documents import Json
from .parts import Part


def stage_states(part: Part) -> dict[str, Tensor]:
    """Return the states of a stage's own generators; each of its replicas has some."""
    states = [] if part.random is None else part.random.states()
    owner = f"stage{part.stage}" + (f".replica{part.replica}" if part.replica else "")
    return {f"random.{owner}.{k}": state for k, state in enumerate(states)}


def process_states(rank: int, parts: Sequence[Part]) -> dict[str, Tensor]:
    """Return the states of a process's default generators: the CPU's, and the devices' in use."""
    with TURN:  # a stage of another thread's pipeline may have put its own there
        states = {f"random.process{rank}.cpu": torch.get_rng_state()}
        for index in _devices(parts):
            states[f"random.process{rank}.cuda{index}"] = torch.cuda.get_rng_state(index)
    return states


def set_process_states(rank: int, states: Mapping[str, Tensor]) -> None:
    """Put them back; those of devices that are not here are left out."""
    with TURN:
        for key, state in states.items():
            device = key.removeprefix(f"random.process{rank}.")
            if device == "cpu":
                torch.set_rng_state(state)
            elif int(device.removeprefix("cuda")) < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, int(device.removeprefix("cuda")))


def _devices(parts: Iterable[Part]) -> list[int]:
    found = {
        tensor.device.index
        for part in parts
        for tensor in part.module.parameters()
        if tensor.device.type == "cuda"
    }
    return sorted(index for index in found if index is not None)


def matching(body: Json, parts: Sequence[Part], rank: int, size: int) -> tuple[list[str], bool]:
    """Return the keys of the states that belong here, and whether these are all that are needed.

    A stage's numbers mean nothing to a stage that computes something else, and a process's nothing
    to one of another number of processes. Stages with generators of their own need no other.
    """
    stages = {stage["stage"]: stage for stage in body["stages"]}
    alike = True
    keys: list[str] = []
    for part in parts:
        stage = stages.get(part.stage, {"parameters": (), "random": ()})
        mine = list(stage_states(part))
        alike &= stage["parameters"] == list(part.parameter_names().values())
        others = [r for r in body.get("replicas", ()) if r["stage"] == part.stage]
        saved = {0: stage["random"], **{r["replica"]: r["random"] for r in others}}
        alike &= len(saved) == part.replicas and set(saved.get(part.replica, ())) == set(mine)
        keys += mine
    keys = keys if alike else []
    same_processes = alike and len(body["processes"]) == size
    if same_processes:
        found = body["processes"][rank]["random"]
        known = re.compile(rf"random\.process{rank}\.(cpu|cuda[0-9]{1, 4})")
        if not all(isinstance(key, str) and known.fullmatch(key) for key in found):
            return [], False
        keys += found
    for key in keys:
        entry = body["tensors"].get(key)
        if entry is None or entry["dtype"] != "uint8" or len(entry["shape"]) != 1:
            return [], False
    return keys, alike and (same_processes or all(part.random is not None for part in parts))
