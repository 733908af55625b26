"""Counts what an instruction asks of CUDA and of torch, on any machine.

    make bench ARGS=bench_calls.py
    python bench/bench_calls.py --json calls.json

Nothing is timed: a count is the same on every machine. What a call costs depends on the machine;
``gpu_suite.py --only host-cost`` measures that.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import bench_pipeline as bp
import cuda_calls
import pytest
import torch
from table import table
from torch import nn

#: Samples of a microbatch, values of a sample, and minibatches that are counted.
_SAMPLES, _WIDTH, _COUNTED = 2, 4, 20

#: Methods and microbatches, in four stages on a device each.
COUNTED = {"auto": 4, "1f1b": 4, "gpipe": 4, "vanilla": 1, "spectrain": 1, "pipedream": 1}
ROWS = (
    cuda_calls.ENTERED,
    cuda_calls.RECORDED,
    cuda_calls.WAITED,
    cuda_calls.ASKED,
    cuda_calls.LENT,
    cuda_calls.COPIED,
    cuda_calls.BATCHES,
    cuda_calls.KERNELS,
    cuda_calls.OPERATORS,
    cuda_calls.ALLOCATIONS,
    cuda_calls.RANDOM,
    cuda_calls.BACKWARDS,
)


def counts() -> dict[str, dict[str, float]]:
    """Return the calls of an instruction, a forward or a backward of one stage, by method."""
    return {method: per_instruction(method, m) for method, m in COUNTED.items()}


def per_instruction(method: str, microbatches: int) -> dict[str, float]:
    """Return what a forward or backward of a stage asks for, with its share of all else.

    One GPU per stage, batches in CPU memory, SGD with momentum. ``torch's operators`` and
    allocations are those beyond what the modules and the loss do by themselves.
    """
    samples = _SAMPLES * microbatches
    batch = torch.ones(samples, _WIDTH), torch.zeros(samples, dtype=torch.long)
    parts = list(zip(*(each.split(_SAMPLES) for each in batch), strict=True))
    alone = nn.ModuleList(bp.make_stages(_WIDTH))

    def by_hand(minibatches: int) -> None:
        for _ in range(minibatches):
            for x, y in parts:
                bp.one_by_hand(list(alone), (x, y))
            for p in alone.parameters():
                p.grad = None

    with (
        cuda_calls.stood_in([torch.device("cuda", k) for k in range(bp.STAGES)]),
        cuda_calls.torch_counted(),
    ):
        pipe = bp.make_pipeline(bp.make_stages(_WIDTH), method, microbatches=microbatches)
        found = _counted(lambda minibatches: bp.run(pipe, [batch] * minibatches))
        theirs = _counted(by_hand)
        pipe.release()
    instructions = 2 * bp.STAGES * microbatches * _COUNTED
    return {name: (n - theirs[name]) / instructions for name, n in found.items()}


def _counted(run: Callable[[int], None]) -> Counter[str]:
    """Count calls in the steady state: those of more minibatches less those of fewer."""
    found = []
    for count in (_COUNTED, _COUNTED, 2 * _COUNTED):
        cuda_calls.calls.clear()
        with cuda_calls.Operators():
            run(count)
        found.append(Counter(cuda_calls.calls))
    return Counter({name: n - found[1][name] for name, n in found[2].items()})


def written(found: dict[str, dict[str, float]]) -> str:
    lines = [[row, *(f"{each.get(row, 0.0):.2f}" for each in found.values())] for row in ROWS]
    heads = (f">`{method}`, M = {COUNTED[method]}" for method in found)
    return table("|".join(["calls per instruction", *heads]), lines)


def test_calls(capsys: pytest.CaptureFixture[str]) -> None:
    text = written(counts())
    with capsys.disabled():
        print(f"\n\n{text}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="counts calls of CUDA and of torch")
    parser.add_argument("--json", type=Path, help="file for the counts")
    options = parser.parse_args()
    found = counts()
    print(written(found))
    if options.json is not None:
        from rivals.machine import environment, save

        save(options.json, {"environment": environment(), "counts": found})


if __name__ == "__main__":
    main()
