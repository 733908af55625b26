"""Measures the cost of checkpoints: whole runs that drain, save, or save in a thread.

A save requires a drained pipeline, and draining has a cost of its own. Runs of the same minibatches
therefore take turns, each kind once per round, and a ratio compares two runs of one round.

    python bench/bench_checkpoint.py                  # four stages of 4.2 million weights, AdamW
    python bench/bench_checkpoint.py --every 50 --rounds 15 --json checkpoint.json
    python bench/bench_checkpoint.py --widths 1024 2048 3232 --json memory.json

``--widths`` measures single saves instead: for each width, to the disk and to host memory in turn,
with a breakdown of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.checkpoint import CheckpointManager, load, save, storage
from spectrain_ext.partitioning import cut_at

KINDS = ("drained", "saved", "saved in a thread")
MEMORY = Path("/dev/shm")
#: Parts of a save's time, and the function of each.
PARTS = {"SHA-256": (storage, "_sha256"), "files": (storage, "save_file"), "fsync": (os, "fsync")}


def pipeline(options: argparse.Namespace, width: int) -> st.Pipeline:
    """Return a pipeline of equal stages with one linear layer each."""
    torch.manual_seed(0)
    stages = options.stages
    return st.Pipeline(
        cut_at(
            nn.Sequential(*(nn.Linear(width, width) for _ in range(stages))), range(1, stages + 1)
        ),
        optimizer=lambda params: st.optim.AdamW(params, lr=1e-4),
        loss_fn=nn.functional.mse_loss,
    )


def seconds_of(
    kind: str, pipe: st.Pipeline, data: tuple[Tensor, Tensor], options: argparse.Namespace
) -> float:
    """Return the seconds of a whole run, until its last checkpoint is complete."""
    batches = [data] * options.every
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        manager = CheckpointManager(
            directory, pipe, keep=1, asynchronous=kind.endswith("in a thread")
        )
        start = time.perf_counter()
        if kind == "not drained":
            for _ in pipe.run(batches * options.saves):
                pass
        else:
            for _ in range(options.saves):
                for _ in manager.run(batches):
                    pass
                if kind.startswith("saved"):
                    manager.save()
        manager.wait()
        return time.perf_counter() - start


def rounds(options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Return the seconds of every kind of run, of a save and of a load, by round."""
    pipe = pipeline(options, options.width)
    shape = options.batch, options.width
    data = torch.randn(shape), torch.randn(shape)
    for _ in pipe.run([data] * 2 * options.stages):
        pass
    for _ in range(options.rounds):
        found = {kind: seconds_of(kind, pipe, data, options) for kind in ("not drained", *KINDS)}
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            start = time.perf_counter()
            save(Path(directory) / "c", pipe)
            found["save"] = time.perf_counter() - start
            start = time.perf_counter()
            load(Path(directory) / "c", pipe)
            found["load"] = time.perf_counter() - start
        yield found


def places(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Return the seconds of single saves, in total and in parts, by size, place and round."""
    for width in options.widths:
        pipe = pipeline(options, width)
        data = torch.randn(options.batch, width)
        for _ in pipe.run([(data, data)] * 2 * options.stages):
            pass
        for _ in range(options.rounds):
            for name, place in (("disk", options.directory), ("memory", MEMORY)):
                with tempfile.TemporaryDirectory(dir=place) as directory, ExitStack() as timing:
                    parts = {part: timing.enter_context(_timed(*at)) for part, at in PARTS.items()}
                    start = time.perf_counter()
                    save(Path(directory) / "c", pipe)
                    seconds = time.perf_counter() - start
                    size = sum(file.stat().st_size for file in (Path(directory) / "c").iterdir())
                yield {
                    "bytes": size,
                    "place": name,
                    "whole": seconds,
                    "copying": _seconds_of_copying(pipe),
                    **{part: sum(each) for part, each in parts.items()},
                }


def _seconds_of_copying(pipe: st.Pipeline) -> float:
    """Return the time that a save in a thread takes before the thread starts."""
    states = [state for optimizer in pipe.optimizers for state in optimizer.state.values()]
    tensors = [*pipe.parameters(), *(t for state in states for t in state.values())]
    start = time.perf_counter()
    copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    seconds = time.perf_counter() - start
    assert len(copies) == len(tensors)
    return seconds


@contextmanager
def _timed(module: Any, name: str) -> Iterator[list[float]]:
    found: list[float] = []
    real = getattr(module, name)

    def timed(*args: Any, **more: Any) -> Any:
        start = time.perf_counter()
        try:
            return real(*args, **more)
        finally:
            found.append(time.perf_counter() - start)

    with patch.object(module, name, timed):
        yield found


def report_places(found: list[dict[str, Any]]) -> None:
    """Print medians by size and place."""
    rows: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for each in found:
        rows.setdefault((each["bytes"], each["place"]), []).append(each)
    print("| MB | place | seconds | " + " | ".join(PARTS) + " | copying, for a thread |")
    print("|---|---|---|" + "---|" * (len(PARTS) + 1))
    for (size, place), every in rows.items():
        parts = ("whole", *PARTS, "copying")
        seconds = (median(each[part] for each in every) for part in parts)
        print(f"| {size / 1e6:.0f} | {place} | " + " | ".join(f"{s:.3f}" for s in seconds) + " |")


def report(found: list[dict[str, float]], options: argparse.Namespace) -> None:
    """Print the median and the spread of each kind's ratios."""
    print(
        f"{options.stages} stages of {options.width * (options.width + 1) / 1e6:.1f} million "
        f"weights, AdamW: {len(found)} rounds of {options.saves} times {options.every} minibatches"
    )
    print("| | time over a run that is not drained | quartiles |")
    print("|---|---|---|")
    for kind in KINDS:
        ratios = sorted(each[kind] / each["not drained"] for each in found)
        low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(f"| {kind} | {median(ratios):.2f} | {low:.2f} to {high:.2f} |")
    for what in ("save", "load"):
        print(f"{what}: {median(each[what] for each in found):.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in (("stages", 4), ("width", 2048), ("batch", 16), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--every", type=int, default=20, help="minibatches between two saves")
    parser.add_argument("--saves", type=int, default=2, help="saves in each run")
    parser.add_argument("--directory", help="folder on the measured disk; default: a temporary one")
    parser.add_argument(
        "--widths", type=int, nargs="+", help="measure single saves of these widths"
    )
    parser.add_argument("--json", help="file for the seconds of all rounds")
    options = parser.parse_args()
    if options.widths:
        found = list(places(options))
        report_places(found)
    else:
        found = list(rounds(options))
        report(found, options)
    if options.json:
        Path(options.json).write_text(json.dumps({**vars(options), "seconds": found}, indent=1))


if __name__ == "__main__":
    main()
