"""Tests the pipeline's CUDA calls without CUDA, by streams and events that only record.

Tensors stay on the CPU. The executor sees fake devices, so that it makes all its stream and event
calls, which the tests inspect.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
from helpers.pipeline_cases import batches, close, float64, losses, mse, sgd, tanh_stages  # noqa: F401

import spectrain_ext as st
from spectrain_ext.pipeline.batch import send_batch
from spectrain_ext.transport import Message, streams

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
    calls = []
    entered = []
    current = {ZERO: FakeStream(ZERO, calls), ONE: FakeStream(ONE, calls)}

    @contextmanager
    def stream(found):
        entered.append(found)
        calls.append(("enter", found))
        yield
        calls.append(("leave", entered.pop()))
        assert calls[-1] == ("leave", found)

    class Event(FakeEvent):
        log = calls

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(device, calls))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: calls.append(("lend", s, t)))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[device])
    return calls


def test_a_copy_between_devices_has_a_stream_on_each(log):
    copy = streams.new_stream("copy", ZERO, ONE)
    event, host = copy.event(), streams.Stream().event()
    copy.wait(event)
    copy.wait(host)  # the CPU's work is done when the copy is issued
    with copy:
        pass
    copy.record(event)
    copy.synchronize()
    kinds = [entry[0] for entry in log]
    assert (
        kinds
        == ["wait", "wait", "enter", "enter", "leave", "leave", "record"] + ["synchronize"] * 2
    )
    assert [entry[1].device for entry in log] == [ZERO, ONE, ZERO, ONE, ONE, ZERO, ONE, ZERO, ONE]


def test_one_device_needs_one_stream(log):
    stream = streams.new_stream("compute", ZERO, ZERO)
    stream.wait(stream.event())
    assert len(log) == 1
    mixed = streams.new_stream("copy", HOST, ONE)
    mixed.record(mixed.event())
    assert log[-1][1].device == ONE


def test_the_host_waits_for_a_device_only_where_it_must(log):
    event = streams.new_stream("compute", ZERO).event()
    streams.Stream().wait(event)
    assert log == [("host waits", event)]


def test_the_callers_stream_is_the_current_one(log):
    caller = streams.callers_stream(ONE)
    caller.record(caller.event())
    assert log[-1][1] is torch.cuda.current_stream(ONE)


class Disguised:
    """Makes a CPU pipeline treat its stages as being on these devices."""

    def __init__(self, monkeypatch, places):
        self.places = places
        rooms = {"pipeline": ("loads", "executor", "batch", "losses"), "transport": ("local",)}
        for module in (f"{room}.{file}" for room, files in rooms.items() for file in files):
            name = f"spectrain_ext.{module}"
            for function in ("new_stream", "callers_stream"):
                if function in vars(__import__(name, fromlist=["x"])):
                    monkeypatch.setattr(f"{name}.{function}", getattr(self, function))
        self.by_name = {}

    def new_stream(self, name, *_):
        numbers = [int(word) for word in name.replace(",", "").split() if word.isdigit()]
        devices = [self.places[k] for k in numbers] or [self.places[-1]]
        self.by_name[name] = streams.new_stream(name, *devices)
        return self.by_name[name]

    def callers_stream(self, _):
        return streams.callers_stream(self.places[-1])


def own_events(log):
    """The events recorded on streams other than the caller's."""
    callers = {torch.cuda.current_stream(device) for device in (ZERO, ONE)}
    return {entry[2] for entry in log if entry[0] == "record" and entry[1] not in callers}


@pytest.mark.parametrize("places", [[ZERO, ONE, ONE], [ZERO, ZERO, ZERO]])
@pytest.mark.parametrize("method", ["spectrain", "pipedream"])
def test_a_run_makes_no_call_that_blocks_the_host(log, monkeypatch, places, method):
    expected = st.Pipeline(tanh_stages(3), sgd(), mse, method)
    disguise = Disguised(monkeypatch, places)
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse, method)
    before = copy.deepcopy(expected.state_dict())
    pipe.load_state_dict(before)
    data = batches(10)
    found = losses(pipe, data)
    first = own_events(log)
    losses(pipe, batches(30))
    assert own_events(log) == first  # a longer run makes no additional events
    assert {entry[0] for entry in log} == {"wait", "record", "enter", "leave", "lend"}
    monkeypatch.undo()
    expected.load_state_dict(before)
    close(torch.stack(found), torch.stack(losses(expected, data)))
    assert len(disguise.by_name) == 2 * 3 + 2 + 4  # compute, prediction, two for batches, edges


def test_a_failure_waits_for_all_streams(log, monkeypatch):
    Disguised(monkeypatch, [ZERO, ONE])

    def fail(*_):
        raise ArithmeticError

    pipe = st.Pipeline(tanh_stages(2), sgd(), fail)
    with pytest.raises(st.StageError):
        losses(pipe, batches(3))
    waited = {entry[1] for entry in log if entry[0] == "synchronize"}
    used = {entry[1] for entry in log if entry[0] == "enter"}
    assert used <= waited


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_caller_waits_for_the_last_piece_of_work(log, monkeypatch, recompute, fails):
    disguise = Disguised(monkeypatch, [ZERO, ZERO])
    stages = [torch.nn.Sequential(*stage, torch.nn.BatchNorm1d(5)) for stage in tanh_stages(2)]

    def fail(gradient):
        raise ArithmeticError

    def loss_fn(output, target):
        if fails and output.requires_grad:
            output.register_hook(fail)
        return mse(output, target)

    pipe = st.Pipeline(stages, sgd(), loss_fn, microbatches=1, recompute=recompute)
    with pytest.raises(st.StageError) if fails else nullcontext():
        losses(pipe, batches(4))
    caller = torch.cuda.current_stream(ZERO)
    for name, own in disguise.by_name.items():
        if "edge" in name:  # the stages wait for these
            continue
        (stream,) = own._streams
        last = max(n for n, entry in enumerate(log) if entry == ("leave", stream))
        events = [entry[2] for entry in log[last:] if entry[:2] == ("record", stream)]
        waits = any(("wait", caller, event) in log[last:] for event in events)
        assert waits or ("synchronize", stream) in log[last:], name


class Elsewhere(torch.Tensor):
    """A CPU tensor that claims to be on another device."""

    @property
    def device(self):
        return ONE


def test_every_device_of_a_batch_is_ordered(log, monkeypatch):
    """Not only the device of its first tensor."""
    Disguised(monkeypatch, [ZERO])
    pipe = st.Pipeline(tanh_stages(1), sgd(), mse)
    around = pipe._executor.connections
    by_device = {HOST: streams.Stream(), ONE: streams.callers_stream(ONE)}
    monkeypatch.setattr("spectrain_ext.pipeline.batch.callers_stream", by_device.__getitem__)
    del log[:]
    host, other = torch.ones(2), torch.ones(2).as_subclass(Elsewhere)
    inputs = around.edges[0].inputs[0]
    send_batch(inputs, Message((host, other), (False, False)), around._source._batch)
    current = torch.cuda.current_stream(ONE)
    copies = inputs.stream._streams[0]
    kinds = [entry[:2] for entry in log]
    first, last = kinds.index(("record", current)), kinds.index(("enter", copies))
    assert first < kinds.index(("wait", copies)) < last
    assert ("wait", copies, log[first][2]) in log[first:last]
    assert kinds.index(("record", copies)) < kinds.index(("wait", current))


class DeadStream(streams.Stream):
    """A stream of a device that fails every call after a first failure."""

    dead = False

    def fail(self, *_, **__):
        if DeadStream.dead:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self

    record = wait = synchronize = using = fail


@pytest.mark.parametrize("recompute", [False, True])
def test_the_first_cause_is_seen_after_a_device_has_failed(monkeypatch, recompute):
    def dies(output, target):
        DeadStream.dead = True
        raise ArithmeticError("the first cause")

    class Watching(st.Trace):
        def end(self):
            DeadStream().fail()

    monkeypatch.setattr(streams, "cpu_stream", streams.host_stream)
    monkeypatch.setattr(DeadStream, "dead", False)
    left = []
    monkeypatch.setattr(DeadStream, "leave", lambda stream: left.append(stream))
    for module in ("pipeline.loads", "transport.local"):
        monkeypatch.setattr(f"spectrain_ext.{module}.new_stream", lambda *_: DeadStream())
    pipe = st.Pipeline(tanh_stages(3), sgd(), dies, recompute=recompute)
    own = set(pipe._executor._streams())
    data = batches(3)
    drawn = torch.default_generator.get_state()
    with pytest.raises(st.StageError, match="loss: ArithmeticError: the first cause") as found:
        list(pipe.run(data, trace=Watching()))
    assert "device-side assert" in found.value.__notes__[0]
    assert set(left) == own  # none is the caller's current stream
    assert torch.equal(torch.default_generator.get_state(), drawn)
    with pytest.raises(RuntimeError, match="device-side assert"):  # the true weights are missing
        pipe.state_dict()
    DeadStream.dead = False  # after a temporary failure the run could still be ended
    assert all(tensor.isfinite().all() for tensor in pipe.state_dict().values())


def test_memory_is_lent_to_the_streams_that_use_it(log, monkeypatch):
    """The memory comes from the constructor's stream: freeing it must wait for all others."""
    disguise = Disguised(monkeypatch, [ZERO, ZERO])
    monkeypatch.setattr("spectrain_ext.pipeline.pipeline.callers_stream", disguise.callers_stream)
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse)
    found = losses(pipe, batches(2))
    memory = {id(tensor) for weights in pipe._weights for tensor in weights.buffers()}
    own = [disguise.by_name[f"compute stream of stage {k}"]._streams[0] for k in range(2)]
    held = [tensor for weights in pipe._weights for tensor in weights.buffers()]
    pipe.release()
    caller = torch.cuda.current_stream(ZERO)
    lent = [(entry[1], entry[2].data_ptr()) for entry in log if entry[0] == "lend"]
    of_caller = {where for stream, where in lent if stream is caller}
    assert of_caller == {t.data_ptr() for t in (*held, *found)}
    assert {where for stream, where in lent if stream in own} == {t.data_ptr() for t in held}
    assert len(memory) == len(held)
