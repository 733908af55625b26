"""Study: how well methods train at every depth and delay, each at its own best learning rate.

One JSON file per run, so that a study goes on where it stopped, and grows by asking for more.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import nn

from spectrain_ext.files import read_json, replace_file
from spectrain_ext.method import Method, find_method, second_order
from spectrain_ext.method.formulas import delay, none, rest_of_delay
from spectrain_ext.schedule import Law

from .data.batches import training_batches
from .data.split import Split
from .lockstep import Lockstep
from .settings import TrainSettings, microbatches_in
from .workload import build_stages, load_data, make_optimizer, make_scheduler, mean_loss

_LARGEST = 1 << 24  # bytes of a run
_POINTS = 20  # of a curve, per length of a synchronous run
_TEST_BATCH = 256


class Contender(NamedTuple):
    """A method with what it has otherwise than the workload: fields of ``TrainSettings``."""

    method: Method
    changes: Mapping[str, Any] = {}


def contender(name: str) -> Contender:
    """A method by its name, or another that is only compared with.

    Raises:
        ValueError: there is none of that name.
    """
    if name in _EXTRA:
        return _EXTRA[name]
    return Contender(find_method(name))


def _uniform(law: Law, lead: int = 0) -> Method:
    """Every stage predicts as far as stage 0 has to, and the backward reuses that."""
    return Method(
        f"uniform-{law}",
        "",
        law=law,
        forward_horizon=lambda place: delay(place) + rest_of_delay(place),
        lead=lambda place: lead,
        backward="stash",
    )


_NESTEROV = {"optimizer": "nadam", "betas": (0.99, 0.999)}
_SLOW = {"betas": (0.95, 0.999)}
_EXTRA = {
    "sync-nadam": Contender(find_method("sync"), {"optimizer": "nadam"}),
    "sync-nesterov": Contender(find_method("sync"), {"nesterov": True}),
    "sync-b95": Contender(find_method("sync"), _SLOW),
    "nesterov-async": Contender(find_method("pipedream"), _NESTEROV),
    "uniform-linear": Contender(_uniform("linear")),
    "uniform-second": Contender(_uniform("second-order")),
    "uniform-second-lead1": Contender(_uniform("second-order", 1)),
    "second-order-even": Contender(second_order()),
    "second-order-even-b95": Contender(second_order(), _SLOW),
    "uniform-difference": Contender(_uniform("difference")),
    "second-order-lead0": Contender(second_order(lead=none)),
    "second-order-b95": Contender(find_method("second-order"), _SLOW),
    "uniform-linear-b95": Contender(_uniform("linear"), _SLOW),
    "spectrain-stash-b95": Contender(find_method("spectrain-stash"), _SLOW),
}


@dataclass(frozen=True)
class Cell:
    """One contender at one depth and number of microbatches.

    ``length`` is in synchronous runs, each of ``updates`` updates.
    """

    contender: str
    settings: TrainSettings
    updates: int
    length: float

    def with_rate(self, lr: float) -> TrainSettings:
        return dataclasses.replace(self.settings, **contender(self.contender).changes, lr=lr)


@dataclass(frozen=True)
class Curve:
    """A run: (updates, test loss, test accuracy) from time to time, and the seconds it took."""

    points: tuple[tuple[int, float, float], ...]
    seconds: float

    @property
    def loss(self) -> float:
        """At the end."""
        return self.points[-1][1]


def train(cell: Cell, lr: float, seed: int, data: Split) -> Curve:
    """Train one cell with one learning rate and seed."""
    settings = cell.with_rate(lr)
    torch.manual_seed(seed)
    method = contender(cell.contender).method
    lock = Lockstep(
        build_stages(settings, settings.stages, seed, data),
        partial(make_optimizer, settings, method),
        mean_loss,
        method,
        scheduler=make_scheduler(settings, cell.updates),
        microbatches=microbatches_in(method, settings),
        clip_norm=settings.clip_norm,
    )
    batches = training_batches(
        data,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        seed=seed,
        augmented=settings.augment,
    )
    total = round(cell.updates * cell.length)
    every = max(1, cell.updates // _POINTS)
    points = []
    began = time.perf_counter()
    for update, (value, target) in enumerate(islice(batches, total), start=1):
        if not math.isfinite(lock.train_on(value, target)):
            points.append((update, math.inf, 0.0))
            break
        if update % every == 0 or update == total:
            with lock.true_weights() as model:
                points.append((update, *_test(model, data)))
    return Curve(tuple(points), time.perf_counter() - began)


def _test(model: nn.Module, data: Split) -> tuple[float, float]:
    loss, correct = 0.0, 0
    for value, target in zip(
        data.test_inputs.split(_TEST_BATCH), data.test_targets.split(_TEST_BATCH), strict=True
    ):
        output = model(data.prepare(value))
        loss += mean_loss(output, target).item() * target.numel()
        correct += int((output.argmax(dim=-1) == target).sum())
    count = data.test_targets.numel()
    loss /= count
    return (loss if math.isfinite(loss) else math.inf), correct / count


class Curves:
    """The finished runs of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, cell: Cell, lr: float, seed: int) -> tuple[Path, dict[str, Any]]:
        settings = dataclasses.asdict(cell.with_rate(lr))
        for name in ("data_dir", "methods", "seeds", "devices", "epochs", "threads"):
            del settings[name]
        asked = {
            "contender": cell.contender,
            "updates": cell.updates,
            "length": cell.length,
            "seed": seed,
            "settings": settings,
        }
        asked = json.loads(json.dumps(asked, sort_keys=True))
        key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]
        s = cell.settings
        where = f"{s.data}-N{s.stages}-M{s.microbatches}"
        return self._folder / where / f"{cell.contender}-lr{lr:g}-seed{seed}-{key}.json", asked

    def find(self, cell: Cell, lr: float, seed: int) -> Curve | None:
        """The finished run, None if there is none, or its file is not what was written."""
        path, asked = self._path(cell, lr, seed)
        try:
            document = read_json(path, _LARGEST)
            if {key: document.get(key) for key in asked} != asked:
                return None
            points = tuple((int(u), float(loss), float(a)) for u, loss, a in document["points"])
            return Curve(points, float(document["seconds"])) if points else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def save(self, cell: Cell, lr: float, seed: int, curve: Curve) -> None:
        """Write a finished run."""
        path, asked = self._path(cell, lr, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        points = [(u, loss if math.isfinite(loss) else "inf", a) for u, loss, a in curve.points]
        text = json.dumps({**asked, "points": points, "seconds": curve.seconds}, allow_nan=False)
        replace_file(path, f"{text}\n".encode())


@lru_cache(maxsize=1)
def _data(settings: TrainSettings, cache: Path) -> Split:
    return load_data(settings, cache)


def _one(folder: Path, cell: Cell, lr: float, seed: int) -> Curve:
    curves = Curves(folder)
    found = curves.find(cell, lr, seed)
    if found is None:
        torch.set_num_threads(1)
        s = cell.settings
        data = _data(
            dataclasses.replace(s, stages=2, devices=(), methods=(), microbatches=1, depth=None),
            folder / "data-cache",
        )
        found = train(cell, lr, seed, data)
        curves.save(cell, lr, seed, found)
    return found


def search(folder: Path, cell: Cell, start: float, seeds: Sequence[int], first: int) -> float:
    """The learning rate with the least loss, among ``start`` times powers of two, and its runs.

    It goes downhill from the start until both neighbours are worse, judged by the first seeds, and
    then trains the others at the best.
    """

    @cache
    def judged(power: int) -> float:
        return fmean(_one(folder, cell, start * 2.0**power, s).loss for s in seeds[:first])

    best = 0
    while True:
        better = min((best, best + 1, best - 1), key=judged)
        if better == best or abs(better) > 6:
            break
        best = better
    for seed in seeds:
        _one(folder, cell, start * 2.0**best, seed)
    return start * 2.0**best


def search_all(
    folder: Path, cells: Iterable[Cell], seeds: Sequence[int], *, first: int = 2, jobs: int = 1
) -> Iterator[tuple[Cell, float]]:
    """Search every cell, several at a time in processes of their own; yields each when it is done.

    A cell's start is its settings' learning rate.
    """
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        todo = {pool.submit(search, folder, c, c.settings.lr, seeds, first): c for c in cells}
        for done in as_completed(todo):
            yield todo[done], done.result()
