"""Weights: parameters, their masters and module buffers, under the model's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .documents import Json, dtype_of
from .parts import Part


class Weights:
    """Those of one stage."""

    def __init__(self, part: Part) -> None:
        self.what = f"stage {part.stage}"
        self._part = part

    def saved(self) -> tuple[dict[str, Tensor], Json]:
        """Return them, and the masters as the next run will find them."""
        names = self._part.parameter_names()
        tied = self._part.tied
        found = {
            f"model.{name}": tensor.detach()
            for name, tensor in self._part.tensors()
            if name not in tied.get(name, ())  # an earlier stage has it by this name as well
        }
        for p, master in self._part.masters.items():
            now = p.detach()
            same = master.to(now.dtype) == now
            found[f"master.{names[p]}"] = torch.where(same, master, now.to(master.dtype))
        return found, {"parameters": list(names.values())}

    def match(self, body: Json) -> list[str]:
        """Compare shapes and kinds of numbers, and choose between weights and masters.

        Raises:
            ValueError: they differ, or a weight is missing.
        """
        known = body["tensors"]
        #: per key of the module's state_dict, and per parameter with a master
        self._sources: dict[str, str] = {}
        self._wide: dict[Tensor, str] = {}
        places: dict[tuple[int, torch.Size], list[str]] = {}  # the keys of one tensor
        for (name, tensor), key in zip(
            self._part.tensors(), self._part.module.state_dict(), strict=True
        ):
            entry = known.get(f"model.{name}")
            if entry is None:
                raise ValueError(f"has no {name!r}, which {self.what} has")
            # Of weights that were tied there is one master.
            name = next((n for n in self._part.tied.get(name, ()) if f"model.{n}" in known), name)
            entry = known[f"model.{name}"]
            entries = (entry, known.get(f"master.{name}", entry))
            if any(found["shape"] != list(tensor.shape) for found in entries):
                raise ValueError(
                    f"{name!r} has shape {entry['shape']}, expected {list(tensor.shape)}"
                )
            for found in entries:
                if _domain(dtype_of(found["dtype"])) != _domain(tensor.dtype):
                    raise ValueError(
                        f"{name!r} is {found['dtype']}, which does not fit into "
                        f"{str(tensor.dtype).removeprefix('torch.')}"
                    )
            self._sources[key] = _source(known, name, tensor.dtype)
            places.setdefault((tensor.data_ptr(), tensor.shape), []).append(key)
        for keys in places.values():
            best = next((s for k in keys if (s := self._sources[k]).startswith("master.")), None)
            if best is not None:
                self._sources.update(dict.fromkeys(keys, best))
        for p, name in self._part.parameter_names().items():
            if p in self._part.masters:
                self._wide[p] = _source(known, name, self._part.masters[p].dtype)
        return [*self._sources.values(), *self._wide.values()]

    def apply(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy what was found."""
        self._part.module.load_state_dict({k: tensors[name] for k, name in self._sources.items()})
        for p, name in self._wide.items():
            self._part.masters[p].copy_(tensors[name])

    def undo(self) -> Callable[[], None]:
        """Return what puts copies in host memory back."""
        held = [*(tensor for _, tensor in self._part.tensors()), *self._part.masters.values()]
        before = [tensor.detach().to("cpu", copy=True) for tensor in held]

        def put_back() -> None:
            with torch.no_grad():
                for tensor, value in zip(held, before, strict=True):
                    tensor.copy_(value)

        return put_back


def _source(known: Json, name: str, dtype: torch.dtype) -> str:
    """What to load for a parameter or module buffer: where it is wide enough, the master."""
    key, wide = f"model.{name}", f"master.{name}"
    narrow = dtype_of(known[key]["dtype"]).itemsize < dtype.itemsize
    return wide if narrow and wide in known else key


def _domain(dtype: torch.dtype) -> str:
    """What numbers a dtype is of: within one a wider or narrower one is only more or less exact."""
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating point"
    return "bool" if dtype is torch.bool else "integer"
