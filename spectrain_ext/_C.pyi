"""Types of the native module (csrc/bindings/module.cpp); use `ops` and `Plan`, which sit on it."""

from collections.abc import Sequence
from typing import Any

from spectrain_ext._expressions import Program
from spectrain_ext.numbers import Setting, Term

class Plan:
    """Validated lists of arrays, resolved once."""

    def __init__(
        self,
        lists: Sequence[tuple[int, str, bool, tuple[Any, ...]]],
        groups: Sequence[int],
        single: bool,
    ) -> None: ...
    def predict_(
        self,
        terms: Sequence[Sequence[Term]],
        eps: Sequence[float],
        stream: Any,
        program: Program | None = None,
    ) -> None: ...
    def predict(
        self,
        terms: Sequence[Sequence[Term]],
        eps: Sequence[float],
        out: int,
        stream: Any,
        program: Program | None = None,
    ) -> None: ...
    def stash_predict_(
        self,
        terms: Sequence[Sequence[Term]],
        eps: Sequence[float],
        stream: Any,
        program: Program | None = None,
    ) -> None: ...
    def extrapolate(
        self, steps: float, out: int, stream: Any, program: Program | None = None
    ) -> None: ...
    def stash(self, stream: Any) -> None: ...
    def restore_(self, stream: Any) -> None: ...
    def swap_(self, stream: Any) -> None: ...
    def write_out(self, out: int, stream: Any) -> None: ...
    def distance_scratch(self) -> int: ...
    def distances(self, result: int, scratch: int, stream: Any) -> None: ...
    def sgd_step_(
        self,
        settings: Sequence[Setting],
        with_momentum: bool,
        first_step: bool | Sequence[bool],
        predictions: Sequence[tuple[int, Sequence[Sequence[Term]]]],
        options: tuple[Any, Any, Any, bool, int | None] | None,
        stream: Any,
        program: Program | None = None,
    ) -> None: ...
    def adam_step_(
        self,
        settings: Sequence[Setting],
        predictions: Sequence[tuple[int, Sequence[Sequence[Term]]]],
        options: tuple[Any, Any, Any, bool, int | None] | None,
        stream: Any,
        program: Program | None = None,
    ) -> None: ...
    def keep(self, watch: bool) -> None: ...
    def pin_gradients(self) -> None: ...
    def refresh(self) -> None: ...
    def set_gradients(self, grads: tuple[Any, ...]) -> None: ...
    @property
    def n_outs(self) -> int: ...
    @property
    def n_groups(self) -> int: ...
    def last_launch(self) -> tuple[int, int]: ...

def all_plain(numbers: object) -> bool: ...
def build_info() -> dict[str, Any]: ...
def require_cuda() -> int: ...
def stream_handle(stream: Any) -> int: ...
