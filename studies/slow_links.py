"""``studies slow-links``: compares methods and codecs over slow links, in steps and seconds.

A row's steps are measured: the minibatches in which a small transformer in eight stages reaches the
loss of synchronous training in bfloat16. Its seconds per step are simulated at the sizes of the
public benchmark for slow links (Protocol NanoGPT, 2026). The study assumes that the measured steps
also hold at these sizes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import click
import torch
from rich.table import Table

from spectrain_ext.extras import picture, require, require_matplotlib
from spectrain_ext.passes.codecs import NAMES, packed_bytes
from spectrain_ext.tools.commands.doctor import cpu_name
from spectrain_ext.tools.commands.options import FEW, plain_console, plain_table
from spectrain_ext.tools.planning import LINKS
from spectrain_ext.tools.simulation import summarize
from spectrain_ext.tools.timelines import simulate_method

from . import REMEDY
from .frontier import Interval, least, updates_to, write_rows
from .looks import looks
from .options import command_errors, data_dir
from .report import versions
from .settings import settle
from .study import Cell, Curve, maker_in, prepare, run_one, runs_of, search

STAGES = 8
#: From the benchmark: tokens per step, bytes of a token's activation in bfloat16, and a stage's
#: compute per step (forward and backward): its dense baseline's seconds without links, less
#: bubbles.
TOKENS, TOKEN_BYTES = 512 * 1024, 2 * 1024
COMPUTE = 0.538 * 64 / (64 + STAGES - 1)
#: Bytes in its subspace of rank 160, with the token; and the rank in this proportion for a residual
#: of width 64.
SUBSPACE_BYTES, SUBSPACE_RANK = 2 * 161, 10
#: Updates of synchronous training, and the length of runs in multiples of it.
UPDATES, LENGTH = {"adamw": 500, "muon": 300}, 1.2
SHARE = 0.8  # share of its updates whose loss the others must reach
TEXT: Mapping[str, Any] = {
    **{"data": "text", "width": 64, "context": 32, "batch_size": 32, "warmup": 30},
    **{"lr_schedule": "constant", "test_samples": 512, "epochs": 1000, "stages": STAGES},
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"model": "gpt", "depth": 6, "optimizer": "adamw", "weight_decay": 0.01, "lr": 0.004},
    "muon": {"model": "speedrun", "optimizer": "muon", "weight_decay": 0.05, "lr": 0.025},
}
FIRST = "bfloat16"
CODECS = (FIRST, "int8", "int4-hadamard")
#: Trained methods, with the numbers of microbatches that change their updates.
TRAINED: Mapping[str, Mapping[str, Mapping[int, Sequence[str]]]] = {
    "adamw": {
        "sync": {1: CODECS},
        "pipedream-2bw": {8: CODECS},
        "auto": {8: CODECS, 4: (FIRST,), 16: (FIRST,), 32: CODECS},
        "vanilla": {8: CODECS, 4: (FIRST,), 16: (FIRST,), 32: CODECS},
    },
    "muon": {
        "sync": {1: CODECS},
        "pipedream-2bw": {8: CODECS},
        "auto": {8: CODECS, 32: CODECS},
        "vanilla": {8: (FIRST,)},
    },
}
#: Rows of the table. A method that flushes makes the updates of ``sync`` with any M.
SHOWN = {
    "1f1b": (4, 8, 16, 32, 64),
    "zb-h1": (8, 16, 32, 64),
    "pipedream-2bw": (8, 16, 32),
    "auto": (4, 8, 16, 32),
    "vanilla": (4, 8, 16, 32),
}


class Way(NamedTuple):
    """One training; edges are dense if ``rank`` is None."""

    setting: str
    method: str
    microbatches: int
    codec: str
    rank: int | None = None

    @property
    def name(self) -> str:
        return self.codec if self.rank is None else "subspace"

    @property
    def token_bytes(self) -> float:
        """Bytes of a token's activation, and of its gradient, at the benchmark's sizes."""
        if self.rank is not None:
            return SUBSPACE_BYTES
        return packed_bytes(NAMES[self.codec], TOKEN_BYTES, torch.bfloat16)

    def cell(self, data: Path | None) -> Cell:
        asked = {**TEXT, **SETTINGS[self.setting], "data_dir": data, "codec": self.codec}
        asked |= {"microbatches": self.microbatches, "rank": self.rank}
        settings = settle({**asked, "methods": ["sync"]})
        return Cell(self.method, settings, UPDATES[self.setting], LENGTH)


def chains_of(setting: str) -> Iterator[list[Way]]:
    """Return ways in chains: each search of a learning rate starts at the previous one's result."""
    for method, numbers in TRAINED[setting].items():
        for m, codecs in numbers.items():
            yield [Way(setting, method, m, codec) for codec in codecs]
    if setting == "muon":
        for method, m in (("sync", 1), ("auto", 8)):
            yield [Way(setting, method, m, FIRST, SUBSPACE_RANK)]


def search_chain(folder: Path, data: Path | None, ways: Sequence[Way]) -> dict[Way, float]:
    """Find each way's learning rate with the least loss among neighbours, a factor of two apart."""
    found: dict[Way, float] = {}
    lr = None
    for way in ways:
        cell = way.cell(data)
        lr = found[way] = search(folder, cell, lr or cell.settings.lr, [0], 1, reach=1)
    return found


@cache  # rows of the table share the results
def seconds_per_step(method: str, microbatches: int, token_bytes: float) -> float:
    """Return simulated seconds per step of eight stages at the benchmark's sizes over its links."""
    message = LINKS["wan200"].seconds(TOKENS / microbatches * token_bytes)
    return step_over_wires(method, STAGES, microbatches, COMPUTE, message)


def step_over_wires(
    method: str, stages: int, microbatches: int, compute: float, message: float
) -> float:
    """Return the simulated seconds of a step over inbound wires.

    ``compute`` are a stage's seconds per step, ``message`` those of a message.
    """
    part = compute / microbatches
    spans = simulate_method(
        method,
        stages,
        8 + 3 * stages // microbatches,
        microbatches=microbatches,
        forward=part / 3,
        backward=2 * part / 3,
        communication=message,
        inbound=True,
    )
    return summarize(spans).period


class Row(NamedTuple):
    """A method with a codec at its best learning rate, at the benchmark's sizes."""

    way: Way  # the training; synchronous training for methods that flush
    method: str
    microbatches: int  # M of the simulation
    lr: float
    # By seed, steps to the loss that synchronous training in bfloat16 has after 80 % of its
    # updates, divided by that number; infinite if the run did not reach it.
    steps: tuple[float, ...]
    interval: Interval  # their mean with its 95 % interval
    seconds: float  # simulated, per step
    # Mean steps times seconds, divided by the same product of 1F1B in bfloat16 with its best M.
    time: float

    @property
    def document(self) -> dict[str, Any]:
        found = {**self._asdict(), "interval": vars(self.interval), "setting": self.way.setting}
        del found["way"]
        return {**found, "codec": self.way.name, "token_bytes": self.way.token_bytes}


def rows_of(folder: Path, data: Path | None, found: Mapping[Way, float], seeds: int) -> list[Row]:
    """Return a row for every method, number of microbatches and codec that was measured."""
    rows: list[Row] = []
    for setting in dict.fromkeys(way.setting for way in found):
        ways = [way for way in found if way.setting == setting]
        runs = {w: runs_of(folder, w.cell(data), found[w], range(seeds)) for w in ways}
        first = runs[Way(setting, "sync", 1, FIRST)]
        goals = {seed: least(curve, SHARE * UPDATES[setting]) for seed, curve in first.items()}
        begun = {seed: updates_to(curve, goals[seed]) for seed, curve in first.items()}
        mine: list[Row] = []
        for method, m in ((method, m) for method, numbers in SHOWN.items() for m in numbers):
            for way in (way for way in runs if _stands_for(way, method, m)):
                steps = tuple(
                    updates_to(c, goals[seed]) / begun[seed] for seed, c in runs[way].items()
                )
                interval, seconds = Interval.of(steps), seconds_per_step(method, m, way.token_bytes)
                product = interval.mean * seconds
                mine.append(Row(way, method, m, found[way], steps, interval, seconds, product))
        yardstick = min(r.time for r in mine if (r.method, r.way.name) == ("1f1b", FIRST))
        rows += [row._replace(time=row.time / yardstick) for row in mine]
    return rows


def _stands_for(way: Way, method: str, m: int) -> bool:
    """Return whether a method with ``m`` microbatches makes the updates of a trained way."""
    if method in ("1f1b", "zb-h1"):
        return way.method == "sync"
    # 2BW makes the same updates with any M that it is defined for.
    return way.method == method and (way.microbatches == m or method == "pipedream-2bw")


def best_of(rows: Iterable[Row]) -> list[Row]:
    found: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        key = row.way.setting, row.method, row.way.name
        if key not in found or row.time < found[key].time:
            found[key] = row
    return sorted(found.values(), key=lambda row: (row.way.setting, row.time))


_DASHES: Mapping[str, Any] = {
    FIRST: "solid",
    "int8": (0, (6, 1.5)),
    "int4-hadamard": (0, (1, 1)),
    "subspace": (0, (4, 1.2, 1, 1.2)),
}


def draw(path: Path, curves: Mapping[Row, Sequence[Curve]]) -> None:
    with picture(path, 8.0, 4.8) as figure:
        axes = figure.add_subplot()
        drawn = looks(row.method for row in curves)
        for row, runs in curves.items():
            points = list(zip(*(run.points for run in runs), strict=False))
            axes.plot(
                [column[0][0] * row.seconds / 3600 for column in points],
                [fmean(loss for _, loss, _ in column) for column in points],
                color=drawn[row.method].color,
                linestyle=_DASHES[row.way.name],
                label=f"{row.method}, {row.way.name}, M = {row.microbatches}",
            )
        axes.set_xscale("log")
        axes.set_xlabel("hours on links of 200 Mb/s and 50 ms: measured steps, simulated seconds")
        axes.set_ylabel("test loss (nats)")
        axes.grid(True, which="both", alpha=0.3)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def table_of(rows: Iterable[Row]) -> Table:
    table = plain_table(
        "Against 1f1b in bfloat16 with its best M",
        *("", "method", "codec", "M", "lr", "steps", "seeds", "s per step", "time"),
    )
    for row in rows:
        reached = math.isfinite(row.time)
        table.add_row(
            *(row.way.setting, row.method, row.way.name, str(row.microbatches), f"{row.lr:.3g}"),
            f"{row.interval.mean:.2f}" if reached else "-",
            *(str(len(row.steps)), f"{row.seconds:.1f}", f"{row.time:.2f}" if reached else "-"),
        )
    return table


@click.command(
    "slow-links",
    short_help="Compare methods and codecs where links are slow.",
    context_settings={"show_default": True},
    epilog="Every run is a file in --out: the same command resumes an interrupted study.",
)
@data_dir
@click.option("--seeds", type=FEW, default=3, help="Seeds of the main rows; others have one.")
@click.option("--jobs", type=FEW, default=1, help="Runs at once, on a core each.")
@click.option(
    "--setting",
    "settings",
    type=click.Choice(tuple(SETTINGS)),
    multiple=True,
    default=tuple(SETTINGS),
    help="Optimizer and transformer; may be repeated.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/slow-links"),
    help="Folder for the runs, slow-links.json and pictures.",
)
def slow_links(
    data_dir: Path | None, seeds: int, jobs: int, settings: Sequence[str], out: Path
) -> None:
    """Find which method and codec reach a loss first over links of 200 Mb/s and 50 ms.

    Steps are measured: a small transformer trains on the text of --data-dir, in eight stages, with
    the codec on its edges. Seconds per step are simulated at the sizes of a public benchmark.
    """
    require_matplotlib()
    require("scipy", "confidence intervals come from SciPy", REMEDY)
    console = plain_console()
    chains = [ways for setting in dict.fromkeys(settings) for ways in chains_of(setting)]
    with command_errors():
        cell = chains[0][0].cell(data_dir)
        prepare(cell, cell.settings.lr, 0, maker_in(cell.settings, out))
        out.mkdir(parents=True, exist_ok=True)
    found: dict[Way, float] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        searches = [pool.submit(search_chain, out, data_dir, ways) for ways in chains]
        for done in as_completed(searches):
            found |= done.result()
            for way, lr in done.result().items():
                words = f"{way.setting}: {way.method}, {way.name}, M = {way.microbatches}"
                console.print(f"{words}: lr {lr:.3g}", soft_wrap=True)
        found = {way: found[way] for ways in chains for way in ways}
        matter = {row.way for row in best_of(rows_of(out, data_dir, found, 1))}
        more = [(way, seed) for way in found if way in matter for seed in range(1, seeds)]
        for run in [
            pool.submit(run_one, out, way.cell(data_dir), found[way], seed) for way, seed in more
        ]:
            run.result()
    rows = rows_of(out, data_dir, found, seeds)
    write(out, data_dir, rows, seeds)
    console.print(table_of(best_of(rows)))
    console.print(f"numbers and pictures: {out}", soft_wrap=True)


def write(out: Path, data: Path | None, rows: Sequence[Row], seeds: int) -> None:
    """Write slow-links.json and one picture per setting."""
    settings = dict.fromkeys(row.way.setting for row in rows)
    about = {
        **{"date": time.strftime("%Y-%m-%d", time.gmtime()), "cpu": cpu_name()},
        **{"versions": versions(), "seeds": seeds, "updates": UPDATES, "share": SHARE},
        **{"length": LENGTH, "tokens": TOKENS, "compute": COMPUTE, "text": dict(TEXT)},
        "settings": {name: dict(SETTINGS[name]) for name in settings},
    }
    write_rows(out / "slow-links.json", (row.document for row in rows), about)
    for setting in settings:
        shown = [r for r in best_of(rows) if r.way.setting == setting and r.method != "zb-h1"]
        curves = {
            r: list(runs_of(out, r.way.cell(data), r.lr, range(seeds)).values()) for r in shown
        }
        draw(out / f"slow-links-{setting}.png", curves)
