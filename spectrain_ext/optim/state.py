"""Update rules, and the layout of their state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spectrain_ext.operators.calls import Role
from spectrain_ext.operators.numbers import AdamNumbers, LionNumbers, SgdNumbers

Numbers = SgdNumbers | AdamNumbers | LionNumbers
Scalars = tuple[float, ...]
Group = Mapping[str, Any]
State = MutableMapping[Tensor, dict[str, Any]]

WEIGHT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
#: State that has another dtype than its weights: under 16 bits, and under float32.
STATE_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Rule:
    """An update rule: how a group is read, and which state of torch's it keeps."""

    numbers: Callable[[Group], Numbers]  # reads a group; step counts are those of the first step
    buffers: tuple[str, ...]  # keys of state shaped like the parameter, as in torch.optim
    columns: Mapping[str, Role]  # names and roles of those buffers that kernels use
    # State with one number per parameter, and its value before the first step: ``step``, then
    # ``mu_product``.
    scalars: Mapping[str, float]
    refused: Mapping[str, str]  # unsupported flags of torch, and the reason
    loose: tuple[str, ...] = ()  # keys of state of other shapes, which kernels do not use
    # For a rule of matrices: the key in its groups, and the rule of groups where that is False,
    # which has as many buffers and the same scalars.
    kind: str = ""
    rest: Rule | None = None

    def of(self, group: Group) -> Rule:
        """Return the rule of a parameter group."""
        return self if self.rest is None or group.get(self.kind, True) else self.rest

    @property
    def is_for_matrices(self) -> bool:
        """Whether its hyperparameters are a ``MatrixUpdate``."""
        return self.rest is not None

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.buffers, *self.scalars)

    @property
    def all_keys(self) -> tuple[str, ...]:
        """Keys for the parameters of any group, buffers first."""
        return self.keys if self.rest is None else (*self.buffers, *self.rest.keys, *self.loose)

    def read(self, index: int, group: Group) -> Numbers:
        """Return the hyperparameters of a group; ValueError or TypeError names its ``index``."""
        rule = self.of(group)
        for flag, why in rule.refused.items():
            if group.get(flag, False):
                raise ValueError(f"parameter group {index}: {flag}=True is not supported, {why}")
        try:
            return rule.numbers(group)
        except (ValueError, TypeError) as error:
            raise type(error)(f"parameter group {index}: {error}") from error

    def after(self, numbers: Numbers, scalars: Scalars) -> Scalars:
        """Return all scalars after one more step."""
        after: list[float] = []
        for key, value in zip(self.scalars, scalars, strict=True):
            if key == "mu_product" and isinstance(numbers, AdamNumbers):
                # In torch's precision of the product.
                product = torch.tensor(value, dtype=scalar_dtype(), device="cpu")
                after.append(product.mul_(numbers.mu(after[0])).item())
            else:
                after.append(value + 1.0)
        return tuple(after)

    def at(self, numbers: Numbers, scalars: Scalars) -> Numbers:
        """Return the hyperparameters of the step that led to these scalars."""
        if not isinstance(numbers, AdamNumbers):
            return numbers
        return numbers.at(int(scalars[0]), *scalars[1:])

    def rests(self, scalars: Scalars) -> bool:
        """Return whether state exists but no step has been made with it."""
        return "step" in self.scalars and scalars[0] < 1.0


def scalar_dtype() -> torch.dtype:
    """Return torch.optim's choice: float32 unless the default dtype is float64."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def rate_of(value: Any) -> Any:
    """Return a learning rate as a number, or as it is if it is on a device."""
    on_device = isinstance(value, torch.Tensor) and value.is_cuda and value.numel() == 1
    return value.detach() if on_device else plain(value, "lr")


def plain(value: Any, name: str) -> Any:
    """Return a number that may be given as a CPU tensor with one element."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1 or value.device.type != "cpu":
        # Reading from a device would synchronize at every step.
        raise ValueError(
            f"{name} must be a number or a CPU tensor with one element, got a tensor of shape "
            f"{tuple(value.shape)} on {value.device}"
        )
    return value.item()


def betas_of(group: Group) -> Any:
    return tuple(plain(beta, f"betas[{i}]") for i, beta in enumerate(group["betas"]))


def check_dtypes(where: str, weight: torch.dtype, state: torch.dtype | None) -> None:
    """Raise TypeError unless weights of this dtype can have state of that dtype."""
    if weight not in WEIGHT_DTYPES:
        raise TypeError(f"{where} must be float32, float64, float16 or bfloat16, got {weight}")
    if state is not None and not allowed(weight, state):
        known = [dtype for dtype in STATE_DTYPES if dtype != weight and allowed(weight, dtype)]
        raise TypeError(
            f"{where} is {weight}: its state can be {' or '.join(map(str, [weight, *known]))}, "
            f"got {state}"
        )


def allowed(weight: torch.dtype, state: torch.dtype) -> bool:
    """Return whether there are kernels for weights with such state."""
    if state == weight:
        return True
    pairs = weight.itemsize == 2, weight == torch.float32
    return any(p and state == s for p, s in zip(pairs, STATE_DTYPES, strict=True))


def loaded_dtype(
    weight: torch.dtype, saved: torch.dtype, wanted: torch.dtype | None
) -> torch.dtype:
    """Return the dtype of a loaded buffer: the wanted one, else one that loses nothing."""
    if wanted is not None and allowed(weight, wanted):
        return wanted
    return saved if weight.itemsize == 2 and allowed(weight, saved) else weight


def warn_of_conversion(saved: torch.dtype, now: torch.dtype) -> None:
    """Warn that loaded state gains or loses bits, between float32 and bfloat16."""
    if saved != now and torch.bfloat16 in (saved, now) and torch.float32 in (saved, now):
        warnings.warn(
            f"the saved moments are {saved}, those of this optimizer {now}: they are converted; "
            f"state_dtype={saved} keeps them as they were saved",
            stacklevel=3,
        )


def empty_like(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(weight.shape, weight.stride(), dtype=dtype, device=weight.device)


def fits(weight: Tensor, buffer: Tensor) -> bool:
    """Return whether kernels can use ``buffer`` for ``weight`` without conversion."""
    return (
        buffer.shape == weight.shape
        and buffer.stride() == weight.stride()
        and buffer.device == weight.device
        and buffer.layout == torch.strided
        and allowed(weight.dtype, buffer.dtype)
    )


def converted(weight: Tensor, buffer: Tensor, dtype: torch.dtype) -> Tensor:
    return empty_like(weight, dtype).copy_(buffer.detach())


def laid_out_as(weight: Tensor, state: Any) -> Any:
    """Return state of the parameter's shape with its strides, and other state unchanged."""
    # torch's fused kernels ignore strides and walk memory in order.
    if not isinstance(state, Tensor) or state.shape != weight.shape or state.is_sparse:
        return state
    strides = torch.empty_like(weight, device="meta").stride()
    if state.stride() == strides:
        return state
    made = torch.empty_strided(state.shape, strides, dtype=state.dtype, device=state.device)
    return made.copy_(state.detach())


def named(groups: Sequence[Group]) -> list[tuple[str, Tensor]]:
    """Return every parameter with a name for error messages."""
    return [
        (f"parameter {i} of group {index}", p)
        for index, group in enumerate(groups)
        for i, p in enumerate(group["params"])
    ]


def ruled(rule: Rule, groups: Sequence[Group]) -> list[tuple[str, Tensor, Rule]]:
    """Return every parameter with a name and its rule."""
    rules = [rule.of(group) for group in groups for _ in group["params"]]
    return [(where, p, each) for (where, p), each in zip(named(groups), rules, strict=True)]


def read_entry(
    where: str, rule: Rule, p: Tensor, entry: Mapping[str, Any]
) -> tuple[tuple[Tensor, ...], Scalars] | None:
    """Return the buffers and scalars in ``entry``, or None if the parameter was never updated."""
    missing = [key for key in rule.keys if entry.get(key) is None]
    if len(missing) == len(rule.keys):
        return None
    if missing:
        raise ValueError(f"{where}: the state has no {missing[0]}")
    for key in rule.buffers:
        buffer = entry[key]
        if not isinstance(buffer, Tensor):
            raise TypeError(f"{where}: {key} must be a tensor, got {type(buffer).__name__}")
        if buffer.shape != p.shape:
            raise ValueError(
                f"{where}: {key} must have shape {tuple(p.shape)}, got {tuple(buffer.shape)}"
            )
    scalars = []
    for key in rule.scalars:
        try:  # a number, or a tensor on any device
            scalars.append(float(entry[key]))
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{where}: {key} must be one number, got {entry[key]!r}") from error
    return tuple(entry[key] for key in rule.buffers), tuple(scalars)


def independent(entry: Any, keys: Sequence[str]) -> Any:
    if not isinstance(entry, dict):
        return entry
    return {
        key: value.detach().clone() if key in keys and isinstance(value, Tensor) else value
        for key, value in entry.items()
    }
