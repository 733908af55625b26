"""What the native plan takes for a step or a prediction, from numbers and laws."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from .laws import Horizon, Law, as_law
from .numbers import Setting, Sgd, Term

Terms: TypeAlias = list[list[Term]]  # of every parameter group
# settings, whether there is momentum, predictions: what the native step takes
SgdArguments: TypeAlias = tuple[list[Setting], bool, list[tuple[int, Terms]]]

PLAIN = frozenset((float, int, bool, type(None)))


def sgd_terms(law: Law, numbers: Sgd) -> list[Term]:
    """The terms of a law under SGD, which is at most one."""
    terms = law.sgd(numbers)
    if len(terms) > 1:
        raise ValueError(f"steps: expected at most one term under SGD, {law} gave {len(terms)}")
    return terms


def refuse_gradient(terms: Terms) -> None:
    """Raise ValueError where a prediction without a step needs the gradient."""
    if any(term.gradient for group in terms for term in group):
        raise ValueError(
            "steps: a second-order prediction needs the gradient; let the step write it (predict=)"
        )


def sgd_arguments(groups: Sequence[Sgd], predict: Sequence[Horizon | None]) -> SgdArguments:
    """The arguments of a step; raises ValueError where they do not go together."""
    with_momentum = groups[0].momentum != 0.0
    for numbers in groups:
        if (numbers.momentum != 0.0) is not with_momentum:
            raise ValueError("momentum: expected it to be 0 in all groups, or in none")
    predictions = []
    for j, steps in enumerate(predict):
        if steps is None:
            continue
        if not with_momentum:
            raise ValueError("predict: a prediction needs momentum > 0")
        law = as_law(steps, f"predict[{j}]")
        predictions.append((j, [sgd_terms(law, numbers) for numbers in groups]))
    return [numbers.setting() for numbers in groups], with_momentum, predictions


@lru_cache(maxsize=256)
def remembered_sgd(
    numbers: tuple[Any, ...], predict: tuple[Any, ...], n_groups: int
) -> SgdArguments:
    """The same of plain numbers: a training loop gives the same ones at most of its steps."""
    return sgd_arguments([Sgd(*numbers)] * n_groups, predict)
