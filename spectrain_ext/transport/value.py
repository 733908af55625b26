"""Value: what goes into a stage and comes out of it, and the tensors in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass

from torch import Tensor

#: One argument of a module, whichever it is.
Value = Tensor | tuple[Tensor, ...] | dict[str, Tensor]

#: For messages.
VALUES = "a tensor, a tuple of tensors, or a dict of them by name"


def as_value(given: object, where: str, note: str = "") -> Value:
    """The value that was given, maybe as a list or as a mapping that is no dict.

    Raises:
        TypeError: it is none; names ``where``, with the key or the index, and then the note.
    """
    if isinstance(given, Tensor):
        return given
    if isinstance(given, Mapping) and given:
        found = {}
        for key, member in given.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}{note}: expected strings as keys, got {key!r}")
            found[key] = _tensor(member, f"{where}[{key!r}]{note}")
        return found
    if isinstance(given, (tuple, list)) and given:
        return tuple(_tensor(member, f"{where}[{n}]{note}") for n, member in enumerate(given))
    kind = "an empty" if isinstance(given, (Mapping, tuple, list)) else "a"
    raise TypeError(f"{where}{note}: expected {VALUES}, got {kind} {type(given).__name__}")


def _tensor(given: object, where: str) -> Tensor:
    if not isinstance(given, Tensor):
        what = "None; leave it out" if given is None else f"a {type(given).__name__}"
        raise TypeError(f"{where}: expected a tensor, got {what}")
    return given


def tensors_of(value: Value) -> tuple[Tensor, ...]:
    """The tensors of a value, in its order."""
    if isinstance(value, Tensor):
        return (value,)
    return value if isinstance(value, tuple) else tuple(value.values())


def each(value: Value, apply: Callable[[Tensor], Tensor]) -> Value:
    """The value with each of its tensors replaced."""
    if isinstance(value, Tensor):
        return apply(value)
    if isinstance(value, Mapping):
        return {key: apply(tensor) for key, tensor in value.items()}
    return tuple(apply(tensor) for tensor in value)


def tensors_in(anything: object) -> Iterator[Tensor]:
    """The tensors in whatever a model returns: containers and dataclasses, however nested."""
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
