"""Stale weights, and a hybrid that ends without them, at small size; and the published table."""

from __future__ import annotations

import json
from pathlib import Path

from table import table

from .accuracy import Model, apart, ended, less, read_study

FOLDER = "2026-11-23-hybrid"
PUBLISHED = "published/hybrid.json"

#: Files of the folder, and what is in them.
MODELS = {
    "resnet-8": "ResNet-8",
    "resnet-20": "ResNet-20",
    "resnet-44": "ResNet-44",
    "resnet-20-two-stages": "ResNet-20",
}
_SAID = {
    "sync": "non-pipelined",
    "stale": "pipelined as in the paper: nothing kept, wide window",
    "hybrid": "`stale` for half of the updates, then `sync`",
    "vanilla": "pipelined, half as late",
    "pipedream": "as late as `vanilla`, with stashed weights",
    "spectrain": "as late as `vanilla`, linear prediction",
    "auto": "as late as `vanilla`, second-order prediction",
    "hybrid-auto": "`auto` for half of the updates, then `sync`",
}


def read(results: Path) -> dict[str, Model]:
    """Read the models that have a file, by name and number of stages."""
    paths = {name: results / FOLDER / f"{name}.json" for name in MODELS}
    found = {name: read_study(path) for name, path in paths.items() if path.exists()}
    return {f"{MODELS[name]}, N = {_stages(model)}": model for name, model in found.items()}


_PAIRS = (
    *(("stale", "sync"), ("hybrid", "sync"), ("spectrain", "sync"), ("auto", "sync")),
    *(("hybrid", "stale"), ("auto", "hybrid")),
)


def accuracies(results: Path) -> str:
    """Means, and half of their 95 % intervals."""
    models = read(results)
    heads = "|".join(["method|description", *(f">{name}" for name in models)])
    rows = [
        [f"`{method}`", said, *(_ended(model, method) for model in models.values())]
        for method, said in _SAID.items()
        if any(method in model.accuracies for model in models.values())
    ]
    return table(heads, rows)


def gaps(results: Path) -> str:
    """Points by which methods are above others, paired by seed."""
    models = read(results)
    rows = []
    for pair in _PAIRS:
        there = [model.accuracies.keys() >= set(pair) for model in models.values()]
        cells = [
            apart(model.points(*pair)) if both else ""
            for model, both in zip(models.values(), there, strict=True)
        ]
        if any(there):
            rows.append([less(*pair), *cells])
    return table("|".join(["difference", *(f">{name}" for name in models)]), rows)


def published(results: Path) -> str:
    """The paper's table."""
    document = json.loads((results / PUBLISHED).read_text())
    heads = "|".join(["model", *(f">{name}" for name in document["columns"])])
    rows = [
        [model, *(f"{value:.2f}" for value in values)] for model, values in document["rows"].items()
    ]
    return table(heads, rows)


def _stages(model: Model) -> int:
    (stages,) = {row["stages"] for row in model.about["rows"]}
    return int(stages)


def _ended(model: Model, method: str) -> str:
    return ended(model.accuracies[method]) if method in model.accuracies else ""
