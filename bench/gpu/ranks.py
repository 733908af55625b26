"""Tests distributed pipelines against the CPU's bits, over NCCL with one GPU per process.

With one GPU, two processes share it and send over gloo through host memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

import spectrain_ext as st

from .cases import Cases
from .exact import Exact, same, sgd, squares
from .launch import run_all
from .scale import Scale

#: Seconds for one launch of ranks: NCCL connects the edges one after the other.
LIMIT_S = 90.0


@dataclass(frozen=True)
class Run:
    """A training of the ranks."""

    exact: Exact
    replicas: int = 1


def ranks(cases: Cases, scale: Scale) -> None:
    """Run a case per number of processes and kind of run, each with a new launch."""
    # The default, which predicts; one update per microbatch; the synchronous one; and two replicas
    # of every stage, because the sum of two gradients is the same in either order.
    for count in scale.processes:
        plain = [
            Run(Exact("auto", count, microbatches=count)),
            Run(Exact("spectrain", count)),
            Run(Exact("1f1b", count, microbatches=count)),
        ]
        replicated = [Run(Exact("1f1b", count // 2, microbatches=2), replicas=2)]
        for what, runs in (("the CPU's bits", plain), ("replicas", replicated)):
            case = f"{count} processes, {what}"
            if fits(cases, case, count, scale):
                cases.run(case, lambda r=runs: _bits(scale, r), cases.slowest_s)  # type: ignore[misc]


def fits(cases: Cases, case: str, count: int, scale: Scale) -> bool:
    """Return whether each process has a GPU, or two share the only one."""
    if count <= max(2, scale.gpus):
        return True
    cases.put(case, "skipped", error=f"it needs {count} GPUs, and {scale.gpus} can be used")
    return False


def _bits(scale: Scale, runs: list[Run]) -> dict[str, Any]:
    found = run_all(train, runs[0].exact.stages * runs[0].replicas, scale, runs, limit_s=LIMIT_S)
    for n, run in enumerate(runs):
        _compare(run, [each["states"][n] for each in found], _expected(run.exact))
    return {
        "backend": found[0]["backend"],
        "bits": "the CPU's",
        "methods": [run.exact.method for run in runs],
        "seconds": [max(each["seconds"][n] for each in found) for n in range(len(runs))],
    }


@cache
def _expected(exact: Exact) -> dict[str, Tensor]:
    return exact.on_cpu()


def _compare(run: Run, states: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Compare every rank's weights with those of one process."""
    seen: set[str] = set()
    for rank, state in enumerate(states):
        seen |= state.keys()
        try:
            same(state, {k: expected[k] for k in state})
        except AssertionError as error:
            raise AssertionError(f"{run.exact.method}, rank {rank}: {error}") from None
    if seen != expected.keys():
        raise AssertionError(f"{run.exact.method}: no rank has {sorted(expected.keys() - seen)}")


# In every rank


def train(rank: int, ranks: int, scale: Scale, runs: list[Run]) -> dict[str, Any]:
    """Train the runs in turn; return weights, seconds, and the backend of the tensors."""
    states, seconds, backend = [], [], ""
    for run in runs:
        with own_groups():
            pipe = st.DistributedPipeline(
                run.exact.stage(rank // run.replicas),
                optimizer=sgd,
                loss_fn=squares,
                method=run.exact.method,
                microbatches=run.exact.microbatches,
                replicas=run.replicas,
                device=scale.devices(rank + 1)[-1],
                timeout=30.0,
            )
            dist.barrier()
            start = time.perf_counter()
            for _ in pipe.run(None if rank else run.exact.batches()):
                pass
            scale.wait()
            seconds.append(time.perf_counter() - start)
            states.append({k: v.detach().cpu().clone() for k, v in pipe.state_dict().items()})
            backend = backend_of_bodies()
            pipe.release()
    return {"states": states, "seconds": seconds, "backend": backend}


@contextmanager
def own_groups() -> Iterator[None]:
    """Make process groups that end with the block."""
    before = set(distributed_c10d._world.pg_map)
    yield
    dist.barrier()
    for group in [each for each in distributed_c10d._world.pg_map if each not in before]:
        dist.destroy_process_group(group)


def backend_of_bodies() -> str:
    """Return the backend that tensors use, while a pipeline has its groups."""
    used = {dist.get_backend(group) for group in distributed_c10d._world.pg_map}
    return "nccl" if "nccl" in used else "gloo"
