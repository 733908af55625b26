"""Rule: what the optimizers do not share: the numbers of a parameter group, and the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from spectrain_ext import _C
from spectrain_ext.operators.corrections import Correction, StepCorrection
from spectrain_ext.operators.expressions import Scalar
from spectrain_ext.operators.laws import Law, terms_of
from spectrain_ext.operators.numbers import Adam, Sgd, Term

Numbers = Sgd | Adam
Scalars = tuple[float, ...]
Group = Mapping[str, Any]
Kinds = tuple[bool, ...]  # of every group: whether its rule uses the buffers now

_REMEMBERED = 8  # laws that were found good: a training loop asks for the same few every time
REFUSED = {"differentiable": "the step writes behind autograd's back"}
_IMMUTABLE = (float, int, str, type(None))


@dataclass(frozen=True, eq=False)
class Rule:
    """An update rule.

    Attributes:
        numbers: those of a parameter group, before its first step where that matters.
        buffers: keys of the state that is shaped like the parameter, as torch.optim names them.
        columns: what ``Plan`` calls the lists of those buffers.
        scalars: the state that is one number per parameter, and its value before the first step:
            ``step`` before ``mu_product``, and ``gap_step``, the steps that an average has taken.
        refused: flags of torch's that are not supported, and why.
    """

    numbers: Callable[[Group], Numbers]
    buffers: tuple[str, ...]
    columns: tuple[str, ...]
    scalars: Mapping[str, float]
    refused: Mapping[str, str]

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.buffers, *self.scalars)

    def with_average(self, buffers: tuple[str, ...]) -> Rule:
        """The rule with the state of a correction that averages, behind its own."""
        return replace(
            self,
            buffers=(*self.buffers, *buffers),
            columns=(*self.columns, "gap_averages"),
            scalars={**self.scalars, "gap_step": 0.0},
        )

    def read(self, index: int, group: Group) -> Numbers:
        """The numbers of parameter group ``index``; ValueError or TypeError names it."""
        for flag, why in self.refused.items():
            if group.get(flag, False):
                raise ValueError(f"parameter group {index}: {flag}=True is not supported, {why}")
        try:
            return self.numbers(group)
        except (ValueError, TypeError) as error:
            raise type(error)(f"parameter group {index}: {error}") from error

    def after(self, numbers: Numbers, scalars: Scalars) -> Scalars:
        """What all scalars are after one more step."""
        after: list[float] = []
        for key, value in zip(self.scalars, scalars, strict=True):
            if key == "mu_product" and isinstance(numbers, Adam):
                # In the precision that torch keeps the product in.
                product = torch.tensor(value, dtype=scalar_dtype(), device="cpu")
                after.append(product.mul_(numbers.mu(after[0])).item())
            else:
                after.append(value + 1.0)
        return tuple(after)

    def at(self, numbers: Numbers, scalars: Scalars) -> Numbers:
        """The numbers of the step that led to these scalars."""
        if isinstance(numbers, Sgd):
            return numbers
        if numbers.momentum_decay is None:
            return replace(numbers, step=int(scalars[0]))
        return replace(numbers, step=int(scalars[0]), mu_product=scalars[1])

    def rests(self, scalars: Scalars) -> bool:
        """Whether no step has been made with state of these scalars, which was made in advance."""
        return "step" in self.scalars and scalars[0] < 1.0


class Templates:
    """The numbers of every parameter group as a rule reads them, and what they allow.

    Asking costs a comparison while the groups are as they were. A value that may change in place,
    such as a learning rate in a tensor, is read every time.

    Attributes:
        kinds: of every group, whether its rule uses the buffers.
    """

    def __init__(self, rule: Rule, correction: Correction | None = None) -> None:
        self._rule = rule
        self.correction = correction
        self._seen: tuple[tuple[Any, ...], ...] | None = None
        self._numbers: list[Any] = []
        self._good: list[tuple[tuple[Law, ...], bool]] = []
        self.kinds: Kinds = ()

    def of(self, groups: Sequence[Group]) -> list[Any]:
        """The numbers of every group, the same list while nothing has changed."""
        if self._seen is None or not _C.same(groups, self._seen):
            self._seen = None
            self._numbers = [self._rule.read(index, group) for index, group in enumerate(groups)]
            if isinstance(self.correction, StepCorrection):
                self._numbers = list(map(self._corrected, range(len(groups)), self._numbers))
            self._good = []
            self.kinds = tuple([numbers.has_momentum for numbers in self._numbers])
            if self.correction is not None and self.correction.buffers:
                self.check_momentum(groups, f"{self.correction} averages the momentum")
            if all(map(_stays, groups)):
                self._seen = tuple(tuple(group.values()) for group in groups)
        return self._numbers

    def _corrected(self, index: int, numbers: Any) -> Any:
        corrected = replace(numbers, correction=self.correction)
        try:
            step = corrected.setting()[-1]
        except ValueError as error:
            raise ValueError(f"parameter group {index}: {error}") from error
        if not isinstance(step, Term):
            raise TypeError(
                f"parameter group {index}: {self.correction}: expected a step as a Term, such as "
                f"numbers.term(), got {step!r}"
            )
        return corrected

    def check(self, groups: Sequence[Group], laws: tuple[Law, ...], has_gradient: bool) -> None:
        """Raise ValueError unless the groups, as they were read last, go with their laws."""
        if (laws, has_gradient) in self._good:
            return
        for index, (law, numbers) in enumerate(zip(laws, self._numbers, strict=True)):
            terms = terms_of(law, numbers)
            if terms:
                self.check_momentum(groups, only=index)
            if not has_gradient and any(term.gradient for term in terms):
                raise ValueError(
                    f"steps: {law} needs the gradient; order it with write_with_next_step"
                )
        self._good[_REMEMBERED:] = []
        self._good.insert(0, (laws, has_gradient))

    def check_momentum(
        self,
        groups: Sequence[Group],
        why: str = "a prediction needs a momentum buffer",
        only: int | None = None,
    ) -> None:
        """Raise ValueError for the first group, or this one, whose parameters have no momentum."""
        for index in range(len(groups)) if only is None else (only,):
            if groups[index]["params"] and not self.kinds[index]:
                raise ValueError(f"parameter group {index} has momentum 0: {why}")


def _stays(group: Group) -> bool:
    for key, value in group.items():
        inside = value if type(value) is tuple else (value,)
        if key != "params" and not all(isinstance(v, _IMMUTABLE) for v in inside):
            return False
    return True


def scalar_dtype() -> torch.dtype:
    """torch.optim's choice: float32 unless the default is float64."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def rate(value: Any) -> Any:
    """A learning rate: a number, or what a kernel on its device reads when it runs."""
    if isinstance(value, torch.Tensor) and value.is_cuda and value.numel() == 1:
        return Scalar(value.detach())
    return plain(value, "lr")


def plain(value: Any, name: str) -> Any:
    """A number that a group may hold as a CPU tensor with one element."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1 or value.device.type != "cpu":
        # Reading a number from a device would make the host wait for it at every step.
        raise ValueError(
            f"{name} must be a number or a CPU tensor with one element, got a tensor of shape "
            f"{tuple(value.shape)} on {value.device}"
        )
    return value.item()
