"""Programs of ranks that keep copies in the memory of several hosts."""

from __future__ import annotations

import re
from pathlib import Path

from helpers.checkpoint_cases import batches, everything
from helpers.checkpoint_programs import manager_of, refuse_pickles
from helpers.failing_checkpoints import count_down

from spectrain_ext.checkpoint import memory

MINIBATCHES = 9


def trains(rank, ranks, path, hosts, stop, more, killed=(None, 0)):
    """Resume on this rank's host and train up to ``stop`` minibatches.

    ``killed`` is a rank and the call in its second copy at which it is killed.

    Returns the first minibatch and all state under the names of the in-process pipeline.
    """
    refuse_pickles()
    memory.ROOT = Path(path) / f"host{hosts[rank]}"
    memory.ROOT.mkdir(exist_ok=True)
    manager = manager_of(f"{path}/disk", rank, ranks, 0, memory_every=2, **more)
    manager.restore()
    begun = manager.minibatches
    culprit, calls = killed
    if rank == culprit:
        kill_in_second_copy(manager, calls)
    data = batches(MINIBATCHES)[begun:stop]
    for _ in manager.run(data if rank in (0, ranks - 1) else None):
        manager.wait()  # so that the next copy is made
    manager.wait()
    state = everything(manager.pipe)
    own = {re.sub(r"^(state|random)\.0\.", rf"\1.{rank}.", key): v for key, v in state.items()}
    return begun, own


def kill_in_second_copy(manager, calls):
    """Count calls of the system and of other processes from then on, and kill the rank at one."""
    real = manager._copy
    copies = []

    def copy(extra):
        copies.append(extra)
        if len(copies) == 2:
            count_down({"fault": "kill", "calls": calls})
        real(extra)

    manager._copy = copy
