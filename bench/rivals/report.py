"""What a run measured: rows and the machine, as JSON and as tables, and against an earlier run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spectrain_ext.files import read_text

from .operations import OURS

FORMAT = 1
_LARGEST = 1 << 26  # bytes of a file


@dataclass(frozen=True)
class Row:
    """One implementation of one operation on one workload; None where there is nothing to say.

    Attributes:
        kind: "ours", "rival", "reference" (a copy of the same tensors) or "copy" (the yardstick).
        bytes: what the operation has to move at least; rivals are given the same.
        median_us, iqr_us, best_us: microseconds of a call over `samples` samples.
        share: of the best plain copy of as many bytes, by medians; `share_best` by best times.
        host_us: microseconds of a call on as many empty tensors.
        compile_s: seconds of the first call, for what is compiled.
        how: "clock", "events" or "graph".
    """

    operation: str
    workload: str
    precision: str
    implementation: str
    kind: str
    bytes: int
    median_us: float
    iqr_us: float
    best_us: float
    samples: int
    gb_per_s: float
    share: float | None = None
    share_best: float | None = None
    host_us: float | None = None
    compile_s: float | None = None
    how: str = "clock"
    elements: int = 0
    tensors: int = 0

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.operation, self.workload, self.precision, self.implementation


@dataclass
class Report:
    """Everything of one run."""

    environment: dict[str, Any]
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    host_us: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """The JSON of `from_json`: a line per row, times to five digits."""
        head = {"format": FORMAT, **{k: v for k, v in asdict(self).items() if k != "rows"}}
        rows = ",\n  ".join(json.dumps(_rounded(asdict(row))) for row in self.rows)
        return f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            data = json.loads(text)
            if data.pop("format") != FORMAT:
                raise ValueError("another format")
            rows = [Row(**row) for row in data.pop("rows")]
            return cls(rows=rows, **data)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"not a report of spectrain bench: {error}") from error

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read a file of at most 64 MiB; raises as `from_json`, and OSError."""
        return cls.from_json(read_text(path, _LARGEST))

    def cases(self) -> dict[tuple[str, str, str], list[Row]]:
        """Rows by what they have in common, in the order they were measured in."""
        found: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.key[:3], []).append(row)
        return found


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in values.items()}


def spread(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Median, interquartile range and best.

    Raises:
        ValueError: nothing was measured.
    """
    if not seconds:
        raise ValueError("no measured times")
    median = statistics.median(seconds)
    quarters = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [median] * 3
    return median, quarters[2] - quarters[0], min(seconds)


def times_rival(row: Row, case: Iterable[Row]) -> float | None:
    """How many times faster than the fastest rival of the same case one of ours is, by medians."""
    rivals = [r.median_us for r in case if r.kind == "rival"]
    return min(rivals) / row.median_us if row.implementation in OURS and rivals else None


def table(columns: str, rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; columns are parted by bars, and `>` begins one of figures."""
    names = columns.split("|")
    lines = [[name.removeprefix(">") for name in names], *rows]
    written = [f"| {' | '.join(cells)} |" for cells in lines]
    rule = "|".join("--:" if name.startswith(">") else "---" for name in names)
    return "\n".join([written[0], f"|{rule}|", *written[1:]])


def markdown(report: Report, *, copies: bool = False) -> str:
    """A table of all rows; the yardstick's own only where `copies` is set."""
    found = []
    for case in report.cases().values():
        for row in case:
            if row.kind == "copy" and not copies:
                continue
            took = "" if row.compile_s is None else f" (compiled in {row.compile_s:.1f} s)"
            times = times_rival(row, case)
            found.append(
                [
                    *(row.operation, row.workload, row.precision, row.implementation + took),
                    f"{row.bytes / 1e6:.3g}",
                    microseconds(row.median_us),
                    f"{row.iqr_us / row.median_us:.0%}",
                    microseconds(row.best_us),
                    f"{row.gb_per_s:.1f}",
                    "" if row.share is None else f"{row.share:.0%}",
                    "" if row.host_us is None else microseconds(row.host_us),
                    "" if times is None else f"{times:.2f}",
                ]
            )
    columns = "operation|tensors|types|implementation|>MB|>median us|>IQR|>best us|>GB/s"
    return table(f"{columns}|>of copy|>host us|>times rival", found)


def compact(cases: Iterable[Sequence[Row]]) -> str:
    """A table of one line per case: ours, the share of the copy, the fastest rival."""
    lines = []

    def median(row: Row) -> float:
        return row.median_us

    for case in cases:
        mine = min((r for r in case if r.kind == "ours"), key=median, default=None)
        if mine is None:
            continue
        rival = min((r for r in case if r.kind == "rival"), key=median, default=None)
        ratio = times_rival(mine, case)
        cells = [mine.operation, mine.workload, mine.precision, microseconds(mine.median_us)]
        cells += [f"{mine.iqr_us / mine.median_us:.0%}", microseconds(mine.best_us)]
        cells += ["" if s is None else f"{s:.0%}" for s in (mine.share, mine.share_best)]
        cells += (
            ["", ""] if rival is None else [rival.implementation, microseconds(rival.median_us)]
        )
        cells.append("" if ratio is None else f"{ratio:.2f}")
        lines.append(cells)
    columns = "operation|tensors|types|>ours, us|>IQR|>best|>of copy|>of copy, best"
    return table(f"{columns}|fastest rival|>its us|>times", lines)


def summary(report: Report) -> str:
    """Of every operation one line: the largest tensors that it was measured on first."""
    chosen: dict[str, list[Row]] = {}
    for (operation, _, _), case in report.cases().items():
        known = chosen.get(operation)
        if known is None or case[0].elements > known[0].elements:
            chosen[operation] = case
    return compact(chosen.values())


def host_table(host_us: dict[str, float]) -> str:
    """What calls cost the host."""
    return table("call|>host us", [[name, f"{us:.2f}"] for name, us in host_us.items()])


def microseconds(value: float) -> str:
    """Three digits, more where the number has them before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


# Two runs, by shares of the copy, which mean the same on machines of different speed.


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
        if row.share and was.share and row.share_best and was.share_best:
            ratios = row.share / was.share, row.share_best / was.share_best
            changes.append(Change(row.key, was.share, row.share, *ratios))
    return sorted(changes, key=lambda change: max(change.ratio, change.ratio_best))


def differences(before: Report, after: Report) -> list[str]:
    """What differs between the two runs besides the figures."""
    names = ("device", "gpu", "cpu", "threads", "instruction_set", "torch")
    pairs = [(name, before.environment.get(name), after.environment.get(name)) for name in names]
    return [f"{name}: {a} before, {b} now" for name, a, b in pairs if a != b]


def changes_table(changes: Iterable[Change], tolerance: float) -> str:
    """Ratios, worst first."""
    columns = "operation|tensors|types|implementation|>of copy before|>now|>ratio|>ratio of best|"
    return table(
        columns,
        [
            [
                *c.key,
                *(f"{c.before:.0%}", f"{c.after:.0%}", f"{c.ratio:.2f}", f"{c.ratio_best:.2f}"),
                "slower" if c.regressed(tolerance) else "",
            ]
            for c in changes
        ],
    )
