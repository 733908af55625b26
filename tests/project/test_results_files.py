"""Tests that bench/results/FILES.md and docs/metrics.md list exactly the files' fields."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rivals.contest import Settings, contest
from rivals.operations import OPERATIONS
from rivals.workloads import Workload
from torch import nn

import spectrain_ext as st
from spectrain_ext.method import find_method
from studies import frontier
from studies.__main__ import main
from studies.builtin import maker_of
from studies.report import describe, versions
from studies.results import Run, RunFile, summarize, write_results
from studies.settings import TrainSettings, settle

FILES = "bench/results/FILES.md"
ROOT = Path(__file__).resolve().parents[2]
RUN = Run("sync", 0, 0.5, 0.7, 100.0, 2048, (2.0, 1.0))


def tables(document: str, heading: str) -> list[set[str]]:
    """Return the names in the first column of each table of a section."""
    text = (ROOT / document).read_text()
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    (found,) = [part for part in section if part.startswith(f"{heading}\n")]
    parts = re.split(r"^\|---.*\n", found, flags=re.MULTILINE)[1:]
    return [
        {name for row in re.findall(r"^\|([^|]*)\|", part, re.MULTILINE) for name in quoted(row)}
        for part in parts
    ]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def opening(heading: str) -> set[str]:
    """Return the names in the text before a section's table."""
    text = (ROOT / FILES).read_text()
    return {*quoted(text.partition(f"\n## {heading}\n")[2].partition("\n| ")[0])}


@pytest.fixture
def about(tmp_path: Path) -> dict[str, object]:
    pytest.importorskip("sklearn")
    settings = settle({"methods": ["sync"]}, quick=True)
    workload = maker_of(settings, tmp_path)(settings, find_method("sync"), 1, 0)
    return describe(settings, workload)


def test_results(tmp_path: Path, about: dict[str, Any]) -> None:
    path = tmp_path / "results.json"
    settings = {**about, "methods": [], "seeds": [], "left_out": {}}
    write_results(path, summarize([RUN]), settings=settings, versions=versions())
    document = json.loads(path.read_text())
    of_method, of_seed, others = tables(FILES, "results.json")
    assert of_method == set(document["methods"][0])
    assert of_seed == set(document["methods"][0]["seeds"][0])
    assert set(document) | set(document["versions"]) <= opening("results.json")
    # options of the command have help texts; the others need a row
    options = {str(option.name) for option in main.commands["train"].params}
    assert others <= set(document["settings"])
    assert set(document["settings"]) - options <= others
    assert {field.name for field in dataclasses.fields(TrainSettings)} - {"data_dir"} <= set(
        document["settings"]
    )


def test_single_runs(tmp_path: Path, about: dict[str, object]) -> None:
    RunFile(tmp_path, "sync-seed0", about, Run).write(RUN)
    (path,) = tmp_path.glob("sync-seed0-*.json")
    document = json.loads(path.read_text())
    (names,) = tables(FILES, "Single runs")
    assert names == set(document["run"])
    assert set(document) <= opening("Single runs")


def test_a_study() -> None:
    (names,) = tables(FILES, "frontier.json")
    assert names == {field.name for field in dataclasses.fields(frontier.Row)}


def test_a_benchmark() -> None:
    (names,) = tables(FILES, "The JSON of the operators")
    work = Workload("tiny", ((3,),))
    entry = contest(OPERATIONS[0], work, Settings(case_s=0.0, least=1))["Plan"].as_benchmark()
    assert names == set(entry["extra_info"]) | {"compile_s"}
    assert set(entry) <= opening("The JSON of the operators")


def test_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    stages = [nn.Linear(4, 4) for _ in range(2)]
    pipe = st.Pipeline(stages, st.optim.AdamW, nn.functional.mse_loss, "spectrain")
    with st.Metrics(pipe, path) as metrics:
        for _ in pipe.run([(torch.zeros(2, 4), torch.zeros(2, 4))] * 3, trace=metrics):
            pass
    pipe.release()
    record = json.loads(path.read_text().splitlines()[-1])
    (names,) = tables("docs/metrics.md", "Records")
    groups = "staleness", "bytes_sent"
    nested = {f"{group}.{key}" for group in groups for key in record.pop(group)}
    assert names == set(record) | nested
