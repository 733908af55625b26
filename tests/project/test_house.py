"""Tests the architecture: each package's level, downward imports, and what an import loads."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest
from helpers.house import (
    DOCUMENTED,
    FIGURES,
    PACKAGE,
    ROOT,
    SLACK,
    counts,
    inner_imports,
    loaded_by_example,
)

import spectrain_ext as st
from spectrain_ext.later import MOVED, NAMES

#: Each package imports only from lower levels, never from its own level.
FLOORS = (
    {
        "_C",
        "cutting",
        "errors",
        "extras",
        "files",
        "interrupts",
        "later",
        "modules",
        "rng",
        "threads",
    },
    {"operators", "peers", "schedule"},
    {"optim", "method", "transport"},
    {"weights", "partitioning"},
    {"pipeline"},
    {"passes"},
    {"distributed"},
    {"checkpoint"},
    {"tools.models", "tools.simulation"},
    {"tools.metrics", "tools.planning", "tools.timelines"},
    {"tools.commands"},
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

NATIVE = ("core", "rules", "kernels", "plan", "bindings")

STOREYS = PACKAGE / "__init__.py", PACKAGE / "tools" / "__init__.py"
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path not in STOREYS]


def room_named(name: str) -> str:
    """Return the room that has a module, named below the package."""
    first, *rest = name.split(".")
    return ".".join([first, *rest[:1]]) if first == "tools" else first


def room_of(path: Path) -> str:
    return room_named(".".join(path.relative_to(PACKAGE).with_suffix("").parts))


def imported(path: Path) -> Iterator[str]:
    """Return every name that a module imports, in functions and for types as well."""
    package = ["spectrain_ext", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_every_room_has_its_floor() -> None:
    assert {room_of(path) for path in MODULES} == set(FLOOR) - {"_C"}


def test_the_architecture_page_shows_this_house() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    shown = dict(re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE))
    assert len(shown) == len(FLOORS)
    for floor, rooms in enumerate(FLOORS):
        assert set(re.findall(r"`([\w.]+)`", shown[str(floor)])) == rooms
    named = set(re.findall(r"`([\w/]+\.(?:py|h|cpp))`", page))
    files = [
        str(path.relative_to(ROOT))
        for top in ("spectrain_ext", "studies", "csrc", "tests")
        for path in (ROOT / top).rglob("*.*")
    ]
    assert len(named) > 20
    assert [
        name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)
    ] == []


PARTITIONING = PACKAGE / "partitioning" / "__init__.py"


def test_imports_point_downwards_and_never_to_the_root() -> None:
    wrong = []
    for path in MODULES:
        here = room_of(path)
        for name in imported(path):
            package, _, below = name.partition(".")
            there = room_named(below)
            floor = FLOOR.get(there, len(FLOORS))  # no level: the package's root
            if path == PARTITIONING and there == "tools.models":
                continue  # for type checkers: ``later`` loads it
            if package == "spectrain_ext" and there != here and floor >= FLOOR[here]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_engine_finds_tools_by_one_table_of_names() -> None:
    named = set()
    for path in MODULES:
        if room_of(path).startswith("tools."):
            continue
        tree = ast.parse(path.read_text())
        for_types = [node for node in tree.body if _is_for_types(node)]
        skipped = {inner for node in for_types for inner in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node not in skipped:
                assert not (node.module or "").startswith("spectrain_ext.tools"), path
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "later":
                named |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    assert len(named) > 4
    assert named <= set(NAMES)


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_tools_know_only_what_the_engines_rooms_show() -> None:
    inner = []
    for path in (path for path in MODULES if room_of(path).startswith("tools.")):
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            package, _, below = module.partition(".")
            own = package == "spectrain_ext" and not below.startswith("tools.")
            if own and "." in below and module not in DOCUMENTED:
                inner.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not inner, "\n".join(inner)


def test_modules_are_found_by_the_names_that_they_had() -> None:
    for old, new in MOVED.items():
        assert import_module(f"spectrain_ext.{old}") is import_module(f"spectrain_ext.{new}")


def test_no_circle_of_files() -> None:
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in MODULES
    }
    order: TopologicalSorter[str] = TopologicalSorter()
    for name, path in files.items():
        for used in imported(path):
            # A package's __init__ only re-exports.
            found = used if used in files else used.rpartition(".")[0]
            if found in files and files[found].name != "__init__.py" and found != name:
                order.add(name, found)
    order.prepare()


def test_no_two_files_or_classes_have_the_same_name() -> None:
    files = [path.stem for path in MODULES if not path.stem.startswith("__")]
    classes = [
        node.name
        for path in MODULES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert [name for name, n in Counter(files).items() if n > 1] == []
    assert [name for name, n in Counter(classes).items() if n > 1] == []


def test_every_step_names_a_handler_that_exists() -> None:
    source = inspect.getsource(st.passes.Kind)
    named = re.findall(r"^    # ([\w.]+): .*\n(?:    # .*\n)*    (\w+) =", source, re.MULTILINE)
    assert [member for _, member in named] == [kind.name for kind in st.passes.Kind]
    defined = set()
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            within = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            members = node.body if isinstance(node, ast.ClassDef) else [node]
            defined |= {within + member.name for member in members if hasattr(member, "name")}
    assert {handler for handler, _ in named} <= defined


#: Words that begin no docstring: it begins with a noun, or a verb that says what is done.
NO_NOUN = re.compile(
    r"(who|what|which|whose|that|those|these|this|it|they|where|when|whenever|whatever|if|in|inside"
    r"|on|at|by|for|of|with|without|from|to|after|before|so|since|because|while|until|then|how|here"
    r"|there|each|between|under)\b",
    re.IGNORECASE,
)
ROOMS = {
    *("operators", "optim", "weights", "schedule", "method", "transport", "pipeline", "passes"),
    *("distributed", "checkpoint", "partitioning"),
    *("cutting", "errors", "extras", "files", "interrupts", "later", "modules", "peers", "rng"),
    "threads",
}


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    found = []
    for path in (path for path in MODULES if room_of(path) in ROOMS):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node) or ""
                if NO_NOUN.match(text):
                    found.append(f"{path.relative_to(ROOT)}: {text.partition(chr(10))[0]}")
    assert not found, "\n".join(found)


def test_process_groups_are_known_upstairs_only() -> None:
    """Except in `partition`, which makes all ranks cut alike; tracing marks cuts by torch's own."""
    upstairs = ("distributed", "checkpoint", "tools.commands", "tools.models", "partitioning")
    for path in MODULES:
        found = {name for name in imported(path) if name.startswith("torch.distributed")}
        assert not found or room_of(path) in upstairs, path


def test_the_command_line_is_known_to_itself_only() -> None:
    """Except that rich shows the progress of ``fit``."""
    for path in MODULES:
        if room_of(path) != "tools.commands":
            used = {name.split(".")[0] for name in imported(path)} & {"click", "rich"}
            shows = room_of(path) == "tools.metrics" and path.name == "progress_bar.py"
            assert used == ({"rich"} if shows else set()), path


@pytest.mark.parametrize("folder", NATIVE)
def test_includes_point_downwards(folder: str) -> None:
    below = NATIVE[: NATIVE.index(folder)]
    for path in (ROOT / "csrc" / folder).rglob("*.*"):
        for name in re.findall(r'#include "([^"]+)"', path.read_text()):
            beside = (path.parent / name).exists()
            assert beside or name.split("/")[0] in (folder, *below), f"{path} includes {name}"


@pytest.mark.processes
def test_an_import_loads_what_training_needs_and_nothing_else() -> None:
    command = "import sys, spectrain_ext; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, check=True)
    loaded = done.stdout.decode().split()
    rooms = {name.split(".")[1] for name in loaded if name.startswith("spectrain_ext.")}
    needed = {"operators", "optim", "method", "schedule", "pipeline", "transport", "weights"}
    assert rooms == needed | {"peers"} | FLOORS[0] - {"extras", "files", "modules"}
    heavy = {"safetensors", "matplotlib", "sklearn", "click", "rich"}
    assert not heavy & set(loaded)


@pytest.mark.processes
def test_a_run_in_a_process_simulates_plans_and_draws_nothing() -> None:
    rooms = {room_of(path) for path in loaded_by_example()}
    assert "partitioning" in rooms
    assert not {room for room in rooms if FLOOR.get(room, 0) > FLOOR["pipeline"]}


@pytest.mark.processes
def test_training_and_saving_do_not_import_torchs_compiler(tmp_path: Path) -> None:
    """torch's own optimizers import it; every restart would wait for it."""
    program = f"""
import sys, torch
from torch import nn
import spectrain_ext as st

for make in (st.optim.SGD, st.optim.Adam, st.optim.AdamW, st.optim.Muon, st.optim.SOAP):
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    pipe = st.Pipeline(stages, lambda p: make(p, lr=0.1), nn.functional.mse_loss)
    manager = st.checkpoint.CheckpointManager({str(tmp_path)!r} + make.__name__, pipe)
    for _ in manager.run([(torch.randn(8, 4), torch.randn(8, 4))] * 3):
        pass
    manager.save()
    manager.restore()
    pipe.optimizers[0].zero_grad()
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_whatever_users_are_given_is_documented() -> None:
    rooms = [st, st.checkpoint, st.optim, st.partitioning]
    given = {name: getattr(room, name) for room in rooms for name in room.__all__}
    given |= {
        name: law
        for name, law in vars(st.laws).items()
        if inspect.isclass(law) and law.__module__ == st.laws.__name__
    }
    for name, thing in list(given.items()):
        if inspect.isclass(thing):
            for base in thing.__mro__:
                if base.__module__.startswith("spectrain_ext"):
                    given |= {f"{name}.{member}": what for member, what in vars(base).items()}
    checked = {
        name: inspect.getdoc(thing)
        for name, thing in given.items()
        if (callable(thing) or isinstance(thing, property)) and "._" not in name
    }
    assert len(checked) > 100
    assert [name for name, text in checked.items() if not text] == []


#: What studies import below the packages' public interfaces: training without a pipeline uses parts
#: of the engine.
BEHIND_FACES = {
    *("method.formulas", "passes.averaging", "passes.codecs", "passes.compress"),
    *("pipeline.pipeline", "pipeline.norms", "pipeline.ties", "tools.timelines.timeline"),
    *("transport.message", "weights.storage"),
}


def test_studies_use_no_more_behind_the_rooms_faces_than_is_listed() -> None:
    found: set[str] = set()
    for path in (ROOT / "studies").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                package, _, below = (node.module or "").partition(".")
                inner = room_named(below) != below
                if package == "spectrain_ext" and inner and room_named(below) != "tools.commands":
                    found.add(below)
    assert found == BEHIND_FACES


def test_tests_come_in_by_the_rooms_faces_or_say_why() -> None:
    """So that a room can be rebuilt without them."""
    silent = []
    for path, modules in inner_imports().items():
        first = path.read_text().partition("\n")[0]
        if "inner" not in first:
            silent.append(f"{path.relative_to(ROOT)} imports {', '.join(sorted(modules))}")
    assert not silent, "\n".join(silent)


@pytest.mark.processes
def test_nothing_has_grown_above_its_figure_and_the_slack() -> None:
    found = counts()
    assert found.keys() == FIGURES.keys()
    above = {n: count for n, count in found.items() if count > FIGURES[n].now * (1 + SLACK)}
    assert not above, "see helpers/house.py"


def test_the_package_knows_nothing_of_studies() -> None:
    for path in MODULES:
        assert not [name for name in imported(path) if name.split(".")[0] == "studies"], path
