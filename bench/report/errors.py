"""Prediction error: how far predicted and stale weights are from the weights that came."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from table import table

RUN = "2026-11-22-errors"

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
    """Muon: prediction errors over those of stale weights, and losses with late gradients."""
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
    """The loss without delay."""
    found = json.loads((results / _MUON / "laws.json").read_text())
    return f"{statistics.fmean(next(r for r in found['training'] if not r['delay'])['losses']):.3f}"


def ratios(case: Case) -> Ratios:
    """Return the errors over those of stale weights, by horizon and law, for every stage."""
    mean = {(row["ahead"], row["law"]): row["stages"]["mean"] for row in case["rows"]}
    return {
        (s, law): [mine / stale for mine, stale in zip(of, mean[s, "stale"], strict=True)]
        for (s, law), of in mean.items()
        if law != "stale"
    }


def section(results: Path) -> str:
    """Errors in eight stages, over those of stale weights: the median stage."""
    document = json.loads((results / RUN / "errors.json").read_text())
    cases = [case for case in document["cases"] if case["stages"] == 8]
    of = [ratios(case) for case in cases]
    laws = [law for law in document["laws"] if law not in ("stale", "difference")]
    heads = [f">{c['data']}, M = {c['microbatches']}" for c in cases]
    rows = [
        [str(s), law, *(f"{statistics.median(r[s, law]):.2f}" for r in of)]
        for s in document["horizons"]
        for law in laws
    ]
    return table("|".join([">s", "law", *heads]), rows)


def at(results: Path, law: str, ahead: str) -> str:
    """The least and the largest of a law's medians over all cases."""
    cases = json.loads((results / RUN / "errors.json").read_text())["cases"]
    found = [statistics.median(ratios(case)[int(ahead), law]) for case in cases]
    return f"{min(found):.2f} to {max(found):.2f} times"
