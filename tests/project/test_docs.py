"""Tests documents and examples: programs run, commands exist, links lead somewhere."""

import doctest
import inspect
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple, get_args
from unittest.mock import patch

import click
import pytest
import torch
from click.testing import CliRunner
from helpers.ranks import run_script
from markdown_it import MarkdownIt
from markdown_it.token import Token
from torch import nn

import spectrain_ext as st
from spectrain_ext.method import find_method
from spectrain_ext.schedule import Law, flushes
from spectrain_ext.tools.commands.__main__ import main as spectrain
from studies.__main__ import main as studies

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / "README.md", ROOT / "bench" / "README.md"),
    *sorted((ROOT / "bench" / "results").glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
MAKEFILE = (ROOT / "Makefile").read_text()
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
# The first line of a program for several processes: its name and start command.
STARTED = re.compile(r"# (\S+\.py): (torchrun .*)\n")
# Imports of a block that no test can install.
OPTIONAL = {"cupy", "tensorboard", "wandb"}
SERVED = {"metrics"}  # wandb starts a process


class Block(NamedTuple):
    """A code block: its place, language and text."""

    page: Path
    line: int
    language: str
    text: str


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _inside(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from _inside(token.children or [])


BLOCKS = [
    Block(page, (token.map or [0])[0] + 1, token.info.partition(" ")[0].strip(), token.content)
    for page in PAGES
    for token in _inside(MarkdownIt().parse(page.read_text()))
    if token.type in ("fence", "code_block")
]
PYTHON = [block for block in BLOCKS if block.language == "python"]
PROGRAMS = [block for block in PYTHON if STARTED.match(block.text)]
PYTHON_PAGES = sorted({block.page for block in PYTHON})


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.processes] * (page.stem in SERVED), id=_name(page))
        for page in PYTHON_PAGES
    ],
)
def test_the_blocks_of_a_page_run_one_after_another(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All blocks share one namespace, in reading order; those of text show what is printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in PYTHON:
        if block.page != page or block in PROGRAMS:
            continue
        imports = r"^ *(?:import|from) (?:torch\.utils\.)?(\w+)"
        imported = set(re.findall(imports, block.text, re.MULTILINE))
        if any(find_spec(name) is None for name in imported & OPTIONAL):
            continue
        # the line numbers of a failure are the page's
        source = "\n" * block.line + block.text
        exec(compile(source, str(page), "exec"), names)
    printed = capsys.readouterr().out
    assert all(b.text in printed for b in BLOCKS if (b.page, b.language) == (page, "text"))


@pytest.mark.processes
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda block: f"{_name(block.page)}:{block.line}")
def test_the_programs_for_several_processes_run(program: Block, tmp_path: Path) -> None:
    name, command = re.findall(STARTED, program.text)[0]
    (tmp_path / name).write_text(program.text)
    pattern = rf"torchrun --nproc-per-node (\d)(?: --max-restarts \d)? {re.escape(name)}"
    ranks = re.fullmatch(pattern, command)
    assert ranks is not None, command
    run_script(tmp_path / name, int(ranks[1]), folder=tmp_path)


def _commands() -> Iterator[tuple[str, str]]:
    for block in BLOCKS:
        if block.language in ("", "console", "bash", "sh"):
            for line in block.text.splitlines():
                command = line.removeprefix("$ ").partition("  ")[0].partition(" #")[0].strip()
                if command.startswith(("spectrain ", "make ")):
                    yield f"{_name(block.page)}:{block.line}", command


@pytest.mark.parametrize(("place", "command"), sorted(set(_commands())))
def test_the_commands_exist(place: str, command: str) -> None:
    program, *arguments = shlex.split(command)
    if program == "make":
        for target in (word for word in arguments if "=" not in word):
            assert re.search(rf"^{target}:|^\.PHONY:.*\b{target}\b", MAKEFILE, re.MULTILINE), place
        return
    assert SCRIPTS["spectrain"] == "spectrain_ext.tools.commands:main"  # which calls this one
    name, *options = arguments
    found = spectrain.commands.get(name)
    assert found is not None, f"{place}: spectrain has no command {name!r}"
    parent = click.Context(spectrain, info_name="spectrain", **spectrain.context_settings)
    try:
        found.make_context(name, options, parent=parent)
    except click.exceptions.Exit as asked_for_help:
        assert asked_for_help.exit_code == 0
    except click.BadParameter as error:  # a file of the reader
        assert "does not exist" in str(error), f"{place}: {error}"


def test_every_link_of_a_page_leads_somewhere() -> None:
    wrong = []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]:
        for target in re.findall(r"\]\(\s*(?!https?:)([^)\s]+)\s*\)", page.read_text()):
            path, _, anchor = target.partition("#")
            there = (page.parent / path) if path else page
            if not there.exists():
                wrong.append(f"{_name(page)}: {target}")
            elif anchor and there.suffix == ".md" and anchor not in _anchors(there):
                wrong.append(f"{_name(page)}: no heading {target}")
    assert not wrong, "\n".join(wrong)


def test_the_tests_that_provenance_names_exist() -> None:
    page = (ROOT / "bench" / "results" / "PROVENANCE.md").read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.\w+)`", page))
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).exists()]


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def test_the_messages_of_troubleshooting_are_those_of_the_code() -> None:
    """Every first cell quotes a piece of a message that is in some source file."""
    code = " ".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text())
        for path in (ROOT / "spectrain_ext").rglob("*.py")
    )
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    assert len(quoted) > 8
    missing = [text for text in quoted if text not in code]
    assert not missing, missing


def _rows() -> dict[str, list[str]]:
    page = (ROOT / "docs" / "methods.md").read_text()
    table = page.partition("## The rows")[2].partition("\n\n|")[2].partition("\n\n")[0]
    found = {}
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        for name in re.findall(r"`([^`]+)`", cells[0]):
            assert name not in found, name
            found[name] = cells[1:]
    return found


ROWS = _rows()


def test_the_table_of_methods_is_the_registry() -> None:
    assert set(ROWS) == set(st.methods())


@pytest.mark.parametrize("name", st.methods())
def test_the_row_is_the_method(name: str) -> None:
    method, stale = find_method(name), find_method("vanilla").forward_horizon
    _, backward, delay, kept = ROWS[name]
    assert ("flush" in delay) == flushes(method.schedule)
    assert (backward == "stash") == (method.backward == "stash")
    words = " ".join(ROWS[name][:2])
    named = {law for law in get_args(Law) if law.replace("-", " ") in words}
    predicts = method.forward_horizon is not stale or method.backward == "predict"
    assert named == ({method.law} if predicts else set())
    assert "master" in kept or not predicts


DIRECTIVE = re.compile(r"^\.\. auto(\w+):: spectrain_ext\.?(\S*)\n((?:   :.*\n)*)", re.MULTILINE)


def _listed() -> Iterator[str]:
    """Return the page's names by path in the package; a module stands for its members."""
    for kind, path, options in DIRECTIVE.findall((ROOT / "docs" / "api.md").read_text()):
        if kind != "module":
            yield path
            continue
        named = re.search(r":members: *(.*)", options)
        assert named is not None, path
        module = _found(path)
        own = [
            name
            for name, value in vars(module).items()
            if name[0] != "_" and getattr(value, "__module__", None) == module.__name__
        ]
        for name in named[1].split(", ") if named[1] else own:
            yield f"{path}.{name}"


def _found(path: str) -> Any:
    *modules, name = path.split(".")  # a name of the package precedes a module of that name
    module = resolve_name(".".join(["spectrain_ext", *modules]))
    return getattr(module, name, None) or resolve_name(f"spectrain_ext.{path}")


def _takes_examples(path: str) -> bool:
    """Return whether callers call or make it, unlike constants, aliases and errors."""
    found = _found(path)
    return callable(found) and not (inspect.isclass(found) and issubclass(found, Exception))


EXAMPLES = [path for path in _listed() if _takes_examples(path)]


@pytest.mark.parametrize("path", EXAMPLES)
def test_the_docstring_has_an_example_that_runs(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(_found(path)) or ""
    names = {"torch": torch, "nn": nn, "st": st, "Path": Path}
    test = doctest.DocTestParser().get_doctest(text, names, path, None, None)
    assert test.examples, "no example"
    torch.manual_seed(0)
    wrong: list[str] = []
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    with patch.dict(os.environ):
        doctest.DocTestRunner(optionflags=flags).run(test, out=wrong.append)
    assert not wrong, "".join(wrong)


# Programs in examples/ run as their first lines say, at a tiny size.

FOLDER = ROOT / "examples"
TINY = {
    "accelerate_loader.py": "--epochs 1",
    "cnn_batchnorm.py": "--epochs 1 --width 4",
    "finetune.py": "--epochs 1 --context 16 --every 20",
    "gpt2.py": "--steps 4 --layers 2 --width 16 --context 16 --stages 2",
    "lightning_manual.py": "--epochs 1",
    "mesh.py": "--steps 2 --layers 2 --width 32 --context 16",
    "own_method.py": "--epochs 1",
    "own_optimizer.py": "--epochs 1",
    "own_workload.py": "--epochs 1 --stages 2 --seeds 1 --microbatches 1 -m vanilla",
    "resnet18.py": "--steps 3 --width 4 --blocks 1",
    "several_optimizers.py": "--epochs 1",
    "subspace.py": "--steps 3 --width 16 --rank 4 --stages 2",
    "torchrun.py": "--epochs 1",
}
STUDIED = "own_workload.py"


def _started(name: str) -> list[str]:
    """How an example's docstring starts it."""
    text = (FOLDER / name).read_text()
    return re.findall(rf"^(.*) examples/{re.escape(name)}", text, re.M)


def test_there_is_a_size_for_every_example() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == set(TINY)
    unsaid = [name for name in TINY if not _started(name) and name != STUDIED]
    assert not unsaid, "the docstring says how an example is started"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "started"), [(name, how) for name in TINY for how in _started(name)]
)
def test_an_example_runs(name: str, started: str, tmp_path: Path) -> None:
    text = (FOLDER / name).read_text()
    needs = set(re.findall(r"^(?:import|from) (accelerate|lightning|transformers)\b", text, re.M))
    if missing := [need for need in needs if find_spec(need) is None]:
        pytest.skip(f"needs {missing}: pip install 'spectrain_ext[examples]'")
    ranks = re.fullmatch(r"python|torchrun --nproc-per-node (\d)", started)
    assert ranks is not None, started
    printed = run_script(FOLDER / name, int(ranks[1] or 1), *TINY[name].split(), folder=tmp_path)
    assert re.search(r"\d\.\d", printed), printed[-2000:]


def test_an_example_is_studied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parent)
    text = (FOLDER / STUDIED).read_text()
    for command in ("study", "train"):
        said = f"python -m studies {command} --workload examples.own_workload:digits_mlp --stages"
        assert f"\n    {said} " in text
    asked = ["--workload", "examples.own_workload:digits_mlp", *TINY[STUDIED].split()]
    done = CliRunner().invoke(studies, ["study", *asked, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "gap %" in done.output and (tmp_path / "frontier.json").exists()
