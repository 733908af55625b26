"""Simulates asynchronous data parallelism: every rule with an increasing number of workers.

The data set is digits. Each rule uses its own best learning rate for each number of workers. The
search starts at the previous number's best rate and moves by factors of two until both neighbours
have a higher mean test loss over the judging seeds. The reported results come from other seeds.

    python bench/async_workers.py --json workers.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import root  # noqa: F401  # finds studies
import torch
from rivals.machine import environment
from torch import nn

from studies.data.digits import load_digits
from studies.models import residual_mlp
from studies.workers import RULES, Rule, Trained, train

#: Start of the search. Plain SGD takes ten times the step of SGD with momentum .9.
START = {"asgd": 0.125}
_JUDGED = 1000  # the judging seeds begin here


def found(
    rule: Rule, model: nn.Module, data: Any, seeds: Sequence[int], options: Mapping[str, Any]
) -> list[Trained | None]:
    """Return the result of a training for every seed."""
    return [train(rule, model, data, seed=seed, **options) for seed in seeds]


def mean_loss(ends: Sequence[Trained | None]) -> float:
    """Return the mean loss, infinite if a run diverged."""
    return statistics.fmean(math.inf if end is None else end.loss for end in ends)


def case(
    name: str, workers: int, model: nn.Module, data: Any, a: argparse.Namespace, best: float
) -> dict[str, Any]:
    """Search the rate from a first guess on, then train at the best one."""
    rule, tried = RULES[name], {}
    options = {"workers": workers, "updates": a.updates, "batch_size": a.batch_size}
    judges = range(_JUDGED, _JUDGED + a.judges)

    def judged(lr: float) -> float:
        if lr not in tried:
            tried[lr] = mean_loss(found(rule, model, data, judges, {**options, "lr": lr}))
        return tried[lr]

    while (better := min((best, 2 * best, best / 2), key=judged)) != best:
        best = better
    ends = found(rule, model, data, range(a.seeds), {**options, "lr": best})
    return {
        "rule": name,
        "workers": workers,
        "lr": best,
        "tried": {f"{lr:g}": tried[lr] if tried[lr] < 1e6 else None for lr in sorted(tried)},
        "ends": [None if end is None else end._asdict() for end in ends],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32, 1, 16, 4])
    parser.add_argument("--updates", type=int, default=900)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--judges", type=int, default=2)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args(argv)
    torch.set_num_threads(1)
    data = load_digits()
    layers = residual_mlp(
        a.depth + 2, features=64, width=a.width, depth=a.depth, classes=10, seed=0
    )
    model = nn.Sequential(*layers)
    document: dict[str, Any] = {
        "command": "bench/async_workers.py",
        "environment": environment(),
        "settings": {k: v for k, v in vars(a).items() if k != "json"},
        "parameters": sum(p.numel() for p in model.parameters()),
        "rows": [],
    }
    best = {name: START.get(name, 2.0**-7) for name in RULES}
    for workers in a.workers:
        for name in RULES:
            began = time.perf_counter()
            row = case(name, workers, model, data, a, best[name])
            best[name] = row["lr"]
            document["rows"].append(row)
            ends = [end["accuracy"] for end in row["ends"] if end is not None]
            mean = statistics.fmean(ends) if ends else math.nan
            took = time.perf_counter() - began
            print(f"{workers:2} {name:10} {row['lr']:8g} {mean:.4f} {took:.0f} s", flush=True)
            if a.json is not None:
                a.json.parent.mkdir(parents=True, exist_ok=True)
                a.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
