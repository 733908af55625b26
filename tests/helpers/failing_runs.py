"""Trials in which a rank fails during a run, and the reports that all ranks must give."""

from __future__ import annotations

import random
import re

FAULTS = ["kill", "stop", "exit", "exception", "hang", "shape"]
TIMEOUT = 3.0


def trial(seed):
    """Draw a rank, a method, a fault and a moment."""
    draw = random.Random(seed)
    ranks = draw.choice([2, 3, 4])
    fault = FAULTS[seed % len(FAULTS)]
    # The last rank's output goes to the loss, not over an edge.
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


def replica_trial(seed):
    draw = random.Random(3000 + seed)
    counts = draw.choice([[2], [3], [2, 1], [1, 2], [2, 2], [1, 3], [1, 2, 1]])
    culprit = draw.randrange(sum(counts))
    return sum(counts), {
        "fault": FAULTS[seed % (len(FAULTS) - 1)],  # no output of another shape
        "counts": counts,
        "culprit": culprit,
        "stage": [k for k, count in enumerate(counts) for _ in range(count)][culprit],
        "where": draw.choice(["forward", "backward"]),
        "when": draw.randrange(1, 30),
        "method": draw.choice(["vanilla", "pipedream", "spectrain", "1f1b", "gpipe", "sync"]),
        "timeout": TIMEOUT,
        "keeper": draw.random() < 0.5,
    }


def stages_trial(seed):
    draw = random.Random(5000 + seed)
    ranks = draw.choice([2, 3])
    fault = FAULTS[seed % len(FAULTS)]
    stage = draw.randrange(2 * ranks - (fault == "shape"))
    return ranks, {
        "fault": fault,
        "chunks": 2,
        "stage": stage,
        "culprit": stage % ranks,
        "where": "forward" if fault == "shape" else draw.choice(["forward", "backward"]),
        "when": draw.randrange(1, 30),
        "method": draw.choice(["vanilla", "spectrain", "gpipe", "interleaved", "wpipe"]),
        "timeout": TIMEOUT,
        "keeper": draw.random() < 0.5,
    }


def expect_one_end(ranks, what):
    """Check that all ranks end in time and name the failed one."""
    culprit, fault = what["culprit"], what["fault"]
    ends = ranks.join()  # a stopped rank continues after the others noticed its silence
    told = f"{what}\n" + "\n".join(
        f"rank {rank}: {end.code}\n{end.error}" for rank, end in enumerate(ends)
    )
    own = {"kill": -9, "exit": 7}.get(fault, 1)
    assert [end.code for end in ends] == [
        own if rank == culprit else 1 for rank in range(len(ends))
    ], told
    for rank, end in enumerate(ends):
        if rank == culprit and fault != "hang":
            continue
        assert f"first cause: rank {culprit}, " in end.error, told
        written = re.findall(r"report of all ranks: ([^\s;]+)", end.error)
        assert written if "temporary" not in what else not written, told
        assert {*written} <= end.reports.keys(), told
        if fault in ("exception", "shape"):
            assert f"stage {what.get('stage', culprit)}, minibatch " in end.error, told
        for waited in re.findall(r"waiting on \S+ .*? for ([0-9.]+) s", end.error):
            assert float(waited) < TIMEOUT + 10, told
