"""Draws timelines of several methods below each other on one time axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from spectrain_ext.extras import picture
from spectrain_ext.method import Method, Window, find_method, microbatches_of
from spectrain_ext.schedule import Kind, Span, takes_window
from spectrain_ext.timelines import devices_under, simulate_method
from spectrain_ext.timelines.timeline import COMPUTED, Rows, draw_legend, draw_rows, finish_axes

_ROUNDING = 1.0 + 1e-9  # tolerance for sums of durations
_TALLEST = 30.0  # inches of rows at most


def draw_methods_together(
    path: Path,
    methods: Iterable[tuple[str | Method, str]],
    stages: int,
    *,
    microbatches: int | Literal["auto"] = "auto",
    window: Window = None,
) -> None:
    """Draw the schedules of several methods below each other on one time axis into ``path``.

    A minibatch's forward takes one unit on every stage and its backward two; a microbatch takes its
    share. Updates and predictions take no time.
    """
    until = 6.0 * max(stages, 4)  # two minibatches without any overlap
    runs, devices = [], []
    for name, color in methods:
        method = find_method(name)
        parts = microbatches_of(method, stages) if microbatches == "auto" else microbatches
        spans = simulate_method(
            method,
            stages,
            int(until / 3.0) + 2,
            microbatches=parts,
            window=window if takes_window(method.schedule) else None,
            forward=1.0 / parts,
            backward=2.0 / parts,
        )
        of = f", M = {parts}" if parts > 1 else ""
        devices.append(devices_under(method, stages))
        if devices[-1] is not None:
            of += f", on {1 + max(devices[-1])} devices"
        runs.append((f"{method.name}{of}", color, spans))
    title = (
        f"The same time under every method: {stages} stages, simulated without costs of updates, "
        "predictions and copies"
    )
    unit = "time, in forwards of a minibatch"
    given = devices if any(devices) else None
    draw_timelines(path, runs, until=until, title=title, unit=unit, devices=given)


def draw_timelines(
    path: str | Path,
    runs: Sequence[tuple[str, str, Iterable[Span]]],
    *,
    until: float,
    title: str,
    unit: str = "time",
    devices: Sequence[Sequence[int] | None] | None = None,
) -> None:
    """Draw the start of several simulations below each other on one time axis.

    Each name is followed by the number of finished minibatches and the idle share of its stages.
    """
    if not runs:
        raise ValueError("runs: expected at least one, got none")
    seen = [
        (name, color, [span for span in spans if span.start <= until * _ROUNDING])
        for name, color, spans in runs
    ]
    laid_out = devices or [None] * len(runs)
    rows = [Rows(drawn, given) for (*_, drawn), given in zip(seen, laid_out, strict=True)]
    counts = list(map(len, rows))
    row = min(0.12, _TALLEST / sum(counts))
    height = 0.9 + sum(0.3 + row * stages for stages in counts)
    with picture(path, 12.0, height) as figure:
        figure.suptitle(title, fontsize=10, parse_math=False, x=0.01, ha="left")
        panels = figure.subplots(len(seen), 1, sharex=True, squeeze=False, height_ratios=counts)
        for axes, of, (name, color, drawn) in zip(panels[:, 0], rows, seen, strict=True):
            draw_rows(axes, drawn, of, (0.0, until), False, edge=0.2)
            axes.set_yticks([])
            finish_axes(axes, (0.0, until), len(of))
            axes.tick_params(axis="x", length=3, labelbottom=axes is panels[-1, 0])
            busy = sum(max(0.0, min(s.end, until) - s.start) for s in drawn if s.kind in COMPUTED)
            count = _ended(drawn, until)
            said = f"{count} minibatch{'es' * (count != 1)} ended, "
            said += f"idle {100 * (1 - busy / (until * len(of))):.0f} %"
            axes.set_title(
                name, fontsize=9, color=color, weight="bold", loc="left", pad=2, parse_math=False
            )
            axes.set_title(said, fontsize=8, color="#555555", loc="right", pad=2)
        what = "stages" if devices is None else "devices"
        panels[-1, 0].set_xlabel(f"{unit}; rows are {what}, the first on top")
        draw_legend(figure, [span for *_, drawn in seen for span in drawn], False, "idle")


def _ended(drawn: Sequence[Span], until: float) -> int:
    """Return the minibatches that all stages have updated with."""
    stages = 1 + max(span.stage for span in drawn)
    updates = Counter(
        s.stage for s in drawn if s.kind is Kind.UPDATE and s.end <= until * _ROUNDING
    )
    return min(updates[k] for k in range(stages))
