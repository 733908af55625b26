"""Pipeline stages on one GPU: the CPU's result, the same bits each time, no host waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spectrain_ext as st

pytestmark = pytest.mark.cuda
_STAGES, _WIDTH, _CLASSES = 4, 24, 5
# Those for plain SGD, four stages and any number of microbatches.
_METHODS = [m for m in st.methods() if m not in ("spectrain-ema", "pipedream-2bw", "xgrad")]


def _stages() -> list[nn.Module]:
    torch.manual_seed(11)
    middle = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(_STAGES - 1)]
    return [m.double() for m in [*middle, nn.Linear(_WIDTH, _CLASSES)]]


def _batches(count: int, device: str) -> list[tuple[Tensor, Tensor]]:
    gen = torch.Generator().manual_seed(5)
    out = []
    for _ in range(count):
        x = torch.randn(8, _WIDTH, generator=gen, dtype=torch.float64)
        y = torch.randint(0, _CLASSES, (8,), generator=gen)
        out.append((x.to(device), y.to(device)))
    return out


def _pipeline(method: str, device: str, **options: Any) -> st.Pipeline:
    stages = [m.to(device) for m in _stages()]
    return st.Pipeline(
        stages,
        optimizer=lambda params: st.optim.SGD(params, lr=0.05, momentum=0.9),
        loss_fn=nn.functional.cross_entropy,
        method=method,
        devices=[f"{device}:0" if device == "cuda" else device] * _STAGES,
        **options,
    )


def _train(
    method: str, device: str, count: int = 24, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    pipe = _pipeline(method, device, **options)
    losses = [r.loss for r in pipe.run(_batches(count, device))]
    state = {k: v.detach().cpu().clone() for k, v in pipe.state_dict().items()}
    return torch.stack(losses).cpu(), state


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("method", _METHODS)
def test_the_result_of_the_cpu(method: str, microbatches: int) -> None:
    host_loss, host = _train(method, "cpu", microbatches=microbatches)
    loss, state = _train(method, "cuda", microbatches=microbatches)
    torch.testing.assert_close(loss, host_loss, rtol=1e-9, atol=1e-12)
    for key in host:
        torch.testing.assert_close(state[key], host[key], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("method", _METHODS)
def test_the_same_bits_each_time(method: str) -> None:
    """A missing wait shows as a difference between runs sooner or later."""
    first_loss, first = _train(method, "cuda", count=64)
    for _ in range(3):
        loss, state = _train(method, "cuda", count=64)
        assert torch.equal(loss, first_loss)
        assert all(torch.equal(state[k], first[k]) for k in first)


@pytest.mark.parametrize("method", _METHODS)
def test_no_host_synchronization_in_steady_state(method: str) -> None:
    pipe = _pipeline(method, "cuda")
    batches = _batches(60, "cuda")
    for _ in pipe.run(batches[:12]):
        pass
    losses = []
    torch.cuda.synchronize()
    try:
        for result in pipe.run(batches):
            losses.append(result.loss)
            if result.index == 15:
                torch.cuda.set_sync_debug_mode("error")
            if result.index == 45:
                torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(losses) == 60 and all(bool(x.isfinite()) for x in losses)


def test_the_callers_stream_may_be_another_one() -> None:
    """Batches made on, and losses read on, a stream that is not the default one."""
    expected, _ = _train("spectrain", "cuda")
    pipe = _pipeline("spectrain", "cuda")
    ready = _batches(24, "cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    losses = []

    def late() -> Any:
        for x, y in ready:
            x2 = torch.full_like(x, torch.nan)
            torch.cuda._sleep(2_000_000)
            x2.copy_(x)
            yield x2, y

    with torch.cuda.stream(side):
        for result in pipe.run(late()):
            losses.append(result.loss * 1.0)
    side.synchronize()
    assert torch.equal(torch.stack(losses).cpu(), expected)


def test_batches_from_the_host() -> None:
    expected, _ = _train("spectrain", "cuda")
    pipe = _pipeline("spectrain", "cuda")
    losses = [r.loss for r in pipe.run(_batches(24, "cpu"))]
    assert torch.equal(torch.stack(losses).cpu(), expected)


def test_memory_does_not_grow() -> None:
    pipe = _pipeline("spectrain", "cuda")
    for _ in pipe.run(_batches(30, "cuda")):
        pass
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        for _ in pipe.run(_batches(30, "cuda")):
            pass
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20
