"""The benchmarks' own logic: tables of what was measured."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def table() -> ModuleType:
    return _load("table")


class TestTable:
    def test_a_row_from_raw_times(self, table: ModuleType) -> None:
        row = table.summarize("g", "Plan", [2e-6, 4e-6, 3e-6])
        assert row.median_us == pytest.approx(3.0) and row.rounds == 3
        assert row.best_us == pytest.approx(2.0) and row.iqr_us == pytest.approx(2.0)

    def test_nothing_measured_is_an_error_and_not_a_row(self, table: ModuleType) -> None:
        with pytest.raises(ValueError, match="no measured times"):
            table.summarize("g", "Plan", [])

    def test_ratio_to_the_fastest_rival(self, table: ModuleType) -> None:
        rows = [
            table.Row("g", "Plan", 2.0, 0.1, 1.9, 5),
            table.Row("g", "slow", 10.0, 0.1, 9.9, 5),
            table.Row("g", "fast", 4.0, 0.1, 3.9, 5),
        ]
        assert table.ratio_to_rival(rows[0], rows) == pytest.approx(2.0)
        assert table.ratio_to_rival(rows[1], rows) is None
        assert table.ratio_to_rival(rows[0], rows[:1]) is None

    def test_markdown_leaves_empty_what_is_not_known(self, table: ModuleType) -> None:
        text = table.markdown([table.Row("g", "Plan", 2.0, 0.1, 1.9, 5)])
        assert text.splitlines()[-1] == "| g | Plan | 2.0 | 0.1 | 1.9 |  |"

    def test_rows_of_pytest_benchmark(self, table: ModuleType) -> None:
        stats = {"median": 1e-6, "iqr": 2e-7, "min": 9e-7, "rounds": 9}
        data = {"benchmarks": [{"name": "n", "stats": stats, "extra_info": {"name": "Plan"}}]}
        (row,) = table.from_pytest_benchmark(data)
        assert (row.name, row.rounds) == ("Plan", 9)
        assert row.median_us == pytest.approx(1.0)
