"""What a stage holds: as predicted from the schedule, and as measured."""

from __future__ import annotations

import pytest
import torch
from helpers.pipeline_cases import (
    batches,
    float64,  # noqa: F401  # a fixture
    losses,
    mse,
    sgd,
    tanh_stages,
)
from torch import nn

import spectrain_ext as st

NAMES = [name for name in st.methods() if name not in ("spectrain-ema", "xgrad")]


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize(
    ("dtype", "parts"),
    [
        (torch.bfloat16, 1),
        *(
            pytest.param(*more, marks=pytest.mark.nightly)
            for more in ((torch.float64, 1), (torch.float64, 4), (torch.bfloat16, 4))
        ),
    ],
    ids=str,
)
def test_measured_is_predicted(method, parts, dtype):
    if method in ("pipedream-2bw", "error-feedback"):
        parts += 4
    master = torch.float32 if dtype == torch.bfloat16 else None
    stages = [stage.to(dtype) for stage in tanh_stages(4)]
    stages.insert(2, nn.Tanh())
    pipe = st.Pipeline(stages, sgd(lr=1e-3), mse, method, microbatches=parts, master_dtype=master)
    predicted = pipe.predicted_memory()
    assert sum(stage.weight_bytes for stage in predicted) == pipe.weight_version_bytes
    data = [(x.to(dtype), y.to(dtype)) for x, y in batches(14, size=10)]
    losses(pipe, data)
    assert pipe.measured_memory() == predicted
    assert sum(stage.weight_bytes for stage in predicted) == pipe.weight_version_bytes
    pipe.release()
    assert [stage.weight_bytes for stage in pipe.measured_memory()] == [0] * 5


def test_the_numbers_of_a_few():
    def versions(method, **more):
        pipe = st.Pipeline(tanh_stages(4), sgd(), mse, method, **more)
        return [stage.versions for stage in pipe.predicted_memory()]

    assert versions("vanilla") == [1, 1, 1, 1]
    assert versions("spectrain") == [2, 2, 2, 2]
    assert versions("pipedream") == [4, 3, 2, 1]
    assert versions("pipedream", window="wide") == [7, 5, 3, 1]
    assert versions("lwp-w") == [3, 3, 3, 1]
    assert versions("pipedream-2bw", microbatches=4) == [2, 2, 2, 2]


def test_master_weights_are_float32_and_outlive_a_run():
    torch.manual_seed(0)
    stages = [stage.bfloat16() for stage in tanh_stages(2)]
    pipe = st.Pipeline(stages, sgd(lr=1e-6), mse, "spectrain", master_dtype=torch.float32)
    weights = pipe._weights[0]
    p = weights.params[0]
    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches(5)]
    before = p.detach().clone()
    losses(pipe, data)
    true = weights.storage.master.flat.views[p]
    assert true.dtype == torch.float32
    assert torch.equal(p, before)  # the updates are too small for bfloat16
    moved = true.clone()
    assert not torch.equal(moved, before.float())
    losses(pipe, [])
    assert torch.equal(true, moved)  # a new run goes on with all digits
    with torch.no_grad():
        p[0] = 0.5
    losses(pipe, [])
    assert torch.equal(true[0], torch.full_like(true[0], 0.5))
    assert torch.equal(true[1:], moved[1:])


def test_a_master_dtype_that_no_kernel_takes():
    with pytest.raises(ValueError, match=r"master_dtype: expected torch.float32, or None"):
        st.Pipeline(tanh_stages(2), sgd(), mse, master_dtype=torch.float64)
