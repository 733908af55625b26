"""Tests the documented use of torchrun: a script that is killed, restarted, and resumes."""

from __future__ import annotations

import re
from pathlib import Path

import bench_failures
import pytest
from helpers import checkpoint_programs
from helpers.ranks import run_ranks, run_script

pytestmark = pytest.mark.processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrun.py"


@pytest.mark.parametrize(
    "options",
    [
        "--campaign 1 --kinds kill --minibatches 30 --ranks 2",
        *(
            pytest.param(f"--campaign 8 --minibatches 300 --seed {n}", marks=pytest.mark.nightly)
            for n in range(3)
        ),
    ],
)
def test_random_faults_cost_no_bit(options: str, tmp_path: Path) -> None:
    """The example under torchrun ends as if nothing had ever failed."""
    pytest.importorskip("sklearn")
    given = bench_failures.parsed([*options.split(), "--directory", str(tmp_path)])
    found = bench_failures.campaign(given)
    assert found["failed"] == []
    assert len(found["faults"]) == given.campaign
    assert all(0 <= row["lost"] <= 10 for row in found["faults"])


def test_a_store_that_outlives_a_restart_is_refused() -> None:
    for reason in run_ranks(checkpoint_programs.same_store, 2):
        assert reason.startswith("the process group's store has outlived a restart")


def test_the_example_goes_on_with_any_number_of_processes(tmp_path: Path) -> None:
    """Stages move, and replicas are added and removed. When told to stop, it saves and exits."""
    pytest.importorskip("sklearn")
    stop = tmp_path / "stop"
    options = ("--checkpoints", str(tmp_path / "saved"), "--stop-file", str(stop), "--epochs")
    for epochs, ranks in enumerate((2, 4, 3), start=1):
        stop.touch()
        assert run_script(EXAMPLE, ranks, *options, str(epochs), folder=tmp_path) == ""
        assert any((tmp_path / "saved").glob("minibatch-*"))
        stop.unlink()
        printed = run_script(EXAMPLE, ranks, *options, str(epochs), folder=tmp_path)
        assert re.findall(r"epoch (\d+): ", printed) == [str(epochs)]
