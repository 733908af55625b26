"""Measures the share of throughput that a wide window keeps on a link with delay.

Two processes run at the ends of a link. Every round measures each window without and then with a
delay, which changes while the link is idle. The simulation gets the delay and the mean durations of
the run without it. Needs root (network namespaces, tunnel devices) and two idle cores.

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
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_distributed import WIDTH, calibrated, optimizer_of, settings_of, stage_of
from slow_link import Host, SlowLink
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.schedule import Kind, streams
from spectrain_ext.simulation import Durations, simulate, summarize

WINDOWS = {"classic": [2, 1], "wide": [3, 1]}
WARM = 16


class Measured(NamedTuple):
    """One rank's figures of a run."""

    throughput: float
    durations: dict[str, float]


class Round(NamedTuple):
    """One window in one round: minibatches per second without delay, with delay, and simulated.

    The simulation uses the durations without delay.
    """

    without: float
    slow: float
    predicted_without: float
    predicted_slow: float
    durations: list[dict[str, float]]
    durations_slow: list[dict[str, float]]


class Pair:
    """Two ranks at the two ends of a link, and their commands."""

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
        """Run a command on both ranks and return both results."""
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
                name: st.DistributedPipeline(
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
            asked.send(measured(pipes[rest[0]], batch, rest[1]))


def batches(batch: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)  # the same on both ranks
    data = torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)
    for _ in range(count):
        yield data


def measured(pipe: st.Pipeline, batch: int, count: int) -> Measured:
    """Return minibatches per second of this rank, and its actions' mean seconds by kind.

    Both are measured between an early result and the last one. Means, since throughput consists of
    these: with medians of another run the simulation was 1.15 to 1.21 times too fast, without any
    delay 1.16 times.
    """
    start = 0.0
    trace = st.Trace()
    for result in pipe.run(batches(batch, count + WARM), trace=trace):
        if result.index == WARM - 1:
            start = time.perf_counter()
    throughput = count / (time.perf_counter() - start)
    found: dict[str, list[float]] = {}
    for span in trace.spans():
        if span.minibatch >= WARM:
            found.setdefault(span.kind.name, []).append(span.end - span.start)
    return Measured(throughput, {kind: statistics.mean(each) for kind, each in found.items()})


def predicted(durations: list[dict[str, float]], window: str, delay: float) -> float:
    """Return the minibatches per second of a simulation."""

    def of(*kinds: Kind) -> list[float]:
        return [sum(rank.get(kind.name, 0.0) for kind in kinds) for rank in durations]

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
    parser.add_argument("--milliseconds", type=float, default=50.0, help="forward and backward")
    parser.add_argument("--delay", type=float, default=20.0, help="milliseconds, one way")
    parser.add_argument("--batch", type=int, default=64, help="samples per minibatch")
    parser.add_argument("--count", type=int, default=64, help="minibatches per measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    delay = options.delay / 1e3
    with SlowLink(0.0) as link:
        pair = Pair(link, options.batch)
        load = os.getloadavg()
        blocks = pair.ask("calibrate", options.milliseconds)[0]
        pair.ask("make", blocks)
        rounds: dict[str, list[Round]] = {window: [] for window in WINDOWS}
        for _ in range(options.rounds):
            for window, found in rounds.items():
                link.set_delay(0.0)
                without = pair.ask("measure", window, options.count)
                link.set_delay(delay)
                slow = pair.ask("measure", window, options.count)
                durations = [rank.durations for rank in without]
                found.append(
                    Round(
                        min(rank.throughput for rank in without),
                        min(rank.throughput for rank in slow),
                        predicted(durations, window, 0.0),
                        predicted(durations, window, delay),
                        durations,
                        [rank.durations for rank in slow],
                    )
                )
        for process in pair.processes:
            process.kill()
    report(rounds, load, blocks, options)
    return 0


def report(
    rounds: dict[str, list[Round]],
    load: tuple[float, float, float],
    blocks: int,
    options: argparse.Namespace,
) -> None:
    """Print medians and spreads of ratios; a disturbance affects all figures of a round."""
    work = [
        rank["FORWARD"] + rank["BACKWARD"]
        for found in rounds.values()
        for each in found
        for rank in each.durations
    ]
    print(
        f"two stages of {blocks} blocks, {statistics.median(work) * 1e3:.1f} ms per "
        f"forward and backward, {options.delay:.0f} ms of delay one way, {options.rounds} rounds "
        f"of {options.count} minibatches, load {load[0]:.1f} on {os.cpu_count()} cores\n"
    )
    print(
        "| window | minibatches/s without delay | with | kept: with / without | kept, simulated "
        "| simulated / measured, kept | without delay | with |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for window, found in rounds.items():
        kept = [each.slow / each.without for each in found]
        simulated = [each.predicted_slow / each.predicted_without for each in found]
        ratios = [
            kept,
            simulated,
            [s / k for s, k in zip(simulated, kept, strict=True)],
            [each.predicted_without / each.without for each in found],
            [each.predicted_slow / each.slow for each in found],
        ]
        cells = [
            f"{statistics.median(each.without for each in found):.1f}",
            f"{statistics.median(each.slow for each in found):.1f}",
        ]
        cells += [
            f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in ratios
        ]
        print(f"| {window} {WINDOWS[window]} | {' | '.join(cells)} |")
    if options.json:
        document = {
            "options": settings_of(options),
            "blocks": blocks,
            "load": load,
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "rounds": {name: [each._asdict() for each in found] for name, found in rounds.items()},
        }
        with open(options.json, "w") as file:
            json.dump(document, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
