"""Saves a training's progress: schedulers, samplers, passes, random numbers, counts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor

from spectrain_ext.pipeline.passes import Pass
from spectrain_ext.pipeline.pipeline import Pipeline
from spectrain_ext.rng import RNG_LOCK, States
from spectrain_ext.weights.storage import local_part

from .documents import Json, Keep, decode, encode, tensors_in
from .parts import Item, Part, Stateful
from .weights import part_like


class SchedulerState(Item):
    """The learning-rate scheduler of one stage."""

    def __init__(self, part: Part, scheduler: Stateful) -> None:
        self.what = f"the scheduler of stage {part.stage}"
        self._part = part
        self._scheduler = scheduler
        self._rates: list[Any] = []  # the learning rates with which it begins

    def state(self) -> Any:
        return self._scheduler.state_dict()

    def match(self, body: Json) -> Any:
        """Return the saved state; None if a stage had no scheduler: this one begins now."""
        own = set(self._part.parameter_names().values())
        found = [
            (stage["stage"], stage["scheduler"])
            for stage in body["stages"]
            if stage["scheduler"] is not None and own & set(stage["parameters"])
        ]
        if not found:
            groups = [] if self._part.optimizer is None else self._part.optimizer.param_groups
            self._rates = [copy.deepcopy(group.get("lr")) for group in groups]
            warnings.warn(
                f"{self.what} was saved without one: it begins now, and with its learning rates",
                stacklevel=2,
            )
            return None
        first, state = found[0]
        for other, its_state in found[1:]:
            if its_state != state:
                raise ValueError(
                    f"the schedulers of its stages {first} and {other} differ, and stage "
                    f"{self._part.stage} has parts of both"
                )
        self._check_keys(decode(state), self._scheduler.state_dict())
        return state

    def _check_keys(self, state: Any, present: Any) -> None:
        """Raise ValueError if a scheduler of another kind has saved the state."""
        own = type(self._scheduler)
        inner = (each.get("_schedulers", ()) for each in (state, present))  # of a sequence of them
        for pair in zip(*inner, strict=False):
            self._check_keys(*pair)
        saved, here = (
            # keys with an underscore vary between versions of torch
            {key for key in each if not str(key).startswith("_")}
            for each in (state, present)
        )
        missing, more = here - saved, saved - here
        if not own.__module__.startswith("torch.optim"):
            more = set()  # others may add some with their first step
        said = [f"has no {_listed(missing)}, which {own.__name__} has"] if missing else []
        said += [f"has {_listed(more)}, which {own.__name__} has not"] if more else []
        if said:
            raise ValueError(
                f"the state of {self.what}: {'; '.join(said)}; expected that of such a scheduler. "
                "For another one, load into a pipeline without a scheduler and save that: what has "
                "no scheduler's state loads into any pipeline, whose scheduler then begins"
            )

    def put(self, state: Any) -> None:
        if state is not None:
            self._scheduler.load_state_dict(state)
        elif self._part.optimizer is not None:  # it has loaded the rates of the checkpoint
            for group, rate in zip(self._part.optimizer.param_groups, self._rates, strict=True):
                group.update({} if rate is None else {"lr": rate})


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
        state = processes[self._rank if self._rank < len(processes) else 0].get("sampler")
        if state is None:
            raise ValueError("has no state of a sampler")
        return state

    def put(self, state: Any) -> None:
        self._sampler.load_state_dict(state)


class Training(Item):
    """A pipeline's numbers of minibatches, and since which one it has its method."""

    what = "the progress of training"

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe

    def state(self) -> dict[str, Any]:
        pipe, undone = self._pipe, self._pipe._wires.stages[0].undone
        numbers = {"minibatches": pipe.minibatches, "since": pipe._reached()[1], "undone": undone}
        return {"method": pipe.method.name, **numbers}

    def match(self, body: Json) -> Any:
        """Return the progress; a module's checkpoint has only ``save``'s argument."""
        return body["training"] or {"undone": 0, "minibatches": body["minibatches"]}

    def put(self, state: Any) -> None:
        pipe, name, since = self._pipe, state.get("method"), state.get("since", 0)
        pipe.minibatches = state["minibatches"]
        if pipe.method.name != name:
            if since:
                warnings.warn(
                    f"the training was saved under method {name!r}, since minibatch {since}, and "
                    f"goes on under the pipeline's own, {pipe.method.name!r}; to go on as it was, "
                    "call change of the pipeline before you load",
                    stacklevel=2,
                )
            since = min(pipe._since, pipe.minibatches)
        pipe._since = since
        for stage in pipe._wires.stages:
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
        """Return the saved states; none if the stages are others."""
        stages = [self._of_stage(part, body) for part in self._parts]
        if None in stages:
            return {}
        # A process's generators are valid only for the same number of processes.
        same_processes = len(body["processes"]) == self._size
        self.all_found = same_processes or all(part.random is not None for part in self._parts)
        process = body["processes"][self._rank]["random"] if same_processes else {}
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
            if part.random is not None:
                torch.Generator().set_state(states[0])  # the CPU's: checks the content
                part.random.set_states(states)
        with RNG_LOCK:
            for device, generator_state in state["process"].items():
                if device == "cpu":
                    torch.set_rng_state(generator_state)
                elif int(device.removeprefix("cuda")) < torch.cuda.device_count():  # else missing
                    torch.cuda.set_rng_state(generator_state, int(device.removeprefix("cuda")))

    def _process_states(self) -> dict[str, Tensor]:
        devices = {p.device for part in self._parts for p in part.module.parameters()}
        used = sorted(d.index for d in devices if d.type == "cuda" and d.index is not None)
        with RNG_LOCK:  # another thread's pipeline may have set a stage's state
            states = {"cpu": torch.get_rng_state()}
            return states | {f"cuda{k}": torch.cuda.get_rng_state(k) for k in used}


def stage_states(part: Part) -> States:
    return [] if part.random is None else part.random.states()


class PassState(Item):
    """One stage's copy of a pass; what it has of a parameter follows that into other cuts."""

    def __init__(self, part: Part, own: Pass, kind: str) -> None:
        self._part, self._pass, self._kind = part, own, kind
        self.what = f"the {self._kind} of stage {part.stage}"
        self.key = f"pass.stage{part.stage}.{self._kind}"
        self._named = dict(part.module.named_parameters(remove_duplicate=False))

    def state(self) -> dict[str, Any]:
        return self._pass.state_dict()

    def saved(self, keep: Keep) -> Json:
        names, of_parameters, rest = self._part.names, {}, {}
        if not (present := self.state()):
            return {}
        for key, value in present.items():
            p = self._named.get(key)
            if p is None:
                rest[key] = value
            else:
                alike = isinstance(value, Tensor) and value.shape == local_part(p).shape
                of_parameters[names[key]] = part_like(value, p) if alike else value
        state = {"of_parameters": of_parameters, "rest": rest}
        found: Json = encode(state, self.what.removeprefix("the "), keep, self.key)
        return found

    def match(self, body: Json) -> Json:
        """Return the state of this stage, from the saved stages that had its parameters."""
        part, own = self._part, {*self._part.parameter_names().values()}
        same = part.as_saved(body)
        stages = [s for s in body["stages"] if own & {*s["parameters"]}] if same is None else [same]
        found = {
            stage["stage"]: stage["passes"][self._kind]
            for stage in stages
            if self._kind in stage.get("passes", {})
        }
        first = next(iter(found), None)
        state: dict[str, Any] = {} if first is None else dict(found[first]["rest"])
        of_parameters: Json = {}
        for stage, each in found.items():
            if _digests(each["rest"], body) != _digests(state, body):
                raise ValueError(
                    f"its stages {first} and {stage} have different states of {self._kind}, and "
                    f"stage {part.stage} has parameters of both"
                )
            of_parameters |= each["of_parameters"]
        for key, p in self._named.items():
            if part.names[key] in of_parameters:
                state[key] = of_parameters[part.names[key]]
                part.cuts.update(dict.fromkeys(tensors_in(state[key]), p))
        return state

    def put(self, state: dict[str, Any]) -> None:
        self._pass.weights_loaded()
        self._pass.load_state_dict(state)


def _digests(value: Any, body: Json) -> Any:
    """Return a part of a document with the digests of tensors in the place of their names."""
    if isinstance(value, list):
        return [_digests(each, body) for each in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        entry = body["tensors"][value["$tensor"]]
        return [entry["dtype"], entry["shape"], entry["sha256"]]
    return {key: _digests(each, body) for key, each in value.items()}


def _listed(keys: Set[str]) -> str:
    return ", ".join(map(repr, sorted(keys)))
