"""Tests that the project's files agree with each other and with the installation."""

import ast
import inspect
import os
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from helpers import typed_program
from torch import nn

import spectrain_ext as st

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def _package_files(pattern: str) -> list[Path]:
    return list((ROOT / "spectrain_ext").rglob(pattern))


@pytest.mark.skipif(
    "SPECTRAIN_TEST_INSTALLED" not in os.environ,
    reason="set by make test, which must not test the source tree",
)
def test_what_is_tested_is_what_was_installed_and_holds_every_module() -> None:
    installed = Path(st.__file__).resolve().parent
    assert ROOT / "spectrain_ext" not in [installed, *installed.parents]
    assert installed.is_relative_to(Path(sys.prefix).resolve())
    assert metadata.version("spectrain_ext") == st.__version__
    for suffix in ("*.py", "*.pyi", "py.typed"):
        ours = {path.relative_to(ROOT / "spectrain_ext") for path in _package_files(suffix)}
        assert {path.relative_to(installed) for path in installed.rglob(suffix)} == ours


def test_processes_exchange_no_pickles() -> None:
    objects = re.compile(r"\b(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?\b")
    for path in _package_files("*.py"):
        assert not objects.search(path.read_text()), path


def test_torch_is_a_run_time_dependency_and_never_a_build_one() -> None:
    assert not [name for name in PROJECT["build-system"]["requires"] if "torch" in name]
    assert "torch>=2.10,<3" in PROJECT["project"]["dependencies"]


def test_every_extra_that_is_named_exists() -> None:
    extras = set(PROJECT["project"]["optional-dependencies"])
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "tests" / "project").glob("*.py")]
    texts = [README, MAKEFILE, *(path.read_text() for path in [*pages, *_package_files("*.py")])]
    for text in texts:
        for named in re.findall(r"(?:spectrain_ext|'\.)\[([a-z0-9,-]+)\]", text):
            assert set(named.split(",")) <= extras, named


def test_the_same_pythons_and_the_oldest_torch_everywhere() -> None:
    """Classifiers, the oldest Python, the wheels of a release and continuous integration agree."""
    project = PROJECT["project"]
    classifiers = "\n".join(project["classifiers"])
    named = [int(n) for n in re.findall(r"^Programming .* :: 3\.(\d+)$", classifiers, re.MULTILINE)]
    assert named == list(range(named[0], named[-1] + 1))
    assert project["requires-python"] == f">=3.{named[0]}"
    built = PROJECT["tool"]["cibuildwheel"]["build"]
    assert [f"cp3{n}-*" for n in named] == [name for name in built if "t-" not in name]
    tests = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    tested = [int(n) for n in re.findall(r'^ +- python: "3\.(\d+)"$', tests, re.MULTILINE)]
    assert tested[0] == named[0] and set(tested) <= set(named)
    (oldest,) = re.findall(r"^torch>=([\d.]+),", "\n".join(project["dependencies"]), re.MULTILINE)
    assert f'torch: "{oldest}.0"' in tests


def test_the_changelog_has_this_version_on_top() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    first, second, *_ = re.findall(r"^## \[(.*?)\](.*)$", text, re.MULTILINE)
    assert first == ("Unreleased", "")
    assert second[0] == PROJECT["project"]["version"] == st.__version__
    assert re.fullmatch(r" - \d{4}-\d\d-\d\d", second[1])


def _public() -> dict[str, ast.FunctionDef]:
    """Return the functions, constructors and methods of all public names, as they are written."""
    rooms = [st, *(getattr(st, name) for name in ("checkpoint", "optim", "partitioning", "passes"))]
    things = {name: getattr(room, name) for room in rooms for name in room.__all__}
    found = {}
    for name, thing in things.items():
        if not inspect.isclass(thing) and not inspect.isfunction(thing):
            continue
        (node,) = ast.parse(inspect.getsource(inspect.unwrap(thing))).body
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        for member in members:
            if isinstance(member, ast.FunctionDef) and not re.match("_(?!_init__)", member.name):
                found[f"{name}.{member.name}"] = member
    return found


#: What is torch's to declare, or takes anything: arguments of a module's and an optimizer's base,
#: and of a prediction's hyperparameters, which its rule checks.
_ANYTHING = {
    *(f"Plan.{name}" for name in ("predict", "predict_", "stash_predict_")),
    *("Pipeline.state_dict", "PredictingOptimizer.__init__"),
}


def test_public_functions_declare_their_arguments() -> None:
    """An editor shows nothing of ``*args: Any``; mypy has seen to the other types."""
    functions = _public()
    assert len(functions) > 100
    anything = {
        name
        for name, function in functions.items()
        for arg in (function.args.vararg, function.args.kwarg)
        if arg is not None and ast.unparse(arg.annotation or ast.Name("Any")) == "Any"
    }
    assert anything == _ANYTHING


def test_a_program_with_the_types_that_an_editor_shows_runs() -> None:
    weight = torch.ones(2)
    typed_program.operators(weight, [torch.ones(1, 2)], nn.Linear(2, 1, bias=False), weight)
    typed_program.optimizers(nn.Linear(2, 2))
    typed_program.program()
