"""Tests concurrent calls from threads, with and without Python's global lock."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext import _C

THREADS = 4


def _at_once(work: Callable[[int], Any]) -> list[Any]:
    """Run `work(0)` to `work(THREADS - 1)` in simultaneous threads; return the results."""
    begin = threading.Barrier(THREADS)

    def one(i: int) -> Any:
        begin.wait()
        return work(i)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(one, range(THREADS)))


@pytest.fixture(autouse=True)
def _often() -> Iterator[None]:
    """Let threads switch as often as Python's lock allows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Subclass(Tensor):
    """A third type with the same memory behind it."""


KINDS: list[Callable[[Tensor], Any]] = [
    lambda t: t,
    lambda t: t.numpy(),
    lambda t: nn.Parameter(t, requires_grad=False),
    lambda t: t.as_subclass(Subclass),
    lambda t: t.numpy(),
]


def _mixed(begin: int, value: float) -> list[Any]:
    """No two adjacent types are equal: anything cached for one is wrong for the next."""
    return [KINDS[(begin + i) % len(KINDS)](torch.full((3,), value)) for i in range(100)]


def _bits(arrays: list[Any]) -> list[bytes]:
    return [np.asarray(a).tobytes() for a in arrays]


def test_operators_in_threads_have_the_bits_of_one() -> None:
    def work(i: int) -> list[bytes]:
        w, v, g, out = (_mixed(10 * (i + k), 1.0 + k) for k in range(4))
        for _ in range(25):
            st.sgd_step_(w, v, g, lr=0.1, momentum=0.9, weight_decay=0.01, predict=[(2.0, out)])
            st.swap_(w, out)
        return _bits([*w, *v, *out])

    alone = work(0)
    assert all(bits == alone for bits in _at_once(work))


def test_gradients_are_read_of_each_thread_s_own_parameters() -> None:
    def work(i: int) -> bool:
        mixed = _mixed(i, float(i))
        plan = st.Plan(mixed, momentum_buffers=[torch.zeros(3) for _ in mixed])
        for step in range(50):
            for p in mixed:
                if isinstance(p, Tensor):  # arrays have no gradients
                    p.grad = torch.ones(3)
            plan.refresh()
            plan.sgd_step_(lr=1.0, momentum=0.5, first_step=step == 0)
        moved = i - 98.0  # sum of 2 - 0.5^step, to float32's last bit
        return all(np.allclose(p, moved if isinstance(p, Tensor) else i) for p in mixed)

    assert all(_at_once(work))


def test_a_shared_plan_lets_one_thread_in_at_a_time() -> None:
    def plan_of(w: list[Tensor]) -> st.Plan:
        momentum, grads, kept, out = ([torch.full_like(p, x) for p in w] for x in (0, 1, 1, 0))
        return st.Plan(w, momentum_buffers=momentum, grads=grads, stashed=kept, outs=[out])

    def step(plan: st.Plan) -> None:
        for _ in range(50):
            plan.sgd_step_(lr=0.01, momentum=0.9, predict=[3.0])

    def calls(_: int) -> None:
        for _ in range(50):
            plan.sgd_step_(lr=0.01, momentum=0.9, predict=[3.0])
            plan.swap_()
            plan.refresh()
            plan.swap_()

    shared, alone = ([torch.ones(n) for n in (3, 100, 5000)] for _ in range(2))
    plan, by_one = plan_of(shared), plan_of(alone)
    _at_once(lambda _: step(plan))
    for _ in range(THREADS):
        step(by_one)
    assert _bits(shared) == _bits(alone)
    _at_once(calls)  # swaps of several threads come in any order


@pytest.mark.processes
def test_a_child_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    inside, over = threading.Event(), threading.Event()

    class Waits:
        def __dlpack__(self, **_: object) -> object:
            inside.set()
            over.wait()
            return torch.ones(1).__dlpack__()

    w = torch.ones(3)
    plan = st.Plan(w, momentum_buffers=torch.ones(3), grads=torch.ones(3))
    step = {"lr": 0.1, "momentum": 0.9, "grad_scale": Waits()}
    thread = threading.Thread(target=lambda: plan.sgd_step_(**step))
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        try:
            plan.predict_(lr=0.1, steps=1.0)
        except RuntimeError as error:
            os._exit(0 if "forked while another thread used the plan" in str(error) else 1)
        os._exit(2)
    over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not torch.equal(w, torch.ones(3))


def test_lists_and_dicts_that_others_change_meanwhile() -> None:
    numbers = [float(i) for i in range(50)]
    held: dict[str, Any] = {"lr": 0.1, "rows": [1.0, 2.0]}
    over = threading.Event()

    def change(i: int) -> None:
        while not over.is_set():
            numbers[:] = [float(k + i) for k in range(20 + i)]
            held["rows"] = [object(), object()]
            held[f"new {i}"] = object()
            del held[f"new {i}"]

    def read(_: int) -> None:
        for _ in range(1500):
            _C.same(numbers, tuple(numbers))
            _C.same(held, {"lr": 0.1, "rows": (1.0, 2.0)})
            _C.same(held, (0.1, (1.0, 2.0)))

    with ThreadPoolExecutor(2) as changers:
        for i in range(2):
            changers.submit(change, i)
        try:
            _at_once(read)
        finally:
            over.set()


def test_types_that_come_and_go() -> None:
    def work(_: int) -> None:
        for _ in range(50):
            kind = type("Passing", (Tensor,), {})
            w = torch.ones(5).as_subclass(kind)
            st.swap_(w, torch.zeros(5))
            assert not np.asarray(w).any()

    _at_once(work)


@pytest.mark.processes
@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="has its lock")
def test_an_import_leaves_python_without_its_lock() -> None:
    code = (
        "import sys, torch; before = sys._is_gil_enabled(); import spectrain_ext; "
        "spectrain_ext.predict_; print(before, sys._is_gil_enabled())"
    )
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
