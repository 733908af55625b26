"""Tests Ctrl-C at any line: true weights survive; a second one in a run still lets it end."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import suppress
from functools import cache, partial
from itertools import count

import pytest
import torch
from helpers.interrupting import Case, Interrupts, adam, foreign, groups, same, sgd

import spectrain_ext as st
from spectrain_ext import interrupts
from spectrain_ext.interrupts import callers, deferred, waiting

# xgrad is for one stage; initial learning rates do not follow from weights and momentum.
METHODS = [name for name in st.methods() if name not in ("xgrad", "pipemare-t1", "pipemare")]
WIDER = {"dtype": torch.bfloat16, "master_dtype": torch.float32}
EXTRAS = {
    "recompute": ("spectrain", {"recompute": True}),
    "offload": ("pipedream", {"offload": "activations", "window": "wide"}),
    "clip": ("pipedream", {"clip_norm": 0.05}),
    "global clip": ("1f1b", {"microbatches": 2, "clip_norm": 0.05, "clip_scope": "global"}),
    "master": ("spectrain", WIDER),
    "stashed master": ("pipedream", WIDER),
    "difference": ("lwp-w", WIDER),
    "adam": ("spectrain", {"optimizer": adam}),
    "groups": ("vanilla", {"optimizer": groups}),
    "foreign": ("vanilla", {"optimizer": foreign}),
    "foreign master": ("lwp-w", {"optimizer": foreign, **WIDER}),
    "ties": ("spectrain", {"ties": True}),
    "window": ("spectrain-stash", {"window": "wide", "microbatches": 2}),
}


@cache
def case_of(name):
    if name in EXTRAS:
        method, settings = EXTRAS[name]
        return Case(method, **settings)
    smoothed = partial(st.optim.SGD, lr=0.1, momentum=0.9, smoothed=True)
    optimizer = smoothed if name == "spectrain-smoothed" else sgd
    parts = 3 if name in ("pipedream-2bw", "error-feedback") else 1
    return Case(name, optimizer=optimizer, microbatches=parts)


def nightly(*rows):
    return [pytest.param(*row, marks=pytest.mark.nightly) for row in rows]


def copies(modules):
    """Return the parameters in the modules, without the pipeline."""
    return [p.detach().clone() for module in modules for p in module.parameters()]


def interrupted(case, *numbers, leaves=False):
    """Interrupt a run, check the state, and return the number of interrupts.

    A run that ``leaves`` is left after its first result, and trains the batches in flight too.
    """
    pipe = case.pipe()
    modules = list(pipe.children())
    state, run = torch.get_rng_state(), None
    try:
        with Interrupts(*numbers) as interrupts:
            run = pipe.run(case.data)
            next(run)
            with pipe.weights():
                copies(modules)
            run.close() if leaves else list(run)
        return 0
    except KeyboardInterrupt:
        if run is not None:  # no effect, unless the interrupt came between two results
            run.close()
    before = copies(modules)
    found = pipe.state_dict()
    if len(numbers) == 1:  # raised without a request
        assert all(map(torch.equal, copies(modules), before))
    assert all(map(torch.equal, found.values(), copies(modules)))
    assert torch.equal(torch.get_rng_state(), state)
    if len(numbers) == 1:
        case.check(pipe)
    else:  # a second interrupt may leave an update incomplete
        losses = torch.stack([result.loss.float() for result in pipe.run(case.data[:3])])
        assert losses.isfinite().all()
    return len(numbers) - len(interrupts.left)


def sweep(case, first, then=None, leaves=False):
    """Interrupt at every ``first``-th line, and then at every ``then``-th following line."""
    times = 0
    for n in count(first // 2, first):
        for m in count(n % (then or 1), then or 1):
            came = interrupted(case, n, *([] if then is None else [m]), leaves=leaves)
            times += came
            if came < 2:
                break
        if not came:
            return times


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("spectrain", 359, None),
        ("pipedream", 479, None),
        ("groups", 479, None),
        ("master", 1499, None),
        ("foreign", 961, None),
        ("foreign master", 999, None),
        ("ties", 719, None),
        ("spectrain", 4001, 97),
        ("pipedream", 5003, 131),
        *nightly(*((name, 7, None) for name in ("spectrain", "pipedream"))),
        *nightly(*((name, 997, 19) for name in ("spectrain", "pipedream"))),
        *nightly(*((name, 97, None) for name in (*METHODS, *EXTRAS))),
        *nightly(*((name, 4001, 43) for name in (*METHODS, *EXTRAS))),
    ],
)
def test_interrupts_anywhere_in_a_run(name, first, then):
    assert sweep(case_of(name), first, then) > 9


@pytest.mark.parametrize("step", [601, *nightly([13])])
def test_an_interrupt_while_a_run_is_left(step):
    assert sweep(case_of("spectrain"), step, leaves=True) > 5


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("spectrain", 397, None),
        ("pipedream", 397, 23),
        ("ties", 419, 61),
        *nightly(*((name, 7, None) for name in ("spectrain", "pipedream", "ties"))),
        *nightly(*((name, 61, 5) for name in ("spectrain", "pipedream", "ties"))),
    ],
)
def test_interrupts_while_a_pipeline_is_made(name, first, then):
    case = case_of(name)
    expected = copies(case.modules())
    for n in count(0, first):
        modules, made = case.modules(), None
        numbers = [n] if then is None else [n, n % then]
        with suppress(KeyboardInterrupt), Interrupts(*numbers) as interrupts:
            made = case.pipe_of(modules)
        assert all(map(torch.equal, copies(modules), expected))
        case.check(made or case.pipe_of(modules))
        if made is not None and len(interrupts.left) == len(numbers):
            break
    assert n > 5 * first


@pytest.mark.parametrize("step", [17, *nightly([1])])
def test_two_interrupts_while_a_phase_begins(step, tmp_path):
    """True weights survive; a training that was saved before goes on by the rules of its phase."""
    case = Case("spectrain+pipedream@2")

    def loaded(pipe):
        st.checkpoint.load(tmp_path / "saved", pipe)
        return pipe

    pipe = case.pipe()
    list(pipe.run(case.data[:1]))
    st.checkpoint.save(tmp_path / "saved", pipe)
    drained = [case.state(pipe)]
    list(loaded(pipe).run(case.data[:1]))
    drained.append(case.state(pipe))
    expected = loaded(case.pipe())
    list(expected.run(case.data))
    for n in count(0, step):
        interrupts = Interrupts(n, 0, within=("follow_method", "follow", "bind", "unbind"))
        with suppress(KeyboardInterrupt), interrupts:
            list(loaded(pipe).run(case.data[:3]))
        if not interrupts.left:
            assert any(all(map(same, case.state(pipe), each)) for each in drained)
        list(loaded(pipe).run(case.data))
        for mine, theirs in zip(case.state(pipe), case.state(expected), strict=True):
            assert same(mine, theirs)
        if len(interrupts.left) == 2:
            break
    assert n > 400


def switched(pipe):
    pipe.eval()
    pipe.train()


def evaluated(pipe):
    x = torch.ones(2, 3, dtype=next(pipe.parameters()).dtype)
    pipe.evaluate([(x, x)] * 2)


def bound_again(pipe):
    pipe.release()
    list(pipe.run([]))


def loaded(pipe):
    pipe.load_state_dict({name: value.clone() for name, value in pipe.state_dict().items()})
    for optimizer in pipe.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("do", "step", "then"),
    [
        (st.Pipeline.release, 23, None),
        (switched, 23, None),
        (evaluated, 131, None),
        (evaluated, 331, 61),
        (loaded, 127, None),
        (bound_again, 127, None),
        *nightly((evaluated, 17, None), (evaluated, 61, 23), (loaded, 23, None)),
    ],
)
@pytest.mark.parametrize("name", ["spectrain", "ties", *nightly(["pipedream"])])
def test_interrupts_between_runs(name, do, step, then):
    """You can repeat the interrupted call, or train on."""
    case = case_of(name)
    for n in count(0, step * (1 + 2 * (name == "ties"))):
        modules = case.modules()
        modules[1][1].eval()
        modes = [part.training for module in modules for part in module.modules()]
        pipe = case.pipe_of(modules)
        list(pipe.run(case.data[:2]))
        drawn, numbers = torch.get_rng_state(), [n] if then is None else [n, then]
        with suppress(KeyboardInterrupt), Interrupts(*numbers) as interrupts:
            do(pipe)
        if do is evaluated:  # the next user of the pipeline finishes the end
            assert pipe.state_dict()
            assert [part.training for module in modules for part in module.modules()] == modes
        assert torch.equal(torch.get_rng_state(), drawn)
        case.check(pipe)
        do(pipe)
        list(pipe.run(case.data[:1]))
        if len(interrupts.left) == len(numbers):
            break
    assert n > 2 * step


@pytest.fixture
def handler():
    """Set Python's handler of SIGINT, return how to set others, and restore the previous one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield partial(signal.signal, signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def interrupt_contexts(number):
    """Press Ctrl-C before one of the contexts' bytecodes; return whether there are so many."""
    left = [number]

    def trace(frame, event, _):
        if frame.f_code.co_filename != interrupts.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if not left[0]:
                sys.settrace(None)
            left[0] -= 1
            if left[0] < 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        with deferred():
            with waiting():
                pass
            with deferred():
                pass
            with callers():
                pass
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(outer)
    return False


def test_one_interrupt_never_leaves_the_packages_handler(handler):
    number = 0
    while interrupt_contexts(number):
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, number
        assert (interrupts.STATE.depth, interrupts.STATE.pending) == (0, None)
        number += 1
    assert number > 300


@pytest.fixture
def case():
    return case_of("spectrain")


class Handled(Exception):
    """Raised by the caller's handler."""


def interrupting_at(case, minibatch, times=1):
    """Return a pipeline whose first stage is interrupted during a forward."""
    pipe, seen = case.pipe(), []

    def interrupt(*_):
        seen.append(None)
        if len(seen) == minibatch:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            seen.append("went on")

    pipe.get_submodule("0").register_forward_hook(interrupt)
    return pipe, seen


def raising(*_):
    raise Handled


@pytest.mark.parametrize(
    ("mine", "error", "times"),
    [
        (raising, Handled, 1),
        (signal.default_int_handler, KeyboardInterrupt, 1),
        (signal.default_int_handler, KeyboardInterrupt, 2),
    ],
)
def test_the_callers_handler_is_called_at_a_boundary(case, handler, mine, error, times):
    """A second signal is not deferred."""
    handler(mine)
    pipe, seen = interrupting_at(case, 3, times)
    with pytest.raises(error):
        list(pipe.run(case.data))
    assert ("went on" in seen) == (times == 1)
    assert signal.getsignal(signal.SIGINT) is mine
    case.check(pipe)


def test_a_handler_that_only_notes_lets_the_run_go_on(case, handler):
    noted = []
    handler(lambda number, frame: noted.append((number, frame is not None, len(seen))))
    pipe, seen = interrupting_at(case, 3)
    assert len(list(pipe.run(case.data))) == len(case.data)
    assert noted == [(signal.SIGINT, True, 4)]


@pytest.mark.parametrize("first", [signal.SIG_IGN, signal.SIG_DFL, raising])
def test_between_results_the_callers_handler_is_there(case, handler, first):
    """Also one that is not Python's, and another that the caller sets there."""
    handler(first)
    for result in case.pipe().run(case.data):
        assert signal.getsignal(signal.SIGINT) is (first if result.index < 3 else raising)
        if result.index == 2:
            handler(raising)
    assert signal.getsignal(signal.SIGINT) is raising


def test_another_thread_that_waits_lets_nothing_through(handler):
    entered, end, seen = threading.Event(), threading.Event(), []

    def wait():
        with waiting():
            entered.set()
            end.wait()

    thread = threading.Thread(target=wait)
    with pytest.raises(KeyboardInterrupt), deferred():
        thread.start()
        entered.wait()
        signal.raise_signal(signal.SIGINT)
        seen.append("went on")
        end.set()
        thread.join()
        seen.append("to the end")
    assert seen == ["went on", "to the end"]


def test_a_handler_that_is_set_inside_gets_what_waits_and_stays(case, handler):
    pipe, seen = interrupting_at(case, 3)

    def replace(*_):
        if "went on" in seen:
            handler(raising)

    pipe.get_submodule("0").register_forward_hook(replace)
    with pytest.raises(Handled):
        list(pipe.run(case.data))
    assert signal.getsignal(signal.SIGINT) is raising
    case.check(pipe)


def test_a_handler_that_was_left_behind_hands_signals_on(case, handler):
    """A second Ctrl-C can cut a context's exit short, or a caller restores it during a run."""
    found = []
    pipe = case.pipe()
    seen = pipe.get_submodule("0").register_forward_hook(
        lambda *_: found.append(signal.getsignal(signal.SIGINT))
    )
    list(pipe.run(case.data))
    seen.remove()
    assert found[0] is not signal.default_int_handler
    handler(found[0])
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    pipe, seen = interrupting_at(case, 3)
    with pytest.raises(KeyboardInterrupt):
        list(pipe.run(case.data))
    assert "went on" in seen
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_a_loader_nothing_is_deferred(case, handler):
    seen = []

    def loader():
        yield from case.data[:2]
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            seen.append("at once")
        yield case.data[2]

    assert len(list(case.pipe().run(loader()))) == 3
    assert seen == ["at once"]
