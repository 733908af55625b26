"""Tests spectrain_ext/_C.pyi against the module: names, arguments, properties, both ways."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import spectrain_ext as st
from spectrain_ext import _C
from spectrain_ext.operators.calls import StepOptions

_STUB = Path(st.__file__).with_name("_C.pyi")
#: Members that pybind11 and Python give every class, and every enumeration.
_GENERATED = {"_pybind11_conduit_v1_", "__entries", "name", "value"}


def _tree() -> ast.Module:
    return ast.parse(_STUB.read_text(encoding="utf-8"))


def _constants(body: list[ast.stmt]) -> set[str]:
    """Return names with a type and no value. Private names belong to the stub."""
    return {
        node.target.id
        for node in body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not node.target.id.startswith("_")
    }


def _is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)


def _arguments(node: ast.FunctionDef) -> list[tuple[str, bool]]:
    """Return names in order, each with whether it has a default."""
    a = node.args
    assert not a.vararg and not a.kwarg and not a.kwonlyargs and not a.posonlyargs, node.name
    names = [x.arg for x in a.args]
    required = len(names) - len(a.defaults)
    return [(name, i >= required) for i, name in enumerate(names)]


def _split(signature: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, part = [], 0, ""
    for c in signature:
        depth += (c in "[(") - (c in "])")
        if c == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += c
    return [p.strip() for p in [*parts, part] if p.strip()]


def _native_arguments(function: Any) -> list[tuple[str, bool]]:
    """Parse the docstring's first line by pybind11: name(arg: type = default)."""
    line = (function.__doc__ or "").strip().splitlines()[0]
    match = re.fullmatch(r"\w+\((.*)\)(?: -> .*)?", line)
    assert match, f"not a signature: {line!r}"
    return [
        (part.split(":")[0].split("=")[0].strip(), "=" in part.split(":", 1)[-1])
        for part in _split(match.group(1))
    ]


def _functions(body: list[ast.stmt]) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def _classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _public(x: object) -> set[str]:
    """Return the names that a module or class defines."""
    names = {n for n in vars(x) if not (n.startswith("__") and n.endswith("__"))}
    return {n for n in names - _GENERATED if not isinstance(vars(x)[n], ModuleType)}


def _native_classes() -> dict[str, type]:
    return {n: getattr(_C, n) for n in _public(_C) if isinstance(getattr(_C, n), type)}


def test_the_stub_is_beside_the_module() -> None:
    assert _STUB.is_file()
    assert _STUB.with_name("py.typed").is_file()


def test_the_same_names() -> None:
    tree = _tree()
    named = set(_classes(tree)) | set(_functions(tree.body)) | _constants(tree.body)
    assert named == _public(_C)


def test_the_same_classes() -> None:
    assert set(_classes(_tree())) == set(_native_classes())


@pytest.mark.parametrize("name", sorted(_native_classes()))
def test_the_same_members(name: str) -> None:
    body = _classes(_tree())[name].body
    stub = _functions(body)
    native = _native_classes()[name]
    assert set(stub) - {"__init__"} | _constants(body) == _public(native)
    for member, node in stub.items():
        if _is_property(node):
            assert isinstance(vars(native)[member], property), member
            assert vars(native)[member].fset is None, f"{member} can be written"
        elif member != "__init__":
            assert not isinstance(vars(native)[member], property), member


@pytest.mark.parametrize("name", sorted(_native_classes()))
def test_the_same_arguments_of_methods(name: str) -> None:
    native = _native_classes()[name]
    for member, node in _functions(_classes(_tree())[name].body).items():
        if not _is_property(node):
            assert _arguments(node) == _native_arguments(getattr(native, member)), member


def test_the_same_arguments_of_functions() -> None:
    for name, node in _functions(_tree().body).items():
        assert _arguments(node) == _native_arguments(getattr(_C, name)), name


def test_everything_in_the_stub_is_annotated() -> None:
    for node in ast.walk(_tree()):
        if isinstance(node, ast.FunctionDef):
            assert node.returns is not None, node.name
            bare = [a.arg for a in node.args.args if a.annotation is None and a.arg != "self"]
            assert not bare, f"{node.name}: {bare}"


def test_a_signature_is_read_as_it_should_be() -> None:
    """Otherwise the comparisons above would be meaningless."""

    def function() -> None:
        """f(self: a.B, x: dict[str, tuple[int, int]], y: int = (1, 2)) -> None"""

    assert _native_arguments(function) == [("self", False), ("x", False), ("y", True)]
    node = ast.parse("def f(self, x: int, y: int = ...) -> None: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    assert _arguments(node) == _native_arguments(function)


def test_options_are_those_that_the_native_half_knows() -> None:
    """An unknown option is rejected; the types list exactly the accepted ones."""
    w = torch.ones(1, dtype=torch.bfloat16)
    nothing = dict.fromkeys(StepOptions.__annotations__)
    st.sgd_step_(w, w.clone(), None, lr=1.0, momentum=0.0, **nothing)
    assert w.item() == 0.0
    with pytest.raises(TypeError, match="unexpected keyword argument 'clip'"):
        st.sgd_step_(w, w.clone(), None, lr=1.0, momentum=0.0, clip=None)


def test_what_the_functions_return() -> None:
    info = _C.build_info()
    assert isinstance(info["version"], str) and isinstance(info["cuda"], bool)
    assert isinstance(info["openmp"], bool)
