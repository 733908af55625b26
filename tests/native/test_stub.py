"""Tests spectrain_ext/_C.pyi against the module: names and properties, both ways."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import spectrain_ext as st
from spectrain_ext import _C

STUB = Path(st.__file__).with_name("_C.pyi")
#: Members that pybind11 and Python give every class, and every enumeration.
_GENERATED = {"_pybind11_conduit_v1_", "__entries", "name", "value"}


def _declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return functions, classes and names with a type; private names belong to the stub."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return {n: x for n, x in found.items() if n[0] != "_" or isinstance(x, ast.FunctionDef)}


def _public(x: object) -> dict[str, object]:
    """Return what a module or class defines."""
    names = {n: found for n, found in vars(x).items() if not isinstance(found, ModuleType)}
    return {n: names[n] for n in names.keys() - _GENERATED if not n.startswith("__")}


def test_the_same_names_and_members() -> None:
    stub, native = _declared(ast.parse(STUB.read_text(encoding="utf-8")).body), _public(_C)
    assert stub.keys() == native.keys()
    classes = {name: x for name, x in native.items() if isinstance(x, type)}
    assert classes.keys() == {name for name, x in stub.items() if isinstance(x, ast.ClassDef)}
    for name, found in classes.items():
        node = stub[name]
        assert isinstance(node, ast.ClassDef)
        members, theirs = _declared(node.body), _public(found)
        assert members.keys() - {"__init__"} == theirs.keys(), name
        for member, declared in members.items():
            given = [ast.unparse(d) for d in getattr(declared, "decorator_list", [])]
            is_property = isinstance(theirs.get(member), property)
            assert is_property == (given == ["property"]), f"{name}.{member}"
            assert getattr(theirs.get(member), "fset", None) is None, f"{name}.{member}"
