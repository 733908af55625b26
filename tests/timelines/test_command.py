"""Tests simulated methods, and ``spectrain timeline``."""

from __future__ import annotations

import json

import pytest
from helpers.cli_programs import called, spectrain

from spectrain_ext.method import find_method, methods
from spectrain_ext.schedule import Kind
from spectrain_ext.simulation import streams, summarize
from spectrain_ext.simulation import write_csv as write_schedule
from spectrain_ext.timelines import simulate_method
from studies.times import draw_methods_together

pytest.importorskip("matplotlib")


def run(*arguments):
    return called(spectrain, "timeline", *arguments, draws=True)


def succeeds(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


# Simulated methods


@pytest.mark.parametrize(
    ("method", "stage", "minibatch", "more", "forward", "backward"),
    [
        ("spectrain", 2, 10, {}, (9, 2), (10, 1)),
        ("pipedream", 0, 10, {}, (7, 0), (7, 0)),
        ("pipedream-vertical-sync", 3, 10, {}, (7, 0), (7, 0)),
        ("spectrain-local", 1, 1, {}, (0, 1), (1, 0)),
        ("pipedream-2bw", 0, 10, {"microbatches": 4}, (9, 0), (9, 0)),
        ("vanilla", 0, 10, {"window": "wide"}, (4, 0), (10, 0)),
    ],
)
def test_the_versions_of_a_method(method, stage, minibatch, more, forward, backward):
    """As (version, horizon)."""
    found = {
        span.kind: (span.version, span.horizon)
        for span in simulate_method(method, 4, 20, **more)
        if (span.stage, span.minibatch) == (stage, minibatch)
    }
    assert (found[Kind.FORWARD], found[Kind.BACKWARD]) == (forward, backward)


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
    said = "20480 blocks are too narrow to draw. Columns show shares of time, in bins of 6, "
    assert output.endswith(f"picture: {path}\n{said}without numbers.\n")
    assert f"{said}without numbers." in path.read_text()
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
    for color in ("#0072b2", "#80b8d8", "#e69f00", "#f2cf80"):  # and half as much white
        assert color in drawn
    methods = [(find_method("wpipe"), "#000000"), (find_method("sync"), "#111111")]
    draw_methods_together(tmp_path / "all.svg", methods, 4)
    assert "wpipe, M = 2, on 2 devices" in (tmp_path / "all.svg").read_text()


def test_the_command_with_everything(tmp_path):
    path = tmp_path / "t.json"
    costs = {"forward": 2, "backward": 3, "update": 1, "prediction": 0.5, "communication": 0.25}
    sizes = [
        "--stages",
        "2",
        "--minibatches",
        "3",
        "--microbatches",
        "2",
        "--window",
        "5,3",
        "--versions",
    ]
    succeeds(*sizes, *(f"--{name}={value}" for name, value in costs.items()), "-o", path)
    spans = simulate_method("spectrain", 2, 3, microbatches=2, window=[5, 3], **costs)
    events = json.loads(path.read_text())["traceEvents"]
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert max(ends) == pytest.approx(1000 * summarize(spans).makespan)


def test_the_command_with_a_link(tmp_path):
    picture, schedule = tmp_path / "t.svg", tmp_path / "schedule.csv"
    link, sizes = ["--link", "wan200", "--message", "2.5e6"], ["--stages", 3, "--minibatches", 2]
    output = succeeds("--method", "1f1b", *sizes, "--microbatches", 4, *link, "-o", picture)
    slow = {"communication": 0.15, "inbound": True}
    spans = list(simulate_method("1f1b", 3, 2, microbatches=4, **slow))
    assert f"1f1b, 3 stages: {summarize(spans).makespan:g} in all" in output
    assert "simulated seconds" in picture.read_text()
    write_schedule(schedule, streams("1f1b", [3, 2, 1], 4), microbatches=4, minibatches=1)
    one = summarize(simulate_method("1f1b", 3, 1, microbatches=4, **slow))
    output = succeeds("--csv", schedule, *link, "-o", picture)
    assert f"schedule.csv: {one.makespan:g} in all" in output


def test_the_command_with_a_file(tmp_path):
    schedule, picture = tmp_path / "schedule.csv", tmp_path / "t.png"
    write_schedule(schedule, streams("1f1b", [3] * 3, 3), microbatches=3, minibatches=1)
    assert "schedule.csv: 15 in all" in succeeds("--csv", schedule, "-o", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--method", "nope"], "method: there is no 'nope'; there are auto, sync, gpipe"),
        (["--stages", "2", "--window", "1,2"], "a deadlock"),
        (["--method", "xgrad"], "at most 1"),
        (["--method", "interleaved", "--stages", "3"], "expected a multiple of 2, got 3"),
        (["--method", "sync+wpipe@4", "--stages", "5"], "expected a multiple of 2, got 5"),
        (["--link", "wan200"], "--link and --message are given together"),
        (["--message", "8"], "--link and --message are given together"),
        (["--link=1e6", "--message=8", "--communication=1"], "and instead of --communication"),
        (["--link", "isa", "--message", "8"], "link: expected pcie3"),
        (["-o", "t.gif"], "ends in .svg, .png, .json, got 't.gif'"),
        (["-o", "no/such/folder/t.svg"], "No such file or directory"),
        *(
            (["-o", out, f"--{option}"], "expected a duration from 0 to 1e+100 for stage 0, got ")
            for out in ("t.json", "t.svg")
            for option in ("forward=1e308", "update=inf", "communication=nan", "prediction=1e101")
        ),
        (["--link", "1e-300", "--message", "1e9"], "activation: expected a duration from 0 to"),
        (["--stages", "1000000000"], "is not in the range 1<=x<=1000"),
        (["--stages", "1000000000", "--instructions"], "is not in the range 1<=x<=1000"),
        (["--minibatches", 10**9], "make 8000000000 forwards and backwards, expected at most"),
        (["--microbatches", 10**9], "expected at most 1000000"),
        (["--microbatches", 10**30], "is not in the range"),
        (["--window", "1000000"], "a number from 1 to 100000, or one per stage with commas"),
        (["--window", "0"], "'classic', 'wide', a number from 1 to 100000, or one per stage"),
        (["--window", "2,x"], "'classic', 'wide', a number from 1 to 100000, or one per stage"),
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


@pytest.mark.parametrize("out", ["t.json", "t.svg"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        *(
            (content, "expected forwards and backwards, got none")
            for content in ("", "\n", " , \n")
        ),
        ("0F0,0B0\n1B0,1F0\n", "stage 1, backward of minibatch 0, microbatch 0: expected its f"),
    ],
)
def test_a_schedule_that_is_none(content, said, out, tmp_path):
    path = tmp_path / "s.csv"
    path.write_text(content)
    result = run("--csv", path, "-o", tmp_path / out)
    assert isinstance(result.exception, SystemExit) and result.exit_code == 1
    assert said in result.output
    assert not (tmp_path / out).exists()


def test_a_run_that_takes_no_time(tmp_path, recwarn):
    result = run("--forward", 0, "--backward", 0, "-o", tmp_path / "t.svg")
    assert "4 stages: 0 in all" in result.output and not recwarn.list


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
