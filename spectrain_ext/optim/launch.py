"""Groups parameters into kernel launches, and runs steps and predictions on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, compress
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spectrain_ext import _C
from spectrain_ext.operators.calls import (
    Lists,
    Prediction,
    Role,
    prediction,
    step_arguments,
)
from spectrain_ext.operators.laws import Law, Linear, SecondOrder, after_first_step, terms_of
from spectrain_ext.operators.numbers import Sgd

from .parameters import Parameters, Views
from .state import Group, Rule, Scalars, State, empty_like

_STILL = Linear(0)  # for weights that were never updated
_gradient = attrgetter("grad")


class Cohort(NamedTuple):
    """Parameters of one group with the same number of updates, so that they share coefficients."""

    group: int
    started: bool
    rows: list[int]


class Prepared(NamedTuple):
    """A cached native call and the arguments it was prepared from."""

    # Most steps of a training loop make the same call, and preparing it took a third of a small
    # step of SGD.
    templates: Sequence[Any]  # the same list object as long as no hyperparameter changes
    law: Law | None
    lasts: bool  # reusable: no step counts and no numbers that may change
    call: Callable[[], None]
    after: Sequence[Scalars] = ()  # the scalar state of every cohort after a step

    def serves(self, templates: Sequence[Any], law: Law | None) -> bool:
        return self.lasts and self.templates is templates and self.law == law


class Launch:
    """One kernel launch: parameters of one device and rule, resolved once."""

    def __init__(
        self,
        parameters: Parameters,
        positions: Sequence[int],  # ascending
        with_buffers: bool,  # whether the rule needs them
        outs: Views | None = None,  # where predictions are written
        *,
        stash: bool = False,  # for predictions in place
    ) -> None:
        self.parameters = parameters
        self.rule = parameters.rules[positions[0]]  # the same for all
        self.params = params = [parameters.params[i] for i in positions]
        self.device = params[0].device
        self._positions = positions
        self._outs = outs
        binding = parameters.binding
        weights = params if binding is None else [binding.weights[p] for p in params]
        self._weights = [w.detach() for w in weights]  # aliases: they keep the storage alive
        self._buffers: list[tuple[Tensor, ...]] | None = None
        if with_buffers:
            self._buffers = list(zip(*map(parameters.buffers_of, positions), strict=True))
        self._stashed = [empty_like(p, p.dtype) for p in params] if stash else None
        # The plan holds raw addresses, but parameters can get new storage (``p.data = ...``,
        # ``module.to()``) and state new buffers. ``Launches`` calls this before every use.
        self.in_place = _C.Watch((*weights, *chain.from_iterable(self._buffers or ()))).in_place

        groups, buffers, scalars = parameters.groups, parameters.buffers, parameters.scalars
        keys = [(groups[i], buffers[i] is not None, scalars(i)) for i in positions]
        index = {key: n for n, key in enumerate(dict.fromkeys(keys))}
        self._assignment = [index[key] for key in keys]
        self.cohorts = [Cohort(*key[:2], []) for key in index]
        for row, n in enumerate(self._assignment):
            self.cohorts[n].rows.append(row)
        self.started = not with_buffers or all(cohort.started for cohort in self.cohorts)

        lists = Lists(self._weights, "params", writes=True)
        state = zip(self.rule.columns.items(), self._buffers or (), strict=False)
        for (name, role), column in state:
            lists.add(role, name, [buffer.detach() for buffer in column], writes=True)
        lists.add(Role.GRADS, "grads", [None] * len(params), writes=False)
        if stash:
            lists.add(Role.STASHED, "stashed", self._stashed, writes=True)
        if outs is not None:
            lists.add(Role.OUT, "outs[0]", [outs[p].detach() for p in params], writes=True)
        self.native = lists.plan(self._assignment)
        # This object keeps the memory alive and checks the addresses. Checking them once more takes
        # a tenth of the host time of a step.
        self.native.keep(False)
        self._all_active = False
        self._active: list[bool] = []
        self._rest: tuple[list[bool], Launch] | None = None  # for rows that are not active
        self._step: Prepared | None = None
        self._prediction: Prepared | None = None
        self._replaced = False  # whether predictions have replaced the weights

    # Gradients.

    def read_gradients(self) -> None:
        """Pass the parameters' gradients to the plan and record which rows have one."""
        grads = tuple(map(_gradient, self.params))
        try:
            self._all_active = self.native.set_gradients(grads)
        except (TypeError, ValueError, RuntimeError):
            # A hook or the caller may set a gradient with another layout: copy it.
            fitted = tuple(map(self._fitted, range(len(grads)), grads))
            if all(map(is_, fitted, grads)):
                raise
            self._all_active = self.native.set_gradients(fitted)
        if not self._all_active:
            self._active = [g is not None for g in grads]

    def _fitted(self, row: int, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        weight = self._weights[row]
        where = f"the gradient of {self.parameters.places[self._positions[row]]}"
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
        return empty_like(weight, weight.dtype).copy_(grad.detach().resolve_neg())

    def updated(self) -> list[Tensor]:
        return self.params if self._all_active else list(compress(self.params, self._active))

    # Steps and predictions. `templates`: the hyperparameters of every parameter group.

    def prepare_step(
        self,
        templates: Sequence[Any],
        law: Law | None,  # for the outs; None: no outs
    ) -> None:
        """Prepare the update of rows that have a gradient; raises all errors of a step."""
        if self._step is not None and self._step.serves(templates, law):
            return
        rule = self.rule
        before = list(map(self._scalars, self.cohorts))
        groups = [templates[cohort.group] for cohort in self.cohorts]
        after = list(map(rule.after, groups, before))
        numbers: list[Any] = list(map(rule.at, groups, after))
        # torch's first buffer is the undampened gradient; smoothed gradients start at 0.
        starts = [
            self._buffers is not None
            and not cohort.started
            and isinstance(n, Sgd)
            and not n.smoothed
            for cohort, n in zip(self.cohorts, numbers, strict=True)
        ]
        predict: tuple[tuple[Law, ...], ...] = ()
        if law is not None and self._buffers is not None:
            if rule.is_for_matrices:  # their first update has no previous one
                each = [_without_gradient(law) if rule.rests(s) else law for s in before]
            else:
                firsts = zip(numbers, starts, strict=True)
                each = [after_first_step(law, n) if first else law for n, first in firsts]
            predict = (tuple(each),)
        same = all(starts) or not any(starts)
        first = starts[0] if same else [starts[n] for n in self._assignment]
        arguments = step_arguments(numbers, predict)
        call = partial(self.native.step, *arguments, first, {}, None)
        lasts = not rule.scalars and _lasts(law)
        self._step = Prepared(templates, law, lasts, call, after)

    def step(self, state: State) -> bool:
        """Run the prepared step; return whether rows have changed their cohorts."""
        step = self._step
        assert step is not None
        if self.is_special:
            self.pass_gradients(step, state)
        step.call()
        if step.law is not None:
            self._write_rest(step.templates, step.law)
        self.native.forget_gradients()  # so that ``zero_grad`` frees their memory
        return self._updated_to(step.after, state)

    is_special = False  # whether the next one does something; saves plain ones the call

    def pass_gradients(self, step: Prepared, state: State) -> None:
        """Let the kernel step by something else than the parameters' gradients."""

    def _scalars(self, cohort: Cohort) -> Scalars:
        return self.parameters.scalars(self._positions[cohort.rows[0]])

    def _write_rest(self, templates: Sequence[Any], law: Law) -> None:
        """Write the outs that the step's kernel has not written."""
        if self._buffers is None:
            self.native.write_out(0, None)
        elif not self._all_active and _predicts(law, templates):
            # For a row without a gradient the step wrote the weights, not a prediction.
            if self._rest is None or self._rest[0] != self._active:
                idle = [i for i, on in zip(self._positions, self._active, strict=True) if not on]
                self._rest = self._active, Launch(self.parameters, idle, True, self._outs)
            self._rest[1].predict(templates, _without_gradient(law))

    def _updated_to(self, after: Sequence[Scalars], state: State) -> bool:
        """Store the scalar state of updated rows; create state at their first update."""
        counts = bool(self.rule.scalars)
        if self._all_active and self.started and not counts:
            return False
        changed = False
        for cohort, scalars in zip(self.cohorts, after, strict=True):
            active = [row for row in cohort.rows if self._all_active or self._active[row]]
            if counts:
                self.parameters.count([self._positions[row] for row in active], scalars)
                changed = changed or 0 < len(active) < len(cohort.rows)
            if self._buffers is not None and not cohort.started:
                changed = changed or bool(active)
                for row in active:
                    buffers = [column[row] for column in self._buffers]
                    self.parameters.put(state, self._positions[row], buffers)
        return changed

    def predict(self, templates: Sequence[Any], law: Law) -> None:
        """Write predictions to the outs."""
        known = self._prediction
        if known is None or not known.serves(templates, law):
            call = partial(self.native.write_out, 0, None)
            if self._buffers is not None and _predicts(law, templates):
                call = partial(self.native.predict, *self._prediction_now(templates, law), 0, None)
            lasts = not self.rule.scalars and _lasts(law)
            known = self._prediction = Prepared(templates, law, lasts, call)
        known.call()

    def stash_predict(self, templates: Sequence[Any], law: Law) -> None:
        """Stash the weights and replace them by predictions, unless the law changes nothing."""
        if _predicts(law, templates):
            self.native.stash_predict_(*self._prediction_now(templates, law), None)
            self._replaced = True

    def _prediction_now(self, templates: Sequence[Any], law: Law) -> Prediction:
        """Return a prediction from the hyperparameters of each cohort's last update."""
        rule = self.rule
        numbers: list[Any] = []
        of_cohorts: list[Law] = []
        for cohort in self.cohorts:
            scalars = self._scalars(cohort)
            rests = not cohort.started or rule.rests(scalars)
            template = templates[cohort.group]
            numbers.append(template if rests else rule.at(template, scalars))
            of_cohorts.append(_STILL if rests else law)
        return prediction(numbers, of_cohorts)

    def restore(self) -> bool:
        """Write the stashed weights back; return whether they had been replaced."""
        if not self._replaced:
            return False
        if self.in_place():
            self.native.restore_(None)
        else:  # the parameters have new storage
            for param, kept in zip(self.params, self._stashed or (), strict=True):
                param.detach().copy_(kept)
        self._replaced = False
        return True


def _lasts(law: Law | None) -> bool:
    """Return whether equal laws of this type give equal predictions."""
    return law is None or type(law) in (Linear, SecondOrder)


def _predicts(law: Law, templates: Sequence[Any]) -> bool:
    return any(terms_of(law, numbers) for numbers in templates)


def _without_gradient(law: Law) -> Law:
    """Return the law for a parameter without a gradient, whose momentum did not change."""
    return Linear(law.delay + law.lead) if isinstance(law, SecondOrder) else law


class _Resolved(NamedTuple):
    of: tuple[object, ...]  # keys by address; kept alive so that no address is reused
    version: int
    idle: list[Tensor]  # parameters that need no launch yet
    launches: list[Launch]


class Launches:
    """Caches an optimizer's launches, one per device and kind of group, while they are valid."""

    def __init__(self, parameters: Parameters, of_matrices: type[Launch]) -> None:
        self.parameters = parameters
        self._of_matrices = of_matrices
        self._known: dict[tuple[int, ...], _Resolved] = {}

    def of(
        self,
        groups: Sequence[Group],
        state: State,
        outs: Views | None = None,
        *,
        stash: bool = False,
    ) -> list[Launch]:
        """Return the launches of a step, or of a prediction in place (`stash`)."""
        # Resolved at the first use: before it, the owner may move the parameters into a buffer.
        parameters, binding = self.parameters, self.parameters.binding
        version = parameters.look(groups, state)
        places = (outs,) if binding is None else (outs, binding.weights)
        key = stash, *map(id, places)
        known = self._known.get(key)
        moved = False
        for launch in () if known is None else known.launches:
            moved = moved or not launch.in_place()
            if moved and binding is not None:
                raise RuntimeError(
                    f"a parameter of group {launch.cohorts[0].group} no longer has the storage it "
                    "was bound with (.to() or load_state_dict(assign=True) since bind)"
                )
        if (
            known is None
            or moved
            or known.version != version
            or (known.idle and not stash and any(p.grad is not None for p in known.idle))
        ):
            launches = [launch for each in self._known.values() for launch in each.launches]
            if binding is None and (known is None or not all(e.in_place() for e in launches)):
                parameters.forget()  # parameters may have moved, and their state with them
                version = parameters.look(groups, state)
            known = self._known[key] = self._made(places, version, stash)
        return known.launches

    def _made(self, places: tuple[Views | None, ...], version: int, stash: bool) -> _Resolved:
        parameters = self.parameters
        idle: list[Tensor] = []
        positions_of: dict[tuple[torch.device, bool, Rule], list[int]] = {}
        for i, p in enumerate(parameters.params):
            kind = parameters.kinds[parameters.groups[i]]
            steps = not stash and (p.grad is not None or not kind)
            # In a bound optimizer every parameter has a launch, which may write its outs.
            if parameters.binding is not None or steps or parameters.buffers[i] is not None:
                positions_of.setdefault((p.device, kind, parameters.rules[i]), []).append(i)
            else:
                idle.append(p)
        launches: list[Launch] = []
        for (_, kind, rule), positions in positions_of.items():
            make = self._of_matrices if rule.is_for_matrices else Launch
            launches.append(make(parameters, positions, kind, places[0], stash=stash))
        return _Resolved(places, version, idle, launches)
