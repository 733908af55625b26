"""Tests where a traced model is cut, and how its stages take a batch that is a mapping."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.cut_models import Calls, Two, alike, sgd, taking, trains_alike
from torch import Tensor, nn

import spectrain_ext as st


class Net(nn.Module):
    """A residual net with a long skip connection, in which some modules are called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in "123")
        self.twice = nn.Linear(4, 4)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = x = self.stem(x.flatten(1))
        for block in self.body:
            x = self.twice(x) if block is self.body[1] else x
            x = torch.relu(block(x) + x)
        return {"logits": self.head(self.twice(x) + first)}


def test_places_to_cut_are_found() -> None:
    torch.manual_seed(0)
    values = [torch.randn(size, 2, 2) for size in (3, 5)]

    def cut(model: nn.Module) -> list[nn.Module]:
        parts = st.partition(model, 3, values[0], profile=taking(*range(1, 9)))
        assert parts.cut.ends == (4, 6, 8)  # of stem, three times two, and head
        assert [stage.takes for stage in parts] == [1, 3, 3]
        return parts.stages

    alike(Net(), cut, values)


@pytest.mark.parametrize(
    ("seconds", "ends"),
    [
        ((4, 1, 4, 4, 1, 4), (3, 6)),
        ((3, 2, 4, 4, 2, 2), (3, 6)),
        ((1, 9, 9, 1, 1, 1), (2, 6)),  # within a branch
    ],
)
def test_one_tensor_is_passed_where_that_costs_little(
    seconds: tuple[float, ...], ends: tuple[int, ...]
) -> None:
    def call(self: Any, x: Tensor) -> Tensor:
        a, b, c, d, e, f = self.layers
        x = a(x)
        x = b(x) * c(x)
        x = d(x)
        return e(x) * f(x)

    model = Calls(call, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(6)))
    parts = st.partition(model, 2, torch.randn(3, 4), profile=taking(*seconds))
    assert parts.cut.ends == ends


def test_more_split_points_than_needed_are_candidates() -> None:
    more = {"split_points": ["middle", "last"], "profile": taking(1, 1, 4)}
    parts = st.partition(Two(), 2, torch.randn(3, 4), **more)
    assert parts.cut.ends == (2, 3)
    assert {s.cut.full_name(n) for s in parts for n in s.state_dict()} == {*Two().state_dict()}


def test_coarser_places_where_finer_ones_do_not_do() -> None:
    def count(self: Any, x: Tensor) -> Tensor:
        """Pass a number from one inner module to the next."""
        y = self.one(x)
        number = y.sum().item()
        return self.two(y) * number

    first, last = (Calls(count, one=nn.Linear(4, 4), two=nn.Linear(4, 4)) for _ in range(2))
    model = Calls(lambda self, x: self.last(self.first(x)), first=first, last=last)
    parts = st.partition(model, 2, torch.randn(3, 4))
    assert len(parts.profile.blocks) == 2
    with pytest.raises(ValueError, match=r"takes .*, a .*; stages can pass on nothing but tensors"):
        st.partition(model, 3, torch.randn(3, 4))


# Batches that are mappings


class Named(nn.Module):
    """Takes its arguments by names; one has a default that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, *, scale: Any = None, ids: Tensor, mask: Any = None) -> Tensor:
        h = torch.relu(self.inner(self.embed(ids)))
        if mask is not None:
            h = h * mask.unsqueeze(-1)
        return self.head(h.mean(1)) * (2.0 if scale is None else scale)


class TakesDict(Named):
    def forward(self, batch: Any, doubled: bool = True) -> Tensor:
        return super().forward(ids=batch["ids"], mask=batch["mask"]) * (2.0 if doubled else 1.0)


class TakesAny(Named):
    def forward(self, ids: Tensor, **more: Any) -> Tensor:
        return super().forward(ids=ids, mask=more["mask"])


def sentences(count: int) -> dict[str, Any]:
    mask, ids = torch.rand(count, 5), torch.randint(9, (count, 5))
    labels = torch.arange(count) % 3
    return {"mask": mask, "text": ["a"] * count, "ids": ids, "more": ids, "labels": labels}


@pytest.mark.parametrize("points", [None, ["head"]])
@pytest.mark.parametrize("make", [Named, TakesDict, TakesAny])
def test_a_mapping_is_taken_as_forward_takes_it(make: type[Named], points: Any) -> None:
    torch.manual_seed(0)
    model, example = make(), sentences(4)
    alone = copy.deepcopy(model)
    parts = st.partition(model, 2, example, split_points=points, profile="parameters")

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        assert "text" not in batch
        assert ("more" in batch) == (make is not Named)
        return F.cross_entropy(output, batch["labels"])

    def expected(alone: nn.Module, batch: Any) -> Tensor:
        taken = {name: batch[name] for name in ("ids", "mask")}
        output = alone(taken) if make is TakesDict else alone(**taken)
        return F.cross_entropy(output, batch["labels"])

    data = [sentences(count) for count in (4, 3, 1)]
    pipe = trains_alike(alone, parts, data, loss_fn, expected, microbatches=2)
    del example["mask"]
    with pytest.raises(TypeError, match=r"batches\[0\]: expected .*'mask'.*; got 'text', 'ids'"):
        list(pipe.run([example]))


def test_arguments_that_the_example_has_not(caplog: pytest.LogCaptureFixture) -> None:
    """Stages always use their defaults; a batch that has one is rejected."""
    batch = sentences(4)
    parts = st.partition(Named(), 2, {"ids": batch["ids"]}, profile="parameters", columns=["more"])
    kept: list[set[str]] = []
    pipe = st.Pipeline(parts, sgd, lambda output, batch: kept.append(set(batch)) or output.sum())
    with pytest.raises(TypeError, match=r"takes 'mask', and its stages do not, which were cut wi"):
        list(pipe.run([batch]))
    del batch["mask"]
    with caplog.at_level("INFO", "spectrain_ext"):
        list(pipe.run([batch]))
    assert "does not take are dropped: ['text']" in caplog.text
    assert kept == [{"ids", "more", "labels"}] * 2
