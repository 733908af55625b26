"""Prediction error: how far predicted and stale weights are from those that really came."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from table import table

from spectrain_ext.extras import picture
from studies.looks import looks

RUN = "2026-11-22-errors"
PICTURE = "results-errors.png"
#: Of every law the method whose colour it has.
_LIKE = {
    "stale": "pipedream",
    "linear": "spectrain",
    "geometric": "msnag",
    "second-order": "second-order",
    "difference": "lwp-w",
}
_DRAWN = "spectrain"

Case = dict[str, Any]
Ratios = dict[tuple[int, str], list[float]]


_MUON = "2026-11-25-muon"
_MUON_LAWS = {
    "stale": "none",
    "difference": "difference",
    "linear": "linear",
    "momentum": "linear, along the orthogonalized momentum",
    "whole": "second order, all of the last change",
    "second-order": "second order, half of it",
}


def muon(results: Path) -> str:
    """What Muon predicts by: errors over those of stale weights, and losses with late gradients."""
    found = json.loads((results / _MUON / "laws.json").read_text())
    ahead = sorted({row["ahead"] for row in found["errors"]})
    rate = max(row["lr"] for row in found["errors"])
    errors = {(r["law"], r["ahead"]): r["of_stale"] for r in found["errors"] if r["lr"] == rate}
    losses: dict[tuple[str, int], float] = {}  # of the best rate
    for row in found["training"]:
        key, loss = (row["law"], row["delay"]), statistics.fmean(row["losses"])
        losses[key] = min(loss, losses.get(key, loss))
    lines = [
        [
            said,
            *("1" if law == "stale" else f"{statistics.median(errors[law, s]):.2f}" for s in ahead),
            *(f"{losses[law, s]:.3f}" for s in ahead),
        ]
        for law, said in _MUON_LAWS.items()
    ]
    heads = [*(f">error, {s} ahead" for s in ahead), *(f">loss, {s} late" for s in ahead)]
    return table("|".join(["law", *heads]), lines)


def muon_in_time(results: Path) -> str:
    """The loss without any delay."""
    found = json.loads((results / _MUON / "laws.json").read_text())
    return f"{statistics.fmean(next(r for r in found['training'] if not r['delay'])['losses']):.3f}"


def _load(results: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((results / RUN / "errors.json").read_text())
    return found


def ratios(case: Case) -> Ratios:
    """Of every horizon and law, on every stage: the error over that of stale weights."""
    mean = {(row["ahead"], row["law"]): row["stages"]["mean"] for row in case["rows"]}
    return {
        (s, law): [mine / stale for mine, stale in zip(of, mean[s, "stale"], strict=True)]
        for (s, law), of in mean.items()
        if law != "stale"
    }


def section(results: Path) -> str:
    """The table, what was measured, and a sentence."""
    document = _load(results)
    about, cases = document["environment"], document["cases"]
    trained = dict.fromkeys(
        f"`{c['data']}` with {_NAMES[c['optimizer']]}, lr {c['lr']:g}, batch {c['batch_size']}"
        for c in cases
    )
    of = [ratios(case) for case in cases]
    left_out = {"stale", "difference"} if _same(of) else {"stale"}
    laws = [law for law in document["laws"] if law not in left_out]
    heads = [
        f">{c['data']}, N = {c['stages']}, `{c['method']}`, M = {c['microbatches']}" for c in cases
    ]
    rows = [
        [
            *(str(s), law),
            *(f"{statistics.median(r[s, law]):.2f} ({max(r[s, law]):.2f})" for r in of),
        ]
        for s in document["horizons"]
        for law in laws
    ]
    return "\n\n".join(
        [
            "## Prediction error",
            "The paper's figure, for more laws and further ahead. After an update of a stage its "
            "weights are predicted s updates ahead by every law; s updates later these, and the "
            "weights as they were then (stale), are compared with what the weights have become. "
            "Measured by `st.distance` in the runs of real pipelines, on their true weights, "
            f"{len(cases[0]['measured'])} times in {document['updates']} updates, "
            f"{document['seeds']} seeds, constant learning rates: {'; '.join(trained)}. "
            "The second-order law is without the lead that `auto` and `second-order` add to it. "
            f"({about['cpu']}, torch {about['torch']}, {about['date'][:10]}.)",
            f"![{_description(document)}]({PICTURE})",
            "Root-mean-square error over the run, divided by that of stale weights of the same "
            "stage: the median stage, and in brackets the worst. Below 1 prediction helps.",
            table("|".join([">s", "law", *heads]), rows),
            *_notes(of, document["horizons"]),
        ]
    )


_NAMES = {"sgd": "SGD, momentum 0.9", "adamw": "AdamW"}


def _description(document: dict[str, Any]) -> str:
    ahead = ", ".join(map(str, document["horizons"]))
    return (
        f"Root-mean-square errors of predicted and stale weights over updates, for s = {ahead}: a "
        "row for each workload, a line for each law"
    )


def _same(of: Sequence[Ratios]) -> bool:
    """Whether the difference law cannot be told from the linear one in the table."""
    return all(
        abs(a - b) < 0.005
        for r in of
        for s, law in r
        if law == "difference"
        for a, b in zip(r[s, law], r[s, "linear"], strict=True)
    )


def _notes(of: Sequence[Ratios], horizons: Sequence[int]) -> Iterator[str]:
    """What is said only where it is so."""
    if _same(of):
        yield (
            "The difference law, which needs no momentum, is the linear one here and has no rows "
            "of its own: an update of SGD is lr\\*v, and AdamW's decay is too small to be seen."
        )

    def median(r: Ratios, s: int, law: str) -> float:
        return statistics.median(r[s, law])

    worse = [
        s
        for s in horizons
        if all(median(r, s, "second-order") > median(r, s, "linear") for r in of)
    ]
    if horizons[-1] in worse:
        yield (
            "The second-order law is nevertheless what `auto` predicts with, which ends nearest to "
            "synchronous training ([frontier](frontier.md)): nearer weights are not by themselves "
            "what makes a delay harmless. The likely reason is that it adds a lead along the "
            "change of the momentum, which damps, while as a forecast it amplifies the noise of "
            "the last gradient."
        )


def draw(results: Path, folder: Path) -> None:
    """Workloads in rows, horizons in columns: errors of all stages together over updates."""
    document = _load(results)
    horizons = document["horizons"]
    cases = [c for c in document["cases"] if c["method"] == _DRAWN and "series" in c["rows"][0]]
    # the difference law lies on the linear one
    laws = [law for law in document["laws"] if law != "difference"]
    look = {
        law: found
        for law, found in zip(laws, looks(_LIKE[law] for law in laws).values(), strict=True)
    }
    with picture(folder / PICTURE, 11, 2.6 * len(cases) + 0.7) as figure:
        axes = figure.subplots(len(cases), len(horizons), sharex=True, sharey="row", squeeze=False)
        for row, case in zip(axes, cases, strict=True):
            rows = {(r["ahead"], r["law"]): r["series"] for r in case["rows"]}
            for axis, s in zip(row, horizons, strict=True):
                for law in laws:
                    series = rows[s, law]
                    x = case["measured"][: len(series["mean"])]
                    color, dashes = look[law]
                    axis.plot(
                        x, series["mean"], color=color, linestyle=dashes, linewidth=1.3, label=law
                    )
                    axis.fill_between(
                        x, series["low"], series["high"], color=color, alpha=0.1, linewidth=0
                    )
                axis.set_yscale("log")
                axis.grid(True, which="major", alpha=0.25)
                axis.spines[["top", "right"]].set_visible(False)
            row[0].set_ylabel(
                f"{case['data']}, {_NAMES[case['optimizer']].split(',')[0]}\nRMSE of weights",
                fontsize=9,
            )
        for axis, s in zip(axes[0], horizons, strict=True):
            axis.set_title(f"s = {s}", fontsize=10)
        for axis in axes[-1]:
            axis.set_xlabel("update", fontsize=9)
        case = cases[0]
        figure.suptitle(
            f"Errors of weights s updates ahead, all {case['stages']} stages together, "
            f"method {_DRAWN}, M = {case['microbatches']}; "
            f"mean of {document['seeds']} seeds and their range",
            fontsize=10,
        )
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
