"""Translates the arguments of a call for the native plan: arrays, hyperparameters and laws."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from typing import Any, Protocol, TypeAlias, TypedDict, cast

import torch
from torch import Tensor

from spectrain_ext import _C
from spectrain_ext._C import Role as Role

from .laws import Law, after_first_step, terms_of
from .numbers import Hyperparameters, Setting, SgdNumbers, Source, Term

# Arrays.


class SupportsDLPack(Protocol):
    """An array of any framework with DLPack: CuPy, NumPy, JAX."""

    def __dlpack__(self, *, stream: Any = ...) -> Any:
        """Return a capsule that describes the array's memory."""


Array: TypeAlias = "Tensor | SupportsDLPack"
Tensors: TypeAlias = "Array | Sequence[Array]"
Written: TypeAlias = Tensors  # by the operator that takes them
Gradients: TypeAlias = "Array | Sequence[Array | None] | None"

_DLPACK_CUDA = 2  # kDLCUDA


class StepOptions(TypedDict, total=False):
    """Options of a step, see `sgd_step_`; None means absent."""

    # csrc/bindings/options.cpp reads them by these names.
    grad_scale: Array | None
    found_inf: Array | None
    clip_factor: Array | None
    zero_grad: bool
    rounding_seed: int | None


def is_array(value: object) -> bool:
    """Return whether an argument is one array and not a sequence of arrays."""
    if isinstance(value, (list, tuple)):  # the common cases first: they need no further check
        return False
    return isinstance(value, Tensor) or hasattr(value, "__dlpack__")


def framework_of(array: object) -> str:
    """Return "numpy" or "cupy" for their arrays and subclasses, else an empty string."""
    for base in type(array).__mro__:
        framework = base.__module__.partition(".")[0]
        if framework in ("numpy", "cupy"):
            return framework
    return ""


def device_of(array: Any) -> torch.device:
    """Return the device of an array of any framework."""
    if isinstance(array, Tensor):
        return array.device
    kind, index = array.__dlpack_device__()
    return torch.device("cuda", index) if kind == _DLPACK_CUDA else torch.device("cpu")


class Lists:
    """The array arguments of one call: all single arrays, or all sequences."""

    def __init__(self, params: object, name: str, *, writes: bool) -> None:
        self.single = is_array(params)
        if not self.single and (isinstance(params, str) or not isinstance(params, Iterable)):
            raise TypeError(
                f"{name}: expected a tensor or a sequence of tensors, got {type(params).__name__}"
            )
        self._first = name
        self.params: tuple[object, ...] = self.tuple_of(params)
        self._lists = [(Role.PARAMS, name, writes, self.params)]
        self._stepped: list[bool] | None = None  # in a step: which tensors have a gradient

    def tuple_of(self, value: object) -> tuple[object, ...]:
        return (value,) if self.single else tuple(value)  # type: ignore[arg-type]

    def add(self, role: Role, name: str, value: object, *, writes: bool) -> None:
        one = is_array(value) or not isinstance(value, Iterable)
        if one is not self.single:
            kind = "one tensor" if self.single else "a sequence of tensors"
            raise TypeError(
                f"{name}: expected {kind}, like {self._first}, got {type(value).__name__}"
            )
        arrays = self.tuple_of(value)
        self._lists.append((role, name, writes, arrays))
        if role is Role.GRADS:
            self._stepped = [grad is not None for grad in arrays]

    def bump(self, untouched: Role | None = None) -> None:
        """Bump the version counters of written tensors, except those of the `untouched` role."""
        written: list[object] = []
        for role, _, writes, arrays in self._lists:
            if not writes or role is untouched:
                continue
            if self._stepped is None or role is Role.OUT:
                written += arrays
            else:  # a step does not write tensors without a gradient
                written += compress(arrays, self._stepped)
        bump_versions(written)

    def plan(self, groups: Sequence[int] = ()) -> _C.Plan:
        """Validate all arguments and build a native plan; `groups`: of every tensor, if several."""
        if groups and max(groups) >= _C.MAX_GROUPS:
            raise ValueError(f"groups: expected at most {_C.MAX_GROUPS}, got {max(groups) + 1}")
        return _C.Plan(self._lists, groups, self.single)


def current(stream: Any, device: torch.device | None) -> AbstractContextManager[object]:
    # Memory that torch allocates for another stream may still be in use when this one writes it.
    if stream is None or device is None or device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch_stream(_C.stream_handle(stream), device))


def torch_stream(handle: int, device: torch.device | int) -> torch.cuda.Stream:
    if handle == 0:  # ExternalStream(0) is a new stream, unknown to torch's allocator
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device)


def bytes_for(n: int, device: int, handle: int) -> Tensor:
    """Return device memory for work on a stream (csrc/bindings/memory.cpp)."""
    with torch.cuda.stream(torch_stream(handle, device)):
        return torch.empty(n, dtype=torch.uint8, device=torch.device("cuda", device))


def bump_versions(arrays: Iterable[object]) -> None:
    """Bump autograd's version counters of tensors that were written in place."""
    tensors = [array for array in arrays if isinstance(array, Tensor)]
    if not tensors:
        return
    try:
        torch.autograd.graph.increment_version(tensors)
    except RuntimeError:  # inference tensors have no version counter
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


# Numbers.

Numbers: TypeAlias = Sequence[Hyperparameters]  # of every parameter group
Terms: TypeAlias = list[list[Term]]  # of every parameter group
Sources: TypeAlias = tuple[Source, ...] | None  # of every group; None: no group reads memory
# The first arguments of a native plan's `predict`: operation, terms, eps of every parameter group,
# numbers in memory.
Prediction: TypeAlias = tuple[str, Terms, tuple[float, ...], Sources]
# Those of its `step`: operation, settings, outputs with the terms of their predictions, sources.
Step: TypeAlias = tuple[str, list[Setting], list[tuple[int, Terms]], Sources]


def prediction(groups: Numbers, laws: Sequence[Law]) -> Prediction:
    """Translate a prediction without a step; ValueError if it needs the gradient."""
    terms = list(map(terms_of, laws, groups))
    for group in terms:
        for term in group:
            if term.gradient or term.gradient_per_lr:
                raise ValueError(
                    "steps: a second-order prediction needs the gradient; let the step write it "
                    "(predict=)"
                )
    # Rules that divide by a root have one.
    eps = tuple([getattr(each, "eps", 0.0) for each in groups])
    return f"{groups[0].rule}_predict", terms, eps, _sources(groups)


def _sources(groups: Numbers) -> Sources:
    sources = tuple([each.source() for each in groups])
    return sources if any(sources) else None


def step_arguments(
    groups: Numbers,
    predict: Sequence[Sequence[Law] | None],  # for every output, by group; None: is not written
    first_step: bool = False,
) -> Step:
    """Translate a step with predictions; ValueError for inconsistent hyperparameters."""
    operation = groups[0].operation
    for numbers in groups[1:]:
        if numbers.operation != operation:
            raise ValueError("momentum: expected it to be 0 in all groups, or in none")
    predictions: list[tuple[int, Terms]] = []
    for j, laws in enumerate(predict):
        if laws is not None:
            if not groups[0].has_momentum:
                raise ValueError("predict: a prediction needs momentum > 0")
            if first_step:
                laws = list(map(after_first_step, laws, cast("Sequence[SgdNumbers]", groups)))
            predictions.append((j, list(map(terms_of, laws, groups))))
    return operation, [each.setting() for each in groups], predictions, _sources(groups)
