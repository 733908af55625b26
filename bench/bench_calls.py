"""Counts what an instruction asks of CUDA and of torch, on any machine.

    make bench ARGS=bench_calls.py
    python bench/bench_calls.py --json calls.json

Nothing is timed: a count is the same on every machine. What a call costs depends on the machine;
``gpu_suite.py --only host-cost`` measures that.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cuda_calls
import pytest
from table import table

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
    return {method: cuda_calls.per_instruction(method, m) for method, m in COUNTED.items()}


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
