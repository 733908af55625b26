"""Two processes on a link with delay: what a wide window keeps of the throughput without it.

Two pairs of processes run the same stages, one over a link with a delay and one over a link that
has none; in every round all candidates are measured in turn while the other pair stands still. The
simulation is given the durations that the pair without a delay measured, and the delay. Needs root
(network namespaces, tunnel devices), and two idle cores.

    python bench/bench_network.py --milliseconds 50 --delay 20 --rounds 5 --json run.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_distributed import WIDTH, calibrated, optimizer_of, stage_of
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.benchmark.slow_link import Host, SlowLink
from spectrain_ext.schedule import Durations, Kind, simulate, streams, summarize

WINDOWS = {"classic": [2, 1], "wide": [3, 1]}
WARM = 6


class Pair:
    """Two ranks at the two ends of a link, and what they are asked to do."""

    def __init__(self, link: SlowLink, batch: int) -> None:
        context = mp.get_context("spawn")
        self._ends, self.processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_main, args=(rank, link.hosts, theirs, batch), daemon=True
            )
            process.start()
            self.processes.append(process)
            self._ends.append(ours)
        self._ends[1].send(self._ends[0].recv())  # the store's port

    def ask(self, *what: object) -> list[Any]:
        """Both ranks do it; returns what each says."""
        for end in self._ends:
            end.send(what)
        return [end.recv() for end in self._ends]


def rank_main(rank: int, hosts: tuple[Host, ...], asked: Connection, batch: int) -> None:
    hosts[rank].enter()
    os.environ["GLOO_SOCKET_IFNAME"] = hosts[rank].interface
    torch.set_num_threads(1)
    if rank == 0:
        store = dist.TCPStore(hosts[0].address, 0, is_master=True, wait_for_workers=False)
        asked.send(store.port)
    else:
        store = dist.TCPStore(hosts[0].address, asked.recv(), is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=5)
    )
    pipes: dict[str, st.Pipeline] = {}
    while (request := asked.recv()) is not None:
        what, *rest = request
        if what == "calibrate":
            asked.send(calibrated(rest[0], batch))
        elif what == "make":
            pipes = {
                name: st.Pipeline.from_process_group(
                    stage_of(rest[0]),
                    optimizer_of,
                    nn.functional.mse_loss,
                    "vanilla",
                    window=window,
                    timeout=120.0,
                )
                for name, window in WINDOWS.items()
            }
            asked.send(None)
        elif what == "measure":
            asked.send(throughput(pipes[rest[0]], batch, rest[1]))
        elif what == "durations":
            asked.send(durations(pipes["wide"], batch, rest[0]))


def batches(batch: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    data = torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)
    for _ in range(count):
        yield data


def throughput(pipe: st.Pipeline, batch: int, count: int) -> float:
    """Minibatches per second, between an early result of this rank and its last one."""
    start = 0.0
    for result in pipe.run(batches(batch, count + WARM)):
        if result.index == WARM - 1:
            start = time.perf_counter()
    return count / (time.perf_counter() - start)


def durations(pipe: st.Pipeline, batch: int, count: int) -> dict[str, float]:
    """The median seconds of this rank's actions, by kind."""
    trace = st.Trace()
    for _ in pipe.run(batches(batch, count + WARM), trace=trace):
        pass
    found: dict[str, list[float]] = {}
    for span in trace.spans():
        if span.minibatch >= WARM:
            found.setdefault(span.kind.name, []).append(span.end - span.start)
    return {kind: statistics.median(values) for kind, values in found.items()}


def predicted(measured: list[dict[str, float]], window: str, delay: float) -> float:
    """Minibatches per second of a simulation."""

    def of(*kinds: Kind) -> list[float]:
        return [sum(rank.get(kind.name, 0.0) for kind in kinds) for rank in measured]

    times = Durations.of(
        2,
        forward=of(Kind.FORWARD, Kind.LOSS, Kind.SEND_ACTIVATION),
        backward=of(Kind.BACKWARD, Kind.SEND_GRADIENT),
        update=of(Kind.UPDATE),
        load_forward=of(Kind.LOAD_FORWARD),
        load_backward=of(Kind.LOAD_BACKWARD),
        activation=delay,
        gradient=delay,
    )
    actions = streams("1f1b-async", WINDOWS[window])
    return 1 / summarize(simulate(actions, times, minibatches=120)).period


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--milliseconds", type=float, default=50.0, help="per forward and backward")
    parser.add_argument("--delay", type=float, default=20.0, help="milliseconds, one way")
    parser.add_argument("--batch", type=int, default=64, help="samples per minibatch")
    parser.add_argument("--count", type=int, default=32, help="minibatches per measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    delay = options.delay / 1e3
    with ExitStack() as stack:
        pairs = {
            name: Pair(stack.enter_context(SlowLink(seconds)), options.batch)
            for name, seconds in (("without", 0.0), ("delay", delay))
        }
        load = os.getloadavg()
        blocks = pairs["without"].ask("calibrate", options.milliseconds)[0]
        for pair in pairs.values():
            pair.ask("make", blocks)
        figures: dict[str, dict[str, list[float]]] = {
            name: {window: [] for window in WINDOWS} for name in pairs
        }
        simulated: dict[str, list[float]] = {window: [] for window in WINDOWS}
        measured = []
        for _ in range(options.rounds):
            for window in WINDOWS:
                for name, pair in pairs.items():
                    figures[name][window].append(min(pair.ask("measure", window, options.count)))
            measured.append(pairs["without"].ask("durations", options.count))
            for window in WINDOWS:
                simulated[window].append(predicted(measured[-1], window, delay))
        for pair in pairs.values():
            for process in pair.processes:
                process.kill()
    report(figures, simulated, measured, load, blocks, options)
    return 0


def report(
    figures: dict[str, dict[str, list[float]]],
    simulated: dict[str, list[float]],
    measured: list[list[dict[str, float]]],
    load: tuple[float, float, float],
    blocks: int,
    options: argparse.Namespace,
) -> None:
    """Medians and spreads of ratios taken round by round: what disturbs a round disturbs all."""
    work = [
        [rank.get("FORWARD", 0.0) + rank.get("BACKWARD", 0.0) for rank in ranks]
        for ranks in measured
    ]
    print(
        f"two stages of {blocks} blocks, {statistics.median(map(max, work)) * 1e3:.1f} ms per "
        f"forward and backward, {options.delay:.0f} ms of delay one way, {options.rounds} rounds "
        f"of {options.count} minibatches, load {load[0]:.1f} on {os.cpu_count()} cores\n"
    )
    print(
        "| window | without delay, minibatches/s | with | with / without | predicted / measured |"
    )
    print("|---|--:|--:|--:|--:|")
    for window in WINDOWS:
        without, slow = figures["without"][window], figures["delay"][window]
        kept = [b / a for a, b in zip(without, slow, strict=True)]
        right = [p / b for p, b in zip(simulated[window], slow, strict=True)]
        cells = [f"{statistics.median(values):.1f}" for values in (without, slow)]
        cells += [
            f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
            for values in (kept, right)
        ]
        print(f"| {window} {WINDOWS[window]} | {' | '.join(cells)} |")
    if options.json:
        document = {
            "options": vars(options),
            "blocks": blocks,
            "load": load,
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "minibatches_per_second": figures,
            "predicted_with_delay": simulated,
            "durations_without_delay": measured,
        }
        with open(options.json, "w") as file:
            json.dump(document, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
