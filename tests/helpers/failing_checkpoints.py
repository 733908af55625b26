"""Programs of ranks that fail while writing a checkpoint."""

from __future__ import annotations

import functools
import hashlib
import os
import resource
import signal

import torch
import torch.distributed as dist
from helpers.checkpoint_cases import batches, everything, pipeline
from helpers.checkpoint_programs import manager_of
from helpers.failing_runs import commit

from spectrain_ext.checkpoint import CheckpointManager
from spectrain_ext.errors import CheckpointError

MINIBATCHES = 9
EVERY = 2
# Calls of a save, in order: of the system, and of the other processes.
CALLS = (
    *((os, name) for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")),
    (dist, "all_gather"),
    (hashlib, "sha256"),
)


def trains(rank, ranks, path, trial):
    """Resume; return the minibatches found, the errors of saves, and all state."""
    saves = {"every_minibatches": EVERY, "keep": 2}
    saves["asynchronous"] = trial.get("asynchronous", False)
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
    manager.wait()
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
