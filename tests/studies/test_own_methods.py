"""Tests ``--method module:NAME``: trained, drawn, studied, resumed like any other; errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from helpers.cli_programs import undrawn

from spectrain_ext.cli import options
from spectrain_ext.cli.__main__ import main
from spectrain_ext.method import find_method
from spectrain_ext.partitioning import Profile
from spectrain_ext.partitioning.profile import BlockProfile
from spectrain_ext.planning import Layers, write_layers
from studies.__main__ import main as studies

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

FAST = ("--batch-size", "256", "--epochs", "1", "--seeds", "1", "--stages", "2", "--width", "8")
MODULE = """
from dataclasses import dataclass, replace
import spectrain_ext as st
from spectrain_ext.schedule import find_generator

ahead = {ahead}
mine = st.Method(
    "mine", "as far as asked", forward_horizon=lambda place: ahead * (place.window - 1),
    backward="stash",
)

def made():
    return replace(mine, name="made")

def late():
    raise RuntimeError("not today")

def in_turn(place):
    yield from find_generator("1f1b-async")(place)

@dataclass(frozen=True)
class Near(st.laws.Linear):
    pass

whole = replace(mine, name="whole", schedule=in_turn, law=Near)
class Cautious:
    def sgd(self, numbers):
        return numbers.term()._replace(momentum=0.5 * numbers.lr)

    adam = sgd

cautious = replace(mine, name="cautious", correction=lambda place: Cautious())
value = replace(mine, name="value", correction=Cautious())
thing = replace(mine, name="thing", correction=lambda place: "thing")
fails = replace(mine, name="fails", correction=lambda place: 1 // 0)
taken = st.spectrain()
again = replace(mine)
path = replace(mine, name="../mine")
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module into the working directory; return its name, which differs between tests."""
    name = f"own_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE.format(ahead=1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def _forget(name: str) -> None:
    sys.modules.pop(name, None)
    options.method_of.cache_clear()


def _spectrain(*arguments: str) -> Result:
    with undrawn():
        return CliRunner().invoke(studies if arguments[0] == "train" else main, arguments)


def _document(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def _losses(folder: Path) -> dict[str, list[float]]:
    return {m["method"]: m["seeds"][0]["train_losses"] for m in _document(folder)["methods"]}


def test_it_trains_resumes_and_is_named(module: str, tmp_path: Path) -> None:
    asked = ("train", *FAST, "--out", "out", "-m", f"sync,{module}:mine,spectrain-stash")
    done = _spectrain(*asked, "-m", f"{module}:made")
    assert done.exit_code == 0, done.output
    losses = _losses(tmp_path / "out")
    assert list(losses) == ["sync", "mine", "spectrain-stash", "made"]
    # with one microbatch the delay is window - 1: the same row
    assert losses["mine"] == losses["made"] == losses["spectrain-stash"] != losses["sync"]
    settings = _document(tmp_path / "out")["settings"]
    assert settings["methods"][1] == f"{module}:mine"
    again = _spectrain(*asked)
    assert "3 of 3 runs were finished before" in " ".join(again.output.split())
    # another file is another method
    (tmp_path / f"{module}.py").write_text(MODULE.format(ahead=3))
    _forget(module)
    changed = _spectrain(*asked)
    assert "2 of 3 runs were finished before" in " ".join(changed.output.split())
    assert _losses(tmp_path / "out")["mine"] != losses["mine"]


def test_a_timeline_of_it(module: str, tmp_path: Path) -> None:
    done = _spectrain("timeline", "-m", f"{module}:mine", "-o", "t.json", "--minibatches", "3")
    assert done.exit_code == 0, done.output
    assert done.output.startswith("mine, 4 stages: ")


@pytest.fixture
def profile(tmp_path: Path) -> str:
    blocks = Profile(tuple(BlockProfile(0.01, 1000, 4000, 2000) for _ in range(4)))
    write_layers(tmp_path / "profile.json", Layers((8, 8), (blocks, blocks)))
    return str(tmp_path / "profile.json")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cautious", ""),
        ("value", "correction of 'value': expected a function of a Place, got <"),
        ("thing", "at stage 0 of 2: expected one of spectrain_ext.corrections, or an object with"),
        ("fails", "ZeroDivisionError: integer division or modulo by zero ({}.py, line "),
    ],
)
def test_a_correction_of_ones_own(module: str, profile: str, name: str, said: str) -> None:
    for command in (
        ("train", *FAST, "--out", "out"),
        ("timeline", "--stages", "2", "-o", "t.json"),
        ("plan", "--profile", profile, "--devices", "2", "--batch", "8"),
    ):
        done = _spectrain(*command, "-m", f"{module}:{name}")
        text = " ".join(done.output.split())
        assert done.exit_code == bool(said), text
        assert said.format(module) in text
        assert isinstance(done.exception, SystemExit | None), done.exception


def test_a_study_finds_it_by_its_module(module: str) -> None:
    from studies.contenders import STUDIES, contender
    from studies.study import cells_of, run_file

    (cell,) = cells_of(STUDIES["digits"], None, [2], ["1"], [f"{module}:mine"])
    assert contender(cell.contender).method.name == "mine"
    path = run_file(Path(), cell, 0.1, 0).path
    assert ":" not in path.name
    (Path.cwd() / f"{module}.py").write_text(MODULE.format(ahead=3))
    assert run_file(Path(), cell, 0.1, 0).path != path


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("{}_none:mine", "there is no module '{}_none' in "),
        ("{}:nothing", "module '{}' has no 'nothing'"),
        ("{}:", "module '{}' has no ''"),
        (":mine", "module '' cannot be imported: ValueError"),
        ("{}:number", "'{}:number' is of type int, expected a spectrain_ext.Method"),
        ("{}:late", "'{}:late', called, failed: RuntimeError: not today ({}.py, line "),
        ("{}:taken", "has the name 'spectrain', which is a method of spectrain_ext"),
        ("{}:path", "has the name '../mine', which is to be the name of files"),
    ],
)
@pytest.mark.parametrize("command", ["train", "timeline"])
def test_what_is_no_method(module: str, asked: str, said: str, command: str) -> None:
    done = _spectrain(command, "-m", asked.format(module), "--out", "out.svg")
    assert done.exit_code == (2 if command == "train" else 1)
    text = " ".join(done.output.split())
    assert said.format(module, module) in text.replace("│ ", "")
    assert not Path("out.svg").exists()


def test_two_of_one_name(module: str) -> None:
    done = _spectrain("train", "-m", f"{module}:mine,{module}:again")
    assert done.exit_code == 2
    assert "are both called 'mine'; expected another name for each" in " ".join(done.output.split())


def test_a_module_that_fails_is_told_with_the_line(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}_bad.py").write_text("import torch\n\ntorch.nothing\n")
    done = _spectrain("train", "-m", f"{module}_bad:mine")
    text = " ".join(done.output.split())
    assert f"module '{module}_bad' cannot be imported: AttributeError" in text
    assert f"({module}_bad.py, line 3)" in text


def test_all_and_ones_own(module: str) -> None:
    from spectrain_ext.method import methods
    from studies.settings import choose_methods

    assert choose_methods([f"{module}:mine", "all"]) == (*methods(), f"{module}:mine")
    assert options.method_of("auto") is find_method("auto")
