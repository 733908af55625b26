"""Makes steps and predictions of an optimizer's parameters on one device: one kernel launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, compress
from operator import attrgetter, is_
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from spectrain_ext import _C
from spectrain_ext.operators.calls import (
    Lists,
    Prediction,
    Role,
    StepOptions,
    prediction,
    step_arguments,
)
from spectrain_ext.operators.laws import Law, Linear, SecondOrder, after_first_step, terms_of
from spectrain_ext.operators.numbers import SgdNumbers, StepCount

from .parameter_table import Home, ParameterTable, Views
from .state import Scalars, State, empty_like

_STILL = Linear(0)  # for weights that were never updated
_gradient = attrgetter("grad")


class _Cohort(NamedTuple):
    """Parameters of one group with the same number of updates, so that they share coefficients."""

    group: int
    started: bool
    rows: list[int]


class Rows:
    """The rows of one kernel launch: parameters of one device and rule, resolved once.

    Attributes:
        params: the parameters.
        group: the index of the first one's group, for errors.
        in_place: whether all weights and state are where the native plan has them.
    """

    def __init__(
        self,
        table: ParameterTable,
        home: Home | None,
        positions: Sequence[int],  # in the table, ascending
        with_buffers: bool,  # whether the rule needs them
        outs: Views | None = None,  # where predictions are written
        *,
        stash: bool = False,  # for predictions in place
    ) -> None:
        self._table, self._positions = table, positions
        self.rule = table.rules[positions[0]]  # the same for all
        self._is_of_matrices = self.rule.is_for_matrices
        self.params = [table.params[i] for i in positions]
        self.group = table.groups[positions[0]]
        weights = self.params if home is None else [home.weights[p] for p in self.params]
        self._weights = [w.detach() for w in weights]  # aliases: they keep the storage alive
        self._buffers: list[tuple[Tensor, ...]] | None = None
        if with_buffers:
            self._buffers = list(zip(*map(table.buffers_of, positions), strict=True))
        self._stashed = [empty_like(p, p.dtype) for p in self.params] if stash else []
        # The plan holds raw addresses, but parameters can get new storage (``p.data = ...``,
        # ``module.to()``) and state new buffers. ``Stepper`` asks this before every use.
        self.in_place = _C.Watch((*weights, *chain.from_iterable(self._buffers or ()))).in_place

        keys = [
            (table.groups[i], table.buffers[i] is not None, table.scalars(i)) for i in positions
        ]
        index = {key: n for n, key in enumerate(dict.fromkeys(keys))}
        self._assignment = [index[key] for key in keys]
        self._cohorts = [_Cohort(*key[:2], []) for key in index]
        for row, n in enumerate(self._assignment):
            self._cohorts[n].rows.append(row)
        self._started = not with_buffers or all(cohort.started for cohort in self._cohorts)

        lists = Lists(self._weights, "params", writes=True)
        state = zip(self.rule.columns.items(), self._buffers or (), strict=False)
        for (name, role), column in state:
            lists.add(role, name, [buffer.detach() for buffer in column], writes=True)
        lists.add(Role.GRADS, "grads", [None] * len(self.params), writes=False)
        if stash:
            lists.add(Role.STASHED, "stashed", self._stashed, writes=True)
        if outs is not None:
            lists.add(Role.OUT, "outs[0]", [outs[p].detach() for p in self.params], writes=True)
        self._native = lists.plan(self._assignment)
        # This object keeps the memory alive and its owner checks the addresses. Checking them once
        # more takes a tenth of the host time of a step.
        self._native.keep(False)
        self._all_active = False
        self._active: list[bool] = []
        self._idle: tuple[list[bool], Rows] | None = None  # rows that are not active
        self._make_idle = partial(Rows, table, home, with_buffers=True, outs=outs)
        # Most steps of a training loop make the same native call, and preparing it took a third of
        # a small step of SGD. It serves again for the same list of numbers and an equal law; not if
        # step counts or a law's own numbers may have changed.
        self._step: Callable[..., None] | None = None
        self._step_of: tuple[Any, Law | None] | None = None
        self._after: list[Scalars] = []  # the scalar state of every cohort after the step
        self._prediction: Callable[[], None] | None = None
        self._prediction_of: tuple[Any, Law] | None = None
        self._replaced = False  # whether predictions have replaced the weights

    # Gradients.

    def read_gradients(self) -> None:
        """Pass the parameters' gradients to the plan and record which rows have one."""
        gradients = tuple(map(_gradient, self.params))
        try:
            self._all_active = self._native.set_gradients(gradients)
        except (TypeError, ValueError, RuntimeError):
            # A hook or the caller may set a gradient with another layout: copy it.
            fitted = tuple(map(self._fitted, range(len(gradients)), gradients))
            if all(map(is_, fitted, gradients)):
                raise
            self._all_active = self._native.set_gradients(fitted)
        if not self._all_active:
            self._active = [gradient is not None for gradient in gradients]

    def _fitted(self, row: int, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        weight = self._weights[row]
        name = f"the gradient of {self._table.names[self._positions[row]]}"
        if grad.layout != torch.strided:
            raise RuntimeError(f"{name} is sparse ({grad.layout}): a dense one is needed")
        if grad.shape != weight.shape:
            raise ValueError(
                f"{name} must have shape {tuple(weight.shape)}, got {tuple(grad.shape)}"
            )
        if grad.device != weight.device:
            raise ValueError(f"{name} must be on {weight.device}, got {grad.device}")
        if grad.is_complex() or torch.promote_types(grad.dtype, weight.dtype) != weight.dtype:
            raise TypeError(f"{name} must be {weight.dtype}, got {grad.dtype}")
        if grad.dtype == weight.dtype and grad.stride() == weight.stride() and not grad.is_neg():
            return grad
        return empty_like(weight, weight.dtype).copy_(grad.detach().resolve_neg())

    def updated(self) -> list[Tensor]:
        return self.params if self._all_active else list(compress(self.params, self._active))

    # Steps and predictions. `groups`: the hyperparameters of every parameter group.

    def prepare_step(
        self,
        groups: Sequence[Any],
        law: Law | None,  # for the outs; None: no outs
    ) -> None:
        """Prepare the update of rows that have a gradient; raises all errors of a step."""
        of = self._step_of
        # A kernel reads the count of a row with a gradient, of which others may be the first now.
        reads_any = self._all_active or not self._table.in_memory
        if of is not None and of[0] is groups and of[1] == law and reads_any:
            return
        rule, started = self.rule, self._buffers is not None
        before = [self._scalars(cohort) for cohort in self._cohorts]
        numbers: list[Any] = []
        self._after = []
        for cohort, scalars in zip(self._cohorts, before, strict=True):
            self._after.append(rule.after(groups[cohort.group], scalars))
            numbers.append(self._numbers_at(groups, cohort, self._after[-1], stepped=True))
        # torch's first buffer is the undampened gradient; smoothed gradients start at 0.
        starts = [
            started and not cohort.started and isinstance(n, SgdNumbers) and not n.smoothed
            for cohort, n in zip(self._cohorts, numbers, strict=True)
        ]
        predict: tuple[list[Law], ...] = ()
        if law is not None and self._buffers is not None:
            if self._is_of_matrices:  # their first update has no previous one
                laws = [_without_gradient(law) if rule.rests(s) else law for s in before]
            else:
                firsts = zip(numbers, starts, strict=True)
                laws = [after_first_step(law, n) if first else law for n, first in firsts]
            predict = (laws,)
        same = all(starts) or not any(starts)
        first = starts[0] if same else [starts[n] for n in self._assignment]
        arguments = step_arguments(numbers, predict)
        self._step = partial(self._native.step, *arguments, first)
        self._step_of = (groups, law) if self._lasts(law) and reads_any else None

    def step(
        self, groups: Sequence[Any], law: Law | None, state: State, options: StepOptions
    ) -> bool:
        """Make the prepared step; return whether rows have changed their cohorts."""
        assert self._step is not None
        if self._is_of_matrices:
            self._pass_changes(groups, state)
        if self._table.in_memory:
            some = self._positions
            if not self._all_active:
                some = list(compress(some, self._active))
            self._table.count_in_memory(some, cast(Any, options.get("found_inf")))
        self._step(options, None)
        if law is not None and (not self._all_active or self._buffers is None):
            self._write_idle(groups, law)
        self._native.forget_gradients()  # so that ``zero_grad`` frees their memory
        if self._all_active and self._started and not self.rule.scalars:
            return False
        return self._count_step(state)

    @torch.no_grad()
    def _pass_changes(self, groups: Sequence[Any], state: State) -> None:
        """Let the kernel step by the changes of matrices' updates, which torch computes."""
        assert self._buffers is not None
        changes: list[Tensor | None] = [None] * len(self.params)
        for row, (n, p) in enumerate(zip(self._assignment, self.params, strict=True)):
            if p.grad is not None:
                numbers, count = groups[self._cohorts[n].group], int(self._after[n][0])
                last, momentum = (column[row] for column in self._buffers)
                update = numbers.update(self._weights[row], p.grad, momentum, state[p], count)
                changes[row] = update.sub_(last)
        self._native.set_gradients(tuple(changes))

    def _numbers_at(
        self, groups: Sequence[Any], cohort: _Cohort, scalars: Scalars, *, stepped: bool = False
    ) -> Any:
        """Return a cohort's hyperparameters at these counts, or at those that kernels read."""
        numbers = groups[cohort.group]
        if not self._table.in_memory:
            return self.rule.at(numbers, scalars)
        assert self._table.counts is not None
        row = cohort.rows[0]
        if stepped and not self._all_active:
            row = next((row for row in cohort.rows if self._active[row]), row)
        at = self._positions[row]
        return numbers.at(StepCount(self._table.counts[0, at : at + 1]))

    def _lasts(self, law: Law | None) -> bool:
        """Whether equal numbers and laws give equal arguments of a call."""
        return (not self.rule.scalars or self._table.in_memory) and _lasts(law)

    def _scalars(self, cohort: _Cohort) -> Scalars:
        return self._table.scalars(self._positions[cohort.rows[0]])

    def _write_idle(self, groups: Sequence[Any], law: Law) -> None:
        """Write the outs that the step's kernel has not written."""
        if self._buffers is None:
            self._native.write_out(0, None)
        elif _predicts(law, groups):
            # For a row without a gradient the step wrote the weights, not a prediction.
            if self._idle is None or self._idle[0] != self._active:
                idle = [i for i, on in zip(self._positions, self._active, strict=True) if not on]
                self._idle = self._active, self._make_idle(idle)
            self._idle[1].predict(groups, _without_gradient(law))

    def _count_step(self, state: State) -> bool:
        """Store the scalar state of updated rows; create state at their first update."""
        counts, changed = bool(self.rule.scalars), False
        in_memory = self._table.in_memory
        for cohort, scalars in zip(self._cohorts, self._after, strict=True):
            active = [row for row in cohort.rows if self._all_active or self._active[row]]
            if counts:
                if not in_memory:
                    self._table.count([self._positions[row] for row in active], scalars)
                changed = changed or 0 < len(active) < len(cohort.rows)
            if self._buffers is not None and not cohort.started:
                changed = changed or bool(active)
                for row in active:
                    buffers = [column[row] for column in self._buffers]
                    self._table.put(state, self._positions[row], buffers)
        return changed

    def predict(self, groups: Sequence[Any], law: Law) -> None:
        """Write predictions to the outs."""
        of = self._prediction_of
        if of is None or of[0] is not groups or of[1] != law:
            self._prediction = partial(self._native.write_out, 0, None)
            if self._buffers is not None and _predicts(law, groups):
                arguments = self._prediction_now(groups, law)
                self._prediction = partial(self._native.predict, *arguments, 0, None)
            self._prediction_of = (groups, law) if self._lasts(law) else None
        assert self._prediction is not None
        self._prediction()

    def stash_predict(self, groups: Sequence[Any], law: Law) -> None:
        """Stash the weights and replace them by predictions, unless the law changes nothing."""
        if _predicts(law, groups):
            self._native.stash_predict_(*self._prediction_now(groups, law), None)
            self._replaced = True

    def _prediction_now(self, groups: Sequence[Any], law: Law) -> Prediction:
        """Return a prediction from the hyperparameters of each cohort's last update."""
        rule = self.rule
        numbers: list[Any] = []
        laws: list[Law] = []
        for cohort in self._cohorts:
            scalars = self._scalars(cohort)
            rests = not cohort.started or (not self._table.in_memory and rule.rests(scalars))
            of_group = groups[cohort.group]
            numbers.append(of_group if rests else self._numbers_at(groups, cohort, scalars))
            laws.append(_STILL if rests else law)
        return prediction(numbers, laws)

    def restore(self) -> bool:
        """Write the stashed weights back; return whether they had been replaced."""
        if not self._replaced:
            return False
        if self.in_place():
            self._native.restore_(None)
        else:  # the parameters have new storage
            for param, stashed in zip(self.params, self._stashed, strict=True):
                param.detach().copy_(stashed)
        self._replaced = False
        return True


def _lasts(law: Law | None) -> bool:
    """Return whether equal laws of this type give equal predictions."""
    return law is None or type(law) in (Linear, SecondOrder)


def _predicts(law: Law, groups: Sequence[Any]) -> bool:
    return any(terms_of(law, numbers) for numbers in groups)


def _without_gradient(law: Law) -> Law:
    """Return the law for a parameter without a gradient, whose momentum did not change."""
    return Linear(law.delay + law.lead) if isinstance(law, SecondOrder) else law
