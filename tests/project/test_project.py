"""Tests that the project's files agree with each other and with the installation."""

import os
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

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
