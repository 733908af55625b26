"""Rule: what the optimizers do not share, that is the numbers, the state and the kernel of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from spectrain_ext.operators.expressions import Scalar
from spectrain_ext.operators.laws import Horizon, Law, Linear, SecondOrder
from spectrain_ext.operators.lists import StepOptions
from spectrain_ext.operators.numbers import Adam, Sgd, Term
from spectrain_ext.operators.plan import Plan

Numbers = TypeVar("Numbers", Sgd, Adam)
Scalars = tuple[float, ...]


class Rule(ABC, Generic[Numbers]):
    """An update rule, without state of its own.

    Attributes:
        buffers: keys of the state that is shaped like the parameter, as torch.optim names them.
        columns: what ``Plan`` calls the lists of those buffers.
        scalars: the state that is one number per parameter, and its value before the first step.
        refused: flags of torch's that are not supported, and why.
        resting: stands for the numbers of parameters without state; their prediction is themselves.
    """

    buffers: ClassVar[tuple[str, ...]]
    columns: ClassVar[tuple[str, ...]]
    scalars: ClassVar[Mapping[str, float]] = {}
    refused: ClassVar[Mapping[str, str]] = {
        "differentiable": "the step writes behind autograd's back",
    }
    resting: Numbers

    def read(self, index: int, group: Mapping[str, Any]) -> Numbers:
        """Return the numbers of parameter group ``index``; ValueError or TypeError names it."""
        for flag, why in self.refused.items():
            if group.get(flag, False):
                raise ValueError(f"parameter group {index}: {flag}=True is not supported, {why}")
        try:
            return self.numbers(group)
        except (ValueError, TypeError) as error:
            raise type(error)(f"parameter group {index}: {error}") from error

    @abstractmethod
    def numbers(self, group: Mapping[str, Any]) -> Numbers:
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

    def terms(self, law: Law, numbers: Numbers) -> list[Term]:
        """Return the terms of a law under these numbers; ValueError where it has none."""
        return law.adam(numbers) if isinstance(numbers, Adam) else law.sgd(numbers)

    @abstractmethod
    def prepared(
        self,
        plan: Plan,
        numbers: Sequence[Numbers],
        first_step: bool | Sequence[bool],
        predict: Sequence[Horizon | None],
        options: StepOptions,
    ) -> Callable[[], None]:
        """Return what runs the kernel, with the numbers of every group: a native call, no more."""


@dataclass(frozen=True, slots=True)
class Resting:
    """A law under which parameters that were never updated stay as they are."""

    law: Law
    rule: Rule[Any]

    def sgd(self, numbers: Sgd) -> list[Term]:
        """Terms of the law, none for resting parameters."""
        return [] if numbers is self.rule.resting else self.law.sgd(numbers)

    def adam(self, numbers: Adam) -> list[Term]:
        """Terms of the law, none for resting parameters."""
        return [] if numbers is self.rule.resting else self.law.adam(numbers)


@dataclass(frozen=True, slots=True)
class PerGroup:
    """A law for each parameter group, of one kind, under the numbers of the group."""

    laws: tuple[Law, ...]

    def sgd(self, numbers: Sgd) -> list[Term]:
        """Terms of the first, which stands for all where the group does not matter."""
        return self.laws[0].sgd(numbers)

    def adam(self, numbers: Adam) -> list[Term]:
        """Terms of the first."""
        return self.laws[0].adam(numbers)


class ByNumbers:
    """The same once the numbers of all groups are there: each finds the law of its own group."""

    def __init__(self, law: PerGroup, numbers: Sequence[Any], groups: Sequence[int]) -> None:
        pairs = zip(numbers, groups, strict=True)
        self._laws = {id(n): law.laws[group] for n, group in pairs}

    def sgd(self, numbers: Sgd) -> list[Term]:
        """Terms of the law of the group that the numbers are of."""
        return self._laws[id(numbers)].sgd(numbers)

    def adam(self, numbers: Adam) -> list[Term]:
        """Terms of the law of the group that the numbers are of."""
        return self._laws[id(numbers)].adam(numbers)


_ANY = Sgd(1.0, 0.5)


def moves(law: Law) -> bool:
    """Tell whether a law predicts anything but the weights themselves."""
    return bool(law.sgd(_ANY))


def without_gradient(law: Law) -> Law:
    """Return the law for a parameter that has no gradient now: its momentum did not change."""
    return Linear(law.delay + law.lead) if isinstance(law, SecondOrder) else law


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
