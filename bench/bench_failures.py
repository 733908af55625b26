"""Measures the cost of failures under torchrun by phase, and compares the final weights.

A training in three processes (examples/torchrun.py) saves every few minibatches. In every start of
its ranks except the last, a random rank fails at a random minibatch: it is killed (SIGKILL),
stopped (SIGSTOP), raises an exception, or cannot save because the disk is full. torchrun restarts
all ranks, which resume from the newest checkpoint. At the end all weights and states must equal,
bit for bit, those of a training without failures.

    python bench/bench_failures.py                                    # 12 faults in one training
    python bench/bench_failures.py --campaign 200 --json campaign.json      # 200 faults, in ten
"""

from __future__ import annotations

import argparse
import json
import os
import random
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rivals.machine import environment
from safetensors.torch import load_file
from table import spread, table
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("kill", "stop", "exception", "full")
#: Phases after a fault: the event that ends each, and whether the first or the last rank ends it.
PHASES = {
    "heard": "another rank knows",
    "ended": "the last rank ended",
    "started": "torchrun restarted all",
    "torch": "Python and torch started",
    "package": "package imported",
    "script": "other imports of the script",
    "group": "process group made",
    "data": "data loaded",
    "pipeline": "pipeline built",
    "restored": "checkpoint restored",
    "first": "first minibatch",
    "again": "minibatch of the failure",
}
PER_TRAINING = 20
_TMPFS = 8 * 2**20  # bytes

Event = dict[str, Any]
Fault = dict[str, Any]


def planned(draw: random.Random, count: int, options: argparse.Namespace) -> list[Fault]:
    """Return equal numbers of each kind of fault, each between two different saves.

    All lost work is then made up before the next fault.
    """
    kinds = [options.kinds[n % len(options.kinds)] for n in range(count)]
    draw.shuffle(kinds)
    saves = sorted(draw.sample(range(options.minibatches // options.every), count))
    moments = [options.every * n + draw.randrange(options.every) for n in saves]
    return [
        {
            "kind": kind,
            "rank": draw.randrange(options.ranks),
            "minibatch": minibatch,
            "delay": draw.random() * 0.03,  # seconds after the start of its forward
        }
        for kind, minibatch in zip(kinds, moments, strict=True)
    ]


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Return a file that fills the disk of ``folder``; None if no small disk can be mounted."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_TMPFS}", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        yield None
        return
    try:
        yield folder / "filler"
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def trained(
    folder: Path, faults: Sequence[Fault], options: argparse.Namespace
) -> tuple[list[Event], dict[str, Tensor]]:
    """Run one training under torchrun; return its events and its last checkpoint's content."""
    folder.mkdir()
    with (
        small_disk(folder / "disk") as filler,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard,
    ):
        heard.bind(str(folder / "socket"))
        plan = {"socket": str(folder / "socket"), "faults": faults}
        plan["filler"] = None if filler is None else str(filler)
        (folder / "plan").write_text(json.dumps(plan))
        checkpoints = folder / "disk" / "checkpoints"
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nproc-per-node", str(options.ranks), "--max-restarts", str(len(faults) + 2)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
            *("--local-addr", "127.0.0.1", str(ROOT / "bench" / "failing_rank.py")),
            *(str(folder / "plan"), str(ROOT / "examples" / "torchrun.py")),
            *("--checkpoints", str(checkpoints), "--every", str(options.every)),
            *("--epochs", str(-(-options.minibatches // 30)), "--timeout", str(options.timeout)),
        ]
        path = os.pathsep.join(filter(None, [*sys.path, str(ROOT)]))  # the installed package first
        with (folder / "printed").open("w") as printed:
            process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdout=printed,
                stderr=subprocess.STDOUT,
            )
            try:
                events = listened(heard, process)
            finally:
                process.kill()
        if process.wait():
            raise RuntimeError(
                f"{folder}: torchrun ended with {process.returncode}:\n"
                + (folder / "printed").read_text()[-6000:]
            )
        latest = max(checkpoints.glob("minibatch-*"))  # with the same number of digits
        found: dict[str, Tensor] = {}
        for each in latest.glob("*.safetensors"):
            found |= load_file(each)
        return events, found


def differing(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Return all weights and states that differ in a bit, except random generators of processes.

    Every iteration of a DataLoader draws a seed from these, also the one after a restart.
    """
    assert weights.keys() == expected.keys()
    return [
        name
        for name, value in expected.items()
        if not name.startswith("random.process")
        and not torch.equal(
            weights[name].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)
        )
    ]


def listened(heard: socket.socket, launcher: subprocess.Popen[bytes]) -> list[Event]:
    """Collect all messages of the ranks and their end times, until the launcher ends."""
    events: list[Event] = []
    with selectors.DefaultSelector() as selector:
        selector.register(heard, selectors.EVENT_READ)
        ended = os.pidfd_open(launcher.pid)
        selector.register(ended, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == ended:
                    os.close(ended)
                    return events
                if key.fileobj is not heard:
                    events.append({**key.data, "event": "ended", "time": time.monotonic()})
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    continue
                event = json.loads(heard.recv(65536))
                events.append(event)
                if event["event"] == "begun":
                    who = {name: event[name] for name in ("rank", "start", "pid")}
                    with suppress(OSError):  # it has ended in the meantime
                        selector.register(os.pidfd_open(event["pid"]), selectors.EVENT_READ, who)
                        events.append({**who, "event": "started", "time": begun_at(event["pid"])})


def begun_at(pid: int) -> float:
    """Return when a process started, on this clock, to a hundredth of a second."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    since = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return ticks / os.sysconf("SC_CLK_TCK") - since


def costs(events: Sequence[Event], faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """Return the seconds of each phase after every fault, and the lost minibatches."""
    found = []
    for n, fault in enumerate(faults):
        here = [event for event in events if event["start"] == n]
        after = [event for event in events if event["start"] == n + 1]
        moment, at = next((e["time"], e["minibatch"]) for e in here if e["event"] == "fault")
        others = [e for e in here if e["rank"] != fault["rank"] and e["time"] >= moment]
        ends = {"heard": min(e["time"] for e in others if e["event"] in ("heard", "ended"))}
        ends["ended"] = max(e["time"] for e in here if e["event"] == "ended")
        for name in list(PHASES)[2:-2]:
            ends[name] = max(e["time"] for e in after if e["event"] == name)
        again = [e for e in after if e["event"] == "minibatch"]
        if any(e["minibatch"] >= at - 1 for e in again):  # otherwise the next fault came first
            ends["first"] = min(e["time"] for e in again)
            ends["again"] = min(e["time"] for e in again if e["minibatch"] >= at - 1)
        restored = next(e["minibatches"] for e in after if e["event"] == "restored")
        seconds, before = {}, moment
        for name, end in ends.items():
            seconds[name], before = round(end - before, 4), end
        found.append({**fault, "lost": at - 1 - restored, "seconds": seconds})
    return found


def whole_by_kind(found: Sequence[Fault]) -> dict[str, list[Fault]]:
    """Return the faults that training got past, by their kinds, in the order of ``KINDS``."""
    whole = [row for row in found if "again" in row.get("seconds", ())]
    by_kind = {kind: [row for row in whole if row["kind"] == kind] for kind in KINDS}
    return {kind: rows for kind, rows in by_kind.items() if rows}


def report(found: Sequence[Fault]) -> str:
    """Print median and quartiles of each phase by kind of fault."""
    by_kind = whole_by_kind(found)
    lines = [
        [words, *(spread([row["seconds"][name] for row in rows]) for rows in by_kind.values())]
        for name, words in PHASES.items()
    ]
    sums = [spread([sum(row["seconds"].values()) for row in rows]) for rows in by_kind.values()]
    lost = [f"{median(row['lost'] for row in rows):.0f}" for rows in by_kind.values()]
    lines += [["all", *sums], ["minibatches lost", *lost]]
    return table("|>".join(["seconds, median and quartiles", *by_kind]), lines)


def campaign(options: argparse.Namespace) -> dict[str, Any]:
    """Run trainings with faults and one without; list those with a different result."""
    document: dict[str, Any] = {
        **environment(),
        "options": {k: v for k, v in vars(options).items() if k not in ("directory", "json")},
        "failed": [],
        "faults": [],
    }
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        folder, left, training = Path(name), options.campaign, 0
        began = time.monotonic()
        _, expected = trained(folder / "undisturbed", [], options)
        document["undisturbed_s"] = round(time.monotonic() - began, 2)
        while left:
            faults = planned(
                random.Random(options.seed + training), min(left, PER_TRAINING), options
            )
            began = time.monotonic()
            try:
                events, weights = trained(folder / str(training), faults, options)
                if unequal := differing(weights, expected):
                    raise RuntimeError(f"training {training}: unequal {', '.join(unequal)}")
                rows = costs(events, faults)
            except (RuntimeError, StopIteration, ValueError) as error:
                document["failed"].append({"training": training, "reason": str(error)})
                rows = [dict(fault) for fault in faults]
                print(f"training {training}: {error}", flush=True)
            took = time.monotonic() - began
            print(f"training {training}: {len(faults)} faults, {took:.0f} s", flush=True)
            document["faults"] += [{"training": training, **row} for row in rows]
            left, training = left - len(faults), training + 1
            if options.json:
                written(options.json, document)
    return document


def written(path: str, document: dict[str, Any]) -> None:
    """Write JSON with one fault per line."""
    rows = ",\n".join(json.dumps(row) for row in document["faults"])
    text = json.dumps({**document, "faults": []}, indent=1)
    Path(path).write_text(text.replace('"faults": []', f'"faults": [\n{rows}\n ]') + "\n")


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--campaign", type=int, default=12, help="number of faults, in trainings of 20"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    for name, value in (("ranks", 3), ("minibatches", 1000), ("every", 10), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--timeout", type=float, default=4.0, help="timeout of the pipeline in seconds"
    )
    parser.add_argument("--directory", help="folder for checkpoints; default: a temporary one")
    parser.add_argument("--json", help="file for all faults")
    return parser.parse_args(arguments)


def main() -> None:
    document = campaign(parsed())
    print(report(document["faults"]))
    print(f"{len(document['faults'])} faults, {len(document['failed'])} trainings failed")


if __name__ == "__main__":
    main()
