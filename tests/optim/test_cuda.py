"""Tests the optimizers on CUDA: the CPU's bits, streams, rates and scales on the device.

`test_definition` compares steps and predictions on CUDA with torch's.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.optim_cases import (
    DTYPES,
    F32,
    assert_bits,
    assert_same,
    bits,
    every_adam,
    every_rival,
    give_gradients,
    made,
    make_params,
    pair_of,
    state_of,
    twins,
)
from torch import nn

import spectrain_ext as st

pytestmark = pytest.mark.cuda


def on_cuda(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().to("cuda")) for p in params]


@every_rival
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_cpu_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    cpu = make_params(dtype)
    cuda = on_cuda(cpu)
    optimizers = [made(name, params, lr=0.05) for params in (cpu, cuda)]
    for _ in range(5):
        give_gradients(cpu)
        for p, q in zip(cpu, cuda, strict=True):
            q.grad = p.grad.to("cuda")
        for optimizer in optimizers:
            optimizer.step()
    assert_bits([q.detach().cpu() for q in cuda], bits(cpu))
    for optimizer in optimizers:
        optimizer.predict_(2)
    assert_bits([q.detach().cpu() for q in cuda], bits(cpu))


@every_rival
def test_a_group_may_span_devices(name: str) -> None:
    ours = make_params() + on_cuda(make_params())
    theirs, optimizer, reference = pair_of(name, ours, foreach=False)
    for _ in range(3):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)
    kept = bits(ours)
    with optimizer.predicted(2):
        assert not torch.equal(ours[0].detach(), kept[0])
        assert not torch.equal(ours[6].detach(), kept[6])
    assert_bits(ours, kept)


def test_a_module_that_moves_to_the_device_takes_its_momentum_along() -> None:
    model = nn.Linear(5, 3).double()
    twin = nn.Linear(5, 3).double()
    twin.load_state_dict(model.state_dict())
    optimizer = st.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for device in ("cpu", "cuda", "cuda"):
        model.to(device)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = torch.randn_like(q)
            p.grad = q.grad.to(device)
        optimizer.step()
        reference.step()
    assert_same([p.cpu() for p in model.parameters()], list(twin.parameters()))


def test_the_step_runs_on_the_callers_stream() -> None:
    p = nn.Parameter(torch.zeros(1 << 16, device="cuda"))
    optimizer = st.optim.SGD([p], lr=1.0, momentum=0.9)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            # The kernels before the step take far longer than its launch.
            p.grad = torch.ones(1 << 16, device="cuda")
            for _ in range(50):
                p.grad.add_(1.0)
            optimizer.step()
            p.grad = None
    stream.synchronize()
    v, w = 0.0, 0.0
    for _ in range(20):
        v = 0.9 * v + 51.0
        w -= v
    torch.testing.assert_close(p.detach().cpu(), torch.full((1 << 16,), w), rtol=1e-5, atol=0)


@every_rival
def test_a_learning_rate_on_the_device_is_read_there(name: str) -> None:
    p, q = (nn.Parameter(torch.linspace(-1, 1, 8, device="cuda")) for _ in range(2))
    lr, plain = torch.tensor(0.5, device="cuda"), {"momentum": 0.0} if name == "SGD" else {}
    on_device, on_host = made(name, [p], lr=lr, **plain), made(name, [q], lr=0.5, **plain)
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    for rate in (0.5, 0.25, 0.125):
        lr.fill_(rate)
        on_host.param_groups[0]["lr"] = rate
        torch.cuda.set_sync_debug_mode("error" if name == "SGD" else "default")
        try:
            on_device.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        on_host.step()
        assert torch.equal(p, q)


def test_a_learning_rate_on_the_device_is_one_number() -> None:
    p = nn.Parameter(torch.zeros(4, device="cuda"))
    optimizer = st.optim.SGD([p], lr=0.1)
    optimizer.param_groups[0]["lr"] = torch.ones(2, device="cuda")
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="one element"):
        optimizer.step()


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_counts_that_torch_keeps_on_the_device_come_to_the_host_and_back(name: str) -> None:
    theirs = on_cuda(make_params(F32))
    reference = getattr(torch.optim, name)(theirs, fused=True)

    def step(*pairs: Any) -> None:
        give_gradients(*(params for params, _ in pairs))
        for _, optimizer in pairs:
            optimizer.step()

    for _ in range(3):
        step((theirs, reference))
    ours = twins(theirs)
    optimizer = made(name, ours)
    optimizer.load_state_dict(reference.state_dict())
    assert {state["step"].device.type for state in state_of(optimizer, ours)} == {"cpu"}
    for _ in range(2):
        step((theirs, reference), (ours, optimizer))
    assert_same(ours, theirs)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {state["step"].device.type for state in state_of(reference, theirs)} == {"cuda"}
    step((theirs, reference), (ours, optimizer))
    assert_same(ours, theirs)


@every_adam
def test_a_captured_step_is_refused(name: str) -> None:
    p = nn.Parameter(torch.zeros(4, device="cuda"))
    optimizer = made(name, [p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
