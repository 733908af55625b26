"""Whatever a rank does wrong, and whenever: all end, and say the same of the right rank."""

from __future__ import annotations

import random
import re

import pytest
import rank_pipelines
from ranks import Ranks

FAULTS = ["kill", "stop", "exit", "exception", "hang", "shape"]
TIMEOUT = 3.0


def trial(seed):
    """A rank, a method, a fault and a moment."""
    draw = random.Random(seed)
    ranks = draw.choice([2, 3, 4])
    fault = FAULTS[seed % len(FAULTS)]
    # What the last rank returns goes to the loss, not over an edge.
    culprit = draw.randrange(ranks - 1 if fault == "shape" else ranks)
    return ranks, {
        "fault": fault,
        "culprit": culprit,
        "where": "forward" if fault == "shape" else draw.choice(["forward", "backward"]),
        "when": draw.randrange(1, 30),
        "method": draw.choice(["vanilla", "pipedream", "spectrain", "1f1b", "gpipe"]),
        "timeout": TIMEOUT,
        "keeper": draw.random() < 0.5,
    }


@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=[] if n < 12 else pytest.mark.nightly) for n in range(100)],
)
def test_one_end_for_all(seed):
    count, what = trial(seed)
    culprit, fault = what["culprit"], what["fault"]
    ranks = Ranks(rank_pipelines.failing, count, what, keeper=what["keeper"])
    ends = ranks.join(but=(culprit,) if fault == "stop" else ())
    told = f"{what}\n" + "\n".join(
        f"rank {rank}: {end.code}\n{end.error}" for rank, end in enumerate(ends)
    )
    own = {"kill": -9, "stop": -9, "exit": 7}.get(fault, 1)
    assert [end.code for end in ends] == [own if r == culprit else 1 for r in range(count)], told
    for rank, end in enumerate(ends):
        if rank == culprit and fault != "hang":
            continue
        assert f"first cause: rank {culprit}, " in end.error, told
        if fault in ("exception", "shape"):
            assert f"stage {culprit}, minibatch " in end.error, told
        for waited in re.findall(r"waiting on \S+ .*? for ([0-9.]+) s", end.error):
            assert float(waited) < TIMEOUT + 10, told
