"""Trials in which a rank fails during a run, and what all ranks must then tell."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import tempfile
import threading
from typing import Any

from helpers import replica_programs
from helpers.rank_cases import Case
from helpers.ranks import Ranks, printed_by
from torch import Tensor, nn

import spectrain_ext as st

FAULTS = ["kill", "stop", "exit", "exception", "hang"]
TIMEOUT = 5.0  # of a pipeline in which a rank is going to be silent or to hang
METHODS = {
    "stages": ("vanilla", "pipedream", "spectrain", "1f1b", "gpipe"),
    "chunks": ("vanilla", "spectrain", "gpipe", "interleaved", "wpipe"),
    "replicas": ("vanilla", "pipedream", "spectrain", "1f1b", "gpipe", "sync"),
    "averaged": ("vanilla", "sync", "gpipe"),
    "ties": ("vanilla", "spectrain"),
}
Trial = dict[str, Any]


def trial(seed: int, kind: str = "stages") -> tuple[int, Trial]:
    """Draw ranks, a method, a fault and its place and moment."""
    draw = random.Random(f"{kind} {seed}")
    fault = FAULTS[seed % len(FAULTS)]
    replicated = kind in ("replicas", "averaged")
    layouts = [[2], [3], [2, 2], [2, 1], [1, 2], [1, 3], [1, 2, 1]]
    counts = draw.choice(layouts[:3] if kind == "averaged" else layouts)
    chunks = 2 if kind == "chunks" else 1
    ranks = sum(counts) if replicated else draw.choice([2, 3] if chunks == 2 else [2, 3, 4])
    stage = draw.randrange(chunks * ranks)
    return ranks, {
        "fault": fault,
        "kind": kind,
        "chunks": chunks,
        "counts": counts,
        "culprit": stage % ranks,
        "stage": [k for k, count in enumerate(counts) for _ in range(count)][stage]
        if replicated
        else stage,
        "where": draw.choice(["forward", "backward"]),
        "when": draw.randrange(1, 30),
        "method": draw.choice(METHODS[kind]),
        "timeout": timeout_of(fault),
        "keeper": draw.random() < 0.5,
    }


def timeout_of(fault: str) -> float:
    """Return a pipeline's timeout: longer where nothing waits for its end, as machines are busy."""
    return TIMEOUT if fault in ("stop", "hang") else 2 * TIMEOUT


def commit(fault: str) -> None:
    """Commit a fault; one that begins with "/" is a pipe, whose reader notices the hang."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "exit":
        os._exit(7)
    if fault == "exception":
        raise ArithmeticError("planned")
    if fault == "hang":
        threading.Event().wait()
    if fault.startswith("/"):
        with open(fault, "w"):
            threading.Event().wait()


def fail_at(stage: nn.Module, fault: str, where: str, when: int) -> None:
    """Let a stage commit a fault in one of its forwards or backwards."""
    turns = itertools.count()

    def after(_: nn.Module, __: Any, output: Tensor) -> None:
        if where == "backward":
            if output.requires_grad:  # the first forward of a recomputed stage has no graph
                output.register_hook(lambda _: commit(fault) if next(turns) == when else None)
        elif next(turns) == when:
            commit(fault)

    stage.register_forward_hook(after)


def fail(rank: int, ranks: int, what: Trial) -> None:
    """Train until one rank fails, in one of its stages if it has several."""
    tempfile.tempdir = what.get("temporary", tempfile.tempdir)
    given = {"timeout": what["timeout"], **what.get("settings", {})}
    if what["kind"] in ("replicas", "averaged"):
        averaging = st.averaging.Elastic(0.5) if what["kind"] == "averaged" else None
        more = {"microbatches": 6, "averaging": averaging, **given}
        pipe = replica_programs.make(rank, what["counts"], what["method"], **more)
        data = replica_programs.data(1, 16)
    else:
        ties = "two" if what["kind"] == "ties" else "none"
        case = Case(what["method"], (ranks, what["chunks"]), ties=ties)
        pipe, data = case.pipeline(rank, **given), case.batches([16])
    if rank == what["culprit"]:
        stage = list(pipe.children())[what["stage"] // ranks if what["chunks"] > 1 else 0]
        fail_at(stage, what["fault"], what["where"], what["when"])
    for _ in pipe.run(itertools.cycle(data)):
        pass


def expect_one_end(ranks: Ranks, what: Trial) -> None:
    """Check that all ranks end in time and name the failed one."""
    culprit, fault = what["culprit"], what["fault"]
    ends = ranks.join()  # a stopped rank continues after the others noticed its silence
    told = f"{what}\n{printed_by(ends)}"
    own = {"kill": -9, "exit": 7}.get(fault, 1)
    codes = [own if rank == culprit else 1 for rank in range(len(ends))]
    assert [end.code for end in ends] == codes, told
    for rank, end in enumerate(ends):
        if rank == culprit and fault != "hang":
            continue
        assert f"first cause: rank {culprit}, " in end.error, told
        written = re.findall(r"report of this machine's ranks: ([^\s;]+)", end.error)
        assert written if "temporary" not in what else not written, told
        assert {*written} <= end.reports.keys(), told
        if fault == "exception":
            assert f"stage {what['stage']}, minibatch " in end.error, told
        for waited in re.findall(r"waiting on \S+ .*? for ([0-9.]+) s", end.error):
            assert float(waited) < TIMEOUT + 10, told
