"""The table of methods in docs/methods.md agrees with the registry."""

import re
from pathlib import Path
from typing import get_args

import pytest

import spectrain_ext as st
from spectrain_ext.method import find_method
from spectrain_ext.schedule import Law, flushes

STALE = find_method("vanilla").forward_horizon
PAGE = Path(__file__).resolve().parents[2] / "docs" / "methods.md"


def _rows() -> dict[str, list[str]]:
    table = PAGE.read_text().partition("## The rows")[2].partition("\n\n|")[2].partition("\n\n")[0]
    found = {}
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        for name in re.findall(r"`([^`]+)`", cells[0]):
            assert name not in found, name
            found[name] = cells[1:]
    return found


ROWS = _rows()


def test_the_table_names_every_method() -> None:
    assert set(ROWS) == set(st.methods())


@pytest.mark.parametrize("name", st.methods())
def test_the_row_is_the_method(name: str) -> None:
    method = find_method(name)
    _, backward, delay, kept = ROWS[name]
    assert ("flush" in delay) == flushes(method.schedule)
    assert (backward == "stash") == (method.backward == "stash")
    words = " ".join(ROWS[name][:2])
    named = {law for law in get_args(Law) if law.replace("-", " ") in words}
    predicts = method.forward_horizon is not STALE or method.backward == "predict"
    assert named == ({method.law} if predicts else set())
    assert "master" in kept or not predicts
