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
from hypothesis import HealthCheck, settings

# At the end: the package's sources are next to studies/, and the tests use the installed package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

_SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)
# "default" is derandomized: every machine runs the same examples.
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


def _why_no_cuda() -> str | None:
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"needs a CUDA device: torch {torch.__version__} is built without CUDA"
    return "needs a CUDA device: torch.cuda.is_available() is false (no device or no driver)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked cuda, with the reason, without a usable device; run process tests first.

    They mostly wait, so that they should run together with other tests and not alone at the end.
    """
    reason = _why_no_cuda()
    for item in items if reason else ():
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
    first = [item for item in items if _starts_something(item)]
    items[:] = [*first, *(item for item in items if not _starts_something(item))]


@pytest.fixture(autouse=True, scope="module")
def _what_is_there_stays() -> None:
    """Exclude modules and collected tests from the garbage collections of later tests."""
    gc.collect()
    gc.freeze()


def _starts_something(item: pytest.Item) -> bool:
    names = ("processes", "compiler", "nightly", "cuda")  # `make check` leaves out the first two
    return any(item.get_closest_marker(name) for name in names)


#: The running test if it must not start a process, or None.
_alone: str | None = None
#: Matplotlib's first import on a machine lists the fonts with one of these.
_LISTING_FONTS = ("fc-list", "system_profiler")


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        for_fonts = any(isinstance(one, list) and one[0] in _LISTING_FONTS for one in args)
        assert _alone is None or for_fonts, (
            f"{_alone} starts a process: mark it 'processes' or 'compiler'"
        )
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
    """Start every test from the same seed, and restore the number of threads."""
    global _alone
    threads = torch.get_num_threads()
    # The same on machines with one core and with many; only operators are large enough for two.
    torch.set_num_threads(2 if request.node.path.parent.name == "operators" else 1)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    # without a stack trace for every possible device type, which costs each of 7,000 tests 1 ms
    else:
        torch.default_generator.manual_seed(0)
    _alone = None if _starts_something(request.node) else request.node.nodeid
    yield
    _alone = None
    torch.set_num_threads(threads)
