"""Rows: some parameters on one device, and the Plan that was resolved over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, compress
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from spectrain_ext import _C
from spectrain_ext.operators.corrections import StaleCorrection
from spectrain_ext.operators.laws import Law, Linear, SecondOrder, terms_of
from spectrain_ext.operators.lists import StepOptions
from spectrain_ext.operators.plan import Plan

from .ledger import Ledger
from .rule import Scalars
from .state import State, empty_like

# What corrects a step, and the largest learning rate of every group.
Correcting: TypeAlias = tuple[StaleCorrection, Sequence[float]]

_STILL = Linear(0)  # the law of weights that were never updated


class _Plan(Plan):
    """The plan of Rows, which keep the memory and look after the addresses themselves."""

    _watches = False


class Cohort(NamedTuple):
    """Parameters of one group that have been updated equally often: the same numbers apply."""

    group: int
    started: bool
    positions: list[int]  # in the ledger
    rows: list[int]


class _Prepared(NamedTuple):
    """A native call, and what it was prepared from, beside the cohorts and the plan of the rows.

    A training loop makes the same call at nearly every step: preparing it took a third of a small
    step of SGD.
    """

    templates: Sequence[Any]
    laws: tuple[Law, ...] | None
    call: Callable[[], None]
    after: list[Scalars]

    def serves(self, templates: Sequence[Any], laws: tuple[Law, ...] | None) -> bool:
        """Whether it is the call for these: numbers that are read anew are in a list anew."""
        return self.templates is templates and self.laws == laws


def _stay(laws: tuple[Law, ...] | None) -> bool:
    """Whether laws that are equal to these are the same: others may read what changes."""
    return laws is None or all(type(law) is Linear and type(law.steps) is float for law in laws)


def _move(laws: tuple[Law, ...], templates: Sequence[Any]) -> bool:
    """Whether the laws of the groups predict anything but the weights themselves."""
    return any(map(terms_of, laws, templates))


class Rows:
    """The tensors of a few parameters, resolved once and checked cheaply before each use.

    A plan keeps raw addresses, and a parameter can get another storage at any time
    (``p.data = ...``, ``module.to()``), as its state can get another buffer. So every use asks
    ``storage_unchanged`` and compares ``version`` with the ledger's first. The plan holds detached
    aliases of the tensors: they keep the storage it points to alive whatever becomes of the
    parameter.

    Args:
        ledger: where parameters and state are listed.
        positions: of the parameters in it, ascending.
        weights: what is updated, one tensor per parameter.
        buffers: a list like the weights for each buffer of the rule; None where the rule's numbers
            need none.
        stashed: where weights are kept while they are predicted.
        outs: where predictions are written.
        stale: the weights that gradients are computed with, where a correction reads them.
    """

    def __init__(
        self,
        ledger: Ledger,
        positions: Sequence[int],
        weights: Sequence[Tensor],
        buffers: Sequence[Sequence[Tensor]] | None,
        *,
        stashed: Sequence[Tensor] | None = None,
        outs: Sequence[Tensor] | None = None,
        stale: Sequence[Tensor] | None = None,
    ) -> None:
        self.ledger = ledger
        self.positions = list(positions)
        self.params = [ledger.params[i] for i in positions]
        self.buffers = None if buffers is None else [list(column) for column in buffers]
        self.stashed = None if stashed is None else list(stashed)
        self._outs = None if outs is None else [out.detach() for out in outs]
        self._stale = None if stale is None else list(stale)
        self._sources = list(weights)
        self._weights = [w.detach() for w in weights]
        self._watch = _C.Watch((*self._sources, *chain.from_iterable(self.buffers or ())))
        self._assignment: list[int] = []
        self._without: tuple[list[bool], list[int], _Plan] | None = None
        self._prepared: _Prepared | None = None
        self._prepared_prediction: _Prepared | None = None
        self._replaced = False  # whether a prediction has taken the weights' place
        self.active: list[bool] = []
        self.all_active = False
        self.version = -1
        self.arrange()

    def _plan(self, rows: Sequence[int], assignment: Sequence[int]) -> _Plan:
        def some(column: Sequence[Tensor]) -> list[Tensor]:
            return [column[row].detach() for row in rows]

        state = zip(self.ledger.rule.columns, self.buffers or (), strict=False)
        return _Plan(
            some(self._weights),
            grads=[None] * len(rows),
            stashed=None if self.stashed is None else some(self.stashed),
            outs=() if self._outs is None else [some(self._outs)],
            stale=None if self._stale is None else some(self._stale),
            groups=assignment,
            **{name: some(column) for name, column in state},
        )

    @property
    def device(self) -> torch.device:
        return self._weights[0].device

    # What the plan was resolved from, and whether that is still so.

    def arrange(self) -> None:
        """Follow the ledger: which rows have the same numbers, and which were ever updated."""
        if self.version == self.ledger.version:
            return
        keys = [self.ledger.cohort(i) for i in self.positions]
        index = {key: n for n, key in enumerate(dict.fromkeys(keys))}
        assignment = [index[key] for key in keys]
        if assignment != self._assignment:
            self.plan = self._plan(range(len(keys)), assignment)
            self._assignment = assignment
        self._without = None
        self._prepared = self._prepared_prediction = None
        self.cohorts = [Cohort(group, started, [], []) for group, started, _ in index]
        self.started = self.buffers is None or all(cohort.started for cohort in self.cohorts)
        for row, (n, position) in enumerate(zip(assignment, self.positions, strict=True)):
            self.cohorts[n].positions.append(position)
            self.cohorts[n].rows.append(row)
        self.version = self.ledger.version

    def storage_unchanged(self) -> bool:
        """Tell whether weights and buffers are where the plan found them."""
        return self._watch.in_place()

    # Gradients.

    def read_gradients(self) -> None:
        """Hand the parameters' gradients to the plan, and note which rows have one.

        A gradient of another layout than its parameter (autograd gives the same one, but a hook or
        a caller may not) is copied into the parameter's layout; what cannot be a gradient of the
        parameter raises and leaves the plan's gradients as they were.
        """
        grads = [p.grad for p in self.params]
        try:
            self.all_active = self.plan._native.set_gradients(tuple(grads), False)
        except (TypeError, ValueError, RuntimeError):
            fitted = [
                None if grad is None else self._fitted(row, grad) for row, grad in enumerate(grads)
            ]
            if all(map(is_, fitted, grads)):
                raise
            self.all_active = self.plan._native.set_gradients(tuple(fitted), False)
        self.active = [True] * len(grads) if self.all_active else [g is not None for g in grads]

    def forget_gradients(self) -> None:
        """Let go of the gradients, so that ``zero_grad`` really frees their memory."""
        self.plan._native.forget_gradients()

    def _fitted(self, row: int, grad: Tensor) -> Tensor:
        weight = self._weights[row]
        where = f"the gradient of {self.ledger.where(self.positions[row])}"
        if grad.layout != torch.strided:
            raise RuntimeError(f"{where} is sparse ({grad.layout}): a dense one is needed")
        if grad.shape != weight.shape:
            raise ValueError(
                f"{where} must have shape {tuple(weight.shape)}, got {tuple(grad.shape)}"
            )
        if grad.device != weight.device:
            raise ValueError(f"{where} must be on {weight.device}, got {grad.device}")
        if grad.is_complex() or torch.promote_types(grad.dtype, weight.dtype) != weight.dtype:
            raise TypeError(f"{where} must be {weight.dtype}, got {grad.dtype}")
        if grad.dtype == weight.dtype and grad.stride() == weight.stride() and not grad.is_neg():
            return grad
        return empty_like(weight, weight.dtype).copy_(grad.detach())

    # What runs. `templates`: the numbers of every parameter group, as the rule read them.

    def prepared(
        self,
        templates: Sequence[Any],
        laws: tuple[Law, ...] | None,
        options: StepOptions,
        correcting: Correcting | None = None,
    ) -> tuple[Callable[[], None], list[Scalars]]:
        """Return what updates the rows that have a gradient, and the scalar state after it.

        With laws, one for each group, it writes the outs as well, but for what ``write_rest`` does.
        What corrects the step is the same for as long as there are these rows.
        """
        ledger, rule = self.ledger, self.ledger.rule
        known = self._prepared
        if not options and known is not None and known.serves(templates, laws):
            return known.call, known.after
        before = [ledger.scalars(cohort.positions[0]) for cohort in self.cohorts]
        groups = [templates[cohort.group] for cohort in self.cohorts]
        after = [rule.advance(t, scalars) for t, scalars in zip(groups, before, strict=True)]
        numbers = [rule.at(t, scalars) for t, scalars in zip(groups, after, strict=True)]
        predict: tuple[tuple[Law, ...], ...] = ()
        if laws is not None and self.buffers is not None:
            predict = (tuple([laws[cohort.group] for cohort in self.cohorts]),)
        correction = None
        if correcting is not None:
            by, rates = correcting
            averages = bool(by.buffers)
            correction = (
                averages,
                [
                    by.coefficients(n, rates[cohort.group], int(scalars[-1]) if averages else 0)
                    for n, cohort, scalars in zip(numbers, self.cohorts, before, strict=True)
                ],
            )
        first = self._first_step(groups)
        call = self.plan._prepared_step(numbers, first, predict, options, correction)
        keeps = not options and not rule.scalars and _stay(laws)
        self._prepared = _Prepared(templates, laws, call, after) if keeps else None
        return call, after

    def write_rest(self, templates: Sequence[Any], laws: tuple[Law, ...]) -> None:
        """Write the outs that a step with laws does not."""
        if self.buffers is None:
            self.plan.write_out()
        elif not self.all_active and _move(laws, templates):
            # The step gives a row without a gradient its weights, not their prediction.
            self._predict_inactive(templates, tuple(map(_without_gradient, laws)))

    def updated_to(self, after: Sequence[Scalars], state: State) -> bool:
        """Give the rows that a step has updated the scalar state after it; start state.

        That may be done again. Returns whether rows now belong to other cohorts: begun, or counted
        apart.
        """
        if self.ledger.rule.scalars:
            self._count(after)
        if self.all_active and self.started:
            return False
        return self._start(state)

    def _count(self, after: Sequence[Scalars]) -> None:
        for cohort, scalars in zip(self.cohorts, after, strict=True):
            positions = cohort.positions
            if not self.all_active:
                positions = [
                    position
                    for position, row in zip(positions, cohort.rows, strict=True)
                    if self.active[row]
                ]
            self.ledger.count(positions, scalars)

    def _first_step(self, groups: Sequence[Any]) -> bool | list[bool]:
        if self.buffers is None:
            return False
        starts = [
            not cohort.started and self.ledger.rule.starts(group)
            for cohort, group in zip(self.cohorts, groups, strict=True)
        ]
        if all(starts) or not any(starts):
            return starts[0]
        return [starts[n] for n in self._assignment]

    def _predict_inactive(self, templates: Sequence[Any], laws: tuple[Law, ...]) -> None:
        if self._without is None or self._without[0] != self.active:
            rows = [row for row, active in enumerate(self.active) if not active]
            found = sorted({self._assignment[row] for row in rows})
            index = {cohort: n for n, cohort in enumerate(found)}
            plan = self._plan(rows, [index[self._assignment[row]] for row in rows])
            self._without = (self.active, found, plan)
        _, found, plan = self._without
        numbers, own = self._now(templates, laws, [self.cohorts[n] for n in found])
        plan.predict(numbers, steps=own)

    def _now(
        self, templates: Sequence[Any], laws: tuple[Law, ...], cohorts: Sequence[Cohort]
    ) -> tuple[list[Any], tuple[Law, ...]]:
        """Return the numbers of cohorts as their last update left them, and their laws."""
        rule = self.ledger.rule
        numbers, own = [], []
        for cohort in cohorts:
            scalars = self.ledger.scalars(cohort.positions[0])
            rests = not cohort.started or rule.rests(scalars)
            template = templates[cohort.group]
            numbers.append(template if rests else rule.at(template, scalars))
            own.append(_STILL if rests else laws[cohort.group])
        return numbers, tuple(own)

    def _start(self, state: State) -> bool:
        changed = False
        counts = bool(self.ledger.rule.scalars)
        for cohort in self.cohorts:
            active = [row for row in cohort.rows if self.active[row]]
            if not active:
                continue
            if not cohort.started and self.buffers is not None:
                changed = True
                keys = self.ledger.rule.buffers
                for row in active:
                    entry = state[self.params[row]]
                    entry.update(self.ledger.count_of(self.positions[row]))
                    entry.update(zip(keys, (c[row] for c in self.buffers), strict=True))
            changed = changed or (counts and len(active) != len(cohort.rows))
        return changed

    def predict(self, templates: Sequence[Any], laws: tuple[Law, ...]) -> None:
        known = self._prepared_prediction
        if known is not None and known.serves(templates, laws):
            known.call()
        elif self.buffers is None or not _move(laws, templates):
            self.plan.write_out()
        else:
            call = self.plan._prepared_predict(*self._now(templates, laws, self.cohorts))
            keeps = not self.ledger.rule.scalars and _stay(laws)
            self._prepared_prediction = _Prepared(templates, laws, call, []) if keeps else None
            call()

    def stash_predict(self, templates: Sequence[Any], laws: tuple[Law, ...]) -> None:
        """Keep the weights and replace them by their prediction, unless that is the weights."""
        if _move(laws, templates):
            call = self.plan._prepared_stash_predict(*self._now(templates, laws, self.cohorts))
            call()
            self._replaced = True

    def restore(self) -> bool:
        """Write the stashed weights back, wherever the parameters' storage is by now.

        Returns whether they had been replaced.
        """
        if not self._replaced:
            return False
        if self.storage_unchanged():
            self.plan.restore_()
        else:
            for param, kept in zip(self.params, self.stashed or (), strict=True):
                param.detach().copy_(kept)
        self._replaced = False
        return True

    def updated(self) -> tuple[Tensor, ...]:
        """Return the parameters that the last step changed."""
        return tuple(self.params) if self.all_active else tuple(compress(self.params, self.active))


def _without_gradient(law: Law) -> Law:
    """Return the law for a parameter that has no gradient now: its momentum did not change."""
    return Linear(law.delay + law.lead) if isinstance(law, SecondOrder) else law
