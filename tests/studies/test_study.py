"""Tests studies: each contender's learning rate is found, runs resume, and seeds are compared."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from helpers.cli_programs import called

from spectrain_ext import optim
from spectrain_ext.method import find_method
from spectrain_ext.schedule import Place
from studies import contenders, slow_links, study
from studies.__main__ import main
from studies.frontier import Interval, rows_of, write_rows
from studies.slow_links import Way, best_of, chains_of, search_chain, seconds_per_step
from studies.study import Cell, Curve, cells_of, run_file, search, smoothed
from studies.workload import stages_in

SMALL = contenders.Study(
    {"data": "digits", "batch_size": 64, "warmup": 0, "lr": 0.05, "width": 16}, 20
)


Loss = Callable[[Cell, float, int], float]
Recorded = list[tuple[Cell, float, int]]
Training = Callable[[Loss], Recorded]


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    """Return a function that replaces training by a loss of cell, rate and seed, and records it."""
    monkeypatch.setitem(contenders.STUDIES, "digits", SMALL)

    def replaced(loss: Loss) -> Recorded:
        asked: Recorded = []

        def train(cell: Cell, lr: float, seed: int, make: object) -> Curve:
            asked.append((cell, lr, seed))
            return Curve(((cell.total, loss(cell, lr, seed), 0.5),), 1.0)

        monkeypatch.setattr(study, "train", train)
        return asked

    return replaced


def _cells(*names: str, microbatches: tuple[str, ...] = ("1", "N"), **changed: int) -> list[Cell]:
    return cells_of(SMALL._replace(**changed), None, [3], microbatches, names)


def _write(folder: Path, cell: Cell, lr: float, seed: int, losses: Iterable[float]) -> None:
    """Write a run that is tested after every update."""
    points = tuple((u, loss, 0.5) for u, loss in enumerate(losses, 1))
    assert len(points) == cell.total
    run_file(folder, cell, lr, seed).write(Curve(points, 1.0))


def test_every_contender_where_it_is_defined() -> None:
    cells = _cells("sync", "auto", "pipedream-2bw", "nesterov-async")
    found = [(c.contender, c.settings.microbatches, c.length) for c in cells]
    assert found == [
        *(("sync", 1, 1.0), ("auto", 1, 1.5), ("nesterov-async", 1, 1.5)),
        *(("auto", 3, 1.0), ("pipedream-2bw", 3, 1.0), ("nesterov-async", 3, 1.0)),
    ]
    assert cells[2].with_rate(0.5).optimizer == "nadam"
    assert [c.settings.microbatches for c in _cells("auto", microbatches=("2N",))] == [6]
    with pytest.raises(ValueError, match="there is no 'nope'"):
        _cells("nope")
    with pytest.raises(ValueError, match="at least 3 microbatches for 3 stages, got 1"):
        _cells("pipedream-2bw", microbatches=("1",))


@pytest.mark.parametrize(("best", "runs"), [(0.05, 12), (0.2, 16), (0.025, 14), (0.0125, 16)])
def test_the_rate_is_sought_downhill_and_over_a_hill(
    training: Training, tmp_path: Path, best: float, runs: int
) -> None:
    def loss(cell: Cell, lr: float, seed: int) -> float:
        hill = 1.0 * (best == 0.0125 and lr == 0.025)  # of a delayed method on digits
        return math.inf if lr > 0.5 else abs(math.log(lr / best)) + 0.01 * seed + hill

    asked = training(loss)
    (cell,) = _cells("vanilla", microbatches=("1",))
    assert search(tmp_path, cell, 0.05, range(4), first=2) == pytest.approx(best)
    assert len(asked) == len(set(asked)) == runs  # two seeds for each rate, four for the best
    assert {seed for _, lr, seed in asked if lr == pytest.approx(best)} == {0, 1, 2, 3}
    assert search(tmp_path, cell, 0.05, range(4), first=2) == pytest.approx(best)
    assert len(asked) == runs, "finished runs are read"
    search(tmp_path, cell, 0.05, range(5), first=2)
    assert asked[runs:] == [(cell, pytest.approx(best), 4)]


def test_without_judges_all_have_the_settings_rate(training: Training, tmp_path: Path) -> None:
    asked = training(lambda cell, lr, seed: 1.0 / lr)
    names = {"sync": 1, "data-parallel-4": 4, "vanilla": 1, "auto-4": 4}
    cells = _cells(*names, microbatches=("1",), judges=0)
    assert [cell.length for cell in cells] == [1.0] * 4, "no longer than synchronous training"
    assert {rate for _, rate in study.search_all(tmp_path, cells, range(2), 0)} == {0.05}
    found = [(c.contender, c.with_rate(lr).microbatches, lr, seed) for c, lr, seed in asked]
    assert found == [(name, m, 0.05, seed) for name, m in names.items() for seed in (0, 1)]
    folders = {path.parent.name for path in tmp_path.glob("*/*.json")}
    assert folders == {"digits-N3-M1", "digits-N3-M4"}


def test_decaying_rates_end_where_a_run_ends(tmp_path: Path) -> None:
    decaying = SMALL._replace(settings={**SMALL.settings, "lr_schedule": "cosine"})
    assert [cell.length for cell in cells_of(decaying, None, [3], ["1"], ("auto",))] == [1.0]
    cells = cells_of(decaying, None, [3], ["1"], ("sync", "auto"), 1.5)
    assert [cell.total for cell in cells] == [20, 30]
    make = study.maker_in(cells[0].settings, tmp_path)
    for cell, loss in zip(cells, (2.0, 1.0), strict=True):
        scheduler = make(cell.with_rate(0.1), find_method("sync"), 3, 0).scheduler
        assert scheduler is not None
        (factor,) = scheduler(optim.SGD([torch.zeros(1)], 0.1)).lr_lambdas
        assert factor(cell.total) == pytest.approx(0.0)
        _write(tmp_path, cell, 0.1, 0, [*[5.0] * (cell.total - 1), loss])
    first, second = rows_of(tmp_path, dict.fromkeys(cells, 0.1), [0], make)
    assert (first.losses, second.losses) == ((2.0,), (1.0,)), "the last test's alone"
    assert set(first.updates.values()) == set(second.updates.values()) == {None}


@pytest.mark.parametrize("updates", [7, 45])
def test_runs_are_tested_where_synchronous_ones_end(updates: int) -> None:
    sync, late = _cells("sync", "vanilla", microbatches=("1",), updates=updates)
    make = study.maker_in(sync.settings, Path())
    tested = [[u for u, _, _ in study.train(c, 0.01, 0, make).points] for c in (sync, late)]
    assert len(tested[0]) == min(20, updates) and tested[0][-1] == updates
    assert tested[1][: len(tested[0])] == tested[0]
    assert tested[1][-1] == round(1.5 * updates)


def test_hybrids_change_and_rates_rise_by_shares_of_the_updates() -> None:
    sync, hybrid, mare = _cells("sync", "hybrid-pipedream", "pipemare-all", microbatches=("1",))
    for cell, share in ((hybrid, 0.5), (mare, 0.1)):
        made = contenders.contender(cell.contender).over(cell.updates)
        assert made.then is not None
        assert made.then.after == round(share * cell.updates)
        assert cell.length > sync.length
    rates = made.then.method.rates
    assert rates is not None and made.rates is None, "only the asynchronous phase has T1"
    assert rates(Place(0, 4, 4), 0) == 1 / 3
    # PipeMare's lr/D^(1 - min(t/T, 1)), here over half of a synchronous run
    rates = contenders.contender("pipemare-t1").over(20).rates
    assert rates is not None
    found = [rates(Place(0, 8, 5), t) for t in range(15)]
    assert found == pytest.approx([4.0 ** -(1 - min(t / 10, 1)) for t in range(15)])
    assert contenders.contender("sync").over(20) is find_method("sync")


def test_rows_compare_by_seed(tmp_path: Path) -> None:
    cells = _cells("sync", "vanilla", microbatches=("1",))
    for seed in (0, 1):
        _write(tmp_path, cells[0], 0.1, seed, (4.0 - u / 10 + seed for u in range(1, 21)))
        _write(tmp_path, cells[1], 0.2, seed, (4.0 - u / 15 + seed for u in range(1, 31)))
    data = study.maker_in(cells[0].settings, tmp_path)
    first, second = rows_of(tmp_path, {cells[0]: 0.1, cells[1]: 0.2}, range(2), data)
    assert (first.contender, first.delay, first.gap) == ("sync", 0, Interval(0.0, 0.0, 0.0))
    assert first.updates == pytest.approx({0.5: 1.0, 0.75: 1.0, 1.0: 1.0})
    assert (second.contender, second.delay, second.lr) == ("vanilla", 2, 0.2)
    # means of the last four tests: 1.5 updates later for both
    assert first.losses == pytest.approx((2.15, 3.15))
    assert second.losses == pytest.approx((4.0 - 18.5 / 15, 5.0 - 18.5 / 15))
    assert second.updates[0.5] == pytest.approx((1.5 * 8.5 + 1.5) / 10)
    assert second.gap.mean == pytest.approx((2.76667 / 2.15 + 3.76667 / 3.15) / 2 - 1, rel=1e-4)
    assert second.gap.low < second.gap.mean < second.gap.high
    assert first.time > second.time, "a flush has its bubble"
    _write(tmp_path, cells[1], 0.3, 0, (9.0 for _ in range(1, 31)))
    _, second = rows_of(tmp_path, {cells[0]: 0.1, cells[1]: 0.2}, [1], data)
    assert second.tests == tuple(range(1, 31)) and len(second.curves) == 1
    assert second.rates == {
        "0.2": {"0": pytest.approx(4.0 - 28.5 / 15), "1": pytest.approx(5.0 - 28.5 / 15)},
        "0.3": {"0": 9.0},
    }
    write_rows(tmp_path / "f.json", map(asdict, [first, second]), {"data": "digits"})
    document = json.loads((tmp_path / "f.json").read_text())
    assert document["rows"][1]["updates"]["1.0"] == pytest.approx(second.updates[1.0])


def test_one_seed_has_no_interval_and_a_diverged_run_no_gap() -> None:
    assert Interval.of([0.5]) == Interval(0.5, -math.inf, math.inf)
    assert Interval.of([0.5, math.inf]).mean == math.inf
    assert Interval.of([1.0, 1.0, 4.0]).low == pytest.approx(2.0 - 4.303 * math.sqrt(1.0), abs=1e-3)
    assert smoothed(Curve(((1, 4.0, 0.0), (2, 2.0, 1.0)), 0.0)).points[-1] == (2, 3.0, 0.5)


def test_the_command_trains_otherwise(training: Training, tmp_path: Path) -> None:
    asked = training(lambda cell, lr, seed: 1.0 + abs(math.log(lr / 0.07)))
    otherwise = "--optimizer adamw --lr-schedule cosine --updates 10 --length 1.5"
    options = ["--stages", 3, "--microbatches", 1, "-m", "auto,auto-rotation", "--seeds", 1]
    done = called(main, "study", *options, *otherwise.split(), "--out", tmp_path)
    assert done.exit_code == 0, done.output
    settings = [cell.with_rate(lr) for cell, lr, _ in asked]
    trained = [(s.optimizer, s.lr_schedule, s.updates) for s in settings]
    names = [cell.contender for cell, _, _ in asked]
    assert set(zip(names, trained, strict=True)) == {
        ("sync", ("adamw", "cosine", 10)),
        ("auto", ("adamw", "cosine", 15)),
        ("auto-rotation", ("basis-rotation", "cosine", 15)),
    }
    document = json.loads((tmp_path / "frontier.json").read_text())
    assert f" {otherwise} --seeds 1" in document["command"]
    assert document["settings"]["optimizer"] == "adamw"
    asked.clear()
    otherwise = "--lr-schedule cosine --lr 0.3 --clip-norm 0.5"
    options = ["--stages", 3, "--microbatches", 1, "-m", "auto", "--seeds", 2]
    done = called(main, "study", *options, *otherwise.split(), "--out", tmp_path / "one")
    assert done.exit_code == 0, done.output
    trained = [(cell.contender, lr, seed, cell.settings.clip_norm) for cell, lr, seed in asked]
    assert trained == [(name, 0.3, seed, 0.5) for name in ("sync", "auto") for seed in (0, 1)]
    assert {round(row["lr"], 3) for row in document["rows"]} == {0.05}


@pytest.mark.parametrize(("name", "optimizer"), [("auto", "muon"), ("auto-rotation", "sgd")])
def test_hidden_matrices_are_muons_or_rotated(name: str, optimizer: str) -> None:
    (cell,) = _cells(name, microbatches=("N",))
    cell = replace(cell, settings=replace(cell.settings, optimizer=optimizer, betas=(0.8, 0.9)))
    make = study.maker_in(cell.settings, Path())
    settings, method = cell.with_rate(0.01), contenders.contender(name).method
    workload = make(settings, method, 3, 0)
    stages = stages_in(workload, 3)
    hidden = {p for p in stages[1].parameters() if p.dim() == 2}
    made = workload.optimizer(list(stages[1].parameters()))
    assert isinstance(made, optim.SOAP if name.endswith("rotation") else optim.Muon)
    assert {p for p in made.param_groups[0]["params"]} == hidden
    if optimizer == "muon":
        assert made.param_groups[1]["betas"] == (0.8, 0.9)
    curve = study.train(cell, 0.01, 0, make)
    assert curve.points[-1][0] == 20
    assert curve.loss < curve.points[0][1]


# The slow-link study

#: Updates to the goal relative to synchronous training; a run ends after 1.5.
NEEDED = {"sync": 1.0, "auto": 1.0, "pipedream-2bw": 1.25, "vanilla": 1.7}
CODED = {"bfloat16": 1.0, "int8": 1.0, "int4-hadamard": 1.1}


def falling(cell: Cell, lr: float, seed: int, make: object) -> Curve:
    """A linearly falling loss; 4 % faster with the best rate than with one a factor of two away."""
    away = abs(math.log2(lr / cell.settings.lr / 2))
    slower = NEEDED[cell.contender] * CODED[str(cell.settings.codec)] + 0.04 * away
    slower *= 1.0 if cell.settings.rank is None else 2.0
    points = [(u, 4.0 - u / (120 * slower), 0.5) for u in range(15, 361, 15)]
    return Curve(tuple(points), 1.0)


def test_what_reaches_the_loss_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "train", falling)
    monkeypatch.setattr(study, "maker_in", lambda settings, folder: None)
    shown = {"1f1b": (8, 64), "zb-h1": (8,), "pipedream-2bw": (8,), "auto": (8, 32)}
    monkeypatch.setattr(slow_links, "SHOWN", {**shown, "vanilla": (8,)})
    data = tmp_path / "text.txt"
    data.write_text("text")
    found: dict[Way, float] = {}
    for ways in chains_of("muon"):
        found |= search_chain(tmp_path, data, ways)
    assert set(found.values()) == {0.05}, "twice the setting's own"
    for way in found:
        study.run_one(tmp_path, way.cell(data), 0.05, 1)
    rows = slow_links.rows_of(tmp_path, data, found, 2)
    by = {(row.method, row.microbatches, row.way.name): row for row in rows}
    assert by["1f1b", 64, "bfloat16"].steps == (1.0, 1.0)
    assert by["1f1b", 64, "bfloat16"].time == pytest.approx(1.0)
    assert by["zb-h1", 8, "int8"].steps == pytest.approx((1.0, 1.0))
    assert by["auto", 8, "int4-hadamard"].interval.mean == pytest.approx(1.1, rel=0.01)
    assert by["vanilla", 8, "bfloat16"].time == math.inf
    for row in rows:
        seconds = seconds_per_step(row.method, row.microbatches, row.way.token_bytes)
        yardstick = seconds_per_step("1f1b", 64, 2048)
        assert row.seconds == seconds
        assert row.time == pytest.approx(row.interval.mean * seconds / yardstick)
    best = {(row.method, row.way.name): row for row in best_of(rows)}
    assert best["1f1b", "bfloat16"].microbatches == 64
    assert best["auto", "int8"].time < best["1f1b", "int8"].time < best["1f1b", "bfloat16"].time
    assert ("auto", "subspace") in best
    slow_links.write(tmp_path, data, rows, 2)
    document = json.loads((tmp_path / "slow-links.json").read_text())
    assert len(document["rows"]) == len(rows)
    assert (tmp_path / "slow-links-muon.png").stat().st_size > 10_000


def test_bytes_of_a_token_and_seconds_per_step_are_near_those_that_were_published() -> None:
    """Of 1F1B: the two records of PluralisResearch/ProtocolNanoGPT, commit 0551bc3."""
    sizes = {codec: Way("adamw", "sync", 1, codec).token_bytes for codec in slow_links.CODECS}
    assert sizes == {"bfloat16": 2048, "int8": 1056, "int4-hadamard": 544}
    assert Way("muon", "sync", 1, "bfloat16", 10).token_bytes == 322
    for microbatches, token_bytes, seconds in ((64, 2048, 100.475), (32, 322, 19.889)):
        found = seconds_per_step("1f1b", microbatches, token_bytes)
        assert found == pytest.approx(seconds, rel=0.05)
