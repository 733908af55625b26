"""Tests simulated methods, pictures of them and traces, and ``spectrain timeline``."""

from __future__ import annotations

import json
from collections import Counter
from xml.etree import ElementTree

import pytest
from helpers.cli_programs import called, spectrain

from spectrain_ext.method import find_method, methods
from spectrain_ext.schedule import Kind
from spectrain_ext.tools.simulation import Durations, simulate, streams, summarize
from spectrain_ext.tools.timelines import draw_timeline, simulate_method, write_trace
from studies.times import draw_methods_together

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure


def run(*arguments):
    return called(spectrain, "timeline", *arguments, draws=True)


def succeeds(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


# Simulated methods


def test_a_method_that_changes_drains_in_between():
    costs = {"forward": 1.0, "backward": 1.0}
    spans = list(simulate_method("pipedream+sync@4", 3, 7, **costs))
    first = [span for span in spans if span.minibatch < 4]
    alone = list(simulate_method("pipedream", 3, 4, **costs))
    assert first == alone
    drained = max(span.end for span in first)
    rest = [span for span in spans if span.minibatch >= 4]
    for span, other in zip(rest, simulate_method("sync", 3, 3, **costs), strict=True):
        assert span.start == drained + other.start
        assert span.minibatch == 4 + other.minibatch
        assert span.version is None or span.version == 4 + other.version
    assert list(simulate_method("pipedream+sync@9", 3, 4, **costs)) == alone


# The command


@pytest.mark.parametrize(
    "method", {find_method(name).schedule: name for name in methods() if name != "xgrad"}.values()
)
def test_every_schedule_can_be_drawn(method, tmp_path):
    path = tmp_path / "t.png"
    sizes = ["--stages", 4, "--microbatches", 4, "--minibatches", 2]
    succeeds("--method", method, *sizes, "-o", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_command(tmp_path):
    path = tmp_path / "t.svg"
    said = succeeds("--method", "pipedream", "--stages", 4, "--minibatches", 8, "-o", path)
    assert "pipedream, 4 stages: 33 in all, 3 per minibatch of stage 0" in said
    assert "idle, by stage: 27 % each" in said
    assert "pipedream, 4 stages" in path.read_text()
    succeeds("--method", "pipedream+sync@4", "--minibatches", 8, "-o", path)
    assert "pipedream+sync@4, 4 stages" in path.read_text()


def test_the_command_says_what_the_picture_leaves_out(tmp_path):
    path = tmp_path / "t.svg"
    output = succeeds("--method", "auto", "--stages", 16, "--minibatches", 40, "-o", path)
    said = "20480 of 20480 blocks are too narrow for their number."
    assert output.endswith(f"picture: {path}\n{said}\n")
    assert said in path.read_text()
    assert "narrow" not in succeeds("--minibatches", 400, "-o", tmp_path / "t.json")


def test_a_row_is_a_device_where_it_has_several_stages(tmp_path):
    path = tmp_path / "t.svg"
    output = succeeds("--method", "wpipe", "--stages", 4, "--minibatches", 3, "-o", path)
    spans = list(simulate_method("wpipe", 4, 3))
    idle = {f"{100 * share:.0f} %" for share in summarize(spans, [0, 1, 0, 1]).bubbles}
    assert f"idle, by device: {idle.pop()} each" in output and not idle
    drawn = path.read_text().lower()
    assert "device 0: 0, 2" in drawn and "device 1: 1, 3" in drawn
    assert "stage 0" not in drawn
    methods = [(find_method("wpipe"), "#000000"), (find_method("sync"), "#111111")]
    draw_methods_together(tmp_path / "all.svg", methods, 4)
    assert "wpipe, M = 2, on 2 devices" in (tmp_path / "all.svg").read_text()


def test_the_command_with_everything(tmp_path):
    path = tmp_path / "t.json"
    costs = {"forward": 2, "backward": 3, "update": 1, "prediction": 0.5, "communication": 0.25}
    sizes = ["--stages=2", "--minibatches=3", "--microbatches=2", "--window=5,3", "--versions"]
    succeeds(*sizes, *(f"--{name}={value}" for name, value in costs.items()), "-o", path)
    spans = simulate_method("spectrain", 2, 3, microbatches=2, window=[5, 3], **costs)
    events = json.loads(path.read_text())["traceEvents"]
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert max(ends) == pytest.approx(1000 * summarize(spans).makespan)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--method", "nope"], "method: there is no 'nope'; there are auto, sync, gpipe"),
        (["--stages", "2", "--window", "1,2"], "a deadlock"),
        (["--method", "xgrad"], "at most 1"),
        (["--method", "interleaved", "--stages", "3"], "expected a multiple of 2, got 3"),
        (["--method", "sync+wpipe@4", "--stages", "5"], "expected a multiple of 2, got 5"),
        (["-o", "t.gif"], "ends in .svg, .png, .json, got 't.gif'"),
        (["-o", "no/such/folder/t.svg"], "No such file or directory"),
        *(
            (["-o", out, f"--{option}"], "expected a duration from 0 to 1e+100 for stage 0, got ")
            for out in ("t.json", "t.svg")
            for option in ("forward=1e308", "update=inf", "communication=nan", "prediction=1e101")
        ),
        (["--stages", "1000000000"], "is not in the range 1<=x<=1000"),
        (["--minibatches", 10**9], "make 8000000000 forwards and backwards, expected at most"),
        (["--microbatches", 10**9], "expected at most 1000000"),
        (["--microbatches", 10**30], "is not in the range"),
        (["--window", "1000000"], "a number from 1 to 100000, or one per stage with commas"),
        (["--window", "0"], "'classic', 'wide', a number from 1 to 100000, or one per stage"),
        (["--stages", "4", "--window", "2,1"], "expected one per stage (4), got 2"),
        (["--instructions", "--stage", "4"], "stage: expected one of 0 to 3, got 4"),
        (["--instructions", "--method", "nothing"], "there is no 'nothing'"),
    ],
)
def test_what_the_command_refuses(arguments, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert isinstance(result.exception, SystemExit) and result.exit_code in (1, 2)
    assert expected in result.output
    assert not list(tmp_path.iterdir())


def test_a_run_that_takes_no_time_and_one_without_spans(tmp_path, recwarn):
    result = run("--forward", 0, "--backward", 0, "-o", tmp_path / "t.svg")
    assert "4 stages: 0 in all" in result.output and not recwarn.list
    with pytest.raises(ValueError, match="spans: expected at least one, got none"):
        draw_timeline(tmp_path / "t.svg", [])


# The instructions of one stage


def test_the_instructions_of_a_stage_are_printed():
    asked = ["-m", "spectrain", "--stages", 3, "--instructions", "--minibatches", 2, "--stage"]
    lines = [" ".join(line.split()) for line in succeeds(*asked, 0).splitlines()]
    assert lines == [
        *("pull 0", "receive activation 0"),
        "load forward weights 0 version 0, predicted 2 ahead",
        *("forward 0", "send activation 0"),
        *("pull 1", "receive activation 1"),
        "load forward weights 1 version 0, predicted 2 ahead",
        *("forward 1", "send activation 1"),
        *("receive gradient 0", "load backward weights 0 version 0", "backward 0"),
        "update 0 makes version 1",
        *("receive gradient 1", "load backward weights 1 version 1", "backward 1"),
        "update 1 makes version 2",
    ]
    last = succeeds(*asked, 2, "--microbatches", 2)
    assert "loss                                 1.1" in last
    assert "send gradient                        1.1" in last
    assert "receive gradient" not in last


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


def test_microbatches_versions_and_what_takes_time(tmp_path):
    path, costs = tmp_path / "t.svg", {"prediction": 0.5, "communication": 0.5}
    written = drawn(path, "gpipe", 2, 2, costs={"microbatches": 3}, versions=True)
    assert {written[f"{i}.{j}"] for i in range(2) for j in range(3)} == {2 * 2}
    assert (written["v0"], written["v1"]) == (2 * 2 * 3, 2 * 2 * 3)
    written = drawn(path, "spectrain", 4, 6, costs=costs, communication=True, versions=True)
    assert written["v0+3"] == 4  # the first four forwards of stage 0
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


def test_blocks_lose_their_edges_and_numbers_first(figures):
    spans = list(simulate_method("pipedream", 16, 45, update=0.1))
    said = draw_timeline("t.svg", spans)
    (axes,) = figures[0].axes
    left_out = 2 * 16 * 45 - len(axes.texts)
    assert said == f"{left_out} of 1440 blocks are too narrow for their number."
    assert min(text.get_fontsize() for text in axes.texts) >= 5
    assert {width for one in axes.collections for width in one.get_linewidth()} == {0.5, 0}
    assert draw_timeline("t.svg", simulate_method("pipedream", 16, 40)) is None


def test_matplotlib_may_list_the_fonts_of_a_new_machine():
    """``conftest.py`` lets it start a process for this, which other tests must not do."""
    from matplotlib import font_manager

    font_manager._get_fontconfig_fonts.cache_clear()
    font_manager.findSystemFonts()


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
