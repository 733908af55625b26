"""Tests ``--workload module:function``: a user's model and data, used like the presets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from spectrain_ext.method import find_method
from studies import workload
from studies.__main__ import main
from studies.options import OptionError
from studies.settings import TrainSettings, settle
from studies.workload import epochs_of, own, stages_in

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

EXAMPLE = "examples.own_workload:digits_mlp"
MODULE = """
import torch
from torch import nn
import spectrain_ext as st
from studies import Workload

calls = []

def line(seed, stages, method, epochs, lr=0.1, width=4, unknown="default"):
    calls.append((seed, stages, method, epochs, lr, width, unknown))
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(24, 3, generator=draw)
    y = x.sum(1, keepdim=True)
    return Workload(
        model=nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)),
        optimizer=lambda parameters: st.optim.SGD(parameters, lr=lr, momentum=0.5),
        loss=nn.functional.mse_loss,
        train=list(zip(x.split(4), y.split(4))),
        test=[(x, y)],
        judged="loss",
    )

def no_rate():
    return line(0, 1, "sync", 1)

def needs(wheel):
    pass

def wrong():
    return 3

def whole():
    made = line(0, 1, "sync", 1)
    return Workload(
        model=nn.Linear(3, 1), optimizer=made.optimizer, loss=made.loss, train=made.train, test=[]
    )

def fails(lr=0.1):
    raise RuntimeError("not today")

number = 3
"""


@pytest.fixture(name="module")
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    name = f"own_workload_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for cached in (workload.parameters_of, workload.source_of_workload):
        cached.cache_clear()
    return name


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def _settings(name: str, **asked: Any) -> TrainSettings:
    return settle({"workload": name, "stages": 2, "methods": ["sync"], **asked})


def test_the_example_is_studied_and_prints_the_table(tmp_path: Path) -> None:
    asked = ("--stages", "2", "--microbatches", "1", "-m", "vanilla", "--seeds", "2")
    done = _run("study", "--workload", EXAMPLE, "--epochs", "1", *asked, "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "gap %" in done.output and "lr" in done.output
    document = json.loads((tmp_path / "frontier.json").read_text())
    assert [row["contender"] for row in document["rows"]] == ["sync", "vanilla"]
    assert all(len(row["losses"]) == 2 for row in document["rows"])
    assert document["updates"] == 47  # 1,500 samples in minibatches of 32
    assert document["command"].startswith(f"python -m studies study --workload {EXAMPLE}")
    # the search starts at the function's default, in factors of two
    rates = [row["lr"] / 0.05 for row in document["rows"]]
    assert all(rate in {2.0**power for power in range(-8, 9)} for rate in rates)
    again = _run("study", "--workload", EXAMPLE, "--epochs", "1", *asked, "--out", str(tmp_path))
    assert again.exit_code == 0, again.output
    assert (
        json.loads((tmp_path / "frontier.json").read_text())["rows"][0]["losses"]
        == (document["rows"][0]["losses"])
    )


def test_the_function_is_called_with_what_it_has_parameters_for(module: str) -> None:
    settings = _settings(f"{module}:line", width=6, lr=0.25, epochs=3)
    made = own(settings, find_method("spectrain"), 2, 7)
    assert __import__(module).calls[-1] == (7, 2, "spectrain", 3, 0.25, 6, "default")
    assert [len(list(stage.parameters())) for stage in stages_in(made, 2)] == [2, 2]
    assert len(list(epochs_of(made.train, 3))) == 3 * 6
    assert len(made.about["workload_sha256"]) == 64


def test_the_weights_are_the_seeds_and_the_random_state_stays(module: str) -> None:
    settings = _settings(f"{module}:line")
    state = torch.random.get_rng_state()
    first, again, other = (
        own(settings, find_method("sync"), stages, seed).model[0].weight
        for stages, seed in ((1, 5), (2, 5), (2, 6))
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_has_no_classes_is_judged_by_its_loss(module: str, tmp_path: Path) -> None:
    asked = ("--stages", "2", "-m", "sync,vanilla", "--seeds", "2", "--epochs", "20")
    where = ("--out", str(tmp_path / "out"))
    done = _run("train", "--workload", f"{module}:line", *asked, *where)
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [method["test_accuracy"] for method in results["methods"]] == [None, None]
    assert all(method["test_loss"] < 1.0 for method in results["methods"])
    assert results["settings"]["workload"] == f"{module}:line"
    again = _run("train", "--workload", f"{module}:line", *asked, *where)
    assert "4 of 4 runs were finished before" in again.output
    # other code is another workload
    (tmp_path / f"{module}.py").write_text(f"{MODULE}\n# changed\n")
    workload.source_of_workload.cache_clear()
    changed = _run("train", "--workload", f"{module}:line", *asked, *where)
    assert changed.exit_code == 0 and "finished before" not in changed.output


@pytest.mark.parametrize(
    ("arguments", "option", "expected"),
    [
        (("train", "--workload", "no_function"), "workload", "expected module:function"),
        (("train", "--workload", "{}_none:line"), "workload", "there is no module"),
        (("train", "--workload", "{}:nothing"), "workload", "has no 'nothing'"),
        (("train", "--workload", "{}:number"), "workload", "is of type int, expected a function"),
        (("train", "--workload", "{}:wrong"), "workload", "returned a int, expected a studies."),
        (("train", "--workload", "{}:whole"), "workload", "returned a model of type Linear"),
        (("train", "--workload", "{}:needs"), "workload", "a parameter 'wheel' without a default"),
        (("train", "--workload", "{}:no_rate", "--lr", "1"), "lr", "has no parameter 'lr'"),
        (("train", "--workload", "{}:line", "--depth", "3"), "depth", "has no parameter 'depth'"),
        (("train", "--workload", "{}:line", "--data", "digits"), "data", "of the built-in"),
        (("train", "--workload", "{}:line", "--model", "gpt"), "model", "of the built-in"),
        (("study", "--workload", "{}:no_rate"), "workload", "expected a parameter 'lr' with a"),
        (("study", "--workload", "{}:line", "--data", "text"), "data", "of the built-in"),
        (("study", "--epochs", "3"), "epochs", "is of --workload"),
        (("study", "--workload", "{}:line", "-m", "nesterov-async"), "method", "the optimizer"),
    ],
)
def test_an_error_names_the_option(
    module: str, tmp_path: Path, arguments: tuple[str, ...], option: str, expected: str
) -> None:
    given = (argument.format(module) for argument in arguments)
    done = _run(*given, "--out", str(tmp_path / "out"))
    said = " ".join(done.output.split())
    assert done.exit_code == 2, done.output
    assert f"Invalid value for '--{option}': " in said
    assert expected in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--workload", "{}:line", "--stages", "4"), "stages must be between 1 and the 3 layers"),
        (("--workload", "{}:fails"), "RuntimeError: not today ({}.py, line "),
    ],
)
@pytest.mark.parametrize("command", ["train", "study"])
def test_what_fails_is_told_before_training(
    module: str, tmp_path: Path, command: str, arguments: tuple[str, ...], expected: str
) -> None:
    given = (argument.format(module) for argument in arguments)
    done = _run(command, *given, "--out", str(tmp_path / "out"))
    assert done.exit_code == 1, done.output
    assert expected.format(module) in " ".join(done.output.split())
    assert isinstance(done.exception, SystemExit)


def test_a_test_without_targets_is_refused() -> None:
    with pytest.raises(ValueError, match="test: expected minibatches with targets, got none"):
        workload.tested(torch.nn.Linear(1, 1), [])


def test_the_functions_options_are_those_of_the_command() -> None:
    options = {str(option.name) for option in main.commands["train"].params}
    assert set(workload.OFFERED) <= options
    with pytest.raises(OptionError, match="expected module:function, got 'x'"):
        workload.parameters_of("x")
