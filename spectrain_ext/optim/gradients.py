"""Launches whose kernels step by other gradients than the parameters have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spectrain_ext.operators.corrections import AdaptiveBraking, Correction, Late, StaleCorrection
from spectrain_ext.operators.functions import distance
from spectrain_ext.operators.numbers import Adam

from .launch import Launch, Lengths, Prepared
from .state import Group, State, empty_like


def launch_for(correction: Correction | None) -> type[Launch]:
    """Return the class of launches with a correction, or of those for matrices if it is None."""
    if correction is None:
        return MatrixLaunch
    if isinstance(correction, StaleCorrection):
        return CorrectedLaunch
    return BrakedLaunch if isinstance(correction, AdaptiveBraking) else Launch


class BrakedLaunch(Launch):
    """Scales gradients in place by their angles with the momentum."""

    is_special = True

    @torch.no_grad()
    def before_step(
        self, templates: Sequence[Any], groups: Sequence[dict[str, Any]], whole: Lengths
    ) -> None:
        braking = self.parameters.correction
        assert isinstance(braking, AdaptiveBraking) and self._buffers is not None
        for cohort in self.cohorts:
            rows = cohort.rows if cohort.started else ()
            found = [
                (g, self._buffers[0][row], self.params[row])
                for row in rows
                if (g := self.params[row].grad) is not None
            ]
            if not found:
                continue
            gradients, momenta, params = zip(*found, strict=True)
            laid_out = [
                g
                if g.dtype == v.dtype and g.stride() == v.stride()
                else torch.empty_like(v).copy_(g)
                for g, v, _ in found
            ]
            each, _ = distance(momenta, [laid_out])
            norms = [
                torch.stack(torch._foreach_norm(list(these), 2, dtype=torch.float64))
                for these in (gradients, momenta)
            ]
            lengths = whole(params, torch.stack([*norms, each[0]]))
            braking.brake_(gradients, lengths, templates[cohort.group].maximize)
        self.read_gradients()  # again: those of another layout had been copied


class CorrectedLaunch(Launch):
    """Corrects gradients by the weights that they were computed with."""

    is_special = True

    def before_step(
        self, templates: Sequence[Any], groups: Sequence[dict[str, Any]], whole: Lengths
    ) -> None:
        """Keep each group's largest learning rate so far in the group, so that it is saved."""
        correction = self.parameters.correction
        assert correction is not None
        for index in {cohort.group for cohort in self.cohorts} if correction.buffers else ():
            rate, group = templates[index].lr, groups[index]
            if not isinstance(rate, float):
                raise ValueError(
                    f"parameter group {index}: {correction}: lr must be a number or a CPU tensor "
                    f"with one element, got {group['lr']!r}"
                )
            group["gap_rate"] = max(rate, group.get("gap_rate", 0.0))

    @torch.no_grad()
    def pass_gradients(
        self, step: Prepared, state: State, groups: Sequence[Group]
    ) -> list[Callable[[], None]]:
        """Pass corrected gradients; return the updates of averages after the step."""
        correction, binding = self.parameters.correction, self.parameters.binding
        assert isinstance(correction, StaleCorrection)
        assert binding is not None and binding.stale is not None
        grads = {row: p.grad for row, p in enumerate(self.params) if p.grad is not None}
        corrected: list[Tensor | None] = [None] * len(self.params)
        averaging: list[Callable[[], None]] = []
        for cohort in self.cohorts:
            rows = [row for row in cohort.rows if row in grads]
            if not rows:  # foreach operators refuse empty lists
                continue
            numbers = step.templates[cohort.group]
            weights = [self._weights[row] for row in rows]
            # In the dtype of the true weights; the parameters keep their own gradients.
            gradients = [empty_like(weight, weight.dtype) for weight in weights]
            torch._foreach_copy_(gradients, [grads[row] for row in rows])
            gaps = torch._foreach_sub(weights, [binding.stale[self.params[row]] for row in rows])
            buffers = [[column[row] for row in rows] for column in self._buffers or ()]
            averaged = int(self._scalars(cohort)[-1]) if correction.buffers else 0
            rate = groups[cohort.group].get("gap_rate", 0.0)
            late = Late(gradients, weights, list(gaps), buffers, averaged, numbers, rate)
            correction.correct_(late)
            for row, gradient in zip(rows, gradients, strict=True):
                corrected[row] = gradient
            if correction.buffers:
                before = [w.clone() for w in weights] if isinstance(numbers, Adam) else []
                averaging.append(partial(correction.average, late, before))
        self.native.set_gradients(tuple(corrected))
        return averaging


class MatrixLaunch(Launch):
    """Steps by the changes of updates that torch's operators compute."""

    is_special = True

    @torch.no_grad()
    def pass_gradients(self, step: Prepared, state: State, groups: Sequence[Group]) -> tuple[()]:
        assert self._buffers is not None
        changes: list[Tensor | None] = [None] * len(self.params)
        for row, (n, p) in enumerate(zip(self._assignment, self.params, strict=True)):
            gradient = p.grad
            if gradient is not None:
                numbers, count = step.templates[self.cohorts[n].group], int(step.after[n][0])
                last, momentum = (column[row] for column in self._buffers)
                weight = self._weights[row]
                update = numbers.update(weight, gradient, momentum, state[p], count)
                changes[row] = update.sub_(last)
        self.native.set_gradients(tuple(changes))
        return ()
