"""Tests the pipeline's CUDA calls without CUDA, by streams and events that only record.

Tensors stay on the CPU. The executor makes all its stream and event calls, which tests inspect.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
from helpers.checked_streams import checked_streams
from helpers.pipeline_cases import batches, close, float64, losses, mse, sgd, tanh_stages  # noqa: F401
from torch import nn

import spectrain_ext as st
from spectrain_ext.transport import Stream, callers_stream, new_stream

HOST = torch.device("cpu")
ZERO, ONE = torch.device("cuda", 0), torch.device("cuda", 1)


class FakeStream:
    def __init__(self, device, log):
        self.device, self.log = device, log

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
    calls, entered = [], []
    current = {ZERO: FakeStream(ZERO, calls), ONE: FakeStream(ONE, calls)}

    @contextmanager
    def stream(found):
        entered.append(found)
        calls.append(("enter", found))
        yield
        calls.append(("leave", entered.pop()))
        assert calls[-1] == ("leave", found)

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
        devices = [places[k] for k in numbers] or [places[-1]]
        by_name[name] = new_stream(name, *devices)
        return by_name[name]

    with checked_streams(cpu_stream):
        yield by_name


def test_a_copy_between_devices_has_a_stream_on_each(log):
    copies, host = new_stream("copy", ZERO, ONE), Stream()
    event = copies.event()
    copies.wait(event)
    copies.wait(host.event())  # the CPU's work is done when the copy is issued
    with copies:
        pass
    copies.record(event)
    copies.synchronize()
    kinds = [
        "wait",
        "wait",
        "enter",
        "enter",
        "leave",
        "leave",
        "record",
        "synchronize",
        "synchronize",
    ]
    assert [entry[0] for entry in log] == kinds
    assert [entry[1].device for entry in log] == [ZERO, ONE, ZERO, ONE, ONE, ZERO, ONE, ZERO, ONE]


def test_one_device_needs_one_stream_and_the_host_waits_only_where_it_must(log):
    stream = new_stream("compute", ZERO, ZERO)
    event = stream.event()
    stream.wait(event)
    assert len(log) == 1
    for one in (new_stream("copy", HOST, ONE), callers_stream(ONE)):
        one.record(one.event())
        assert log[-1][1].device == ONE
    assert log[-1][1] is torch.cuda.current_stream(ONE)
    Stream().wait(event)
    assert log[-1] == ("host waits", event)


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
    assert {entry[0] for entry in log} == {"wait", "record", "enter", "leave", "lend"}
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
        (stream,) = own._streams
        last = max((n for n, entry in enumerate(log) if entry == ("leave", stream)), default=None)
        if last is None:
            continue
        events = [entry[2] for entry in log[last:] if entry[:2] == ("record", stream)]
        waits = any(("wait", caller, event) in log[last:] for event in events)
        assert waits or ("synchronize", stream) in log[last:], name


class Elsewhere(torch.Tensor):
    """A CPU tensor that claims to be on another device."""

    @property
    def device(self):
        return ONE


def test_every_device_of_a_batch_is_ordered(log):
    """Not only the device of its first tensor."""

    class Add(nn.Linear):
        def forward(self, pair):
            return super().forward(pair[0] + pair[1])

    with disguised(ZERO) as by_name:
        pipe = st.Pipeline([Add(5, 5)], sgd(), mse, "sync", microbatches=1)
        del log[:]
        host, other = torch.ones(2, 5), torch.ones(2, 5).as_subclass(Elsewhere)
        losses(pipe, [((host, other), host)])
    current = torch.cuda.current_stream(ONE)
    (copies,) = by_name["copy stream of edge batch -> 0"]._streams
    kinds = [entry[:2] for entry in log]
    first, last = kinds.index(("record", current)), kinds.index(("enter", copies))
    assert ("wait", copies, log[first][2]) in log[first:last]
    copied = kinds.index(("record", copies), last)
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
    own = [by_name[f"compute stream of stage {k}"]._streams[0] for k in range(2)]
    lent = [(entry[1], storage(entry[2])) for entry in log if entry[0] == "lend"]
    caller = torch.cuda.current_stream(ZERO)
    assert {where for stream, where in lent if stream in own} == held
    assert {where for stream, where in lent if stream is caller} == {*held, *map(storage, found)}
    assert len(held) == 4  # a stage's weights, and their momentum
