"""Compares processes behind slow inbound wires with the simulation of Protocol NanoGPT's steps.

Every rank has one wire for all messages to it (``slow_link.InboundWires``). A stage's compute is a
sleep of known length, so that more ranks than cores do not delay each other. The simulation gets
these times, the bytes of a message, and the link; nothing is fitted.

    python bench/bench_wan.py --rounds 5 --json FILE          # a minute
    python bench/bench_wan.py --steps 1.0 0.538               # simulated only: seconds of a step
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import bench_distributed as bench
import torch
from slow_link import COUNT, InboundWires
from table import table
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.method import Window, check, delay_under, find_method, places_of
from spectrain_ext.planning import LINKS, Link
from spectrain_ext.schedule import takes_window
from spectrain_ext.simulation import Durations, simulate_repeating

WAN = LINKS["wan200"]
WARM = 4

# Protocol NanoGPT, simulated

STAGES, TOKENS = 8, 512 * 1024  # devices, and tokens of a step


class Published(NamedTuple):
    """A record of PluralisResearch/ProtocolNanoGPT (commit 0551bc3, records/): 1F1B with a flush.

    Attributes:
        microbatches: per step.
        bytes: per token, the same forward and backward.
        off: seconds of a step without the links, from its log.
        on: seconds of a step with them.
    """

    microbatches: int
    bytes: int
    off: float
    on: float

    @property
    def compute(self) -> float:
        """Seconds that a stage computes in a step: equal stages take (M+N-1)/M of it in total."""
        return self.off * self.microbatches / (self.microbatches + STAGES - 1)


#: Dense bf16 of 1,024 values; a subspace of rank 160 with the token's id.
PUBLISHED = {
    "dense": Published(64, 2048, 0.538, 100.475),
    "subspace": Published(32, 322, 0.655, 19.889),
}


def meter_seconds(
    method: str | st.Method,
    microbatches: int,
    forward_bytes: float,
    backward_bytes: float,
    compute: float = 1.0,
    *,
    window: Window = None,
    stages: int = STAGES,
    link: Link = WAN,
    tokens: int = TOKENS,
) -> float:
    """Return the simulated seconds of a step of ``tokens`` tokens.

    Args:
        method, microbatches: as for ``Pipeline``.
        forward_bytes, backward_bytes: bytes of a token in an activation and in a gradient.
        compute: seconds that a stage computes in a step, a third of it in forwards.
        window: as for ``Pipeline``.
        stages: number of equal stages.
        link: link between any two.
        tokens: tokens of a step.

    Raises:
        ValueError: as ``Pipeline`` does.
    """
    method = find_method(method)
    each = tokens / microbatches
    durations = Durations.of(
        stages,
        forward=compute / 3 / microbatches,
        backward=compute * 2 / 3 / microbatches,
        activation=link.seconds(each * forward_bytes + COUNT),
        gradient=link.seconds(each * backward_bytes + COUNT),
        inbound=link.inbound,
    )
    check(method, stages, microbatches=microbatches, window=window)
    windows = [place.window for place in places_of(method, stages, microbatches, window)]
    minibatches = 3 * (4 + 2 * max(windows) // microbatches)
    return simulate_repeating(method.schedule, windows, microbatches, minibatches, durations).period


METHODS = ("1f1b", "zb-h1", "vanilla", "pipedream-2bw", "auto", "zb-h1-async")
MICROBATCHES, BYTES = (4, 8, 16, 32, 64), (2048, 1056, 544, 322, 128, 64)


def steps(compute: float) -> str:
    """Return a table with a row per method and number of microbatches, a column per token size.

    ``late`` is the delay in updates. Methods without a flush also appear with wide windows.
    """
    lines = []
    for method, parts in product(map(find_method, METHODS), MICROBATCHES):
        windows: tuple[Window, ...] = (None, "wide") if takes_window(method.schedule) else (None,)
        for window in windows:
            of = partial(meter_seconds, method, parts, compute=compute, window=window)
            try:
                found = [of(forward_bytes=each, backward_bytes=each) for each in BYTES]
            except ValueError:  # not defined for so few microbatches
                continue
            places = places_of(method, STAGES, parts, window)
            if window is not None and places == places_of(method, STAGES, parts):
                continue
            late = max(delay_under(method.schedule, place) for place in places)
            name = method.name if window is None else f"{method.name}, wide"
            lines.append([name, str(parts), str(late), *(f"{each:.2f}" for each in found)])
    return table("method|>M|>late" + "".join(f"|>{each}" for each in BYTES), lines)


# Processes, measured


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.backward_seconds)
        return gradients[0], None, None


class Timed(nn.Module):
    """A stage that sleeps for the given seconds and has one trainable parameter."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds = forward, backward
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x * self.scale, *self.seconds)  # type: ignore[no-any-return]


def link_of(options: argparse.Namespace) -> Link:
    return Link("scaled", options.megabits * 1e6 / 8, options.delay / 1e3, inbound=True)


def simulated(method: str, parts: int, link: Link, options: argparse.Namespace) -> float:
    """Return the simulated seconds of a minibatch, the target for the processes."""
    return meter_seconds(
        method,
        parts,
        options.bytes,
        options.bytes,
        (options.forward + options.backward) * parts / 1e3,
        stages=options.ranks,
        link=link,
        tokens=parts,  # messages of one token
    )


def rank_main(rank: int, ranks: int, port: int, path: str, said: Any, options: Any) -> None:
    bench.begin(rank, ranks, port)
    seconds = options.forward / 1e3, options.backward / 1e3
    found: dict[str, list[float]] = {}
    pipes = {
        f"{method}, M = {parts}": (
            parts,
            st.DistributedPipeline(
                Timed(*seconds),
                lambda params: st.optim.SGD(params, lr=1e-3),
                nn.functional.mse_loss,
                method,
                microbatches=parts,
                timeout=120.0,
            ),
        )
        for method in options.methods
        for parts in options.microbatches
    }
    link = link_of(options)
    with InboundWires(Path(path), rank, ranks, link.bandwidth, link.latency):
        for _ in range(options.rounds):
            for name, (parts, pipe) in pipes.items():
                taken = _measured(pipe, parts, options.bytes, options.count)
                found.setdefault(name, []).append(taken)
    if rank == 0:
        said.put({"load": os.getloadavg(), "seconds": found})
    bench.end()


def _measured(pipe: st.Pipeline, parts: int, size: int, count: int) -> float:
    """Return the seconds of a minibatch, between an early and a later result."""
    data = torch.zeros(parts, size // 4), torch.zeros(parts, size // 4)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield from (data for _ in range(WARM + count + WARM))

    at = [time.perf_counter() for _ in pipe.run(batches())]
    return (at[WARM + count - 1] - at[WARM - 1]) / count


def report(found: dict[str, Any], options: argparse.Namespace) -> None:
    print(
        f"{options.ranks} ranks, {options.forward:g} and {options.backward:g} ms of a microbatch, "
        f"messages of {options.bytes:,} bytes, wires of {options.megabits:g} Mb/s and "
        f"{options.delay:g} ms, {options.rounds} rounds of {options.count} minibatches, "
        f"load {found['load'][0]:.1f} on {os.cpu_count()} cores\n"
    )
    lines = []
    for name, each in found["seconds"].items():
        wire, apart = found["simulated"][name], found["apart"][name]
        figures = [f"{seconds * 1e3:.1f}" for seconds in (median(each), wire, apart)]
        lines.append([name, *figures, f"{wire / median(each):.3f}"])
    columns = "|>ms per minibatch|>simulated|>with a wire for each direction|>simulated / measured"
    print(table(columns, lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=float, nargs="+", help="seconds that a stage computes")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--methods", nargs="+", default=["1f1b", "auto"])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--forward", type=float, default=5.0, help="milliseconds per microbatch")
    parser.add_argument("--backward", type=float, default=10.0)
    parser.add_argument("--bytes", type=int, default=25_000, help="bytes per message")
    parser.add_argument(
        "--megabits", type=float, default=20.0, help="megabits per second of a wire"
    )
    parser.add_argument("--delay", type=float, default=10.0, help="milliseconds")
    parser.add_argument("--count", type=int, default=12, help="minibatches of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    if options.steps:
        for compute in options.steps:
            print(f"seconds of a step, {compute:g} s of compute a stage; by bytes a token\n")
            print(steps(compute))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = str(InboundWires.make(Path(folder), options.ranks))
        found = bench.spawned(rank_main, options.ranks, path, options)
    link = link_of(options)
    for name, each in (("simulated", link), ("apart", replace(link, inbound=False))):
        found[name] = {
            f"{method}, M = {parts}": simulated(method, parts, each, options)
            for method, parts in product(options.methods, options.microbatches)
        }
    found["published"] = {
        name: {
            **record._asdict(),
            "simulated": meter_seconds(
                "1f1b", record.microbatches, record.bytes, record.bytes, record.compute
            ),
        }
        for name, record in PUBLISHED.items()
    }
    report(found, options)
    if options.json:
        document = {**bench.about(), "options": bench.settings_of(options), **found}
        with open(options.json, "w") as file:
            json.dump(bench.rounded(document), file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
