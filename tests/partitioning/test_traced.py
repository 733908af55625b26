"""Tests stages of traced models: in both modes they compute and train as the uncut model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers.cut_models import Calls, Two, alike, split, trains_alike
from torch import Tensor, nn

import spectrain_ext as st


def noise(self: nn.Module, x: Tensor) -> Tensor:
    return x + torch.randn_like(x) if self.training else x * 2.0


class Skips(nn.Module):
    """Its end needs its first value and one of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        first = self.embed(x)
        h = first
        for layer in self.layers:
            h = torch.relu(layer(h))
        return self.head(self.norm(h) + first * mask)


class Heads(Two):
    """Returns something else in evaluation."""

    def forward(self, x: Tensor) -> Any:
        x = self.middle(self.first(x))
        y = self.last(x)
        return (y, {"x": x, "more": [x * 2]}) if self.training else y


class Sizes(nn.Module):
    """Uses the sizes of its input on every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        n, t, _ = x.shape
        y = self.first(x).reshape(n * t, 4)
        total = self.middle(y).sum(0) / (n * t)
        return self.last(total).expand(n, 4) + mask


def convolving() -> nn.Module:
    """Return a model that attends over the pixels, and returns to the image's size."""

    def call(self: Any, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.stem(x)))
        h = h.view(x.size(0), 4, -1).transpose(1, 2)
        h = self.attention(h, h, h, need_weights=False)[0]
        h = self.last(h).transpose(1, 2).reshape(-1, 2, *x.shape[2:])
        return h.mean((2, 3))

    stem, norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
    part = nn.MultiheadAttention(4, 2, batch_first=True)
    return Calls(call, stem=stem, norm=norm, attention=part, last=nn.Linear(4, 2))


def folding() -> nn.Module:
    """Return a model that passes on the tokens of all samples as rows, without their number."""

    def call(self: Any, x: Tensor) -> Tensor:
        h = self.first(x)
        rows = self.attention(h, h, h, need_weights=False)[0].reshape(-1, 4)
        return self.last(rows).view(x.size(0), -1, 2).softmax(0).mean(1)

    part = nn.MultiheadAttention(4, 2, batch_first=True)
    return Calls(call, first=nn.Linear(4, 4), attention=part, last=nn.Linear(4, 2))


class Unused(Two):
    """Has parameters and a buffer that no graph uses, which checkpoints keep."""

    def __init__(self) -> None:
        super().__init__(nn.ReLU())
        self.head = nn.Linear(4, 4)
        self.last.register_buffer("scale", torch.ones(2))


@torch.library.custom_op("spectrain_test::rounded", mutates_args=())
def rounded(x: Tensor) -> Tensor:
    return x.round()


rounded.register_fake(torch.empty_like)
rounded.register_autograd(lambda ctx, gradient: gradient)


class FrozenNorm(Two):
    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.middle.eval()
        return self


def some_evaluated() -> nn.Module:
    model = Two(nn.BatchNorm1d(4))
    model.middle.eval()
    return model


class Kind(NamedTuple):
    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...] = ((3, 4), (7, 4), (1, 4))  # the first is the example's
    points: tuple[str, ...] = ("last",)


SEVERAL = (3, 4), (7, 4)  # training with batch norm needs more than a sample
SPLIT = {
    "batch norm": Kind(lambda: Two(nn.BatchNorm1d(4)), SEVERAL),
    "in evaluation": Kind(lambda: Two(nn.BatchNorm1d(4)).eval(), SEVERAL),
    "a part in evaluation": Kind(some_evaluated, SEVERAL),
    "never trained norm": Kind(lambda: FrozenNorm(nn.BatchNorm1d(4)).train(), SEVERAL),
    "dropout": Kind(lambda: Two(nn.Dropout())),
    "branch by mode": Kind(lambda: Two(Calls(noise))),
    "custom operator": Kind(lambda: Two(Calls(lambda _, x: rounded(x * 1.0)))),
    "skip connections": Kind(Skips, SEVERAL, ("layers.1", "norm")),
    "other results in evaluation": Kind(lambda: Heads(nn.ReLU())),
    "sizes": Kind(Sizes, ((3, 5, 4), (2, 7, 4), (6, 3, 4)), ("middle", "last")),
    "single samples of any length": Kind(
        convolving, ((3, 3, 6, 4), (1, 3, 6, 4), (2, 3, 5, 5), (1, 3, 5, 5))
    ),
    "rows": Kind(folding, ((3, 5, 4), (1, 5, 4), (2, 3, 4), (1, 3, 4))),
    "unused parameters": Kind(Unused),
}


@pytest.mark.parametrize("name", SPLIT)
def test_stages_are_the_model_in_both_modes(name: str) -> None:
    kind = SPLIT[name]
    torch.manual_seed(0)
    model, values = kind.make(), [torch.randn(shape) for shape in kind.shapes]
    if isinstance(model, (Skips, Sizes)):
        values = [(x, torch.rand(x.shape[0], 4)) for x in values]
    modes = (True, False, True) if model.training else (False, True, False)
    alike(model, lambda whole: split(whole, values[0], kind.points), values, modes)


@pytest.mark.parametrize("points", [["head"], ["middle", "head"]])
def test_tied_weights(points: list[str]) -> None:
    def call(self: Any, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(x)))

    embed, head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    head.weight = embed.weight
    model = Calls(call, embed=embed, middle=nn.Linear(4, 4), head=head)
    alone, stages = copy.deepcopy(model), split(model, torch.zeros(2, 4), points)
    first, last = stages[0], stages[-1]
    assert last.cut.ties == {"0.part.head.weight": (0, "0.part.embed.weight")}
    names = [[stage.cut.full_name(name) for name in stage.state_dict()] for stage in (first, last)]
    assert "embed.weight" in names[0] and "head.weight" not in names[0]
    assert names[1] == ["head.weight"]
    data = [(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(3)]
    trains_alike(alone, stages, data).release()
    assert model.embed.weight is model.head.weight
    assert first[0].part.embed.weight is last[0].part.head.weight


def test_copies_and_conversions_keep_both_modes() -> None:
    model = Two(nn.BatchNorm1d(4)).double().float()
    stages = nn.Sequential(*split(model))
    x = torch.randn(3, 4)
    copied = copy.deepcopy(stages)
    stages(x)
    assert not torch.equal(copied.eval()(x), stages.eval()(x))
    copied.load_state_dict(stages.state_dict())
    assert torch.equal(copied(x), stages(x))
    other = copy.deepcopy(stages).double().train()
    other(x.double())  # its buffers differ from before
    alone = copy.deepcopy(model).double().train()
    alone(x.double())
    torch.testing.assert_close(other.eval()(x.double()), alone.eval()(x.double()))
    assert other[0].state_dict()["0.part.middle.num_batches_tracked"] == 2
    assigned = copy.deepcopy(copied)
    assigned.load_state_dict(other.float().state_dict(), assign=True)
    assert torch.equal(assigned(x), other(x))


def constants(self: Any, x: Tensor) -> Tensor:
    """Use a device and a dtype, a literal, and a tensor that is not a module buffer."""
    with torch.no_grad():
        noise = torch.zeros(x.size(0), 4, device=x.device, dtype=x.dtype)
    x = self.linear(x) + noise + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
    return x.to(noise.device) * self.table.to(x.device)


def test_stages_move_to_another_device_and_dtype() -> None:
    middle = Calls(constants, linear=nn.Linear(4, 4))
    middle.table = torch.ones(4)
    stages = nn.Sequential(*split(Two(middle)))
    assert all("_constants" not in key for key in stages.state_dict())
    moved = copy.deepcopy(stages).to("meta")
    assert moved(torch.empty(2, 4, device="meta")).device.type == "meta"
    assert stages(torch.randn(2, 4)).device.type == "cpu"
    plain = nn.Sequential(*split(Two(nn.ReLU()))).bfloat16()
    assert plain(torch.randn(3, 4).bfloat16()).dtype is torch.bfloat16


def test_autocast_follows_the_device() -> None:
    def casts(_: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return x @ x.T

    def call(self: Any, x: Tensor) -> Tensor:
        return self.middle(self.first(x)) + self.last(x).sum()

    parts = {"first": nn.Linear(4, 4), "middle": Calls(casts), "last": nn.Linear(4, 2)}
    first, _ = split(Calls(call, **parts))
    assert torch.bfloat16 in {tensor.dtype for tensor in first(torch.randn(5, 4))}
    with pytest.raises(RuntimeError, match="unsupported autocast device_type 'meta'"):
        first.to("meta")(torch.empty(5, 4, device="meta"))  # as the model itself


def test_splitting_leaves_the_model_as_it_was() -> None:
    model, example = Skips(), (torch.randn(3, 4), torch.ones(3, 4))
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    expected = model.eval()(*example)
    st.partition(model, 2, example, split_points=["norm"])
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert torch.equal(model(*example), expected)
