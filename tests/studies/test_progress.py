"""Tests progress lines without a terminal, with a simulated clock."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from studies.progress import Bar, Lines, Progress


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def trained(lines, clock, minibatches, each, loss=0.25):
    for _ in range(minibatches):
        clock.now += each
        lines.advance(None if loss is None else torch.tensor(loss))


def test_a_line_every_ten_seconds():
    clock, told = Clock(), []
    lines = Lines(40, 3, told.append, clock)
    lines.begin("vanilla", "1/3")
    trained(lines, clock, 19, 0.5)
    assert not told
    trained(lines, clock, 1, 0.5, 0.125)
    # 20 in 10 s: the remaining 100 of all three runs take 50
    first = "vanilla, seed 1/3: minibatch 20 of 40, loss 0.125, 2 minibatches/s, 0:00:50 left"
    assert told == [first]
    trained(lines, clock, 9, 1.0)
    assert len(told) == 1
    trained(lines, clock, 1, 1.0)
    # recently one per second; on the whole 30 in 20 s, with 90 left
    assert told[1] == (
        "vanilla, seed 1/3: minibatch 30 of 40, loss 0.25, 1 minibatches/s, 0:01:00 left"
    )


def test_what_was_done_before_is_no_speed():
    clock, told = Clock(), []
    lines = Lines(1000, 2, told.append, clock)
    lines.begin("sync", "1/2")
    lines.skip(1000)
    lines.begin("sync", "2/2")
    lines.skip(900)  # from a checkpoint
    trained(lines, clock, 10, 1.0)
    assert told == [
        "sync, seed 2/2: minibatch 910 of 1000, loss 0.25, 1 minibatches/s, 0:01:30 left"
    ]


def test_a_slow_minibatch_and_a_loss_that_is_elsewhere():
    clock, told = Clock(), []
    lines = Lines(300, 1, told.append, clock)
    lines.begin("auto", "1/1")
    trained(lines, clock, 2, 40.0, None)
    assert told == [
        "auto, seed 1/1: minibatch 1 of 300, 0.025 minibatches/s, 3:19:20 left",
        "auto, seed 1/1: minibatch 2 of 300, 0.025 minibatches/s, 3:18:40 left",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_is_for_terminals(terminal):
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=30)
    progress = Progress.on(console, 2, 1, shown=True)
    assert isinstance(progress, Bar if terminal else Lines)
    with progress:
        progress.begin("own", "1/1")
        progress.skip(1)
        progress.advance(torch.tensor(1.0))
    assert ("own" in written.getvalue()) == terminal


def test_other_processes_say_nothing():
    console = Console(file=io.StringIO(), quiet=True)
    with Progress.on(console, 2, 1, shown=False) as progress:
        progress.begin("own", "1/1")
        progress.advance(None)
    assert isinstance(progress, Bar)


def test_a_line_is_one_line_whatever_the_width(monkeypatch):
    written = io.StringIO()
    console = Console(file=written, force_terminal=False, width=30)
    progress = Progress.on(console, 10, 1, shown=True)
    assert isinstance(progress, Lines)
    clock = Clock()
    monkeypatch.setattr(progress, "_clock", clock)
    monkeypatch.setattr(progress, "_told", clock.now)
    monkeypatch.setattr(progress, "_began", clock.now)
    progress.begin("[own]", "1/1")
    trained(progress, clock, 1, 20.0)
    assert written.getvalue() == (
        "[own], seed 1/1: minibatch 1 of 10, loss 0.25, 0.05 minibatches/s, 0:03:00 left\n"
    )
