"""Tests recomputation: a second forward with the backward's weights, and no other change."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.pipeline_cases import (
    Compared,
    batches,
    close,
    float64,  # noqa: F401  # a fixture
    losses,
    mse,
    sgd,
    tanh_stages,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import spectrain_ext as st
from spectrain_ext.partitioning import cut_at
from spectrain_ext.pipeline import activations


@pytest.mark.parametrize("method", ["sync", "1f1b", "vanilla", "pipedream", "spectrain", "xpipe"])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_oracle_recomputes_as_well(method, parts):
    compared = Compared(tanh_stages(4), method, microbatches=parts, recompute=True)
    compared.run(batches(10, size=4))
    compared.run(batches(3, size=4))


def test_a_first_layer_that_works_in_place():
    stages = [nn.Sequential(nn.ReLU(inplace=True), *s) for s in tanh_stages(3)]
    Compared(stages, "spectrain", recompute=True).run(batches(8))


def both(stages, method, data, loss_fn=mse, **more):
    """Return losses and states without and with recomputation."""
    found = []
    for recompute in (False, True):
        torch.manual_seed(1)
        own = [copy.deepcopy(stage) for stage in stages]
        loss = loss_fn() if loss_fn is Centred else loss_fn
        pipe = st.Pipeline(own, sgd(), loss, method, recompute=recompute, **more)
        found.append((torch.stack(losses(pipe, data)), pipe.state_dict()))
    return found


@pytest.mark.parametrize("method", ["sync", "gpipe", "pipedream"])
def test_where_forward_and_backward_weights_are_the_same_nothing_changes(method):
    """Dropout draws the same, and running statistics are updated once."""
    stages = [
        nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.4), nn.ReLU(inplace=True))
        for _ in range(3)
    ]
    (losses_a, state_a), (losses_b, state_b) = both(
        stages, method, batches(9, size=6), microbatches=2
    )
    close(losses_b, losses_a)
    assert state_a.keys() == state_b.keys()
    for name, tensor in state_a.items():
        close(state_b[name], tensor)
    assert state_b["0.1.num_batches_tracked"] == 18


def test_a_loss_with_random_numbers_of_its_own():
    def loss_fn(output, target):
        return mse(torch.dropout(output, 0.5, True), target)

    (losses_a, state_a), (losses_b, state_b) = both(
        tanh_stages(3), "pipedream", batches(8), loss_fn=loss_fn
    )
    close(losses_b, losses_a)
    close(state_b["2.0.weight"], state_a["2.0.weight"])


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
        return out if isinstance(target, int) else out.square().mean()


@pytest.mark.parametrize("method", ["sync", "gpipe", "pipedream"])
def test_module_buffers_are_those_of_the_forward(method):
    def stage():
        normed = [spectral_norm(nn.Linear(5, 5)), old_spectral_norm(nn.Linear(5, 5))]
        return nn.Sequential(normed[0], nn.Tanh(), Centred(), normed[1], nn.BatchNorm1d(5))

    (losses_a, state_a), (losses_b, state_b) = both(
        [stage() for _ in range(3)], method, batches(7, size=6), Centred, microbatches=2
    )
    close(losses_b, losses_a)
    assert state_a.keys() == state_b.keys()
    for name, tensor in state_a.items():
        close(state_b[name], tensor)
    assert state_b["0.2.calls"] == 14


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


class Pair(nn.Module):
    """Takes and returns a tuple with one member that needs no gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, value):
        x, index = value if isinstance(value, tuple) else (value, torch.arange(3))
        return self.linear(x).tanh() + index.sum() * 0.01, index


def test_tuples_and_members_without_a_gradient():
    stages = [Pair(), Pair(), Pair()]
    found = both(stages, "pipedream", batches(6), loss_fn=lambda out, y: mse(out[0], y))
    close(found[1][0], found[0][0])
    for name, tensor in found[0][1].items():
        close(found[1][1][name], tensor)


def test_only_inputs_are_kept():
    """Autograd's saved values are gone after the forward."""
    for recompute in (False, True):
        alive = []

        class Watched(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, alive=alive):
                ctx.marker = Marker(alive)
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                return gradient * 2, None

        class Layer(nn.Module):
            def forward(self, x, function=Watched):
                return function.apply(x)

        most = 0

        def note(output, target):
            nonlocal most
            most = max(most, len(alive))  # noqa: B023
            return mse(output, target)

        stages = [nn.Sequential(nn.Linear(5, 5), Layer()), *tanh_stages(3)]
        losses(st.Pipeline(stages, sgd(), note, "vanilla", recompute=recompute), batches(12))
        assert most == (0 if recompute else 3)


# Blocks


def normed(layers=3):
    """Return a stage of blocks with random numbers and all kinds of module buffers."""
    return nn.Sequential(
        *(
            nn.Sequential(
                old_spectral_norm(nn.Linear(5, 5)),
                nn.Dropout(0.3),
                Centred(),
                spectral_norm(nn.Linear(5, 5)),
                nn.BatchNorm1d(5),
            )
            for _ in range(layers)
        ),
        old_spectral_norm(nn.Linear(5, 5)),  # its hook makes its weight
    )


def trained(stages, method, recompute, data=None, **more):
    """Return losses, states and random numbers after a run."""
    torch.manual_seed(1)
    own = [copy.deepcopy(stage) for stage in stages]
    pipe = st.Pipeline(own, sgd(), mse, method, recompute=recompute, **more)
    torch.manual_seed(2)
    found = losses(pipe, data or batches(7, size=6))
    numbers = [state for random in pipe.random for state in random.states()]
    return [*found, *pipe.state_dict().values(), *numbers, torch.get_rng_state()]


def calls(stages, names, recompute, method="sync"):
    """Count the calls of modules in the training of a minibatch."""
    found = dict.fromkeys(names, 0)
    for name in names:
        k, _, inner = name.partition(".")

        def count(*_, name=name):
            found[name] += 1

        stages[int(k)].get_submodule(inner).register_forward_pre_hook(count)
    losses(st.Pipeline(stages, sgd(), mse, method, microbatches=1, recompute=recompute), batches(1))
    return found


@pytest.mark.parametrize("method", ["1f1b", "auto", "zb-h1", "pipedream"])
def test_recomputed_blocks_change_no_bit(method):
    """If the backward uses its forward's weights, numbers and buffers equal the first forward's."""
    stages = [normed() for _ in range(3)]
    expected = trained(stages, method, False, microbatches=3)
    for recompute in (1, 2, lambda name, module: isinstance(module, nn.BatchNorm1d)):
        found = trained(stages, method, recompute, microbatches=3)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("method", ["vanilla", "spectrain", "pipeoptim", "spectrain-local"])
def test_a_block_is_to_its_policy_what_a_stage_is_to_all_of_it(method):
    """With methods whose backwards use other weights, which the second forward uses too."""
    stages = [nn.Sequential(normed(2)) for _ in range(3)] + [nn.Sequential(nn.Identity())]
    whole, blocks, kept = (trained(stages, method, each) for each in (True, 1, False))
    assert all(map(torch.equal, blocks, whole))
    assert not all(map(torch.equal, kept, whole))


def test_every_kth_block_and_what_a_function_picks():
    names = [f"0.{n}" for n in range(5)]
    stages = [nn.Sequential(*(nn.Linear(5, 5) for _ in range(5)))]
    for k in (1, 2, 3, 5):
        found = calls(copy.deepcopy(stages), names, k)
        assert [*found.values()] == [1 + (n % k == 0) for n in range(1, 6)]

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
            self.head = nn.Linear(5, 5)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    names = ["0.blocks.0", "0.blocks.0.0", "0.blocks.1", "0.head"]
    asked = []

    def pick(name, module):
        asked.append(name)
        return name == "blocks.0" or isinstance(module, nn.Linear)

    assert [*calls([Own()], names, pick).values()] == [2, 2, 1, 2]
    assert asked == ["blocks.0", "blocks.1", "blocks.1.0", "blocks.1.1", "head"]
    assert [*calls([Own()], names, 2).values()] == [1, 1, 2, 1]


def test_names_are_those_of_the_uncut_model():
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    stages = cut_at(model, [2, 4])
    asked = []
    with pytest.warns(UserWarning, match="picks no block"):
        st.Pipeline(stages, sgd(), mse, recompute=lambda name, _: asked.append(name))
    assert asked == ["0", "1", "2", "3"]


def test_blocks_are_called_as_ever_behind_a_run():
    stages = [normed(1), *tanh_stages(1)]
    before = [{**vars(part)} for stage in stages for part in stage.modules()]
    names = [*stages[0].state_dict()]
    pipe = st.Pipeline(stages, sgd(), mse, recompute=1)

    def check():
        now = [{**vars(part)} for stage in stages for part in stage.modules()]
        assert [each.keys() for each in now] == [each.keys() for each in before]

    run = pipe.run(batches(3, size=6))
    next(run)
    assert "_compiled_call_impl" in vars(stages[0][0])
    assert [name.partition(".")[2] for name in pipe.state_dict()][: len(names)] == names
    run.close()
    check()
    with pytest.raises(ArithmeticError):
        list(pipe.run(fails(batches(2, size=6))))
    check()


def fails(data):
    yield from data
    raise ArithmeticError("planned")


def test_blocks_that_take_more_than_a_tensor():
    """A block's repeated input equals the first one, including containers that it changes."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, value, seen, *, scale):
            x, shift = value
            seen.append(x.mean())
            return self.linear(x * scale["by"]).tanh() + shift + seen[-1] * len(seen)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            shift, seen = x.sum(1, keepdim=True), []
            for block in self.blocks:
                x = block((x, shift), seen, scale={"by": shift})
            return x

    stages = [Own() for _ in range(2)]
    expected, found = (trained(stages, "pipedream", each) for each in (False, 1))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("method", ["gpipe", "spectrain"])
def test_a_block_that_works_in_place_on_what_it_is_given(method):
    stages = [nn.Sequential(nn.Linear(5, 5), nn.ReLU(inplace=True)) for _ in range(2)]
    pipe = st.Pipeline(stages, sgd(), mse, method, recompute=2)
    with pytest.raises(st.StageError, match=r"block '1' works in place.*recompute=True"):
        losses(pipe, batches(3))
    trained([nn.Sequential(stage) for stage in stages], method, 1)  # with its input around it


def test_a_checkpoint_inside_of_a_block():
    class Checkpointed(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.inner, self.reentrant = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.3)), reentrant

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=self.reentrant) + x

    for reentrant in (False, True):
        stages = [nn.Sequential(nn.Tanh(), Checkpointed(reentrant), nn.Tanh()) for _ in range(2)]
        stages[0].insert(0, nn.Linear(5, 5))
        expected, found = (trained(stages, "1f1b", each) for each in (False, 1))
        assert all(map(torch.equal, found, expected))


def test_a_stage_that_is_one_graph_has_no_blocks():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

        def forward(self, x):
            for block in self.blocks:
                x = torch.tanh(block(x)) + x
            return x

    model, data = Net(), batches(4, size=6)
    for recompute in (1, lambda name, module: True):
        with pytest.raises(ValueError, match=r"stages\[0\] is one traced graph.*split_points"):
            st.Pipeline(st.partition(model, 2, data[0][0]), sgd(), mse, recompute=recompute)
    points = [f"blocks.{n}" for n in (1, 2, 3)]
    parts = st.partition(model, 2, data[0][0], split_points=points, profile="parameters")
    expected, found = (trained(parts, "auto", each, data) for each in (False, 1))
    assert all(map(torch.equal, found, expected))


def test_blocks_inside_of_a_compiled_stage_are_refused():
    stage = tanh_stages(1)[0]
    stage.compile(backend="eager")
    for given in (stage, torch.compile(tanh_stages(1)[0], backend="eager")):
        with pytest.raises(ValueError, match=r"block '.*' is inside of a compiled module"):
            st.Pipeline([given], sgd(), mse, recompute=1)


# In host memory


class Strided(nn.Module):
    """Saves views of every kind, a buffer, a frozen weight, and values that it changes."""

    def __init__(self):
        super().__init__()
        self.linear, self.frozen = nn.Linear(5, 60), nn.Linear(20, 20).requires_grad_(False)
        self.out = nn.Linear(20, 5)
        self.register_buffer("scale", torch.randn(20))

    def forward(self, x):
        q, k, v = self.linear(x).unflatten(1, (12, 5)).chunk(3, 1)
        q, k, v = q.transpose(1, 2), k[:, :1].expand(-1, 4, -1).contiguous(), v[..., ::2]
        y = (q @ k).flatten(1)[:, :20] + v.exp().flatten(1).repeat(1, 2)[:, :20]
        y = self.frozen(y.sigmoid()).mul_(self.scale).relu_()
        return x + self.out(torch.dropout(y * y.exp(), 0.2, True))


@pytest.mark.parametrize("method", ["gpipe", "auto", "vanilla", "spectrain", "zb-h1", "pipedream"])
def test_activations_on_the_host_change_no_bit(method):
    stages = [nn.Sequential(Strided(), nn.BatchNorm1d(5)) for _ in range(3)]
    data = batches(6, size=60)
    expected = trained(stages, method, False, data, microbatches=3)
    found = trained(stages, method, False, data, microbatches=3, offload="activations")
    assert all(map(torch.equal, found, expected))
    blocks = trained(stages, method, 1, data, microbatches=3)
    found = trained(stages, method, 1, data, microbatches=3, offload="activations")
    assert all(map(torch.equal, found, blocks))


@pytest.mark.parametrize("method", ["gpipe", "spectrain"])
def test_what_leaves_for_the_host(method):
    """All but weights, module buffers, received and small tensors; each storage once."""
    left, made = [], []

    class Watched(Strided):
        def forward(self, x):
            y = self.linear(x)
            q, k, v = y.unflatten(1, (12, 5)).chunk(3, 1)
            made.append(StorageWeakRef(y.untyped_storage()))
            return x + self.out((q * k * v).flatten(1))

    def note(output, target):
        left.append(not any(storage.expired() for storage in made))
        copied.append(0)
        return mse(output, target)

    def counted(tensor):
        copied[-1] += tensor.nbytes
        return copy_of(tensor)

    copy_of, found = activations.on_host, []
    for offload in (None, "activations"):
        left, made, copied = [], [], [0]
        torch.manual_seed(1)
        stages = [Watched(), nn.Identity()]
        pipe = st.Pipeline(stages, sgd(), note, method, microbatches=1, offload=offload)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(activations, "on_host", counted)
            found.append(losses(pipe, batches(1, size=64)))
        assert left == [offload is None]
        # y, of which there are three views, and two products
        assert copied[0] == (0 if offload is None else 64 * 8 * (60 + 20 + 20))
    assert torch.equal(*map(torch.stack, found))


class Marker:
    """In a list while alive."""

    def __init__(self, alive):
        self.alive = alive
        alive.append(1)

    def __del__(self):
        self.alive.pop()


def test_a_loss_that_nothing_can_be_learned_from():
    pipe = st.Pipeline(tanh_stages(2), sgd(), lambda out, y: mse(out.detach(), y), recompute=True)
    with pytest.raises(st.StageError, match="does not depend on the output"):
        losses(pipe, batches(3))
    assert len(pipe._executor.stages[0]._tapes) == 0
