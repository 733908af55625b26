"""Models, comparisons and forgeries of the checkpoint tests."""

from __future__ import annotations

import copy
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.checkpoint import CheckpointError, load
from spectrain_ext.partitioning import cut_at

LOSS = nn.functional.mse_loss
Batches = list[tuple[Tensor, Tensor]]


class Noisy(nn.Module):
    """Has a buffer that changes, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.norm(torch.tanh(self.linear(x))))


class Renamed(Noisy):
    """A later version, which has another name for its layer and still takes the old one."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self._modules = {k.replace("linear", "inner"): v for k, v in self._modules.items()}

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.norm(torch.tanh(self.inner(x))))

    def _load_from_state_dict(self, state: Any, prefix: str, versions: Any, *args: Any) -> None:
        if versions.get("version", 1) < 2:
            for name in ("weight", "bias"):
                state[f"{prefix}inner.{name}"] = state.pop(f"{prefix}linear.{name}")
        super()._load_from_state_dict(state, prefix, versions, *args)


def model(seed: int = 0, blocks: int = 4, kind: type[nn.Module] = Noisy) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(*(kind() for _ in range(blocks)))


def renamed(seed: int = 0) -> nn.Sequential:
    return model(seed, kind=Renamed)


class Adapted(nn.Module):
    """Has a large frozen base, whose running statistics change, and two small trained layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 1024), nn.Linear(1024, 4)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.register_buffer("mask", torch.ones(64, 64).tril().bool())
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base = self.leave(torch.tanh(self.enter(x)))
        return self.norm(x + base + self.drop(self.up(self.down(x))))


def adapted(seed: int = 0) -> nn.Sequential:
    """Return blocks whose frozen weights are always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        found = nn.Sequential(*(Adapted() for _ in range(4)))
        torch.manual_seed(seed)
        for p in found.parameters():
            if p.requires_grad:
                nn.init.normal_(p)
    return found


def narrow(seed: int) -> nn.Sequential:
    return model(seed).bfloat16()


def tied(seed: int = 0) -> nn.Sequential:
    """Return blocks of which the first and the last share a weight; a bias is frozen."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    blocks[3][0].weight = blocks[0][0].weight
    blocks[1][0].bias.requires_grad_(False).zero_()
    return nn.Sequential(*blocks)


def ends(blocks: int, n: int) -> list[int]:
    return [(k + 1) * blocks // n for k in range(n)]


def sgd(params: Any) -> st.optim.SGD:
    return st.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3)


def nadam(params: Any) -> st.optim.NAdam:
    return st.optim.NAdam(params, lr=0.01)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.MultiStepLR:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.5)


def pipeline(
    n: int = 2,
    seed: int = 0,
    *,
    optimizer: Any = sgd,
    method: Any = "spectrain",
    scheduler: Any = halving,
    make: Callable[[int], nn.Sequential] = model,
    **more: Any,
) -> st.Pipeline:
    whole = make(seed)
    stages = cut_at(whole, ends(len(whole), n))
    return st.Pipeline(stages, optimizer, LOSS, method, scheduler=scheduler, **more)


def batches(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, 2, 8, 4, generator=generator).to(dtype)
    return [(inputs, targets) for inputs, targets in drawn]


def train(pipe: st.Pipeline, data: Iterable[Any]) -> list[Tensor]:
    return [result.loss for result in pipe.run(data)]


def state_of(pipe: st.Pipeline) -> dict[str, Any]:
    """Return copies of all state of a pipeline, by the model's names."""
    found: dict[str, Any] = {"counts": (pipe.minibatches, pipe.phase)}
    found["model"] = {key: tensor.clone() for key, tensor in pipe.state_dict().items()}
    names: dict[Tensor, str] = {}
    for k, stage in enumerate(pipe.children()):
        cut = getattr(stage, "cut", None)
        full_name = cut.full_name if cut else f"{k}.{{}}".format
        for name, p in stage.named_parameters():
            names.setdefault(p, full_name(name))  # a tied one has that of its first stage
    found["masters"] = {names[p]: master.clone() for p, master in pipe.masters().items()}
    found |= optimizers_of(pipe.optimizers, names)
    found["schedulers"] = [scheduler.state_dict() for scheduler in pipe.schedulers]
    found["random"] = [stage.states() for stage in pipe.random]
    return found


def optimizers_of(
    optimizers: Iterable[torch.optim.Optimizer], names: dict[Tensor, str]
) -> dict[str, Any]:
    """Return copies of the state and the options of every parameter, and of state of none."""
    found: dict[str, Any] = {"state": {}, "options": {}, "shared": []}
    for optimizer in optimizers:
        whole = copy.deepcopy(optimizer.state_dict())
        known = [names[p] for group in optimizer.param_groups for p in group["params"]]
        state = whole.pop("state")
        found["state"] |= {name: state.pop(k) for k, name in enumerate(known) if k in state}
        for group in whole.pop("param_groups"):
            indices = group.pop("params")
            found["options"] |= {known[index]: group for index in indices}
        found["shared"].append((state, whole))
    return found


def same(found: Any, expected: Any, where: str = "", layouts: bool = True) -> None:
    """Check that containers are the same and hold the same bits, with the same strides too."""
    assert type(found) is type(expected), f"{where}: {type(found)}, expected {type(expected)}"
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            same(found[key], value, f"{where}.{key}", layouts)
    elif isinstance(expected, (list, tuple, deque)):
        assert len(found) == len(expected), where
        assert getattr(found, "maxlen", None) == getattr(expected, "maxlen", None), where
        for k, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            same(mine, theirs, f"{where}[{k}]", layouts)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(
            found, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{where}: {text}"
        )
        assert not layouts or strides(found) == strides(expected), where
    else:
        assert found == expected, where


def strides(tensor: Tensor) -> list[int]:
    """Return the strides of dimensions with several elements."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def everything(pipe: st.Pipeline) -> dict[str, Any]:
    """Return weights, state of optimizers and generators, by names that hold on every rank."""
    found = state_of(pipe)
    of_parameters = {f"state of {name}": entry for name, entry in found["state"].items()}
    places = zip(pipe.places, found["random"], strict=True)
    random = {f"random of {place.stage}": states for place, states in places}
    return {**found["model"], **of_parameters, **random}


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


# Documents, and what is refused


def body_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "checkpoint.json").read_text())["checkpoint"]
    return found


def forge(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the document and correct its digest, as an attacker would."""
    body = body_of(directory)
    change(body)
    write_body(directory, body)


def write_body(directory: Path, body: object) -> None:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    document = json.dumps({"sha256": digest, "checkpoint": body})
    (directory / "checkpoint.json").write_text(document)


def refused(directory: Path, match: str, pipe: st.Pipeline | None = None, **more: Any) -> None:
    """Check that a checkpoint is refused with this message, and that nothing has changed."""
    pipe = pipeline(2, seed=3) if pipe is None else pipe
    before, random = state_of(pipe), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=match):
        load(directory, pipe, **more)
    same(state_of(pipe), before)
    assert torch.equal(torch.get_rng_state(), random)


def nest(value: object, depth: int) -> object:
    for _ in range(depth):
        value = [value]
    return value
