"""Draws what each stage does when, and writes it as a trace for Chrome and Perfetto."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from spectrain_ext.extras import picture
from spectrain_ext.schedule import COMPUTE, Kind
from spectrain_ext.tools.simulation import Lane, Span, summarize


class _Look(NamedTuple):
    name: str
    color: str
    text: str  # its color
    kinds: tuple[Kind, ...] = ()


_LOADS = (Kind.LOAD_FORWARD, Kind.LOAD_BACKWARD, Kind.LOAD_BACKWARD_INPUT)
# In the legend's order. Okabe and Ito's colours, distinguishable with any colour vision; they
# differ in lightness too.
_LOOKS = (
    _Look("forward", "#0072B2", "#FFFFFF", (Kind.FORWARD, Kind.LOSS)),
    _Look("backward", "#E69F00", "#000000", (Kind.BACKWARD, Kind.BACKWARD_INPUT)),
    _Look("backward of weights", "#009E73", "#FFFFFF", (Kind.BACKWARD_WEIGHTS,)),
    _Look("prediction", "#CC79A7", "#000000", _LOADS),
    _Look("update", "#000000", "#FFFFFF", (Kind.UPDATE,)),
    _Look("communication", "#999999", "#000000", (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)),
)
_LOOK_OF = {kind: look for look in _LOOKS for kind in look.kinds}
_IDLE = "#E9E9E9"
COMPUTED = COMPUTE - {Kind.UPDATE}

_LANES = get_args(Lane)
# Heights, where rows are 1 apart.
_ROW, _LOWER_ROW = 0.8, 0.6  # of a stage's blocks; lower where copies are drawn in between
_STRIP = 0.17  # of a lane of copies
_INCH = 72.0  # points
# Widths in points.
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

    A block that is too narrow has no number, and no edges.

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
        >>> from spectrain_ext.tools.timelines import draw_timeline, simulate_method
        >>> draw_timeline("few.svg", simulate_method("pipedream", 4, 8), title="pipedream")
        >>> draw_timeline("many.png", simulate_method("pipedream", 2, 800))
        '3200 of 3200 blocks are too narrow for their number.'
    """
    drawn = list(spans)
    if not drawn:
        raise ValueError("spans: expected at least one, got none")
    rows = TimelineRows(drawn, devices)
    first, last = min(span.start for span in drawn), max(span.end for span in drawn)
    if last == first:
        last = first + 1.0
    whole, length = (first, last), last - first
    blocks = sorted(s.end - s.start for s in drawn if s.kind in COMPUTED and s.end > s.start)
    usual = blocks[len(blocks) // 4] if blocks else length
    # Inches, so that a usual block has room for its number.
    width = min(max(6.0, (0.42 if versions else 0.2) * length / usual + 0.8), 22.0)
    points = 0.88 * width * _INCH / length  # per unit of time; the rest is margins
    row = 0.42 + 0.1 * versions + 0.12 * communication
    with picture(path, width, 0.9 + row * len(rows)) as figure:
        axes = figure.add_subplot()
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


class TimelineRows:
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
        look, own = _LOOK_OF[span.kind], self._stages[self.of[span.stage]]
        share = 0.5 * own.index(span.stage) / max(1, len(own) - 1)
        if not share or look.name not in ("forward", "backward"):
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
    rows: TimelineRows,
    whole: tuple[float, float],  # start and end
    communication: bool,
    edge: float = 0.5,
    points: float = math.inf,  # per unit of time
) -> None:
    """Draw the spans on rows that are grey where they are idle."""
    first, last = whole
    for k in range(len(rows)):
        place = _place(k, "compute", communication)
        axes.broken_barh([(first, last - first)], place, facecolor=_IDLE, linewidth=0)
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


def _write_numbers(
    axes: Any, drawn: Sequence[Span], rows: TimelineRows, points: float, versions: bool
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

    shown = {_LOOK_OF[span.kind] for span in drawn if span.end > span.start}
    looks = [
        look for look in _LOOKS if look in shown and (communication or look.name != "communication")
    ]
    handles = [Patch(facecolor=look.color, label=look.name) for look in looks]
    handles.append(Patch(facecolor=_IDLE, edgecolor="#BBBBBB", linewidth=0.5, label=idle))
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
        origin: ``Trace.origin``, saved as ``baseTimeNanoseconds``: it aligns the files of several
            ranks, as docs/distributed.md shows.

    Example:
        >>> from spectrain_ext.tools.timelines import simulate_method, write_trace
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
