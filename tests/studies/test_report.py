"""Tests means over seeds, the JSON file, the table and the picture."""

import json
import math
import sys
from pathlib import Path

import pytest
from rich.console import Console

from spectrain_ext.method import methods
from studies.looks import looks
from studies.pictures import (
    _trailing_mean,
    draw_losses,
    draw_losses_over_time,
)
from studies.report import comparison_table
from studies.results import ACCURACY, PERPLEXITY, MethodResult, Run, summarize, write_results
from studies.settings import DEFAULT_METHODS


def _run(method: str, seed: int, accuracy: float, loss: float = 0.5) -> Run:
    return Run(method, seed, accuracy, loss, 100.0 + seed, 2048 * (seed + 1), (2.0, 1.0, loss))


def _shown(results: list[MethodResult]) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(comparison_table(results, 360))
    return capture.get()


def test_summarize_groups_by_method_in_order_of_appearance() -> None:
    runs = [_run("b", 0, 0.5), _run("a", 0, 0.25), _run("b", 1, 0.75), _run("a", 1, 0.25)]
    first, second = summarize(runs)
    assert (first.method, second.method) == ("b", "a")
    assert first.mean("test_accuracy") == 0.625
    assert first.deviation("test_accuracy") == pytest.approx(math.sqrt(2) / 8)
    assert first.mean("minibatches_per_second") == 100.5
    assert first.weight_version_bytes == 4096
    assert second.deviation("test_accuracy") == 0.0
    assert summarize([_run("a", 0, 0.5)])[0].deviation("test_accuracy") == 0.0


def test_results_have_the_documented_shape(tmp_path: Path) -> None:
    results = summarize([_run("sync", 0, 0.5), _run("sync", 1, 0.75), _run("vanilla", 0, 0.25)])
    path = tmp_path / "results.json"
    write_results(path, results, settings={"lr": 0.1}, versions={"torch": "2"}, times={"sync": 8.0})
    document = json.loads(path.read_text())
    assert list(document) == ["methods", "settings", "versions"]
    assert document["settings"] == {"lr": 0.1}
    assert document["versions"] == {"torch": "2"}
    sync, vanilla = document["methods"]
    assert sync["simulated_time"] == 8.0
    assert vanilla["simulated_time"] is None
    assert list(sync)[:5] == [
        "method",
        "test_accuracy",
        "test_loss",
        "minibatches_per_second",
        "weight_version_bytes",
    ]
    assert sync["method"] == "sync"
    assert sync["test_accuracy"] == 0.625
    assert sync["weight_version_bytes"] == 4096
    assert [run["seed"] for run in sync["seeds"]] == [0, 1]
    assert vanilla["seeds"][0]["train_losses"] == [2.0, 1.0, 0.5]


def test_a_diverged_run_is_valid_json_and_says_so(tmp_path: Path) -> None:
    results = summarize([_run("vanilla", 0, 0.1, math.inf), _run("vanilla", 1, 0.1, math.nan)])
    path = tmp_path / "results.json"
    write_results(path, results, settings={}, versions={})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    (vanilla,) = json.loads(path.read_text(), parse_constant=refuse)["methods"]
    assert vanilla["test_loss"] is None
    assert vanilla["seeds"][0]["train_losses"] == [2.0, 1.0, None]
    assert "2 of 2 diverged" in _shown(results)


def test_the_table_fits_a_terminal_and_explains_itself() -> None:
    results = summarize(
        [_run(m, s, 0.9 + 0.01 * s) for m in ("sync", "spectrain-stash") for s in (0, 1)]
    )
    text = " ".join(_shown(results).split())
    assert "spectrain-stash" in text
    assert "90.5 ± 0.7" in text
    assert "does not compare throughput" in text
    assert "One test sample is 0.3 points" in text
    assert "…" not in text


def test_text_is_judged_by_perplexity() -> None:
    results = summarize([_run("vanilla", seed, 0.5, math.log(4 + 2 * seed)) for seed in (0, 1)])
    assert results[0].mean("perplexity") == pytest.approx(5)
    assert results[0].deviation("perplexity") == pytest.approx(math.sqrt(2))
    table = comparison_table(results, 360, PERPLEXITY)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    text = " ".join(capture.get().split())
    assert "5.00 ± 1.41" in text
    assert "per character" in text
    assert "…" not in text
    assert "accuracy" not in text


def test_the_best_is_highest_accuracy_or_lowest_perplexity_of_what_overlaps() -> None:
    results = summarize(
        [
            _run("sync", 0, 0.99, 0.1),
            _run("vanilla", 0, 0.5, 2.0),
            _run("pipedream", 0, 0.75, 1.0),
            _run("spectrain", 0, 0.25, math.nan),
        ]
    )
    assert ACCURACY.best(results) == 75
    assert PERPLEXITY.best(results) == pytest.approx(math.e)
    assert ACCURACY.best(results[:2]) is None  # no comparison


def test_a_loss_beyond_float64_is_an_infinite_perplexity() -> None:
    (result,) = summarize([_run("vanilla", 0, 0.1, 1e4)])
    assert result.mean("perplexity") == math.inf
    assert PERPLEXITY.text(result) == "diverged"
    assert ACCURACY.text(result) == "10.0"


def test_a_single_seed_has_no_deviation() -> None:
    text = _shown(summarize([_run("sync", 0, 0.9)]))
    assert "90.0" in text
    assert "±" not in text
    assert "diverged" not in text


def test_every_method_has_a_look_of_its_own() -> None:
    found = looks(methods())
    assert len(set(found.values())) == len(methods())
    for name in methods():  # any drawing style
        assert looks(["mine", name])[name] == looks([name, "sync"])[name] == found[name]
    assert len({look.color for name, look in found.items() if name in DEFAULT_METHODS}) == 6


def test_lines_of_many_other_methods_differ() -> None:
    names = ["auto", *(f"own-{number}" for number in range(30)), "sync"]
    found = looks(names)
    assert list(found) == names
    assert len(set(found.values())) == 32
    assert looks(names) == found


@pytest.mark.parametrize("over_time", [False, True])
@pytest.mark.parametrize("count", [1, 5, 19])
@pytest.mark.parametrize("seeds", [1, 3])
def test_the_picture_is_a_png_that_is_not_blank(
    tmp_path: Path, count: int, seeds: int, over_time: bool
) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import image

    names = ["sync", *(f"method-{number}" for number in range(1, count))]
    results = summarize([_run(name, seed, 0.5) for name in names for seed in range(seeds)])
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


def test_the_picture_draws_what_is_not_finite(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "losses.png"
    draw_losses(path, summarize([_run("sync", 0, 0.1, math.nan)]), title="", window=1)
    assert path.stat().st_size > 1000


def test_a_missing_matplotlib_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'spectrain_ext\[pictures\]'"):
        draw_losses(tmp_path / "losses.png", [], title="", window=1)


def test_trailing_mean() -> None:
    assert _trailing_mean([4.0, 2.0, 0.0, 6.0], 2) == [4.0, 3.0, 1.0, 3.0]
    assert _trailing_mean([1.0, math.inf], 1) == [1.0, 1000.0]
