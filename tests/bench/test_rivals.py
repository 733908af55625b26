"""Tests bench/rivals: shapes, bytes, equal results of all rivals, sampling in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rivals import contest, in_torch
from rivals.operations import OPERATIONS, STAGE, Operation, applies, ours
from rivals.workloads import FP32, MIXED, PRECISIONS, Precision, Streams, Workload


def test_bytes_per_weight_are_the_least_possible() -> None:
    got = {}
    for precision in (FP32, MIXED):
        work = Workload("w", ((2, 5),), precision)
        got[precision.name] = [op.bytes_moved(work) // 10 for op in OPERATIONS]
    #                        predict_ ..         SGD       AdamW       stage
    assert got["fp32"] == [12, 12, 8, 16, 16, 20, 24, 28, 28, 32, 36, 36]
    assert got["mixed"] == [12, 10, 8, 16, 16, 18, 20, 22, 26, 28, 30, 30]


def _run(operation: Operation, work: Workload, pick: Callable[[Streams], Any]) -> Streams:
    """Start every implementation from the same values."""
    s = Streams(work)
    for letter in operation.letters:
        s[letter]
    call = pick(s)
    if call is not None:
        call()
    return s


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=lambda p: p.name)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
def test_rivals_compute_the_same(
    operation: Operation, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    work = Workload("w", ((40,), (7, 3)), precision)
    if not applies(operation, work):
        return

    def table(s: Streams) -> dict[str, Any]:
        return {**ours(operation, s), **in_torch.rivals(operation, s)}

    before = Streams(work)
    expected = _run(operation, work, lambda s: table(s)["Plan"])
    changed = [c for c in operation.letters if not torch.equal(before[c][0], expected[c][0])]
    assert set(changed) == set(operation.writes) or precision is not FP32  # too narrow for a step
    names = [name for name in table(Streams(work)) if name != "Plan"]
    results = {name: _run(operation, work, lambda s, n=name: table(s)[n]) for name in names}
    if precision.name != "bf16":

        def compiled(s: Streams) -> None:
            in_torch.compiled(operation, [s])  # this also runs it once

        results["torch.compile"] = _run(operation, work, compiled)
    assert results or operation is STAGE
    for name, s in results.items():
        for letter in operation.letters:
            for a, b in zip(s[letter], expected[letter], strict=True):
                message = f"{operation.name}, {name}, {letter}"
                torch.testing.assert_close(a.detach(), b, msg=message)


class Fake:
    """A contestant with known samples."""

    how = "clock"

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def sample(self) -> float:
        self.log.append(self.name)
        return float(len(self.log))


def test_contestants_take_turns_each_round_from_another_one() -> None:
    log: list[str] = []
    field = {name: Fake(name, log) for name in "abc"}
    times = contest.take_turns(field, budget_s=0.0, at_least=3, at_most=3)
    assert "".join(log) == "abcbcacab"
    assert times["a"] == [1.0, 6.0, 8.0]
    log.clear()
    assert len(contest.take_turns(field, 0.0, at_least=1, at_most=9)["b"]) == 1
    assert len(contest.take_turns(field, 1e9, at_least=1, at_most=9)["b"]) == 9


def test_a_contest_measures_every_implementation_and_copy() -> None:
    settings = contest.Settings(case_s=0.0)
    with pytest.raises(contest.TooLarge, match=r"needs 0\.0 GiB, 0\.0 may be used"):
        small = contest.Settings(memory_bytes=2**20)
        contest.contest(OPERATIONS[0], Workload("large", ((2**20,),)), small)
    for work in (Workload("tiny", ((33,), (8,))), Workload("tiny", ((33,),), MIXED)):
        for operation in OPERATIONS:
            found = contest.contest(operation, work, settings)
            assert list(found) == contest.names(operation, work, settings)
            kinds = [times.about["kind"] for times in found.values()]
            assert "ours" in kinds and kinds.count("copy") == 3
            assert "rival" in kinds or operation is STAGE
            for times in found.values():
                entry = times.as_benchmark()["stats"]
                assert entry["rounds"] == len(times.seconds) >= 5
                assert entry["median"] >= entry["min"] > 0
                nbytes = 10 * times.about["bytes"] // times.about["elements"]
                assert nbytes // 10 <= operation.bytes_per_element(work)


@pytest.mark.cuda
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
def test_a_contest_on_a_device(operation: Operation) -> None:
    settings = contest.Settings(device="cuda", case_s=0.0)
    work = Workload("small", ((4099,), (8,)))
    found = contest.contest(operation, work, settings)
    assert list(found) == contest.names(operation, work, settings)
    assert found["Plan"].about["how"] == "graph"
    assert all(times.about["how"] in ("graph", "events") for times in found.values())
    assert all(min(times.seconds) > 0 for times in found.values())
