"""Tests batches: nested values, non-tensors, cut by the caller, refilled, changed in place."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, UserDict

import numpy as np
import pytest
import torch
from helpers import value_programs
from helpers.pipeline_cases import Compared, batches, close, float64, losses, mse, sgd, tanh_stages  # noqa: F401  # a fixture  # noqa: F401
from helpers.random_modules import Function
from torch import nn

import spectrain_ext as st


def flushing(first, loss_fn, microbatches=2, **more):
    """Return a pipeline that flushes, whose first stage is a function."""
    stages = [Function(first), *tanh_stages(1)]
    return st.Pipeline(stages, sgd(), loss_fn, "gpipe", microbatches=microbatches, **more)


def nested(microbatches=2, n=2, method="gpipe", **more):
    stages = [stage.double() for stage in value_programs.nested_stages(n)]
    more |= {"microbatches": microbatches, "split_dim": value_programs.NESTED_DIM}
    return st.Pipeline(stages, sgd(), value_programs.nested_loss, method, **more)


@pytest.mark.parametrize(
    ("n", "method", "recompute"), [(1, "sync", False), (3, "gpipe", True), (3, "1f1b", False)]
)
def test_nested_values_and_microbatches_train_as_the_uncut_model(n, method, recompute):
    made = value_programs.nested_batches(torch.float64)
    expected, whole = value_programs.uncut_nested(n, made)
    pipe = nested(4, n, method, recompute=recompute)
    torch.testing.assert_close(losses(pipe, made), expected)
    torch.testing.assert_close(dict(pipe.state_dict()), dict(whole.state_dict()))
    parts = [part for batch in made for part in (batch if isinstance(batch, list) else [batch])]
    with torch.no_grad():
        each = [value_programs.nested_loss(whole(part), part).item() for part in parts]
    wanted = np.average(each, weights=[len(part["x"]) for part in parts])
    assert pipe.evaluate(made)["loss"] == pytest.approx(wanted)


@pytest.mark.parametrize("method", ["auto", "spectrain", "pipedream"])
def test_microbatches_cut_alike_have_the_bits_of_a_batch(method):
    def run(batches):
        torch.manual_seed(2)
        pipe = st.Pipeline(tanh_stages(3), sgd(), mse, method, microbatches=3)
        results = pipe.run(batches, keep=lambda output, target: (output, target))
        return [(r.loss, r.kept) for r in results], dict(pipe.state_dict())

    made = [(torch.randn(size, 5), torch.randn(size, 5)) for size in (6, 7, 3, 2, 8)]
    cut = [
        st.Microbatches(zip(*(side.tensor_split(min(3, len(x))) for side in (x, y)), strict=True))
        for x, y in made
    ]
    plain = [[*batch] if len(batch) != 2 else batch for batch in cut]
    expected = run(made)
    for given in (cut, plain):
        torch.testing.assert_close(run(given), expected, rtol=0, atol=0)


def test_other_objects_go_to_every_microbatch_as_they_are():
    given = object()

    def checked(value):
        assert value[1] is given
        return value[0]

    pipe = flushing(checked, lambda output, target: mse(output, checked(target)))
    batch = ((torch.randn(4, 5), given), [torch.randn(4, 5), given])
    assert len(losses(pipe, [batch])) == 1
    assert pipe.evaluate([batch])["loss"] > 0


def test_what_is_handed_to_every_microbatch_is_each_ones_own():
    """A loss or a stage may change it in place."""

    def first(value):
        x, scale, words = value
        words.append(3)
        return x * scale.mul_(2)

    def loss_fn(output, target):
        y, scale = target
        return mse(output, y) * scale.mul_(3)[0]

    x, y, one, words = torch.randn(6, 5), torch.randn(6, 5), torch.ones(()), []
    pipe = flushing(first, loss_fn, 3)
    whole = copy.deepcopy([*pipe.children()][1])
    (found,) = losses(pipe, [((x, one, words), (y, one[None]))])
    torch.testing.assert_close(found, (3 * mse(whole(2 * x), y)).detach())
    assert one == 1 and words == []


def test_a_target_of_none_and_sizes_of_one():
    def loss_fn(output, target):
        assert target is None
        return output.square().mean()

    x = torch.randn(4, 5)
    pipe = st.Pipeline(tanh_stages(2), sgd(), loss_fn, "gpipe", microbatches=2)
    whole = copy.deepcopy(nn.Sequential(*pipe.children()))
    (found,) = losses(pipe, [(x, None)])
    torch.testing.assert_close(found, loss_fn(whole(x), None).detach())
    # One sample is not cut, and broadcast values do not count.
    assert len(losses(pipe, [(x[:1], None), (x[:0], None)])) == 2
    whole = nn.Sequential(*pipe.children())
    wanted = (whole(x).square().mean() * 4 + whole(x[:1]).square().mean()) / 5
    assert pipe.evaluate([(x, None), (x[:1], None)])["loss"] == pytest.approx(wanted.item())


def test_dimensions_made_as_the_batch_is():
    def first(value):
        (steps, more), extra = value["input"]["deep"]
        return steps[-1] + more * extra

    def loss_fn(output, target):
        return mse(output, target["y"])

    deep = [(torch.randn(3, 6, 5), torch.randn(6, 5)), torch.randn(5)]
    batch = {"input": {"deep": deep}, "y": torch.randn(5, 6).t()}
    pipe = flushing(first, loss_fn, 4, split_dim={"input": {"deep": [(1, 0), None]}})
    whole = copy.deepcopy(nn.Sequential(*pipe.children()))
    torch.testing.assert_close(losses(pipe, [batch]), [loss_fn(whole(batch), batch).detach()])
    pipe = flushing(first, loss_fn, 4, split_dim={"input": {"deep": [(1, 0), "no"]}})
    with pytest.raises(ValueError, match=r"split_dim: .*\['deep'\]\[1\] expected an int or None"):
        losses(pipe, [batch])


# A list of microbatches, or a pair


def test_a_list_of_two_is_a_pair():
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse, "gpipe", microbatches=2)
    sums = flushing(sum, lambda output, target: mse(output, target[0]) + mse(output, target[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(losses(pipe, [[x, y], [(x, y)], [[x, y]], st.Microbatches([[x, y]] * 2)])) == 4
        assert len(losses(sums, [([x, x], [y, y])])) == 1
    with pytest.warns(UserWarning, match=r"batches\[0\]: a list of two pairs is taken for"):
        assert len(losses(sums, [[[x, x], [y, y]]])) == 1
    named = flushing(lambda v: v["x"] * v["more"], lambda output, target: mse(output, target["y"]))
    assert len(losses(named, [[{"x": x, "more": 1}, {"y": y}]])) == 1  # no keys in common


@pytest.mark.parametrize("microbatches", [1, 2])
def test_two_mappings_that_may_be_either_are_refused(microbatches):
    made = value_programs.nested_data([4, 4], torch.float64)
    made[1]["more"] = None
    pipe = nested(microbatches)
    for call in (pipe.fit, pipe.evaluate):
        with pytest.raises(ValueError, match=r"batches\[0\]: a list of two mappings .* in common"):
            call([made])
    assert pipe.evaluate([st.Microbatches(made)])["loss"] > 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_first_stage_that_works_in_place_does_not_change_what_the_loss_gets(n, recompute):
    seen = []

    def loss(output, batch):
        seen.append(batch["x"].clone())
        return mse(output, batch["x"])

    doubled = Function(lambda batch: batch["x"].mul_(2))
    parts = [nn.Sequential(doubled, *tanh_stages(1)), *tanh_stages(n - 1)]
    pipe = st.Pipeline(parts, sgd(), loss, "spectrain", microbatches=2, recompute=recompute)
    losses(pipe, batches := [{"x": torch.randn(4, 5)} for _ in range(6)])
    for part in torch.cat([batch["x"] for batch in batches]).split(2):
        assert any(torch.equal(part, x) for x in seen)


def test_other_mappings_between_stages_become_dicts():
    def plain(value):
        assert type(value) is dict
        return value["x"]

    stages = [Function(plain), Function(lambda x: OrderedDict(x=x)), Function(plain)]
    pipe = st.Pipeline([*stages, *tanh_stages(1)], sgd(), lambda output, _: output.mean())
    assert len(losses(pipe, [UserDict(x=torch.randn(4, 5))] * 3)) == 3
    assert pipe(UserDict(x=torch.zeros(2, 5))).shape == (2, 5)


def test_a_target_is_dense_whichever_dimension_it_is_cut_along():
    """A minibatch's targets are copied together; a loss may flatten a microbatch's by ``view``."""
    seen = []

    def flat(output, target):
        seen.append(target.shape)
        return mse(output.reshape(-1), target.view(-1))

    pipe = st.Pipeline(tanh_stages(2), sgd(), flat, "gpipe", microbatches=4, split_dim=-2)
    losses(pipe, [(torch.randn(7, size, 5), torch.randn(7, size, 5)) for size in (6, 6, 4)])
    assert [shape[1] for shape in seen[:8]] == [2, 2, 1, 1, 2, 2, 1, 1]


class Spectrum(nn.Linear):
    """Returns complex numbers, and accepts them; one frozen parameter is complex."""

    def __init__(self):
        super().__init__(6, 6)
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.cdouble), requires_grad=False)

    def forward(self, value):
        value = torch.fft.irfft(value, n=6) if value.is_complex() else value
        return (torch.fft.rfft(super().forward(value).tanh()) * self.phase).conj()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("method", ["sync", "pipedream", "spectrain"])
def test_complex_activations(method, recompute):
    """Between stages, at the output, and with a gradient back to the first stage."""

    def loss_fn(output, target):
        return (output.abs() ** 2).mean() + mse(torch.fft.irfft(output, n=6), target)

    more = {"microbatches": 2, "clip_norm": 0.1, "recompute": recompute}
    compared = Compared([Spectrum(), Spectrum(), Spectrum()], method, loss_fn=loss_fn, **more)
    compared.run(batches(6, size=4, width=6))


def test_a_batch_is_not_changed_and_may_be_refilled_as_soon_as_the_next_one_is_asked_for():
    """Also by a first layer that works in place."""
    data = batches(9)
    kept = copy.deepcopy(data)

    def refilled():
        x, y = torch.empty(3, 5), torch.empty(3, 5)
        for a, b in data:
            x.copy_(a)
            y.copy_(b)
            yield x, y
            x.fill_(float("nan"))
            y.fill_(float("nan"))

    stages = tanh_stages(3)
    stages[0].insert(0, nn.ReLU(inplace=True))
    pipes = [st.Pipeline(copy.deepcopy(stages), sgd(), mse) for _ in range(2)]
    fresh, reused = losses(pipes[0], data), losses(pipes[1], refilled())
    assert torch.equal(torch.stack(fresh), torch.stack(reused))
    assert all(map(torch.equal, sum(data, ()), sum(kept, ())))


class Sometimes(nn.Module):
    """Changes its input in place in only some forwards, after drawing random numbers."""

    def __init__(self, when):
        super().__init__()
        self.when, self.count = when, 0

    def forward(self, value):
        scale = torch.rand(1)  # a repeated forward draws the same
        self.count += 1
        return scale * (value.relu_() if self.count in self.when else value.relu())


@pytest.mark.parametrize("marked", [(1, 6), (4, 5, 9)])
def test_a_first_layer_that_works_in_place_now_and_then(marked):
    """The identity before it exists when needed; random numbers do not change."""
    first, *layers = tanh_stages(3)
    found = []
    for when in ((), marked):
        torch.manual_seed(1)
        stages = copy.deepcopy([first, *(nn.Sequential(Sometimes(when), *each) for each in layers)])
        found.append(torch.stack(losses(st.Pipeline(stages, sgd(), mse), batches(10))))
    close(found[1], found[0])
