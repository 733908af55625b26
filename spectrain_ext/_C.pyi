"""Types of the native module (csrc/bindings/module.cpp), on which operators and `Plan` sit."""

from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

from torch import Tensor

from spectrain_ext.operators.calls import Sources, StepOptions
from spectrain_ext.operators.numbers import Setting, Term

MAX_GROUPS: int
MAX_TERMS: int
ROUNDED_DECAY: float  # above it, bfloat16 second moments are rounded stochastically

class Role:
    """What a list is to a plan."""

    PARAMS: ClassVar[Role]
    MOMENTUM: ClassVar[Role]
    GRADS: ClassVar[Role]
    STASHED: ClassVar[Role]
    OUT: ClassVar[Role]
    SECOND: ClassVar[Role]

_List: TypeAlias = tuple[Role, str, bool, tuple[Any, ...]]

class Plan:
    """Validated lists of arrays, resolved once."""

    def __init__(self, lists: Sequence[_List], groups: Sequence[int], single: bool) -> None: ...
    # Operations are called by their names in csrc/kernels/operations.h.
    def predict(
        self,
        operation: str,
        terms: Sequence[Sequence[Term]],
        eps: Sequence[float],
        sources: Sources,
        out: int | None,
        stream: Any,
    ) -> None: ...
    def stash_predict_(
        self,
        operation: str,
        terms: Sequence[Sequence[Term]],
        eps: Sequence[float],
        sources: Sources,
        stream: Any,
    ) -> None: ...
    def extrapolate(self, steps: float, out: int, stream: Any) -> None: ...
    def stash(self, stream: Any) -> None: ...
    def restore_(self, stream: Any) -> None: ...
    def swap_(self, stream: Any) -> None: ...
    def write_out(self, out: int, stream: Any) -> None: ...
    def distance_scratch(self) -> int: ...
    def distances(self, result: int, scratch: int, stream: Any) -> None: ...
    def step(
        self,
        operation: str,
        settings: Sequence[Setting],
        predictions: Sequence[tuple[int, Sequence[Sequence[Term]]]],
        sources: Sources,
        first_step: bool | Sequence[bool],
        options: StepOptions,
        stream: Any,
    ) -> None: ...
    def keep(self, watch: bool) -> None: ...
    def pin_gradients(self) -> None: ...
    def set_gradients(self, grads: tuple[Any, ...]) -> bool: ...
    def forget_gradients(self) -> None: ...
    @property
    def n_outs(self) -> int: ...
    def last_launch(self) -> tuple[int, int]: ...

class Watch:
    """Torch tensors that are asked again and again whether they are where they were."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None: ...
    def in_place(self) -> bool: ...

def same(now: object, seen: object) -> bool: ...

# x**n for 0 <= x < 1 and a whole number n >= 0, with the bits of a kernel.
def power(x: float, n: float) -> float: ...
def stacks() -> dict[int, list[tuple[str, int, str]]]: ...
def build_info() -> dict[str, Any]: ...
def require_cuda() -> int: ...
def stream_handle(stream: Any) -> int: ...

# Addresses in CUDA memory, a device's index and a stream's handle.
def copy(to: int, source: int, bytes: int, device: int, stream: int) -> None: ...
