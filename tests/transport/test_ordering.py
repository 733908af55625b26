"""Tests that the executor orders all buffer uses by events, on otherwise unordered streams."""

from __future__ import annotations

import sys
from contextlib import closing
from functools import partial

import pytest
import torch
from helpers.checked_streams import (
    CheckedEvent,
    CheckedStream,
    OrderingError,
    checked_streams,
    unchecked_streams,
)
from helpers.meeting import Meeting
from helpers.pipeline_cases import (
    batches,
    every_method,
    float64,  # noqa: F401  # a fixture
    losses,
    mse,
    sgd,
    tanh_stages,
)
from torch import nn

from spectrain_ext.errors import StageError
from spectrain_ext.method import Phase, find_method
from spectrain_ext.observation.meter import Probe
from spectrain_ext.pipeline.pipeline import Pipeline
from spectrain_ext.pipeline.segments import Until
from spectrain_ext.schedule import Kind, Rules
from spectrain_ext.transport import (
    Buffer,
    Edge,
    Message,
    Transit,
    local,
    new_stream,
)
from spectrain_ext.transport import streams as stream_kinds
from spectrain_ext.transport.streams import Stream, callers_stream

CPU = torch.device("cpu")


@pytest.fixture
def streams():
    with checked_streams():
        yield new_stream("one", CPU), new_stream("two", CPU)


def after(first, second):
    """Order ``second`` after ``first``."""
    event = first.event()
    first.record(event)
    second.wait(event)


@pytest.mark.parametrize("earlier", ["reads", "writes"])
@pytest.mark.parametrize("later", ["reads", "writes"])
def test_conflicting_uses_need_an_event_between_them(streams, earlier, later):
    one, two = streams
    for ordered in (True, False):
        buffer = Buffer("a buffer")
        getattr(one, earlier)(buffer)
        if ordered:
            after(one, two)
        if ordered or (earlier, later) == ("reads", "reads"):
            getattr(two, later)(buffer)
        else:
            with pytest.raises(
                OrderingError, match=f"two {later} a buffer without waiting for one"
            ):
                getattr(two, later)(buffer)


def test_order_is_transitive_and_an_event_stands_for_its_moment(streams):
    one, two = streams
    three, buffer = new_stream("three", CPU), Buffer("a buffer")
    one.writes(buffer)
    after(one, two)
    after(two, three)
    three.writes(buffer)
    event = one.event()
    one.record(event)
    after(three, one)
    one.writes(buffer)
    two.wait(event)  # recorded before that write
    with pytest.raises(OrderingError):
        two.reads(buffer)


def test_a_write_follows_all_reads(streams):
    one, two = streams
    three, buffer = new_stream("three", CPU), Buffer("a buffer")
    one.reads(buffer)
    two.reads(buffer)
    after(one, three)
    with pytest.raises(OrderingError, match="two, which has read it"):
        three.writes(buffer)


def test_outside_of_the_context_the_cpu_is_not_checked():
    assert isinstance(new_stream("one", CPU), CheckedStream)
    assert isinstance(callers_stream(CPU), CheckedStream)
    with unchecked_streams():  # without the float64 fixture's
        assert type(new_stream("one", CPU)) is Stream
        with checked_streams():
            assert isinstance(callers_stream(CPU), CheckedStream)
        assert type(callers_stream(CPU)) is Stream


def test_what_the_host_has_waited_for_is_done_for_every_stream(streams):
    one, two = streams
    buffer = Buffer("a buffer")
    one.writes(buffer)
    one.synchronize()
    two.writes(buffer)
    two.reads(buffer)
    with pytest.raises(OrderingError):
        one.writes(buffer)


@pytest.mark.parametrize("waits", [True, False])
def test_a_slot_is_refilled_only_after_it_is_free(streams, waits, monkeypatch):
    sender, receiver = streams
    edge = Edge("edge", CPU, CPU, receiver, depth=1)
    source, ready, value = Buffer("source"), sender.event(), torch.ones(2)
    slot = None
    for i in range(2):
        sender.writes(source)
        sender.record(ready)
        if i and not waits:
            monkeypatch.setattr(slot, "free", receiver.event())
            with pytest.raises(OrderingError, match=r"writes edge, slot 0 without waiting for two"):
                edge.send(Message((value,)), source, ready)
            return
        after(edge.stream, sender)  # the sender may overwrite its source
        edge.send(Message((value,)), source, ready)
        after(edge.stream, sender)
        slot = edge.receive()
        receiver.reads(slot.buffer)
        edge.free(slot)


def test_a_ring_keeps_its_memory_for_smaller_messages():
    """Parts of a minibatch may differ by one sample; slots are not tied to a part."""
    receiver = new_stream("receiver", CPU)
    edge = Edge("edge", CPU, CPU, receiver, depth=1)
    source = Buffer("source")
    found = []
    for shape in ((3, 5), (2, 5), (3, 5), (4, 5), (3, 5)):
        value = torch.randn(shape).t()
        edge.send(Message((value, None)), source, receiver.event())
        assert edge.has()
        slot = edge.receive()
        assert not edge.has()
        received, nothing = slot.message.tensors
        assert nothing is None
        assert torch.equal(received, value)
        assert received.stride() == value.stride()
        found.append(received.data_ptr())
        edge.free(slot)
    assert len(set(found[:3])) == 1
    assert found[3] == found[4]


def test_only_new_memory_waits_for_what_the_receiver_does_now(streams):
    """Microbatches of uneven sizes fit a slot's memory: their copies overlap with its work."""
    sender, receiver = streams
    edge = Edge("edge", CPU, CPU, receiver, depth=1)
    for rows, moved in ((3, True), (2, False), (3, False), (4, True), (1, False)):
        busy = Buffer("what the receiver works on")
        receiver.writes(busy)
        edge.send(Message((torch.ones(rows, 500),)), Buffer("source"), sender.event())
        if moved:
            edge.stream.reads(busy)
        else:
            with pytest.raises(OrderingError, match="without waiting for two"):
                edge.stream.reads(busy)
        edge.free(edge.receive())


@pytest.mark.parametrize("waits", [True, False])
def test_a_replica_reads_what_another_has_written(streams, waits, monkeypatch):
    meeting = Meeting(2)
    if not waits:
        monkeypatch.setattr(CheckedStream, "wait", lambda stream, event: None)
    sent = []
    for replica, stream in enumerate(streams):
        with stream.using():
            sent.append(meeting.exchange(replica, 0)(torch.full((2,), float(replica))))
    with streams[1].using():
        if waits:
            assert [message.tolist() for message in sent[1]()] == [[0, 0], [1, 1]]
        else:
            with pytest.raises(OrderingError, match="two reads message of replica 0 of stage 0"):
                sent[1]()


def test_observers_read_weights_in_the_order_of_the_stage_that_writes_them():
    """On the stage's stream, without waits for other stages or for communication."""
    pipe = Pipeline(tanh_stages(2), sgd(), mse, "spectrain")
    stage, nothing = pipe._executor.stages[0], dict.fromkeys(Kind, lambda i, j: None)

    def look():
        Probe(stage, Rules(), delay=1, every=1).forward(1, 0, updates=1)

    def measure():
        coming = Phase(find_method("sync"), after=None, gap=0.1)
        Until(coming).watch(stage, nothing)[Kind.FORWARD](1, 0)

    for observe in (look, measure):
        observe()
    another = new_stream("another", CPU)
    after(stage.predict, another)
    another.writes(stage.working)
    for observe in (look, measure):
        with pytest.raises(OrderingError, match="stream of stage 0 reads weights 0"):
            observe()


def test_transit_waits_before_it_lets_go(streams):
    one, two = streams
    transit, buffers = Transit(one), [Buffer("first"), Buffer("second")]
    for buffer in buffers:
        one.writes(buffer)
        after(one, two)
        two.reads(buffer)
        read = two.event()
        two.record(read)
        transit.hold(read, buffer, torch.ones(1))
    one.writes(buffers[0])
    with pytest.raises(OrderingError):
        one.writes(buffers[1])


@every_method
@pytest.mark.parametrize("parts", [1, 2])
def test_every_use_in_a_run_is_ordered(method, parts):
    pipe = Pipeline(tanh_stages(4), sgd(), mse, method, microbatches=parts)
    streams = {id(s) for stage in pipe._executor.stages for s in (stage.compute, stage.predict)}
    assert len(streams) == 8
    assert all(isinstance(stage.compute, CheckedStream) for stage in pipe._executor.stages)
    for _ in range(2):
        for _ in pipe.run(batches(9, size=4, last=3)):
            pipe.state_dict()


def test_a_use_lasts_as_long_as_its_work(streams):
    """An event recorded while the work was still being issued does not cover it."""
    one, two = streams
    event = one.event()
    for use in ("reads", "writes"):
        buffer = Buffer("a buffer")
        with one.using(**{use: (buffer,)}):
            one.record(event)
        two.wait(event)
        with pytest.raises(OrderingError):
            two.writes(buffer)
        after(one, two)
        two.writes(buffer)


def test_running_statistics_are_put_back_before_whoever_reads_them():
    """Recomputation puts them back after its backward."""
    stages = [nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(3)]
    pipe = Pipeline(stages, sgd(), mse, microbatches=1, recompute=True)
    for _ in pipe.run(batches(9)):
        pipe.state_dict()


def another_caller():
    """Give the caller a new current stream that has not waited for any other."""
    checked = stream_kinds.cpu_stream
    checked.caller = CheckedStream("another stream of the caller's", checked.caller.done)


def uses(pipe, monkeypatch):
    """Return all operations between two runs that access the pipeline's tensors."""
    with monkeypatch.context() as patch:
        for read in (torch.optim.SGD.state_dict, torch.optim.SGD.load_state_dict):
            patch.setattr(torch.optim.SGD, read.__name__, declared(pipe, read))
        optimizer = pipe.optimizers[1]
        another_caller()
        yield lambda: optimizer.load_state_dict(optimizer.state_dict())
    yield lambda: pipe.load_state_dict(pipe.state_dict())
    yield lambda: pipe(torch.ones(3, 5))
    yield pipe.release
    yield lambda: pipe.masters(bind=True)
    yield lambda: losses(pipe, batches(3))


def declared(pipe, method):
    """Wrap a method of torch's optimizer to declare its accesses."""

    def found(*args):
        callers_stream(CPU).writes(pipe._executor.stages[1].optimizer_state)
        return method(*args)

    return found


def test_the_caller_may_have_another_stream_at_every_call(monkeypatch):
    """Each call orders the pipeline's streams with the caller's current one."""
    pipe = Pipeline(tanh_stages(3), sgd(), mse)
    another_caller()
    losses(pipe, batches(5))
    for use in uses(pipe, monkeypatch):
        another_caller()
        use()


@pytest.mark.parametrize("load", [False, True])
def test_an_optimizer_is_asked_for_its_state_in_a_run(monkeypatch, load):
    """Between two results and in the loss, by a reference obtained earlier."""
    asked = []

    def ask():
        asked.append(optimizer.state_dict())
        if load:
            optimizer.load_state_dict(asked[-1])

    def loss_fn(output, target):
        ask()
        return mse(output, target)

    pipe = Pipeline(tanh_stages(3), sgd(), loss_fn, microbatches=1)
    optimizer = pipe.optimizers[1]
    reading = declared(pipe, torch.optim.SGD.state_dict)
    monkeypatch.setattr(torch.optim.SGD, "state_dict", reading)
    for _ in pipe.run(batches(8)):
        ask()
    assert len(asked) == 16


def waits_of(run, monkeypatch, dropped=None):
    """Run without the waits of one place in the code; return all places that wait."""
    places, wait = set(), CheckedStream.wait

    def watched(stream, event):
        frame = sys._getframe(1)
        place = (frame.f_code.co_name, frame.f_lineno, sys._getframe(2).f_code.co_name)
        places.add(place)
        if place != dropped:
            wait(stream, event)

    with monkeypatch.context() as patch:
        patch.setattr(CheckedStream, "wait", watched)
        run()
    return places


# Waits that other events already imply in these runs.
REDUNDANT = {
    # A forward's load follows an update, which has waited.
    ("_load", "load_forward"),
    # A stage's results are known from the updates of its neighbours.
    ("let_caller_follow", "make_all"),
    ("let_caller_follow", "_mend"),
}


def test_a_wait_that_is_removed_is_noticed(monkeypatch):
    def decay(opt):
        return torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)

    def run(method, scheduler):
        stages = [*tanh_stages(3), nn.Tanh(), *tanh_stages(1)]
        pipe = Pipeline(stages, sgd(), mse, method, scheduler=scheduler)
        for _ in range(2):
            another_caller()
            with closing(pipe.run(batches(9))) as results:
                for result in results:
                    if result.index == 5:
                        pipe.state_dict()
        another_caller()
        pipe.release()
        another_caller()
        pipe.masters()

    everywhere, noticed = set(), set()
    for case in [("vanilla", None), ("pipedream", None), ("spectrain", None), ("spectrain", decay)]:
        places = waits_of(partial(run, *case), monkeypatch)
        assert len(places) >= 20
        everywhere |= places
        for place in places - noticed:
            try:
                waits_of(partial(run, *case), monkeypatch, place)
            except StageError as error:
                assert isinstance(error.__cause__, OrderingError)
                noticed.add(place)
            except OrderingError:
                noticed.add(place)
    unnoticed = everywhere - noticed
    assert {(function, caller) for function, _, caller in unnoticed} == REDUNDANT


def test_a_large_host_tensor_is_staged(monkeypatch):
    """Forced on the CPU: the bits, the caller's freedom to refill, the order of the staging."""
    monkeypatch.setattr(local, "PAGEABLE_COPY_LIMIT", 16)
    receiver = new_stream("receiver", CPU)
    edge = Edge("edge", CPU, CPU, receiver, depth=2)
    edge._stages = True
    large, small = torch.randn(4, 6).t()[::2], torch.ones(2)
    source, found = Buffer("source"), []
    for i in range(5):
        large.fill_(i), small.fill_(i)
        edge.send(Message((large, None, small)), source, receiver.event())
        slot = edge.receive()
        assert torch.equal(slot.message.tensors[0], large)
        assert torch.equal(slot.message.tensors[2], small)
        assert slot.staging.bytes.numel() == 256  # only the large one
        found.append(slot.staging.bytes.data_ptr())
        edge.free(slot)
    assert found[:2] == found[2:4]
    assert len(set(found)) == 2
    edge.free_storage()
    assert not any(slot.staging.bytes.numel() for slot in edge._ring)
    # Without the wait for the last copy, staging would be overwritten during it.
    monkeypatch.setattr(CheckedEvent, "synchronize", lambda event: None)
    with pytest.raises(OrderingError, match=r"writes host memory of edge, slot . without"):
        for _ in range(3):
            edge.send(Message((large, None, small)), source, receiver.event())
            edge.free(edge.receive())
