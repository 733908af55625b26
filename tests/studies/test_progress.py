"""Tests progress lines without a terminal, with a simulated clock."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from studies.progress import Progress


class Lines:
    """A progress of lines whose minibatches take as long as they are said to."""

    def __init__(self, per_run, runs):
        self.file, self.now = io.StringIO(), 100.0
        # one line whatever the width
        console = Console(file=self.file, force_terminal=False, width=30)
        self.progress = Progress(console, per_run, runs, clock=lambda: self.now)

    def trained(self, minibatches, each, loss=0.25):
        """Return the lines that these minibatches print."""
        before = len(self.file.getvalue())
        for _ in range(minibatches):
            self.now += each
            self.progress.advance(torch.tensor(loss))
        return self.file.getvalue()[before:]


def test_a_line_every_ten_seconds():
    lines = Lines(40, 3)
    lines.progress.begin("[vanilla]", "1/3")
    assert not lines.trained(19, 0.5)
    # 20 in 10 s: the remaining 100 of all three runs take 50
    assert lines.trained(1, 0.5, 0.125) == (
        "[vanilla], seed 1/3: minibatch 20 of 40, loss 0.125, 2 minibatches/s, 0:00:50 left\n"
    )
    assert not lines.trained(9, 1.0)
    # recently one per second; on the whole 30 in 20 s, with 90 left
    assert lines.trained(1, 1.0) == (
        "[vanilla], seed 1/3: minibatch 30 of 40, loss 0.25, 1 minibatches/s, 0:01:00 left\n"
    )


def test_what_was_done_before_is_no_speed_of_a_slow_minibatch():
    lines = Lines(1000, 2)
    lines.progress.begin("sync", "1/2")
    lines.progress.skip(1000)
    lines.progress.begin("sync", "2/2")
    assert lines.trained(1, 40.0) == (
        "sync, seed 2/2: minibatch 1 of 1000, loss 0.25, 0.025 minibatches/s, 11:06:00 left\n"
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_is_for_a_terminal(terminal):
    written = io.StringIO()
    with Progress(Console(file=written, force_terminal=terminal, width=30), 2, 1) as progress:
        progress.begin("own", "1/1")
        progress.skip(1)
        progress.advance(torch.tensor(1.0))
    assert ("own" in written.getvalue()) == terminal
