"""Tests failures of a rank: all ranks end and blame the right one."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys

import pytest
from helpers import failing_checkpoints, rank_pipelines, replica_programs
from helpers.campaign import FAULT, Campaign
from helpers.checkpoint_cases import everything, pipeline, same
from helpers.failing_checkpoints import EVERY, MINIBATCHES
from helpers.failing_runs import TIMEOUT, expect_one_end, replica_trial, trial
from helpers.ranks import Ranks, free_port, run_ranks

from spectrain_ext.checkpoint import CheckpointManager, load
from spectrain_ext.errors import CheckpointError

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=[] if n < 6 else pytest.mark.nightly) for n in range(400)],
)
def test_one_end_for_all(seed, record_property):
    count, what = trial(seed)
    record_property(FAULT, ("a rank fails in a run", seed, what["fault"]))
    ranks = Ranks(rank_pipelines.failing, count, what, keeper=what["keeper"])
    expect_one_end(ranks, what)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100))
def test_one_end_for_all_replicas(seed, record_property):
    count, what = replica_trial(seed)
    record_property(FAULT, ("a replica fails in a run", seed, what["fault"]))
    ranks = Ranks(replica_programs.failing, count, what, keeper=what["keeper"])
    expect_one_end(ranks, what)


@pytest.mark.parametrize(
    ("where", "error"), [("handler", "RuntimeError: planned"), ("thread", "MemoryError: planned")]
)
def test_only_an_error_of_a_connection_blames_the_rank_at_its_other_end(where, error):
    ends = Ranks(rank_pipelines.failing_inside, 3, where).join()
    assert error in ends[1].error
    for rank in (0, 2):
        assert re.search(f"first cause: rank 1, .*: {error}; report", ends[rank].error)


# The failure report


def section(report, rank):
    """Return one rank's section of a report, if that rank has reported."""
    (found,) = re.findall(rf"^=+ rank {rank}: (.*?)(?=^=|\Z)", report, re.MULTILINE | re.DOTALL)
    return found


def pending(report):
    """Return messages sent but not used, by edge."""
    found = re.findall(r"^  (edge \d -> \d): sent .*; PENDING: (\d+)$", report, re.MULTILINE)
    return {edge: int(count) for edge, count in found}


FAULTS = ["exception", "kill", "stop", "exit", "hang", "interrupt", "interrupt one"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("culprit", [0, 1])
def test_one_report_of_all_ranks(tmp_path, fault, culprit):
    what = {
        **{"fault": fault, "culprit": culprit, "where": "forward", "when": 7},
        **{"method": "pipedream", "timeout": TIMEOUT},
    }
    pipe = tmp_path / "hangs"
    if "interrupt" in fault:
        os.mkfifo(pipe)
        what.update(fault=str(pipe), timeout=300.0)
    ranks = Ranks(rank_pipelines.failing, 3, what)
    if "interrupt" in fault:
        with open(pipe):
            for rank in [culprit] if "one" in fault else range(3):
                os.kill(ranks.pid(rank), signal.SIGINT)
    ends = ranks.join()
    ((path, report),) = ends[0].reports.items()
    silent = fault in ("kill", "stop", "exit")
    told = [r for r in range(3) if r != culprit or not silent]
    for rank in told:
        assert f"report of all ranks: {path}" in ends[rank].error
        mine = section(report, rank)
        assert "of minibatch" in mine.partition("Python stacks")[0]
        assert "thread MainThread\n" in mine
    first = "[012]" if fault == "interrupt" else culprit
    assert re.search(rf"^First cause: rank {first}, .*", report, re.MULTILINE)
    answers = f"= rank {culprit}: " in report
    if silent:
        # A stopped rank continues after the others noticed its silence, and may still report.
        assert not answers or fault == "stop"
        last = re.search(rf"^  {culprit}  does not answer; .* ago it said: ", report, re.MULTILINE)
        assert (last is None) == answers
    else:
        assert "in commit\n" in section(report, culprit)
        assert not any("in commit\n" in section(report, r) for r in told if r != culprit)
    if fault == "hang":  # until nothing changes any more
        others = "edge 0 -> 1" if culprit else "edge 1 -> 0"
        assert pending(report) == {others: 1, "edge 2 -> 1": 1}


def test_without_the_store_every_rank_writes_its_own():
    what = {"fault": "kill", "culprit": 0, "where": "forward", "when": 7}
    what |= {"method": "pipedream", "timeout": TIMEOUT}
    ends = Ranks(rank_pipelines.failing, 3, what, keeper=False).join()
    for rank in (1, 2):
        found = re.findall(r"report of all ranks: (\S+)$", ends[rank].error, re.MULTILINE)
        (path,) = {*found}
        report = ends[rank].reports[path]
        assert f"Written by rank {rank} at " in report
        assert "thread MainThread\n" in section(report, rank)
        assert "  0  does not answer; " in report


def test_a_report_that_cannot_be_written_is_not_missed():
    what = {"fault": "exception", "culprit": 1, "where": "forward", "when": 7}
    what |= {"method": "pipedream", "timeout": TIMEOUT, "temporary": "/nonexistent"}
    ranks = Ranks(rank_pipelines.failing, 3, what)
    expect_one_end(ranks, what)


def test_a_report_has_the_collectives_that_others_have_not_come_to():
    what = {"fault": "stop", "counts": [2], "culprit": 1, "stage": 0, "where": "forward", "when": 3}
    what |= {"method": "sync", "timeout": TIMEOUT}
    ends = Ranks(replica_programs.failing, 2, what).join(but=(1,))
    (report,) = ends[0].reports.values()
    assert re.search(r"\n  rank 0: the gradients of the stage's other replicas, \d+ bytes", report)


# How a plain program ends: other tests' ranks end by os._exit, without Python's shutdown

PROGRAM = """
import itertools, os, signal, sys
import torch
from torch import nn
import spectrain_ext as st
import spectrain_ext.checkpoint, spectrain_ext.distributed.pipeline

fault, culprit, ranks = sys.argv[1], int(sys.argv[2]), 3
pids = []
while len(pids) < ranks and (not pids or pids[-1]):
    pids.append(os.fork())
if pids[-1]:
    codes = {pid: os.waitstatus_to_exitcode(status) for pid, status in (os.wait() for _ in pids)}
    print(*(codes[pid] for pid in pids))
    sys.exit()

rank = len(pids) - 1
os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
st.join_ranks()
signal.signal(signal.SIGINT, signal.default_int_handler)


class Stage(nn.Linear):
    def forward(self, x):
        if rank == culprit and next(calls) == 7:
            if fault == "error":
                raise ArithmeticError("planned")
            if fault in ("kill", "interrupt"):
                os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGINT)
        return super().forward(x)


calls = itertools.count()
data = itertools.cycle([(torch.ones(8, 4), torch.ones(8, 4))])
pipe = st.DistributedPipeline(
    Stage(4, 4), lambda p: st.optim.SGD(p, lr=0.1), nn.functional.mse_loss, "vanilla", timeout=60
)
try:
    run = pipe.run(data)
    for result in run:
        if rank == culprit and result.index == 5:
            if fault == "leave":
                sys.exit(7)
            if fault == "loop":
                raise KeyError("planned")
    for _ in pipe.run(data):
        pass
except st.RankError as error:
    os.write(2, f"\\n{error}\\n".encode())  # at once, as all ranks write there
    if rank == 2:
        sys.exit(42)
    raise
"""

ENDINGS = {
    "error": (1, "stage {0}, minibatch 7, forward: ArithmeticError: planned"),
    "interrupt": (-signal.SIGINT, "KeyboardInterrupt"),
    "kill": (-signal.SIGKILL, "its process has ended, with the store that it kept"),
    "leave": (
        7,
        "the caller's loop, which has the result of minibatch 5: .* the program has ended",
    ),
    "loop": (1, "the caller's loop, which has the result of minibatch 5: KeyError: 'planned'"),
}


@pytest.mark.parametrize(
    ("fault", "culprit"),
    [("error", 1), ("interrupt", 0), ("kill", 0), ("leave", 1), ("loop", 0)],
)
def test_a_plain_program_ends_with_its_own_exit_code(tmp_path, fault, culprit):
    more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    more |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, fault, str(culprit)],
        **{"capture_output": True, "text": True, "timeout": 240},
        env={**os.environ, **more},
    )
    code, reason = ENDINGS[fault]
    expected = [1, 1, 42]
    expected[culprit] = code
    assert [int(each) for each in done.stdout.split()] == expected, done.stderr
    causes = re.findall(r"^rank \d, .*; first cause: rank (\d), (.*)", done.stderr, re.MULTILINE)
    assert len(causes) == 2, done.stderr
    for rank, told in causes:
        assert int(rank) == culprit
        assert re.search(reason.format(culprit), told), told


# Failures while several processes write a checkpoint

ENDS = {"kill": -signal.SIGKILL, "cut": -signal.SIGXFSZ, "exit": 7}


def checkpoint_trial(seed):
    """Draw a rank, a fault, a save and a point in it."""
    draw = random.Random(1000 + seed)
    ranks = draw.choice([2, 3, 4])
    what = {
        "fault": ["kill", "full", "cut", "exception", "stop", "hang", "exit", "kill"][seed % 8],
        "culprit": draw.randrange(ranks),
        "save": draw.randrange(2, MINIBATCHES // EVERY + 1),
        "calls": draw.randrange(1, 25),
        "share": draw.random(),
        "timeout": TIMEOUT,
        "keeper": draw.random() < 0.5,
    }
    # The remaining ranks notice it in the next save.
    lost = what["fault"] in ("kill", "stop", "exit") and what["save"] < MINIBATCHES // EVERY
    what["asynchronous"] = lost and draw.random() < 0.5
    return ranks, what


@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=[] if n < 5 else pytest.mark.nightly) for n in range(300)],
)
def test_a_failure_while_saving_loses_nothing(tmp_path, seed, record_property):
    count, what = checkpoint_trial(seed)
    culprit, fault = what["culprit"], what["fault"]
    record_property(FAULT, ("a rank fails while it saves", seed, fault))
    path = str(tmp_path / "c")
    ranks = Ranks(failing_checkpoints.trains, count, path, what, keeper=what["keeper"])
    ends = ranks.join(deadline=60.0)
    told = f"{what}\n" + "\n".join(
        f"rank {rank}: {end.code}\n{end.error}" for rank, end in enumerate(ends)
    )
    expected = failing_checkpoints.never_stopped(str(tmp_path / "one"), count)
    codes = [end.code for end in ends]
    if fault == "full":
        assert codes == [0] * count, told
        at = EVERY * what["save"]
        for end in ends:
            ((minibatches, error),) = end.value[1]
            assert minibatches == at, told
            assert f"minibatch-{at:08d}: process {culprit}: " in error, told
    elif any(codes):
        own = ENDS.get(fault, 1)
        assert codes == [own if r == culprit else 1 for r in range(count)], told
        for rank, end in enumerate(ends):
            if fault == "exception" and "ArithmeticError: planned" in end.error:
                continue  # a failure of one rank is raised on all
            if rank != culprit:
                assert f"first cause: rank {culprit}, " in end.error, told
            for waited in re.findall(r"waiting on .*? for ([0-9.]+) s", end.error):
                assert float(waited) < TIMEOUT + 10, told
    else:  # the last save had fewer calls left
        assert what["save"] == MINIBATCHES // EVERY, told
    # After a restart it resumes from the last save or the one before it: a save in the background
    # may still be running when the next one starts.
    found = run_ranks(failing_checkpoints.trains, count, path, {"timeout": 30.0, "fault": None})
    (begun,) = {begun for begun, _, _ in found}
    if any(codes):
        assert begun >= EVERY * (what["save"] - 1 - what["asynchronous"]), told
    same({key: value for _, _, state in found for key, value in state.items()}, expected)


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system with room for two and a half checkpoints."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small file system cannot be mounted: {getattr(error, 'stderr', error)}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_disk_that_is_full(small_disk):
    first, second = run_ranks(failing_checkpoints.fills, 2, str(small_disk))
    assert first == second
    saved, reason = first
    assert saved >= 1
    assert "No space left on device" in reason
    assert f"minibatch-{saved:08d}: process " in reason
    names = sorted(path.name for path in small_disk.iterdir())
    assert names == ["latest", *(f"minibatch-{n:08d}" for n in range(saved))]
    assert CheckpointManager(small_disk, pipeline(3)).restore().minibatches == saved - 1


# After writing


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Write checkpoints of two processes."""
    path = tmp_path_factory.mktemp("written") / "c"
    run_ranks(failing_checkpoints.trains, 2, str(path), {"timeout": 30.0, "fault": None})
    return path


@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=[] if n < 15 else pytest.mark.nightly) for n in range(200)],
)
def test_a_damaged_file_is_named_and_the_one_before_loads(tmp_path, written, seed, record_property):
    draw = random.Random(2000 + seed)
    shutil.copytree(written, tmp_path / "c")
    manager = CheckpointManager(tmp_path / "c", pipeline(2, seed=3))
    name = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "state-00001-of-00002.safetensors",
        "checkpoint.json",
    ][seed % 4]
    damaged = manager.latest() / name
    content = bytearray(damaged.read_bytes())
    at = draw.randrange(len(content))
    flips = draw.random() < 0.7
    record_property(FAULT, ("a file is damaged", seed, "a bit changed" if flips else "cut off"))
    if flips:
        content[at] ^= 1 << draw.randrange(8)
        damaged.write_bytes(content)
    else:
        os.truncate(damaged, at)
    before = {key: tensor.clone() for key, tensor in everything(manager.pipe).items()}
    with pytest.raises(CheckpointError, match=f"{re.escape(str(damaged))}: ") as caught:
        manager.restore()
    assert re.search("damaged|expected|missing|no checkpoint document|bad", str(caught.value))
    same(everything(manager.pipe), before)
    older = tmp_path / "c" / f"minibatch-{MINIBATCHES // EVERY * EVERY - EVERY:08d}"
    assert load(older, manager.pipe).minibatches == int(older.name[-8:])


def test_a_campaign_counts_faults_over_sessions(tmp_path):
    path = tmp_path / "campaign.json"

    def report(seed, fault, outcome, when="call"):
        given = {"keywords": {}, "longrepr": None, "duration": 1.23}
        properties = [(FAULT, ("runs", seed, fault)), ("another", 1)]
        return pytest.TestReport(
            "test", ("", 0, ""), outcome=outcome, when=when, user_properties=properties, **given
        )

    first = Campaign(path)
    for seed, fault, outcome in (
        (2, "kill", "failed"),
        (0, "kill", "passed"),
        (1, "hang", "passed"),
    ):
        first.pytest_runtest_logreport(report(seed, fault, outcome))
        first.pytest_runtest_logreport(report(seed, fault, "passed", "teardown"))
    found = json.loads(path.read_text())
    assert (found["faults"], found["outcomes"]) == (3, {"failed": 1, "passed": 2})
    second = Campaign(path)
    second.pytest_runtest_logreport(report(2, "kill", "passed"))
    second.pytest_runtest_logreport(report(11, "kill", "passed"))
    found = json.loads(path.read_text())
    assert (found["faults"], found["outcomes"]) == (4, {"passed": 4})
    assert found["campaigns"]["runs"] == {
        "faults": {"hang: passed": 1, "kill: passed": 3},
        "seeds": [[n, "hang" if n == 1 else "kill", "passed", 1.2] for n in (0, 1, 2, 11)],
    }
