"""What the native plan takes for a step or a prediction, from numbers and laws."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias, TypedDict, cast

from .expressions import Program, lower
from .laws import Horizons, Law, as_laws, terms_of
from .lists import StepOptions
from .numbers import Adam, Setting, Sgd, Term

Numbers: TypeAlias = Sequence[Sgd] | Sequence[Adam]  # of every parameter group
Terms: TypeAlias = list[list[Term]]  # of every parameter group
# Terms; Adam's eps of every parameter group; the program that computes both.
Prediction: TypeAlias = tuple[Terms, tuple[float, ...], Program | None]
# Settings; whether there is momentum; what is predicted into which out.
Step: TypeAlias = tuple[list[Setting], bool, list[tuple[int, Terms]]]

PLAIN = frozenset((float, int, bool, type(None)))
HORIZONS = PLAIN - {bool}


class SgdNumbers(TypedDict, total=False):
    """The numbers of SGD as keywords: fields of ``numbers.Sgd``."""

    lr: float
    momentum: float | None
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    decoupled_weight_decay: bool
    ema: bool


class AdamStep(StepOptions, total=False):
    """The numbers of Adam as keywords, fields of ``numbers.Adam``, beside a step's options."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    decoupled_weight_decay: bool
    maximize: bool
    momentum_decay: float | None
    mu_product: float


def prediction(groups: Numbers, laws: Sequence[Law]) -> Prediction:
    """A prediction without a step; ValueError where it needs the gradient."""
    terms = list(map(terms_of, laws, groups))
    for group in terms:
        for term in group:
            if term.gradient:
                raise ValueError(
                    "steps: a second-order prediction needs the gradient; let the step write it "
                    "(predict=)"
                )
    eps: tuple[float, ...] = ()
    if isinstance(groups[0], Adam):
        eps = tuple([numbers.eps for numbers in groups if isinstance(numbers, Adam)])
    (terms, eps), program = lower((terms, eps))
    return terms, eps, program


def step_arguments(groups: Numbers, predict: Sequence[Horizons | None]) -> Step:
    """A step that also predicts; ValueError where its numbers do not go together."""
    first = groups[0]
    with_momentum = True
    if isinstance(first, Sgd):
        with_momentum = first.momentum != 0.0
        for numbers in cast("Sequence[Sgd]", groups):
            if (numbers.momentum != 0.0) is not with_momentum:
                raise ValueError("momentum: expected it to be 0 in all groups, or in none")
    predictions: list[tuple[int, Terms]] = []
    for j, steps in enumerate(predict):
        if steps is not None:
            if not with_momentum:
                raise ValueError("predict: a prediction needs momentum > 0")
            laws = as_laws(steps, len(groups), f"predict[{j}]")
            predictions.append((j, list(map(terms_of, laws, groups))))
    return [numbers.setting() for numbers in groups], with_momentum, predictions


@lru_cache(maxsize=256)
def remembered_step(numbers: tuple[Any, ...], predict: tuple[Any, ...], n_groups: int) -> Step:
    """The same of plain numbers: a training loop gives the same ones at most of its steps."""
    return step_arguments([Sgd(*numbers)] * n_groups, predict)
