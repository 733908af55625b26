"""Records arithmetic on numbers that are read only when a kernel runs.

The formulas of `numbers` and `laws` are written once, for floats. For a number that the host does
not know, an `Expression` records the operations on it. `lower` turns the records into a program
that the native code evaluates with the kernel (csrc/core/program.h).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

import torch
import torch.utils.dlpack
from torch import Tensor

from spectrain_ext import _C
from spectrain_ext._C import InputType, Opcode

_TYPES = {
    torch.float32: InputType.FLOAT32,
    torch.float64: InputType.FLOAT64,
    torch.int64: InputType.INT64,
}

# address, type, on CUDA, device index, name
_Input: TypeAlias = tuple[int, InputType, bool, int, str]
# inputs; constants; (a, b, operation)
Program: TypeAlias = tuple[list[_Input], list[float], list[tuple[int, int, Opcode]]]


_Operator: TypeAlias = "Callable[[Expression, Expression | float], float]"


def _operators(operation: Opcode) -> tuple[_Operator, _Operator]:
    """Return the two methods of a binary operator: the expression on the left, and on the right."""

    def forward(self: Expression, other: Expression | float) -> float:
        return _record(operation, self, other)

    def reflected(self: Expression, other: Expression | float) -> float:
        return _record(operation, other, self)

    return forward, reflected


def _record(operation: Opcode, a: Expression | float, b: Expression | float) -> float:
    """Return the recorded operation, typed as the float that formulas expect."""
    for operand in (a, b):
        if not isinstance(operand, (Expression, int, float)):
            return NotImplemented
    return cast(float, Expression(operation, a, b))


class Expression:
    """A number in a formula that the host does not know."""

    # It is truthy and unequal to every float, so formulas take no special case for it.
    __slots__ = ("operands", "operation")

    def __init__(self, operation: Opcode | None, *operands: Expression | float) -> None:
        self.operation = operation
        self.operands = operands

    __add__, __radd__ = _operators(Opcode.ADD)
    __sub__, __rsub__ = _operators(Opcode.SUBTRACT)
    __mul__, __rmul__ = _operators(Opcode.MULTIPLY)
    __truediv__, __rtruediv__ = _operators(Opcode.DIVIDE)
    __pow__, __rpow__ = _operators(Opcode.POWER)

    def __neg__(self) -> float:
        return _record(Opcode.MULTIPLY, self, -1.0)

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("a number on a device is needed on the host here; give a plain number")

    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = __index__ = _refuse


class Scalar(Expression):
    """One number in memory that is read when the kernel runs, not when it is launched.

    Use it for `lr`, `momentum`, a horizon, Adam's `step`, `betas[0]` or `mu_product`, also in
    arithmetic: ``Scalar(lr) * 0.5``. A captured CUDA graph reads the memory at each replay. On
    CUDA a tensor with one element is treated as a Scalar; on the CPU it is read immediately unless
    wrapped. The value is not checked.

    Args:
        tensor: one element of float32, float64 or int64, on the device of the weights; a tensor, or
            an array with `__dlpack__` or `__cuda_array_interface__`. It is kept alive.

    Raises:
        TypeError: the argument is not such an array.
        ValueError: the argument does not have exactly one element.

    Example:
        >>> rate = torch.tensor(0.25)
        >>> st.predict(torch.ones(1), torch.ones(1), lr=st.Scalar(rate) * 0.5, steps=2)
        tensor([0.7500])
    """

    __slots__ = ("name", "tensor")

    def __init__(self, tensor: Any) -> None:
        super().__init__(None)
        self.name = "Scalar"
        if isinstance(tensor, Tensor):
            self.tensor = tensor
        elif hasattr(tensor, "__dlpack__"):
            self.tensor = torch.utils.dlpack.from_dlpack(tensor)
        elif hasattr(tensor, "__cuda_array_interface__"):
            self.tensor = torch.as_tensor(tensor, device="cuda")
        else:
            raise TypeError(f"tensor: expected an array, got {type(tensor).__name__}")
        if self.tensor.dtype not in _TYPES:
            raise TypeError(f"tensor: expected float32, float64 or int64, got {self.tensor.dtype}")
        if self.tensor.device.type not in ("cpu", "cuda"):
            raise TypeError(f"tensor: expected it on the CPU or on CUDA, got {self.tensor.device}")
        if self.tensor.numel() != 1:
            raise ValueError(f"tensor: expected one element, got shape {tuple(self.tensor.shape)}")

    def named(self, name: str) -> Scalar:
        """Return the same number under another name for error messages."""
        named = Scalar.__new__(Scalar)
        Expression.__init__(named, None)
        named.name, named.tensor = name, self.tensor
        return named

    def __repr__(self) -> str:
        return f"Scalar({self.tensor.dtype}, {self.tensor.device})"


def traced(name: str, value: object) -> Expression | None:
    """Return the expression for an argument on a device; None for a number of the host."""
    if isinstance(value, Expression):
        return value.named(name) if isinstance(value, Scalar) else value
    if isinstance(value, Tensor):
        on_device = value.is_cuda
    else:  # CuPy's arrays and the like
        on_device = hasattr(value, "__cuda_array_interface__")
    if not on_device:
        return None
    try:
        return Scalar(value).named(name)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {str(error).removeprefix('tensor: ')}") from None


_INPUT, _CONSTANT, _RESULT = range(3)
_Place: TypeAlias = tuple[int, int]  # one of the three kinds, and an index within it


class _Lowering:
    """Collects the expressions of one call and shares equal operations."""

    def __init__(self) -> None:
        # For each kind: index and program entry, by a key that equal entries share.
        self._tables: tuple[dict[object, tuple[int, Any]], ...] = ({}, {}, {})
        self._known: dict[int, _Place] = {}  # by id; the expressions outlive this object

    def add(self, expression: Expression) -> None:
        """Collect an expression and its operands, iteratively because chains may be long."""
        waiting = [expression]
        while waiting:
            now = waiting[-1]
            missing = [
                e for e in now.operands if isinstance(e, Expression) and id(e) not in self._known
            ]
            if missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            self._known.setdefault(id(now), self._place(now))

    def _place(self, expression: Expression) -> _Place:
        if isinstance(expression, Scalar):
            t = expression.tensor
            if t.untyped_storage().nbytes() < (t.storage_offset() + 1) * t.element_size():
                raise ValueError(
                    f"{expression.name}: expected one element in memory, got a tensor whose "
                    "storage was resized and does not hold it any more"
                )
            entry = t.data_ptr(), _TYPES[t.dtype]
            device = t.device.index if t.is_cuda else 0
            return self._intern(_INPUT, entry, (*entry, t.is_cuda, device, expression.name))
        a, b = map(self._operand, expression.operands)
        code = a, b, expression.operation
        return self._intern(_RESULT, code, code)

    def _operand(self, operand: Expression | float) -> _Place:
        if isinstance(operand, Expression):
            return self._known[id(operand)]
        return self._intern(_CONSTANT, struct.pack("<d", operand), float(operand))

    def _intern(self, kind: int, key: object, what: object) -> _Place:
        table = self._tables[kind]
        return kind, table.setdefault(key, (len(table), what))[0]

    def _register(self, place: _Place) -> int:
        kind, index = place
        return self._starts[kind] + index

    def program(self) -> Program | None:
        """Return the program of all added expressions, or None."""
        *self._starts, registers = accumulate(map(len, self._tables), initial=0)
        if registers > _C.MAX_REGISTERS:
            raise ValueError("steps: the formulas of numbers on the device are too long")
        inputs, constants, code = ([what for _, what in t.values()] for t in self._tables)
        code = [(self._register(a), self._register(b), operation) for a, b, operation in code]
        return (inputs, constants, code) if self._known else None

    def placeholder(self, expression: Expression) -> float:
        """Return the NaN that stands for an added expression; call after `program`."""
        return _C.placeholder(self._register(self._known[id(expression)]))


T = TypeVar("T")


def lower(numbers: T) -> tuple[T, Program | None]:
    """Replace all expressions in nested lists and tuples by placeholders; return their program."""
    if _C.all_plain(numbers):  # true in most calls, and fast to check
        return numbers, None
    lowering = _Lowering()
    _mapped(numbers, lowering.add)
    program = lowering.program()
    return cast(T, numbers if program is None else _mapped(numbers, lowering.placeholder)), program


def _mapped(value: object, of: Callable[[Expression], object]) -> object:
    """Return the same structure with each expression replaced."""
    if type(value) is float:  # the most frequent case
        return value
    if isinstance(value, Expression):
        return of(value)
    if isinstance(value, (list, tuple)):
        parts = [_mapped(part, of) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value
