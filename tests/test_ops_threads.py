"""Threads, the interpreter lock and forked children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import ops_reference as ref
import pytest
import torch

import spectrain_ext as st


@pytest.mark.parametrize("size", [1000, 1_000_003])
def test_the_number_of_threads_does_not_change_the_bits(size: int) -> None:
    w, g, v = (torch.randn(size) for _ in range(3))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        a, b = w.clone(), v.clone()
        out = torch.empty_like(a)
        st.sgd_step_(a, g, b, lr=0.1, momentum=0.9, weight_decay=0.1, predict=[(3.0, out)])
        st.predict_(a, b, lr=0.1, steps=2.0)
        results.append((a, b, out))
    for other in results[1:]:
        ref.assert_lists(other, results[0], "threads", exact=True)


def test_two_threads_with_their_own_plans() -> None:
    def run(seed: int) -> list[torch.Tensor]:
        gen = torch.Generator().manual_seed(seed)
        w, g, v, out = ([torch.randn(n, generator=gen) for n in (70_000, 3, 257)] for _ in range(4))
        plan = st.Plan(w, momentum_buffers=v, grads=g, outs=[out])
        for step in range(30):
            plan.sgd_step_(lr=0.01, momentum=0.9, first_step=step == 0, predict=[2.0])
        return w + v + out

    expected = [run(0), run(1)]
    got: list[list[torch.Tensor]] = [[], []]
    failures: list[BaseException] = []

    def work(k: int) -> None:
        try:
            got[k] = run(k)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    for k in (0, 1):
        ref.assert_lists(got[k], expected[k], f"thread {k}", exact=True)


@pytest.mark.parametrize("through", ["operator", "plan"])
def test_the_interpreter_lock_is_released(through: str) -> None:
    """With a switch interval of hours, another thread runs only when an operator lets it.

    One observation proves it; a busy machine may need several calls until it is scheduled.
    """
    w, v = torch.zeros(4_000_000), torch.zeros(4_000_000)
    plan = st.Plan(w, momentum_buffers=v)
    count, stop = [0], threading.Event()

    def spin() -> None:
        while not stop.is_set():
            count[0] += 1
            time.sleep(0)  # offers the lock back; with this interval nobody could take it

    interval = sys.getswitchinterval()
    other = threading.Thread(target=spin)
    other.start()
    seen = False
    try:
        sys.setswitchinterval(1e4)
        for _ in range(300):
            before = count[0]
            if through == "plan":
                plan.predict_(lr=0.1, steps=1.0)
            else:
                st.predict_(w, v, lr=0.1, steps=1.0)
            if count[0] > before:
                seen = True
                break
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        other.join()
    assert seen, "no other Python thread ever ran while an operator worked on 16 MB"


# The child looks at results through numpy and makes no tensors: torch's own parallel loops hang
# there.
_FORK = """
    import os, sys, warnings
    warnings.simplefilter("ignore")
    import torch
    import spectrain_ext as st

    torch.set_num_threads({threads})
    w, v, a, b, c = (torch.ones(2_000_000) for _ in range(5))
    st.predict_(w, v, lr=0.5, steps=1.0)      # the parent's pool of threads exists now
    w.add_(v).sub_(v)
    plan = st.Plan(w, momentum_buffers=v)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            plan.predict_(lr=0.5, steps=1.0)
            st.sgd_step_(a, b, c, lr=1.0, momentum=1.0)
            ok = (w.numpy() == 0.0).all() and (a.numpy() == -1.0).all()
            code = 0 if ok else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    st.predict_(w, v, lr=0.5, steps=1.0)      # and the parent still works, on its own copy
    assert bool((w == 0.0).all()) and bool((a == 1.0).all())
    sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("threads", [2, 4])
def test_a_forked_child_can_call_operators(threads: int) -> None:
    """A pool of threads does not survive a fork: a child that waited for it would hang."""
    code = textwrap.dedent(_FORK).format(threads=threads)
    # The time limit only turns a hang into a failure. A new session, so that the child can be ended
    # with its parent.
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, start_new_session=True
    ) as parent:
        try:
            _, errors = parent.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            os.killpg(parent.pid, signal.SIGKILL)
            raise AssertionError("a forked child hung in an operator") from None
    assert parent.returncode == 0, errors.decode()
