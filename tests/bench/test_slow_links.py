"""Tests that messages come over inbound wires, in this package's pipeline and in torch's."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import bench_slow_links
import pytest
from bench_slow_links import Run, measured, reached
from helpers.ranks import run_said
from inbound_wires import InboundWires


def test_a_message_arrives_after_the_one_before(tmp_path: Path) -> None:
    wires = InboundWires(InboundWires.make(tmp_path, 2), 1, 2, bandwidth=1000.0, latency=0.5)
    assert wires.arrival(10.0, 500) == 11.0
    assert wires.arrival(10.2, 500) == 12.0, "it waits for the wire"
    assert wires.arrival(20.0, 0) == 20.5, "the wire waits for it"


@pytest.mark.processes
def test_the_pipeline_and_torchs_train_the_same_over_the_same_wires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_slow_links, "spawned", run_said)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 900)
    options = Namespace(data_dir=tmp_path, out=tmp_path, updates=3, megabits=80.0, latency=20.0)
    found: dict[str, Any] = {}
    for name in ("1f1b", "torch 1F1B", "torch ZBV", "auto"):
        found[name] = measured(Run(name, 2, 2, "bfloat16", 0.004, 3), options)
        assert len(found[name]["losses"]) == len(found[name]["moments"]) == 3
        assert measured(Run(name, 2, 2, "bfloat16", 0.004, 3), options) == found[name], "resumed"
    mine, theirs = found["1f1b"], found["torch 1F1B"]
    assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
    assert found["torch ZBV"]["losses"] == pytest.approx(theirs["losses"], rel=1e-2)
    # 32 sequences of 32 tokens, 64 wide, in bfloat16: forwards to one rank, gradients to the other
    size = 3 * 32 * 32 * 64 * 2
    for document in (mine, theirs, found["auto"]):
        for rank in document["of_ranks"]:
            assert (rank["bytes"], rank["messages"]) == (size, 3 * 2)
            assert rank["waited"] > 0.0
    # The last rank has its activations after the wire's time, and a flush then waits for gradients.
    wire = size / 6 / 10e6 + 0.02
    assert min(mine["moments"][-1], theirs["moments"][-1]) > 3 * 2 * wire + 2 * 2 * wire
    document = {"losses": [3.0] * 25 + [2.0] * 25, "moments": [0.5 * i for i in range(1, 51)]}
    assert reached(document, 2.6) == (35, 17.5) and reached(document, 1.9) is None
