"""The paper's table in small, and the published one beside it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from table import span, table

from spectrain_ext.extras import picture
from studies.frontier import Interval
from studies.looks import looks
from studies.presets import preset

FOLDER = "2026-11-22-accuracy"
PUBLISHED = "published/spectrain.json"
T = TypeVar("T")

#: Files of the folder in the paper's order, and what is in them.
MODELS = {
    "vgg16": "VGG16",
    "resnet": "ResNet-18",
    "inception-v4": "Inception-v4",
    "snn": "SNN",
    "transformer": "transformer",
    "lstm": "residual LSTM",
}
DATA = {"cifar10": "CIFAR-10", "text": "tiny Shakespeare, next character"}
_OURS = "data-parallel-4"
_PREDICT = ("spectrain", "spectrain-stash", "pipeoptim", "auto")
_NUMBERS = ("None", "One", "Two", "Three", "Four", "Five", "All")


class Model(NamedTuple):
    """What one study found: the accuracies by method and seed, None of a run that diverged."""

    about: Mapping[str, Any]
    accuracies: Mapping[str, Sequence[float | None]]

    @property
    def seeds(self) -> int:
        """That every method has finished."""
        return min(map(len, self.accuracies.values()))

    def points(self, method: str, other: str = "sync") -> Interval | None:
        """By how many points a method ends above another, paired by seed; None: one diverged."""
        pairs = [*zip(self.accuracies[method], self.accuracies[other], strict=False)]
        if any(a is None or b is None for a, b in pairs):
            return None
        return Interval.of([100 * (a - b) for a, b in pairs])


def read(results: Path, kind: str = "") -> dict[str, Model]:
    """The models that there are, by the name of their file less its kind."""
    found = {}
    for name in MODELS:
        path = results / FOLDER / f"{name}{kind}.json"
        if path.exists():
            found[name] = read_study(path)
    return found


def read_study(path: Path) -> Model:
    """What ``python -m studies study`` wrote."""
    document = json.loads(path.read_text())
    runs = {
        row["contender"]: [
            None if loss is None else accuracy
            for loss, accuracy in zip(row["losses"], row["accuracies"], strict=True)
        ]
        for row in document["rows"]
    }
    return Model(document, runs)


def section(results: Path) -> str:
    """Ours with what was cut down, the gaps, what they say, and the published table apart."""
    models = read(results)
    published = json.loads((results / PUBLISHED).read_text())
    parts = [
        "## Accuracy",
        _opening(models),
        "### What was trained",
        _cut_down(models),
        "### Test accuracy, %",
        "Mean over the seeds and half of its 95 % interval (Student's t). `auto-4` cuts a "
        "minibatch into 4 microbatches, and is then one update late instead of three; all "
        "others have one microbatch. `data-parallel-4` is four replicas, each with a quarter "
        "of the minibatch and BatchNorm's statistics of that quarter; a model without "
        "BatchNorm makes the updates of `sync` then, up to the order of sums (and dropout's "
        "draws), and was not trained again.",
        _accuracies(models),
        "### Points above or below another method",
        PAIRED,
        _points(models),
        "![Test accuracy of every method less that of synchronous training, with 95 % "
        "intervals, one panel a model](results-accuracy.png)",
        "### How far the learning rate could have been raised",
        _rates(results, models),
        _twice(results),
        "### The published table",
        _published(published),
    ]
    return "\n\n".join(part for part in parts if part)


def _opening(models: Mapping[str, Model]) -> str:
    seeds = sorted({model.seeds for model in models.values()})
    first = next(iter(models.values())).about
    return (
        f"{_NUMBERS[len(models)]} of the six kinds of model of the "
        "[paper's](https://arxiv.org/abs/1809.02839) table, in four "
        "stages, an update for every minibatch. All methods start from the same weights, see the "
        "same minibatches and have the same hyper-parameters: the learning rate is the best of "
        f"powers of two for `sync`, by one seed, and the smaller one where two are within 1 %. "
        f"{span(seeds)} seed{'s' * (max(seeds) > 1)}. Far smaller than the "
        "paper's, and far from trained to the end: what they show is who keeps up with "
        "synchronous training, not how good a model can be. One thread of "
        f"{first['cpu'].split(',')[0]}, torch {first['versions']['torch']}, {first['date']}:\n\n"
        "    python -m studies study --data paper-vgg16 --data-dir cifar --seeds "
        f"{max(seeds)} --out runs/paper-vgg16"
    )


def _cut_down(models: Mapping[str, Model]) -> str:
    lines = []
    for name, model in models.items():
        about, settings = model.about, model.about["settings"]
        (sizes,) = about["parameters"].values()
        full = preset(settings["data"], settings["model"], quick=False)
        lines.append(
            [
                MODELS[name],
                DATA[settings["data"]],
                str(settings["width"]),
                " + ".join(f"{size / 1000:.0f}" for size in sizes),
                f"{about['updates']:,} of {settings['batch_size']}",
                f"{settings.get('optimizer', full.optimizer)}, {settings['lr']:g}",
                str(model.seeds),
                f"width {full.width}, {full.epochs} epochs of batches of {full.batch_size}",
            ]
        )
    heads = (
        "model|data|>width|>thousands of parameters, by stage|>updates|optimizer, learning rate"
        "|>seeds|the preset for GPUs"
    )
    return "\n\n".join(
        [
            table(heads, lines),
            "SGD has momentum 0.9, as in the paper. Inception-v4 is trained by Adam: so narrow it "
            "did not leave chance by SGD in so few updates, tried by hand. The rate rises over 30 "
            "updates and then falls "
            "as half a cosine. Cut down: the width, and with it the parameters; the updates, at "
            "most an epoch; the batch "
            f"({_batches(models)} instead of 128); the texts, in place of IMDb. ResNet has 18 "
            "layers instead of 152 (`--depth 152` has them). Inception-v4 is "
            "pytorchcv's with all of its channels divided alike, and its images are resized from "
            "32 to 75 pixels instead of 299. The full sizes are those without "
            "`--quick`: `python -m studies train --data cifar10 --data-dir cifar "
            "--model inception-v4 "
            "--stages 4 --microbatches 1`; they were not trained here.",
        ]
    )


def _batches(models: Mapping[str, Model]) -> str:
    sizes = sorted({model.about["settings"]["batch_size"] for model in models.values()})
    return " or ".join(map(str, sizes))


def _rates(results: Path, models: Mapping[str, Model]) -> str:
    tried = json.loads((results / FOLDER / "rates.json").read_text())
    lines = [
        [
            MODELS[name],
            ", ".join(f"{rate}: {end['loss']:.3f}" for rate, end in tried["rates"][name].items()),
            f"{model.about['settings']['lr']:g}",
        ]
        for name, model in models.items()
    ]
    return "\n\n".join(
        [
            "Rates that were tried, with the test loss of `sync` (one seed):",
            table("model|rate: loss|>taken", lines),
        ]
    )


def _twice(results: Path) -> str:
    """One seed at twice the rate, where there is such a file."""
    models = read(results, "-twice")
    if not models:
        return ""
    heads = "|".join(["method", *(f">{MODELS[name]}" for name in models)])
    lines = [
        [f"`{method}`", *(_end(model, method) for model in models.values())]
        for method in _methods(models)
    ]
    named = " and ".join(
        f"{MODELS[name]} ({model.about['settings']['lr']:g})" for name, model in models.items()
    )
    return "\n\n".join(
        [
            f"At twice the rate that was taken, {named}, `sync` ends about as well, and some of "
            "what is late much worse. That of two rates within 1 % the "
            "smaller one is taken was decided after these runs had been seen. Test loss, one seed:",
            table(heads, lines),
        ]
    )


def _end(model: Model, method: str) -> str:
    """A method's test loss."""
    (row,) = (row for row in model.about["rows"] if row["contender"] == method)
    losses = [loss for loss in row["losses"] if loss is not None]
    if len(losses) < len(row["losses"]):
        return "diverged"
    mean = statistics.fmean(losses)
    return f"{mean:.3f}" if mean < 10 else f"{mean:,.0f}"


def _methods(models: Mapping[str, Model]) -> list[str]:
    return list(dict.fromkeys(name for model in models.values() for name in _ordered(model)))


def _ordered(model: Model) -> Iterator[str]:
    """Synchronous training first, then as the delay falls."""
    first = [name for name in ("sync", _OURS) if name in model.accuracies]
    yield from first
    yield from sorted(set(model.accuracies) - set(first), key=_place)


_ORDER = ("vanilla", "pipedream", "spectrain", "spectrain-stash", "pipeoptim", "auto", "auto-4")


def _place(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _accuracies(models: Mapping[str, Model]) -> str:
    def cell(model: Model, method: str) -> str:
        if method not in model.accuracies:
            return "as `sync`" if method == _OURS else ""
        return ended(model.accuracies[method])

    return _table(models, "method", {f"`{name}`": name for name in _methods(models)}, cell)


def _points(models: Mapping[str, Model]) -> str:
    """Every method less synchronous training, and what predicts less what does not."""
    pairs = [(name, "sync") for name in _methods(models) if name != "sync"]
    pairs += [(name, "pipedream") for name in _PREDICT]
    pairs.append(("auto-4", "auto"))

    def cell(model: Model, pair: tuple[str, str]) -> str:
        return apart(model.points(*pair)) if model.accuracies.keys() >= set(pair) else ""

    return _table(models, "method, less another", {less(*pair): pair for pair in pairs}, cell)


def _table(
    models: Mapping[str, Model], head: str, rows: Mapping[str, T], cell: Callable[[Model, T], str]
) -> str:
    heads = "|".join([head, *(f">{MODELS[name]}" for name in models)])
    lines = [[name, *(cell(model, of) for model in models.values())] for name, of in rows.items()]
    return table(heads, lines)


def less(method: str, other: str) -> str:
    return f"`{method}` less `{other}`"


def ended(accuracies: Sequence[float | None], digits: int = 1) -> str:
    """The mean in %, and half of its interval where there is one."""
    if lost := accuracies.count(None):
        return f"{lost} of {len(accuracies)} diverged"
    found = Interval.of([100 * a for a in accuracies if a is not None])
    half = f" ± {found.mean - found.low:.{digits}f}" if math.isfinite(found.low) else ""
    return f"{found.mean:.{digits}f}{half}"


#: What `apart` shows.
PAIRED = "Paired by seed, with the 95 % interval; bold where that leaves out zero."


def apart(found: Interval | None, digits: int = 1) -> str:
    """Points between two methods; None: a run diverged."""
    if found is None:
        return "diverged"
    if not math.isfinite(found.low):
        return f"{found.mean:+.{digits}f}"
    text = f"{found.mean:+.{digits}f} [{found.low:+.{digits}f}, {found.high:+.{digits}f}]"
    return f"**{text}**" if found.low > 0 or found.high < 0 else text


def _published(document: Mapping[str, Any]) -> str:
    columns = document["columns"]
    heads = ["model", "data", f">{columns[0]}"]
    heads += [f">{name}, {n}" for n in ("2 stages", "4 stages") for name in columns[1:]]
    lines = []
    for model, two in document["two_stages"].items():
        four = document["four_stages"][model]
        cells = [two[0], *two[1:], *four[1:]]
        lines.append([model, document["data"][model], *(f"{value:.2f}" for value in cells)])
    gaps = {
        name: statistics.fmean(row[at] - row[0] for row in document["four_stages"].values())
        for at, name in enumerate(columns)
        if at
    }
    said = ", ".join(f"{name} {gap:+.2f}" for name, gap in gaps.items())
    return "\n\n".join(
        [
            f"From [{document['title']}]({document['source']}), read on {document['read']}; not "
            "measured here, and not to be mixed with the above: full-size models (DenseNet and "
            "GoogLeNet in place of Inception-v4 and the self-normalizing MLP), "
            f"{document['seeds']} seed, learning rates that differ per method, data parallelism on "
            f"{document['devices_of_data_parallelism']} devices. Accuracy, %; v1 predicts again "
            "for the backward (`spectrain`), v2 reuses the forward's prediction "
            "(`spectrain-stash`).",
            table("|".join(heads), lines),
            f"Mean over its six models, in 4 stages, less data parallelism: {said} points. With "
            "one seed nobody can say how much of these is chance.",
        ]
    )


def draw(results: Path, folder: Path) -> None:
    """Points above or below sync, a panel for every model."""
    models = read(results)
    methods = [name for name in _methods(models) if name != "sync"]
    drawn = looks(methods)
    with picture(folder / "results-accuracy.png", 9.0, 5.0) as figure:
        panels = figure.subplots(2, 3, sharey=True).flat
        for axes in list(panels)[len(models) :]:
            axes.set_axis_off()
        for axes, (name, model) in zip(figure.axes, models.items(), strict=False):
            axes.axvline(0.0, color="black", linewidth=1.0)
            for place, method in enumerate(methods):
                gap = model.points(method) if method in model.accuracies else None
                if gap is not None:
                    half = gap.high - gap.mean if math.isfinite(gap.high) else 0.0
                    color = drawn[method].color
                    axes.errorbar(gap.mean, place, xerr=half, color=color, marker="o", capsize=2)
            axes.set_title(f"{MODELS[name]}, seeds: {model.seeds}", fontsize=9)
            axes.grid(True, axis="x", alpha=0.3)
            axes.set_yticks(range(len(methods)), methods, fontsize=8)
            axes.tick_params(axis="x", labelsize=8)
        figure.axes[0].invert_yaxis()
        figure.supxlabel("test accuracy less that of sync, points", fontsize=9)
