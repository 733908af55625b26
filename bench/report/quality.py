"""How well methods train: the paper's models, gaps by depth and delay, prediction errors."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from table import table

from spectrain_ext.method import methods
from studies.frontier import Interval

from . import read
from .races import STUDY, races

#: Studies of the paper's models; of corrections, schedules and averages by others; of deep delays;
#: of error feedback; of deep delays in long trainings.
PAPER, FIELD, DEEP = "2026-11-22-accuracy", "2026-11-23-field", "2026-11-25-deep"
FEEDBACK, LONG = "2026-11-26-feedback", "2026-11-27-deep"

Row = dict[str, Any]

# The paper's models

#: Files of the folder in the paper's order, and what is in them.
MODELS = {
    "vgg16": "VGG16",
    "resnet": "ResNet-18",
    "inception-v4": "Inception-v4",
    "snn": "SNN",
    "transformer": "transformer",
    "lstm": "residual LSTM",
}
_REPLICAS = "data-parallel-4"
_ORDER = (
    *("sync", _REPLICAS, "vanilla", "pipedream", "spectrain", "spectrain-stash", "pipeoptim"),
    *("auto", "auto-4"),
)
#: Compared with each other; every method is also compared with synchronous training.
_PAIRS = (("spectrain", "pipedream"), ("auto", "pipedream"), ("auto-4", "auto"))

#: Test accuracies by method and seed; None: the run diverged.
Accuracies = Mapping[str, Sequence[float | None]]


def _models(results: Path) -> dict[str, Accuracies]:
    """Return the models that have a file."""
    return {
        said: {
            row["contender"]: [
                None if loss is None else accuracy
                for loss, accuracy in zip(row["losses"], row["accuracies"], strict=True)
            ]
            for row in read(results, f"{PAPER}/{name}.json")["rows"]
        }
        for name, said in MODELS.items()
        if (results / PAPER / f"{name}.json").exists()
    }


def accuracies(results: Path) -> str:
    """Means, and half of their 95 % intervals."""

    def cell(method: str, of: Accuracies) -> str:
        if method not in of:
            return "as `sync`" if method == _REPLICAS else ""
        if lost := of[method].count(None):
            return f"{lost} of {len(of[method])} diverged"
        found = Interval.of([100 * a for a in of[method] if a is not None])
        half = f" ± {found.mean - found.low:.1f}" if math.isfinite(found.low) else ""
        return f"{found.mean:.1f}{half}"

    models = _models(results)
    lines = [[f"`{name}`", *(cell(name, of) for of in models.values())] for name in _ORDER]
    return table("|".join(["method", *(f">{name}" for name in models)]), lines)


def gaps(results: Path) -> str:
    """Points by which methods are above others, paired by seed."""
    models = _models(results)
    lines = [
        [f"`{method}` - `{other}`", *(apart(of, method, other) for of in models.values())]
        for method, other in (*((name, "sync") for name in _ORDER[1:]), *_PAIRS)
    ]
    return table("|".join(["difference", *(f">{name}" for name in models)]), lines)


def apart(of: Accuracies, method: str, other: str) -> str:
    """Return the mean difference and its interval, bold where that leaves out zero."""
    if not of.keys() >= {method, other}:
        return ""
    pairs = [*zip(of[method], of[other], strict=False)]
    differences = [100 * (a - b) for a, b in pairs if a is not None and b is not None]
    if len(differences) < len(pairs):
        return "diverged"
    return with_interval(Interval.of(differences))


def with_interval(found: Interval) -> str:
    """Return a mean and its interval, if it has one, bold where that leaves out zero."""
    if not math.isfinite(found.low):
        return f"{found.mean:+.1f}"
    text = f"{found.mean:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"
    return f"**{text}**" if found.low > 0 or found.high < 0 else text


def published(results: Path) -> str:
    """The table of the authors' implementation."""
    document = read(results, "published/spectrain.json")
    columns = document["columns"]
    heads = ["model", "data", f">{columns[0]}"]
    heads += [f">{name}, {n}" for n in ("2 stages", "4 stages") for name in columns[1:]]
    lines = []
    for model, two in document["two_stages"].items():
        cells = [*two, *document["four_stages"][model][1:]]
        lines.append([model, document["data"][model], *(f"{value:.2f}" for value in cells)])
    return table("|".join(heads), lines)


def trained(results: Path) -> str:
    """What `make train` prints, and the simulated times in its picture."""
    found = read(results, "2026-11-22-train-digits/results.json")["methods"]
    figures = ((m["method"], m["simulated_time"], 100 * m["test_accuracy"]) for m in found)
    lines = [[f"`{name}`", f"{time:.2f}", f"{share:.1f}"] for name, time, share in figures]
    return table("method|>simulated time of a minibatch|>test accuracy, %", lines)


# Depth and delay

#: Columns of the summary: heading, folder, file, M; all in eight stages.
_SUMMARY = (
    ("text, AdamW, M = 8", STUDY, "text", 8),
    ("text, AdamW, M = 8", FEEDBACK, "text", 8),
    ("digits, SGD, M = 8", FIELD, "one-late", 8),
    ("digits, SGD, M = 8", STUDY, "digits", 8),
    ("text, SOAP, M = 1", DEEP, "text-800-soap", 1),
    ("text, Muon, M = 1", DEEP, "text-800-muon", 1),
    ("text, AdamW, M = 1", DEEP, "text-800-adamw", 1),
    ("text, AdamW, M = 1, constant rate", STUDY, "text", 1),
    ("digits, SGD, M = 1", DEEP, "digits", 1),
    ("digits, SGD, M = 1", FIELD, "late", 1),
    ("digits, SGD, M = 1", STUDY, "digits", 1),
)
_METHODS = (
    *("auto", "second-order", "interleaved-async", "error-feedback", "spectrain-stash"),
    *("spectrain", "hybrid-pipedream", "pipedream-2bw", "wpipe", "pipedream", "vanilla"),
)
_DEEP = {
    "text-800-soap": "SOAP",
    "text-3200-soap": "SOAP, long",
    "text-1600-soap": "SOAP, deep",
    "text-800-muon": "Muon",
    "text-800-adamw": "AdamW",
    "digits": "digits",
    "marin": "Marin",
}
_LONG = {"text-6400-soap": "SOAP, deep, long", "text-3200-adamw": "AdamW, deep, long"}
_FEEDBACK = {"text": "AdamW", "text-cosine": "AdamW, cosine", "text-muon": "Muon"}
#: Variants of screens, which are in the JSON only.
_SCREENED = re.compile(r"second-order-|nadam|msnag")


def rows_of(results: Path, workload: str, study: str = STUDY) -> list[Row]:
    """Return the rows of a workload in the folder of a study."""
    found: list[Row] = read(results, f"{study}/{workload}.json")["rows"]
    return found


def summary(results: Path) -> str:
    """Gaps in per cent in eight stages: a line per method, a column per study."""
    found: dict[str, dict[str, str]] = {}
    for head, folder, name, microbatches in _SUMMARY:
        for row in rows_of(results, name, folder):
            if (row["stages"], row["microbatches"]) == (8, microbatches) and row["delay"]:
                cells = found.setdefault(_now(row, folder), {})
                cells.setdefault(head, f"{100 * row['gap']['mean']:+.1f}")
    heads = dict.fromkeys(head for head, *_ in _SUMMARY)
    lines = [[f"`{name}`", *(found[name].get(head, "") for head in heads)] for name in _METHODS]
    return table("|".join(["gap %, N = 8", *(f">{head}" for head in heads)]), lines)


def text(results: Path) -> str:
    """All rows of the transformer, and of nanoGPT's small setting."""
    rows = [r for r in rows_of(results, "text") if not _SCREENED.search(r["contender"])]
    sooner = _sooner(results, "text")
    return _table("", [*_lines(rows, sooner), *_lines(rows_of(results, "nanogpt"), {})])


def digits(results: Path) -> str:
    """All rows of digits, in eight stages."""
    alone = {
        (row["contender"], row["microbatches"]): row
        for folder, name in ((STUDY, "digits"), (FIELD, "late"), (FIELD, "one-late"))
        for row in rows_of(results, name, folder)
    }
    return _table("", _lines(alone.values(), _sooner(results, "digits")))


def deep(results: Path) -> str:
    """All rows of the studies of deep delays."""
    return _studies(results, {DEEP: _DEEP, LONG: _LONG})


def deep_over_training(results: Path) -> str:
    """Test losses of 32 stages with SOAP, by updates made."""
    rows = rows_of(results, "text-6400-soap", LONG)
    moments = (640, 1600, 3200, 4800, 6400, 8128)
    lines = []
    for row in rows:
        (curve,) = row["curves"]
        losses = dict(zip(row["tests"], curve, strict=True))
        cells = (f"{losses[m]:.3f}" if m in losses else "" for m in moments)
        lines.append([f"`{row['contender']}`", *cells])
    return table("|".join(["test loss, after", *(f">{m:,}" for m in moments)]), lines)


def feedback(results: Path) -> str:
    """All rows of the studies of error feedback on text."""
    return _studies(results, {FEEDBACK: _FEEDBACK})


def _studies(results: Path, folders: Mapping[str, Mapping[str, str]]) -> str:
    return _table(
        "study|",
        [
            [said, *line]
            for folder, names in folders.items()
            for name, said in names.items()
            for line in _lines(rows_of(results, name, folder), {}, folder)
        ],
    )


def _sooner(results: Path, workload: str) -> dict[tuple[int, str, int], str]:
    """Return times to three quarters of synchronous training, by stages, method, microbatches."""
    return {
        (r.stages, r.method, r.microbatches): r.shown(0.75)
        for r in races(results)
        if r.workload == workload
    }


def _lines(
    rows: Iterable[Row], sooner: Mapping[tuple[int, str, int], str], folder: str = STUDY
) -> list[list[str]]:
    """Return a line per method and number of microbatches, the least gap first within a delay."""
    lines = []
    for row in sorted(rows, key=lambda r: (r["stages"], r["delay"], r["gap"]["mean"])):
        n, m, name = row["stages"], row["microbatches"], row["contender"]
        low, mean, high = (row["gap"][key] for key in ("low", "mean", "high"))
        gap = "" if low is None else f" [{100 * low:+.1f}, {100 * high:+.1f}]"
        ratio = row["updates"]["0.75"]
        lines.append(
            [
                *(str(n), f"`{_now(row, folder)}`", str(m), str(row["delay"])),
                *(str(len(row["losses"])), f"{row['lr']:.3g}"),
                f"{statistics.fmean(row['losses']):.3f}",
                "" if name == "sync" else f"{100 * mean:+.1f}{gap}",
                "" if ratio is None else f"{ratio:.2f}",
                sooner.get((n, name, m), ""),
            ]
        )
    return lines


def _table(first: str, lines: Sequence[Sequence[str]]) -> str:
    heads = ">N|method|>M|>delay|>seeds|>lr|>test loss|>gap %|>updates, 75 %|>time, 75 %"
    return table(first + heads, lines)


def _now(row: Row, folder: str) -> str:
    """The present name: what `auto` was in earlier studies is `second-order` where it is late."""
    late = row["contender"] == "auto" and row["delay"] > 1 and folder in (STUDY, FIELD)
    return "second-order" if late else str(row["contender"])


def late_by_one(results: Path) -> list[float]:
    """Return the gaps of `auto` on the transformer, at most one update late."""
    of = {"contender": "auto", "delay": 1}
    rows = [*rows_of(results, "text"), *rows_of(results, "text-3200-adamw", LONG)]
    return [r["gap"]["mean"] for r in rows if r.items() >= of.items()]


def errors(results: Path) -> str:
    """Prediction errors in eight stages, over those of stale weights: the median stage."""
    document = read(results, "2026-11-22-errors/errors.json")
    cases = [case for case in document["cases"] if case["stages"] == 8]
    mean = [{(r["ahead"], r["law"]): r["stages"]["mean"] for r in c["rows"]} for c in cases]

    def cell(of: Mapping[tuple[int, str], Sequence[float]], ahead: int, law: str) -> str:
        pairs = zip(of[ahead, law], of[ahead, "stale"], strict=True)
        return f"{statistics.median(error / stale for error, stale in pairs):.2f}"

    heads = [f">{c['data']}, M = {c['microbatches']}" for c in cases]
    rows = [
        [str(s), law, *(cell(of, s, law) for of in mean)]
        for s in document["horizons"]
        for law in ("linear", "geometric", "second-order")
    ]
    return table("|".join([">s", "law", *heads]), rows)


# What the planner knows


def known_to_planner(results: Path) -> str:
    """Return ``tools/planning/quality.json``: gaps and updates of methods, a row a line."""

    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 4)

    def cell(row: Row) -> tuple[Any, ...]:
        return row["contender"], row["stages"], row["microbatches"]

    rows = []
    later = {cell(row): row for row in rows_of(results, "digits", DEEP)}  # after `auto` changed
    for path in sorted((results / STUDY).glob("*.json")):
        for row in rows_of(results, path.stem):
            if row["contender"] not in methods() or not row["delay"]:
                continue
            if path.stem == "digits":
                row = later.get(cell(row), row)
            rows.append(
                {
                    "workload": path.stem,
                    "method": row["contender"],
                    **{name: row[name] for name in ("stages", "microbatches", "delay")},
                    "seeds": len(row["losses"]),
                    "gap": rounded(row["gap"]["mean"]),
                    "updates": rounded(row["updates"]["0.75"]),
                }
            )
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    return f'{{\n "source": "bench/results/{STUDY}",\n "rows": [\n  {lines}\n ]\n}}\n'
