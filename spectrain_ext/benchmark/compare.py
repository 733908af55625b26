"""Compares two runs by shares of the copy, which mean the same on machines of different speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .report import Report


@dataclass(frozen=True)
class Change:
    """A row of ours in both runs: the ratio of its shares, new over old; below 1 it got slower."""

    key: tuple[str, str, str, str]
    before: float
    after: float
    ratio: float
    ratio_best: float

    def regressed(self, tolerance: float) -> bool:
        """Slower by medians and by best times: noise moves one of them, a regression both."""
        return max(self.ratio, self.ratio_best) < 1.0 - tolerance


def compare(before: Report, after: Report) -> list[Change]:
    """What both runs measured of this package's own implementations, worst first."""
    old = {row.key: row for row in before.rows if row.kind == "ours"}
    changes = []
    for row in after.rows:
        was = old.get(row.key)
        if row.kind != "ours" or was is None:
            continue
        if not (row.share and was.share and row.share_best and was.share_best):
            continue
        changes.append(
            Change(
                row.key,
                was.share,
                row.share,
                row.share / was.share,
                row.share_best / was.share_best,
            )
        )
    return sorted(changes, key=lambda change: max(change.ratio, change.ratio_best))


def differences(before: Report, after: Report) -> list[str]:
    """What differs between the two runs besides the figures."""
    found = []
    for name in ("device", "gpu", "cpu", "threads", "instruction_set", "torch"):
        a, b = before.environment.get(name), after.environment.get(name)
        if a != b:
            found.append(f"{name}: {a} before, {b} now")
    return found


def markdown(changes: Sequence[Change], tolerance: float) -> str:
    """A table of ratios, worst first."""
    lines = [
        "| operation | tensors | types | implementation | of copy before | now | ratio "
        "| ratio of best |  |",
        "|---|---|---|---|--:|--:|--:|--:|---|",
    ]
    for c in changes:
        verdict = "slower" if c.regressed(tolerance) else ""
        lines.append(
            f"| {' | '.join(c.key)} | {c.before:.0%} | {c.after:.0%} | {c.ratio:.2f} | "
            f"{c.ratio_best:.2f} | {verdict} |"
        )
    return "\n".join(lines)
