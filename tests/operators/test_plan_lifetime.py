"""Tests plans whose memory moves or leaks: no access to freed memory; errors name the tensor."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import spectrain_ext as st


def _set(_: nn.Module, p: Tensor) -> None:
    with torch.no_grad():
        p.set_(torch.zeros_like(p))


def _data(_: nn.Module, p: Tensor) -> None:
    p.data = torch.zeros_like(p)


#: Ways to give a parameter other memory: another storage, or the same with other bytes.
MOVES: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "double": lambda model, _: model.double(),
    "bfloat16": lambda model, _: model.bfloat16(),
    "data": _data,
    "set_": _set,
    "share_memory": lambda model, _: model.share_memory(),
    "resize_": lambda _, p: p.data.resize_(1 << 20),
    "storage.resize_(0)": lambda _, p: p.untyped_storage().resize_(0),
    "storage.resize_": lambda _, p: p.untyped_storage().resize_(1 << 22),
}
#: What a plan does, its arguments, and the lists that it uses beside the parameters.
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "predict_": ({"lr": 0.1, "steps": 1.0}, "momentum_buffers"),
    "predict": ({"lr": 0.1, "steps": 1.0}, "momentum_buffers outs[0]"),
    "stash": ({}, "stashed"),
    "restore_": ({}, "stashed"),
    "swap_": ({}, "stashed"),
    "stash_predict_": ({"lr": 0.1, "steps": 2.0}, "momentum_buffers stashed"),
    "extrapolate": ({"steps": 1.0}, "stashed outs[0]"),
    "write_out": ({}, "outs[0]"),
    "sgd_step_": ({"lr": 0.1, "momentum": 0.9, "predict": [1.0]}, "grads momentum_buffers outs[0]"),
    "adam_step_": ({"lr": 0.1, "step": 1, "predict": [1.0]}, "grads exp_avgs exp_avg_sqs outs[0]"),
}


def _call(plan: st.Plan, call: str) -> None:
    getattr(plan, call)(**CALLS[call][0])


def _lists(params: list[Tensor], call: str) -> dict[str, list[Tensor]]:
    state = ("exp_avgs", "exp_avg_sqs") if call == "adam_step_" else ("momentum_buffers",)
    names = (*state, "grads", "stashed", "outs[0]")
    return {name: [torch.ones_like(p) for p in params] for name in names}


def _plan(params: list[Tensor], lists: dict[str, list[Tensor]]) -> st.Plan:
    given = {name: tensors for name, tensors in lists.items() if name != "outs[0]"}
    return st.Plan(params, outs=[lists["outs[0]"]], **given)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_parameters_that_moved_are_refused(device: str, move: str, call: str) -> None:
    if (device, move) == ("cuda", "share_memory"):
        return  # moves nothing there
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)).to(device)
    params: list[Tensor] = list(model.parameters())
    plan = _plan(params, _lists(params, call))
    if device == "cuda":
        _call(plan, call)
    MOVES[move](model, params[2])
    first = 0 if move in ("double", "bfloat16", "share_memory") else 2
    with pytest.raises(RuntimeError, match=rf"^params\[{first}\]: its memory is not where"):
        _call(plan, call)


@pytest.mark.parametrize("call", CALLS)
def test_only_what_a_call_uses_has_to_be_in_place(call: str) -> None:
    params = [torch.ones(50), torch.ones(5)]
    uses = CALLS[call][1].split()
    for name in _lists(params, call):
        lists = _lists(params, call)
        plan = _plan(params, lists)
        lists[name][1].data = torch.ones(5)
        if name not in uses:
            _call(plan, call)
            continue
        was = [p.clone() for p in params]
        with pytest.raises(RuntimeError) as caught:
            _call(plan, call)
        assert str(caught.value).startswith(f"{name}[1]: its memory is not where")
        assert all(map(torch.equal, params, was))


@pytest.mark.parametrize("steps_before", [0, 2])
def test_gradients_that_moved_are_refused_until_they_are_read_again(steps_before: int) -> None:
    w, g = [torch.zeros(6), torch.zeros(300)], [torch.ones(6), torch.ones(300)]
    plan = st.Plan(w, grads=g)
    for _ in range(steps_before):
        plan.sgd_step_(lr=1.0, momentum=0.0)
    g[1].data = torch.full((300,), 5.0)
    with pytest.raises(RuntimeError, match=r"^grads\[1\]: its memory .* refresh\(\)"):
        plan.sgd_step_(lr=1.0, momentum=0.0)
    assert w[0].tolist() == [-1.0 * steps_before] * 6
    plan.refresh()
    plan.sgd_step_(lr=1.0, momentum=0.0)
    assert w[1].tolist() == [-1.0 * steps_before - 5.0] * 300


def test_a_gradient_without_memory_is_refused() -> None:
    w, g = torch.zeros(6), torch.ones(6)
    plan = st.Plan(w, grads=g)
    g.untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, TypeError), match=r"^grads: "):
        plan.sgd_step_(lr=1.0, momentum=0.0)


def test_the_memory_that_was_given_lives_as_long_as_the_plan() -> None:
    p = nn.Parameter(torch.zeros(1000))
    storage = StorageWeakRef(p.untyped_storage())
    plan = st.Plan(p, stashed=torch.zeros(1000))
    p.data = torch.zeros(1000)
    gc.collect()
    assert not storage.expired()
    del plan
    gc.collect()
    assert storage.expired()


def test_a_parameter_cannot_be_swapped_away_from_under_a_plan() -> None:
    """`torch.utils.swap_tensors` checks whether anything else holds the tensor."""
    p = nn.Parameter(torch.zeros(10))
    plan = st.Plan(p, stashed=torch.zeros(10))
    with pytest.raises(RuntimeError, match="use_count"):
        torch.utils.swap_tensors(p, nn.Parameter(torch.zeros(10)))
    del plan
    torch.utils.swap_tensors(p, nn.Parameter(torch.zeros(10)))


def test_a_wider_gradient_at_the_same_address_must_not_reach_into_the_weights() -> None:
    memory = torch.zeros(64)
    narrow, wide = memory[:8].view(torch.bfloat16)[:8], memory[:8]  # 16 bytes, 32 bytes
    plan = st.Plan(memory[4:12], grads=narrow)
    with pytest.raises(ValueError, match="grads: expected memory that the step does not write"):
        plan.refresh(wide)


@pytest.mark.parametrize("known", [False, True])
def test_a_negative_view_would_reverse_every_step(known: bool) -> None:
    """Its neg bit says that memory has the opposite sign."""
    p = nn.Parameter(torch.zeros(6))
    plan = st.Plan(p)
    if known:
        p.grad = torch.ones(6)
        plan.refresh()
        p.grad.data = torch._neg_view(torch.ones(6))
    else:
        p.grad = torch._neg_view(torch.ones(6))
    with pytest.raises(ValueError, match="grads: is a negative view"):
        plan.refresh()
    p.grad = torch.ones(6)
    plan.refresh()
    plan.sgd_step_(lr=1.0, momentum=0.0)
    assert p.tolist() == [-1.0] * 6
    p.grad = torch._neg_view(torch.ones(6))
    st.optim.SGD([p], lr=1.0).step()  # which reads it as torch does
    assert p.tolist() == [0.0] * 6


# In a separate process, whose peak memory is that of these calls.
_PROGRAM = """
import resource
import sys

import torch
import spectrain_ext as st

torch.set_num_threads(1)
w, v, g, out = ([torch.randn(n) for n in (3, 64)] for _ in range(4))
plan = st.Plan(w, momentum_buffers=v, grads=g, outs=[out])
single = torch.nn.Parameter(torch.randn(8))


def use(calls):
    for i in range(calls):
        plan.predict(lr=0.1, steps=2.0)
        plan.sgd_step_(lr=0.0, momentum=0.9, predict=(1.0,))
        if i % 10 == 0:  # what looks at every array again
            st.predict(w, v, lr=0.1, steps=1.0)
            single.grad = torch.ones(8)
            st.Plan(single, momentum_buffers=torch.zeros(8)).refresh()
            try:
                st.predict_(w, [v[0], v[0]], lr=0.1, steps=1.0)
            except ValueError:
                pass


use(2_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
use(int(sys.argv[1]))
assert not torch.cuda.is_initialized()  # a context would break forked workers
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "calls",
    [20_000, pytest.param(1_000_000, marks=[pytest.mark.nightly, pytest.mark.timeout(2000)])],
)
def test_memory_does_not_grow(calls: int) -> None:
    """A small object lost per call would take 64 bytes or more, 1.25 MiB in the short run.

    Calls on the CPU make no CUDA context either.
    """
    command = [sys.executable, "-c", _PROGRAM, str(calls)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1024, "KiB"
