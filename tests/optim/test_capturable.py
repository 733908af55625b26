"""Tests steps that are counted in memory, as a captured CUDA graph needs them (capturable=True).

test_definition.py and test_continuing.py compare them, without a graph, with torch and with steps
that are counted on the host.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.optim_cases import assert_bits, bits, give_gradients, made, make_params, state_of
from torch import Tensor, nn

import spectrain_ext as st

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
GROUPS: dict[str, Callable[[list[nn.Parameter]], list[dict[str, Any]]]] = {
    "one group": lambda params: [{"params": params}],
    "many groups": lambda params: [
        {"params": [p], "betas": (0.9, 0.9 + 0.01 * i), "weight_decay": 0.01 * i}
        for i, p in enumerate(params)
    ],
}


class Training:
    """A loop's step by a scaled, clipped gradient with a rate that a scheduler writes."""

    def __init__(self, groups: str, params: list[nn.Parameter], capturable: bool) -> None:
        self.params, device = params, params[0].device
        self.gradients = [torch.zeros_like(p) for p in params]
        for p, gradient in zip(params, self.gradients, strict=True):
            p.grad = gradient
        self.scale, self.found_inf = (torch.full((), x, device=device) for x in (4.0, 0.0))
        self.lr = torch.tensor(0.05, dtype=torch.float64, device=device)
        self.capturable = capturable
        self.optimizer = made(
            "AdamW",
            GROUPS[groups](params),
            lr=self.lr if capturable else 0.05,
            capturable=capturable,
        )
        self.outs = [torch.empty_like(p) for p in params]

    def give(self, step: int) -> None:
        """Put gradients and numbers where a replay reads them."""
        draw = torch.Generator().manual_seed(step)
        for gradient in self.gradients:
            gradient.copy_(torch.randn(gradient.shape, generator=draw, dtype=gradient.dtype))
        self.found_inf.fill_(step % 5 == 3)
        self.lr.fill_(0.05 / (1 + step))

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.params, 3.0)
        if self.capturable:
            self.optimizer.grad_scale, self.optimizer.found_inf = self.scale, self.found_inf
        elif not self.found_inf.item():
            for gradient in self.gradients:
                gradient.div_(self.scale)
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr.item()
        if self.capturable or not self.found_inf.item():
            self.optimizer.step()


@devices
@pytest.mark.parametrize("groups", GROUPS)
def test_replays_have_the_bits_of_steps_counted_on_the_host(groups: str, device: str) -> None:
    """Of 20 steps, two before a capture; on the CPU without one. The scale is a power of two."""
    params = [nn.Parameter(torch.randn(n, device=device)) for n in (7, 1030, 64)]
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    ours, other = Training(groups, params, True), Training(groups, twins, False)
    graph: Any = None
    for step in range(22):
        ours.give(step)
        other.give(step)
        if device == "cuda" and step == 2:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                ours.step()
        if graph is None:
            ours.step()
        else:
            graph.replay()
        other.step()
        assert_bits(params, twins)
    assert ours.optimizer.state[params[0]]["step"].item() == 22 - 4
    assert ours.optimizer.state[params[0]]["step"].device == params[0].device
    for mine, theirs in zip(
        state_of(ours.optimizer, params), state_of(other.optimizer, twins), strict=True
    ):
        assert_bits(mine.values(), [value.to(device) for value in theirs.values()])
    with (
        ours.optimizer.predicted(st.laws.Geometric(3)),
        other.optimizer.predicted(st.laws.Geometric(3)),
    ):
        assert_bits(params, twins)


@pytest.mark.cuda
@pytest.mark.parametrize("rule", ["adam", "lion"])
def test_a_plans_step_with_all_its_numbers_in_memory(rule: str) -> None:
    """Rate, count, scale, clip factor and flag; replayed 20 times it has the host's bits."""
    torch.manual_seed(0)
    lists = {name: [torch.rand(n) for n in (7, 5003)] for name in ("w", "g", "m", "u", "out")}
    on_gpu = {name: [t.cuda() for t in tensors] for name, tensors in lists.items()}
    numbers = {name: torch.tensor(x) for name, x in [("grad_scale", 4.0), ("clip_factor", 0.5)]}
    lr, count, found_inf = torch.tensor(0.1), torch.tensor(0.0), torch.tensor(0.0)

    def step_of(of: dict[str, list[Tensor]]) -> Callable[..., None]:
        moments = {"exp_avgs": of["m"], **({"exp_avg_sqs": of["u"]} if rule == "adam" else {})}
        plan = st.Plan(of["w"], grads=of["g"], outs=[of["out"]], **moments)
        return getattr(plan, f"{rule}_step_")

    gpu = {name: x.cuda() for name, x in {**numbers, "found_inf": found_inf}.items()}
    rate, steps = lr.cuda(), count.cuda()
    eager, captured = step_of(lists), step_of(on_gpu)

    def step() -> None:
        steps.add_(1.0 - gpu["found_inf"])
        more = {"step": steps} if rule == "adam" else {}
        captured(lr=rate, **more, **gpu, weight_decay=0.1, predict=[st.laws.Linear(2)])

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for replay in range(20):
        for x, value in ((lr, 0.1 / (1 + replay)), (found_inf, float(replay % 4 == 2))):
            x.fill_(value)
        rate.copy_(lr)
        gpu["found_inf"].copy_(found_inf)
        graph.replay()
        if not found_inf:
            count += 1
            more = {"step": int(count)} if rule == "adam" else {}
            eager(lr=lr.item(), **more, **numbers, weight_decay=0.1, predict=[st.laws.Linear(2)])
        for name in ("w", "m", "u", "out"):
            assert_bits([t.cpu() for t in on_gpu[name]], lists[name])


@devices
def test_a_gradient_scaler_leaves_it_to_the_step(device: str) -> None:
    """It neither unscales nor waits for the flag; torch's AdamW ends with the same numbers."""
    params = [p.to(device) for p in make_params(torch.float32)]
    params = [nn.Parameter(p.detach()) for p in params]
    twins = copy.deepcopy(params)
    ours = made("AdamW", params, capturable=True)
    theirs = torch.optim.AdamW(twins, lr=0.02, foreach=False)
    scalers = [torch.amp.GradScaler(device, init_scale=8.0, growth_interval=3) for _ in range(2)]
    for step in range(6):
        give_gradients(params, twins)
        for scaler, each, optimizer in zip(scalers, (params, twins), (ours, theirs), strict=True):
            scaler.scale(torch.ones((), device=device))
            for p in each:
                p.grad.mul_(scaler.get_scale())
                if step == 2:
                    p.grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
        torch.testing.assert_close(params, twins, rtol=1e-5, atol=1e-6)
    assert [s.get_scale() for s in scalers] == [8.0, 8.0]
    assert {float(ours.state[p]["step"]) for p in params} == {5.0}


@devices
def test_torchs_state_with_tensors_as_counts_loads_both_ways(device: str) -> None:
    capturable = device == "cuda"  # torch has it there alone
    params = [nn.Parameter(p.detach().to(device)) for p in make_params(torch.float32)]
    twins = copy.deepcopy(params)
    theirs = torch.optim.AdamW(twins, lr=0.02, capturable=capturable)
    ours = made("AdamW", params, capturable=True)
    for _ in range(2):
        give_gradients(twins)
        theirs.step()
    for p, q in zip(params, twins, strict=True):
        p.detach().copy_(q.detach())
    ours.load_state_dict(theirs.state_dict())
    for group in ours.param_groups:
        group["capturable"] = True
    give_gradients(params, twins)
    ours.step()
    saved = copy.deepcopy(ours.state_dict())
    assert {entry["step"].device.type for entry in saved["state"].values()} == {device}
    assert {entry["step"].item() for entry in saved["state"].values()} == {3.0}
    theirs.load_state_dict(saved)
    for group in theirs.param_groups:
        group["capturable"] = capturable
    for p, q in zip(params, twins, strict=True):
        q.detach().copy_(p.detach())
    give_gradients(params, twins)
    ours.step()
    theirs.step()
    torch.testing.assert_close(params, twins, rtol=1e-5, atol=1e-6)


@pytest.mark.cuda
def test_a_capture_without_the_steps_before_it_is_refused() -> None:
    params = [nn.Parameter(torch.ones(5, device="cuda"))]
    optimizer = made("AdamW", params, capturable=True)
    params[0].grad = torch.ones(5, device="cuda")
    before = bits(params)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="before the capture make two steps"),
        torch.cuda.graph(graph),
    ):
        optimizer.step()
    assert_bits(params, before)
