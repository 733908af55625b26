"""Tests the pipeline's CUDA calls without CUDA, by streams and events that only record.

Tensors stay on the CPU. The executor makes all its stream and event calls, which tests inspect.
"""

from __future__ import annotations

import copy
import weakref
from contextlib import contextmanager, nullcontext
from typing import ClassVar

import pytest
import torch
from helpers.checked_streams import checked_streams
from helpers.pipeline_cases import batches, close, float64, losses, mse, sgd, tanh_stages  # noqa: F401
from torch import nn

import spectrain_ext as st
from spectrain_ext.transport import (
    Buffer,
    CudaStream,
    Stream,
    Transit,
    callers_stream,
    new_stream,
)

ZERO, ONE = torch.device("cuda", 0), torch.device("cuda", 1)


class OnZero(torch.Tensor):
    """A CPU tensor that claims to be on another device."""

    device, is_cuda = ZERO, True


class OnOne(torch.Tensor):
    device, is_cuda = ONE, True


class FakeStream:
    entered: ClassVar = []  # of all streams, the current one last

    def __init__(self, device, log):
        self.device, self.log = device, log

    def __enter__(self):
        assert self not in self.entered, "a torch stream that is current is entered again"
        self.entered.append(self)
        self.log.append(("enter", self))

    def __exit__(self, *_):
        assert self.entered.pop() is self
        self.log.append(("leave", self))

    def wait_event(self, event):
        self.log.append(("wait", self, event))

    def synchronize(self):
        self.log.append(("synchronize", self))


class FakeEvent:
    log = None

    def record(self, stream):
        self.log.append(("record", stream, self))

    def synchronize(self):
        self.log.append(("host waits", self))


@pytest.fixture
def log(monkeypatch):
    calls, entered = [], FakeStream.entered
    current = {ZERO: FakeStream(ZERO, calls), ONE: FakeStream(ONE, calls)}

    @contextmanager
    def stream(found):
        entered.append(found)
        calls.append(("enter", found))
        yield
        calls.append(("leave", entered.pop()))
        assert calls[-1] == ("leave", found)

    def using(own, **buffers):
        context = issue(own, **buffers)
        calls.append(("work", own._stream))
        return context

    issue = CudaStream.using
    monkeypatch.setattr(CudaStream, "using", using)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(device, calls))
    monkeypatch.setattr(torch.cuda, "Event", type("Event", (FakeEvent,), {"log": calls}))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: calls.append(("lend", s, t)))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[device])
    return calls


@contextmanager
def disguised(*places):
    """Inside, a CPU pipeline treats its stages as being on these devices; yield its streams."""
    by_name = {}

    def cpu_stream(name):
        if name is None:
            return callers_stream(places[-1])
        numbers = [int(word) for word in name.replace(",", "").split() if word.isdigit()]
        by_name[name] = new_stream(name, places[numbers[0] if numbers else -1])
        return by_name[name]

    with checked_streams(cpu_stream):
        yield by_name


def kinds(log):
    return [entry[0] for entry in log if entry[0] != "work"]


def test_a_point_is_recorded_only_if_it_is_needed(log):
    one, other = new_stream("one", ZERO), new_stream("other", ONE)
    with one.using():
        pass
    one.mark()  # nothing holds it
    with one.using():
        pass
    del log[:]
    first = one.mark()
    assert one.mark() is first and not log  # no work has come in between
    other.wait(first)
    other.wait(first)
    other.wait_stream(one)  # it has waited for all that there is
    one.wait(first)
    assert kinds(log) == ["record", "wait"]
    with one.using():
        pass
    held = one.mark()
    assert kinds(log)[2:] == ["enter", "leave"]
    with one.using():  # more work: only now the point can be recorded
        assert kinds(log)[4:] == ["record", "enter"]
    del log[:]
    other.wait(first)  # waited for
    other.wait(held)
    assert [entry[:2] for entry in log] == [("wait", other._stream)]
    three = new_stream("three", ZERO)
    three.wait(held)
    three.wait(first)  # an earlier one
    assert kinds(log) == ["wait", "wait"]


def test_a_point_inside_of_work_does_not_cover_its_rest(log):
    one, other = new_stream("one", ZERO), new_stream("other", ZERO)
    with one.using():
        point = one.mark()
        assert log[-1] == ("record", one._stream, point.fix())
    other.wait(point)
    other.wait_stream(one)
    assert kinds(log).count("record") == 2 and kinds(log).count("wait") == 2
    with one.using():
        for _ in range(2):  # there may be work in between
            other.wait(one.mark())
    assert kinds(log).count("record") == 4 and kinds(log).count("wait") == 4


def test_events_are_used_again(log):
    one, other = new_stream("one", ZERO), new_stream("other", ZERO)
    for _ in range(5):
        with one.using():
            pass
        other.wait_stream(one)
    assert len({entry[2] for entry in log if entry[0] == "record"}) == 1


def test_a_stream_is_entered_once(log):
    one, other = new_stream("one", ZERO), new_stream("other", ONE)
    with one:
        with one.using():
            pass
        with other.using(), one.using():  # again, as the other one is current
            pass
        with one.using():
            pass
    found = [(kind, stream) for kind, stream, *_ in log if kind != "work"]
    a, b = one._stream, other._stream
    inner = [("enter", b), ("enter", a), ("leave", a), ("leave", b)]
    assert found == [("enter", a), *inner, ("leave", a)]
    with one, other:
        one.leave()  # as after an exception: with all that were entered in it
        assert not FakeStream.entered
        one.__enter__(), other.__enter__()


def test_a_device_that_has_failed_does_not_hide_the_first_cause(log, monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(FakeStream, "__exit__", fail)
    first = pytest.raises(ArithmeticError, match="the first cause")
    with first as found, new_stream("one", ZERO):
        raise ArithmeticError("the first cause")
    assert "device-side assert" in found.value.__notes__[0]
    with pytest.raises(RuntimeError, match="device-side assert"), new_stream("one", ZERO):
        pass


def test_the_host_waits_only_where_it_must(log):
    stream, host = new_stream("compute", ZERO), Stream()
    stream.wait(host.mark())  # the CPU's work is done when the next call begins
    assert not log
    point = stream.mark()
    host.wait(point)
    assert kinds(log) == ["record", "host waits"]
    caller = callers_stream(ONE)
    assert caller.mark() is not caller.mark()  # others issue work to it as well
    assert [entry[1] for entry in log[2:]] == [torch.cuda.current_stream(ONE)] * 2


def test_a_stage_on_the_cpu_keeps_only_the_last_that_it_has_sent(log):
    transit, copies = Transit(Stream()), new_stream("copy", ZERO)
    sent = [torch.ones(1) for _ in range(4)]
    kept = [weakref.ref(tensor) for tensor in sent]
    while sent:
        with copies.using():
            pass
        transit.hold(copies.mark(), Buffer("sent"), sent.pop(0))
    assert [tensor() is None for tensor in kept] == [True, True, True, False]
    assert kinds(log).count("host waits") == 3
    transit.free()
    assert kept[3]() is None


def test_a_copy_on_cuda_does_not_make_its_stream_current(log, monkeypatch):
    calls = []
    monkeypatch.setattr("spectrain_ext._C.copy", lambda *call: calls.append(call))
    monkeypatch.setattr(FakeStream, "cuda_stream", 7, raising=False)
    monkeypatch.setattr("spectrain_ext.transport.streams._connected", {(ZERO, ONE)})
    copies = new_stream("copy", ZERO)
    to, tensor = torch.ones(4, 6).as_subclass(OnOne), torch.ones(4, 6).as_subclass(OnZero)
    copies.copy([(to, tensor), (to[1:], tensor[:-1])])
    assert calls == [
        (to.data_ptr(), tensor.data_ptr(), to.nbytes, 0, 7),
        (to[1:].data_ptr(), tensor.data_ptr(), to[1:].nbytes, 0, 7),
    ]
    assert not log
    copies.copy([(torch.ones(3), torch.ones(3))])  # torch's
    assert kinds(log) == ["enter", "leave"]


@pytest.mark.parametrize("tensor", [torch.ones(2, 3).t(), torch.ones(3, 2)])
def test_what_is_not_as_the_target_is_copied_first(tensor, log, monkeypatch):
    """On the sender's device: from the CPU, or with other strides."""
    calls, made, on = [], [], []

    def empty_like(to, device):
        made.append(torch.empty(to.shape, dtype=to.dtype).as_subclass(OnZero))
        on.append((device, FakeStream.entered[-1]))
        return made[-1]

    monkeypatch.setattr("spectrain_ext._C.copy", lambda *call: calls.append(call))
    monkeypatch.setattr(FakeStream, "cuda_stream", 7, raising=False)
    monkeypatch.setattr("spectrain_ext.transport.streams._connected", {(ZERO, ONE)})
    monkeypatch.setattr(torch, "empty_like", empty_like)
    copies = new_stream("copy", ZERO)
    if not tensor.is_contiguous():
        tensor = tensor.as_subclass(OnZero)
    to = torch.empty(3, 2).as_subclass(OnOne)
    copies.copy([(to, tensor)])
    assert on == [(ZERO, copies._stream)] and torch.equal(made[0], tensor)
    assert calls == [(to.data_ptr(), made[0].data_ptr(), to.nbytes, 0, 7)]


def own_events(log):
    """The events recorded on streams other than the caller's."""
    callers = {torch.cuda.current_stream(device) for device in (ZERO, ONE)}
    return {entry[2] for entry in log if entry[0] == "record" and entry[1] not in callers}


@pytest.mark.parametrize("places", [[ZERO, ONE, ONE], [ZERO, ZERO, ZERO]])
@pytest.mark.parametrize("method", ["spectrain", "pipedream"])
def test_a_run_makes_no_call_that_blocks_the_host(log, places, method):
    stages, data = tanh_stages(3), batches(10)
    expected = losses(st.Pipeline(copy.deepcopy(stages), sgd(), mse, method), data)
    with disguised(*places) as by_name:
        pipe = st.Pipeline(stages, sgd(), mse, method)
        found = losses(pipe, data)
        first = own_events(log)
        losses(pipe, batches(30))
    assert own_events(log) == first  # a longer run makes no additional events
    assert {*kinds(log)} == {"wait", "record", "enter", "leave", "lend"}
    close(found, expected)
    assert len(by_name) == 2 * 3 + 2 + 4  # compute, prediction, two for batches, edges


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_caller_waits_for_the_last_piece_of_work(log, recompute, fails):
    def fail(gradient):
        raise ArithmeticError

    def loss_fn(output, target):
        if fails and output.requires_grad:
            output.register_hook(fail)
        return mse(output, target)

    stages = [nn.Sequential(*stage, nn.BatchNorm1d(5)) for stage in tanh_stages(2)]
    with disguised(ZERO, ZERO) as by_name:
        pipe = st.Pipeline(stages, sgd(), loss_fn, microbatches=1, recompute=recompute)
        with pytest.raises(st.StageError) if fails else nullcontext():
            losses(pipe, batches(4))
    caller = torch.cuda.current_stream(ZERO)
    for name, own in by_name.items():
        if "edge" in name and not fails:  # the stages wait for these
            continue
        stream = own._stream
        last = max((n for n, entry in enumerate(log) if entry == ("work", stream)), default=None)
        if last is None:
            continue
        events = [entry[2] for entry in log[last:] if entry[:2] == ("record", stream)]
        waits = any(("wait", caller, event) in log[last:] for event in events)
        assert waits or ("synchronize", stream) in log[last:], name


def test_every_device_of_a_batch_is_ordered(log):
    """Not only the device of its first tensor."""

    class Add(nn.Linear):
        def forward(self, pair):
            return super().forward(pair[0] + pair[1])

    with disguised(ZERO) as by_name:
        pipe = st.Pipeline([Add(5, 5)], sgd(), mse, "sync", microbatches=1)
        del log[:]
        host, other = torch.ones(2, 5), torch.ones(2, 5).as_subclass(OnOne)
        losses(pipe, [((host, other), host)])
    current = torch.cuda.current_stream(ONE)
    copies = by_name["copy stream of edge batch -> 0"]._stream
    found = [entry[:2] for entry in log]
    first, last = found.index(("record", current)), found.index(("work", copies))
    assert ("wait", copies, log[first][2]) in log[first:last]
    copied = found.index(("record", copies), last)
    assert ("wait", current, log[copied][2]) in log[copied:]


class DeadStream(Stream):
    """A stream of a device that fails every call after a first failure."""

    dead = False
    left: list[Stream]

    def fail(self, *_, **__):
        if DeadStream.dead:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self

    record = wait = synchronize = using = fail

    def leave(self):
        DeadStream.left.append(self)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_first_cause_is_seen_after_a_device_has_failed(recompute):
    made, data = [], batches(3)

    def cpu_stream(name):
        if name is None:
            return Stream()
        made.append(DeadStream())
        return made[-1]

    def dies(output, target):
        DeadStream.dead = True
        raise ArithmeticError("the first cause")

    class Watching(st.Trace):
        def end(self):
            made[0].fail()

    DeadStream.dead, DeadStream.left = False, []
    with checked_streams(cpu_stream):
        pipe = st.Pipeline(tanh_stages(3), sgd(), dies, recompute=recompute)
        drawn = torch.default_generator.get_state()
        with pytest.raises(st.StageError, match="loss: ArithmeticError: the first cause") as found:
            list(pipe.run(data, trace=Watching()))
        assert "device-side assert" in found.value.__notes__[0]
        assert set(DeadStream.left) == set(made)  # none is the caller's current stream
        assert torch.equal(torch.default_generator.get_state(), drawn)
        with pytest.raises(RuntimeError, match="device-side assert"):  # true weights are missing
            pipe.state_dict()
        DeadStream.dead = False  # after a temporary failure the run could still be ended
        assert all(tensor.isfinite().all() for tensor in pipe.state_dict().values())


def test_memory_is_lent_to_the_streams_that_use_it(log):
    """The memory comes from the constructor's stream: freeing it must wait for all others."""

    def storage(tensor):
        return tensor.untyped_storage().data_ptr()

    with disguised(ZERO, ZERO) as by_name:
        pipe = st.Pipeline(tanh_stages(2), sgd(), mse, "vanilla")
        found = losses(pipe, batches(2))
        state = [entry for o in pipe.optimizers for entry in o.state.values()]
        held = {storage(p) for p in pipe.parameters()}
        held |= {storage(tensor) for entry in state for tensor in entry.values()}
        pipe.release()
    own = [by_name[f"compute stream of stage {k}"]._stream for k in range(2)]
    lent = [(entry[1], storage(entry[2])) for entry in log if entry[0] == "lend"]
    caller = torch.cuda.current_stream(ZERO)
    assert {where for stream, where in lent if stream in own} == held
    assert {where for stream, where in lent if stream is caller} == {*held, *map(storage, found)}
    assert len(held) == 4  # a stage's weights, and their momentum
