"""Tests gradient clipping beyond what ``oracle.cases`` has: inner, because it counts launches."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.pipeline_cases import Compared, batches, losses, mse, sgd, tanh_stages
from oracle.methods import hybrid as defined
from torch import nn

import spectrain_ext as st
from spectrain_ext.method import find_method, recipe_clip, second_order
from spectrain_ext.pipeline.loads import gradient_norm

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(
    ("first", "then", "scopes"),
    [
        ("pipedream", "1f1b", "each stage, then all stages"),
        ("gpipe", "spectrain", "all stages, then each stage"),
    ],
)
def test_each_phase_has_its_own_scope(first, then, scopes, caplog):
    caplog.set_level("INFO")
    more = {"definition": defined(first, then, 5), "microbatches": 2, "clip_norm": 0.03}
    Compared(tanh_stages(3), st.hybrid(first, then, after=5), **more).run(batches(8, size=4))
    assert f"gradients are clipped by the norm of {scopes}" in caplog.text


def test_a_method_may_clip():
    method = second_order(clip=recipe_clip)
    norms = []
    pipe = st.Pipeline(tanh_stages(4), sgd(lr=0.5), lambda a, b: 50 * mse(a, b), method)

    def note(opt, *_):
        grads = [p.grad for group in opt.param_groups for p in group["params"]]
        norms.append(float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))))

    for opt in pipe.optimizers:
        opt.register_step_pre_hook(note)
    losses(pipe, batches(8))
    assert max(norms) <= 0.285 + 1e-9
    assert sum(norm > 0.28 for norm in norms) > 8


BAD = dataclasses.replace(find_method("vanilla"), name="bad", clip=lambda place: place.stage)


@pytest.mark.parametrize(
    ("error", "match", "more"),
    [
        (ValueError, "expected 'auto', 'stage' or 'global', got 'all'", {"clip_scope": "all"}),
        (ValueError, "'global' needs a clip_norm", {"method": "sync", "clip_scope": "global"}),
        (ValueError, r"clip_norm: expected a number > 0, got -1", {"clip_norm": -1}),
        (ValueError, "clip_norm: expected a number > 0, got nan", {"clip_norm": float("nan")}),
        (TypeError, "clip_norm: expected a number, got str", {"clip_norm": "1"}),
        (ValueError, "'bad' for stage 0 of 3: expected a number > 0, got 0", {"method": BAD}),
    ],
)
def test_what_is_refused(error, match, more):
    with pytest.raises(error, match=match):
        st.Pipeline(tanh_stages(3), sgd(), mse, **more)


def test_the_norm_of_large_16_bit_gradients_does_not_overflow():
    p = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    p.grad = torch.full((4,), 60_000.0, dtype=torch.float16)
    assert gradient_norm([p], torch.device("cpu")).item() == pytest.approx(119_968.0, rel=1e-3)
    assert gradient_norm([], torch.device("cpu")).item() == 0.0
    q = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    q.grad = torch.tensor([3 + 4j, 0j], dtype=torch.complex64)
    assert gradient_norm([q], torch.device("cpu")).abs().item() == pytest.approx(5.0)
