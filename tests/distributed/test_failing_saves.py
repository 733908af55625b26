"""Tests failures while several processes save: the checkpoint before it loads, on all ranks."""

from __future__ import annotations

import random
import re
import signal
import subprocess

import pytest
from helpers import failing_checkpoints
from helpers.checkpoint_cases import pipeline, same
from helpers.failing_checkpoints import EVERY, MINIBATCHES
from helpers.failing_runs import TIMEOUT
from helpers.ranks import Ranks, printed_by, run_ranks

from spectrain_ext.checkpoint import CheckpointManager

pytestmark = pytest.mark.processes

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
    [pytest.param(n, marks=[] if n < 5 else pytest.mark.nightly) for n in range(150)],
)
def test_a_failure_while_saving_loses_nothing(tmp_path, seed):
    count, what = checkpoint_trial(seed)
    culprit, fault = what["culprit"], what["fault"]
    path = str(tmp_path / "c")
    ranks = Ranks(failing_checkpoints.trains, count, path, what, keeper=what["keeper"])
    ends = ranks.join(deadline=60.0)
    told = f"{what}\n{printed_by(ends)}"
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
