"""Tests what pictures of timelines contain, and the events of traces."""

from __future__ import annotations

import json
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest

from spectrain_ext.schedule import COMPUTE, Kind
from spectrain_ext.simulation import Durations, simulate, streams
from spectrain_ext.timelines import devices_under, draw_timeline, simulate_method, write_trace

pytest.importorskip("matplotlib")
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

FORWARD, BACKWARD, LOAD, SENT = "#0072B2", "#E69F00", "#CC79A7", "#999999"
COLORS = {
    **dict.fromkeys((Kind.FORWARD, Kind.LOSS), FORWARD),
    **dict.fromkeys((Kind.BACKWARD, Kind.BACKWARD_INPUT), BACKWARD),
    **dict.fromkeys((Kind.LOAD_FORWARD, Kind.LOAD_BACKWARD), LOAD),
    **dict.fromkeys((Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT), SENT),
    Kind.BACKWARD_WEIGHTS: "#009E73",
    Kind.UPDATE: "#000000",
}


def texts(path):
    """Return how often an SVG has each text."""
    found = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return Counter("".join(element.itertext()).strip() for element in found)


def fills(path):
    text = path.read_text().upper()
    return {color for color in (FORWARD, BACKWARD, LOAD, SENT) if color in text}


def drawn(path, method, stages, minibatches, *, costs=None, **more):
    draw_timeline(path, simulate_method(method, stages, minibatches, **(costs or {})), **more)
    return texts(path)


def test_every_block_has_its_minibatch(tmp_path):
    path = tmp_path / "t.svg"
    written = drawn(path, "pipedream", 4, 8, title="four stages")
    labels = [f"stage {k}" for k in range(4)]
    assert all(written[label] == 1 for label in [*labels, "four stages", "forward", "backward"])
    assert written["idle: 27 % of all"] == 1
    for minibatch in (1, 2, 3, 4, 6, 7):  # 0 and 5 are on the axis as well
        assert written[str(minibatch)] == 2 * 4
    assert fills(path) == {FORWARD, BACKWARD}
    first = path.read_bytes()
    drawn(path, "pipedream", 4, 8, title="four stages")
    assert path.read_bytes() == first


def test_microbatches_and_versions(tmp_path):
    path = tmp_path / "t.svg"
    written = drawn(path, "gpipe", 2, 2, costs={"microbatches": 3}, versions=True)
    assert {written[f"{i}.{j}"] for i in range(2) for j in range(3)} == {2 * 2}
    assert (written["v0"], written["v1"]) == (2 * 2 * 3, 2 * 2 * 3)
    written = drawn(path, "spectrain", 4, 6, versions=True)
    assert written["v0+3"] == 4  # the first four forwards of stage 0


def test_communication_and_predictions_where_they_take_time(tmp_path):
    path, costs = tmp_path / "t.svg", {"prediction": 0.5, "communication": 0.5}
    written = drawn(path, "spectrain", 3, 4, costs=costs, communication=True)
    assert fills(path) == {FORWARD, BACKWARD, LOAD, SENT}
    assert {"prediction", "communication"} <= written.keys()
    drawn(path, "spectrain", 3, 4, costs=costs)
    assert fills(path) == {FORWARD, BACKWARD, LOAD}


@pytest.fixture
def figures(monkeypatch):
    """The figures of the pictures that a test draws, which are not saved."""
    found = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **more: found.append(figure))
    return found


def steps(figure):
    return [patch for patch in figure.axes[0].patches if hasattr(patch, "get_data")]


def color_of(span, devices):
    """Return a block's color, with half as much white for a device's later stage."""
    color = COLORS[span.kind]
    if devices is None or devices.index(devices[span.stage]) == span.stage:
        return color
    numbers = [int(color[n : n + 2], 16) for n in (1, 3, 5)]
    return "#" + "".join(f"{round((number + 255) / 2):02X}" for number in numbers)


@pytest.mark.parametrize(
    ("method", "stages", "minibatches", "more"),
    [
        ("pipedream", 16, 200, {}),
        ("gpipe", 4, 150, {"microbatches": 7}),
        ("spectrain", 3, 500, {"update": 0.3, "prediction": 0.2, "communication": 0.4}),
        ("interleaved", 4, 101, {"backward": 1.3}),
        ("zb-h1", 3, 90, {"microbatches": 4}),
    ],
)
def test_what_is_too_narrow_is_drawn_as_shares_of_time(method, stages, minibatches, more, figures):
    spans = list(simulate_method(method, stages, minibatches, **more))
    devices = devices_under(method, stages)
    said = draw_timeline("t.svg", spans, versions=True, devices=devices, communication=True)
    (figure,) = figures
    (axes,) = figure.axes
    blocks = sum(span.kind in COMPUTE - {Kind.UPDATE} for span in spans)
    assert said.startswith(f"{blocks} blocks are too narrow to draw. Columns show shares of time, ")
    assert said.endswith(", without numbers or versions.")
    assert axes.get_xlabel() == f"time\n{said}"
    assert not axes.texts
    shown = Counter()
    for patch in steps(figure):
        values, edges, baseline = patch.get_data()
        color = to_hex(patch.get_facecolor()).upper()
        height = 0.17 if color == SENT else 0.6
        assert (values <= baseline + 1e-9).all()
        assert patch.get_linewidth() == 0
        shown[color] += float(((baseline - values) * np.diff(edges)).sum()) / height
        width = np.diff(edges)[:-1] * 0.88 * 72 * figure.get_figwidth() / (edges[-1] - edges[0])
        assert (width > 3.999).all() and len(width) > 100
    simulated = Counter()
    for span in spans:
        simulated[color_of(span, devices)] += span.end - span.start
    simulated = {color: time for color, time in simulated.items() if time}
    assert {color: shown[color] for color in simulated} == pytest.approx(simulated)
    assert sum(shown.values()) == pytest.approx(sum(simulated.values()))


def test_the_columns_of_a_steady_state_are_alike(figures):
    spans = list(simulate_method("auto", 16, 40))
    said = draw_timeline("t.svg", spans)
    assert said.endswith("in bins of 6, without numbers.")  # two microbatches
    for patch in steps(figures[0]):
        values = patch.get_data().values
        assert len(values) == 328
        assert values[20:300] == pytest.approx(values[20])
    assert len(steps(figures[0])) == 2 * 16


def test_blocks_lose_their_edges_and_numbers_first(figures):
    spans = list(simulate_method("pipedream", 16, 45, update=0.1))
    said = draw_timeline("t.svg", spans)
    (axes,) = figures[0].axes
    left_out = 2 * 16 * 45 - len(axes.texts)
    assert said == f"{left_out} of 1440 blocks are too narrow for their number."
    assert not steps(figures[0])
    assert min(text.get_fontsize() for text in axes.texts) >= 5
    lines = {
        to_hex(one.get_facecolor()[0]).upper(): set(one.get_linewidth()) for one in axes.collections
    }
    assert (lines[FORWARD], lines[BACKWARD], lines["#000000"]) == ({0.5}, {0.5}, {0})
    assert draw_timeline("t.svg", simulate_method("pipedream", 16, 40)) is None


def test_matplotlib_may_list_the_fonts_of_a_new_machine():
    """``conftest.py`` lets it start a process for this, which other tests must not do."""
    from matplotlib import font_manager

    font_manager._get_fontconfig_fonts.cache_clear()
    font_manager.findSystemFonts()


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="spans: expected at least one, got none"):
        draw_timeline(tmp_path / "t.svg", [])


def test_a_trace_has_every_span(tmp_path):
    path = tmp_path / "t.json"
    durations = Durations.of(3, forward=1, backward=2, activation=0.25, gradient=0.25)
    spans = list(simulate(streams("1f1b-async", [3, 2, 1]), durations, minibatches=5))
    write_trace(path, spans)
    events = json.loads(path.read_text())["traceEvents"]
    found = [event for event in events if event["ph"] == "X"]
    assert len(found) == len(spans)
    for event, span in zip(found, spans, strict=True):
        assert (event["pid"], event["cat"]) == (span.stage, span.kind.value)
        assert (event["ts"], event["dur"]) == (1000 * span.start, 1000 * (span.end - span.start))
        assert event["args"].get("version") == span.version
    names = {(e["pid"], e.get("tid")): e["args"].get("name") for e in events if e["ph"] == "M"}
    assert names[1, None] is None or names[1, None] == "stage 1"
    assert (names[1, 0], names[1, 1], names[1, 2]) == ("compute", "to next", "to previous")
    assert (2, 1) not in names  # the last stage sends nothing on
