"""Rule: what the optimizers do not share: the numbers of a parameter group, and the state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

import torch

from spectrain_ext import _C
from spectrain_ext.operators.corrections import Correction, StepCorrection
from spectrain_ext.operators.expressions import Scalar
from spectrain_ext.operators.laws import Law, terms_of
from spectrain_ext.operators.numbers import Adam, Sgd, Term

Numbers = TypeVar("Numbers", Sgd, Adam)
Scalars = tuple[float, ...]
Group = Mapping[str, Any]
Kinds = tuple[bool, ...]  # of every group: whether its rule uses the buffers now

_REMEMBERED = 8  # laws that were found good: a training loop asks for the same few every time
_IMMUTABLE = (float, int, str, type(None))


class Rule(ABC, Generic[Numbers]):
    """An update rule, without state of its own.

    Attributes:
        buffers: keys of the state that is shaped like the parameter, as torch.optim names them.
        columns: what ``Plan`` calls the lists of those buffers.
        scalars: the state that is one number per parameter, and its value before the first step.
        refused: flags of torch's that are not supported, and why.
    """

    buffers: ClassVar[tuple[str, ...]]
    columns: ClassVar[tuple[str, ...]]
    scalars: ClassVar[Mapping[str, float]] = {}
    refused: ClassVar[Mapping[str, str]] = {
        "differentiable": "the step writes behind autograd's back",
    }

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of all state."""
        return (*self.buffers, *self.scalars)

    def read(self, index: int, group: Group) -> Numbers:
        """Return the numbers of parameter group ``index``; ValueError or TypeError names it."""
        for flag, why in self.refused.items():
            if group.get(flag, False):
                raise ValueError(f"parameter group {index}: {flag}=True is not supported, {why}")
        try:
            return self.numbers(group)
        except (ValueError, TypeError) as error:
            raise type(error)(f"parameter group {index}: {error}") from error

    @abstractmethod
    def numbers(self, group: Group) -> Numbers:
        """Return the numbers of a group, before its first step where that matters."""

    def uses_buffers(self, numbers: Numbers) -> bool:
        """Tell whether a step with these numbers needs the buffers at all."""
        return True

    def advance(self, numbers: Numbers, scalars: Scalars) -> Scalars:
        """Return what the scalars are after one more step."""
        return scalars

    def at(self, numbers: Numbers, scalars: Scalars) -> Numbers:
        """Return the numbers of the step that led to these scalars."""
        return numbers

    def rests(self, scalars: Scalars) -> bool:
        """Tell whether state with these scalars is as it was before the first step."""
        return False

    def starts(self, numbers: Numbers) -> bool:
        """Tell whether a first step does other than go on from zero buffers."""
        return False


class Averaging(Rule[Any]):
    """A rule whose steps a correction with an average corrects: state beside the rule's own.

    Args:
        rule: the rule.
        buffers: keys of the average, one.
    """

    def __init__(self, rule: Rule[Any], buffers: tuple[str, ...]) -> None:
        self._own = rule
        vars(self).update(
            buffers=(*rule.buffers, *buffers),
            columns=(*rule.columns, "gap_averages"),
            scalars={**rule.scalars, "gap_step": 0.0},  # steps that the average has taken up
            refused=rule.refused,
        )

    def numbers(self, group: Group) -> Any:
        return self._own.numbers(group)

    def uses_buffers(self, numbers: Any) -> bool:
        return self._own.uses_buffers(numbers)

    def advance(self, numbers: Any, scalars: Scalars) -> Scalars:
        return (*self._own.advance(numbers, scalars[:-1]), scalars[-1] + 1.0)

    def at(self, numbers: Any, scalars: Scalars) -> Any:
        return self._own.at(numbers, scalars[:-1])

    def rests(self, scalars: Scalars) -> bool:
        return self._own.rests(scalars[:-1])

    def starts(self, numbers: Any) -> bool:
        return self._own.starts(numbers)


class Templates:
    """The numbers of every parameter group as a rule reads them, and what they allow.

    Asking costs a comparison while the groups are as they were. A value that may change in place,
    such as a learning rate in a tensor, is read every time.

    Args:
        rule: of the optimizer.
        correction: what every step has otherwise; None: nothing.

    Attributes:
        kinds: of every group, whether its rule uses the buffers.
    """

    def __init__(self, rule: Rule[Any], correction: Correction | None = None) -> None:
        self._rule = rule
        self.correction = correction
        self._seen: tuple[tuple[Any, ...], ...] | None = None
        self._numbers: list[Any] = []
        self._good: list[tuple[tuple[Law, ...], bool]] = []
        self.kinds: Kinds = ()

    def of(self, groups: Sequence[Group]) -> list[Any]:
        """Return the numbers of every group, the same list while nothing has changed.

        Raises ValueError or TypeError for a number out of range.
        """
        if self._seen is None or not _C.same(groups, self._seen):
            self._seen = None
            self._numbers = [self._rule.read(index, group) for index, group in enumerate(groups)]
            if isinstance(self.correction, StepCorrection):
                self._numbers = list(map(self._corrected, range(len(groups)), self._numbers))
            self._good = []
            self.kinds = tuple(map(self._rule.uses_buffers, self._numbers))
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
        """Raise ValueError unless every group, as it was read last, has the law that is for it."""
        if (laws, has_gradient) in self._good:
            return
        for index, (law, numbers) in enumerate(zip(laws, self._numbers, strict=True)):
            terms = terms_of(law, numbers)
            if terms:
                self.check_can_predict(groups, index)
            if not has_gradient and any(term.gradient for term in terms):
                raise ValueError(
                    f"steps: {law} needs the gradient; order it with write_with_next_step"
                )
        self._good[_REMEMBERED:] = []
        self._good.insert(0, (laws, has_gradient))

    def check_can_predict(self, groups: Sequence[Group], index: int) -> None:
        """Raise ValueError where the parameters of a group have no momentum."""
        if groups[index]["params"] and not self.kinds[index]:
            raise ValueError(
                f"parameter group {index} has momentum 0: a prediction needs a momentum buffer"
            )


def _stays(group: Group) -> bool:
    for key, value in group.items():
        inside = value if type(value) is tuple else (value,)
        if key != "params" and not all(isinstance(v, _IMMUTABLE) for v in inside):
            return False
    return True


def rate(value: Any) -> Any:
    """Return a learning rate: a number, or what a kernel on its device reads when it runs."""
    if isinstance(value, torch.Tensor) and value.is_cuda and value.numel() == 1:
        return Scalar(value.detach())
    return plain(value, "lr")


def plain(value: Any, name: str) -> Any:
    """Return a number that a group may hold as a CPU tensor with one element."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1 or value.device.type != "cpu":
        # Reading a number from a device would make the host wait for it at every step.
        raise ValueError(
            f"{name} must be a number or a CPU tensor with one element, got a tensor of shape "
            f"{tuple(value.shape)} on {value.device}"
        )
    return value.item()
