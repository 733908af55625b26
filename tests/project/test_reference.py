"""Tests that the Python reference has running examples for everything public."""

import doctest
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import spectrain_ext as st

API = Path(__file__).resolve().parents[2] / "docs" / "api.md"
BLOCK = re.compile(r"^\.\. auto(\w+):: spectrain_ext\.?(\S*)\n((?:   :.*\n)*)", re.MULTILINE)


def _listed() -> Iterator[str]:
    """Return the page's names by path in the package; a module stands for its members."""
    for kind, path, options in BLOCK.findall(API.read_text()):
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


NAMES = [path for path in _listed() if _takes_examples(path)]


@pytest.mark.parametrize("path", NAMES)
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
