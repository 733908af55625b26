"""``studies study``: methods over depths and delays, at their own best rates or at one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import click

from spectrain_ext.extras import require, require_matplotlib
from spectrain_ext.tools.commands.doctor import cpu_name
from spectrain_ext.tools.commands.options import FEW, POSITIVE, names, own_failures, plain_console

from . import REMEDY
from .contenders import STUDIES, USUAL, Study
from .frontier import (
    draw_gaps,
    frontier_table,
    rows_of,
    write_rows,
)
from .options import OptionError, command_errors, data_dir, finite, numbers_listed, workload
from .report import versions
from .settings import Optimizer
from .study import cells_of, maker_in, own_study, prepare, search_all
from .workload import stages_in

_DATA = "digits"
_EPOCHS = 3


@click.command(
    short_help="Compare methods at every depth and delay.",
    context_settings={"show_default": True},
    epilog="Every run is a file in --out: the same command with the same --out resumes an "
    "interrupted study and trains added seeds, stages or methods. The search tries learning rates "
    "a factor of two apart until two on either side of the best are worse, judged by the first "
    "seeds. paper-* are small forms of the paper's models in 4 stages, with one learning rate for "
    "all methods: see docs/studies.md.",
)
@click.option(
    "--data",
    type=click.Choice(tuple(STUDIES)),
    help="The data set, each with a small model; all but digits are read from --data-dir.  "
    "[default: digits]",
)
@data_dir
@workload
@click.option(
    "--epochs",
    type=POSITIVE,
    help="Passes over the training data of --workload.  [default: 3; for --data the updates in "
    "docs/frontier.md]",
)
@click.option(
    "--stages",
    metavar="NUMBERS",
    callback=numbers_listed,
    help="Numbers of stages, with commas.  [default: 4,8; for paper-* and --workload 4]",
)
@click.option(
    "--microbatches",
    metavar="NUMBERS",
    callback=names,
    help="Numbers of microbatches, with commas; N is the number of stages, 2N twice that.  "
    "[default: 1,N; for paper-* 1]",
)
@click.option(
    "--method",
    "-m",
    "methods",
    multiple=True,
    metavar="NAME",
    callback=names,
    help="Methods, with commas; module:NAME for your own; sync is always added. docs/frontier.md "
    f"lists more that only studies have.  [default: {', '.join(USUAL)}; for paper-* the paper's "
    "and more]",
)
@click.option(
    "--optimizer",
    type=click.Choice(get_args(Optimizer)),
    help="The optimizer of all methods, including sync. muon and basis-rotation update hidden "
    "matrices, and AdamW the rest; soap updates all.  [default: adamw for text, else sgd]",
)
@click.option(
    "--lr-schedule",
    type=click.Choice(["constant", "cosine"]),
    help="Learning rates: constant, or falling as a half cosine to 0 at the end of each run, where "
    "only the end is compared.  [default: constant; for nanogpt and paper-* cosine]",
)
@click.option(
    "--lr",
    type=click.FloatRange(min=0, min_open=True),
    callback=finite,
    help="The learning rate of all methods, instead of a search for each one's best.",
)
@click.option(
    "--clip-norm",
    type=click.FloatRange(min=0, min_open=True),
    callback=finite,
    help="Clip gradients at this norm: a stage's, or of all stages under methods that flush.",
)
@click.option(
    "--updates",
    type=POSITIVE,
    help="Updates of a sync run.  [default: those in docs/frontier.md, or those of --epochs]",
)
@click.option(
    "--length",
    type=click.FloatRange(min=1),
    callback=finite,
    help="Updates of a delayed run, relative to sync.  [default: 1; at constant rates 1.5 where "
    "M < N - 1]",
)
@click.option("--seeds", type=FEW, default=5, help="Number of seeds, from 0 on.")
@click.option("--jobs", type=FEW, default=1, help="Runs at once, on a core each.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the runs, frontier.json and a picture.  [default: runs/study-NAME]",
)
def study(
    data: str | None,
    data_dir: Path | None,
    workload: str | None,
    epochs: int | None,
    stages: Sequence[int] | None,
    microbatches: Sequence[str],
    methods: Sequence[str],
    optimizer: str | None,
    lr_schedule: str | None,
    lr: float | None,
    clip_norm: float | None,
    updates: int | None,
    length: float | None,
    seeds: int,
    jobs: int,
    out: Path | None,
) -> None:
    """Find how well methods train at every depth and delay, against synchronous training.

    Runs have no pipeline: `studies.delayed` gives its numbers with far fewer calls.
    """
    require_matplotlib()
    require("scipy", "confidence intervals come from SciPy", REMEDY)
    label = workload.rpartition(":")[2] if workload else data or _DATA
    folder = out or Path("runs") / f"study-{label}"
    console = plain_console()
    with command_errors():
        work = _work(data, workload, epochs, updates)
        changes = {"optimizer": optimizer, "lr_schedule": lr_schedule, "clip_norm": clip_norm}
        work = _otherwise(work, **changes, lr=lr)
        wanted = dict.fromkeys(("sync", *(methods or work.contenders)))
        with own_failures(*wanted, *([workload] if workload else [])):
            cells = cells_of(
                work,
                data_dir,
                stages or work.stages,
                microbatches or work.microbatches,
                tuple(wanted),
                length,
            )
            make = maker_in(cells[0].settings, folder)
            # once per number of stages: some cells cannot work with every optimizer
            prepared = ((c.settings.stages, prepare(c, c.settings.lr, 0, make)) for c in cells)
            examples = {n: example for n, (example, _) in prepared}
            sizes = {
                n: [sum(p.numel() for p in stage.parameters()) for stage in stages_in(example, n)]
                for n, example in examples.items()
            }
        folder.mkdir(parents=True, exist_ok=True)
    name = next(iter(examples.values())).name
    del examples
    began = time.monotonic()
    found = {}
    for cell, best in search_all(folder, cells, range(seeds), work.judges, jobs=jobs):
        found[cell] = best
        console.print(
            f"{len(found)}/{len(cells)} {cell.contender}, {cell.settings.stages} stages, "
            f"M = {cell.microbatches}: lr {best:.3g}, {time.monotonic() - began:.0f} s"
        )
    rows = rows_of(folder, found, range(seeds), make)
    asked = {
        **({"workload": workload} if workload else {"data": data or _DATA}),
        **({"epochs": epochs or _EPOCHS} if workload and updates is None else {}),
        "stages": ",".join(map(str, sizes)),
        "microbatches": ",".join(microbatches or work.microbatches),
        "method": ",".join(wanted),
        "optimizer": optimizer,
        "lr-schedule": lr_schedule,
        "lr": lr,
        "clip-norm": clip_norm,
        "updates": updates,
        "length": length,
        "seeds": seeds,
    }
    options = [f"--{name} {value}" for name, value in asked.items() if value is not None]
    about: dict[str, Any] = {
        "command": " ".join(["python -m studies study", *options]),
        "data": workload or data or _DATA,
        "seeds": seeds,
        "updates": cells[0].updates,
        "settings": dict(work.settings),
        "parameters": sizes,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": cpu_name(),
        "versions": versions(),
    }
    write_rows(folder / "frontier.json", map(asdict, rows), about)
    draw_gaps(folder / "gaps.png", rows, f"{name}, {seeds} seeds")
    console.print(frontier_table(rows))
    console.print(f"numbers and picture: {folder}", soft_wrap=True)


def _work(data: str | None, workload: str | None, epochs: int | None, updates: int | None) -> Study:
    if workload is None:
        if epochs is not None:
            raise OptionError("epochs", "is of --workload; a study of --data has its own length")
        work = STUDIES[data or _DATA]
    elif data is not None:
        raise OptionError("data", "is of the built-in workloads, and --workload has another")
    elif epochs is not None and updates is not None:
        raise OptionError("updates", "expected --epochs or --updates, not both")
    else:
        with own_failures(workload):
            work = own_study(workload, epochs or _EPOCHS)
    return work._replace(updates=updates or work.updates)


def _otherwise(work: Study, **chosen: str | float | None) -> Study:
    settings = {name: value for name, value in chosen.items() if value is not None}
    if "workload" in work.settings and "lr_schedule" in settings:
        raise OptionError("lr-schedule", "is of --data; the function of --workload makes its own")
    if "optimizer" in settings and not work.judges:
        raise OptionError(
            "optimizer", "is of studies that seek learning rates; this one has its own"
        )
    judges = 0 if "lr" in settings else work.judges
    return work._replace(settings={**work.settings, **settings}, judges=judges)
