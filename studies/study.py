"""Trains methods at every depth and delay, at each one's best learning rate or a common one.

Each run is one JSON file, so that a study can resume after an interruption and grow with new
options.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import torch

from spectrain_ext.files import read_json
from spectrain_ext.method import check, find_method, phases_of
from spectrain_ext.passes.codecs import NAMES
from spectrain_ext.schedule import flushes

from .builtin import maker_of
from .contenders import Study, contender
from .delayed import Delayed, Replicated
from .options import OptionError
from .results import RunFile, as_json
from .settings import TrainSettings, microbatches_in, settle
from .workload import (
    Maker,
    Workload,
    epochs_of,
    own,
    source_of_method,
    source_of_workload,
    stages_in,
    start_rate,
    tested,
)

_POINTS = 20  # points of a curve per synchronous run
_SMOOTHED = 4  # points that are averaged
_ENDLESS = 1000  # upper bound of epochs; the cell sets the length of a run


@dataclass(frozen=True)
class Cell:
    """One contender with one number of stages and of microbatches."""

    contender: str
    settings: TrainSettings
    updates: int  # of a synchronous run
    length: float  # of a run, in synchronous ones

    @property
    def total(self) -> int:
        return round(self.updates * self.length)

    @property
    def microbatches(self) -> int:
        assert self.settings.microbatches != "auto"
        return self.settings.microbatches

    @property
    def decays(self) -> bool:
        """Whether rates fall to 0 at the end of a run, so that only the end is comparable."""
        return self.settings.lr_schedule == "cosine"

    def with_rate(self, lr: float) -> TrainSettings:
        changes = contender(self.contender).changes
        return replace(self.settings, **changes, lr=lr, updates=self.total)


def cells_of(
    work: Study,
    data_dir: Path | None,
    stages: Iterable[int],
    microbatches: Iterable[str],
    contenders: Sequence[str],
    length: float | None = None,
) -> list[Cell]:
    """Return a cell per contender, number of stages and of microbatches for which it is defined."""
    found: dict[tuple[str, int, int], Cell] = {}
    why = ValueError("contenders: expected at least one")
    for n in stages:
        usual = dict(work.settings)
        if "workload" not in usual:
            usual = {"lr_schedule": "constant", "epochs": _ENDLESS, **usual}
            if usual["data"] == "text":
                usual.setdefault("depth", max(1, n - 2))  # one block per stage
        for text in microbatches:
            m = _microbatches(text, n)
            for name in contenders:
                chosen = contender(name)
                if "workload" in usual and not chosen.changes.keys() <= {"microbatches"}:
                    raise OptionError(
                        "method", f"{name} changes the optimizer, which is --workload's own"
                    )
                method, changes, replicas = chosen.method, chosen.changes, chosen.replicas
                flushing = all(flushes(phase.schedule) for phase in phases_of(method))
                parts = changes.get("microbatches", 1 if flushing else m)
                asked = {**usual, "data_dir": data_dir, "stages": n, "microbatches": parts}
                settings = settle({**asked, "methods": ["sync"]})
                try:
                    check(method, n, microbatches=parts // replicas)
                except ValueError as error:
                    why = error
                    continue
                cell = Cell(name, settings, work.updates, 1.0)
                longer = 1.5 if work.judges and n - 1 > parts and not cell.decays else 1.0
                if not flushing:
                    cell = replace(cell, length=longer if length is None else length)
                found[name, n, parts] = cell
    if not found:
        raise why
    return list(found.values())


def _microbatches(text: str, stages: int) -> int:
    if text in ("N", "2N"):
        return stages * len(text)
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise OptionError("microbatches", f"expected a number of at least 1, N or 2N, got {text!r}")
    return int(text)


@dataclass(frozen=True)
class Curve:
    """The (updates, test loss, test accuracy) points of a run, and its duration in seconds."""

    points: tuple[tuple[int, float, float], ...]
    seconds: float
    clipped: float = 0.0  # share of a stage's updates whose gradient was clipped

    @property
    def loss(self) -> float:
        return self.points[-1][1]

    @classmethod
    def of_json(cls, run: dict[str, Any]) -> Self:
        points = tuple((int(u), float(loss), float(a)) for u, loss, a in run["points"])
        return cls(points, float(run["seconds"]), float(run["clipped"]))

    def to_json(self) -> dict[str, Any]:
        points = [(u, as_json(loss), as_json(a)) for u, loss, a in self.points]
        return {"points": points, "seconds": self.seconds, "clipped": self.clipped}


def smoothed(curve: Curve) -> Curve:
    """Return trailing means: at a constant rate, noise alone moves two tests by 1 %."""
    points = []
    for end in range(1, len(curve.points) + 1):
        last = curve.points[max(0, end - _SMOOTHED) : end]
        loss, accuracy = (fmean(point[i] for point in last) for i in (1, 2))
        points.append((last[-1][0], loss, accuracy))
    return replace(curve, points=tuple(points))


def judged(cell: Cell, curve: Curve) -> Curve:
    """Return the tests that a run is judged by, smoothed if the rate is constant."""
    return curve if cell.decays else smoothed(curve)


def prepare(cell: Cell, lr: float, seed: int, make: Maker) -> tuple[Workload, list[Delayed]]:
    """Return what a run of a cell trains and its optimizers, by replica."""
    settings = cell.with_rate(lr)
    torch.manual_seed(seed)
    asked = contender(cell.contender)
    method, replicas = asked.over(cell.updates), asked.replicas
    parts = microbatches_in(method, settings) // replicas
    workloads = [make(settings, method, settings.stages, seed) for _ in range(replicas)]
    norm = settings.clip_norm
    if norm is not None and asked.clip == "share":
        norm /= math.sqrt(settings.stages)
    trained = [
        Delayed(
            stages_in(workload, settings.stages),
            workload.optimizer,
            workload.loss,
            method,
            scheduler=workload.scheduler,
            delay=settings.stages - 1 if asked.uniform else None,
            microbatches=parts,
            clip_norm=norm,
            clip_all=asked.clip == "all",
            codec=None if settings.codec is None else NAMES[settings.codec],
        )
        for workload in workloads
    ]
    return workloads[0], trained


def train(cell: Cell, lr: float, seed: int, make: Maker) -> Curve:
    workload, replicas = prepare(cell, lr, seed, make)
    training: Delayed | Replicated = replicas[0]
    averaging = contender(cell.contender).averaging
    if averaging is not None:
        training = Replicated(replicas, averaging, cell.microbatches)
    due = [update * _POINTS // cell.updates for update in range(cell.total + 1)]
    points = []
    began = time.perf_counter()
    batches = islice(epochs_of(workload.train, _ENDLESS), cell.total)
    for update, (value, target) in enumerate(batches, start=1):
        if not math.isfinite(training.train_on(value, target)):
            points.append((update, math.inf, 0.0))
            break
        if due[update] > due[update - 1] or update == cell.total:
            with training.true_weights() as model:
                accuracy, loss = tested(model, workload.test, workload.loss)
            points.append((update, loss if math.isfinite(loss) else math.inf, accuracy))
    seconds, clipped = time.perf_counter() - began, fmean(each.clipped for each in replicas)
    return Curve(tuple(points), seconds, clipped)


def run_file(folder: Path, cell: Cell, lr: float, seed: int) -> RunFile[Curve]:
    settings = dataclasses.asdict(cell.with_rate(lr))
    for name in ("data_dir", "methods", "seeds", "devices", "epochs", "threads", "updates"):
        del settings[name]
    about = {
        "contender": cell.contender,
        "updates": cell.updates,
        "length": cell.length,
        "seed": seed,
        "settings": settings,
        **source_of_method(cell.contender),
    }
    s = cell.settings
    if s.workload is not None:
        about |= source_of_workload(s.workload)
    below = folder / f"{s.data or 'own'}-N{s.stages}-M{s.microbatches}"
    name = f"{cell.contender.replace(':', '.')}-lr{lr:g}-seed{seed}"
    return RunFile(below, name, about, Curve)


def runs_of(folder: Path, cell: Cell, lr: float, seeds: Iterable[int]) -> dict[int, Curve]:
    """Return the finished runs, with the tests that they are judged by, by seed."""
    read = {seed: run_file(folder, cell, lr, seed).read() for seed in seeds}
    return {seed: judged(cell, curve) for seed, curve in read.items() if curve is not None}


def rates_tried(folder: Path, cell: Cell) -> dict[float, dict[int, Curve]]:
    """Return the finished runs of a cell at every rate, by rate and seed."""
    of_cell = run_file(folder, cell, 1.0, 0).path
    found: dict[float, dict[int, Curve]] = {}
    for path in of_cell.parent.glob(f"{of_cell.name.partition('-lr1-')[0]}-lr*.json"):
        about = read_json(path, 1 << 24)["settings"]
        lr, seed = float(about["settings"]["lr"]), int(about["seed"])
        if run_file(folder, cell, lr, seed).path == path:
            found.setdefault(lr, {}).update(runs_of(folder, cell, lr, [seed]))
    return dict(sorted(found.items()))


_loaded = lru_cache(maxsize=1)(maker_of)


def maker_in(settings: TrainSettings, folder: Path) -> Maker:
    """Return the factory of a cell's workloads; decoded images are cached below the folder."""
    # equal for all cells, so that a process reads the data once
    alike = {"stages": 2, "devices": (), "methods": (), "microbatches": 1, "depth": None, "lr": 0.0}
    return _loaded(replace(settings, **alike), folder / "data-cache")  # type: ignore[arg-type]


def own_study(workload: str, epochs: int) -> Study:
    if start_rate(workload) is None:
        raise OptionError(
            "workload",
            f"{workload}: expected a parameter 'lr' with a default: the best rate is sought from "
            "there on",
        )
    asked = {"workload": workload, "epochs": epochs}
    settings = settle({**asked, "stages": 1, "methods": ["sync"]})
    first = own(settings, find_method("sync"), 1, 0)
    return Study(asked, epochs * len(first.train), stages=(4,))


def run_one(folder: Path, cell: Cell, lr: float, seed: int) -> Curve:
    """Return the run of a cell with this rate and seed; train it if the folder does not have it."""
    file = run_file(folder, cell, lr, seed)
    found = file.read()
    if found is None:
        torch.set_num_threads(1)
        found = train(cell, lr, seed, maker_in(cell.settings, folder))
        file.write(found)
    return found


def search(
    folder: Path,
    cell: Cell,
    start: float,
    seeds: Sequence[int],
    first: int,
    *,
    reach: int = 2,
) -> float:
    """Return the learning rate with the lowest loss, among ``start`` times powers of two.

    The search descends from the start until ``reach`` rates on either side are worse, judged by the
    ``first`` seeds, and then trains the other seeds at the best rate. Without judging seeds the
    start is the result. With only one neighbour on either side the search missed lower losses of
    ``vanilla`` and ``pipemare-t2`` (digits, eight stages): the loss has several minima over the
    rate.
    """

    def rate(power: float) -> float:
        return start * math.pow(2.0, power)

    @cache
    def loss(power: float) -> float:
        runs = (run_one(folder, cell, rate(power), seed) for seed in seeds[:first])
        return fmean(judged(cell, run).loss for run in runs)

    best = 0.0
    while first:
        beside = (best + d for far in range(1, reach + 1) for d in (far, -far))
        better = min((best, *beside), key=loss)
        if better == best or abs(better) > 6:
            break
        best = better
    for seed in seeds:
        run_one(folder, cell, rate(best), seed)
    return rate(best)


def search_all(
    folder: Path,
    cells: Sequence[Cell],
    seeds: Sequence[int],
    first: int,
    *,
    jobs: int = 1,
) -> Iterator[tuple[Cell, float]]:
    """Search every cell in ``jobs`` processes of one thread; yield each result when done."""
    if jobs == 1:
        for cell in cells:
            yield cell, search(folder, cell, cell.settings.lr, seeds, first)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        todo = {pool.submit(search, folder, c, c.settings.lr, seeds, first): c for c in cells}
        for done in as_completed(todo):
            yield todo[done], done.result()
