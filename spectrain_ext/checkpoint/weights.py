"""Saves and loads the weights of each stage, under the uncut model's names.

Shards are saved as whole tensors, of which each process loads its pieces; of a plain tensor all is
one piece.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from spectrain_ext.errors import differing, kind_of
from spectrain_ext.weights.storage import local_part, whole

from .disk import WEIGHTS, described
from .documents import Json, Keep, dtype_of
from .parts import Item, Part

_MASTERS = "master."


class Weights(Item):
    """The weights of one stage."""

    def __init__(self, part: Part) -> None:
        self.what = f"stage {part.stage}"
        self._part = part

    def saved(self, keep: Keep) -> Json:
        part = self._part
        names, tied, left = part.parameter_names(), part.tied, self._not_taken_back()
        base: dict[str, Json] = {}
        if part.trainable_only:
            frozen, by_value = self._frozen() | {*left}, part.trainable_only == "verified"
            left_out = ((n, t) for n, t in part.tensors(saved=True) if n in frozen)
            for name, tensor in left_out:
                base[name] = described(tensor)
                if by_value:
                    part.by_value.append((name, base[name], tensor))
            left = []
        if left:
            warnings.warn(
                f"{self.what}: {listed(left)} are not saved: they are frozen, and their modules "
                "refuse to load them; load keeps the values of the model that it loads into",
                stacklevel=2,
            )
        weights = {
            name: keep(WEIGHTS + name, tensor)
            for name, tensor in part.tensors(saved=True)
            # an earlier stage saves a tied one under this name
            if name not in base and name not in left and name not in tied.get(name, ())
        }
        masters, owners = {}, part.parameters()
        for p, master in part.masters.items():  # follows p where that has changed since a run
            now = p.detach()
            same = master.to(now.dtype) == now
            followed = torch.where(same, master, now.to(master.dtype))
            masters[names[p]] = keep(_MASTERS + names[p], part_like(followed, owners[p]))
        return {
            "left_out": left,
            "parameters": list(names.values()),
            "weights": weights,
            "masters": masters,
        } | ({"base": base} if part.trainable_only else {})

    def match(self, body: Json) -> list[Any]:
        """Check shapes and kinds of numbers, and choose between saved weights and masters."""
        part = self._part
        stages = [*body.get("of_all_stages", ()), *body["stages"]]
        weights = weights_of({"stages": stages})
        masters = {name: key for stage in body["stages"] for name, key in stage["masters"].items()}
        self._base, taken = base_of({"stages": stages}), part.taken
        made = taken.made if taken is not None and self._base is None else ()
        kept = self.kept({**body, "stages": stages})
        self._keeps = [name for name, _ in part.tensors() if name in kept]
        if self._keeps and self._base is None:
            warnings.warn(
                f"{self.what}: {listed(self._keeps)} keep their present values: they are frozen, "
                "and their modules refuse to load them",
                stacklevel=2,
            )

        def source(names: Sequence[str], tensor: Tensor, p: Tensor) -> Json:
            """Return the saved tensor for one, of the whole shape of p, that has these names."""
            for saved in (weights, masters):
                entries = {n: body["tensors"][saved[n]["$tensor"]] for n in names if n in saved}
                for name, entry in entries.items():
                    _check_fits(name, entry, tensor, entry["shape"] if taken else p.shape)
                    first = next(iter(entries))
                    if any(entry[key] != entries[first][key] for key in ("dtype", "sha256")):
                        raise ValueError(differing(first, name))
            name = next(name for name in names if name in weights)
            dtype = dtype_of(body["tensors"][weights[name]["$tensor"]]["dtype"])
            wide = [masters[name] for name in names if name in masters]
            chosen: Json = weights[name]
            if wide and dtype.itemsize < tensor.dtype.itemsize:
                chosen = wide[0]
            part.cuts[chosen["$tensor"]] = p
            return chosen

        # each tensor of the module, with its keys in the ``state_dict`` and its names in the model
        tensors: dict[object, tuple[Tensor, list[str], list[str]]] = {}
        for (name, tensor), key in zip(
            part.tensors(), part.module.state_dict(keep_vars=True), strict=True
        ):
            if self._base is not None and name in self._base:
                _check_base(name, self._base[name], tensor)
                if "sha256" in self._base[name]:
                    part.by_value.append((name, self._base[name], tensor))
            if name in kept or name in made:
                continue
            if name not in weights:
                raise ValueError(f"has no {name!r}, which {self.what} has")
            here = local_part(tensor)
            address = here.data_ptr() if here.numel() else key  # all empty ones have the address 0
            place = (address, tensor.dtype, tensor.shape, tensor.stride())
            _, keys, names = tensors.setdefault(place, (tensor, [], []))
            keys.append(key)
            names += (*part.tied.get(name, ()), name)
        sources: list[Any] = []  # pairs, because a name may begin with "$"
        for tensor, keys, names in tensors.values():
            saved = source(names, tensor, tensor)
            sources += [[key, saved] for key in keys]
        if taken is not None and self._base is None:
            sources += [[key, weights[name]] for key, name in taken.more.items()]
        names_of, owners = part.parameter_names(), part.parameters()
        return [
            sources,
            [
                None if names_of[p] in made else source([names_of[p]], m, owners[p])
                for p, m in part.masters.items()
            ],
        ]

    def kept(self, body: Json) -> Set[str]:
        """Return the names of tensors that keep their values."""
        base = base_of(body)
        left = {name for stage in body["stages"] for name in stage["left_out"]}
        return left | {*self._not_taken_back()} if base is None else base.keys()

    def put(self, state: Any) -> None:
        pieces, masters = state
        module, taken = self._part.module, self._part.taken
        held: Any = module.state_dict(keep_vars=True)
        weights = {k: part_like(piece, held[k]) if k in held else piece for k, piece in pieces}
        if self._base is None:
            keys = {} if taken is None else taken.keys
            given: Any = OrderedDict((keys.get(key, key), value) for key, value in weights.items())
            given._metadata = held._metadata if taken is None else taken.versions
            module.load_state_dict(given, strict=not self._keeps)
        else:  # some modules of a quantized base cannot load a part of their state
            with torch.no_grad():
                for key, value in weights.items():
                    if held[key].shape != value.shape:  # which its module's hooks would change
                        held[key].resize_(value.shape)
                    held[key].copy_(value)
        for (p, master), value in zip(self._part.masters.items(), masters, strict=True):
            master.copy_(p.detach() if value is None else value)

    def _given(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Yield each module in the stage, the prefix of its names, and what it gives to save."""
        for path, module in self._part.module.named_modules(remove_duplicate=False):
            given: dict[str, Any] = {}
            module._save_to_state_dict(given, "", keep_vars=True)
            yield f"{path}." if path else "", module, given

    def _frozen(self) -> set[str]:
        """Return the names of frozen parameters and of constant buffers."""
        keys: list[str] = []
        for prefix, module, given in self._given():
            # Training changes no packed weights, masks and indices, nor the scales beside them.
            is_constant = any(map(_is_packed, given.values()))
            for name in given:
                p = module._parameters.get(name)
                if is_constant if p is None else not p.requires_grad:
                    keys.append(prefix + name)
        return {self._part.names[key] for key in keys if key in self._part.names}

    def _not_taken_back(self) -> list[str]:
        """Return frozen tensors that a part of the module gives but refuses to load.

        Quantized layers do so: what they give is packed, with its scales under more names.
        """
        left: list[str] = []
        for prefix, module, given in self._given():
            held: dict[str, Any] = {**module._parameters, **module._buffers}
            unusual = [
                name
                for name, value in given.items()
                if name != "_extra_state" and _form(held.get(name)) != _form(value)
            ]
            if not unusual or _takes_back(module):
                continue
            own = [name for name, p in module._parameters.items() if p is not None]
            trained = [name for name in own if module._parameters[name].requires_grad]
            if own and own == trained:
                raise TypeError(
                    f"{self.what}: {type(module).__name__} refuses to load {unusual[0]!r}, which "
                    "its state_dict() has, and its weights are trained; it cannot be saved"
                )
            left += [self._part.names[prefix + name] for name in given if name not in trained]
        return left

    def undo(self) -> Callable[[], None]:
        """Return a function that restores CPU copies directly, without the module's hooks."""
        kept = {*self._keeps}
        buffers = [
            (module._buffers, name, buffer, buffer.shape)
            for module in self._part.module.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        held = [local_part(tensor) for name, tensor in self._part.tensors() if name not in kept]
        held += self._part.masters.values()
        before = [tensor.detach().to("cpu", copy=True) for tensor in held]

        def put_back() -> None:
            for slots, name, buffer, shape in buffers:  # hooks may change their sizes
                slots[name] = buffer if buffer.shape == shape else buffer.resize_(shape)
            with torch.no_grad():
                for tensor, value in zip(held, before, strict=True):
                    tensor.copy_(value)

        return put_back


def _check_fits(name: str, entry: Json, tensor: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError if a saved tensor has another shape or kind of numbers."""
    if entry["shape"] != list(shape):
        raise ValueError(f"{name!r} has shape {entry['shape']}, expected {list(shape)}")
    if kind_of(dtype_of(entry["dtype"])) != kind_of(tensor.dtype):
        raise ValueError(
            f"{name!r} is {entry['dtype']}, which does not fit into "
            f"{str(tensor.dtype).removeprefix('torch.')}"
        )


def _check_base(name: str, entry: Json, tensor: Tensor) -> None:
    """Raise ValueError if a frozen tensor is not the one that a checkpoint was saved with."""
    try:
        _check_fits(name, entry, tensor, tensor.shape)
    except ValueError as error:
        raise ValueError(f"was saved with another base: {error}") from None


def check_values(part: Part) -> None:
    """Raise ValueError if frozen values are others; all ranks that share the stage call this."""
    for name, entry, tensor in part.by_value:
        if described(whole(tensor), by_value=True) != entry:
            raise ValueError(f"was saved with another base: {name!r} has other values here")


def check_trains(part: Part, base: Json) -> None:
    """Raise ValueError if a checkpoint with this base has the weights of other parameters."""
    named = [(part.names[key], p) for key, p in part.module.named_parameters()]
    for was, now, names in (
        ("frozen", "trained", [name for name, p in named if p.requires_grad and name in base]),
        ("trained", "frozen", [n for n, p in named if not p.requires_grad and n not in base]),
    ):
        if names:
            raise ValueError(
                f"was saved while {listed(names)} were {was}, and they are {now} here; "
                "only_model=True loads the saved weights without the optimizers"
            )


def base_of(body: Json) -> Json | None:
    """Return the entries of frozen tensors; None if the checkpoint holds their values."""
    bases = [stage["base"] for stage in body["stages"] if "base" in stage]
    return {name: entry for base in bases for name, entry in base.items()} if bases else None


def weights_of(body: Json) -> Json:
    """Return the references of all weights in a document, by the model's names."""
    return {name: found for stage in body["stages"] for name, found in stage["weights"].items()}


def _is_packed(value: object) -> bool:
    """Return whether a value is an array of integers, of booleans or of 8-bit numbers."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return False
    return value.itemsize == 1 or not (value.is_floating_point() or value.is_complex())


def _form(tensor: Tensor | None) -> object:
    return tensor is not None and (tensor.shape, tensor.dtype)


def _takes_back(part: nn.Module) -> bool:
    """Return whether a module loads its own state, which does not change it."""
    try:
        part.load_state_dict(part.state_dict())
    except Exception:  # of any kind, as the module may be anybody's
        return False
    return True


def listed(names: Sequence[str]) -> str:
    """Return the first names and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# Shards


def part_like(part: Tensor, p: Any) -> Tensor:
    """Return a tensor like a parameter, of which ``part`` is what this process has."""
    if local_part(p) is p:
        return part
    from torch.distributed.tensor import DTensor

    look = {"shape": p.shape, "stride": p.stride()}
    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, **look)


def piece_of(tensor: Tensor, p: Any) -> Tensor:
    """Return what this process has of a whole tensor that is cut as the parameter is."""
    dim = getattr(p.placements[0], "dim", None) if local_part(p) is not p else None
    if dim is None:
        return tensor
    # A DTensor has torch.chunk's pieces, and empty ones after the last.
    pieces, rank = tensor.chunk(p.device_mesh.size(), dim), p.device_mesh.get_local_rank()
    piece = pieces[rank] if rank < len(pieces) else tensor.narrow(dim, 0, 0)
    return piece.clone(memory_format=torch.preserve_format)
