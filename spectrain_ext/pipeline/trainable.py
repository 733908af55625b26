"""Trains parameters that became trainable between two runs."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from spectrain_ext.optim import PredictingOptimizer
from spectrain_ext.weights import StageWeights

from .arguments import make_scheduler
from .names import bare
from .phases import Training, TrainingPhase

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

_REMEDY = "release() the pipeline and make another one of the stages"


class _StageChange(NamedTuple):
    position: int  # of the stage among those of this process
    weights: list[StageWeights]  # in each phase
    groups: Sequence[tuple[dict[str, Any], list[Tensor]]]  # with their new lists of parameters
    more: Sequence[tuple[int, dict[str, Any]]]  # new groups, with their positions
    state: Mapping[Tensor, Any]  # initial state of new parameters, if the optimizer has any


def with_new(
    training: Training,
    phases: list[TrainingPhase],
    minibatches: int,  # begun so far
    averaged: Collection[int],  # stages whose replicas are averaged
) -> list[TrainingPhase]:
    """Return the phases with all that requires gradients now; if this raises, nothing has changed.

    A stage's optimizer stays the same object, with its state, learning rates and scheduler. The
    factory is called for another one, to learn which group a new parameter belongs to, and the
    options of new groups. A stage that had nothing to train gets what the factories make; its
    scheduler is advanced by the updates so far.
    """
    grown: list[_StageChange] = []
    for n, k in enumerate(training.modules):
        now = phases[0].weights[n]
        held = frozenset(() if now is None else now.params)
        new = _untrained(training, k, held)
        if not new:
            continue
        if now is not None:
            now.check(k)  # its parameters may have been replaced
        where = f"stages[{k}]: parameter {bare(next(iter(new.values())))!r} has become trainable"
        if k in averaged:
            raise ValueError(f"{where}, and the averages of replicas are without it; {_REMEDY}")
        made = training.made(k, held)
        assert made is not None
        training.check(k, made)
        if now is None:
            scheduler = _stepped(make_scheduler(training.scheduler, made, k), minibatches)
            grown.append(_StageChange(n, training.weights(k, made, scheduler), (), (), {}))
            continue
        groups, more = _groups(now.optimizer, made, new.keys())
        if more and now.scheduler is not None:
            raise ValueError(
                f"{where}, in a parameter group that the scheduler does not know; {_REMEDY}"
            )
        weights = training.weights(k, now.optimizer, now.scheduler, held)
        state = {p: made.state[p] for p in new if p in made.state}
        grown.append(_StageChange(n, weights, groups, more, state))
    for each in grown:
        _apply(each)
    return _changed(training, phases, grown) if grown else phases


def _untrained(training: Training, k: int, held: Set[Tensor]) -> dict[Tensor, str]:
    """Return the parameters that require gradients and are not trained yet, with their names."""
    known = held | training.copies(k).keys()
    named = training.modules[k].named_parameters()
    return {p: name for name, p in named if p.requires_grad and p not in known}


def _groups(
    optimizer: torch.optim.Optimizer, made: torch.optim.Optimizer, new: Set[Tensor]
) -> tuple[list[tuple[dict[str, Any], list[Tensor]]], list[tuple[int, dict[str, Any]]]]:
    """Return the groups with new parameters in those where ``made`` has them, and new groups."""
    groups = [(group, list(group["params"])) for group in optimizer.param_groups]
    home = {p: n for n, (_, params) in enumerate(groups) for p in params}
    more: list[tuple[int, dict[str, Any]]] = []
    for index, group in enumerate(made.param_groups):
        params = group["params"]
        found, known = [p for p in params if p in new], set(params)
        homes = {home[p] for p in params if p in home}
        if found and len(homes) == 1:
            _, before = groups[homes.pop()]
            # In the order of a new optimizer, which is that of a state_dict.
            before[:] = [*params, *(p for p in before if p not in known)]
        elif found:
            more.append((index, {**group, "params": found}))
    return groups, more


def _apply(each: _StageChange) -> None:
    optimizer = each.weights[0].optimizer
    for group, params in each.groups:
        group["params"] = params
    for index, group in each.more:
        if isinstance(optimizer, PredictingOptimizer):
            optimizer.param_groups.append(group)  # ``made`` has checked it; this one is bound
        else:
            optimizer.add_param_group(group)
        optimizer.param_groups.insert(index, optimizer.param_groups.pop())
    optimizer.state.update(each.state)


def _stepped(scheduler: LRScheduler | None, updates: int) -> LRScheduler | None:
    if scheduler is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about an optimizer that has not stepped
            for _ in range(updates):
                scheduler.step()
    return scheduler


def _changed(
    training: Training, phases: list[TrainingPhase], grown: Sequence[_StageChange]
) -> list[TrainingPhase]:
    changed = []
    for n, phase in enumerate(phases):
        weights = list(phase.weights)
        for each in grown:
            weights[each.position] = each.weights[n]
        changed.append(phase._replace(weights=weights))
    optimizers = (w.optimizer for w in changed[0].weights if w is not None)
    rules = training.rules(next(optimizers, None))
    return [p._replace(rules=rules[n]) for n, p in enumerate(changed)]
