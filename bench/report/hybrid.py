"""Stale weights and the hybrid that ends without them, in small, and the published table apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from table import span, table

from .accuracy import PAIRED, Model, apart, ended, less, read_study

FOLDER = "2026-11-23-hybrid"
PUBLISHED = "published/hybrid.json"
FIRST = "resnet-44-six-stages.json"

#: Files of the folder, and what is in them.
MODELS = {
    "resnet-8": "ResNet-8",
    "resnet-20": "ResNet-20",
    "resnet-44": "ResNet-44",
    "resnet-20-two-stages": "ResNet-20",
}
_SAID = {
    "sync": "non-pipelined",
    "stale": "pipelined, the paper's: nothing kept, a window that hides communication",
    "hybrid": "`stale` for half of the updates, then `sync`",
    "vanilla": "pipelined, half as late",
    "pipedream": "as late as `vanilla`, with kept weights",
    "spectrain": "as late as `vanilla`, predicted",
    "auto": "likewise, by the second-order law",
    "hybrid-auto": "`auto` for half of the updates, then `sync`",
}


def read(results: Path) -> dict[str, Model]:
    """The models that there are, by name and number of stages."""
    paths = {name: results / FOLDER / f"{name}.json" for name in MODELS}
    found = {name: read_study(path) for name, path in paths.items() if path.exists()}
    return {f"{MODELS[name]}, N = {_stages(model)}": model for name, model in found.items()}


def section(results: Path) -> str:
    """Ours, what it says, and the published table; nothing without a run."""
    models = read(results)
    about = next(iter(models.values())).about
    settings = about["settings"]
    cuts = dict.fromkeys((_stages(model), _late(model)) for model in models.values())
    shapes = ", or ".join(f"{n} stages, where `stale` is {late} updates late" for n, late in cuts)
    seeds = sorted({model.seeds for model in models.values()})
    published = json.loads((results / PUBLISHED).read_text())
    parts = [
        "## Stale weights and hybrid",
        f"The table of [{published['title'].partition(',')[0]}]({published['preprint']}), in "
        "small: do stale weights cost more as the network grows, does training without a pipeline "
        "at the end make up for them, and what does prediction do there? On CIFAR-10, "
        f"in {shapes}. "
        f"Width {settings['width']} instead of 16, {about['updates']} updates of "
        f"{settings['batch_size']} images instead of many epochs of {published['batch_size']}; "
        f"learning rate {settings['lr']:g}, momentum 0.9 and decay {settings['weight_decay']:g} "
        f"are the paper's, the rate rises over {settings['warmup']} updates and falls as half a "
        f"cosine. Seeds: {span(seeds)}; test images: {settings['test_samples']}. The paper has "
        f"two stages, and deeper networks. {_first_look(results)}One thread of "
        f"{about['cpu'].split(',')[0]}, torch {about['versions']['torch']}, {about['date']}:\n\n"
        "    python -m studies study --data stale-resnet-20 --data-dir cifar --seeds "
        f"{max(seeds)} --out runs/stale-resnet-20",
        "### Test accuracy of stale weights, %",
        "Mean over the seeds and half of its 95 % interval (Student's t).",
        _accuracies(models),
        "### Points above or below another method",
        PAIRED,
        _points(models),
        "Of the published ordering this finds that stale weights end lower; not that they cost "
        "more the deeper a network is, where the paper's are far deeper, nor that the hybrid makes "
        "up for it. The paper trains many epochs before its hybrid changes, and many after. Here "
        "the learning rate has fallen to half by then.",
        "### The published hybrid",
        _published(published),
    ]
    return "\n\n".join(parts)


def _first_look(results: Path) -> str:
    """What a shorter run with another number of stages came to, before these."""
    path = results / FOLDER / FIRST
    if not path.exists():
        return ""
    model = read_study(path)
    ends = ", ".join(f"`{method}` {ended(runs)}" for method, runs in model.accuracies.items())
    return (
        f"A look at other numbers came first, ResNet-44 in {_stages(model)} stages, {_late(model)} "
        f"updates late, for {model.about['updates']} updates: {ends}. "
    )


def _stages(model: Model) -> int:
    (stages,) = {row["stages"] for row in model.about["rows"]}
    return int(stages)


def _late(model: Model) -> int:
    return int(next(r["delay"] for r in model.about["rows"] if r["contender"] == "stale"))


def _accuracies(models: Mapping[str, Model]) -> str:
    heads = "|".join(["method|what it is", *(f">{name}" for name in models)])
    rows = [
        [f"`{method}`", said, *(_ended(model, method) for model in models.values())]
        for method, said in _SAID.items()
        if any(method in model.accuracies for model in models.values())
    ]
    return table(heads, rows)


def _ended(model: Model, method: str) -> str:
    return ended(model.accuracies[method]) if method in model.accuracies else ""


def _points(models: Mapping[str, Model]) -> str:
    """Every method less synchronous training, and what the ends without a pipeline are good for."""
    pairs = [(method, "sync") for method in _SAID if method != "sync"]
    pairs += [("hybrid", "stale"), ("auto", "stale"), ("auto", "hybrid"), ("hybrid-auto", "auto")]
    rows = []
    for pair in pairs:
        there = [model.accuracies.keys() >= set(pair) for model in models.values()]
        cells = [
            apart(model.points(*pair)) if both else ""
            for model, both in zip(models.values(), there, strict=True)
        ]
        if any(there):
            rows.append([less(*pair), *cells])
    return table("|".join(["method, less another", *(f">{name}" for name in models)]), rows)


def _published(document: Mapping[str, Any]) -> str:
    heads = "|".join(["model", *(f">{name}" for name in document["columns"])])
    rows = [
        [model, *(f"{value:.2f}" for value in values)] for model, values in document["rows"].items()
    ]
    return "\n\n".join(
        [
            f"From [{document['title']}]({document['source']}), read on {document['read']}; not "
            "measured here, and not to be mixed with the above: full-size networks in "
            f"{document['stages']} stages. Accuracy, %. Its ordering: the deeper the network, the "
            "more the pipelined one loses, and the hybrid next to nothing.",
            table(heads, rows),
        ]
    )
