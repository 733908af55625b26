"""Tests how often an instruction calls CUDA and torch: most of a small stage's time on a GPU."""

from __future__ import annotations

import bench_calls
import cuda_calls
import pytest

from spectrain_ext.transport import CudaStream

#: At most: streams entered, events recorded, waits for events.
LIMITS = {
    ("auto", 4): (1.2, 2.0, 2.5),
    ("1f1b", 4): (1.2, 2.0, 2.5),
    ("vanilla", 1): (1.5, 2.5, 3.0),
    ("spectrain", 1): (1.5, 2.5, 3.0),
}


@pytest.mark.parametrize(("method", "microbatches"), LIMITS)
def test_calls_of_an_instruction(method: str, microbatches: int) -> None:
    found = bench_calls.per_instruction(method, microbatches)
    entered, recorded, waited = LIMITS[method, microbatches]
    assert 0 < found[cuda_calls.ENTERED] <= entered
    assert 0 < found[cuda_calls.RECORDED] <= recorded
    assert 0 < found[cuda_calls.WAITED] <= waited
    # One of four forwards and one of four backwards sends nothing; a batch has two tensors.
    assert found[cuda_calls.COPIED] == 0.75 and found[cuda_calls.BATCHES] == 0.25
    assert found[cuda_calls.BACKWARDS] == 0.5  # one for each backward
    predictions = 1 / 8 if method == "spectrain" else 0.0  # of stage 0, for its backward
    assert found[cuda_calls.KERNELS] == 0.5 / microbatches + predictions
    # Torch copies the batch and the result; the losses of microbatches are weighted and added up.
    for_results = 2 * microbatches if microbatches > 1 else 1
    assert found[cuda_calls.OPERATORS] == 0.25 + for_results / (8 * microbatches)
    assert not found.get(cuda_calls.ALLOCATIONS)


def test_calls_without_need_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """If every point is recorded, and waited for again."""
    mark, needed = CudaStream.mark, bench_calls.per_instruction("auto", 4)

    def recorded(stream: CudaStream) -> object:
        point = type(mark(stream))(stream, None)
        point.fix()
        return point

    monkeypatch.setattr(CudaStream, "mark", recorded)
    found = bench_calls.per_instruction("auto", 4)
    for what in (cuda_calls.RECORDED, cuda_calls.WAITED):
        assert found[what] > needed[what] + 0.1


def test_the_table_has_all_counts() -> None:
    lines = bench_calls.written(bench_calls.counts()).splitlines()
    assert len(lines) == 2 + len(bench_calls.ROWS)
    assert "| streams entered | 1.06 | 1.06 | 1.06 | 1.31 | 1.44 | " in lines[2]
