"""Runs models on the meta device, and compares tensors by the operations that made them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

_CPU = torch.device("cpu")
# These operations read a tensor's shape and dtype, and none of its values.
_METADATA_OPS = (
    "aten.new_",
    "aten.empty_like",
    "aten.zeros_like",
    "aten.ones_like",
    "aten.full_like",
)


def is_valueless(*modules: nn.Module) -> bool:
    """Whether any parameter is on the meta device."""
    return any(p.is_meta for module in modules for p in module.parameters())


def slots_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    """Yield a module's parameters and buffers: owner, attribute, full name, tensor."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for key, tensor in chain(owner._parameters.items(), owner._buffers.items()):
            if tensor is not None:
                yield owner, key, f"{path}.{key}" if path else key, tensor


class Provenance(TorchDispatchMode):
    """Records how tensors are made, inside ``with provenance.kept()``, on tensors without values.

    The tensors appear to be on the CPU, so a model behaves as it does there. Two tensors are the
    same if the same operations made them in the same order from the same tensors of the model,
    which are identified by their names, and of the batch. This is a stronger test than equal values
    for an example.
    """

    def __init__(self, model: nn.Module) -> None:
        from torch._subclasses import FakeTensor, FakeTensorMode

        super().__init__()  # type: ignore[no-untyped-call]
        # transformers treats fake tensors as traced ones, and does not read their values.
        self._fake, self._inside = FakeTensorMode(allow_non_fake_inputs=True), FakeTensor
        self._known: dict[tuple[int, str], tuple[nn.Module, str, Tensor, Tensor]] = {}
        # Each storage has a number for the operations that made its contents.
        self._numbers: dict[Any, int] = {}  # by description
        self._contents: dict[int, int] = {}  # by storage
        self._stand_ins: dict[int, Tensor] = {}  # for tensors from outside
        self._alive: list[Tensor] = []  # keeps a recorded storage's address from being reused
        self.know(model, str)

    def know(self, module: nn.Module, full_name: Callable[[str], str]) -> None:
        """Identify a module's tensors by the model's names."""
        for part, key, name, tensor in slots_of(module):
            if (id(part), key) in self._known:
                continue
            self._name(tensor, full_name(name))
            with self._fake:
                stand_in = self._taken(tensor)
                if isinstance(tensor, nn.Parameter):
                    stand_in = nn.Parameter(stand_in, tensor.requires_grad)
            self._known[id(part), key] = (part, key, tensor, stand_in)

    def given(self, value: Any) -> Any:
        """Return stand-ins for a batch; each of its tensors is distinct, even with equal values."""
        for index, leaf in enumerate(tree_leaves(value)):
            if isinstance(leaf, Tensor):
                self._name(leaf, f"given {index}")
        with self._fake:
            return tree_map(self._taken, value)

    @contextmanager
    def kept(self) -> Iterator[None]:
        try:
            for module, key, _, stand_in in self._known.values():
                setattr(module, key, stand_in)
            with self._fake, self:
                yield
        finally:
            for module, key, tensor, _ in self._known.values():
                setattr(module, key, tensor)

    def same(self, a: Tensor, b: Tensor) -> bool:
        return self._origin(a) == self._origin(b)

    def originals(self, storages: Container[int]) -> set[int]:
        """Return the storages of the model's tensors whose stand-ins have these storages."""
        known = self._known.values()
        return {storage_of(t) for _, _, t, stand_in in known if storage_of(stand_in) in storages}

    def _origin(self, tensor: Tensor) -> int:
        storage = storage_of(tensor)
        if storage not in self._contents:
            # A small tensor from outside, such as 2.0, is identified by its values.
            content: Any = ("given", storage)
            if tensor.device.type == "cpu" and not isinstance(tensor, self._inside):
                with _disable_current_modes():
                    content = repr(tensor.tolist()) if tensor.numel() < 100 else content
            self._set(tensor, self._number(content))
        look = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        return self._number((self._contents[storage], look))

    def _number(self, description: Any) -> int:
        return self._numbers.setdefault(description, len(self._numbers))

    def _set(self, tensor: Tensor, number: int) -> None:
        self._alive.append(tensor)
        self._contents[storage_of(tensor)] = number

    def _name(self, tensor: Tensor, name: str) -> None:
        if storage_of(tensor) not in self._contents:
            self._set(tensor, self._number(name))

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """Return the fake tensor that replaces a tensor from outside."""
        key = id(tensor)
        if key not in self._stand_ins:
            self._stand_ins[key] = stand_in = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_CPU
            )
            self._alive.append(tensor)
            self._set(stand_in, self._origin(tensor))
        return self._stand_ins[key]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(self._taken, (args, dict(kwargs or {})))
        if "device" in kwargs:
            kwargs["device"] = _CPU
        name = str(func)
        looks = name.startswith(_METADATA_OPS)
        number = self._number((name, self._described((args, kwargs), looks)))
        read = set(map(storage_of, _tensors((args, kwargs))))
        output = func(*args, **kwargs)
        fresh = [tensor for tensor in _tensors(output) if storage_of(tensor) not in read]
        for index, tensor in enumerate([*_written(func, args, kwargs), *fresh]):
            self._set(tensor, self._number((number, index)))
        return output

    def _taken(self, leaf: Any) -> Any:
        outside = isinstance(leaf, Tensor) and not isinstance(leaf, self._inside)
        return self._stand_in(leaf) if outside else leaf

    def _described(self, value: Any, looks: bool) -> Any:
        if isinstance(value, Tensor):
            return (tuple(value.shape), value.dtype) if looks else self._origin(value)
        if isinstance(value, (tuple, list)):
            return tuple(self._described(each, looks) for each in value)
        if isinstance(value, Mapping):
            return tuple((key, self._described(each, looks)) for key, each in value.items())
        return repr(value)


def running(provenance: Provenance | None) -> AbstractContextManager[None]:
    """Return a context in which to run a model; without values if there is a provenance."""
    return nullcontext() if provenance is None else provenance.kept()


def close(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of one shape differ by rounding only, relative to the largest number."""
    # torch.testing's rtol, with an atol that allows for a GPU's order of summation.
    rtol = 1e-2 if a.dtype in (torch.bfloat16, torch.float16) else 1e-5
    return torch.allclose(a, b, rtol=rtol, atol=rtol * float(b.abs().max()) if b.numel() else 0.0)


class Writes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Normalizations do not declare that they write their running statistics.
        self.storages.update(map(storage_of, _written(func, args, kwargs, undeclared="running_")))
        return func(*args, **kwargs)


def _written(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], undeclared: str | None = None
) -> list[Tensor]:
    """Return the tensors that an operation writes to, also arguments whose names begin so."""
    arguments = [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (undeclared is not None and argument.name.startswith(undeclared))
    ]
    return _tensors(arguments)


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
