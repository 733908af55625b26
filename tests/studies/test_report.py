"""Tests what runs become: files of finished runs, means over seeds, tables and pictures."""

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from spectrain_ext import files
from spectrain_ext.method import methods
from studies.looks import looks
from studies.pictures import draw_losses, draw_losses_over_time
from studies.report import comparison_table
from studies.results import ACCURACY, PERPLEXITY, MethodResult, Metric, Run, RunFile, summarize
from studies.results import write_results as write
from studies.settings import DEFAULT_METHODS


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

ABOUT: dict[str, object] = {"lr": 0.1, "window": (3, 2, 1), "depth": None}


def file_of(folder: Path, about: dict[str, object], name: str = "auto-seed3") -> RunFile[Run]:
    return RunFile(folder, name, about, Run)


def test_a_run_is_found_again_bit_for_bit(tmp_path: Path) -> None:
    run = Run("auto", 3, 0.25, 1.0 / 3, 12.5, 4096, (2.0, 0.1 + 0.2, 1e-30))
    file_of(tmp_path / "runs", ABOUT).write(run)
    again = dict(reversed(ABOUT.items()))
    assert file_of(tmp_path / "runs", again).read() == run
    assert file_of(tmp_path / "runs", again, "auto-seed4").read() is None
    diverged = Run("auto", 0, 0.1, math.nan, 1.0, 1, (1.0, math.inf, -math.inf, math.nan))
    file_of(tmp_path, ABOUT).write(diverged)
    assert repr(file_of(tmp_path, ABOUT).read()) == repr(diverged)  # a nan is not equal to itself


@pytest.mark.parametrize(
    "other", [{"lr": 0.2}, {"window": (3, 2)}, {"depth": 0}, {"more": 1}], ids=str
)
def test_other_settings_are_other_runs(tmp_path: Path, other: dict[str, object]) -> None:
    file_of(tmp_path, ABOUT).write(run_of("auto", 3, 0.5))
    file = file_of(tmp_path, {**ABOUT, **other})
    assert file.read() is None
    file.write(run_of("auto", 3, 0.5))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_that_was_changed_is_no_finished_run(tmp_path: Path) -> None:
    file = file_of(tmp_path, ABOUT)
    file.write(run_of("auto", 3, 0.5))
    text = file.path.read_text()
    losses, no_loss = json.loads(text), json.loads(text)
    losses["run"]["losses"][0] = [1]
    del no_loss["run"]["test_loss"]
    broken = ("", text[:-20], "[]", "{}", '{"run": 3}', json.dumps(losses), json.dumps(no_loss))
    for each in (*broken, text.replace('"lr": 0.1', '"lr": 0.3')):
        file.path.write_text(each)
        assert file.read() is None
    file.path.write_text(text)
    assert file.read() == run_of("auto", 3, 0.5)


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


# Means over seeds and the table


def test_runs_are_grouped_by_method_in_order_of_appearance() -> None:
    runs = [run_of("b", 0, 0.5), run_of("a", 0, 0.25), run_of("b", 1, 0.75), run_of("a", 1, 0.25)]
    first, second = summarize(runs)
    assert (first.method, second.method) == ("b", "a")
    assert first.mean("test_accuracy") == 0.625
    assert first.deviation("test_accuracy") == pytest.approx(math.sqrt(2) / 8)
    assert first.mean("minibatches_per_second") == 100.5
    assert first.weight_version_bytes == 4096
    assert second.deviation("test_accuracy") == 0.0
    assert summarize(runs[:1])[0].deviation("test_accuracy") == 0.0


def test_results_have_the_documented_shape(tmp_path: Path) -> None:
    results = summarize([run_of("sync", 0, 0.5), run_of("sync", 1, 0.75), run_of("auto", 0, 0.25)])
    path = tmp_path / "results.json"
    write(path, results, settings={"lr": 0.1}, versions={"torch": "2"}, times={"sync": 8.0})
    document = json.loads(path.read_text())
    assert list(document) == ["methods", "settings", "versions"]
    assert (document["settings"], document["versions"]) == ({"lr": 0.1}, {"torch": "2"})
    sync, auto = document["methods"]
    assert (sync["simulated_time"], auto["simulated_time"]) == (8.0, None)
    first = ["method", "test_accuracy", "test_loss", "minibatches_per_second"]
    assert list(sync)[:5] == [*first, "weight_version_bytes"]
    assert [sync[name] for name in list(sync)[:5]] == ["sync", 0.625, 0.5, 100.5, 4096]
    assert [run["seed"] for run in sync["seeds"]] == [0, 1]
    assert auto["seeds"][0]["train_losses"] == [2.0, 1.0, 0.5]


def test_a_diverged_run_is_valid_json_and_says_so(tmp_path: Path) -> None:
    results = summarize([run_of("auto", 0, 0.1, math.inf), run_of("auto", 1, 0.1, math.nan)])
    path = tmp_path / "results.json"
    write(path, results, settings={}, versions={})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    (auto,) = json.loads(path.read_text(), parse_constant=refuse)["methods"]
    assert auto["test_loss"] is None
    assert auto["seeds"][0]["train_losses"] == [2.0, 1.0, None]
    assert "2 of 2 diverged" in shown(results)


def test_the_table_explains_itself() -> None:
    runs = [run_of(m, s, 0.9 + 0.01 * s) for m in ("sync", "spectrain-stash") for s in (0, 1)]
    text = shown(summarize(runs))
    for said in ("spectrain-stash", "90.5 ± 0.7", "does not compare throughput"):
        assert said in text
    assert "One test sample is 0.3 points" in text
    single = shown(summarize(runs[:1]))
    assert "90.0" in single
    assert "±" not in single and "diverged" not in single


def test_text_is_judged_by_perplexity() -> None:
    results = summarize([run_of("auto", seed, 0.5, math.log(4 + 2 * seed)) for seed in (0, 1)])
    assert results[0].mean("perplexity") == pytest.approx(5)
    assert results[0].deviation("perplexity") == pytest.approx(math.sqrt(2))
    text = shown(results, PERPLEXITY)
    assert "5.00 ± 1.41" in text and "per character" in text
    assert "accuracy" not in text
    (beyond,) = summarize([run_of("auto", 0, 0.1, 1e4)])  # float64
    assert beyond.mean("perplexity") == math.inf
    assert (PERPLEXITY.text(beyond), ACCURACY.text(beyond)) == ("diverged", "10.0")


def test_the_best_is_highest_accuracy_or_lowest_perplexity_of_what_overlaps() -> None:
    figures = (("sync", 0.99, 0.1), ("vanilla", 0.5, 2.0), ("pipedream", 0.75, 1.0))
    results = summarize([run_of(m, 0, a, loss) for m, a, loss in (*figures, ("xpipe", 0.25, 800))])
    assert ACCURACY.best(results) == 75
    assert PERPLEXITY.best(results) == pytest.approx(math.e)
    assert ACCURACY.best(results[:2]) is None  # no comparison


# Pictures


def test_every_method_has_a_look_of_its_own() -> None:
    found = looks(methods())
    assert len(set(found.values())) == len(methods())
    for name in methods():  # any drawing style
        assert looks(["mine", name])[name] == looks([name, "sync"])[name] == found[name]
    assert len({look.color for name, look in found.items() if name in DEFAULT_METHODS}) == 6
    names = ["auto", *(f"own-{number}" for number in range(30)), "sync"]
    others = looks(names)
    assert list(others) == names
    assert len(set(others.values())) == 32


@pytest.mark.parametrize("over_time", [False, True])
@pytest.mark.parametrize(("count", "seeds"), [(1, 1), (5, 3), (19, 1)])
def test_the_picture_is_a_png_that_is_not_blank(
    tmp_path: Path, count: int, seeds: int, over_time: bool
) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import image

    names = ["sync", *(f"method-{number}" for number in range(1, count))]
    results = summarize([run_of(name, seed, 0.5) for name in names for seed in range(seeds)])
    path = tmp_path / "losses.png"
    if over_time:
        times = {name: 1.0 + 8.0 * (name == "sync") for name in names}
        draw_losses_over_time(path, results, times, title="title", window=2)
    else:
        draw_losses(path, results, title="title", window=2)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = image.imread(path)
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 700
    assert pixels[..., :3].min() < 0.1


def test_lines_are_trailing_means_and_what_is_not_finite_is_drawn_at_the_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    drawn = []
    plot = Axes.plot

    def recorded(self: Axes, x: list[float], y: list[float], *more: object, **how: object) -> None:
        drawn.append([*y])
        plot(self, x, y, *more, **how)

    monkeypatch.setattr(Axes, "plot", recorded)
    for losses, window in (((4.0, 2.0, 0.0, 6.0), 2), ((1.0, math.inf), 1), ((1.0, math.nan), 1)):
        run = Run("sync", 0, 0.1, losses[-1], 1.0, 1, losses)
        draw_losses(tmp_path / "losses.png", summarize([run]), title="", window=window)
    assert drawn == [[4.0, 3.0, 1.0, 3.0], [1.0, 1000.0], [1.0, 1000.0]]
