"""Tests failures while several processes save: the checkpoint before it loads, on all ranks."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import re
import resource
import signal

import pytest
import torch
import torch.distributed as dist
from helpers.checkpoint_cases import batches, everything, pipeline, same
from helpers.checkpoint_programs import manager_of
from helpers.failing_runs import TIMEOUT, commit, timeout_of
from helpers.ranks import Ranks, printed_by, run_ranks

from spectrain_ext.checkpoint import CheckpointError, CheckpointManager

pytestmark = pytest.mark.processes

MINIBATCHES = 9
EVERY = 2
# Calls of a save, in order: of the system, and of the other processes.
CALLS = (
    *((os, name) for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")),
    (dist, "all_gather"),
    (hashlib, "sha256"),
)
ENDS = {"kill": -signal.SIGKILL, "cut": -signal.SIGXFSZ, "exit": 7}


def checkpoint_trial(seed):
    """Draw a rank, a fault, a save and a point in it."""
    draw = random.Random(1000 + seed)
    ranks = draw.choice([2, 3, 4])
    fault = ["kill", "full", "cut", "exception", "stop", "hang", "exit", "kill"][seed % 8]
    what = {
        "fault": fault,
        "culprit": draw.randrange(ranks),
        "save": draw.randrange(2, MINIBATCHES // EVERY + 1),
        "calls": draw.randrange(1, 25),
        "share": draw.random(),
        "timeout": timeout_of(fault),
        "keeper": draw.random() < 0.5,
    }
    return ranks, what


def trains(rank, ranks, path, trial):
    """Resume; return the minibatches found, the errors of saves, and all state."""
    saves = {"every_minibatches": EVERY, "keep": 2}
    manager = manager_of(path, rank, ranks, 0, timeout=trial["timeout"], **saves)
    manager.restore()
    begun = manager.minibatches
    if rank == trial.get("culprit"):
        arm(manager, rank, trial)
    errors = []
    while manager.minibatches < MINIBATCHES:
        data = batches(MINIBATCHES)[manager.minibatches :]
        try:
            for _ in manager.run(data if rank in (0, ranks - 1) else None):
                pass
        except CheckpointError as error:
            if trial["fault"] != "full":
                raise
            errors.append((manager.minibatches, str(error)))
            resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
            manager.save()  # there is space again
    return begun, errors, everything(manager.pipe)


@functools.cache
def never_stopped(path, ranks):
    """Return all state after the same training in one process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(4)
    manager = CheckpointManager(path, pipeline(ranks), every_minibatches=EVERY)
    for _ in manager.run(batches(MINIBATCHES)):
        pass
    torch.set_num_threads(threads)
    return everything(manager.pipe)


def arm(manager, rank, trial):
    """Count calls from the trial's save on, and fail at the trial's count."""
    saves = [trial["save"]]
    real = manager.save

    def save(extra=None):
        saves[0] -= 1
        if saves[0] == 0:
            if trial["fault"] in ("full", "cut"):
                limit_size(manager, rank, trial)
            else:
                count_down(trial)
        return real(extra)

    manager.save = save


def count_down(trial):
    """Fail at one of the following calls."""
    left = [trial["calls"]]

    def counted(call):
        @functools.wraps(call)
        def counting(*args, **more):
            left[0] -= 1
            if left[0] == 0:
                commit(trial["fault"])
            return call(*args, **more)

        return counting

    # A rank stuck in a call that waits for all ranks looks like those that wait for it.
    calls = CALLS if trial["fault"] != "hang" else [call for call in CALLS if call[0] is not dist]
    for module, name in calls:
        setattr(module, name, counted(getattr(module, name)))


def limit_size(manager, rank, trial):
    """Limit the size of files to a byte in the middle of what this rank will write."""
    name = f"state-{rank + 1:05d}-of-{dist.get_world_size():05d}.safetensors"
    size = os.stat(manager.latest() / name).st_size
    if trial["fault"] == "cut":
        # the default action kills; Python ignores the signal
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(trial["share"] * size), -1))


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n < 5 else pytest.mark.nightly) for n in range(150)]
)
def test_a_failure_while_saving_loses_nothing(tmp_path, seed):
    count, what = checkpoint_trial(seed)
    culprit, fault = what["culprit"], what["fault"]
    path = str(tmp_path / "c")
    ends = Ranks(trains, count, path, what, keeper=what["keeper"]).join(deadline=60.0)
    told = f"{what}\n{printed_by(ends)}"
    expected = never_stopped(str(tmp_path / "one"), count)
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
    # After a restart it resumes from the last save or the one before it.
    found = run_ranks(trains, count, path, {"timeout": 30.0, "fault": None})
    (begun,) = {begun for begun, _, _ in found}
    if any(codes):
        assert begun >= EVERY * (what["save"] - 1), told
    same({key: value for _, _, state in found for key, value in state.items()}, expected)
