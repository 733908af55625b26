"""Measures the pipeline's own cost per action, beyond the module's forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spectrain_ext as st

STAGES, MINIBATCHES = 4, 64
#: An action is one forward or backward of one stage and microbatch, including loads, transfers and
#: updates. These are the actions with one microbatch.
ACTIONS = 2 * STAGES * MINIBATCHES
#: Methods that work with plain SGD, four stages and one microbatch.
_OTHERS = ("spectrain-smoothed", "pipedream-2bw", "error-feedback", "xgrad")
METHODS = [m for m in st.methods() if m not in _OTHERS]


def make_stages(width: int, device: str = "cpu") -> list[nn.Module]:
    torch.manual_seed(0)
    # Not ReLU: the momentum of a unit that is always off decays into slow subnormals.
    middle = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(STAGES - 1)]
    return [m.to(device) for m in [*middle, nn.Linear(width, 10)]]


def make_batches(width: int, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.randn(16, width, device=device), torch.randint(0, 10, (16,), device=device))
        for _ in range(MINIBATCHES)
    ]


def modules_only(
    stages: list[nn.Module],
    batches: list[tuple[Tensor, Tensor]],
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> None:
    """Run the same forwards and backwards by hand, stage by stage, with optional updates."""
    for x, y in batches:
        inputs, outputs = [], []
        for stage in stages:
            x = x.detach().requires_grad_(bool(inputs))
            inputs.append(x)
            x = stage(x)
            outputs.append(x)
        loss = nn.functional.cross_entropy(x, y)
        torch.autograd.backward(loss)
        for k in range(STAGES - 2, -1, -1):
            torch.autograd.backward(outputs[k], inputs[k + 1].grad)
        for optimizer in optimizers:
            optimizer.step()
        for stage in stages:
            for p in stage.parameters():
                p.grad = None


def make_pipeline(stages: list[nn.Module], method: str, **options: Any) -> st.Pipeline:
    return st.Pipeline(
        stages,
        optimizer=lambda params: st.optim.SGD(params, lr=1e-3, momentum=0.9),
        loss_fn=nn.functional.cross_entropy,
        method=method,
        **options,
    )


def run(pipe: st.Pipeline, batches: list[tuple[Tensor, Tensor]]) -> None:
    for _ in pipe.run(batches):
        pass


def own_cost(pipe: st.Pipeline, seconds: float, modules_s: float) -> float:
    """Return the seconds of an action beyond those that the modules alone take."""
    return (seconds / pipe.places[0].microbatches - modules_s) / ACTIONS


_medians: dict[int, float] = {}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _measure(benchmark: Any, call: Any, width: int, name: str) -> float:
    call()
    benchmark.pedantic(call, rounds=15, iterations=1, warmup_rounds=3)
    benchmark.group = f"{STAGES} stages, width {width}, {MINIBATCHES} minibatches"
    benchmark.extra_info.update(
        group=benchmark.group, name=name, torch=torch.__version__, actions=ACTIONS
    )
    return float(benchmark.stats.stats.median) if benchmark.stats is not None else 0.0


@pytest.mark.parametrize("width", [16, 256])
def test_modules_only(benchmark: Any, width: int) -> None:
    """First in the file, because it is the baseline of the others."""
    stages, batches = make_stages(width), make_batches(width)
    _medians[width] = _measure(benchmark, lambda: modules_only(stages, batches), width, "modules")


@pytest.mark.parametrize("width", [16, 256])
def test_modules_and_updates(benchmark: Any, width: int) -> None:
    """A manual training loop, one minibatch at a time."""
    stages, batches = make_stages(width), make_batches(width)
    optimizers = [
        torch.optim.SGD(s.parameters(), lr=1e-3, momentum=0.9, fused=True) for s in stages
    ]
    _measure(
        benchmark, lambda: modules_only(stages, batches, optimizers), width, "modules, optim.SGD"
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("width", [16, 256])
def test_pipeline(benchmark: Any, width: int, method: str, request: Any) -> None:
    pipe, batches = make_pipeline(make_stages(width), method), make_batches(width)
    median = _measure(benchmark, lambda: run(pipe, batches), width, f"pipeline, {method}")
    if _medians.get(width):  # nothing is measured with --benchmark-disable
        cost = own_cost(pipe, median, _medians[width]) * 1e6
        benchmark.extra_info["own_cost_us_per_action"] = cost
        lines = request.config.__dict__.setdefault("_own_cost", [])
        lines.append(f"{method}, width {width}: {cost:.1f} us of its own per action")
