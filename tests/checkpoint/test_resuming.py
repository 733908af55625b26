"""Tests that a training that is saved at any step goes on to the bit in any other pipeline."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import checkpoint_cases as cases
from helpers.covering import Axes
from helpers.foreign_optimizers import FOREIGN, PECULIAR
from torch import nn

import spectrain_ext as st
from spectrain_ext.checkpoint import load, save

#: Methods by family, and those that take optimizers from outside the package.
SIMPLE = {
    "synchronous": ["sync", "interleaved", "zb-h1"],
    "stale": ["vanilla", "interleaved-async", "zb-h1-async", "pipedream", "wpipe"],
    "predicting by differences": ["lwp-w", "error-feedback"],
}
METHODS = {
    **SIMPLE,
    "predicting": ["spectrain", "second-order"],
    "correcting": ["dc-asgd", "pipemare"],
    "correcting by its own state": ["gap-aware"],
    "correcting momentum": ["sc-lwp", "braking"],
    "changing": ["spectrain+sync@3", "sync+pipedream@2"],
}


class Wide(torch.optim.Optimizer):
    """Has float32 momentum for 16-bit parameters, keys like paths, and layouts of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("sums", {"of": torch.zeros_like(p, dtype=torch.float32)})
            state.setdefault("product", torch.ones(()))
            state["product"] *= 0.9
            state["sums"]["of"].mul_(0.9).add_(p.grad.float())
            state |= {"a.b": torch.ones(3), "a%2Eb": 5, "100%": torch.zeros(())}
            state["columns"] = [torch.ones(2, 3).T, torch.ones(2, 3, 4).mT]
            state["every other"] = torch.ones(2, 3, 4)[:, :, ::2].mT
            p.sub_(self.param_groups[0]["lr"] * state["product"] * state["sums"]["of"])


def sgd(params: Any) -> st.optim.SGD:
    dtype = torch.float32  # of narrower parameters too
    return st.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3, state_dtype=dtype)


OWN = {"sgd": sgd, "nadam": cases.nadam, "soap": lambda p: st.optim.SOAP(p, lr=0.01)}
ALIKE = ("Lion", "SGD", "AdamW")  # to others of these
OTHERS = {
    "adamw": lambda p: st.optim.AdamW(
        p, lr=0.01, betas=(0.9, 0.99), state_dtype=torch.bfloat16, capturable=True
    ),
    "muon": lambda p: st.optim.Muon(p, lr=0.02),
    **{f"other's {name}": FOREIGN[name] for name in FOREIGN if name not in ALIKE},
    **PECULIAR,
    "torch's NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Wide": Wide,
}
OPTIMIZERS: dict[str, Any] = {**OWN, **OTHERS}
#: Their groups have no learning rate, or differ in number from stage to stage.
UNSCHEDULED = (*PECULIAR, "muon", "soap", "other's Muon")
#: torch's optimizers that load the state of the package's.
TORCHS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=9, momentum=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=9, foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, lr=9),
}


def images(seed: int) -> nn.Sequential:
    """Return convolutions whose weights do not lie row by row in memory."""
    torch.manual_seed(seed)
    first = nn.Sequential(nn.Linear(4, 48), nn.Unflatten(1, (3, 4, 4)))
    middle = nn.Conv2d(3, 4, 3), nn.Sequential(nn.Tanh(), nn.Conv2d(4, 4, 2))
    last = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    return nn.Sequential(first, *middle, last).to(memory_format=torch.channels_last)


def narrow_tied(seed: int) -> nn.Sequential:
    return cases.tied(seed).bfloat16()


class Kind(NamedTuple):
    make: Callable[[int], nn.Sequential]
    dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype | None = None


MODELS = {
    "noisy": Kind(cases.model),
    "tied": Kind(cases.tied),
    "images": Kind(images),
    "narrow": Kind(cases.narrow, torch.bfloat16),
    "masters": Kind(narrow_tied, torch.bfloat16, torch.float32),
}
#: Where else the state goes and comes back from: stages and their method, or a module.
OTHER = {"one stage": (1, "sync"), "the same": (3, None), "two": (2, None), "four": (4, None)}
BEFORE = ("fresh", "used", "released")  # the pipeline that loads


_CORRECTING = ("correcting", "correcting by its own state")
_EXCLUDED = [
    {"optimizer": ["other's Whitened"], "model": ["narrow"]},  # torch inverts no 16-bit matrices
    # They have no phases.
    {"family": ["changing"], "other": ["one stage", "the same", "module"]},
    {"family": ["correcting momentum"], "optimizer": {*OWN} - {"sgd"}},
    # A stage that is not late has none, and another method no such pass.
    {"family": ["correcting by its own state"], "other": {*OTHER, "module"} - {"the same"}},
    {"family": _CORRECTING, "optimizer": ["soap"]},
    {"family": _CORRECTING, "model": ["narrow"]},
]
AXES = {"family": [*METHODS], "optimizer": [*OWN], "model": [*MODELS], "other": [*OTHER, "module"]}
ROWS = Axes({**AXES, "before": BEFORE}, _EXCLUDED).covering()
AXES = {"family": [*SIMPLE], "optimizer": [*OTHERS], "model": ["noisy", "images", "narrow"]}
ROWS += Axes({**AXES, "other": ["four", "module"], "before": BEFORE}, _EXCLUDED).covering()
TURNS = {family: cycle(methods) for family, methods in METHODS.items()}
CASES = [(next(TURNS[row.pop("family")]), *row.values()) for row in ROWS]


@pytest.mark.filterwarnings("ignore:.*rounded away")
@pytest.mark.parametrize(("method", "optimizer", "model", "other", "before"), CASES)
def test_stopped_and_continued_is_never_stopped(
    tmp_path: Path, method: str, optimizer: str, model: str, other: str, before: str
) -> None:
    kind, steps = MODELS[model], 1 + len(method + optimizer + model) % 4
    first, second = cases.batches(steps, 0, kind.dtype), cases.batches(3, 1, kind.dtype)
    scheduler = None if optimizer in UNSCHEDULED else cases.halving

    def made(seed: int, n: int = 3, method: str = method) -> st.Pipeline:
        pipe = cases.pipeline(
            n,
            seed,
            optimizer=OPTIMIZERS[optimizer],
            method=method,
            scheduler=scheduler,
            make=kind.make,
            master_dtype=kind.master_dtype,
        )
        if before != "fresh" and seed > 0:
            cases.train(pipe, cases.batches(2, 2, kind.dtype))
        if before == "released" and seed > 0:
            pipe.release()
        return pipe

    kept = made(0)
    cases.train(kept, first)
    save(tmp_path / "c", kept, minibatches=steps, extra={"best": (0.5, None)})
    expected, number = cases.state_of(kept), torch.rand(2)
    continued = made(9)
    loaded = load(tmp_path / "c", continued)
    assert (loaded.minibatches, loaded.extra, loaded.random) == (steps, {"best": (0.5, None)}, True)
    cases.same(torch.rand(2), number)
    cases.same(cases.state_of(continued), expected)

    # through another cut, another method or a module, and back
    if other == "module":
        through_a_module(tmp_path, kind.make(5), optimizer, scheduler, expected)
    else:
        n, another = OTHER[other]
        pipe = made(5, n, another or method)
        load(tmp_path / "c", pipe)
        same_by_name(cases.state_of(pipe), expected)
        save(tmp_path / "again", pipe)
    back = made(7)
    load(tmp_path / "again", back)
    same_by_name(cases.state_of(back), expected)
    for stage, states in zip(back.random, expected["random"], strict=True):
        stage.set_states(states)

    losses = cases.train(kept, second)
    for pipe in (continued, back):
        cases.same(cases.train(pipe, second), losses)
        cases.same(cases.state_of(pipe), cases.state_of(kept))


def same_by_name(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare all but the generators and what one entry of each stage has."""
    for key in ("model", "masters", "state", "options", "counts"):
        cases.same(found[key], expected[key], key)
    cases.same(found["schedulers"][:1], expected["schedulers"][:1], "scheduler")


def through_a_module(
    path: Path, whole: nn.Module, name: str, schedule: Any, expected: dict[str, Any]
) -> None:
    """Load into an uncut model with torch's optimizer or its own, and save.

    Its weights lie row by row in memory, and state of their shape has to, whatever was saved.
    """
    whole = whole.to(memory_format=torch.contiguous_format)
    if expected["masters"]:  # a float32 model gets their digits
        whole.float()
    optimizer = TORCHS.get(name, OPTIMIZERS[name])(list(whole.parameters()))
    scheduler = schedule and schedule(optimizer)
    load(path / "c", whole, optimizer=optimizer, scheduler=scheduler)
    names = {p: key for key, p in whole.named_parameters()}
    for key, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        wanted = expected["masters"].get(key, expected["model"][key])
        cases.same(tensor.data, wanted.to(tensor.dtype), key, layouts=False)
    found = cases.optimizers_of([optimizer], names)["state"]
    cases.same(found, expected["state"], layouts=False)
    for p, key in names.items():  # some kernels access raw memory
        state = [v for v in found.get(key, {}).values() if getattr(v, "shape", None) == p.shape]
        assert all(cases.strides(value) == cases.strides(p) for value in state), key
    counts = expected["counts"][0]
    save(path / "again", whole, optimizer=optimizer, scheduler=scheduler, minibatches=counts)
