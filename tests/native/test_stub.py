"""Tests spectrain_ext/_C.pyi against the module: names and properties, both ways."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

import spectrain_ext as st
from spectrain_ext import _C

STUB = Path(st.__file__).with_name("_C.pyi")
TREE = ast.parse(STUB.read_text(encoding="utf-8"))
#: Members that pybind11 and Python give every class, and every enumeration.
_GENERATED = {"_pybind11_conduit_v1_", "__entries", "name", "value"}


def _constants(body: list[ast.stmt]) -> set[str]:
    """Return names with a type and no value. Private names belong to the stub."""
    targets = [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return {t.id for t in targets if isinstance(t, ast.Name) and not t.id.startswith("_")}


def _functions(body: list[ast.stmt]) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def _is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)


def _public(x: object) -> set[str]:
    """Return the names that a module or class defines."""
    names = {n for n in vars(x) if not (n.startswith("__") and n.endswith("__"))}
    return {n for n in names - _GENERATED if not isinstance(vars(x)[n], ModuleType)}


STUBS = {node.name: node.body for node in TREE.body if isinstance(node, ast.ClassDef)}
CLASSES = {n: getattr(_C, n) for n in _public(_C) if isinstance(getattr(_C, n), type)}


def test_the_same_names() -> None:
    assert set(STUBS) == set(CLASSES)
    assert set(STUBS) | set(_functions(TREE.body)) | _constants(TREE.body) == _public(_C)
    assert STUB.with_name("py.typed").is_file()


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_the_same_members(name: str) -> None:
    native, stub = CLASSES[name], _functions(STUBS[name])
    assert set(stub) - {"__init__"} | _constants(STUBS[name]) == _public(native)
    for member, node in stub.items():
        found = vars(native)[member]
        assert isinstance(found, property) == _is_property(node), member
        if _is_property(node):
            assert found.fset is None, f"{member} can be written"
