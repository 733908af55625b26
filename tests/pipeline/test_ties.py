"""Tests tied weights: who owns them, where they show, and how they are said.

``oracle.cases`` has their results, for every kind of method and with every other setting.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.pipeline_cases import (
    Compared,
    batches,
    close,
    losses,
    mse,
    sgd,
    tanh_stages,
    torch_sgd,
)
from torch import nn

import spectrain_ext as st

pytestmark = pytest.mark.usefixtures("float64")


def tied(n, places=(0, -1)):
    """Return stages of two layers each, several of which share the first one's weight."""
    stages = tanh_stages(n)
    for k in places[1:]:
        stages[k][0].weight = stages[places[0]][0].weight
    return stages


def alike(state, n):
    return torch.equal(state["0.0.weight"], state[f"{n - 1}.0.weight"])


# Ownership


def test_the_first_stage_alone_has_it_in_its_optimizer():
    pipe = st.Pipeline(tied(3), sgd(), mse)
    held = [[p for group in o.param_groups for p in group["params"]] for o in pipe.optimizers]
    assert list(map(len, held)) == [4, 4, 3]
    assert held[0][0] is pipe.get_submodule("0.0").weight
    assert pipe.get_submodule("2.0").weight not in set(held[2])


class Shared(nn.Module):
    """A stage with only the first stage's weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize("method", ["gpipe", "spectrain"])
def test_a_stage_with_nothing_of_its_own(method):
    stages = tanh_stages(2)
    compared = Compared([*stages, Shared(stages[0][2].weight)], method, microbatches=2)
    compared.run(batches(8, size=4))
    assert len(compared.pipe.optimizers) == 2
    losses(compared.pipe, batches(2, size=4))


def test_several_parameters_and_several_names():
    stages = tied(3)
    stages[1][2].bias = stages[0][2].bias
    stages[2][2].weight = stages[0][0].weight  # the third time, twice on one stage
    stages[2][2].bias = stages[1][0].bias
    Compared(stages, "auto", microbatches=3).run(batches(8, size=3))


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
    stages = tanh_stages(2)
    stages[1][0].weight = stages[0][0].weight
    stages = [nn.Sequential(*stages[k][1:], Sometimes(stages[k][0], firsts[k])) for k in range(2)]
    Compared(stages, "sync").run(batches(7))


class Scores(nn.Module):
    """A head with an embedding's weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x @ self.weight.t()


@pytest.mark.parametrize("sparse", [(False, False), (True, False), (True, True)])
def test_embedding_and_head(sparse):
    table = nn.Embedding(7, 5, sparse=sparse[0])
    again = nn.Embedding(7, 5, sparse=sparse[1])
    again.weight = table.weight
    where = torch.arange(7).remainder(3)

    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = again

        def forward(self, x):
            return x + self.table(where[: len(x)])

    stages = [table, tanh_stages(1)[0], Adds(), Scores(table.weight)]
    whole = copy.deepcopy(nn.Sequential(*stages))
    data = [(torch.randint(7, (4,)), torch.randint(7, (4,))) for _ in range(6)]
    loss_fn = nn.functional.cross_entropy
    pipe = st.Pipeline(stages, sgd(), loss_fn, "gpipe", microbatches=1)
    found = losses(pipe, data)
    dense = {p: torch.zeros_like(p) for p in whole.parameters()}
    for (x, y), loss in zip(data, found, strict=True):
        expected = loss_fn(whole(x), y)
        close(loss, expected.detach())
        for p, g in zip(dense, torch.autograd.grad(expected, list(dense)), strict=True):
            dense[p] = 0.9 * dense[p] + (g.to_dense() if g.is_sparse else g)
            p.data -= 0.05 * dense[p]
    close(dict(pipe.state_dict()), dict(whole.state_dict()))


# Visibility


def test_leaving_a_run_and_an_exception_in_it():
    pipe = st.Pipeline(tied(3), sgd(), mse, "spectrain")
    for result in pipe.run(batches(9)):
        if result.index == 3:
            break
    first, last = pipe.get_submodule("0.0"), pipe.get_submodule("2.0")
    assert torch.equal(first.weight, last.weight)
    bad = [*batches(4), (torch.zeros(3, 4), torch.zeros(3, 5))]
    with pytest.raises(st.StageError):
        losses(pipe, bad)
    assert torch.equal(first.weight, last.weight)
    assert last.weight.grad is None
    losses(pipe, batches(4))
    assert torch.equal(first.weight, last.weight)


def test_changes_between_runs_are_the_copies_as_well():
    pipe = st.Pipeline(tied(3), sgd(), mse, "vanilla")
    losses(pipe, batches(3))
    with torch.no_grad():
        pipe.get_submodule("0.0").weight.fill_(0.25)
    assert alike(pipe.state_dict(), 3)
    x = torch.randn(2, 5)
    expected = pipe(x)
    state = {name: value.clone() for name, value in pipe.state_dict().items()}
    state["0.0.weight"].fill_(0.5)
    del state["2.0.weight"]
    pipe.load_state_dict(state, strict=False)
    assert pipe.get_submodule("2.0").weight.eq(0.5).all()
    assert not torch.equal(pipe(x), expected)


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


def test_changes_that_autograd_does_not_see():
    pipe = st.Pipeline(tied(3), sgd(), mse, "vanilla")
    data = batches(3)
    losses(pipe, data)
    first, last = pipe.get_submodule("0.0").weight, pipe.get_submodule("2.0").weight
    for look in (pipe.state_dict, lambda: pipe(data[0][0]), lambda: pipe.evaluate(data)):
        first.data.mul_(0.5)
        look()
        assert torch.equal(first, last)
    assert alike(pipe.state_dict(), 3)


def test_release_ties_them_again():
    stages = tied(3)
    pipe = st.Pipeline(stages, sgd(), mse, "spectrain")
    alone = copy.deepcopy(stages)
    data = batches(6)
    first = losses(pipe, data)
    assert stages[0][0].weight is not stages[2][0].weight
    pipe.release()
    assert stages[0][0].weight is stages[2][0].weight
    second = losses(pipe, data)
    assert stages[0][0].weight is not stages[2][0].weight
    assert alike(pipe.state_dict(), 3)
    other = st.Pipeline(alone, sgd(), mse, "spectrain")  # copied separately
    assert torch.equal(torch.stack(first), torch.stack(losses(other, data)))
    assert torch.equal(torch.stack(second), torch.stack(losses(other, data)))


def test_a_pipeline_of_stages_that_another_one_has():
    stages = tied(2)
    st.Pipeline(stages, sgd(), mse)
    pipe = st.Pipeline(stages, sgd(), mse)
    losses(pipe, batches(3, size=4))
    assert alike(pipe.state_dict(), 2)
    assert sum(len(g["params"]) for o in pipe.optimizers for g in o.param_groups) == 7


def test_said_by_an_attribute():
    apart, one = tanh_stages(3), tied(3)
    with torch.no_grad():
        for mine, its in zip(apart, one, strict=True):
            mine.load_state_dict(its.state_dict())
        apart[2][0].weight.zero_()  # the first stage's weight counts
    apart[2].tied_parameters = {"0.weight": (0, "0.weight")}
    data, found = batches(6), []
    for stages in (apart, one):
        pipe = st.Pipeline(stages, sgd(), mse, "spectrain")
        found.append((torch.stack(losses(pipe, data)), pipe.state_dict()))
        assert alike(found[-1][1], 3)
    close(found[0], found[1])


def test_one_parameter_with_two_copies_on_a_stage():
    stages = [nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(2)]
    stages[1].tied_parameters = {f"{place}.weight": (0, "0.weight") for place in (0, 2)}
    for place in (0, 2):
        stages[1][place].load_state_dict(
            {**stages[1][place].state_dict(), "weight": stages[0][0].weight}
        )
    one = copy.deepcopy(stages)
    for place in (0, 2):
        one[1][place].weight = one[0][0].weight
    data, found = batches(6), []
    for these in (stages, one):
        pipe = st.Pipeline(these, sgd(), mse, "sync")
        found.append((torch.stack(losses(pipe, data)), pipe.state_dict()))
    close(found[0], found[1])
    weights = [found[0][1][name] for name in ("0.0.weight", "1.0.weight", "1.2.weight")]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


def test_stages_that_are_compiled():
    plain = tied(3)
    stages = copy.deepcopy(nn.ModuleList(plain))
    stages[2].tied_parameters = {"0.weight": (0, "0.weight")}
    compiled = [torch.compile(stage, backend="eager") for stage in stages]
    data, found = batches(6), []
    for these in (plain, compiled):
        pipe = st.Pipeline(these, sgd(), mse, "spectrain")
        found.append(torch.stack(losses(pipe, data)))
        for result in pipe.run(data):
            if result.index == 3:
                state = pipe.state_dict()
                first, last = [t for key, t in state.items() if key.endswith(".0.weight")][::2]
                assert torch.equal(first, last)
        pipe.release()
    assert torch.equal(*found)
    assert stages[2].tied_parameters == {"0.weight": (0, "0.weight")}
    assert alike(st.Pipeline(stages, sgd(), mse).state_dict(), 3)


# Errors


@pytest.mark.parametrize(
    ("said", "error", "why"),
    [
        ([], TypeError, r"stages\[2\]\.tied_parameters: expected a mapping"),
        ({"x": (0, "0.weight")}, ValueError, r"stages\[2\].*: it has no parameter 'x'"),
        ({"0.weight": (0, "x")}, ValueError, r"tied to 'x' of stages\[0\], which there is n"),
        ({"0.weight": (2, "0.weight")}, ValueError, r"index of an earlier stage, .*got \(2,"),
        ({"0.weight": "0.weight"}, ValueError, r"index of an earlier stage, .*got '0\.weight'"),
        ({"0.weight": (0, "0.bias")}, ValueError, r"tied to '0\.bias' of stages\[0\] and must"),
    ],
)
def test_a_wrong_attribute(said, error, why):
    stages = tanh_stages(3)
    stages[2].tied_parameters = said
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

    def broken(params):
        if len(params) == 3:
            raise ArithmeticError
        return sgd()(params)

    with pytest.raises(ArithmeticError):
        st.Pipeline(stages, broken, mse)
    assert stages[0][0].weight is stages[2][0].weight
    with pytest.raises(RuntimeError, match="fails"):
        st.Pipeline(stages, sgd(), mse, scheduler=_fails_for_the_last)
    assert stages[0][0].weight is stages[2][0].weight


def _fails_for_the_last(optimizer):
    if len(optimizer.param_groups[0]["params"]) == 3:
        raise RuntimeError("fails")
    return torch.optim.lr_scheduler.ConstantLR(optimizer)


@pytest.mark.parametrize("optimizer", [sgd, torch_sgd])
def test_a_hook_of_the_optimizer_sees_the_whole_gradient(optimizer):
    """A gradient hook would see only a part and is rejected; the mask is the uncut model's hook."""
    stages = tied(3)
    whole = copy.deepcopy(nn.Sequential(*stages))
    mask = torch.ones(5, 5).index_fill_(0, torch.tensor([1, 3]), 0.0)
    whole[0][0].weight.register_hook(lambda gradient: gradient * mask)
    data = batches(6, size=6)
    reference = torch_sgd()(whole.parameters())
    for x, y in data:
        reference.zero_grad()
        mse(whole(x), y).backward()
        reference.step()

    weight = stages[0][0].weight
    pipe = st.Pipeline(stages, optimizer(), mse, "sync", microbatches=2)

    def keep_rows(*_):
        weight.grad.mul_(mask)

    home = pipe.optimizers[0].register_step_pre_hook(keep_rows)
    losses(pipe, data)
    close(dict(pipe.state_dict()), dict(whole.state_dict()))
    home.remove()

    for k in (0, 2):
        hooked = stages[k][0].weight
        before = hooked.detach().clone()
        for register in (hooked.register_hook, hooked.register_post_accumulate_grad_hook):
            handle = register(lambda *_: None)
            name = rf"stages\[{k}\]: parameter '0.weight' is tied over stages and has a gradient"
            with pytest.raises(ValueError, match=name + r".*register_step_pre_hook"):
                losses(pipe, data)
            assert torch.equal(hooked, before)
            handle.remove()
    losses(pipe, data)
