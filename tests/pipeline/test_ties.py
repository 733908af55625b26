"""Tests tied weights: who owns them, where they show, and how they are said.

``oracle.cases`` has their results, for every kind of method and with every other setting.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.pipeline_cases import Compared, batches, close, losses, mse, sgd, tanh_stages
from helpers.random_modules import Function
from torch import nn

import spectrain_ext as st

pytestmark = pytest.mark.usefixtures("float64")


def tied(n):
    """Return stages of two layers each; the first and the last share a weight."""
    stages = tanh_stages(n)
    stages[-1][0].weight = stages[0][0].weight
    return stages


# Ownership


def test_the_first_stage_alone_has_it_in_its_optimizer():
    pipe = st.Pipeline(tied(3), sgd(), mse)
    held = [[p for group in o.param_groups for p in group["params"]] for o in pipe.optimizers]
    assert list(map(len, held)) == [4, 4, 3]
    assert held[0][0] is pipe.get_submodule("0.0").weight
    assert pipe.get_submodule("2.0").weight not in set(held[2])


@pytest.mark.parametrize("method", ["gpipe", "spectrain", "auto"])
def test_several_on_a_stage_and_one_with_nothing_of_its_own(method):
    stages = tied(3)
    stages[1][2].bias = stages[0][2].bias
    stages[2][2].weight = stages[0][0].weight  # the third time, twice on one stage
    stages[2][2].bias = stages[1][0].bias
    stages[2][0].bias = stages[0][0].bias
    compared = Compared(stages, method, microbatches=3)
    compared.run(batches(8, size=3))
    assert len(compared.pipe.optimizers) == 2
    with pytest.raises(st.StageError):
        losses(compared.pipe, [(torch.zeros(3, 4), torch.zeros(3, 5))])
    assert torch.equal(*(compared.pipe.get_submodule(f"{k}.0").weight for k in (0, 2)))
    losses(compared.pipe, batches(2, size=3))


class Sometimes(nn.Module):
    """Uses its weight in every second forward."""

    def __init__(self, linear, first):
        super().__init__()
        self.linear, self.other = linear, nn.Linear(5, 5)
        self.turn = first

    def forward(self, x):
        self.turn += 1
        return (self.linear if self.turn % 2 else self.other)(x)


@pytest.mark.parametrize("firsts", [(0, 0), (0, 1), (1, 0)])
def test_weights_without_a_gradient(firsts):
    stages = tied(2)
    stages = [nn.Sequential(*stages[k][1:], Sometimes(stages[k][0], firsts[k])) for k in range(2)]
    Compared(stages, "sync").run(batches(7))


@pytest.mark.parametrize("sparse", [(True, False), (True, True)])
def test_sparse_gradients_are_the_dense_ones(sparse):
    """Random programs compare a tied head, whose gradient is dense, with the uncut model."""
    data, found = [(torch.randint(7, (4,)), torch.randn(4, 5)) for _ in range(6)], []
    table = torch.randn(7, 5)
    middle = tanh_stages(1)
    for first, last in ((False, False), sparse):
        tables = [nn.Embedding(7, 5, _weight=table.clone(), sparse=s) for s in (first, last)]
        tables[1].weight = tables[0].weight
        last = Function(lambda x, table: x + table(torch.arange(len(x)).remainder(3)), tables[1])
        stages = [tables[0], *copy.deepcopy(middle), last]
        pipe = st.Pipeline(stages, sgd(), mse, "gpipe", microbatches=1)
        found.append((torch.stack(losses(pipe, data)), dict(pipe.state_dict())))
    close(*found)


# Visibility


def test_changes_between_runs_are_the_copies_as_well():
    pipe, data = st.Pipeline(tied(3), sgd(), mse, "vanilla"), batches(3)
    losses(pipe, data)
    first, last = pipe.get_submodule("0.0").weight, pipe.get_submodule("2.0").weight
    for look in (pipe.state_dict, lambda: pipe(data[0][0]), lambda: pipe.evaluate(data)):
        first.data.mul_(0.5)  # which autograd does not see
        look()
        assert torch.equal(first, last)
    state = {name: value.clone() for name, value in pipe.state_dict().items()}
    state["0.0.weight"].fill_(0.5)
    del state["2.0.weight"]
    pipe.load_state_dict(state, strict=False)
    assert last.eq(0.5).all()


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "released"])
@pytest.mark.parametrize("stages", [1, 3])
def test_a_state_of_a_model_without_the_tie_is_refused(stages, bound):
    def made():
        model = nn.Sequential(*tied(3))
        return st.Pipeline([model] if stages == 1 else [*model], sgd(), mse, "vanilla")

    pipe = made()
    losses(pipe, batches(3))
    if not bound:
        pipe.release()
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    names = [name for name in before if name.endswith(("0.0.weight", "2.0.weight"))]
    assert len(names) == 2
    state = {name: value + 1 for name, value in before.items()}
    state[names[1]][0, 0] += 1
    with pytest.raises(ValueError, match=f"load_state_dict: '{names[0]}' and '{names[1]}' are one"):
        pipe.load_state_dict(state)
    assert all(torch.equal(pipe.state_dict()[name], value) for name, value in before.items())
    state[names[1]] = state[names[0]].double().clone()
    pipe.load_state_dict(state)
    assert all(torch.equal(pipe.state_dict()[name], value + 1) for name, value in before.items())


def test_release_ties_them_again():
    stages, data = tied(3), batches(6)
    pipe = st.Pipeline(stages, sgd(), mse, "spectrain")
    other = st.Pipeline(copy.deepcopy(stages), sgd(), mse, "spectrain")  # copied separately
    for _ in range(2):
        assert torch.equal(*(torch.stack(losses(each, data)) for each in (pipe, other)))
        assert stages[0][0].weight is not stages[2][0].weight
        pipe.release()
        assert stages[0][0].weight is stages[2][0].weight


@pytest.mark.parametrize("copies", [["2.0"], ["1.0", "1.2"]])
@pytest.mark.parametrize("compiled", [False, True])
def test_said_by_an_attribute(copies, compiled):
    """One copy, or two on a stage; also of compiled stages, whose names have a prefix."""
    one = nn.ModuleList(tanh_stages(3))
    for name in copies:
        one.get_submodule(name).weight = one[0][0].weight
    apart = copy.deepcopy(one)
    for name in copies:
        apart.get_submodule(name).weight = nn.Parameter(torch.zeros(5, 5))  # the first one counts
    (stage,) = {int(name[0]) for name in copies}
    ties = {f"{name[2:]}.weight": (0, "0.weight") for name in copies}
    apart[stage].cut = st.partitioning.Cut(ties=ties)
    data, found = batches(6), []
    wrapped = [torch.compile(s, backend="eager") for s in apart] if compiled else apart
    for stages in (wrapped, one):
        pipe = st.Pipeline([*stages], sgd(), mse, "spectrain")
        found.append((torch.stack(losses(pipe, data)), [*pipe.state_dict().values()]))
        pipe.release()
    close(*found)
    for name in copies:
        assert torch.equal(apart.get_submodule(name).weight, apart[0][0].weight)


# Errors


@pytest.mark.parametrize(
    ("said", "error", "why"),
    [
        ([], TypeError, r"stages\[2\]\.cut\.ties: expected a mapping"),
        ({"x": (0, "0.weight")}, ValueError, r"stages\[2\].*: it has no parameter 'x'"),
        ({"0.weight": (0, "x")}, ValueError, r"tied to 'x' of stages\[0\], which there is n"),
        ({"0.weight": (2, "0.weight")}, ValueError, r"index of an earlier stage, .*got \(2,"),
        ({"0.weight": "0.weight"}, ValueError, r"index of an earlier stage, .*got '0\.weight'"),
        ({"0.weight": (0, "0.bias")}, ValueError, r"tied to '0\.bias' of stages\[0\] and must"),
    ],
)
def test_a_wrong_attribute(said, error, why):
    stages = tanh_stages(3)
    stages[2].cut = st.partitioning.Cut(ties=said)
    with pytest.raises(error, match=why):
        st.Pipeline(stages, sgd(), mse)


def test_a_copy_that_was_replaced():
    stages = tied(2)
    pipe = st.Pipeline(stages, sgd(), mse)
    stages[1][0].weight = nn.Parameter(torch.zeros(5, 5))
    with pytest.raises(RuntimeError, match=r"stages\[1\]: parameter '0\.weight', a copy of '0\.w"):
        losses(pipe, batches(2, size=4))


def test_a_pipeline_that_is_not_made_leaves_them_tied():
    stages = tied(3)

    def fails_for_the_last(params):
        if len(params) == 3:
            raise ArithmeticError("fails")
        return sgd()(params)

    def scheduler(optimizer):
        fails_for_the_last(optimizer.param_groups[0]["params"])
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    for optimizer, more in ((fails_for_the_last, {}), (sgd(), {"scheduler": scheduler})):
        with pytest.raises(ArithmeticError, match="fails"):
            st.Pipeline(stages, optimizer, mse, **more)
        assert stages[0][0].weight is stages[2][0].weight


@pytest.mark.parametrize("kind", [st.optim.SGD, torch.optim.SGD])
def test_a_hook_of_the_optimizer_sees_the_whole_gradient(kind):
    stages, data, seen = tied(3), batches(1, size=6), []
    whole = copy.deepcopy(nn.Sequential(*stages))
    mse(whole(data[0][0]), data[0][1]).backward()
    weight = stages[0][0].weight
    pipe = st.Pipeline(stages, lambda p: kind(p, lr=0.05), mse, "sync", microbatches=2)
    pipe.optimizers[0].register_step_pre_hook(lambda *_: seen.append(weight.grad.clone()))
    losses(pipe, data)
    close(seen, [whole[0][0].weight.grad])


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_gradient_hook_would_see_only_a_part_and_is_refused(register, k):
    pipe = st.Pipeline(tied(3), sgd(), mse, "sync")
    hooked = pipe.get_submodule(f"{k}.0").weight
    before = hooked.detach().clone()
    handle = getattr(hooked, register)(lambda *_: None)
    name = rf"stages\[{k}\]: parameter '0.weight' is tied over stages and has a gradient"
    with pytest.raises(ValueError, match=name + r".*register_step_pre_hook"):
        losses(pipe, batches(2))
    assert torch.equal(hooked, before)
    handle.remove()
    losses(pipe, batches(2))


# Memory in common without a tie


def of_two_stages(first, second):
    second.weight.data = first.weight.data
    return [first, second]


def of_one_stage(first, second):
    second.weight.data = first.weight.data.T
    return [nn.Tanh(), nn.Sequential(first, second)]


def with_a_frozen_part(first, second):
    second.part = nn.Parameter(first.weight.data[2:4], requires_grad=False)
    return [second, first]


def with_a_buffer(first, second):
    first.register_buffer("old", first.weight.detach())
    return [first, second]


def with_an_attribute(first, second):
    second.row = first.weight.data.view(torch.int64)[3]
    return [first, second]


def with_an_unregistered_parameter(first, second):
    vars(second)["hidden"] = nn.Parameter(first.weight.data)
    return [first, second]


def with_a_list(first, second):
    second.rows = {"of the first": [None, *first.weight.data]}
    return [first, second]


@pytest.mark.parametrize(
    ("share", "match"),
    [
        (of_two_stages, r"stages\[1\]: parameter 'weight' .*with parameter 'weight' of stages\[0"),
        (of_one_stage, r"stages\[1\]: parameter '1.weight' .* parameter '0.weight' of stages\[1\]"),
        (with_a_frozen_part, r"stages\[1\]: parameter 'weight' .* parameter 'part' of stages\[0\]"),
        (with_a_buffer, r"stages\[0\]: buffer 'old' .* parameter 'weight' .*share the Parameter"),
        (with_an_attribute, r"stages\[1\]: attribute 'row' .* parameter 'weight' of stages\[0\]"),
        (with_an_unregistered_parameter, r"attribute 'hidden' .* parameter 'weight' of stages\[0"),
        (with_a_list, r"stages\[1\]: attribute 'rows' .* parameter 'weight' of stages\[0\]"),
    ],
)
def test_memory_in_common_is_no_tie(share, match):
    stages = share(*(nn.Linear(5, 5) for _ in range(2)))
    before = [(p, p.data_ptr()) for stage in stages for p in stage.parameters()]
    with pytest.raises(ValueError, match=match):
        st.Pipeline(stages, sgd(), mse)
    assert all(p.data_ptr() == address for p, address in before)


def views_of(memory, *parts):
    """Return linear layers without biases whose weights are parts of one matrix."""
    layers = [nn.Linear(5, 5, bias=False) for _ in parts]
    for layer, part in zip(layers, parts, strict=True):
        layer.weight.data = memory[part]
    return layers


def test_parts_of_one_memory_train_as_parameters_of_their_own():
    rows = views_of(torch.randn(10, 5), slice(5), slice(5, None))
    columns = views_of(torch.randn(5, 10), (slice(None), slice(5)), (slice(None), slice(5, None)))
    frozen = of_two_stages(*(nn.Linear(5, 5).requires_grad_(False) for _ in range(2)))
    normed = nn.utils.spectral_norm(nn.Linear(5, 5))  # its attribute is the weight's, until used
    stages = [nn.Sequential(rows[0], columns[1], frozen[0]), nn.Sequential(columns[0], rows[1])]
    compared = Compared([*stages, frozen[1], normed], "sync")
    compared.run(batches(4))
    compared.pipe.release()
    st.Pipeline([*compared.pipe.children()], sgd(), mse)
