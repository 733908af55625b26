"""Counts the calls inside the package per minibatch, by file.

Tiny stages in one process, so that the package's own work dominates. Counts "call" events of
``sys.setprofile`` whose code lies in the package's folder, between two results of a run.

    python bench/bench_calls.py              # auto with three microbatches, vanilla with one
    python bench/bench_calls.py --list       # and the calls of each file and function
    python bench/bench_calls.py --methods spectrain pipedream-2bw --microbatches 4
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import spectrain_ext as st

WIDTH, STAGES, MINIBATCHES = 4, 3, 60
#: Counted minibatches: after the first one's result until the last one's.
FIRST, LAST = 20, 40
DEFAULT = {"auto": 3, "vanilla": 1}
PACKAGE = Path(st.__file__).resolve().parent


class Function(NamedTuple):
    """A function of the package; code objects of two files may be equal."""

    file: str
    line: int
    name: str


def calls_of(method: str, microbatches: int) -> Counter[Function]:
    """Return each function's calls in the counted minibatches of a run."""
    torch.manual_seed(0)
    pipe = st.Pipeline(
        [nn.Linear(WIDTH, WIDTH) for _ in range(STAGES)],
        optimizer=lambda params: st.optim.SGD(params, lr=1e-3, momentum=0.9),
        loss_fn=nn.functional.mse_loss,
        method=method,
        microbatches=microbatches,
    )
    data = torch.randn(2 * microbatches, WIDTH), torch.randn(2 * microbatches, WIDTH)
    calls: Counter[int] = Counter()
    codes: dict[int, CodeType] = {}

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls[id(frame.f_code)] += 1
            codes[id(frame.f_code)] = frame.f_code

    try:
        for result in pipe.run(data for _ in range(MINIBATCHES)):
            if result.index == FIRST:
                sys.setprofile(count)
            elif result.index == LAST:
                sys.setprofile(None)
    finally:
        sys.setprofile(None)
    found: Counter[Function] = Counter()
    for key, n in calls.items():
        code = codes[key]
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE):
            file = str(path.relative_to(PACKAGE))
            found[Function(file, code.co_firstlineno, code.co_qualname)] += n
    return found


def report(method: str, microbatches: int, listed: bool) -> None:
    """Print the calls of a method's minibatch."""
    calls, minibatches = calls_of(method, microbatches), LAST - FIRST
    files: Counter[str] = Counter()
    for function, n in calls.items():
        files[function.file] += n
    print(
        f"{method}, {STAGES} stages, M = {microbatches}: "
        f"{calls.total() / minibatches:.0f} calls per minibatch in {len(files)} files",
        flush=True,
    )
    if not listed:
        return
    for file, n in files.most_common():
        print(f"{n / minibatches:9.2f}  {file}")
    print()
    for (file, line, name), n in calls.most_common():
        print(f"{n / minibatches:9.2f}  {file}:{line} {name}")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", help="those to count instead")
    parser.add_argument("--microbatches", type=int, default=1, help="with --methods")
    parser.add_argument("--list", action="store_true", help="the calls per file and function")
    options = parser.parse_args()
    chosen = DEFAULT
    if options.methods:
        chosen = dict.fromkeys(options.methods, options.microbatches)
    # One process each: instructions made by an earlier run are not made again.
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for method, microbatches in chosen.items():
            pool.apply(report, (method, microbatches, options.list))


if __name__ == "__main__":
    main()
