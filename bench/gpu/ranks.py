"""Tests distributed pipelines, over NCCL with one GPU per process: bits, slow hosts, failures.

With one GPU, two processes share it and send over gloo through host memory.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

import spectrain_ext as st

from .cases import Cases
from .exact import Exact, same, sgd, squares
from .launch import Ended, how, launch, mark, run_all
from .scale import Scale

#: Seconds for one launch of ranks: NCCL connects the edges one after the other.
LIMIT_S = 90.0
_FAULT_AT = 5  # the forward in which a rank fails
#: Seconds that ranks may take beyond the deadline: five to raise, the rest to end their processes.
_GRACE_S = 15.0


@dataclass(frozen=True)
class Run:
    """A training of the ranks."""

    exact: Exact
    replicas: int = 1
    slow_s: float = 0.0  # processes sleep up to so many seconds, at random
    timeout_s: float = 30.0
    digests: bool = False  # compare digests of the weights, not the weights


def ranks(cases: Cases, scale: Scale) -> None:
    """Run a case per number of processes and kind of run, each with a new launch."""
    jobs: dict[str, Callable[[int], Any]] = {
        "the CPU's bits": lambda n: _bits(scale, _plain(n)),
        "a rank is killed": lambda n: _failure(scale, n, "kill"),
        "large activations": lambda n: _large(scale, n),
        "slow hosts": lambda n: _bits(scale, [_slow(run) for run in _plain(n)[:2]]),
        "replicas": lambda n: _bits(scale, [_replicated(n)]),
        "a rank hangs": lambda n: _failure(scale, n, "hang"),
        "a rank raises": lambda n: _failure(scale, n, "exception"),
    }
    for k, (name, job) in enumerate(jobs.items()):
        # A rehearsal runs every kind, and every number of processes for the first kind.
        for count in scale.processes if scale.few is None or k == 0 else scale.processes[:1]:
            case = f"{count} processes, {name}"
            if fits(cases, case, count, scale):
                cases.run(case, lambda j=job, n=count: j(n), cases.slowest_s)  # type: ignore[misc]


def fits(cases: Cases, case: str, count: int, scale: Scale) -> bool:
    """Return whether each process has a GPU, or two share the only one."""
    if count <= max(2, scale.gpus):
        return True
    cases.put(case, "skipped", error=f"it needs {count} GPUs, and {scale.gpus} can be used")
    return False


def _plain(count: int) -> list[Run]:
    # The default, which predicts; one update per microbatch; the synchronous one.
    return [
        Run(Exact("auto", count, microbatches=count)),
        Run(Exact("spectrain", count)),
        Run(Exact("1f1b", count, microbatches=count)),
    ]


def _slow(run: Run) -> Run:
    return replace(run, slow_s=0.02)


def _replicated(count: int) -> Run:
    # Two replicas per stage: the sum of two gradients is the same in either order.
    return Run(Exact("1f1b", count // 2, microbatches=2), replicas=2)


def _large(scale: Scale, count: int) -> dict[str, Any]:
    """Compare activations of 64 MB with one process on one device."""
    run = Run(Exact("spectrain", count, scale.message, minibatches=8), digests=True)
    found = run_all(train, count, scale, [run], limit_s=LIMIT_S)
    expected = {k: _digest(v) for k, v in run.exact.train(scale.devices(1) * count).items()}
    if scale.on_gpu:
        torch.cuda.empty_cache()  # the next ranks need the memory
    _compare(run, [each["states"][0] for each in found], expected)
    seconds = max(each["seconds"][0] for each in found)
    # Activations, gradients, and targets of the same size; includes filling the pipeline.
    rows, columns = scale.message
    sent = (2 * count - 1) * run.exact.minibatches * rows * columns * 4
    return {
        "backend": found[0]["backend"],
        "bits": "one device's",
        "message_bytes": rows * columns * 4,
        "seconds": seconds,
        "gb_per_s": sent / seconds / 1e9,
    }


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
        mine = {k: expected[k] for k in state}
        try:
            if run.digests:
                wrong = [k for k in mine if state[k] != mine[k]]
                if wrong:
                    raise AssertionError(f"other bits in {wrong}")
            else:
                same(state, mine)
        except AssertionError as error:
            raise AssertionError(f"{run.exact.method}, rank {rank}: {error}") from None
    if seen != expected.keys():
        raise AssertionError(f"{run.exact.method}: no rank has {sorted(expected.keys() - seen)}")


def _digest(tensor: Tensor) -> str:
    return sha256(tensor.cpu().contiguous().view(torch.uint8).numpy()).hexdigest()


# In every rank


def train(rank: int, ranks: int, scale: Scale, runs: list[Run]) -> dict[str, Any]:
    """Train the runs in turn; return weights, seconds, and the backend of the tensors."""
    states, seconds, backend = [], [], ""
    for run in runs:
        with own_groups():
            pipe, stage = _pipeline(rank, scale, run)
            if run.slow_s:
                _sleep_at_random(stage, rank, run.slow_s)
            # From host memory, except for timed runs.
            place = scale.devices(1)[0] if run.digests else "cpu"
            data = [] if rank else [(x.to(place), y.to(place)) for x, y in run.exact.batches()]
            dist.barrier()
            start = time.perf_counter()
            for _ in pipe.run(None if rank else data):
                pass
            scale.wait()
            seconds.append(time.perf_counter() - start)
            keep = _digest if run.digests else _copied
            states.append({k: keep(v.detach()) for k, v in pipe.state_dict().items()})
            backend = backend_of_bodies()
            pipe.release()
    return {"states": states, "seconds": seconds, "backend": backend}


def _pipeline(rank: int, scale: Scale, run: Run) -> tuple[st.DistributedPipeline, nn.Module]:
    stage = run.exact.stage(rank // run.replicas)
    made = st.DistributedPipeline(
        stage,
        optimizer=sgd,
        loss_fn=squares,
        method=run.exact.method,
        microbatches=run.exact.microbatches,
        replicas=run.replicas,
        device=scale.devices(rank + 1)[-1],
        timeout=run.timeout_s,
    )
    return made, stage


def _copied(tensor: Tensor) -> Tensor:
    return tensor.cpu().clone()


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


def _sleep_at_random(stage: nn.Module, rank: int, longest_s: float) -> None:
    """Delay half of the forwards and backwards on the CPU, one rank's much longer."""
    chance = random.Random(rank)
    # With three or more ranks, the second has neighbours on both sides.
    longest = longest_s if rank == 1 else longest_s / 10

    def late() -> None:
        if chance.random() < 0.5:
            time.sleep(chance.random() * longest)

    stage.register_forward_pre_hook(lambda *_: late())
    stage.register_forward_hook(
        lambda _, __, output: output.register_hook(lambda g: late()) and None
    )


# Failures


def _failure(scale: Scale, count: int, fault: str) -> dict[str, Any]:
    """Check that all other ranks raise a RankError with the failed rank, and all processes end."""
    culprit = count // 2
    ended = launch(fail, count, scale, fault, culprit, limit_s=LIMIT_S)
    codes = {rank: end.code for rank, end in enumerate(ended)}
    if not ended[culprit].marked:
        raise AssertionError(f"rank {culprit} did not come to its failure: {how(ended[culprit])}")
    for rank, end in enumerate(ended):
        if end.code in (0, None):
            raise AssertionError(f"expected all ranks to fail, got {codes}; rank {rank} {how(end)}")
        if rank != culprit and not _blames(end, culprit):
            raise AssertionError(f"rank {rank} does not name rank {culprit}: it {how(end)}")
    last = max(end.at for end in ended)
    others = max(end.at for rank, end in enumerate(ended) if rank != culprit)
    timeout, took = _timeout_of(fault, scale), others - ended[culprit].marked
    if took > timeout + _GRACE_S:
        raise AssertionError(f"ranks ended after {took:.0f} s, with a timeout of {timeout:.0f} s")
    return {
        "codes": list(codes.values()),
        "seconds_until_others_ended": took,
        "seconds_until_all_ended": last - ended[culprit].marked,
        "timeout_s": timeout,
        "said": ended[culprit - 1].error[:500],
    }


def _timeout_of(fault: str, scale: Scale) -> float:
    # Only the deadline detects a hang; other failures are noticed immediately.
    return scale.timeout_s if fault == "hang" else Run.timeout_s


def _blames(end: Ended, culprit: int) -> bool:
    """Return whether a rank blames the culprit: by exception, or by its watchdog's report."""
    words = f"first cause: rank {culprit},"
    return (end.error.startswith("RankError") and words in end.error) or words in end.said


def fail(rank: int, ranks: int, scale: Scale, fault: str, culprit: int) -> None:
    """Train until one rank fails in a forward."""
    run = Run(Exact("spectrain", ranks, minibatches=10_000), timeout_s=_timeout_of(fault, scale))
    pipe, stage = _pipeline(rank, scale, run)
    if rank == culprit:
        calls = iter(range(_FAULT_AT))

        def breaks(*_: object) -> None:
            if next(calls, None) is None:
                mark(rank)
                _break(fault)

        stage.register_forward_pre_hook(breaks)
    for _ in pipe.run(run.exact.batches() if rank == 0 else None):
        pass


def _break(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exception":
        raise ArithmeticError("made for the test")
    time.sleep(3600)
