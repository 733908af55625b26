"""Reads pickles as data: nothing in them is imported, called or changed.

A pickle is a program. Limiting the names that it may use is not enough: with numpy's own
constructors alone, bytes of the file become pointers to objects. This reader supports plain values
and containers; calls in a pickle become records.
"""

from __future__ import annotations

import io
import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LONGEST = 200_000  # instructions; each takes memory


@dataclass(frozen=True, slots=True)
class Name:
    """A name that a pickle would import, as ``module.name``."""

    text: str


@dataclass(slots=True)
class Call:
    """A call that a pickle would make.

    Attributes:
        name: name of the function or class.
        arguments: its arguments.
        state: state for the result's ``__setstate__``, None if there is none.
    """

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


def read_pickle(content: bytes) -> Any:
    """Return the content of a pickle: plain values, containers, names and calls.

    Values are None, numbers, str and bytes in lists, tuples and dicts. Python 2 strings become
    bytes. The reader supports the instructions that ``pickle`` writes for these values with
    protocols 2 to 4. Memory and time are proportional to ``len(content)``.
    """
    try:
        return _run(io.BytesIO(content), len(content))
    except (IndexError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"it is no pickle of plain data: {type(error).__name__}") from error


_INTEGERS = ("BININT", "BININT1", "BININT2", "LONG1")
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_BYTES = ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8")
_PUSHED_AS_READ = frozenset((*_INTEGERS, "BINFLOAT", *_TEXTS, *_BYTES))
_STRINGS = frozenset(("BINSTRING", "SHORT_BINSTRING"))
_MADE: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = frozenset(("PROTO", "FRAME"))
_CONTAINERS = ("MARK", "TUPLE", "APPEND", "APPENDS", "SETITEM", "SETITEMS")
_MEMO = ("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET")
_OBJECTS = ("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD")
_KNOWN = {
    operation.code: operation
    for operation in pickletools.opcodes
    if operation.name
    in {
        *(*_PUSHED_AS_READ, *_STRINGS, *_MADE, *_TUPLES, *_IGNORED),
        *(*_CONTAINERS, *_MEMO, *_OBJECTS, "STOP"),
    }
}


def _run(stream: io.BytesIO, size: int) -> Any:
    machine = _Machine(size)
    for _ in range(_LONGEST):
        code = stream.read(1).decode("latin-1")
        known = _KNOWN.get(code)
        if known is None:
            what = "its end is missing" if not code else f"it has the instruction {code!r}"
            raise ValueError(f"it is no pickle of plain data: {what}")
        # only for known instructions: some readers take long
        argument = None if known.arg is None else known.arg.reader(stream)
        if known.name == "STOP":
            return machine.pop()
        machine.do(known.name, argument)
    raise ValueError(f"it has more than {_LONGEST} instructions")


class _Machine:
    """The stack of values, the stacks below its marks, and the memo."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def pop(self) -> Any:
        return self._stack.pop()

    def do(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _PUSHED_AS_READ:
            stack.append(argument)
        elif name in _STRINGS:
            stack.append(argument.encode("latin-1"))
        elif name in _MADE:
            stack.append(_MADE[name]())
        elif name in _TUPLES:
            count = _TUPLES[name]
            if len(stack) < count:
                raise IndexError
            stack[-count:] = [tuple(stack[-count:])]
        elif name not in _IGNORED:
            getattr(self, f"_{name.removeprefix('LONG_').lower()}")(argument)

    def _marked(self) -> list[Any]:
        found, self._stack = self._stack, self._below.pop()
        return found

    def _mark(self, _: object) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _tuple(self, _: object) -> None:
        found = tuple(self._marked())
        self._stack.append(found)

    def _append(self, _: object) -> None:
        member = self.pop()
        _extend(self._stack[-1], [member])

    def _appends(self, _: object) -> None:
        members = self._marked()
        _extend(self._stack[-1], members)

    def _setitem(self, _: object) -> None:
        value, key = self.pop(), self.pop()
        _update(self._stack[-1], [key, value])

    def _setitems(self, _: object) -> None:
        pairs = self._marked()
        _update(self._stack[-1], pairs)

    def _binput(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def _memoize(self, _: object) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _binget(self, place: int) -> None:
        self._stack.append(self._memo[place])

    def _global(self, names: str) -> None:
        self._stack.append(Name(names.replace(" ", ".")))

    def _stack_global(self, _: object) -> None:
        name, module = self.pop(), self.pop()
        if not (type(name) is str and type(module) is str):
            raise TypeError
        self._stack.append(Name(f"{module}.{name}"))

    def _reduce(self, _: object) -> None:
        arguments, name = self.pop(), self.pop()
        if type(arguments) is not tuple:
            raise TypeError
        if name.text == "_codecs.encode" and arguments[1:] == ("latin1",):
            self._stack.append(self._bytes(arguments[0]))
        else:
            self._stack.append(Call(name.text, arguments))

    def _bytes(self, text: str) -> bytes:
        """Decode bytes, which protocol 2 writes as a call."""
        self._left -= len(text)  # the same text may occur many times
        if self._left < 0:
            raise ValueError("it has more bytes than its file")
        return text.encode("latin-1")

    def _build(self, _: object) -> None:
        state = self.pop()
        if type(self._stack[-1]) is not Call:
            raise TypeError
        self._stack[-1].state = state


def _extend(found: Any, members: list[Any]) -> None:
    if type(found) is not list:
        raise TypeError
    found.extend(members)


def _update(found: Any, pairs: list[Any]) -> None:
    # nothing nested: hashing nested tuples would need as much stack
    if type(found) is not dict or any(type(key) not in (str, bytes, int) for key in pairs[::2]):
        raise TypeError
    found.update(zip(pairs[::2], pairs[1::2], strict=True))
