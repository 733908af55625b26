"""Tells, without a pipeline, whether a method can run and how it will train."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import torch

from spectrain_ext.schedule import Place, Replicas

from .applying import check_optimizer, family_of, microbatches_of, phases_on, rules_at
from .formulas import delay_under
from .registry import MethodName, find_method
from .value import Method, Window, rate_at


def check(
    method: MethodName | str | Method,
    stages: int,
    *,
    microbatches: int | Literal["auto"] = "auto",
    window: Window = None,
    replicas: Replicas | Sequence[int] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Raise what ``Pipeline`` would with these arguments and optimizers like this one."""
    method = find_method(method)
    if replicas is not None and not isinstance(replicas, Replicas):
        replicas = Replicas(replicas)
    if microbatches == "auto":
        microbatches = microbatches_of(method, stages, replicas)
    for phase, places in phases_on(method, stages, microbatches, window, replicas):
        for place in places:
            rules = rules_at(phase, place, optimizer)
            if optimizer is not None:
                check_optimizer(phase, rules, place.stage, optimizer)
        if replicas is not None:
            from .refusals import check_replicas

            check_replicas(phase, places, replicas)


_BACKWARDS = {
    "current": "backwards meet the newest weights",
    "predict": "backwards predict again",
    "stash": "backwards meet their forwards' weights",
}


def in_words(
    method: Method, places: Sequence[Place], optimizer: torch.optim.Optimizer | None = None
) -> str:
    """Describe a method on these stages in a line: microbatches, delay, prediction, backward."""
    microbatches = places[0].microbatches
    plural = "es" if microbatches > 1 else ""
    begin = f"{method.name}: {microbatches} microbatch{plural} a minibatch"
    late = max(delay_under(method.schedule, place) for place in places)
    rules = [rules_at(method, place, optimizer) for place in places]
    if late == 0:
        return f"{begin}, nothing is late and nothing predicted"
    clauses = [f"{begin}, so that forwards are at most {_updates(late)} late"]
    rate = min(rate_at(method, place, 0) for place in places)
    if rate != 1.0:
        clauses.append(f"learning rates begin with {rate:.3g} of their own at the least")
    law = rules[0].law
    ahead = [
        rule.lead + rule.forward_horizon for rule in rules if rule.forward_horizon != "counted"
    ]
    if len(ahead) < len(rules):
        clauses.append("each is predicted by what it is late")
    elif most := max(ahead):
        least = min(ahead)
        far = _updates(most) if least == most else f"{least} to {_updates(most)}"
        name = law if isinstance(law, str) else getattr(law, "__name__", type(law).__name__)
        clauses.append(f"every stage predicts {far} ahead by the {name} law")
    clauses.append("backwards look back" if law == "average" else _BACKWARDS[method.backward])
    added = [*method.passes, *(rule.correction for rule in rules if rule.correction)]
    if added:
        names = dict.fromkeys(type(each).__name__ for each in added)
        spaced = (re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower() for name in names)
        clauses.append(f"steps have {' or '.join(spaced)}")
    if late > 1 and optimizer is not None and family_of(optimizer) in ("adam", "adamw", "nadam"):
        clauses.append(f"so late, SOAP loses far less than {type(optimizer).__name__}")
    return "; ".join(clauses)


def _updates(count: int) -> str:
    return f"{count} update{'s' * (count != 1)}"
