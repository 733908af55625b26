"""Tests what runs become: their files, progress, means over seeds, times, tables and pictures."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from spectrain_ext import files
from studies import times
from studies.builtin import maker_of
from studies.pictures import draw_losses, draw_losses_over_time
from studies.progress import Progress
from studies.report import comparison_table
from studies.results import ACCURACY, PERPLEXITY, MethodResult, Metric, Run, RunFile, summarize
from studies.results import write_results as write
from studies.settings import settle
from studies.times import Work, relative_times


def run_of(method: str, seed: int, accuracy: float, loss: float = 0.5) -> Run:
    return Run(method, seed, accuracy, loss, 100.0 + seed, 2048 * (seed + 1), (2.0, 1.0, loss))


def shown(results: list[MethodResult], metric: Metric = ACCURACY) -> str:
    """Return the table in 80 columns as one line, and check that nothing is cut off."""
    console = Console(width=80)
    with console.capture() as capture:
        console.print(comparison_table(results, 360, metric))
    assert "…" not in capture.get()
    return " ".join(capture.get().split())


# Files of finished runs, which are found complete or not at all


def test_a_run_is_found_again_bit_for_bit_and_nothing_else(tmp_path: Path) -> None:
    about: dict[str, object] = {"lr": 0.1, "window": (3, 2, 1), "depth": None}
    losses = (1.0, 0.1 + 0.2, 1e-30, math.inf, math.nan)
    run = Run("auto", 3, 0.25, math.nan, 12.5, 4096, losses)
    file = RunFile(tmp_path / "runs", "auto-seed3", about, Run)
    file.write(run)
    again = RunFile(tmp_path / "runs", "auto-seed3", dict(reversed(about.items())), Run)
    assert repr(again.read()) == repr(run)  # a nan is not equal to itself
    for other in ({"lr": 0.2}, {"window": (3, 2)}, {"depth": 0}, {"more": 1}):
        assert RunFile(tmp_path / "runs", "auto-seed3", {**about, **other}, Run).read() is None
    text = file.path.read_text()
    for damaged in ("", text[:-20], "{}", text.replace("lr", "rl"), text.replace("losses", "loss")):
        file.path.write_text(damaged)
        assert file.read() is None


def test_what_is_interrupted_leaves_the_file_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    files.replace_file(path, b"before")

    def fail(descriptor: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="the disk is full"):
        files.replace_file(path, b"after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_of_progress_every_ten_seconds() -> None:
    now, file = [100.0], io.StringIO()
    lines = Progress(Console(file=file, width=30), 40, 3, clock=lambda: now[0])
    lines.skip(40)
    lines.begin("[vanilla]", "2/3")
    for _ in range(20):
        now[0] += 0.5
        lines.advance(torch.tensor(0.125))
    # 20 in 10 s: the remaining 60 take 30; one line whatever the width
    said = "[vanilla], seed 2/3: minibatch 20 of 40, loss 0.125, 2 minibatches/s, 0:00:30 left\n"
    assert file.getvalue() == said
    now[0] += 400.0
    lines.advance(torch.tensor(0.25))
    # recently one in 400 s; on the whole 21 in 410 s, with 59 left
    assert file.getvalue().endswith("loss 0.25, 0.0025 minibatches/s, 0:19:12 left\n")


# Means over seeds, results.json and the table


def test_results_have_the_documented_shape(tmp_path: Path) -> None:
    runs = [run_of("sync", 0, 0.5), run_of("auto", 0, 0.25, math.nan), run_of("sync", 1, 0.75)]
    path = tmp_path / "results.json"
    write(path, summarize(runs), settings={"lr": 0.1}, versions={"torch": "2"}, times={"sync": 8.0})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    document = json.loads(path.read_text(), parse_constant=refuse)
    assert list(document) == ["methods", "settings", "versions"]
    assert (document["settings"], document["versions"]) == ({"lr": 0.1}, {"torch": "2"})
    sync, auto = document["methods"]
    assert sync["test_accuracy_std"] == pytest.approx(math.sqrt(2) / 8)
    assert (sync["simulated_time"], auto["simulated_time"]) == (8.0, None)
    first = ["method", "test_accuracy", "test_loss", "minibatches_per_second"]
    assert [*sync][:5] == [*first, "weight_version_bytes"]
    assert [sync[name] for name in [*sync][:5]] == ["sync", 0.625, 0.5, 100.5, 4096]
    assert [run["seed"] for run in sync["seeds"]] == [0, 1]
    assert (auto["test_loss"], auto["seeds"][0]["train_losses"]) == (None, [2.0, 1.0, None])


def test_the_table_explains_itself_and_names_the_best_of_what_overlaps() -> None:
    runs = [run_of(m, s, 0.9 + 0.01 * s) for m in ("sync", "spectrain-stash") for s in (0, 1)]
    runs += [run_of("auto", s, 0.1, math.inf) for s in (0, 1)]
    text = shown(summarize(runs))
    for said in ("spectrain-stash", "90.5 ± 0.7", "2 of 2 diverged", "does not compare throughput"):
        assert said in text
    assert "±" not in shown(summarize(runs[:1]))
    texts = summarize([run_of("auto", seed, 0.5, math.log(4 + 2 * seed)) for seed in (0, 1)])
    assert "5.00 ± 1.41" in shown(texts, PERPLEXITY)
    figures = (("sync", 0.99, 0.1), ("vanilla", 0.5, 2.0), ("pipedream", 0.75, 1.0))
    results = summarize([run_of(m, 0, a, loss) for m, a, loss in (*figures, ("xpipe", 0.2, 800))])
    assert ACCURACY.best(results) == 75
    assert PERPLEXITY.best(results) == pytest.approx(math.e)
    assert ACCURACY.best(results[:2]) is None  # no comparison
    # a perplexity beyond float64
    assert (PERPLEXITY.text(results[3]), ACCURACY.text(results[3])) == ("diverged", "20.0")


# Simulated times


def test_methods_are_compared_in_one_unit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    asked: list[int] = []

    def given(settings: object, make: object, stages: int, devices: list[str]) -> Work:
        assert len(devices) == stages
        asked.append(stages)
        return Work([1.0] * stages, [2.0] * stages) if stages > 1 else Work([3.0], [6.0])

    settings = settle({"methods": ("xgrad", "sync", "1f1b", "auto"), "stages": 4}, quick=True)
    make = maker_of(settings, tmp_path)
    work = times.measured_work(settings, make, 4, ["cpu"] * 4)
    assert all(0 < seconds < 1 for seconds in (*work.forward, *work.backward))
    monkeypatch.setattr(times, "measured_work", given)
    # the uncut model on one device has no bubbles, and all the work
    expected = {"xgrad": 3.0, "sync": 4.0, "1f1b": 7 / 4, "auto": 1.0}
    assert relative_times(settings, make) == pytest.approx(expected)
    assert sorted(asked) == [1, 4]


# Pictures


def test_lines_are_trailing_means_and_what_is_not_finite_is_drawn_at_the_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = pytest.importorskip("matplotlib.axes")
    plot, drawn = axes.Axes.plot, []

    def recorded(self: Any, x: list[float], y: list[float], *more: Any, **how: Any) -> None:
        drawn.append([*y])
        plot(self, x, y, *more, **how)

    monkeypatch.setattr(axes.Axes, "plot", recorded)
    path, took = tmp_path / "losses.png", {"sync": 2.0}
    for losses, window in (((4.0, 2.0, 0.0, 6.0), 2), ((1.0, math.inf), 1), ((1.0, math.nan), 1)):
        run = Run("sync", 0, 0.1, losses[-1], 1.0, 1, losses)
        draw_losses(path, summarize([run]), title="", window=window)
    draw_losses_over_time(path, summarize([run]), took, title="", window=1)
    assert drawn == [[4.0, 3.0, 1.0, 3.0], *[[1.0, 1000.0]] * 3, [1000.0]]  # with a mark at its end
