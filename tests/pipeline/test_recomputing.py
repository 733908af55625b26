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
    for recompute in (True, 1, 2):
        assert same(trained(stages, method, recompute, **more), expected)


@pytest.mark.parametrize("method", ["vanilla", "spectrain", "spectrain-local"])
def test_a_block_is_to_its_policy_what_a_stage_is_to_all_of_it(method):
    """With methods whose backwards use other weights, which the second forward uses too."""
    stages = [nn.Sequential(normed(1)) for _ in range(3)] + [nn.Sequential(nn.Identity())]
    whole, blocks, kept = (trained(stages, method, each) for each in (True, 1, False))
    assert same(blocks, whole) and not same(kept, whole)


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


# Blocks


class Own(nn.Module):
    """A stage with a list of blocks and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(5, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def calls(stage, names, recompute):
    """Count the calls of modules in the training of a minibatch."""
    found = []
    for name in names:
        stage.get_submodule(name).register_forward_pre_hook(
            lambda *_, name=name: found.append(name)
        )
    losses(st.Pipeline([stage], sgd(), mse, "sync", recompute=recompute), batches(1))
    return [found.count(name) for name in names]


def test_every_kth_block_and_what_a_function_picks():
    stage = nn.Sequential(*(nn.Linear(5, 5) for _ in range(5)))
    for k in (1, 2, 3, 5):
        found = calls(copy.deepcopy(stage), "01234", k)
        assert found == [1 + (n % k == 0) for n in range(1, 6)]
    names, asked = ["blocks.0", "blocks.0.0", "blocks.1", "head"], []

    def pick(name, module):
        asked.append(name)
        return name == "blocks.0" or isinstance(module, nn.Linear)

    assert calls(Own(), names, pick) == [2, 2, 1, 2]
    assert asked == ["blocks.0", "blocks.1", "blocks.1.0", "blocks.1.1", "head"]
    assert calls(Own(), names, 2) == [1, 1, 2, 1]


def test_names_are_those_of_the_uncut_model():
    stages = st.partitioning.cut_at(nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))), [2, 4])
    asked = []
    with pytest.warns(UserWarning, match="picks no block"):
        st.Pipeline(stages, sgd(), mse, recompute=lambda name, _: asked.append(name))
    assert asked == ["0", "1", "2", "3"]


def test_blocks_are_called_as_ever_behind_a_run():
    stages = [normed(1), *tanh_stages(1)]
    pipe = st.Pipeline(stages, sgd(), mse, recompute=1)
    before, names = attributes(stages), [*pipe.state_dict()]
    run = pipe.run(batches(3, size=6))
    next(run)
    assert attributes(stages) != before
    assert [*pipe.state_dict()] == names
    run.close()
    assert attributes(stages) == before
    with pytest.raises(st.StageError):
        losses(pipe, [*batches(2, size=6), (torch.zeros(6, 4), torch.zeros(6, 5))])
    assert attributes(stages) == before


def attributes(stages):
    return [{*vars(part)} for stage in stages for part in stage.modules()]


class Block(nn.Linear):
    def forward(self, value, seen, *, scale):
        x, shift = value
        seen.append(x.mean())
        return super().forward(x * scale["by"]).tanh() + shift + seen[-1] * len(seen)


class Many(nn.Module):
    """Gives its blocks more than a tensor: a tuple, a list that they change, a dict by name."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(5, 5) for _ in range(3))

    def forward(self, x):
        shift, seen = x.sum(1, keepdim=True), []
        for block in self.blocks:
            x = block((x, shift), seen, scale={"by": shift})
        return x


def traced():
    points = ["blocks.0.1", "blocks.1", "head"]
    return st.partition(Own(), 2, torch.randn(6, 5), split_points=points, profile="parameters")


@pytest.mark.parametrize("make", [lambda: [Many(), Many()], traced])
def test_blocks_of_every_kind_change_no_bit(make):
    stages = make()
    assert same(*(trained(stages, "pipedream", each) for each in (False, 1)))


@pytest.mark.parametrize("method", ["gpipe", "spectrain"])
def test_a_block_that_works_in_place_on_what_it_is_given(method):
    stages = [nn.Sequential(nn.Linear(5, 5), nn.ReLU(inplace=True)) for _ in range(2)]
    pipe = st.Pipeline(stages, sgd(), mse, method, recompute=2)
    with pytest.raises(st.StageError, match=r"block '1' works in place.*recompute=True"):
        losses(pipe, batches(3))
    trained([nn.Sequential(stage) for stage in stages], method, 1)  # with its input around it


def compiled():
    stage = tanh_stages(1)[0]
    stage.compile(backend="eager")
    return [stage]


@pytest.mark.parametrize(
    ("make", "recompute", "said"),
    [
        (lambda: st.partition(Own(), 2, torch.randn(6, 5)), 1, r"stages\[0\] is one traced graph"),
        (lambda: st.partition(Own(), 2, torch.randn(6, 5)), lambda *_: True, "split_points"),
        (compiled, 1, "block '.*' is inside of a compiled module"),
        (lambda: [torch.compile(*tanh_stages(1), backend="eager")], 1, "inside of a compiled mod"),
    ],
)
def test_stages_without_blocks_are_refused(make, recompute, said):
    with pytest.raises(ValueError, match=said):
        st.Pipeline(make(), sgd(), mse, recompute=recompute)


# In host memory


def views(x, linear, out):
    q, k, v = linear(x).unflatten(1, (12, 5)).chunk(3, 1)
    return x + out((q * k * v).flatten(1))


def viewing():
    return nn.Sequential(Function(views, nn.Linear(5, 60), nn.Linear(20, 5)))


@pytest.mark.parametrize("recompute", [False, 1])
@pytest.mark.parametrize("method", ["gpipe", "spectrain", "zb-h1", "pipedream"])
def test_activations_on_the_host_change_no_bit(method, recompute):
    """Of a kilobyte or more: those of the oracle and of random programs stay."""
    stages, more = [viewing(), viewing()], {"data": batches(4, 60), "microbatches": 3}
    runs = (trained(stages, method, recompute, offload=o, **more) for o in (None, "activations"))
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
