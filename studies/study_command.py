"""``studies study``: methods over depths and delays, at their own best rates or at one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from spectrain_ext.cli.imported import own_failures
from spectrain_ext.cli.machine import cpu_name
from spectrain_ext.cli.options import POSITIVE, names, numbers_listed, plain_console
from spectrain_ext.extras import require, require_matplotlib

from . import REMEDY
from .contenders import USUAL, WORKLOADS
from .data.split import Split
from .frontier import (
    draw_gaps,
    draw_times,
    frontier_table,
    rows_of,
    write_frontier,
)
from .options import data_dir
from .report import versions
from .settings import OptionError, TrainSettings
from .study import Curves, cells_of, data_of, search_all
from .workload import build_stages

_TABLE = 120  # columns that the table has


@click.command(
    short_help="Compare methods at every depth and delay.",
    context_settings={"show_default": True},
    epilog="Every run is a file in --out: the same command with the same --out goes on where it "
    "was interrupted, and trains what more seeds, stages or methods add. Learning rates go up and "
    "down by factors of two until two on either side of the best are worse, by the first seeds. "
    "The paper-* are the paper's models in small, in 4 stages, all methods at one learning rate: "
    "see docs/train.md.",
)
@click.option(
    "--data",
    type=click.Choice(tuple(WORKLOADS)),
    default="digits",
    help="What is trained, each with a small model; what is not digits is read from --data-dir.",
)
@data_dir
@click.option(
    "--stages",
    metavar="NUMBERS",
    callback=numbers_listed,
    help="Numbers of stages, with commas.  [default: 4,8; of paper-* 4]",
)
@click.option(
    "--microbatches",
    metavar="NUMBERS",
    callback=names,
    help="Numbers of microbatches, with commas; N is as many as stages, 2N twice that.  [default: "
    "1,N; of paper-* 1]",
)
@click.option(
    "--method",
    "-m",
    "methods",
    multiple=True,
    metavar="NAME",
    callback=names,
    help="Methods, with commas, module:NAME for your own; sync is always one of them. Others that "
    f"are only compared with: see docs/frontier.md.  [default: {', '.join(USUAL)}; of "
    "paper-* the paper's and more]",
)
@click.option("--seeds", type=POSITIVE, default=5, help="How many seeds, from 0 on.")
@click.option("--jobs", type=POSITIVE, default=1, help="Runs at once, on a core each.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the runs, frontier.json and pictures.  [default: runs/study-<data>]",
)
def study(
    data: str,
    data_dir: Path | None,
    stages: Sequence[int] | None,
    microbatches: Sequence[str],
    methods: Sequence[str],
    seeds: int,
    jobs: int,
    out: Path | None,
) -> None:
    """Find how well methods train at every depth and delay, against synchronous training.

    Runs in lockstep, which gives the pipeline's numbers and takes far fewer calls.
    """
    require_matplotlib()
    require("scipy", "confidence intervals come from SciPy", REMEDY)
    folder = out or Path("runs") / f"study-{data}"
    console = plain_console()
    work = WORKLOADS[data]
    try:
        wanted = dict.fromkeys(("sync", *(methods or work.contenders)))
        with own_failures(*wanted):
            cells = cells_of(
                data,
                data_dir,
                stages or work.stages,
                microbatches or work.microbatches,
                tuple(wanted),
            )
        split = data_of(cells[0].settings, folder)
    except OptionError as error:
        raise click.BadParameter(str(error), param_hint=f"'--{error.option}'") from error
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    began = time.monotonic()
    found = {}
    for cell, lr in search_all(folder, cells, range(seeds), work.judges, jobs=jobs):
        found[cell] = lr
        s = cell.settings
        console.print(
            f"{len(found)}/{len(cells)} {cell.contender}, {s.stages} stages, M = {s.microbatches}: "
            f"lr {lr:.3g}, {time.monotonic() - began:.0f} s"
        )
    rows = rows_of(folder, found, range(seeds), split)
    sizes = {cell.settings.stages: cell.settings for cell in cells}
    asked = {
        "data": data,
        "stages": ",".join(map(str, sizes)),
        "microbatches": ",".join(microbatches or work.microbatches),
        "method": ",".join(wanted),
        "seeds": seeds,
    }
    about: dict[str, Any] = {
        "command": " ".join(["python -m studies study", *(f"--{k} {v}" for k, v in asked.items())]),
        "data": data,
        "seeds": seeds,
        "updates": cells[0].updates,
        "settings": dict(work.settings),
        "parameters": {n: _sizes(settings, split) for n, settings in sizes.items()},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": cpu_name(),
        "versions": versions(),
    }
    write_frontier(folder / "frontier.json", rows, about)
    draw_gaps(folder / "gaps.png", rows, f"{split.name}, {seeds} seeds")
    curves = Curves(folder)
    for n in dict.fromkeys(row.stages for row in rows):
        runs = {
            (c.contender, n, int(c.settings.microbatches)): [
                curve for s in range(seeds) if (curve := curves.find(c, lr, s)) is not None
            ]
            for c, lr in found.items()
            if c.settings.stages == n
        }
        mine = [row for row in rows if row.stages == n]
        draw_times(folder / f"time-{n}.png", mine, runs, f"{split.name}, {n} stages, {seeds} seeds")
    plain_console(width=max(console.width, _TABLE)).print(frontier_table(rows))
    console.print(f"numbers and pictures: {folder}", soft_wrap=True)


def _sizes(settings: TrainSettings, data: Split) -> list[int]:
    """Parameters of each stage."""
    stages = build_stages(settings, settings.stages, 0, data)
    return [sum(p.numel() for p in stage.parameters()) for stage in stages]
