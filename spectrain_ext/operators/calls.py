"""What the native plan takes for a step or a prediction, from numbers and laws."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias, TypedDict, cast

from .expressions import Program, lower
from .laws import Horizons, Law, as_laws, needs_momentum, terms_of
from .lists import StepOptions
from .numbers import Adam, Setting, Sgd, Term, horizon, non_negative

Numbers: TypeAlias = Sequence[Sgd] | Sequence[Adam]  # of every parameter group
Terms: TypeAlias = list[list[Term]]  # of every parameter group
# Terms; Adam's eps of every parameter group; the program that computes both.
Prediction: TypeAlias = tuple[Terms, tuple[float, ...], Program | None]
# Settings; whether there is momentum; what is predicted into which out.
Step: TypeAlias = tuple[list[Setting], bool, list[tuple[int, Terms]]]
SgdRow: TypeAlias = tuple[Any, Any, float, float, bool, bool, bool, bool]  # `Sgd` takes it


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


_PLAIN = frozenset((float, int, bool, type(None)))
_HORIZONS = _PLAIN - {bool}


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
    ema: bool = False,
) -> Prediction:
    """A prediction under SGD with the same numbers for all groups."""
    rate = non_negative("lr", lr)
    if type(weight_decay) is not float:
        weight_decay = non_negative("weight_decay", weight_decay)
    plain = momentum is None and not weight_decay and not nesterov
    if plain and isinstance(steps, (int, float)):  # the common case, without a detour
        distance = rate * horizon("steps", steps)
        terms = [[Term(1.0, distance)] if distance else []] * n_groups
        if type(distance) is float:
            return terms, (), None
        terms, program = lower(terms)
        return terms, (), program
    laws = as_laws(steps, n_groups)
    if momentum is None:
        for law in laws:
            if needs_momentum(law):
                raise ValueError(f"momentum: {law} needs it")
        momentum = 1.0
    more = nesterov, maximize, decoupled_weight_decay, ema
    return prediction([Sgd(rate, momentum, dampening, weight_decay, *more)] * n_groups, laws)


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


def step_arguments(
    groups: Numbers, predict: Sequence[Horizons | None]
) -> tuple[Step, Program | None]:
    """A step that also predicts; ValueError where its numbers do not go together."""
    return lower(_step(groups, predict))


def sgd_step_arguments(
    row: SgdRow, n_groups: int, predict: Sequence[Horizons | None]
) -> tuple[Step, Program | None]:
    """The same of SGD with the same numbers for all groups."""
    if _PLAIN.issuperset(map(type, row)) and (
        len(predict) == 0 or _HORIZONS.issuperset(map(type, predict))
    ):
        return _remembered_step(row, tuple(predict), n_groups), None
    return step_arguments([Sgd(*row)] * n_groups, predict)


@lru_cache(maxsize=256)
def _remembered_step(row: SgdRow, predict: tuple[Any, ...], n_groups: int) -> Step:
    """Plain numbers: a training loop gives the same ones at most of its steps."""
    return _step([Sgd(*row)] * n_groups, predict)


def _step(groups: Numbers, predict: Sequence[Horizons | None]) -> Step:
    with_momentum = True
    if isinstance(groups[0], Sgd):
        with_momentum = groups[0].momentum != 0.0
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
