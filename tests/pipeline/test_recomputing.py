"""Tests recomputation: a second forward with the backward's weights, and no other change.

The oracle recomputes too: oracle/cases.py pairs it with every family of methods.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.passes import with_passes
from helpers.pipeline_cases import batches, float64, losses, mse, sgd, tanh_stages  # noqa: F401
from helpers.random_modules import Function
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm

import spectrain_ext as st


class Centred(nn.Module):
    """Reads buffers that it changes, in place and by replacement; a layer, and a loss."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(5))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x, target=0):
        self.calls = self.calls + 1
        out = (x - self.centre - target) * (1 + 1 / self.calls)
        self.centre.data.lerp_(x.detach().mean(0), 0.3)  # autograd does not see the new version
        return out if isinstance(target, int) else torch.dropout(out, 0.5, True).square().mean()


def normed(layers=2):
    """Return a stage of blocks with random numbers and all kinds of module buffers."""
    blocks = []
    for _ in range(layers):
        first, last = old_spectral_norm(nn.Linear(5, 5)), spectral_norm(nn.Linear(5, 5))
        blocks.append(nn.Sequential(first, nn.Dropout(0.3), Centred(), last, nn.BatchNorm1d(5)))
    return nn.Sequential(*blocks, old_spectral_norm(nn.Linear(5, 5)))  # its hook makes its weight


def trained(stages, method, recompute, data=None, loss_fn=mse, **more):
    """Return losses, states and random numbers after a run."""
    torch.manual_seed(1)
    stages, loss_fn = copy.deepcopy([*stages]), copy.deepcopy(loss_fn)
    pipe = st.Pipeline(stages, sgd(), loss_fn, method, recompute=recompute, **with_passes(more))
    torch.manual_seed(2)
    found = losses(pipe, data or batches(4, size=6))
    numbers = [state for random in pipe.random for state in random.states()]
    return [*found, *pipe.state_dict().values(), *numbers, torch.get_rng_state()]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("method", ["1f1b", "auto", "zb-h1", "pipedream"])
def test_recomputing_changes_no_bit_where_the_backwards_weights_are_the_forwards(method):
    """Random numbers and buffers are those of the first forward, the loss's as well."""
    stages, more = [normed(), normed()], {"microbatches": 3, "loss_fn": Centred()}
    expected = trained(stages, method, False, **more)
    assert same(trained(stages, method, True, **more), expected)


@pytest.mark.parametrize("method", ["vanilla", "spectrain", "pipedream", "zb-h1"])
def test_a_block_that_a_stage_checkpoints_is_recomputed_as_a_whole_stage_is(method):
    """With methods whose backwards use other weights, which the second forward uses too."""
    made = [nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.3), nn.Tanh()) for _ in range(3)]
    stages, more = [nn.Sequential(block) for block in made], {"microbatches": 2}
    whole, kept = (trained(stages, method, each, **more) for each in (True, False))
    wrapped = [nn.Sequential(checkpoint_wrapper(block)) for block in made]
    assert same(trained(wrapped, method, False, **more), whole)
    assert same(kept, whole) == (method in ("pipedream", "zb-h1"))


def test_a_second_forward_that_fails_leaves_the_buffers_of_the_first():
    class Failing(Centred):
        def forward(self, x):
            out = super().forward(x)
            if torch.is_grad_enabled() and self.calls == 3:
                raise ArithmeticError("planned")
            return out

    stages = [nn.Sequential(nn.Linear(5, 5), Failing()), *tanh_stages(1)]
    pipe = st.Pipeline(stages, sgd(), mse, "gpipe", microbatches=3, recompute=True)
    with pytest.raises(st.StageError, match="planned"):
        losses(pipe, batches(1))
    assert stages[0][1].calls == 3


# In host memory


def views(x, linear, out):
    q, k, v = linear(x).unflatten(1, (12, 5)).chunk(3, 1)
    return x + out((q * k * v).flatten(1))


def viewing():
    return nn.Sequential(Function(views, nn.Linear(5, 60), nn.Linear(20, 5)))


@pytest.mark.parametrize("method", ["gpipe", "spectrain", "zb-h1", "pipedream"])
def test_activations_on_the_host_change_no_bit(method):
    """Of a kilobyte or more: those of the oracle and of random programs stay."""
    stages, more = [viewing(), viewing()], {"data": batches(4, 60), "microbatches": 3}
    runs = (trained(stages, method, False, offload=o, **more) for o in (None, "activations"))
    assert same(*runs)


@pytest.mark.parametrize("method", ["gpipe", "spectrain"])
def test_what_leaves_for_the_host(method, monkeypatch):
    """All but weights, module buffers, received and small tensors; each storage once."""

    def note(output, target):
        seen.append((not made[-1].expired(), sum(copied)))
        return mse(output, target)

    def counted(tensor):
        copied.append(tensor.nbytes)
        return tensor.clone()

    made, seen, copied = [], [], []
    monkeypatch.setattr("spectrain_ext.passes.offload.on_host", counted)
    for offload in (None, "activations"):
        stages, more = [viewing(), nn.Identity()], {"microbatches": 1, "offload": offload}
        stages[0][0].layers[0].register_forward_hook(
            lambda module, given, y: made.append(StorageWeakRef(y.untyped_storage()))
        )
        losses(st.Pipeline(stages, sgd(), note, method, **with_passes(more)), batches(1, size=64))
    # y, of which there are three views, and two products
    assert seen == [(True, 0), (False, 64 * 8 * (60 + 20 + 20))]
