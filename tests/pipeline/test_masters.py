"""Tests 16-bit weights with wider masters, which the optimizer updates."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.foreign_optimizers import FOREIGN
from helpers.pipeline_cases import batches, close, losses, mse, sgd, tanh_stages, torch_sgd
from helpers.random_settings import definition_of, method_of
from oracle.definition import Oracle
from torch import nn

import spectrain_ext as st

pytestmark = pytest.mark.usefixtures("float64")

OPTIMIZERS = {
    "SGD": (sgd(), torch_sgd()),
    "AdamW": (lambda p: st.optim.AdamW(p, lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
    **{f"foreign {name}": (make, make) for name, make in FOREIGN.items()},
}
# One of each kind: flush, none, two predictions, two stashed versions, written by the step.
OURS = ("gpipe", "vanilla", "spectrain", "pipedream-2bw", "second-order", "msnag-stash", "xpipe")
BY_DIFFERENCE = ("lwp-w", "spectrain difference")
CASES = [(method, name) for method in (*OURS, *BY_DIFFERENCE) for name in ("SGD", "AdamW")]
CASES += [(method, name) for method in ("vanilla", *BY_DIFFERENCE) for name in [*OPTIMIZERS][2:]]


def narrow(stages):
    return [stage.bfloat16() for stage in stages]


def tied(stages):
    stages[-1][0].weight = stages[0][0].weight
    return stages


def narrow_batches(count, size=3):
    return [(x.bfloat16(), y.bfloat16()) for x, y in batches(count, size)]


@pytest.mark.parametrize(("method", "name"), CASES)
def test_masters_do_not_drift(method, name):
    """In bfloat16 everything rounds; the losses and weights stay near the definition's."""
    stages, data = tied(narrow(tanh_stages(3))), narrow_batches(8, 4)
    ours, theirs = OPTIMIZERS[name]
    more = {"microbatches": 3, "master_dtype": torch.float32}
    oracle = Oracle(stages, theirs, mse, definition_of(method, "foreign" not in name), **more)
    seen = set()

    def optimizer(params):
        made = ours(params)
        made.register_step_pre_hook(lambda *_: seen.update((p.dtype, p.grad.dtype) for p in params))
        return made

    pipe = st.Pipeline(stages, optimizer, mse, method_of(method), **more)
    expected, found = oracle.run(data), losses(pipe, data)
    if "foreign" in name:
        assert seen == {(torch.float32, torch.float32)}
    near = {"rtol": 0.03, "atol": 0.02}
    torch.testing.assert_close(
        torch.stack(found).float(), torch.stack(expected).float(), rtol=0.02, atol=0.01
    )
    for theirs, mine in zip(oracle.stages, pipe.children(), strict=True):
        torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), **near)
    masters, state = pipe.masters(), pipe.state_dict()
    assert all(torch.equal(master.to(torch.bfloat16), p) for p, master in masters.items())
    assert torch.equal(state["0.0.weight"], state["2.0.weight"])
    assert pipe.get_submodule("2.0").weight not in masters


@pytest.mark.parametrize("kind", [st.optim.SGD, torch.optim.SGD])
def test_a_master_keeps_what_bfloat16_weights_would_lose(kind):
    """Updates of 1/512 of a weight of 1, which bfloat16 alone rounds away."""
    found = []
    for master in (None, torch.float32):
        stage = nn.Linear(1, 1, bias=False).bfloat16()
        nn.init.ones_(stage.weight)
        pipe = st.Pipeline(
            [stage],
            lambda p: kind(p, lr=1 / 512),
            lambda value, target: value.sum(),
            "sync",
            master_dtype=master,
        )
        one = torch.ones(1, 1, dtype=torch.bfloat16)
        losses(pipe, [(one, one)] * 64)
        found.append(stage.weight.item())
    assert found == [1.0, 1 - 64 / 512]


def test_a_parameter_without_elements_beside_a_master():
    """It has no address, before and during a step."""
    stages = narrow(tanh_stages(2))
    stages[1].register_parameter("nothing", nn.Parameter(torch.zeros(0, 3, dtype=torch.bfloat16)))
    more = {"microbatches": 1, "master_dtype": torch.float32}
    pipe = st.Pipeline(stages, FOREIGN["AdamW"], mse, "vanilla", **more)
    for _ in range(2):
        losses(pipe, narrow_batches(4))
    assert stages[1].nothing.dtype == torch.bfloat16


def test_after_release_16_bit_parameters_and_their_state_fit_together():
    stages, data = narrow(tanh_stages(2)), narrow_batches(3)
    pipe = st.Pipeline(stages, FOREIGN["AdamW"], mse, "vanilla", master_dtype=torch.float32)
    first = pipe.optimizers[0]
    for _ in range(2):
        losses(pipe, data)
        assert next(iter(first.state.values()))["exp_avg"].dtype == torch.float32
        pipe.release()
        state = next(iter(first.state.values()))
        assert state["exp_avg"].dtype == torch.bfloat16
        assert state["step"].dtype == torch.get_default_dtype()  # as torch made it
        mse(pipe(data[0][0]), data[0][1]).backward()
        first.step()


@pytest.mark.parametrize("kind", [st.optim.Adam, torch.optim.Adam])
@pytest.mark.parametrize("first", ["sync", "lwp-w"])
def test_a_change_of_the_method_keeps_their_digits(kind, first):
    """A method of two phases is two pipelines; the second gets the first one's state."""
    stages, runs = narrow(tanh_stages(3)), [narrow_batches(9), narrow_batches(5)]

    def make(method):
        own = copy.deepcopy(stages)
        more = {"microbatches": 1, "master_dtype": torch.float32}
        return st.Pipeline(own, lambda p: kind(p, lr=0.01), mse, method, **more)

    pipe, before, after = make(f"{first}+sync@9"), make(first), make("sync")
    found = [losses(pipe, run) for run in runs]
    assert losses(before, runs[0]) == found[0]
    after.load_state_dict(before.state_dict())
    there = after.masters()
    for p, q in zip(before.parameters(), after.parameters(), strict=True):
        there[q].copy_(before.masters()[p])
    for a, b in zip(before.optimizers, after.optimizers, strict=True):
        b.load_state_dict(a.state_dict())
    assert losses(after, runs[1]) == found[1]
    for a, b in zip(pipe.optimizers, after.optimizers, strict=True):
        torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=0, atol=0)
    close(pipe.state_dict(), after.state_dict())
