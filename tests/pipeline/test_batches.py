"""Tests batches: nested values, non-tensors, and microbatches cut by the caller."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from helpers.pipeline_cases import float64, losses, mse, sgd, tanh_stages  # noqa: F401  # a fixture
from helpers.value_programs import (
    NESTED_DIM,
    cut_by_hand,
    nested_batches,
    nested_data,
    nested_loss,
    nested_stages,
    uncut_nested,
)
from torch import nn

import spectrain_ext as st


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("method", ["sync", "gpipe", "1f1b"])
def test_nested_values_and_microbatches_train_as_the_uncut_model(n, method, recompute):
    made = nested_batches(torch.float64)
    expected, whole = uncut_nested(n, made)
    stages = [stage.double() for stage in nested_stages(n)]
    pipe = st.Pipeline(
        *(stages, sgd(), nested_loss, method),
        microbatches=4,
        recompute=recompute,
        split_dim=NESTED_DIM,
    )
    torch.testing.assert_close(losses(pipe, made), expected)
    torch.testing.assert_close(dict(pipe.state_dict()), dict(whole.state_dict()))
    sizes, each = [], []
    with torch.no_grad():
        for batch in made:
            for part in batch if isinstance(batch, list) else [batch]:
                sizes.append(len(part["x"]))
                each.append(nested_loss(whole(part), part).item())
    wanted = sum(a * b for a, b in zip(sizes, each, strict=True)) / sum(sizes)
    assert pipe.evaluate(made)["loss"] == pytest.approx(wanted)


@pytest.mark.parametrize("method", ["auto", "spectrain", "pipedream"])
def test_microbatches_cut_alike_have_the_bits_of_a_batch(method):
    def run(batches):
        torch.manual_seed(2)
        pipe = st.Pipeline(tanh_stages(3), sgd(), mse, method, microbatches=3)
        keep = lambda output, target: (output, mse(output, target))  # noqa: E731
        found = [(r.loss, r.kept) for r in pipe.run(batches, keep=keep)]
        return found, dict(pipe.state_dict())

    made = [(torch.randn(size, 5), torch.randn(size, 5)) for size in (6, 7, 3, 2, 8)]
    cut = [
        st.Microbatches(zip(*(side.tensor_split(min(3, len(x))) for side in (x, y)), strict=True))
        for x, y in made
    ]
    for expected, found in zip(run(made), run(cut), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    plain = [[*batch] if len(batch) != 2 else batch for batch in cut]
    torch.testing.assert_close(run(plain), run(made), rtol=0, atol=0)


class Settings:
    """Neither a tensor nor a constant."""


def test_other_objects_go_to_every_microbatch_as_they_are():
    given, seen = Settings(), []

    class First(nn.Module):
        def forward(self, value):
            x, settings = value
            seen.append(settings)
            return x

    def loss_fn(output, target):
        y, settings = target
        seen.append(settings)
        return mse(output, y)

    pipe = st.Pipeline([First(), *tanh_stages(1)], sgd(), loss_fn, "gpipe", microbatches=2)
    batch = ((torch.randn(4, 5), given), [torch.randn(4, 5), given])
    assert len(losses(pipe, [batch])) == 1
    assert pipe.evaluate([batch])["loss"] > 0
    assert len(seen) == 6
    assert all(one is given for one in seen)


def test_what_is_handed_to_every_microbatch_is_each_ones_own():
    """A loss or a stage may change it in place."""

    class First(nn.Module):
        def forward(self, value):
            x, scale, words = value
            words.append(3)
            return x * scale.mul_(2)

    def loss_fn(output, target):
        y, scale = target
        return mse(output, y) * scale.mul_(3)[0]

    x, y, one = torch.randn(6, 5), torch.randn(6, 5), torch.ones(())
    stages = [First(), *tanh_stages(1)]
    whole = copy.deepcopy(stages[1])
    pipe = st.Pipeline(stages, sgd(), loss_fn, "gpipe", microbatches=3)
    words = []
    (found,) = losses(pipe, [((x, one, words), (y, one[None]))])
    torch.testing.assert_close(found, (3 * mse(whole(2 * x), y)).detach())
    assert one == 1
    assert words == []


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


@pytest.mark.parametrize("form", ["pair", "mapping"])
def test_dimensions_made_as_the_batch_is(form):
    class First(nn.Module):
        def forward(self, value):
            value = value["input"] if form == "mapping" else value
            (steps, more), extra = value["deep"]
            return steps[-1] + more * extra

    def loss_fn(output, target):
        return mse(output, target["y"] if form == "mapping" else target)

    x = {"deep": [(torch.randn(3, 6, 5), torch.randn(6, 5)), torch.randn(5)]}
    y = torch.randn(5, 6).t()
    dims = {"deep": [(1, 0), None]}
    batch, split_dim = ((x, y), (dims, 0))
    if form == "mapping":
        batch, split_dim = {"input": x, "y": y}, {"input": dims}
    stages = [First(), *tanh_stages(1)]
    whole = copy.deepcopy(nn.Sequential(*stages))
    pipe = st.Pipeline(stages, sgd(), loss_fn, "gpipe", microbatches=4, split_dim=split_dim)
    value, target = batch if form == "pair" else (batch, batch)
    torch.testing.assert_close(losses(pipe, [batch]), [loss_fn(whole(value), target).detach()])
    pipe.release()
    bad = {"deep": [(1, 0), "no"]}
    bad = (bad, 0) if form == "pair" else {"input": bad}
    pipe = st.Pipeline(stages, sgd(), loss_fn, "gpipe", microbatches=4, split_dim=bad)
    with pytest.raises(ValueError, match=r"split_dim: .*\['deep'\]\[1\] expected an int or None"):
        losses(pipe, [batch])


# A list of microbatches, or a pair


def test_a_list_of_two_is_a_pair():
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse, "gpipe", microbatches=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(losses(pipe, [[x, y], [(x, y)], [[x, y]], st.Microbatches([[x, y]] * 2)])) == 4

    class First(nn.Module):
        def forward(self, value):
            return value[0] + value[1]

    def loss_fn(output, target):
        return mse(output, target[0]) + mse(output, target[1])

    pipe = st.Pipeline([First(), *tanh_stages(1)], sgd(), loss_fn, "gpipe", microbatches=2)
    with pytest.warns(UserWarning, match=r"batches\[0\]: a list of two pairs is taken for"):
        assert len(losses(pipe, [[[x, x], [y, y]]])) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(losses(pipe, [([x, x], [y, y])])) == 1
    named = [{"x": x, "more": 1}, {"y": y}]  # no keys in common

    class Named(nn.Module):
        def forward(self, value):
            return value["x"] * value["more"]

    def named_loss(output, target):
        return mse(output, target["y"])

    pipe = st.Pipeline([Named(), *tanh_stages(1)], sgd(), named_loss, "gpipe", microbatches=2)
    assert len(losses(pipe, [named])) == 1


@pytest.mark.parametrize("microbatches", [1, 2])
def test_two_mappings_that_may_be_either_are_refused(microbatches):
    made = nested_data([4, 4], torch.float64)
    made[1]["more"] = None
    pipe = st.Pipeline(
        *(nested_stages(2), sgd(), nested_loss, "gpipe"),
        microbatches=microbatches,
        split_dim=NESTED_DIM,
    )
    for call in (lambda batches: losses(pipe, batches), pipe.evaluate):
        with pytest.raises(ValueError, match=r"batches\[0\]: a list of two mappings .* in common"):
            call([made])
    assert pipe.evaluate([st.Microbatches(made)])["loss"] > 0


def test_lists_that_are_no_microbatches():
    batch = nested_data([8], torch.float64)[0]
    pipe = st.Pipeline(
        *(nested_stages(2), sgd(), nested_loss, "gpipe"), microbatches=2, split_dim=NESTED_DIM
    )
    three = cut_by_hand(batch, (3, 3, 2), (3, 3, 3))
    with pytest.raises(ValueError, match=r"batches\[0\]: expected a list of at most 2 .* got 3"):
        losses(pipe, [three])
    with pytest.raises(TypeError, match=r"batches\[0\]: expected a pair .* Microbatches of length"):
        losses(pipe, [st.Microbatches()])
    three[1] = batch["x"]
    with pytest.raises(TypeError, match=r"expected a pair .* or a list of .* list of length 3"):
        losses(pipe, [three])
    one = {**batch, "labels": batch["labels"][:3]}
    with pytest.raises(ValueError, match=r"batches\[0\]\[1\]: .* the batch\['labels'\] has shape"):
        losses(pipe, [st.Microbatches([batch, one])])
