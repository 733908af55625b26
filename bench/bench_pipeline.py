"""Measures the pipeline's own cost on the host: tiny stages, one process, one thread.

    python bench/bench_pipeline.py                     # a minute or two, wants an idle core
    python bench/bench_pipeline.py --before ../other   # also what the sources there take, in turn
    python bench/bench_pipeline.py --functions 20      # also the functions that are called most

A compute instruction is one forward or one backward of one stage and microbatch; its share of
loads, hand-overs and updates counts with it. Three figures:

- Microseconds per instruction with eight microbatches in N stages, and those of
  torch.distributed.pipelining with all stages on its one rank: the same modules, batches and loss,
  and torch's fused SGD.
- Own cost: microseconds per instruction with one microbatch in four stages, less those of the same
  forwards and backwards by hand.
- Calls of functions of the package per minibatch, and the number of its files that they are in.

Times are CPU times. Everything is measured once per round, in turn, in several processes. Ratios
to torch are taken round by round. With ``--before``, processes of two trees alternate: that of the
folder, which holds a built ``spectrain_ext``, and that of the package that this Python imports. A
ratio then compares the medians of two processes; torch's shows how far disturbances reach.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from table import spread, table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from turns import take_turns

import spectrain_ext as st

HERE, PACKAGE = Path(__file__).resolve().parent, Path(st.__file__).resolve().parent
WIDTH, STAGES, MINIBATCHES = 16, 4, 64
#: Of the own cost, with one microbatch.
INSTRUCTIONS = 2 * STAGES * MINIBATCHES
#: Beside torch: numbers of stages, our methods, microbatches, and minibatches of a sample.
DEPTHS, BESIDE_TORCH, MICROBATCHES, FEW = (1, 4, 8), ("1f1b", "auto"), 8, 10
#: Counted: calls of these methods with as many microbatches, in three stages, from the result of
#: one minibatch to that of another.
COUNTED, COUNTED_STAGES, FIRST, LAST = {"auto": 3, "vanilla": 1}, 3, 20, 40
#: Methods that work with plain SGD, four stages and one microbatch.
_OTHERS = ("spectrain-smoothed", "pipedream-2bw", "error-feedback", "xgrad")
METHODS = [m for m in st.methods() if m not in _OTHERS]

Batch = tuple[Tensor, Tensor]
#: By name, a value of every round.
Figures = dict[str, list[float]]


def make_stages(width: int, device: str = "cpu", count: int = STAGES) -> list[nn.Module]:
    torch.manual_seed(0)
    # Not ReLU: the momentum of a unit that is always off decays into slow subnormals.
    middle = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count - 1)]
    return [m.to(device) for m in [*middle, nn.Linear(width, 10)]]


def make_batches(width: int, device: str = "cpu") -> list[Batch]:
    return [
        (torch.randn(16, width, device=device), torch.randint(0, 10, (16,), device=device))
        for _ in range(MINIBATCHES)
    ]


def make_pipeline(stages: list[nn.Module], method: str, **options: Any) -> st.Pipeline:
    return st.Pipeline(
        stages,
        optimizer=lambda params: st.optim.SGD(params, lr=1e-3, momentum=0.9),
        loss_fn=nn.functional.cross_entropy,
        method=method,
        **options,
    )


def run(pipe: st.Pipeline, batches: Sequence[Batch]) -> None:
    for _ in pipe.run(batches):
        pass


def torch_pipeline(stages: list[nn.Module]) -> Callable[[Sequence[Batch]], None]:
    """Return a function that trains by torch's schedule, with all stages on this rank."""
    ends = [
        PipelineStage(module, k, len(stages), torch.device("cpu"))
        for k, module in enumerate(stages)
    ]
    loss = nn.functional.cross_entropy
    schedule: Any = (
        Schedule1F1B(ends[0], MICROBATCHES, loss_fn=loss)
        if len(ends) == 1
        else ScheduleInterleaved1F1B(ends, MICROBATCHES, loss_fn=loss)
    )
    params = nn.ModuleList(stages).parameters()
    optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9, fused=True)

    def train(batches: Sequence[Batch]) -> None:
        for x, y in batches:
            schedule.step(x, target=y, losses=[])
            optimizer.step()
            optimizer.zero_grad()

    return train


def modules_only(stages: list[nn.Module], batches: Sequence[Batch]) -> None:
    """Run the same forwards and backwards by hand, stage by stage, without updates."""
    for batch in batches:
        one_by_hand(stages, batch)
        for stage in stages:
            for p in stage.parameters():
                p.grad = None


def one_by_hand(stages: list[nn.Module], batch: Batch) -> None:
    """Run the forwards and backwards of a microbatch by hand, which add to the gradients."""
    x, y = batch
    inputs, outputs = [], []
    for stage in stages:
        x = x.detach().requires_grad_(bool(inputs))
        inputs.append(x)
        x = stage(x)
        outputs.append(x)
    loss = nn.functional.cross_entropy(x, y)
    torch.autograd.backward(loss)
    for k in range(STAGES - 2, -1, -1):
        torch.autograd.backward(outputs[k], inputs[k + 1].grad)


def measured(rounds: int, methods: Sequence[str]) -> Figures:
    """Return the microseconds of an instruction in this process, and the own costs of methods."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    batches = make_batches(WIDTH)
    samples = {}
    for depth in DEPTHS:
        trained = {"torch": torch_pipeline(make_stages(WIDTH, count=depth))}
        for method in BESIDE_TORCH:
            stages = make_stages(WIDTH, count=depth)
            pipe = make_pipeline(stages, method, microbatches=MICROBATCHES)
            trained[method] = partial(run, pipe)
        for name, train in trained.items():
            count = 2 * depth * MICROBATCHES * len(batches[:FEW])
            samples[f"{name}, N = {depth}"] = _sampled(partial(train, batches[:FEW]), count)
    by_hand = partial(modules_only, make_stages(WIDTH), batches)
    samples["by hand"] = _sampled(by_hand, INSTRUCTIONS)
    for method in methods:
        whole = partial(run, make_pipeline(make_stages(WIDTH), method, microbatches=1), batches)
        samples[method] = _sampled(whole, INSTRUCTIONS)
    found = take_turns(samples, 0.0, at_least=rounds)
    for method in methods:
        pairs = zip(found.pop(method), found["by hand"], strict=True)
        found[f"own cost, {method}"] = [whole - modules for whole, modules in pairs]
    dist.destroy_process_group()
    return found


def _sampled(call: Callable[[], None], instructions: int) -> Callable[[], float]:
    """Return a function that takes a sample, in microseconds, after a first call."""
    call()

    def sample() -> float:
        start = time.process_time()  # not that of others, on a machine that is not idle
        call()
        return (time.process_time() - start) / instructions * 1e6

    return sample


def calls_of(method: str, microbatches: int) -> dict[str, float]:
    """Return every function's calls per minibatch, by "file:line name", the most called first.

    Make the count in a process of its own: what an earlier run has prepared is not prepared again.
    """
    pipe = make_pipeline(make_stages(4, count=COUNTED_STAGES), method, microbatches=microbatches)
    batch = torch.randn(2 * microbatches, 4), torch.randint(0, 10, (2 * microbatches,))
    package = f"{PACKAGE}{os.sep}"
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            file = code.co_filename.removeprefix(package)
            calls[f"{file}:{code.co_firstlineno} {code.co_qualname}"] += 1

    try:
        for result in pipe.run(batch for _ in range(FIRST + LAST)):
            if result.index in (FIRST, LAST):
                sys.setprofile(count if result.index == FIRST else None)
    finally:
        sys.setprofile(None)
    return {name: n / (LAST - FIRST) for name, n in calls.most_common()}


def in_process(tree: Path, expression: str) -> Any:
    """Return the value of an expression of this module in a new process, with a tree's package."""
    program = f"import json\nfrom bench_pipeline import *\nprint(json.dumps({expression}))"
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    printed = subprocess.check_output([sys.executable, "-c", program], cwd=HERE, env=environment)
    return json.loads(printed.splitlines()[-1])


def report(after: Sequence[Figures], before: Sequence[Figures] = ()) -> str:
    """Return a table of medians and quartiles, of one Figures per process and tree."""
    lines = []
    for name in after[0]:
        cells = [name, spread([us for each in after for us in each[name]], 1), "", ""]
        rival = f"torch, {name.partition(', ')[2]}"
        if name != rival and rival in after[0]:
            pairs = [pair for each in after for pair in zip(each[name], each[rival], strict=True)]
            cells[2] = spread([ours / torchs for ours, torchs in pairs])
        if before:
            ratios = [median(a[name]) / median(b[name]) for a, b in zip(after, before, strict=True)]
            cells[3] = spread(ratios)
        lines.append(cells)
    return table(
        "us per instruction, median and quartiles|>us|>over torch|>after over before", lines
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="folder of the other tree")
    parser.add_argument("--processes", type=int, default=6, help="for each tree")
    parser.add_argument("--rounds", type=int, default=8, help="in each process")
    parser.add_argument(
        "--methods", nargs="+", default=["vanilla"], choices=METHODS, help="for the own cost"
    )
    parser.add_argument("--functions", type=int, default=0, help="how many to list, most called")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args(argv)
    trees = {"after": PACKAGE.parent}
    if options.before is not None:
        trees["before"] = options.before.resolve()
        if not list(options.before.glob("spectrain_ext/_C.*.so")):
            parser.error(f"--before: expected a built spectrain_ext in {options.before}")
    load = os.getloadavg()
    counts: dict[str, dict[str, float]] = {}
    for (method, microbatches), tree in product(COUNTED.items(), trees):
        calls = in_process(trees[tree], f"calls_of({method!r}, {microbatches})")
        counts[f"{tree}: {method}, {COUNTED_STAGES} stages, M = {microbatches}"] = calls
    for setting, calls in counts.items():
        files = {name.partition(":")[0] for name in calls}
        print(f"{setting}: {sum(calls.values()):.0f} calls per minibatch in {len(files)} files")
        for name in list(calls)[: options.functions]:
            print(f"{calls[name]:9.2f}  {name}")
    figures: dict[str, list[Figures]] = {tree: [] for tree in trees}
    for n in range(options.processes):
        # the other one first in every second pair
        for tree in list(trees)[:: 1 if n % 2 else -1]:
            expression = f"measured({options.rounds}, {options.methods!r})"
            figures[tree].append(in_process(trees[tree], expression))
    print(report(**figures))
    print(f"load {load[0]:.1f} before and {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores")
    if options.json is not None:
        from rivals.machine import environment, save  # of parts that the other tree may not have

        document = {"environment": environment(), "load": load, "calls": counts}
        save(options.json, {**document, "us_per_instruction": figures})


if __name__ == "__main__":
    main()
