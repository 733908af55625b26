"""Saves parameters, their float32 masters and module buffers, under the model's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .documents import Json, Keep, dtype_of
from .parts import Item, Part
from .storage import WEIGHTS

_MASTERS = "master."


class Weights(Item):
    """The weights of one stage."""

    def __init__(self, part: Part) -> None:
        self.what = f"stage {part.stage}"
        self._part = part

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return weights and masters by name; masters follow parameters changed since a run."""
        names, tied = self._part.parameter_names(), self._part.tied
        weights = {
            name: tensor
            for name, tensor in self._part.tensors(saved=True)
            if name not in tied.get(name, ())  # an earlier stage saves it under this name
        }
        masters = {}
        for p, master in self._part.masters.items():
            now = p.detach()
            same = master.to(now.dtype) == now
            masters[names[p]] = torch.where(same, master, now.to(master.dtype))
        return {WEIGHTS: weights, _MASTERS: masters}

    def saved(self, keep: Keep) -> Json:
        found = self.state()
        return {
            "parameters": list(self._part.parameter_names().values()),
            "weights": {k: keep(WEIGHTS + k, tensor) for k, tensor in found[WEIGHTS].items()},
            "masters": {k: keep(_MASTERS + k, tensor) for k, tensor in found[_MASTERS].items()},
        }

    def match(self, body: Json) -> list[Any]:
        """Check shapes and kinds of numbers, and choose between saved weights and masters."""
        saved = _Saved(body)
        sources: dict[str, Json] = {}  # by key of the module's state_dict
        places: dict[tuple[int, torch.Size], list[str]] = {}  # the keys of one tensor
        wide: dict[tuple[int, torch.Size], Json] = {}
        for (name, tensor), key in zip(
            self._part.tensors(), self._part.module.state_dict(keep_vars=True), strict=True
        ):
            if name not in saved.weights:
                raise ValueError(f"has no {name!r}, which {self.what} has")
            # Tied weights have one master, under the home's name.
            name = next((n for n in self._part.tied.get(name, ()) if n in saved.weights), name)
            saved.check(name, tensor)
            place = (tensor.data_ptr(), tensor.shape)
            sources[key], is_master = saved.source(name, tensor.dtype)
            places.setdefault(place, []).append(key)
            if is_master:
                wide.setdefault(place, sources[key])
        for place, source in wide.items():
            sources.update(dict.fromkeys(places[place], source))
        names = self._part.parameter_names()
        masters = [
            saved.source(names[p], master.dtype)[0] for p, master in self._part.masters.items()
        ]
        return [sources, masters]

    def put(self, state: Any) -> None:
        weights, masters = state
        self._part.module.load_state_dict(weights)
        for master, value in zip(self._part.masters.values(), masters, strict=True):
            master.copy_(value)

    def undo(self) -> Callable[[], None]:
        """Return a function that restores CPU copies directly, without the module's hooks."""
        held = [*(tensor for _, tensor in self._part.tensors()), *self._part.masters.values()]
        before = [tensor.detach().to("cpu", copy=True) for tensor in held]

        def put_back() -> None:
            with torch.no_grad():
                for tensor, value in zip(held, before, strict=True):
                    tensor.copy_(value)

        return put_back


class _Saved:
    """The weights and masters of all stages of a document."""

    def __init__(self, body: Json) -> None:
        self._tensors = body["tensors"]
        self.weights = weights_of({"stages": [*body.get("of_all_stages", ()), *body["stages"]]})
        self._masters: Json = {k: v for s in body["stages"] for k, v in s["masters"].items()}

    def _entries(self, name: str) -> list[Json]:
        references = [saved[name] for saved in (self.weights, self._masters) if name in saved]
        return [self._tensors[reference["$tensor"]] for reference in references]

    def check(self, name: str, tensor: Tensor) -> None:
        for entry in self._entries(name):
            if entry["shape"] != list(tensor.shape):
                raise ValueError(
                    f"{name!r} has shape {entry['shape']}, expected {list(tensor.shape)}"
                )
            if _domain(dtype_of(entry["dtype"])) != _domain(tensor.dtype):
                raise ValueError(
                    f"{name!r} is {entry['dtype']}, which does not fit into "
                    f"{str(tensor.dtype).removeprefix('torch.')}"
                )

    def source(self, name: str, dtype: torch.dtype) -> tuple[Json, bool]:
        """Return a saved tensor and whether it is a master, used if the weight is too narrow."""
        narrow = dtype_of(self._entries(name)[0]["dtype"]).itemsize < dtype.itemsize
        is_master = narrow and name in self._masters
        return (self._masters if is_master else self.weights)[name], is_master


def weights_of(body: Json) -> Json:
    """Return the references of all weights in a document, by the model's names."""
    return {name: found for stage in body["stages"] for name, found in stage["weights"].items()}


def _domain(dtype: torch.dtype) -> str:
    """Return a dtype's kind of numbers; dtypes of one kind differ in precision only."""
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating point"
    return "bool" if dtype is torch.bool else "integer"
