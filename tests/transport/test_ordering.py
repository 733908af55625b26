"""Tests that points order all uses of buffers: of messages between stages, and of whole runs."""

from __future__ import annotations

import sys
from contextlib import closing, contextmanager
from functools import partial

import pytest
import torch
from helpers.checked_streams import CheckedPoint, CheckedStream, OrderingError, another_caller
from helpers.pipeline_cases import batches, float64, losses, mse, sgd, tanh_stages  # noqa: F401
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import spectrain_ext as st
from spectrain_ext.transport import Buffer, Edge, Message, callers_stream, new_stream

CPU = torch.device("cpu")


def test_a_use_lasts_as_long_as_its_work():
    """A point that is marked inside does not cover it."""
    buffer, one, two = Buffer("a buffer"), new_stream("one", CPU), new_stream("two", CPU)
    for used, conflicts in (("reads", two.writes), ("writes", two.reads)):
        with one.using(**{used: (buffer,)}):
            point = one.mark()
        two.wait(point)
        with pytest.raises(OrderingError):
            conflicts(buffer)


# Messages between stages


def test_a_ring_keeps_its_memory_for_smaller_messages():
    """Parts of a minibatch may differ by one sample. Their copies overlap with the receiver's work
    unless the memory is new."""
    receiver, found = new_stream("receiver", CPU), []
    edge = Edge("edge", CPU, CPU, receiver, depth=1)
    for rows in (3, 2, 3, 4, 1, 3):
        busy, value = Buffer("what the receiver works on"), torch.randn(rows, 500).t()
        receiver.writes(busy)
        edge.send(Message((value, None)), Buffer("source"))
        waits = True
        try:
            edge.stream.reads(busy)
        except OrderingError:
            waits = False
        slot = edge.receive()
        assert not edge.arrived
        received, nothing = slot.message.tensors
        assert nothing is None and torch.equal(received, value)
        assert received.stride() == value.stride()
        found.append((waits, received.data_ptr()))
        edge.free(slot)
    assert [waits for waits, _ in found] == [True, False, False, True, False, False]
    assert len({where for _, where in found[:3]}) == len({where for _, where in found[3:]}) == 1


def test_a_large_host_tensor_is_staged(monkeypatch):
    """Forced on the CPU: the bits, the caller's freedom to refill, the order of the staging."""
    monkeypatch.setattr("spectrain_ext.transport.local.PAGEABLE_COPY_LIMIT", 16)
    receiver = new_stream("receiver", CPU)
    edge = Edge("edge", CPU, CPU, receiver, depth=2)
    edge._stages = True
    large, small = torch.randn(4, 6).t()[::2], torch.ones(2)
    source, found = Buffer("source"), []
    for i in range(5):
        large.fill_(i), small.fill_(i)
        edge.send(Message((large, None, small)), source)
        slot = edge.receive()
        assert torch.equal(slot.message.tensors[0], large)
        assert torch.equal(slot.message.tensors[2], small)
        assert slot.staging.bytes.numel() == 256  # only the large one
        found.append((slot, slot.staging.bytes.data_ptr()))
        edge.free(slot)
    assert found[:2] == found[2:4] and len({where for _, where in found}) == 2
    edge.free_storage()
    assert not any(slot.staging.bytes.numel() for slot, _ in found)
    # Without the wait for the last copy, staging would be overwritten during it.
    monkeypatch.setattr(CheckedPoint, "synchronize", lambda point: None)
    with pytest.raises(OrderingError, match=r"writes host memory of edge, slot . without"):
        for _ in range(3):
            edge.send(Message((large, None, small)), source)
            edge.free(edge.receive())


# Runs


def test_running_statistics_and_weights_are_read_after_who_writes_them(tmp_path):
    """Recomputation puts statistics back after its backward; observers read weights."""
    stages = [nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(3)]
    method = st.hybrid("vanilla", "sync", after=12)
    pipe = st.Pipeline(stages, sgd(), mse, method, microbatches=1, recompute=True)
    for _ in pipe.run(batches(9)):
        pipe.state_dict()
    list(pipe.run(batches(9), trace=st.Metrics(pipe, tmp_path / "m", errors_every=2)))


@contextmanager
def declared_state(pipe, *names):
    """Inside, these methods of torch's SGD declare that they use the state of stage 1."""
    found, using = set(), CheckedStream.using

    def noted(stream, *, reads=(), writes=()):
        found.update(b for b in writes if b.name == "optimizer state of stage 1")
        return using(stream, reads=reads, writes=writes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckedStream, "using", noted)
        losses(pipe, batches(1))
    (state,) = found

    def declared(method):
        def call(*args):
            callers_stream(CPU).writes(state)
            return method(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(torch.optim.SGD, name, declared(getattr(torch.optim.SGD, name)))
        yield


def test_the_caller_may_have_another_stream_at_every_call():
    """Each call orders the pipeline's streams with the caller's current one."""
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse)
    another_caller()
    losses(pipe, batches(5))
    with declared_state(pipe, "state_dict", "load_state_dict"):
        optimizer = pipe.optimizers[1]
        another_caller()
        optimizer.load_state_dict(optimizer.state_dict())
    for use in (
        lambda: pipe.load_state_dict(pipe.state_dict()),
        lambda: pipe(torch.ones(3, 5)),
        pipe.release,
        lambda: pipe.masters(bind=True),
        lambda: losses(pipe, batches(3)),
    ):
        another_caller()
        use()


@pytest.mark.parametrize("load", [False, True])
def test_an_optimizer_is_asked_for_its_state_in_a_run(load):
    """Between two results and in the loss, by a reference obtained earlier."""
    asked = []

    def ask():
        asked.append(optimizer.state_dict())
        if load:
            optimizer.load_state_dict(asked[-1])

    def loss_fn(output, target):
        if asked:
            ask()
        return mse(output, target)

    pipe = st.Pipeline(tanh_stages(3), sgd(), loss_fn, microbatches=1)
    optimizer = pipe.optimizers[1]
    with declared_state(pipe, "state_dict"):
        ask()
        for _ in pipe.run(batches(8)):
            ask()
    assert len(asked) == 17


def waits_of(run, dropped=None):
    """Run without the waits of one place in the code; return all places that wait."""
    places, wait = set(), CheckedStream.wait

    def watched(stream, point):
        frame = sys._getframe(1)
        if frame.f_code.co_name == "wait_stream":
            frame = frame.f_back
        place = (frame.f_code.co_name, frame.f_lineno, frame.f_back.f_code.co_name)
        places.add(place)
        if place != dropped:
            wait(stream, point)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckedStream, "wait", watched)
        run()
    return places


# Waits that other events already imply in these runs.
REDUNDANT = {
    # A stage's results are known from the updates of its neighbours.
    ("let_caller_follow", "_mend"),
    # Nothing is in a word.
    ("send", "_send_word"),
    ("receive", "_receive_word"),
}


def test_a_wait_that_is_removed_is_noticed():
    def run(method, scheduler):
        stages = [*tanh_stages(3), nn.Tanh(), *tanh_stages(1)]
        pipe = st.Pipeline(stages, sgd(), mse, method, scheduler=scheduler)
        for _ in range(2):
            another_caller()
            with closing(pipe.run(batches(6))) as results:
                for result in results:
                    if result.index == 4:
                        pipe.state_dict()
        another_caller()
        pipe.release()
        another_caller()
        pipe.masters()

    def evaluate():
        another_caller()
        st.Pipeline(tanh_stages(3), sgd(), mse).evaluate(batches(4))

    everywhere, noticed = set(), set()
    decay = partial(ExponentialLR, gamma=0.9)
    cases = [("vanilla", None), ("pipedream", None), ("spectrain", None), ("spectrain", decay)]
    for program in (*(partial(run, *case) for case in cases), evaluate):
        places = waits_of(program)
        everywhere |= places
        for place in places - noticed:
            try:
                waits_of(program, place)
            except (st.StageError, OrderingError) as error:
                assert OrderingError in (type(error), type(error.__cause__))
                noticed.add(place)
    assert len(everywhere) >= 20
    assert {(function, caller) for function, _, caller in everywhere - noticed} == REDUNDANT
