"""Tests failures while several processes save: the checkpoint before it loads, on all ranks."""

from __future__ import annotations

import random
import re
import signal

import pytest
from helpers import failing_checkpoints
from helpers.checkpoint_cases import same
from helpers.failing_checkpoints import EVERY, MINIBATCHES
from helpers.failing_runs import TIMEOUT
from helpers.ranks import Ranks, printed_by, run_ranks

pytestmark = pytest.mark.processes

ENDS = {"kill": -signal.SIGKILL, "cut": -signal.SIGXFSZ, "exit": 7}


def checkpoint_trial(seed):
    """Draw a rank, a fault, a save and a point in it."""
    draw = random.Random(1000 + seed)
    ranks = draw.choice([2, 3, 4])
    what = {
        "fault": ["kill", "full", "cut", "exception", "stop", "hang", "exit", "kill"][seed % 8],
        "culprit": draw.randrange(ranks),
        "save": draw.randrange(2, MINIBATCHES // EVERY + 1),
        "calls": draw.randrange(1, 25),
        "share": draw.random(),
        "timeout": TIMEOUT,
        "keeper": draw.random() < 0.5,
    }
    # The remaining ranks notice it in the next save.
    lost = what["fault"] in ("kill", "stop", "exit") and what["save"] < MINIBATCHES // EVERY
    what["asynchronous"] = lost and draw.random() < 0.5
    return ranks, what


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n < 5 else pytest.mark.nightly) for n in range(150)]
)
def test_a_failure_while_saving_loses_nothing(tmp_path, seed):
    count, what = checkpoint_trial(seed)
    culprit, fault = what["culprit"], what["fault"]
    path = str(tmp_path / "c")
    trains = failing_checkpoints.trains
    ends = Ranks(trains, count, path, what, keeper=what["keeper"]).join(deadline=60.0)
    told = f"{what}\n{printed_by(ends)}"
    expected = failing_checkpoints.never_stopped(str(tmp_path / "one"), count)
    codes = [end.code for end in ends]
    if fault == "full":
        assert codes == [0] * count, told
        at = EVERY * what["save"]
        for end in ends:
            ((minibatches, error),) = end.value[1]
            assert minibatches == at, told
            assert f"minibatch-{at:08d}: process {culprit}: " in error, told
    elif any(codes):
        own = ENDS.get(fault, 1)
        assert codes == [own if r == culprit else 1 for r in range(count)], told
        for rank, end in enumerate(ends):
            if fault == "exception" and "ArithmeticError: planned" in end.error:
                continue  # a failure of one rank is raised on all
            if rank != culprit:
                assert f"first cause: rank {culprit}, " in end.error, told
            for waited in re.findall(r"waiting on .*? for ([0-9.]+) s", end.error):
                assert float(waited) < TIMEOUT + 10, told
    else:  # the last save had fewer calls left
        assert what["save"] == MINIBATCHES // EVERY, told
    # After a restart it resumes from the last save or the one before it: a save in the background
    # may still be running when the next one starts.
    found = run_ranks(trains, count, path, {"timeout": 30.0, "fault": None})
    (begun,) = {begun for begun, _, _ in found}
    if any(codes):
        assert begun >= EVERY * (what["save"] - 1 - what["asynchronous"]), told
    same({key: value for _, _, state in found for key, value in state.items()}, expected)
