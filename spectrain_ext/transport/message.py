"""Defines messages between stages, their layout, and the memory that they arrive in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

#: One argument of a module.
Value = Any

#: What messages may contain.
VALUES = "a tensor, or tuples, lists and dicts by name of tensors, None, bools, numbers and strings"

# Every tensor of a message starts at a multiple of this many bytes.
_ALIGNMENT = 256

#: Replicas sum gradients in about this many pieces, within these sizes.
PIECES, LEAST_BYTES, MOST_BYTES = 8, 2**20, 25 * 2**20


class Microbatches(list[Any]):
    """A batch that you have split yourself: a list of microbatches, each a pair or a mapping.

    A plain list works too, unless it has two members: that is taken for a pair (input, target).

    Example:
        >>> microbatches = [(torch.ones(n, 2), torch.ones(n, 1)) for n in (3, 1)]
        >>> batch = st.Microbatches(microbatches)  # sizes may differ
        >>> sgd = lambda params: st.optim.SGD(params, lr=0.1)
        >>> stages = [nn.Linear(2, 2), nn.Linear(2, 1)]
        >>> pipe = st.Pipeline(stages, sgd, nn.functional.mse_loss, microbatches=2)
        >>> [result.index for result in pipe.run([batch])]
        [0]
        >>> pipe.release()
    """


class Reference:
    """An object other than a tensor or constant: passed on within a process, never copied."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


#: The structure of a value: TENSOR; a constant, as JSON, since 1 equals True and nan differs from
#: nan; a container's kind (for a dict, its names) and its members' forms; or a Reference.
Form = str | tuple[Any, ...] | Reference

TENSOR = "tensor"
#: Of tensors whose receiver knows their structure, such as gradients.
FLAT: Form = ()
CONTAINERS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "tuple": tuple,
    "list": list,
    "microbatches": Microbatches,
    "coded": tuple,  # what was packed, and the form; see passes/compress.py
}
CONSTANTS = (bool, int, float, str, type(None))


def refused(value: object, where: str) -> Form:
    kind, remedy = type(value).__name__, ""
    if isinstance(value, PackedSequence):
        remedy = "; give the padded tensor and the lengths, and pack them in the stage"
    elif isinstance(value, Tensor) and value.is_nested:
        kind = "nested tensor"
        remedy = "; give torch.nested.to_padded_tensor of it, and the lengths"
    elif isinstance(value, Tensor):
        kind = f"tensor that is not dense ({value.layout})"
        remedy = "; give its indices and values, or to_dense() of it"
    raise TypeError(f"{where}: expected {VALUES}, got a {kind}{remedy}")


def is_dense(tensor: Tensor) -> bool:
    """Whether it has strides and one size in each dimension."""
    return tensor.layout is torch.strided and not tensor.is_nested


def referred(value: object, where: str) -> Form:
    """Return a Reference as the form; refuse arrays and objects with tensors in them."""
    if isinstance(value, (Tensor, PackedSequence)):
        return refused(value, where)
    shape = getattr(value, "shape", ())
    if (isinstance(shape, tuple) and shape) or next(tensors_in(value), None) is not None:
        raise TypeError(
            f"{where}: expected {VALUES}, got a {type(value).__name__}, whose arrays or tensors "
            "cannot be cut; torch.as_tensor makes a tensor of an array"
        )
    return Reference(value)


def flattened(
    value: object,
    where: str,
    tensors: list[Tensor],
    other: Callable[[object, str], Form] = refused,  # the form of what is not in VALUES
) -> Form:
    """Append the value's tensors to a list, and return its form; any mapping is a dict."""
    if isinstance(value, Tensor) and is_dense(value):
        tensors.append(value)
        return TENSOR
    if type(value) in CONSTANTS:
        return json.dumps(value)
    if isinstance(value, Mapping):
        forms = []
        for name, member in value.items():
            if not isinstance(name, str):
                raise TypeError(f"{where}: expected strings as keys, got {name!r}")
            forms.append(flattened(member, f"{where}[{name!r}]", tensors, other))
        return ("dict", tuple(value), *forms)
    if isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence):
        members = enumerate(value)
        kind = "tuple" if isinstance(value, tuple) else "list"
        return kind, *(flattened(v, f"{where}[{n}]", tensors, other) for n, v in members)
    return other(value, where)


def unflattened(form: Form, tensors: Iterator[Any]) -> Any:
    if isinstance(form, str):
        return next(tensors) if form == TENSOR else json.loads(form)
    if isinstance(form, Reference):
        return form.value
    kind, *members = form
    if kind == "dict":
        names, *members = members
        return dict(zip(names, [unflattened(one, tensors) for one in members], strict=True))
    return CONTAINERS[kind]([unflattened(one, tensors) for one in members])


def places_in(form: Form, where: str = "") -> Iterator[str]:
    """Yield a name for each of its tensors."""
    if form == TENSOR:
        yield where
    elif isinstance(form, tuple) and form:
        kind, *members = form
        names: Iterable[object] = range(len(members))
        if kind == "dict":
            names, *members = members
        for name, member in zip(names, members, strict=True):
            yield from places_in(member, f"{where}[{name!r}]")


def as_value(given: object, where: str, other: Callable[[object, str], Form] = referred) -> Value:
    """Return the value with any mapping in it as a dict; raise TypeError without a tensor."""
    tensors: list[Tensor] = []
    form = flattened(given, where, tensors, other)
    if not tensors:
        raise TypeError(f"{where}: expected at least one tensor, got a {type(given).__name__}")
    return unflattened(form, iter(tensors))


def map_tensors(value: Value, apply: Callable[[Tensor], Tensor]) -> Value:
    """Return the same value with ``apply`` called on each tensor."""
    tensors: list[Tensor] = []

    def referred(thing: Any, _: str) -> Reference:
        return Reference(apply(thing) if isinstance(thing, Tensor) else thing)

    form = flattened(value, "value", tensors, referred)
    return unflattened(form, map(apply, tensors))


def tensors_in(anything: object) -> Iterator[Tensor]:
    """Yield the tensors in a model's output: nested containers and dataclasses."""
    if isinstance(anything, Tensor):
        yield anything
    elif isinstance(anything, Mapping):
        for member in anything.values():
            yield from tensors_in(member)
    elif isinstance(anything, (tuple, list)):
        for member in anything:
            yield from tensors_in(member)
    elif is_dataclass(anything) and not isinstance(anything, type):
        for field in fields(anything):
            yield from tensors_in(getattr(anything, field.name, None))


class Header(NamedTuple):
    """Numbers of a microbatch, which are sent along with its inputs."""

    parts: int = 1  # microbatches of its minibatch
    share: float = 0.0  # of the minibatch's samples, or 1 / ``count(target)``
    samples: int = 0  # of the microbatch


NO_HEADER = Header()


class Message(NamedTuple):
    """Tensors that one stage sends to another, and the form of the value that they come from."""

    tensors: tuple[Tensor | None, ...]  # detached; None: the gradient of an unused tensor
    differentiable: tuple[bool, ...] = ()  # whether a gradient of each is needed
    form: Form = FLAT  # of the value that contains them

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)

    def with_gradient(self, wanted: bool) -> Message:
        """Return it with gradients needed for all tensors that can have one, or for none."""
        flags = (
            wanted and t is not None and (t.is_floating_point() or t.is_complex())
            for t in self.tensors
        )
        return self._replace(differentiable=tuple(flags))


#: Tells whether a message has the layout of an earlier one, in a third of the time that a
#: ``Layout`` takes.
Likeness = list[tuple[object, ...] | None]


def likeness(tensors: Iterable[Tensor | None]) -> Likeness:
    looks: Likeness = []
    for t in tensors:
        looks.append(None if t is None else (t.shape, t.stride(), t.dtype))
    return looks


class TensorLayout(NamedTuple):
    """One tensor of a message: shape, dense strides, dtype, and whether its gradient is needed."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Layout(NamedTuple):
    """The layout of a message: its tensors, None for one that is not sent, and their form."""

    tensors: tuple[TensorLayout | None, ...]
    form: Form = FLAT

    @staticmethod
    def of(message: Message) -> Layout:
        """Return the layout of a message; strides are those of ``torch.empty_like``."""
        flags = message.differentiable or (True,) * len(message.tensors)
        tensors = tuple(
            t if t is None else TensorLayout(tuple(t.shape), dense_strides(t), t.dtype, flag)
            for t, flag in zip(message.tensors, flags, strict=True)
        )
        return Layout(tensors, message.form)

    def offsets(self) -> tuple[list[int], int]:
        """Return where each tensor starts, in bytes, and the total number of bytes."""
        begin, offsets = 0, []
        for tensor in self.tensors:
            offsets.append(begin)
            if tensor is not None:
                begin += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return offsets, begin

    def views(self, memory: Tensor) -> list[Tensor | None]:
        """Return the tensors in a flat uint8 tensor that is large enough."""
        offsets, _ = self.offsets()
        # ``.data`` gives each a version counter of its own: an in-place layer may change one while
        # autograd keeps another.
        return [
            None
            if tensor is None
            else memory[begin : begin + tensor.nbytes]
            .view(tensor.dtype)
            .as_strided(tensor.shape, tensor.stride)
            .data
            for begin, tensor in zip(offsets, self.tensors, strict=True)
        ]

    def message(self, tensors: list[Tensor | None]) -> Message:
        flags = tuple(tensor is not None and tensor.differentiable for tensor in self.tensors)
        return Message(tuple(tensors), flags, self.form)


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return strides without gaps and overlaps, in the same order of dimensions."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


class FlatMemory:
    """Flat memory for a message: a head, then the body (``bytes``); both are ``whole``."""

    def __init__(self, head: int = 0) -> None:
        self._head = head
        self.free()

    def free(self) -> None:
        self.whole = self.bytes = torch.empty(0, dtype=torch.uint8)
        self._layout: object = None  # of its last tensors
        self._views: list[Tensor | None] = []

    def fit(self, nbytes: int, device: torch.device, pinned: bool = False) -> bool:
        """Make room for a body of ``nbytes``, pinned if asked; return whether it is new memory."""
        size = self._head + nbytes
        if self.whole.numel() >= size and self.whole.device.type == device.type:
            return False
        with torch.inference_mode(False):  # others may use it later, outside
            whole = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
            self._layout, self.bytes = None, whole[self._head :]
        self.whole = whole  # last, in case of an exception
        return True

    def views(self, layout: Layout) -> list[Tensor | None]:
        if self._layout != layout.tensors:
            with torch.inference_mode(False):
                self._views = layout.views(self.bytes)
            self._layout = layout.tensors
        return self._views
