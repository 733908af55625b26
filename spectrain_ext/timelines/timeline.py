"""Draws what each stage does when, and writes it as a trace for Chrome and Perfetto."""

import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from spectrain_ext.extras import picture
from spectrain_ext.schedule import COMPUTE, Kind
from spectrain_ext.simulation import Lane, Span, summarize


class _Look(NamedTuple):
    name: str
    color: str
    text: str  # its color


# Okabe and Ito's colours, distinguishable with any colour vision; they differ in lightness too.
_FORWARD = _Look("forward", "#0072B2", "#FFFFFF")
_BACKWARD = _Look("backward", "#E69F00", "#000000")
_WEIGHTS = _Look("backward of weights", "#009E73", "#FFFFFF")
_LOAD = _Look("prediction", "#CC79A7", "#000000")
_UPDATE = _Look("update", "#000000", "#FFFFFF")
_SEND = _Look("communication", "#999999", "#000000")
_IDLE = _Look("idle", "#E9E9E9", "#000000")
_LOOKS = {
    Kind.FORWARD: _FORWARD,
    Kind.LOSS: _FORWARD,
    Kind.BACKWARD: _BACKWARD,
    Kind.BACKWARD_INPUT: _BACKWARD,
    Kind.BACKWARD_WEIGHTS: _WEIGHTS,
    Kind.LOAD_FORWARD: _LOAD,
    Kind.LOAD_BACKWARD_INPUT: _LOAD,
    Kind.LOAD_BACKWARD: _LOAD,
    Kind.UPDATE: _UPDATE,
    Kind.SEND_ACTIVATION: _SEND,
    Kind.SEND_GRADIENT: _SEND,
}
#: Of the legend, and of a column from below.
_ORDER = [look.name for look in (_FORWARD, _BACKWARD, _WEIGHTS, _LOAD, _UPDATE, _SEND)]
COMPUTED = COMPUTE - {Kind.UPDATE}

_LANES = get_args(Lane)
# Heights, where rows are 1 apart.
_ROW, _LOWER_ROW = 0.8, 0.6  # of a stage's blocks; lower where copies are drawn in between
_STRIP = 0.17  # of a lane of copies
_INCH = 72.0  # points
_TALLEST = 10.0  # inches of the rows of a picture that shows densities
# Widths in points.
_BLOCK = 4.0  # of a usual block, at least; below that the picture shows densities
_EDGED = 2.0  # of a block with white edges, at least
_DIGITS = 5.0  # font size of a number in a block, at least


def draw_timeline(
    path: str | Path,
    spans: Iterable[Span],
    *,
    title: str | None = None,
    versions: bool = False,
    communication: bool = False,
    unit: str = "time",
    devices: Sequence[int] | None = None,
) -> str | None:
    """Draw a simulation or a real run as a PNG or an SVG, by the suffix of ``path``.

    A row is a stage, grey where it is idle. A block shows its minibatch, or
    ``minibatch.microbatch`` where there are several. With ``devices`` a row is a device, and the
    blocks of its later stages are lighter.

    Where a usual block would be less than 4 points wide, columns show the shares of a bin of time
    that a row spends in each kind of work.

    Args:
        versions: write the version that a block computes with below its number: ``v3`` after three
            updates, ``v3+2`` predicted two further.
        communication: draw copies to the next stage below a row, to the previous above it.
        unit: of the time axis.
        devices: of every stage, counted from 0.

    Returns:
        What the picture leaves out, which it also says below its axis; None: nothing.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
        ValueError: there is nothing to draw.

    Example:
        >>> from spectrain_ext.timelines import draw_timeline, simulate_method
        >>> draw_timeline("few.svg", simulate_method("pipedream", 4, 8), title="pipedream")
        >>> draw_timeline("many.png", simulate_method("pipedream", 2, 800))
        '3200 blocks are too narrow to draw. Columns show shares of time, in bins of 9, without
        numbers.'
    """
    drawn = list(spans)
    if not drawn:
        raise ValueError("spans: expected at least one, got none")
    rows = Rows(drawn, devices)
    first, last = min(span.start for span in drawn), max(span.end for span in drawn)
    if last == first:
        last = first + 1.0
    whole, length = (first, last), last - first
    blocks = sorted(s.end - s.start for s in drawn if s.kind in COMPUTED and s.end > s.start)
    usual = blocks[len(blocks) // 4] if blocks else length
    # Inches, so that a usual block has room for its number.
    width = min(max(6.0, (0.42 if versions else 0.2) * length / usual + 0.8), 22.0)
    points = 0.88 * width * _INCH / length  # per unit of time; the rest is margins
    dense = usual * points < _BLOCK
    row = 0.42 + 0.1 * (versions and not dense) + 0.12 * communication
    if dense:
        row = min(row, max(0.2, _TALLEST / len(rows)))
    with picture(path, width, 0.9 + row * len(rows)) as figure:
        axes = figure.add_subplot()
        left_out: str | None
        if dense:
            left_out = _draw_densities(axes, drawn, rows, whole, communication, points, versions)
        else:
            draw_rows(axes, drawn, rows, whole, communication, points=points)
            left_out = _write_numbers(axes, drawn, rows, points, versions)
        axes.set_yticks(range(len(rows)), rows.names())
        finish_axes(axes, whole, len(rows))
        axes.set_xlabel(f"{unit}\n{left_out}" if left_out else unit)
        if title:
            axes.set_title(title, fontsize=10, parse_math=False, loc="left")
        bubbles = summarize(drawn, devices).bubbles
        idle = f"idle: {100 * sum(bubbles) / len(bubbles):.0f} % of all"
        draw_legend(figure, drawn, communication, idle)
    return left_out


class Rows:
    def __init__(self, drawn: Sequence[Span], devices: Sequence[int] | None) -> None:
        stages = 1 + max(span.stage for span in drawn)
        self._named = "stage" if devices is None else "device"
        self.of = range(stages) if devices is None else devices
        self._stages: list[list[int]] = [[] for _ in range(1 + max(self.of[:stages]))]
        for k in range(stages):
            self._stages[self.of[k]].append(k)

    def __len__(self) -> int:
        return len(self._stages)

    def names(self) -> list[str]:
        return [
            f"{self._named} {row}" + (f": {', '.join(map(str, own))}" if own != [row] else "")
            for row, own in enumerate(self._stages)
        ]

    def look(self, span: Span) -> _Look:
        """Return a block's look, up to half white for the last stage of a device."""
        look, own = _LOOKS[span.kind], self._stages[self.of[span.stage]]
        share = 0.5 * own.index(span.stage) / max(1, len(own) - 1)
        if not share or look not in (_FORWARD, _BACKWARD):
            return look
        channels = [int(look.color[at : at + 2], 16) for at in (1, 3, 5)]
        mixed = "".join(f"{round(channel + share * (255 - channel)):02X}" for channel in channels)
        return look._replace(color=f"#{mixed}", text=look.text if share < 0.3 else "#000000")


def finish_axes(axes: Any, whole: tuple[float, float], stages: int) -> None:
    axes.set_xlim(*whole)
    axes.set_ylim(stages - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw_rows(
    axes: Any,
    drawn: Sequence[Span],
    rows: Rows,
    whole: tuple[float, float],  # start and end
    communication: bool,
    edge: float = 0.5,
    points: float = math.inf,  # per unit of time
) -> None:
    """Draw the spans on rows that are grey where they are idle."""
    first, last = whole
    for k in range(len(rows)):
        place = _place(k, "compute", communication)
        axes.broken_barh([(first, last - first)], place, facecolor=_IDLE.color, linewidth=0)
    blocks: dict[tuple[int, _Look, Lane, bool], list[tuple[float, float]]] = defaultdict(list)
    for span in drawn:
        start, length = span.start, span.end - span.start
        if length > 0:
            row = rows.of[span.stage], rows.look(span), span.lane, length * points >= _EDGED
            blocks[row].append((start, length))
    for (k, look, lane, edged), intervals in blocks.items():
        place = _place(k, lane, communication)
        if place is not None:
            line = edge if edged else 0
            look_of = {"facecolor": look.color, "edgecolor": "#FFFFFF", "linewidth": line}
            axes.broken_barh(intervals, place, **look_of)


def _place(row: int, lane: Lane, communication: bool) -> tuple[float, float] | None:
    """Return where a lane is, as its top and its height; None if it is not drawn."""
    height = _LOWER_ROW if communication else _ROW
    if lane == "compute":
        return row - height / 2, height
    if not communication:
        return None
    return (row + height / 2 if lane == "to next" else row - height / 2 - _STRIP), _STRIP


def _draw_densities(
    axes: Any,
    drawn: Sequence[Span],
    rows: Rows,
    whole: tuple[float, float],
    communication: bool,
    points: float,
    versions: bool,
) -> str:
    """Draw the shares of each bin of time that every row spends in each kind of work."""
    import numpy as np  # as matplotlib does

    draw_rows(axes, (), rows, whole, communication)
    microbatches = 1 + max(span.microbatch for span in drawn)
    edges = bin_edges(*whole, _BLOCK / points, summarize(drawn).period / microbatches)
    lanes: dict[tuple[int, Lane], dict[_Look, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for span in drawn:
        if span.end > span.start:
            looks = lanes[rows.of[span.stage], span.lane]
            looks[rows.look(span)].append((span.start, span.end))
    for (k, lane), looks in lanes.items():
        place = _place(k, lane, communication)
        if place is None:
            continue
        top, height = place
        order = sorted(looks, key=lambda look: (_ORDER.index(look.name), look.color))
        times = np.array([time_in_bins(looks[look], edges) for look in order])
        # Actions of a device's stages, or copies, may overlap: their sum is at most the bin.
        shares = times / np.maximum(np.diff(edges), times.sum(0))
        tops = top + height * (1 - shares.cumsum(0))
        for look, above, below in zip(order, tops, [top + height, *tops], strict=False):
            axes.stairs(above, edges, baseline=below, fill=True, color=look.color, linewidth=0)
    count = sum(span.kind in COMPUTED and span.end > span.start for span in drawn)
    return (
        f"{count} blocks are too narrow to draw. Columns show shares of time, in bins of "
        f"{edges[1] - edges[0]:g}, without numbers{' or versions' * versions}."
    )


def bin_edges(first: float, last: float, least: float, step: float) -> list[float]:
    """Return the edges of equal bins from ``first`` to ``last``; the last bin may be shorter."""
    # The smallest multiple of the step: with the time of a microbatch as step, all bins of a steady
    # state look alike.
    size = step * math.ceil(least / step) if step > 0 else least
    if size * 8 > last - first:  # too few of them to see anything
        size = least
    count = max(1, math.ceil((last - first) / size - 1e-6))
    return [*(first + n * size for n in range(count)), last]


def time_in_bins(intervals: Iterable[tuple[float, float]], edges: Sequence[float]) -> list[float]:
    """Return how much of each bin the intervals cover, given their starts and ends."""
    found = [0.0] * (len(edges) - 1)
    for start, end in intervals:
        n = bisect_right(edges, start) - 1
        while n < len(found) and edges[n] < end:
            found[n] += min(end, edges[n + 1]) - max(start, edges[n])
            n += 1
    return found


def _write_numbers(
    axes: Any, drawn: Sequence[Span], rows: Rows, points: float, versions: bool
) -> str | None:
    """Write the numbers of blocks into them; return how many had no room, in words."""
    parted = any(span.microbatch for span in drawn)
    blocks = [span for span in drawn if span.kind in COMPUTED and span.end > span.start]
    left_out = 0
    for span in blocks:
        lines = [f"{span.minibatch}.{span.microbatch}" if parted else f"{span.minibatch}"]
        if versions and span.version is not None:
            lines.append(f"v{span.version}" + (f"+{span.horizon}" if span.horizon else ""))
        room = (span.end - span.start) * points
        # A digit is some 0.6 of the size wide.
        size = min(9.0, (room - 2.0) / (0.6 * max(map(len, lines))))
        if size < _DIGITS:
            left_out += 1
            continue
        axes.text(
            (span.start + span.end) / 2,
            rows.of[span.stage],
            "\n".join(lines),
            ha="center",
            va="center",
            fontsize=size,
            linespacing=1.0,
            color=rows.look(span).text,
            in_layout=False,  # it is inside; measuring hundreds takes longer than drawing them
        )
    if not left_out:
        return None
    return f"{left_out} of {len(blocks)} blocks are too narrow for their number."


def draw_legend(figure: Any, drawn: Sequence[Span], communication: bool, idle: str) -> None:
    from matplotlib.patches import Patch

    shown = {_LOOKS[span.kind] for span in drawn if span.end > span.start}
    if not communication:
        shown.discard(_SEND)
    looks = sorted(shown, key=lambda look: _ORDER.index(look.name))
    handles = [Patch(facecolor=look.color, label=look.name) for look in looks]
    handles.append(Patch(facecolor=_IDLE.color, edgecolor="#BBBBBB", linewidth=0.5, label=idle))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8
    )


def write_trace(
    path: str | Path,
    spans: Iterable[Span],
    *,
    microseconds: float = 1000.0,
    origin: float | None = None,
) -> None:
    """Write a trace in Chrome's JSON format, which Perfetto and chrome://tracing open.

    A stage becomes a process, and its lanes become threads.

    Args:
        microseconds: per unit of the spans' time.
        origin: ``Trace.origin``, which ``merge_traces`` needs to align the files of several ranks.

    Example:
        >>> from spectrain_ext.timelines import simulate_method, write_trace
        >>> write_trace("trace.json", simulate_method("1f1b", 2, 3))
    """
    lanes: set[tuple[int, str]] = set()
    events: list[dict[str, object]] = []

    def name(what: str, arguments: dict[str, object], stage: int, **more: int) -> None:
        events.append({"name": what, "ph": "M", "pid": stage, "args": arguments, **more})

    for span in spans:
        lanes.add((span.stage, span.lane))
        arguments: dict[str, object] = {
            "minibatch": span.minibatch,
            "microbatch": span.microbatch,
        }
        if span.version is not None:
            arguments |= {"version": span.version, "predicted ahead": span.horizon}
        events.append(
            {
                "name": f"{span.kind.value} {span.minibatch}.{span.microbatch}",
                "cat": span.kind.value,
                "ph": "X",
                "pid": span.stage,
                "tid": _LANES.index(span.lane),
                "ts": span.start * microseconds,
                "dur": (span.end - span.start) * microseconds,
                "args": arguments,
            }
        )
    for stage in sorted({stage for stage, _ in lanes}):
        name("process_name", {"name": f"stage {stage}"}, stage)
        name("process_sort_index", {"sort_index": stage}, stage)
    for stage, lane in sorted(lanes):
        name("thread_name", {"name": lane}, stage, tid=_LANES.index(lane))
    document: dict[str, object] = {"traceEvents": events, "displayTimeUnit": "ms"}
    if origin is not None:
        document["baseTimeNanoseconds"] = round(origin * 1e9)  # the key that torch.profiler uses
    Path(path).write_text(json.dumps(document) + "\n", encoding="utf-8")
