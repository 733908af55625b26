"""What every test shares: hypothesis profiles, the cuda skip, a fixed seed, threads put back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from campaign import Campaign
from hypothesis import HealthCheck, settings

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
    """Skip tests marked cuda, with the reason, where no device can be used."""
    reason = _why_no_cuda()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts from the same seed and leaves the number of threads as it found it."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
