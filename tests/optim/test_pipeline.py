"""Tests pipelines with Adam, AdamW, NAdam and SGD's extras against a plain emulation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.checked_streams import checked_streams
from torch import Tensor, nn

import spectrain_ext as st

mse = nn.functional.mse_loss
Batches = list[tuple[Tensor, Tensor]]
# (forward, backward) horizon of stage k of n; None: the backward uses its forward's weights
HORIZONS: dict[str, Callable[[int, int], tuple[int, int | None]]] = {
    "vanilla": lambda k, n: (0, 0),
    "pipedream": lambda k, n: (0, None),
    "spectrain": lambda k, n: (k // 2 + n - k - 1, k // 2),
    "spectrain-stash": lambda k, n: (n - k - 1, None),
}
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {"lr": 0.02, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    ("NAdam", {"lr": 0.02}),
]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    with checked_streams():
        yield
    torch.set_default_dtype(torch.float32)


def tanh_stages(n: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh()) for _ in range(n)]


def batches(count: int) -> Batches:
    return [(torch.randn(3, 5), torch.randn(3, 5)) for _ in range(count)]


def direction(name: str, group: dict[str, Any], state: dict[str, Tensor]) -> Any:
    """Return the direction of the next predicted update: lr*m_hat / (sqrt(u_hat) + eps)."""
    if not state:
        return 0.0
    (b1, b2), t = group["betas"], state["step"].item()
    if name == "NAdam":
        mus = [b1 * (1 - 0.5 * 0.96 ** (i * group["momentum_decay"])) for i in range(1, int(t) + 2)]
        rate = mus[-1] / (1 - math.prod(mus))
    else:
        rate = 1 / (1 - b1**t)
    root = (state["exp_avg_sq"] / (1 - b2**t)).sqrt()
    return group["lr"] * rate * state["exp_avg"] / (root + group["eps"])


class Emulation:
    """Keeps every version of every stage, and puts it into the modules behind autograd's back.

    Minibatch i: its forward on stage k reads the version after max(0, i-(N-k)+1) updates, its
    backward uses the one after i.
    """

    def __init__(
        self, stages: list[nn.Module], name: str, options: dict[str, Any], method: str
    ) -> None:
        self.stages = copy.deepcopy(stages)
        self.name, self.horizons = name, HORIZONS[method]
        self.true = [[p.detach().clone() for p in stage.parameters()] for stage in self.stages]
        self.optimizers = [getattr(torch.optim, name)(true, **options) for true in self.true]
        self.versions = [[self.version(k)] for k in range(len(stages))]

    def version(self, k: int) -> list[tuple[Tensor, Any]]:
        optimizer = self.optimizers[k]
        return [
            (p.clone(), direction(self.name, optimizer.param_groups[0], optimizer.state[p]))
            for p in self.true[k]
        ]

    def put(self, k: int, version: int, steps: int) -> None:
        for p, (w, d) in zip(self.stages[k].parameters(), self.versions[k][version], strict=True):
            p.data.copy_(w - steps * d)

    def run(self, data: Batches) -> list[Tensor]:
        n, losses = len(self.stages), []
        for i, (value, target) in enumerate(data):
            read = [max(0, i - (n - k) + 1) for k in range(n)]
            tape = []
            for k, stage in enumerate(self.stages):
                self.put(k, read[k], self.horizons(k, n)[0])
                entry = value.detach().requires_grad_()
                value = stage(entry)
                tape.append((entry, value))
            entry = value.detach().requires_grad_()
            loss = mse(entry, target)
            losses.append(loss.detach())
            (gradient,) = torch.autograd.grad(loss, entry)
            for k in reversed(range(n)):
                forward, backward = self.horizons(k, n)
                if backward is None:
                    self.put(k, read[k], forward)
                else:
                    self.put(k, i, backward)
                entry, value = tape[k]
                inputs = [entry, *self.stages[k].parameters()]
                gradient, *grads = torch.autograd.grad(value, inputs, gradient)
                for p, grad in zip(self.true[k], grads, strict=True):
                    p.grad = grad
                self.optimizers[k].step()
                self.versions[k].append(self.version(k))
        return losses


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=str)
@pytest.mark.parametrize("method", HORIZONS)
def test_one_stage_is_plain_training(method: str, name: str, options: dict[str, Any]) -> None:
    stages = tanh_stages(1)
    model = copy.deepcopy(stages[0])
    data = batches(8)
    pipe = st.Pipeline(stages, lambda p: getattr(st.optim, name)(p, **options), mse, method)
    found = [result.loss for result in pipe.run(data)]
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    for loss, (x, y) in zip(found, data, strict=True):
        optimizer.zero_grad()
        expected = mse(model(x), y)
        assert_close(loss.detach(), expected.detach())
        expected.backward()
        optimizer.step()
    assert_close(list(stages[0].parameters()), list(model.parameters()))


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=str)
@pytest.mark.parametrize("method", HORIZONS)
@pytest.mark.parametrize("n", (2, 3, 5))
def test_more_stages_are_the_emulation(
    n: int, method: str, name: str, options: dict[str, Any]
) -> None:
    stages = tanh_stages(n)
    emulation = Emulation(stages, name, options, method)
    pipe = st.Pipeline(stages, lambda p: getattr(st.optim, name)(p, **options), mse, method)
    data = batches(10)
    found = [result.loss.detach() for result in pipe.run(data)]
    assert_close(found, emulation.run(data))
    for stage, true in zip(pipe.children(), emulation.true, strict=True):
        assert_close([p.detach() for p in stage.parameters()], true)
    for optimizer, reference in zip(pipe.optimizers, emulation.optimizers, strict=True):
        ours, theirs = optimizer.state_dict()["state"], reference.state_dict()["state"]
        assert ours.keys() == theirs.keys()
        for key, entry in ours.items():
            assert entry.keys() == theirs[key].keys()
            for what in entry:
                assert_close(entry[what], theirs[key][what])


def test_an_averaged_momentum_predicts_as_a_sum_does() -> None:
    stages = tanh_stages(3)
    others, data = copy.deepcopy(stages), batches(10)
    average = st.Pipeline(
        stages, lambda p: st.optim.SGD(p, lr=0.5, momentum=0.9, smoothed=True), mse, "spectrain"
    )
    summed = st.Pipeline(others, lambda p: st.optim.SGD(p, lr=0.05, momentum=0.9), mse, "spectrain")
    assert_close(
        [result.loss.detach() for result in average.run(data)],
        [result.loss.detach() for result in summed.run(data)],
    )


def test_releasing_and_going_on_elsewhere() -> None:
    stages = tanh_stages(2)
    pipe = st.Pipeline(stages, lambda p: st.optim.AdamW(p, lr=0.02), mse, "spectrain")
    list(pipe.run(batches(4)))
    optimizers = pipe.optimizers
    pipe.release()
    twins = copy.deepcopy(stages)
    references = [torch.optim.AdamW(twin.parameters(), lr=0.02) for twin in twins]
    for optimizer, reference in zip(optimizers, references, strict=True):
        reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    x, y = batches(1)[0]
    for pair, opts in ((stages, optimizers), (twins, references)):
        for opt in opts:
            opt.zero_grad()
        mse(pair[1](pair[0](x)), y).backward()
        for opt in opts:
            opt.step()
    for stage, twin in zip(stages, twins, strict=True):
        assert_close(list(stage.parameters()), list(twin.parameters()))
