"""Shared fixtures: hypothesis profiles, the cuda skip, fixed seeds, checked markers."""

from __future__ import annotations

import gc
import multiprocessing.process
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.campaign import Campaign
from hypothesis import HealthCheck, settings

# At the end: beside studies/ are the package's sources, and what is tested is installed.
sys.path.append(str(Path(__file__).resolve().parent.parent))

_SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)
# "default" is derandomized: the same examples everywhere, so that a red run is red for everybody.
settings.register_profile(
    "default",
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=_SLOW_IS_FINE,
)
settings.register_profile(
    "nightly", max_examples=2000, deadline=None, suppress_health_check=_SLOW_IS_FINE
)
settings.load_profile(os.environ.get("SPECTRAIN_HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    """With SPECTRAIN_CAMPAIGN=FILE, count there the random faults of test_failures.py."""
    path = os.environ.get("SPECTRAIN_CAMPAIGN")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Campaign(Path(path)))


def _why_no_cuda() -> str | None:
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"needs a CUDA device: torch {torch.__version__} is built without CUDA"
    return "needs a CUDA device: torch.cuda.is_available() is false (no device or no driver)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked cuda, with the reason, where no device can be used; processes come first.

    Their tests wait more than they compute: beside others, that is, and not at the end, alone.
    """
    reason = _why_no_cuda()
    for item in items if reason else ():
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
    first = [item for item in items if _starts_something(item)]
    items[:] = [*first, *(item for item in items if not _starts_something(item))]


@pytest.fixture(autouse=True, scope="module")
def _what_is_there_stays() -> None:
    """Modules and collected tests need not be looked through whenever a test collects garbage."""
    gc.collect()
    gc.freeze()


def _starts_something(item: pytest.Item) -> bool:
    names = ("processes", "compiler", "nightly", "cuda")  # `make check` leaves the former two out
    return any(item.get_closest_marker(name) for name in names)


#: The test that runs and may start no process, or None.
_alone: str | None = None


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        assert _alone is None, f"{_alone} starts a process: mark it 'processes' or 'compiler'"
        return function(*args, **kwargs)

    return call


for _owner, _name in (
    (subprocess.Popen, "__init__"),
    (multiprocessing.process.BaseProcess, "start"),
    (os, "fork"),
):
    setattr(_owner, _name, _watched(getattr(_owner, _name)))


@pytest.fixture(autouse=True)
def _same_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test starts from the same seed and leaves the number of threads as it found it."""
    global _alone
    threads = torch.get_num_threads()
    # On machines of one core and of many alike; only operators are wide enough for two.
    torch.set_num_threads(2 if request.node.path.parent.name == "operators" else 1)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # without a stack trace for every kind of device there might be: 1 ms of 7,000 tests
        torch.default_generator.manual_seed(0)
    _alone = None if _starts_something(request.node) else request.node.nodeid
    yield
    _alone = None
    torch.set_num_threads(threads)
