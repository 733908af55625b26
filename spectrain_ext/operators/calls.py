"""Translates the arguments of a call for the native plan: arrays, hyperparameters and laws."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import compress
from typing import Any, Protocol, TypeAlias, TypedDict, cast

import torch
from torch import Tensor

from spectrain_ext import _C
from spectrain_ext._C import Role as Role

from .laws import Horizons, Law, Linear, after_first_step, as_laws, terms_of
from .numbers import (
    Adam,
    Hyperparameters,
    Rate,
    Setting,
    Sgd,
    Term,
    horizon,
    learning_rate,
    non_negative,
)

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


#: By the name of an argument, of a plan or a step.
ROLES = {
    "momentum_buffers": Role.MOMENTUM,
    "exp_avgs": Role.MOMENTUM,
    "exp_avg_sqs": Role.SECOND,
    "grads": Role.GRADS,
    "stashed": Role.STASHED,
}


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

    def like(self, i: int, stream: Any) -> Any:
        """Return a new array like one of the first argument's, allocated for use on the stream."""
        value = self.params[i]
        if isinstance(value, Tensor):
            with current(stream, value.device):
                return torch.empty_like(value)
        framework = framework_of(value)
        if framework == "numpy":  # a plain array, even for memory-mapped ones
            return cast(Any, sys.modules["numpy"]).empty_like(value, subok=False)
        if framework == "cupy":
            cupy = cast(Any, sys.modules["cupy"])
            if stream is None:
                return cupy.empty_like(value)
            with cupy.cuda.ExternalStream(_C.stream_handle(stream)):
                return cupy.empty_like(value)
        place = self._first if self.single else f"{self._first}[{i}]"
        raise TypeError(
            f"{place}: expected a tensor, or a NumPy or CuPy array, where out is None; "
            f"got {type(value).__name__}"
        )

    def plan(self, groups: Sequence[int] | None = None) -> _C.Plan:
        """Validate all arguments and build a native plan."""
        return _C.Plan(self._lists, self._checked_groups(groups), self.single)

    def _checked_groups(self, groups: Sequence[int] | None) -> Sequence[int]:
        if groups is None:
            return ()
        if isinstance(groups, str) or not isinstance(groups, Iterable):
            raise TypeError(f"groups: expected a sequence of indices, got {groups!r}")
        indices = tuple(groups)
        if len(indices) != len(self.params):
            raise ValueError(
                f"groups: expected one entry per tensor, {len(self.params)}, got {len(indices)}"
            )
        for i, index in enumerate(indices):
            if isinstance(index, bool) or not hasattr(index, "__index__"):
                raise TypeError(f"groups[{i}]: expected an index, got {index!r}")
            if not 0 <= index < _C.MAX_GROUPS:
                raise ValueError(f"groups[{i}]: expected 0 to {_C.MAX_GROUPS - 1}, got {index}")
        return indices


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


def bump_versions(*lists: Sequence[object]) -> None:
    """Bump autograd's version counters of tensors that were written in place."""
    tensors = [t for arrays in lists for t in arrays if isinstance(t, Tensor)]
    if not tensors:
        return
    try:
        torch.autograd.graph.increment_version(tensors)
    except RuntimeError:  # inference tensors have no version counter
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


# Numbers.

Numbers: TypeAlias = Sequence[Hyperparameters]  # of every parameter group
Terms: TypeAlias = list[list[Term]]  # of every parameter group
Rates: TypeAlias = tuple[Tensor | None, ...] | None  # of every group that has one in memory
# The first arguments of a native plan's `predict`: operation, terms, Adam's eps of every parameter
# group, learning rates in memory.
Prediction: TypeAlias = tuple[str, Terms, tuple[float, ...], Rates]
# Those of its `step`: operation, settings, outputs with the terms of their predictions, rates.
Step: TypeAlias = tuple[str, list[Setting], list[tuple[int, Terms]], Rates]
_PLAIN = frozenset((float, int, bool, type(None)))
_HORIZONS = _PLAIN - {bool}
_OF_CALLS = ("predict", "stream", "first_step")  # keywords that are no hyperparameters


class SgdNumbers(TypedDict, total=False):
    """SGD's hyperparameters as keywords: fields of ``numbers.Sgd``."""

    lr: float
    momentum: float | None
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    decoupled_weight_decay: bool
    smoothed: bool


class StepCall(StepOptions, total=False):
    """Keywords of a plan's step under every rule."""

    predict: Sequence[Horizons | None]
    stream: Any


class SgdStep(SgdNumbers, StepCall, total=False):
    """Keywords of a plan's step of SGD."""

    first_step: bool | Sequence[bool]


class AdamStep(StepCall, total=False):
    """Keywords of a plan's step of Adam: fields of ``numbers.Adam``."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    decoupled_weight_decay: bool
    maximize: bool
    momentum_decay: float | None
    mu_product: float


def sgd_prediction(
    n_groups: int,
    steps: Horizons,
    lr: float,
    momentum: float | None = None,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    dampening: float = 0.0,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
    smoothed: bool = False,
) -> Prediction:
    """Translate a prediction under SGD with the same hyperparameters for all groups."""
    rate = learning_rate(lr)
    if type(weight_decay) is not float:
        weight_decay = non_negative("weight_decay", weight_decay)
    plain = momentum is None and not weight_decay and not nesterov
    if plain and type(rate) is float and isinstance(steps, (int, float)):  # made fast
        distance = rate * horizon("steps", steps)
        return "sgd_predict", [[Term(1.0, distance)] if distance else []] * n_groups, (), None
    laws = as_laws(steps, n_groups)
    if momentum is None:
        for law in laws:
            if not isinstance(law, Linear):
                raise ValueError(f"momentum: {law} needs it")
        momentum = 1.0
    more = nesterov, maximize, decoupled_weight_decay, smoothed
    return prediction([Sgd(rate, momentum, dampening, weight_decay, *more)] * n_groups, laws)


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
    eps: tuple[float, ...] = ()
    if isinstance(groups[0], Adam):
        eps = tuple([numbers.eps for numbers in cast("Sequence[Adam]", groups)])
    return f"{groups[0].rule}_predict", terms, eps, _rates(groups)


def _rates(groups: Numbers) -> Rates:
    rates = tuple(
        each.lr.tensor if isinstance(each, Sgd) and isinstance(each.lr, Rate) else None
        for each in groups
    )
    return None if rates.count(None) == len(rates) else rates


class Row:
    """An operator's arguments, as its function declares them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__.removeprefix("_")
        self.parameters = inspect.signature(function).parameters
        every = self.parameters.items()
        self.positional = [name for name, p in every if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.lists = [name for name in self.positional if name != "out"]
        self.optional = {name for name, p in every if p.annotation == "Written | None"}  # lists
        self.keywords = {name: p for name, p in every if p.kind is p.KEYWORD_ONLY}


class StepRow(Row):
    """The arguments of a step of an update rule."""

    def __init__(self, rule: type[Hyperparameters], function: Callable[..., None]) -> None:
        super().__init__(function)
        self.rule = rule
        numbers = {name: p for name, p in self.keywords.items() if name not in _OF_CALLS}
        self.required = [name for name, p in numbers.items() if p.default is p.empty]
        self.numbers = frozenset(numbers)  # the rule's hyperparameters
        self.takes_first_step = "first_step" in self.keywords
        self.counts = "step" in numbers  # no step has the numbers of the one before

    def split(self, keywords: dict[str, Any]) -> tuple[dict[str, Any], StepOptions]:
        """Return the hyperparameters among keyword arguments, and the rest, a step's options."""
        if keywords.keys() <= self.numbers:  # the common case first
            return keywords, {}
        others = [name for name in keywords if name not in self.numbers]
        options = {name: keywords.pop(name) for name in others}
        return keywords, cast(StepOptions, options)

    def arguments(
        self,
        numbers: dict[str, Any],
        n_groups: int,
        predict: Sequence[Horizons | None],
        first_step: bool | Sequence[bool] = False,
    ) -> Step:
        """Translate a step with the same hyperparameters for all groups."""
        if (
            not self.counts
            and _PLAIN.issuperset(map(type, numbers.values()))
            and (len(predict) == 0 or _HORIZONS.issuperset(map(type, predict)))
        ):
            return _remembered_step(self, tuple(numbers.items()), tuple(predict), n_groups)
        return step_arguments([self.hyperparameters(numbers)] * n_groups, predict, first_step)

    def hyperparameters(self, numbers: dict[str, Any]) -> Hyperparameters:
        for name in self.required:
            if name not in numbers:
                raise TypeError(f"{name}: {self.name} needs it, or groups, which have their own")
        return self.rule(**numbers)


@lru_cache(maxsize=256)
def _remembered_step(
    row: StepRow, numbers: tuple[Any, ...], predict: tuple[Any, ...], n_groups: int
) -> Step:
    """Cache plain numbers: most steps of a training loop have the same ones."""
    return step_arguments([row.hyperparameters(dict(numbers))] * n_groups, predict)


def step_arguments(
    groups: Numbers, predict: Sequence[Horizons | None], first_step: bool | Sequence[bool] = False
) -> Step:
    """Translate a step with predictions; ValueError for inconsistent hyperparameters."""
    operation = groups[0].operation
    for numbers in groups[1:]:
        if numbers.operation != operation:
            raise ValueError("momentum: expected it to be 0 in all groups, or in none")
    predictions: list[tuple[int, Terms]] = []
    for j, steps in enumerate(predict):
        if steps is not None:
            if not groups[0].has_momentum:
                raise ValueError("predict: a prediction needs momentum > 0")
            laws = as_laws(steps, len(groups), f"predict[{j}]")
            if first_step is not False:
                plain, laws = laws, list(map(after_first_step, laws, cast("Sequence[Sgd]", groups)))
                if first_step is not True and laws != plain:
                    raise ValueError(
                        "first_step: expected the same for all tensors, since predict= has a "
                        "second-order prediction and the first step is without dampening and "
                        "averaging; step the others in a call of their own"
                    )
            predictions.append((j, list(map(terms_of, laws, groups))))
    return operation, [each.setting() for each in groups], predictions, _rates(groups)


def first_steps(first_step: bool | Sequence[bool], n: int) -> bool | list[bool]:
    """Check the flags of n tensors and return one for all, or each where they differ."""
    if isinstance(first_step, bool):
        return first_step
    given = list(first_step) if isinstance(first_step, Iterable) else [""]
    if not all(hasattr(type(flag), "__bool__") for flag in given):  # strings have none
        raise TypeError(f"first_step: expected a bool or a sequence of bools, got {first_step!r}")
    flags = [bool(flag) for flag in given]
    if len(flags) != n:
        raise ValueError(
            f"first_step: expected a bool or one for each of the {n} tensors, got {len(flags)}"
        )
    return flags if any(flags) and not all(flags) else any(flags)
