"""Equal start: what all ranks have to begin with alike, and the replicas of every stage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from spectrain_ext.method import Method, factor_of, phases_of, rules_at
from spectrain_ext.pipeline.arguments import max_norms_of
from spectrain_ext.pipeline.loops import digest_of
from spectrain_ext.schedule import Place, Replicas

from .board import KEYS, WEIGHTS, Board

_OPTION = "the optimizer's "


def resolved(method: Method, of_phases: Sequence[Sequence[Place]]) -> dict[str, object]:
    """What a method comes to, in which all ranks must agree; of JSON's types.

    By the field of each phase a value, of a rule one for every stage. Functions are told apart by
    what they give.
    """
    found: dict[str, object] = {}
    for n, (phase, places) in enumerate(zip(phases_of(method), of_phases, strict=True)):
        own, then = replace(phase, then=None), phase.then
        factors = [factor_of([(own, place)]) for place in places]
        said: dict[str, list[Any]] = {
            "schedule": [phase.schedule],
            "otherwise": [phase.otherwise],
            "clip": [*max_norms_of(phase, places, None)],
            "rates": [f and f(update) for f in factors for update in (0, 1)],
            "then": [] if then is None else [then.after, then.gap],
        }
        rules = [vars(rules_at(phase, place)) for place in places]
        for field in rules[0]:
            values = (rule[field] for rule in rules)
            said[field] = [(v(1), v(2)) if field == "law" and callable(v) else v for v in values]
        where = f"{phase.name!r}{f', phase {n}' if n else ''}"
        for field, each in said.items():
            plain = (v is None or isinstance(v, (str, int, float)) for v in each)
            shown = [v if is_plain else _shown(v) for v, is_plain in zip(each, plain, strict=True)]
            found[f"method: {field} of {where}"] = shown
    return found


def check_equal_start(
    board: Board,
    replicas: Replicas,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Compare the parameters of every stage's replicas, and the options of their optimizers.

    Module buffers may differ: they are each replica's own. Every rank calls this, and all come to
    the same end: a ValueError names the stage, two of its ranks and the first key that differs.
    """
    mine = _digests(module, optimizer)
    wholes = board.gathered(WEIGHTS, hashlib.sha256(json.dumps(mine).encode()).hexdigest())
    for k in range(replicas.stages):
        first, *others = replicas.ranks_of(k)
        for other in others:
            if wholes[other] != wholes[first]:
                found = board.gathered(KEYS, mine)
                raise ValueError(_difference(k, first, other, found[first], found[other]))


def _digests(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, str]:
    found = {repr(name): digest_of(p) for name, p in module.named_parameters()}
    for g, group in enumerate([] if optimizer is None else optimizer.param_groups):
        for name, value in sorted(group.items()):
            if name != "params":
                found[f"{_OPTION}{name!r} of parameter group {g}"] = _shown(value)
    return found


def _shown(value: object) -> str:
    """A value, or only its type where its text has an address in it, as a function's has."""
    text = repr(value)
    return f"a {type(value).__qualname__}" if " at 0x" in text else text


def _difference(stage: int, first: int, other: int, a: dict[str, str], b: dict[str, str]) -> str:
    where = f"stage: the replicas of stage {stage} must start from the same weights and options; "
    for key in [*a, *b]:
        if key not in a or key not in b:
            has, has_not = (first, other) if key in a else (other, first)
            return f"{where}rank {has} has {key}, and rank {has_not} has not"
        if a[key] != b[key] and key.startswith(_OPTION):
            return f"{where}{key} is {a[key]} on rank {first} and {b[key]} on rank {other}"
        if a[key] != b[key]:
            return f"{where}{key} of rank {first} is not that of rank {other}"
    return f"{where}rank {first} and rank {other} have their parameters in another order"
