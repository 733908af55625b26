"""Test accuracy in the paper's experiment at small size, and the published tables."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from table import table

from spectrain_ext.extras import picture
from studies.frontier import Interval
from studies.looks import looks

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
DATA = {"cifar10": "CIFAR-10", "text": "tiny Shakespeare"}
_OURS = "data-parallel-4"
#: Compared with each other; every method is also compared with synchronous training.
_PAIRS = (("spectrain", "pipedream"), ("auto", "pipedream"), ("auto-4", "auto"))


class Model(NamedTuple):
    """One study: its document, and accuracies by method and seed (None: the run diverged)."""

    about: Mapping[str, Any]
    accuracies: Mapping[str, Sequence[float | None]]

    @property
    def seeds(self) -> int:
        return min(map(len, self.accuracies.values()))

    def points(self, method: str, other: str = "sync") -> Interval | None:
        """Return the points of a method above another, paired by seed; None: a run diverged."""
        pairs = [*zip(self.accuracies[method], self.accuracies[other], strict=False)]
        if any(a is None or b is None for a, b in pairs):
            return None
        return Interval.of([100 * (a - b) for a, b in pairs])


def read(results: Path, kind: str = "") -> dict[str, Model]:
    """Read the models that have a file, by its name without its kind."""
    found = {}
    for name in MODELS:
        path = results / FOLDER / f"{name}{kind}.json"
        if path.exists():
            found[name] = read_study(path)
    return found


def read_study(path: Path) -> Model:
    """Read a document of ``python -m studies study``."""
    document = json.loads(path.read_text())
    runs = {
        row["contender"]: [
            None if loss is None else accuracy
            for loss, accuracy in zip(row["losses"], row["accuracies"], strict=True)
        ]
        for row in document["rows"]
    }
    return Model(document, runs)


def models(results: Path) -> str:
    """Sizes and settings."""
    lines = []
    for name, model in read(results).items():
        about, settings = model.about, model.about["settings"]
        (sizes,) = about["parameters"].values()
        lines.append(
            [
                *(MODELS[name], DATA[settings["data"]], str(settings["width"])),
                " + ".join(f"{size / 1000:.0f}" for size in sizes),
                f"{about['updates']:,} of {settings['batch_size']}",
                f"{settings.get('optimizer', 'sgd')}, {settings['lr']:g}",
                str(model.seeds),
            ]
        )
    heads = "model|data|>width|>thousand parameters by stage|>updates|optimizer, learning rate"
    return table(f"{heads}|>seeds", lines)


def twice(results: Path) -> str:
    """Test losses of one seed at twice the learning rate."""
    found = read(results, "-twice")
    heads = "|".join(["method", *(f">{MODELS[name]}" for name in found)])
    lines = [
        [f"`{method}`", *(_end(model, method) for model in found.values())]
        for method in _methods(found)
    ]
    return table(heads, lines)


def _end(model: Model, method: str) -> str:
    (row,) = (row for row in model.about["rows"] if row["contender"] == method)
    losses = [loss for loss in row["losses"] if loss is not None]
    if len(losses) < len(row["losses"]):
        return "diverged"
    mean = statistics.fmean(losses)
    return f"{mean:.3f}" if mean < 10 else f"{mean:,.0f}"


def _methods(models: Mapping[str, Model]) -> list[str]:
    return list(dict.fromkeys(name for model in models.values() for name in _ordered(model)))


def _ordered(model: Model) -> Iterator[str]:
    """Synchronous training first, then in the order of `_ORDER`."""
    first = [name for name in ("sync", _OURS) if name in model.accuracies]
    yield from first
    yield from sorted(set(model.accuracies) - set(first), key=_place)


_ORDER = ("vanilla", "pipedream", "spectrain", "spectrain-stash", "pipeoptim", "auto", "auto-4")


def _place(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def accuracies(results: Path) -> str:
    """Means, and half of their 95 % intervals."""

    def cell(model: Model, method: str) -> str:
        if method not in model.accuracies:
            return "as `sync`" if method == _OURS else ""
        return ended(model.accuracies[method])

    found = read(results)
    return _table(found, "method", {f"`{name}`": name for name in _methods(found)}, cell)


def gaps(results: Path) -> str:
    """Points by which methods are above others, paired by seed."""
    found = read(results)
    pairs = [(name, "sync") for name in _methods(found) if name != "sync"] + [*_PAIRS]

    def cell(model: Model, pair: tuple[str, str]) -> str:
        return apart(model.points(*pair)) if model.accuracies.keys() >= set(pair) else ""

    return _table(found, "difference", {less(*pair): pair for pair in pairs}, cell)


def between(results: Path, method: str, other: str, model: str) -> str:
    """Points of one method above another on one model, with the interval."""
    return apart(read(results)[model].points(method, other)).strip("*")


def _table(
    models: Mapping[str, Model], head: str, rows: Mapping[str, T], cell: Callable[[Model, T], str]
) -> str:
    heads = "|".join([head, *(f">{MODELS[name]}" for name in models)])
    lines = [[name, *(cell(model, of) for model in models.values())] for name, of in rows.items()]
    return table(heads, lines)


def less(method: str, other: str) -> str:
    return f"`{method}` - `{other}`"


def ended(accuracies: Sequence[float | None], digits: int = 1) -> str:
    """The mean in %, and half of its interval where there is one."""
    if lost := accuracies.count(None):
        return f"{lost} of {len(accuracies)} diverged"
    found = Interval.of([100 * a for a in accuracies if a is not None])
    half = f" ± {found.mean - found.low:.{digits}f}" if math.isfinite(found.low) else ""
    return f"{found.mean:.{digits}f}{half}"


def apart(found: Interval | None, digits: int = 1) -> str:
    """Points between two methods, bold where the interval leaves out zero; None: one diverged."""
    if found is None:
        return "diverged"
    if not math.isfinite(found.low):
        return f"{found.mean:+.{digits}f}"
    text = f"{found.mean:+.{digits}f} [{found.low:+.{digits}f}, {found.high:+.{digits}f}]"
    return f"**{text}**" if found.low > 0 or found.high < 0 else text


def published(results: Path) -> str:
    """The table of the authors' implementation."""
    document = json.loads((results / PUBLISHED).read_text())
    columns = document["columns"]
    heads = ["model", "data", f">{columns[0]}"]
    heads += [f">{name}, {n}" for n in ("2 stages", "4 stages") for name in columns[1:]]
    lines = []
    for model, two in document["two_stages"].items():
        four = document["four_stages"][model]
        cells = [two[0], *two[1:], *four[1:]]
        lines.append([model, document["data"][model], *(f"{value:.2f}" for value in cells)])
    return table("|".join(heads), lines)


def published_means(results: Path) -> str:
    """Mean differences from data parallelism over its models, in 4 stages."""
    document = json.loads((results / PUBLISHED).read_text())
    found = {
        name: statistics.fmean(row[at] - row[0] for row in document["four_stages"].values())
        for at, name in enumerate(document["columns"])
        if at
    }
    return ", ".join(f"{name} {gap:+.2f}" for name, gap in found.items())


def draw(results: Path, path: Path) -> None:
    """Draw the points above or below sync, a panel for every model."""
    models = read(results)
    methods = [name for name in _methods(models) if name != "sync"]
    drawn = looks(methods)
    with picture(path, 9.0, 5.0) as figure:
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
