"""Tests progress lines without a terminal, with a simulated clock."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from studies.progress import Progress


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def lines_of(per_run, runs):
    """Return a progress of lines, its clock, and a function that returns the lines so far."""
    written, clock = io.StringIO(), Clock()
    console = Console(file=written, force_terminal=False, width=30)
    return Progress(console, per_run, runs, clock=clock), clock, lambda: written.getvalue()


def trained(lines, clock, minibatches, each, loss=0.25):
    for _ in range(minibatches):
        clock.now += each
        lines.advance(torch.tensor(loss))


def test_a_line_every_ten_seconds():
    lines, clock, told = lines_of(40, 3)
    lines.begin("[vanilla]", "1/3")
    trained(lines, clock, 19, 0.5)
    assert not told()
    trained(lines, clock, 1, 0.5, 0.125)
    # 20 in 10 s: the remaining 100 of all three runs take 50; one line whatever the width
    first = "[vanilla], seed 1/3: minibatch 20 of 40, loss 0.125, 2 minibatches/s, 0:00:50 left\n"
    assert told() == first
    trained(lines, clock, 9, 1.0)
    assert told() == first
    trained(lines, clock, 1, 1.0)
    # recently one per second; on the whole 30 in 20 s, with 90 left
    assert told().removeprefix(first) == (
        "[vanilla], seed 1/3: minibatch 30 of 40, loss 0.25, 1 minibatches/s, 0:01:00 left\n"
    )


def test_what_was_done_before_is_no_speed():
    lines, clock, told = lines_of(1000, 2)
    lines.begin("sync", "1/2")
    lines.skip(1000)
    lines.begin("sync", "2/2")
    trained(lines, clock, 10, 1.0)
    assert told() == (
        "sync, seed 2/2: minibatch 10 of 1000, loss 0.25, 1 minibatches/s, 0:16:30 left\n"
    )


def test_a_slow_minibatch():
    lines, clock, told = lines_of(300, 1)
    lines.begin("auto", "1/1")
    trained(lines, clock, 2, 40.0)
    assert told().splitlines() == [
        "auto, seed 1/1: minibatch 1 of 300, loss 0.25, 0.025 minibatches/s, 3:19:20 left",
        "auto, seed 1/1: minibatch 2 of 300, loss 0.25, 0.025 minibatches/s, 3:18:40 left",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_is_for_a_terminal(terminal):
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=30)
    with Progress(console, 2, 1) as progress:
        progress.begin("own", "1/1")
        progress.skip(1)
        progress.advance(torch.tensor(1.0))
    assert ("own" in written.getvalue()) == terminal
