"""Tests cutting a list of blocks: what may be separated, names, order, and clear errors."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cut_models import LOSS, alike, layers, run, sgd, taking
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.partitioning import cut_at

ROWS = torch.linspace(-1, 1, 12).view(3, 4)


@pytest.mark.parametrize("cut", [lambda m: cut_at(m, [1, 3]), lambda m: st.partition(m, 3, ROWS)])
def test_stages_compute_what_the_model_does_and_are_its_own(cut: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)))
    alike(model.append(nn.Linear(6, 4)), cut, [ROWS])


def test_a_partition_says_where_it_cut_and_trains() -> None:
    parts = st.partition(layers(4, 4, 4, 4, 4), 3, torch.randn(2, 4), profile=taking(2, 1, 1, 2))
    assert parts.cut.ends == (1, 3, 4)
    assert repr(parts) == f"Partition(3 stages)\n{parts.cut}"
    assert [s.blocks.start for s in parts.cut.stages] == [0, 1, 3]
    assert len(parts) == 3
    pipe = st.Pipeline(parts, sgd, LOSS)
    assert len(list(pipe.run([(torch.randn(2, 4), torch.randn(2, 4))] * 4))) == 4


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)

    def forward(self, batch: Any) -> Tensor:
        return self.tokens(batch["ids"])


def test_the_first_block_of_a_list_takes_a_mapping() -> None:
    torch.manual_seed(0)
    blocks = [Embeds(), *(nn.Linear(4, 4) for _ in range(3))]
    batch = {"ids": torch.randint(7, (3, 5))}
    parts = st.partition(blocks, 3, batch, profile=taking(1, 1, 1, 1))
    expected = run(blocks, batch).sum()
    assert torch.equal(run(parts, batch).sum(), expected)
    pipe = st.Pipeline(parts, sgd, lambda output, _: output.sum(), method="sync")
    names = [f"{k}.{leaf}" for k in (1, 2, 3) for leaf in ("weight", "bias")]
    assert list(pipe.state_dict()) == ["0.tokens.weight", *names]
    assert len(list(pipe.run([batch, batch]))) == 2


# What blocks share


class Rotates(nn.Module):
    """Reads a table that other blocks read too, as rotary embeddings do."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.table[: x.shape[1]] + x


class Rotary(nn.Module):
    """Has blocks and the table in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        table = torch.rand(9, 4)
        self.way = way
        own = way == "blocks'"
        self.blocks = nn.ModuleList(Rotates(table) if own else nn.Linear(4, 4) for _ in range(6))
        if way in ("model's", "unsaved"):
            self.register_buffer("table", table, persistent=way == "model's")
        elif way == "plain":
            self.table = table

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.way != "blocks'":
                x = x * self.table[: x.shape[1]] + x
        return x


def rotating(way: str) -> nn.Module:
    if way != "list":
        return Rotary(way)
    table = torch.rand(9, 4)
    return nn.Sequential(*(Rotates(table) for _ in range(6)))


def move(stage: nn.Module) -> nn.Module:
    """Give a stage tensors of its own, as ``stage.to(device)`` does."""
    return stage._apply(torch.clone)


@pytest.mark.parametrize("way", ["list", "blocks'", "model's", "unsaved", "plain"])
def test_constant_buffers_are_copied_to_the_stages_that_read_them(way: str, tmp_path: Path) -> None:
    model, example = rotating(way), torch.randn(2, 7, 4)
    state = copy.deepcopy(model.state_dict())
    parts = st.partition(model, 3, example, profile="parameters")
    assert parts.cut.balance > 0.99 and parts.profile.ties == ()
    # As on several devices: each stage has tensors of its own.
    pipe = st.Pipeline([move(stage) for stage in parts], sgd, LOSS, "sync")
    assert pipe.state_dict().keys() == state.keys()
    changed = {name: value + 1 for name, value in state.items()}
    pipe.load_state_dict(changed)
    model.load_state_dict(changed)
    torch.testing.assert_close(pipe(example), model(example))
    st.checkpoint.save(tmp_path / "c", pipe)
    if way in ("list", "model's"):
        fewer = [move(stage) for stage in st.partition(rotating(way), 2, example)]
        other = st.Pipeline(fewer, sgd, LOSS, "sync")
        st.checkpoint.load(tmp_path / "c", other)
        torch.testing.assert_close(other(example), model(example))
    again = rotating(way)
    st.checkpoint.load(tmp_path / "c", again, only_model=True)
    assert all(torch.equal(again.state_dict()[name], changed[name]) for name in changed)


class Counts(Rotary):
    """Writes into the table, in one mode only."""

    def __init__(self, mode: bool) -> None:
        super().__init__("model's")
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.training == self.mode:
                self.table[0] += 1
            x = x * self.table[0]
        return x


@pytest.mark.parametrize("mode", [True, False])
def test_buffers_that_a_forward_writes_to_bind_blocks_together(mode: bool) -> None:
    model, example = Counts(mode), torch.randn(2, 7, 4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"buffer 'table', which blocks 0 and 1 use.* give each"):
        st.partition(model, 2, example, profile="parameters")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_blocks_with_one_buffer_stay_together() -> None:
    model = [nn.BatchNorm1d(3) for _ in range(4)]
    model[2].running_mean = model[1].running_mean
    example, profile = torch.randn(2, 3), taking(1, 5, 5, 1)
    assert st.partition(model, 3, example, profile=profile).cut.ends == (1, 3, 4)
    match = r"^n_stages: 4 stages need 3 places to cut.*'1\.running_mean', which is '2\.ru.* too"
    with pytest.raises(ValueError, match=match):
        st.partition(model, 4, example, profile=profile)
    with pytest.raises(ValueError, match=r"ends: a cut before block 2 separates buffer '1"):
        cut_at(model, [2, 4])


def test_blocks_with_one_parameter_may_be_cut() -> None:
    model = layers(3, 3, 3, 3, 3)
    model[2].weight = model[1].weight
    model[3].weight = model[1].weight
    parts = st.partition(model, 3, torch.randn(1, 3), profile=taking(1, 5, 5, 1))
    assert parts.cut.ends == (1, 2, 4)
    first, *others = cut_at(model, [2, 3, 4])
    assert not first.cut.ties
    assert [stage.cut.ties for stage in others] == [{"0.weight": (0, "1.weight")}] * 2
    pipe = st.Pipeline(cut_at(model, [2, 3, 4]), sgd, LOSS)
    list(pipe.run([(torch.randn(3, 3), torch.randn(3, 3)) for _ in range(4)]))
    pipe.release()
    assert model[1].weight is model[2].weight is model[3].weight


# Errors


RELU, EXAMPLE = nn.ReLU(), torch.zeros(1, 1)
MAPPED = {"example_input": {"ids": EXAMPLE}}


@pytest.mark.parametrize(
    ("model", "ends", "error", "why"),
    [
        (layers(1, 1, 1, 1), [], ValueError, "ends: exp"),
        (layers(1, 1, 1, 1), [2], ValueError, "the last of them 3"),
        (layers(1, 1, 1, 1), [2, 2, 3], ValueError, "asc"),
        (layers(1, 1, 1, 1), [0, 3], ValueError, "asc"),
        (nn.Linear(1, 1), [1], TypeError, r"model: expected an nn\.Sequential or a list.*Linear"),
    ],
)
def test_bad_cuts_by_hand(model: Any, ends: list[int], error: Any, why: str) -> None:
    with pytest.raises(error, match=why):
        cut_at(model, ends)


@pytest.mark.parametrize(
    ("model", "n", "more", "error", "why"),
    [
        (layers(1, 1, 1, 1), 0, {}, ValueError, "n_stages: expected 1 to 3"),
        (layers(1, 1, 1, 1), 4, {}, ValueError, "n_stages: expected 1 to 3"),
        (nn.Linear(1, 1), 2, {}, ValueError, r"expected 1 to 1 \(the blocks\), got 2; name"),
        ([RELU], 1.0, {}, TypeError, "n_stages: expected an int, got float"),
        ([RELU, 3], 1, {}, TypeError, r"model\[1\]: expected an nn\.Module, got int"),
        ([], 1, {}, ValueError, "model: expected at least one block"),
        ([RELU, nn.Tanh(), RELU], 2, {}, ValueError, "module '0', which is '2' too"),
        (nn.Linear(1, 1), 1, {"example_input": None}, TypeError, "expected a microbatch, got None"),
        ([RELU], 1, {"profile": "time"}, ValueError, "a Profile or 'parameters', got 'time'"),
        ([RELU], 1, {"profile": taking(1, 1)}, ValueError, "expected 1 blocks, as the model has"),
        (layers(1, 1, 1), 2, {"speeds": (4, 1, 1)}, ValueError, "speeds: expected"),
        (Embeds(), 1, {**MAPPED, "columns": "ids"}, TypeError, "a sequence of names, got 'ids'"),
        ([RELU, nn.Tanh()], 2, {**MAPPED, "columns": ["ids"]}, ValueError, "the first takes the w"),
    ],
)
def test_bad_arguments(model: Any, n: Any, more: dict[str, Any], error: Any, why: str) -> None:
    with pytest.raises(error, match=why):
        st.partition(model, n, **{"example_input": EXAMPLE, **more})


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, *, ids: Tensor, scale: Any = None) -> Tensor:
        return self.middle(self.first(ids))


class Twice(Named):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.middle(self.first(x)))


GOOD, WIDE = torch.ones(2, 3), torch.ones(2, 5)


@pytest.mark.parametrize("points", [None, ["middle"]])
@pytest.mark.parametrize(
    ("model", "example", "error", "why"),
    [
        (Twice(), WIDE, ValueError, r"Twice in its 'first' fails on \(2, 5\) float32: RuntimeErr"),
        (Twice(), GOOD.long(), ValueError, r"Twice in its 'first' fails on \(2, 3\) int64: Runti"),
        (Twice(), (GOOD, GOOD), ValueError, r"Twice fails on \(2, 3\) float32, \(2, 3\) float32"),
        (Twice(), [GOOD], TypeError, "expected a tensor or a tuple of tensors, got a list"),
        (Named(), {"mask": GOOD, "IDS": GOOD}, TypeError, "forward needs 'ids', got 'mask', 'IDS'"),
        (Named(), {"ids": ["a"]}, TypeError, "expected a tensor, got a list"),
    ],
)
def test_an_example_on_which_the_model_fails(
    model: nn.Module, example: Any, error: Any, why: str, points: Any
) -> None:
    with pytest.raises(error, match=f"example_input.*: .*{why}"):
        st.partition(model, 1, example, split_points=points)


def test_an_example_on_which_a_block_fails() -> None:
    for blocks, example, why in (
        (layers(3, 3, 4), WIDE, r"block 0 \(Linear\) fails on \(2, 5\) float32: RuntimeError"),
        ([*layers(3, 3), nn.Linear(4, 4)], GOOD, r"block 1 \(Linear\) fails on \(2, 3\) float32"),
    ):
        with pytest.raises(ValueError, match=f"example_input: {why}"):
            st.partition(blocks, len(blocks), example)


# The order of stages


def pickled(stages: list[nn.Module]) -> list[nn.Module]:
    found: list[nn.Module] = pickle.loads(pickle.dumps(stages))
    return found


THROUGH = {
    "themselves": list,
    "copies": lambda stages: [copy.deepcopy(stage) for stage in stages],
    "compiled": lambda stages: [torch.compile(stage) for stage in stages],
    "pickled": pickled,
}


def joined(order: str, through: str = "themselves") -> st.Pipeline:
    """Return a pipeline of a cut's stages, by number, and of own modules, ``.``."""
    stages = [THROUGH[through](cut_at(layers(3, 3, 3, 3, 3), [1, 2, 3, 4])) for _ in range(2)]
    taken, chosen = set[str](), []
    for each in order:
        if each == ".":
            chosen.append(nn.Linear(3, 3))
        else:
            chosen.append(stages[each in taken][int(each)])
            taken.add(each)
    return st.Pipeline(chosen, sgd, LOSS)


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize(
    ("order", "where"),
    [
        ("0132", r"stages\[2\]: it is stage 3 of the 4 .* comes after stage 1 of 4"),
        ("1023", r"stages\[0\]: it is stage 1 of the 4 .* stage 0 is not before it"),
        ("01", r"stages\[1\]: it is stage 1 of the 4 .* stage 2 does not come after it"),
    ],
)
def test_stages_of_a_cut_have_an_order(order: str, where: str, through: str) -> None:
    with pytest.raises(ValueError, match=where):
        joined(order, through)
    joined("0123", through)


def test_own_modules_among_the_stages_of_a_cut() -> None:
    for order in (".0123.", "01.23", "01.3", "012.", ".23", "01230123"):
        joined(order)
    with pytest.raises(ValueError, match=r"stages\[3\]: it is stage 2 .* after stage 3 of 4"):
        joined(".3.2")
    with pytest.raises(ValueError, match=r"stages\[2\]: it is stage 1 .* after stage 1 of 4"):
        joined("011")
