"""Adds the benchmarks' options, machine information and summary to pytest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from rivals.machine import environment
from rivals.rows import Row, compact
from rivals.targets import judged
from rivals.workloads import PRECISIONS


def pytest_addoption(parser: pytest.Parser) -> None:
    own = parser.getgroup("spectrain_ext", "benchmarks of operators")
    own.addoption("--device", default="cpu", help="cpu, or a CUDA device")
    own.addoption(
        "--suite",
        choices=["quick", "sizes", "models", "small"],
        default="quick",
        help="measure on three lists of tensors; on 2^10 to 2^30 elements in 1 to 3,000 tensors; "
        "on the parameter lists of real models; on short lists of small tensors",
    )
    own.addoption("--elements", type=int, nargs="+", metavar="E", help="on 2^E elements instead")
    own.addoption("--tensors", type=int, nargs="+", metavar="N", help="on N tensors instead")
    own.addoption(
        "--precision",
        nargs="+",
        choices=list(PRECISIONS),
        help="types of weights, state, gradients: fp32; bf16, beside a float32 state; mixed, "
        "float32 weights with bfloat16 gradients",
    )
    own.addoption(
        "--compile",
        action="store_true",
        help="also measure torch.compile, which takes seconds each",
    )
    own.addoption("--threads", type=int, help="CPU threads; default: torch's")
    own.addoption("--case-seconds", type=float, default=0.7, help="for the samples of a group")
    own.addoption("--memory", type=float, metavar="GIB", help="limit for the tensors")


def pytest_configure(config: Any) -> None:
    if config.option.threads:
        torch.set_num_threads(config.option.threads)
    config._about = environment(config.option.device)  # with the load before the run


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    """Record the device and the versions, without paths and host names."""
    machine_info.clear()
    machine_info.update(config._about)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: Any, output_json: dict[str, Any]) -> None:
    """Keep statistics to five digits, without the single samples."""
    output_json["settings"] = {
        "case_s": config.option.case_seconds,
        "compile": config.option.compile,
    }
    commit = output_json["commit_info"]
    output_json["commit_info"] = {name: commit.get(name) for name in ("id", "dirty")}
    for each in output_json["benchmarks"]:
        for name in ("params", "param", "options"):
            each.pop(name, None)
        stats = each["stats"]
        stats.pop("data", None)
        each["stats"] = {
            name: float(f"{value:.5g}") if isinstance(value, float) else value
            for name, value in stats.items()
        }


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """Print a line per group against the best copy and the fastest rival, and missed figures."""
    session = getattr(config, "_benchmarksession", None)
    found = [bench.as_dict(include_data=False) for bench in getattr(session, "benchmarks", [])]
    rows = Row.all_of(found)
    if rows:
        terminalreporter.section("ours against the best copy and the fastest rival")
        terminalreporter.write_line(compact(rows))
        for one in judged(config._about, found):
            if one.met is False:
                line = f"not reached: {one.what}: {one.measured}, expected {one.target}"
                terminalreporter.write_line(line)
