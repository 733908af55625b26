"""Tests clipping, recomputation, bfloat16 weights and small minibatches for each kind of method."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.pipeline_cases import (
    Compared,
    batches,
    float64,  # noqa: F401  # a fixture
    losses,
    mse,
    sgd,
    tanh_stages,
    torch_sgd,
)
from oracle.definition import Oracle
from torch import nn

import spectrain_ext as st

# One method of each kind: flush, no correction, two predictions, a stashed version, an old one, a
# prediction written by the step, shared weights.
KINDS = (
    "gpipe",
    "1f1b",
    "vanilla",
    "spectrain",
    "pipedream-vertical-sync",
    "pipedream-2bw",
    "second-order",
    "msnag-stash",
    "xpipe",
    "lwp-w",
)
every_kind = pytest.mark.parametrize("method", KINDS)


@every_kind
def test_clipping_per_stage(method):
    compared = Compared(tanh_stages(3), method, microbatches=4, clip_norm=0.03)
    compared.run(batches(8, size=5))
    compared.run(batches(3, size=5, last=2))


@pytest.mark.parametrize("method", ["sync", "gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("m", [1, 3])
def test_clipping_over_all_stages(method, m):
    compared = Compared(tanh_stages(3), method, microbatches=m, clip_norm=0.05, clip_scope="global")
    compared.run(batches(6, size=5, last=2))
    compared.run(batches(3, size=5))


def test_clipping_over_all_stages_is_clipping_of_one_model():
    stages, data = tanh_stages(3), batches(5, size=4)
    pipe = st.Pipeline(
        copy.deepcopy(stages),
        sgd(),
        mse,
        "1f1b",
        microbatches=2,
        clip_norm=0.05,
        clip_scope="global",
    )
    found = losses(pipe, data)
    model = nn.Sequential(*stages)
    optimizer = torch_sgd()(model.parameters())
    for (x, y), loss in zip(data, found, strict=True):
        optimizer.zero_grad()
        expected = mse(model(x), y)
        torch.testing.assert_close(loss, expected.detach())
        expected.backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.05
        optimizer.step()


@pytest.mark.parametrize("method", ["vanilla", "spectrain", "pipedream-2bw", "xpipe"])
def test_there_is_no_norm_over_stages_that_update_at_different_times(method):
    with pytest.raises(ValueError, match=r"(?s)clip_scope.*different times"):
        st.Pipeline(
            tanh_stages(2),
            sgd(),
            mse,
            method,
            microbatches=2,
            clip_norm=1.0,
            clip_scope="global",
        )


@every_kind
def test_recomputation(method):
    """The whole stage again, at the backward's weights."""
    compared = Compared(tanh_stages(3), method, microbatches=5, recompute=True)
    compared.run(batches(8, size=5))
    compared.run(batches(3, size=5, last=2))


@pytest.mark.parametrize("method", ["gpipe", "pipedream", "spectrain-stash", "pipedream-2bw"])
def test_recomputation_at_the_forwards_weights_changes_nothing(method):
    stages, data = tanh_stages(3), batches(8, size=4)
    found = [
        losses(
            st.Pipeline(
                copy.deepcopy(stages), sgd(), mse, method, microbatches=3, recompute=recompute
            ),
            data,
        )
        for recompute in (False, True)
    ]
    assert torch.equal(torch.stack(found[0]), torch.stack(found[1]))


@pytest.mark.parametrize("method", ["gpipe", "pipedream"])
def test_recomputation_draws_the_same_dropout_and_counts_a_batch_once(method):
    def stage():
        return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 5))

    stages, data = [stage() for _ in range(3)], batches(6, size=8)
    found = []
    for recompute in (False, True):
        torch.manual_seed(3)
        mine = copy.deepcopy(stages)
        pipe = st.Pipeline(mine, sgd(), mse, method, microbatches=2, recompute=recompute)
        found.append((losses(pipe, data), mine))
    assert torch.equal(torch.stack(found[0][0]), torch.stack(found[1][0]))
    for plain, again in zip(found[0][1], found[1][1], strict=True):
        for name, tensor in plain.state_dict().items():
            assert torch.equal(tensor, again.state_dict()[name]), name
        assert plain[1].num_batches_tracked == 12


@every_kind
@pytest.mark.parametrize(
    "optimizer",
    [
        (st.optim.SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        (st.optim.AdamW, torch.optim.AdamW, {"lr": 0.01}),
    ],
    ids=["SGD", "AdamW"],
)
def test_bfloat16_weights_with_a_float32_master(method, optimizer):
    """In bfloat16 everything rounds; the master must not drift."""
    kind, reference, options = optimizer
    stages = [stage.bfloat16() for stage in tanh_stages(3)]
    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches(8, size=4)]
    oracle = Oracle(
        stages,
        lambda p: reference(p, **options),
        mse,
        method,
        microbatches=3,
        master_dtype=torch.float32,
    )
    pipe = st.Pipeline(
        stages,
        lambda p: kind(p, **options),
        mse,
        method,
        microbatches=3,
        master_dtype=torch.float32,
    )
    expected, found = oracle.run(data), losses(pipe, data)
    torch.testing.assert_close(
        torch.stack(found).float(), torch.stack(expected).float(), rtol=0.02, atol=0.01
    )
    for params, stage in zip(oracle.params, pipe.children(), strict=True):
        for theirs, mine in zip(params, stage.parameters(), strict=True):
            assert mine.dtype == torch.bfloat16
            torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.01)


def test_a_master_keeps_what_bfloat16_weights_would_lose():
    """Updates of 1/512 of a weight of 1, which bfloat16 alone rounds away."""
    found = []
    for master in (None, torch.float32):
        stage = nn.Linear(1, 1, bias=False).bfloat16()
        nn.init.ones_(stage.weight)
        pipe = st.Pipeline(
            [stage],
            lambda p: st.optim.SGD(p, lr=1 / 512),
            lambda value, target: value.sum(),
            "sync",
            **({} if master is None else {"master_dtype": master}),
        )
        one = torch.ones(1, 1, dtype=torch.bfloat16)
        losses(pipe, [(one, one)] * 64)
        found.append(stage.weight.item())
    assert found == [1.0, 1 - 64 / 512]
