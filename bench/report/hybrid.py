"""Stale weights and the hybrid that ends without them, in small, and the published table apart."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from table import table

from studies.frontier import Interval

from .accuracy import Model, read_study

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
    if not models:
        return ""
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
        f"cosine. Seeds: {_numbers(seeds)}; test images: {settings['test_samples']}. The paper has "
        f"two stages, and deeper networks. {_first_look(results)}One thread of "
        f"{about['cpu'].split(',')[0]}, torch {about['versions']['torch']}, {about['date']}:\n\n"
        "    python -m studies study --data stale-resnet-20 --data-dir cifar --seeds "
        f"{max(seeds)} --out runs/stale-resnet-20",
        "### Test accuracy of stale weights, %",
        "Mean over the seeds and half of its 95 % interval (Student's t).",
        _table(models, _accuracy),
        "### Points above or below synchronous training",
        "Paired by seed, with the 95 % interval.",
        _table(models, _points, but=("sync",)),
        "\n".join(f"- {line}" for line in _findings(models)),
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
    ends = ", ".join(f"`{method}` {_accuracy(model, method)}" for method in model.accuracies)
    return (
        f"A look at other numbers came first, ResNet-44 in {_stages(model)} stages, {_late(model)} "
        f"updates late, for {model.about['updates']} updates: {ends}. "
    )


def _stages(model: Model) -> int:
    (stages,) = {row["stages"] for row in model.about["rows"]}
    return int(stages)


def _late(model: Model) -> int:
    return int(next(r["delay"] for r in model.about["rows"] if r["contender"] == "stale"))


def _numbers(seeds: list[int]) -> str:
    return str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"


def _table(models: Mapping[str, Model], cell: Any, but: tuple[str, ...] = ()) -> str:
    heads = "|".join(["method|what it is", *(f">{name}" for name in models)])
    there = {name for model in models.values() for name in model.accuracies}
    rows = [
        [f"`{method}`", said, *(cell(model, method) for model in models.values())]
        for method, said in _SAID.items()
        if method in there and method not in but
    ]
    return table(heads, rows)


def _accuracy(model: Model, method: str) -> str:
    runs = model.accuracies.get(method)
    if runs is None:
        return ""
    if lost := runs.count(None):
        return f"{lost} of {len(runs)} diverged"
    mean, low, _ = vars(Interval.of([100 * a for a in runs if a is not None])).values()
    return f"{mean:.1f} ± {mean - low:.1f}" if math.isfinite(low) else f"{mean:.1f}"


def _points(model: Model, method: str) -> str:
    return _gap(model, method, "sync") if method in model.accuracies else ""


def _gap(model: Model, method: str, other: str) -> str:
    found = model.points(method, other)
    if found is None:
        return "diverged"
    if not math.isfinite(found.low):
        return f"{found.mean:+.1f}"
    return f"{found.mean:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"


_ASKED = (
    ("stale", "sync", "Do stale weights cost accuracy?"),
    ("hybrid", "stale", "Does the end without a pipeline make up for them?"),
    ("hybrid", "sync", "All of it?"),
    ("auto", "stale", "Does prediction, half as late, do better than stale weights?"),
    ("auto", "hybrid", "Does it do without the synchronous end?"),
    ("hybrid-auto", "auto", "Does such an end add to prediction?"),
)


def _findings(models: Mapping[str, Model]) -> Iterator[str]:
    for method, other, question in _ASKED:
        said = [
            f"{name}: {_gap(model, method, other)}"
            for name, model in models.items()
            if {method, other} <= model.accuracies.keys()
        ]
        if said:
            yield f"{question} `{method}` less `{other}`: {'; '.join(said)}."


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
