"""Ctrl-C at any line, and again at any line of what follows: the true weights stay."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import time
from itertools import count

import pytest
import torch
from helpers.interrupting import (
    Case,
    Interrupts,
    adam,
    clones,
    foreign,
    groups,
    moments,
    same,
    sgd,
)

import spectrain_ext as st

# xgrad is for one stage; and what learning rates begin with is told by no weights and no momentum.
METHODS = [name for name in st.methods() if name not in ("xgrad", "pipemare-t1", "pipemare")]
EXTRAS = {
    "recompute": ("spectrain", {"recompute": True}),
    "clip": ("pipedream", {"clip_norm": 0.05}),
    "global clip": ("1f1b", {"microbatches": 2, "clip_norm": 0.05, "clip_scope": "global"}),
    "master": ("spectrain", {"dtype": torch.bfloat16, "master_dtype": torch.float32}),
    "stashed master": ("pipedream", {"dtype": torch.bfloat16, "master_dtype": torch.float32}),
    "difference": ("lwp-w", {"dtype": torch.bfloat16, "master_dtype": torch.float32}),
    "adam": ("spectrain", {"optimizer": adam}),
    "groups": ("vanilla", {"optimizer": groups}),
    "foreign": ("vanilla", {"optimizer": foreign}),
    "foreign master": (
        "lwp-w",
        {"optimizer": foreign, "dtype": torch.bfloat16, "master_dtype": torch.float32},
    ),
    "ties": ("spectrain", {"ties": True}),
    "window": ("spectrain-stash", {"window": "wide", "microbatches": 2}),
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def ema(params):
    return st.optim.SGD(params, lr=0.1, momentum=0.9, ema=True)


def undampened(params):
    return st.optim.SGD(params, lr=0.1, momentum=0.9)


def case_of(name):
    if name in EXTRAS:
        method, settings = EXTRAS[name]
        return Case(method, **settings)
    return Case(
        name,
        optimizer={"spectrain-ema": ema, "error-feedback": undampened}.get(name, sgd),
        microbatches=3 if name in ("pipedream-2bw", "error-feedback") else 1,
    )


def raw(modules):
    """The parameters as whoever holds the modules sees them, past the pipeline."""
    return [p.detach().clone() for module in modules for p in module.parameters()]


def trained(pipe, data):
    list(pipe.run(data))


def left(pipe, data):
    """Leave a run after its first result, which trains on what is in flight."""
    run = pipe.run(data)
    next(run)
    run.close()


def interrupted(case, *numbers, how=trained):
    """Interrupt a run; returns how many times that was, once what must be true then is."""
    pipe = case.pipe()
    modules = list(pipe.children())
    state = torch.get_rng_state()
    try:
        with Interrupts(*numbers) as interrupts:
            how(pipe, case.data)
        return 0
    except KeyboardInterrupt:
        pass
    before = raw(modules)
    found = pipe.state_dict()
    if len(numbers) == 1:  # nobody had to ask for it
        assert all(map(torch.equal, raw(modules), before))
    assert all(map(torch.equal, found.values(), raw(modules)))
    assert torch.equal(torch.get_rng_state(), state)
    case.check(pipe)
    return len(numbers) - len(interrupts.left)


def sweep(case, first, then=None, how=trained):
    """Interrupt at every so many lines, and then at every so many of what follows."""
    times = 0
    for n in count(first // 2, first):
        for m in count(n % (then or 1), then or 1):
            came = interrupted(case, n, *([] if then is None else [m]), how=how)
            times += came
            if came < 2:
                break
        if not came:
            return times


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("spectrain", 239),
        ("pipedream", 239),
        ("groups", 479),
        ("master", 1499),
        ("foreign", 479),
        ("foreign master", 999),
        ("ties", 359),
        *(pytest.param(name, 7, marks=pytest.mark.nightly) for name in ("spectrain", "pipedream")),
        *(pytest.param(name, 97, marks=pytest.mark.nightly) for name in (*METHODS, *EXTRAS)),
    ],
)
def test_an_interrupt_anywhere(name, step):
    assert sweep(case_of(name), step) > 10


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("spectrain", 3001, 29),
        ("pipedream", 3001, 29),
        *(
            pytest.param(name, 997, 19, marks=pytest.mark.nightly)
            for name in ("spectrain", "pipedream")
        ),
        *(pytest.param(name, 4001, 43, marks=pytest.mark.nightly) for name in (*METHODS, *EXTRAS)),
    ],
)
def test_two_interrupts(name, first, then):
    assert sweep(case_of(name), first, then) > 20


@pytest.mark.parametrize("step", [601, pytest.param(13, marks=pytest.mark.nightly)])
def test_an_interrupt_while_a_run_is_left(step):
    assert sweep(case_of("spectrain"), step, how=left) > 5


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("spectrain", 199, None),
        ("pipedream", 397, 23),
        ("ties", 419, 61),
        *(
            pytest.param(name, *steps, marks=pytest.mark.nightly)
            for name in ("spectrain", "pipedream", "ties")
            for steps in [(7, None), (61, 5)]
        ),
    ],
)
def test_interrupts_while_a_pipeline_is_made(name, first, then):
    case = case_of(name)
    expected = raw(case.modules())
    for n in count(0, first):
        modules, made = case.modules(), None
        try:
            with Interrupts(n, *([] if then is None else [n % then])) as interrupts:
                made = case.pipe_of(modules)
        except KeyboardInterrupt:
            pass
        assert all(map(torch.equal, raw(modules), expected))
        case.check(made or case.pipe_of(modules))
        if made is not None and len(interrupts.left) > (then is not None):
            break
    assert n > 5 * first


def released(pipe, _):
    pipe.release()


def evaluated(pipe, _):
    pipe.eval()
    pipe.train()


def loaded(pipe, _):
    pipe.load_state_dict({name: value.clone() for name, value in pipe.state_dict().items()})
    for optimizer in pipe.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())


def twice(pipe, data):
    pipe.release()
    list(pipe.run(data))


@pytest.mark.parametrize("do", [released, evaluated, loaded, twice])
@pytest.mark.parametrize("name", ["spectrain", "pipedream", "ties"])
def test_interrupts_between_runs(name, do):
    """What was interrupted can be asked for again, or the pipeline trained on."""
    case = case_of(name)
    step = {twice: 331, loaded: 61}.get(do, 11) * (1 + 2 * (name == "ties"))
    for n in count(0, step):
        pipe = case.pipe()
        list(pipe.run(case.data[:2]))
        try:
            with Interrupts(*[n, n % 17][: 1 + n % 2]) as interrupts:
                do(pipe, [])
        except KeyboardInterrupt:
            pass
        case.check(pipe)
        if do is not twice:
            do(pipe, [])
            list(pipe.run(case.data[:1]))
        if len(interrupts.left) > n % 2:
            break
    assert n > 2 * step


@pytest.mark.parametrize("make", [sgd, adam, groups])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_step_is_made_as_a_whole_or_not_at_all(make, again, every):
    """By an optimizer in a loop of one's own, the first step and a later one."""

    def at(steps):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
        optimizer = make(params)
        for _ in range(steps):
            step(optimizer, params)
        return params, optimizer

    def step(optimizer, params):
        for p in params:
            p.grad = torch.ones(3)
        optimizer.step()

    def state(params, optimizer):
        return clones({**dict(zip("ab", params, strict=True)), **moments(optimizer)})

    for made in (0, 2):
        states = [state(*at(made + more)) for more in range(3)]
        found = set()
        for n in count(0, every):
            params, optimizer = at(made)
            try:
                with Interrupts(n, *([n % 13] if again else [])) as interrupts:
                    step(optimizer, params)
            except KeyboardInterrupt:
                pass
            now = state(params, optimizer)
            done = same(now, states[1])
            assert done or same(now, states[0])
            step(optimizer, params)
            assert same(state(params, optimizer), states[1 + done])
            found.add(done)
            if len(interrupts.left) > again:
                break
        assert found == {False, True}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*METHODS, *(n for n in EXTRAS if "foreign" not in n)])
def test_two_signals(name, monkeypatch):
    """Real ones, at random times; a step that is not the package's may be made in part then."""
    # Python drops what comes inside of a finalizer; pytest's report of that could be interrupted.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    case, draw = case_of(name), random.Random(name)
    begun = time.perf_counter()
    list(case.pipe().run(case.data))
    length = time.perf_counter() - begun
    came, raises = 0, False

    def handler(number, frame):
        nonlocal came
        came += 1
        if came == 2:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if raises:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for _ in range(100):
            pipe, came, raises = case.pipe(), 0, True
            gap = draw.uniform(0.00005, 0.006)
            with contextlib.suppress(KeyboardInterrupt):
                try:
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.00005, length), gap)
                    list(pipe.run(case.data))
                finally:
                    raises = False
            raises = False
            while came < 2:
                time.sleep(0.001)
            pipe.state_dict()
            case.check(pipe)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
