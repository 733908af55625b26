"""Checks, before training, that all ranks agree on settings, stages, ties and weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from torch import Tensor, nn

from spectrain_ext.method import factor_of, rules_at
from spectrain_ext.pipeline.applied_method import AppliedMethod, max_norm_at
from spectrain_ext.pipeline.arguments import check_order
from spectrain_ext.pipeline.evaluation import digest_of
from spectrain_ext.pipeline.names import bare, full_names
from spectrain_ext.pipeline.stage import Stage
from spectrain_ext.pipeline.ties import (
    Copy,
    Member,
    TiedStages,
    check_look,
    look_of,
    names_of,
    ties_of,
)
from spectrain_ext.schedule import Replicas, name_of
from spectrain_ext.weights.storage import local_part

from .board import Board

# What ranks with one stage start from, by kind, and what to do if it differs.
_SEED = "call torch.manual_seed with the same seed on both before you make the stage"
_REMEDIES = {
    "options": "give both the same",
    "weights": f"{_SEED}, or load the same weights into both",
    "shards": f"{_SEED}, or load the same weights into both",
    "seeds": "call torch.manual_seed with the same seed on both before you make the pipeline",
}

# Every rank calls each of these, with the same outcome on all.


def check_equal(of_ranks: Sequence[Mapping[str, Any]], rank: int, names: Iterable[str]) -> None:
    """Raise ValueError unless all ranks have the same settings of these names."""
    mine = of_ranks[rank]
    for (r, theirs), name in product(enumerate(of_ranks), names):
        if theirs.get(name) != mine[name]:
            raise ValueError(
                f"{name}: rank {rank} has {mine[name]!r} and rank {r} has {theirs.get(name)!r}; "
                "all must have the same"
            )


def rules_to_compare(methods: Sequence[AppliedMethod]) -> dict[str, object]:
    """Return what methods' rules give for every stage, as JSON values that ranks compare."""
    found: dict[str, object] = {}
    for n, (method, places, _, _) in enumerate(methods):
        factors = [factor_of(method, place) for place in places]
        said: dict[str, list[Any]] = {
            "schedule": [name_of(method.schedule)],
            "otherwise": [method.otherwise],
            "clip": [max_norm_at(method, place, None) for place in places],
            # Functions are compared by their results.
            "rates": [f and f(update) for f in factors for update in (0, 1)],
            "then": [method.then and method.then.after],
            "passes": [*map(repr, method.passes)],
        }
        rules = [vars(rules_at(method, place)) for place in places]
        for field in rules[0]:
            values = (rule[field] for rule in rules)
            said[field] = [(v(1), v(2)) if field == "law" and callable(v) else v for v in values]
        where = f"{method.name!r}{f', phase {n}' if n else ''}"
        found[f"window of {where}"] = [place.window for place in places]
        for field, each in said.items():
            found[f"method: {field} of {where}"] = [
                v if v is None or isinstance(v, (str, int, float)) else _shown(v) for v in each
            ]
    return found


def check_cut(of_ranks: Sequence[Mapping[str, Any]], replicas: Replicas) -> None:
    """Raise ValueError unless the ranks hold the stages of one cut in its order."""
    cuts = [dict(rank["cut"]) for rank in of_ranks]
    for k in range(replicas.stages):
        first, *others = replicas.ranks_of(k)
        for r in others:
            if cuts[r][k] != cuts[first][k]:
                raise ValueError(
                    f"stage: ranks {first} and {r} have replicas of stage {k}, but other stages of "
                    f"a cut, (stage, of how many): {cuts[first][k]} and {cuts[r][k]}"
                )
    check_order([cuts[replicas.ranks_of(k)[0]][k] for k in range(replicas.stages)])


def agreed_ties(
    board: Board,
    replicas: Replicas,
    modules: Mapping[int, nn.Module],
    copies: Sequence[Copy],
    of_ranks: Sequence[Mapping[str, Any]],
) -> list[TiedStages]:
    """Return the ties of all stages; tell copies here their originals' names in checkpoints."""
    firsts = dict.fromkeys(row[0] for row in replicas.rows)  # of the ranks that share a replica
    asked = [(Member(*place), look) for r in firsts for *place, look in of_ranks[r]["copies"]]
    if not asked:
        return []
    homes = {f"{member.home} {member.home_name}" for member, _ in asked}  # keys of JSON
    mine: dict[str, object] = {}
    for k, module in modules.items():
        for p, names in names_of(module).items():
            original = look_of(p), [*full_names(module, names, f"{k}.").values()]
            keys = homes.intersection(f"{k} {name}" for name in (*map(bare, names), *names))
            mine |= dict.fromkeys(keys, original)
    originals = board.exchange_json("comparing ties", mine)
    own = {(copy.stage, copy.names[0]): copy for copy in copies}
    for member, look in asked:
        counts = [replicas.counts[k] for k in (member.home, member.copy)]
        if max(counts) > 1:
            raise ValueError(
                f"replicas: {member}; a stage with tied weights has one replica, these have "
                f"{counts[0]} and {counts[1]}. Untie them: tie_word_embeddings=False in a Hugging "
                "Face configuration"
            )
        there = originals[replicas.ranks_of(member.home)[0]]
        seen, names = there.get(f"{member.home} {member.home_name}", (None, []))
        check_look(member, look, seen)
        if member.copy in modules:
            own[member.copy, member.name].names_elsewhere = names
    return ties_of(member for member, _ in asked)


def start_of(
    stage: Stage, arguments: Mapping[str, object], dealt: bool
) -> dict[str, dict[str, str]]:
    """Return what the ranks of a stage must have in common when they start, by kind.

    ``dealt``: whether there are replicas, whose shards must be equal, too.
    """
    weights, groups = stage.weights, dict[Tensor, int]()
    options = {
        f"the argument {name}": str(getattr(value, "__qualname__", None) or _shown(value))
        for name, value in arguments.items()
    }
    if weights is not None:
        scheduler = weights.scheduler
        for what, made in (("optimizer", weights.optimizer), ("scheduler", scheduler)):
            name = f"{type(made).__module__}.{type(made).__qualname__}"
            options[f"the {what}"] = "None" if made is None else name
        for g, group in enumerate(weights.optimizer.param_groups):
            groups |= dict.fromkeys(group["params"], g)
            for name, value in sorted(group.items()):
                if name != "params":
                    options[f"the optimizer's {name!r} of parameter group {g}"] = _shown(value)
        for name, value in sorted(getattr(scheduler, "state_dict", dict)().items()):
            options[f"the scheduler's {name!r}"] = _shown(value)
    digests: dict[bool, dict[str, str]] = {True: {}, False: {}}  # of shards, of whole tensors
    # without module buffers, which belong to each replica
    for name, p in stage.module.named_parameters():
        (shape, dtype, trained, *placed), at = look_of(p), groups.get(local_part(p))
        use = "tied" if at is None else f"in parameter group {at}"
        look = [f"{dtype} {shape}", *map(str, placed), use if trained else "frozen"]
        options[f"parameter {name!r}"] = ", ".join(look)
        sharded = any(each.is_shard() for each in getattr(p, "placements", ()))
        if dealt or not sharded:
            digests[sharded][repr(name)] = digest_of(local_part(p))
    states = {f"the random state of its {s.device}": digest_of(s) for s in stage.random.states()}
    return {"options": options, "weights": digests[False], "shards": digests[True], "seeds": states}


def check_equal_start(of_ranks: Sequence[Mapping[str, Any]], replicas: Replicas) -> None:
    """Raise ValueError unless the ranks of each stage have equal weights, options and seeds."""
    for k in range(replicas.stages):
        rows = [replicas.rows[n] for n in replicas.indices_of(k)]
        sharing = [(row[0], rank) for row in rows for rank in row[1:]]  # by tensor parallelism
        equal = [pair for row in rows[1:] for pair in zip(rows[0], row, strict=True)]
        _check_pairs(sharing, f"the ranks that share stage {k}", "shards", k, of_ranks)
        _check_pairs(equal, f"the replicas of stage {k}", "seeds", k, of_ranks)


def _check_pairs(
    pairs: Sequence[tuple[int, int]],
    who: str,
    differs: str,  # the kind that such ranks need not have in common
    k: int,
    of_ranks: Sequence[Mapping[str, Any]],
) -> None:
    for first, other in pairs:
        a, b = (of_ranks[rank]["start"][str(k)] for rank in (first, other))
        for kind, remedy in _REMEDIES.items():
            if kind != differs and [*a[kind].items()] != [*b[kind].items()]:
                raise ValueError(
                    f"stage: {who} must start from the same weights and options; "
                    f"{_difference(first, other, a[kind], b[kind], kind)}; {remedy}"
                )


def _shown(value: object) -> str:
    """Return ``repr(value)``, or only the type where that has an address in it (a function)."""
    text = repr(value)
    return f"a {type(value).__qualname__}" if " at 0x" in text else text


def _difference(first: int, other: int, a: dict[str, str], b: dict[str, str], kind: str) -> str:
    for key in [*a, *b]:
        if key not in a or key not in b:
            has, has_not = (first, other) if key in a else (other, first)
            return f"rank {has} has {key}, and rank {has_not} has not"
        if a[key] != b[key] and kind == "options":
            return f"{key} is {a[key]} on rank {first} and {b[key]} on rank {other}"
        if a[key] != b[key]:
            return f"{key} of rank {first} is not that of rank {other}"
    return f"rank {first} and rank {other} have their parameters in another order"
