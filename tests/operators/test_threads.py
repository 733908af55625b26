"""Threads, the interpreter lock and forked children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import pytest
import torch
from helpers import ops_reference as ref

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


@pytest.mark.processes
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


def _together(work: Callable[[int, Callable[[], bool]], None], seconds: float, n: int = 3) -> None:
    """Run work in several threads until the time is up; raise what any of them raised."""
    end = time.monotonic() + seconds
    failures: list[BaseException] = []

    def run(k: int) -> None:
        try:
            work(k, lambda: time.monotonic() < end and not failures)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failures:
        raise failures[0]


STRESS = [
    pytest.param(1.0, id="a second"),
    pytest.param(60.0, id="a minute", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("seconds", STRESS)
def test_threads_that_share_one_plan(seconds: float) -> None:
    """Calls of so many kinds that tables are made and evicted all the time, on moving gradients."""
    sizes = [70_000, 3, 257, 0, 1000]
    w, v, kept, *outs = ([torch.ones(n) for n in sizes] for _ in range(12))
    plan = st.Plan(w, momentum_buffers=v, stashed=kept, outs=outs, grads=_ones(sizes))

    def work(k: int, go_on: Callable[[], bool]) -> None:
        i = k
        while go_on():
            i += 1
            if i % 3 == 0:
                plan.refresh([None if (i + j) % 7 == 0 else g for j, g in enumerate(_ones(sizes))])
            elif i % 3 == 1:
                predict = [1.0 if (i >> j) % 2 else None for j in range(len(outs))]
                first = [(i + j) % 5 == 0 for j in range(len(sizes))]
                plan.sgd_step_(lr=0.0, momentum=0.5, first_step=first, predict=predict)
            else:
                plan.predict(lr=0.0, steps=1.0, out=i % len(outs))
                plan.stash()

    _together(work, seconds)
    for x in [*w, *kept]:
        assert torch.equal(x, torch.ones_like(x))  # lr is 0: whatever ran in between, these stay


def _ones(sizes: list[int]) -> list[torch.Tensor]:
    return [torch.ones(n) for n in sizes]


@pytest.mark.parametrize("seconds", STRESS)
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_threads_that_share_one_optimizer(name: str, seconds: float) -> None:
    params = [torch.nn.Parameter(torch.ones(n)) for n in (70_000, 3, 257)]
    kinds = {"SGD": {"momentum": 0.5}, "AdamW": {"weight_decay": 0.0}}
    optimizer = getattr(st.optim, name)(params, lr=0.0, **kinds[name])
    for (
        p
    ) in params:  # set once: torch itself crashes where one thread sets .grad and others read it
        p.grad = torch.ones_like(p)
    steps = [0, 0, 0]

    def work(k: int, go_on: Callable[[], bool]) -> None:
        while go_on():
            optimizer.step()
            steps[k] += 1
            if k == 0 and steps[k] % 5 == 0:
                optimizer.load_state_dict(optimizer.state_dict())

    _together(work, seconds)
    assert min(steps) > 0
    for p in params:
        assert torch.equal(p, torch.ones_like(p))


def test_a_plan_called_from_within_its_own_call() -> None:
    class Reentrant:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **_: object) -> object:
            plan.stash()
            return torch.ones(1).__dlpack__()

    w = torch.zeros(3)
    plan = st.Plan(w, grads=torch.ones(3), stashed=torch.zeros(3))
    with pytest.raises((RuntimeError, TypeError), match="from within one of its own calls"):
        plan.sgd_step_(lr=1.0, momentum=0.0, clip_factor=Reentrant())
    assert w.tolist() == [0.0] * 3
    plan.stash()


@pytest.mark.processes
def test_a_plan_in_a_child_that_was_forked_in_the_middle_of_a_call() -> None:
    """The thread that has the turn does not exist in the child, which must not wait for it."""
    program = """
        import os, threading, torch
        import spectrain_ext as st

        plan = st.Plan(torch.zeros(3), grads=torch.ones(3))
        inside, forked = threading.Event(), threading.Event()

        class Waits:
            def __dlpack_device__(self):
                return (1, 0)
            def __dlpack__(self, **_):
                inside.set()
                forked.wait()
                return torch.ones(1).__dlpack__()

        thread = threading.Thread(
            target=lambda: plan.sgd_step_(lr=1.0, momentum=0.0, clip_factor=Waits())
        )
        thread.start()
        inside.wait()
        pid = os.fork()
        if pid == 0:
            try:
                plan.sgd_step_(lr=1.0, momentum=0.0)
            except RuntimeError as error:
                os._exit(0 if "forked" in str(error) else 1)
            os._exit(2)
        forked.set()
        thread.join()
        print("child", os.waitpid(pid, 0)[1])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "child 0", done.stderr


class TestInterrupts:
    """What a user's own code raises on the way: Ctrl-C stays Ctrl-C."""

    @pytest.mark.parametrize("where", ["__dlpack__", "__dlpack_device__", "lookup"])
    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
    def test_while_memory_is_borrowed(self, where: str, error: type[BaseException]) -> None:
        class Array:
            def __getattr__(self, name: str) -> object:
                if where == "lookup" and name == "__cuda_array_interface__":
                    raise error
                raise AttributeError(name)

            def __dlpack_device__(self) -> tuple[int, int]:
                if where == "__dlpack_device__":
                    raise error
                return (1, 0)

            def __dlpack__(self, **_: object) -> object:
                if where == "__dlpack__":
                    raise error
                raise BufferError

        array = Array()
        if where == "lookup":
            del Array.__dlpack__
        with pytest.raises(error):
            st.predict_(array, torch.zeros(3), lr=0.1, steps=1.0)

    def test_while_gradients_are_read(self) -> None:
        class Weight(torch.nn.Parameter):
            @property
            def grad(self) -> torch.Tensor:  # type: ignore[override]
                raise KeyboardInterrupt

        p = Weight(torch.zeros(3))
        plan = st.Plan(p)
        with pytest.raises(KeyboardInterrupt):
            plan.refresh()


@pytest.mark.processes
def test_a_subinterpreter_is_refused_instead_of_hanging() -> None:
    program = """
        for name in ("_interpreters", "_xxsubinterpreters"):
            try:
                interpreters = __import__(name)
                break
            except ImportError:
                pass
        code = "try:\\n import spectrain_ext\\nexcept ImportError as e:\\n print(e, flush=True)"
        interpreters.run_string(interpreters.create(), code)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert "cannot be used in a subinterpreter" in done.stdout, done.stderr
