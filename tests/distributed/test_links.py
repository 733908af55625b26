"""Tests that process groups cannot deadlock: inner, because only NCCL would.

torch connects a pair of ranks at a group's first message, and with NCCL both hosts wait for each
other. Most tests send nothing: they record what each rank would.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter, defaultdict
from contextlib import nullcontext
from graphlib import TopologicalSorter
from itertools import pairwise
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.checked_streams import CheckedStream, OrderingError, checked_streams
from helpers.failing_runs import commit
from helpers.ranks import Ranks
from torch.distributed.distributed_c10d import _get_default_store

from spectrain_ext.distributed import links as links_module
from spectrain_ext.distributed.board import Board
from spectrain_ext.distributed.ends import RemoteReceiver, RemoteSender
from spectrain_ext.distributed.links import Traffic
from spectrain_ext.schedule import Replicas
from spectrain_ext.transport import Buffer, Message, callers_stream, new_stream
from spectrain_ext.transport.message import Layout

CPU = torch.device("cpu")
MESSAGE = Message((torch.ones(16),), (False,))


class Group:
    """Replaces a process group; ``number``: its name, which its members agree on."""

    def __init__(self, number, ranks, backend):
        self.number, self.ranks, self.backend = number, ranks, backend

    def abort(self):
        pass


class Default:
    """Replaces ``dist.group``, with a default group that has a ``device_id``."""

    def __init__(self, device_id=None):
        self.WORLD = SimpleNamespace(bound_device_id=device_id)


def unwatched(rank):
    """Replaces a board."""
    changed = threading.Condition()

    def start(name, work):
        threading.Thread(target=work, daemon=True).start()

    def wait(ready, *_):
        with changed:
            assert changed.wait_for(ready, 30.0)

    return SimpleNamespace(
        **{"rank": rank, "timeout": 1.0, "cause": None, "aborts": [], "disconnects": []},
        **{"set_doing": lambda *_: None, "check": lambda: None, "start": start, "wait": wait},
        **{"changed": changed, "blocked": lambda *_: nullcontext()},
    )


def opened(monkeypatch, counts, bodies):
    """Return every rank's links, and their uses: an operation, its group and the peer."""
    replicas = Replicas(counts)
    all_ranks, found = list(range(replicas.ranks)), []
    monkeypatch.setattr(dist, "ProcessGroup", Group)
    monkeypatch.setattr(dist, "group", Default())
    for rank in all_ranks:
        uses = []

        def new_group(ranks, timeout, backend, rank=rank, **_):
            assert rank in ranks
            return Group(links_module._world.group_count, tuple(ranks), backend)

        def use(what, uses=uses):
            return lambda *given, group: uses.append((what, group, *given[1:]))

        monkeypatch.setattr(dist, "new_group", new_group)
        for what in ("send", "recv", "all_reduce"):
            monkeypatch.setattr(dist, what, use(what))
        links = links_module.open_links(
            all_ranks, "test", CPU, unwatched(rank), replicas, bodies, ()
        )
        found.append((links, uses))
    return found


@pytest.mark.parametrize("bodies", ["gloo", "nccl"])
def test_a_group_is_first_used_as_it_will_be(bodies, monkeypatch):
    """In one order on all ranks, so that they do not wait in a circle, and not in training."""
    for counts in itertools.product(range(1, 4), range(1, 5), *[range(3)] * 2):
        counts = tuple(filter(None, counts))
        all_opened = opened(monkeypatch, counts, bodies)
        last = Replicas(counts).indices_of(len(counts) - 1)
        from_rank_0 = {other for other in last if other}
        firsts = all_opened[0][0].edges
        assert {e.ends[2] for e in firsts if e.what is Traffic.TARGETS} == from_rank_0
        assert {e.ends[2] for e in firsts if e.what is Traffic.INPUTS} == set(range(1, counts[0]))
        names, all_orders = {}, TopologicalSorter()
        for rank, (links, uses) in enumerate(all_opened):
            expected = []
            for link in links.edges:
                assert (link.host is link.device) == (bodies == "gloo")
                use = ("send", link.receiver) if link.sender == rank else ("recv", link.sender)
                for group in {link.host, link.device}:
                    assert set(group.ranks) == {link.sender, link.receiver}
                    assert names.setdefault(group.number, link.name) == link.name
                    expected.append((use[0], group, use[1]))
            for each in filter(None, (links.all_ranks, links.replicas)):
                for group in {each.host, each.device}:
                    expected.append(("all_reduce", group))
            assert Counter(uses) == Counter(expected)
            for before, after in pairwise(group.number for _, group, *_ in uses):
                all_orders.add(after, before)
        all_orders.prepare()


def edge(host, device, staged=False):
    """Return an edge with these groups, as ranks 0 and 1 know it."""
    ends = Traffic.ACTIVATIONS, 0, 1
    return links_module.RemoteEdge("edge 0 -> 1", ends, (0, 1), 0, 1, 1, host, device, staged)


class Device:
    """Replaces an NCCL group: a separate stream that orders itself after its caller and back."""

    def __init__(self, drops=None):
        self.stream, self.drops, self.buffers = new_stream("NCCL", CPU), drops, {}

    def begins(self, body):
        self.stream.wait_stream(callers_stream(CPU))
        self.stream.reads(self.buffers[body.data_ptr()])
        done = self.stream.mark()
        return SimpleNamespace(wait=lambda: self.drops or callers_stream(CPU).wait(done))


def sends_by(device, monkeypatch):
    """Return a sender that uses this device, and the list of its operations in order."""
    done = []

    def isend(body, peer, group, tag):
        slot = next(s for s in sender._ring if s.memory.bytes.data_ptr() == body.data_ptr())
        group.buffers[body.data_ptr()] = slot.buffer
        done.append("body")
        return group.begins(body)

    def send(tensors, peer, tag):
        done.append("header")
        return SimpleNamespace(wait=lambda _: None)

    monkeypatch.setattr(dist, "get_group_rank", lambda *_: 1)
    monkeypatch.setattr(dist, "isend", isend)
    sender = RemoteSender(edge(SimpleNamespace(send=send), device), CPU, 2, unwatched(0))
    return sender, done


def test_a_body_leaves_before_its_header_and_only_copies_wait_for_it(monkeypatch):
    with checked_streams():
        device = Device()
        sender, done = sends_by(device, monkeypatch)
        compute, source = new_stream("compute", CPU), Buffer("source")
        for n in range(6):
            with compute.using(writes=(source,)):
                pass
            compute.wait(sender.send(MESSAGE, source, compute.mark()))
            # By the end of its window: a body in the same memory has then been received.
            assert compute._seen.get(device.stream, 0) == max(0, n - 1)
        assert done[:3] == ["body", "header", "header"]  # it announces the layout
        assert done[3:] == ["body", "header"] * 5
        assert callers_stream(CPU).done.get(device.stream, 0) == 0  # the CPU does not wait
        sender, _ = sends_by(Device(drops=True), monkeypatch)
        with pytest.raises(OrderingError, match="without waiting for NCCL"):
            for _ in range(3):  # one more than its memory is for
                sender.send(MESSAGE, Buffer("source"))


def test_what_is_received_on_a_device_is_used_then(monkeypatch):
    layout = Layout.of(MESSAGE)
    with checked_streams():
        device, compute = Device(), new_stream("compute", CPU)

        def irecv(body, peer, group, tag):
            group.buffers[body.data_ptr()] = slot.buffer
            return group.begins(body)

        monkeypatch.setattr(dist, "get_group_rank", lambda *_: 0)
        monkeypatch.setattr(dist, "irecv", irecv)
        receiver = RemoteReceiver(edge(object(), device), CPU, compute, 2, unwatched(1))
        slot = receiver._ring.popleft()
        slot.layout, slot.nbytes = layout, layout.offsets()[1]
        receiver._arrived.append(slot)
        assert receiver.receive() is slot
        assert compute._seen[device.stream] == 1
        compute.reads(slot.buffer)


class Loop:
    """Replaces a gloo group of two ranks in one process."""

    def __init__(self):
        self.sent = defaultdict(SimpleQueue)

    def send(self, tensors, peer, tag):
        self.sent[tag].put(tensors[0].clone())
        return SimpleNamespace(wait=lambda _: None)

    def recv(self, tensors, peer, tag):
        def wait(_):
            sent = self.sent[tag].get()
            tensors[0][: len(sent)] = sent

        return SimpleNamespace(wait=wait)


@pytest.mark.parametrize(
    ("dropped", "found"),
    [
        (None, None),
        ("sending thread", "reads edge 0 -> 1, slot 0 without waiting for copy stream"),
        ("receiving thread", "writes host memory of edge 0 -> 1, slot 0 without waiting for copy"),
        ("copy stream", "reads host memory of edge 0 -> 1, slot 0 without waiting for receiving"),
    ],
)
def test_a_wait_that_staging_misses_is_noticed(dropped, found, monkeypatch):
    wait, loop = CheckedStream.wait, Loop()

    def waits(stream, point):
        if dropped is None or not stream.name.startswith(dropped):
            wait(stream, point)

    monkeypatch.setattr(CheckedStream, "wait", waits)
    monkeypatch.setattr(dist, "get_group_rank", lambda *_: 1)
    link = edge(loop, loop, staged=True)
    noticed = nullcontext() if found is None else pytest.raises(OrderingError, match=found)
    with checked_streams(), noticed:
        used = callers_stream(CPU)
        sender = RemoteSender(link, CPU, 3, unwatched(0))
        receiver = RemoteReceiver(link, CPU, used, 3, unwatched(1))
        receiver.begin()
        for n in range(7):
            message = Message((torch.full((16,), float(n)),), (False,))
            sender.send(message, Buffer("source"))
            sender.flush()
            slot = receiver.receive()
            used.reads(slot.buffer)
            assert torch.equal(slot.message.tensors[0], message.tensors[0])
            receiver.free(slot)
        sender.end()
        assert receiver.receive() is None


def test_a_message_in_the_place_of_another_is_noticed(monkeypatch):
    loop = Loop()
    monkeypatch.setattr(dist, "get_group_rank", lambda *_: 1)
    used = callers_stream(CPU)
    sender = RemoteSender(edge(loop, loop), CPU, 3, unwatched(0))
    receiver = RemoteReceiver(edge(loop, loop), CPU, used, 3, unwatched(1))
    for _ in range(3):
        sender.send(MESSAGE, Buffer("source"))
    frames = loop.sent[sender.link.tags + links_module.TAG_FRAME]
    first, second, third = (frames.get() for _ in range(3))
    for frame in (first, third, second):
        frames.put(frame)
    receiver.begin()
    receiver.receive()
    with pytest.raises(ValueError, match="expected message 1, got 2"):
        receiver.receive()


def free_late(rank, ranks):
    """Return a buffer on rank 1 after rank 0, which sent into it, has ended."""
    board = Board(dist.PrefixStore("test", _get_default_store()), rank, ranks, 30.0)
    with board.run(starts=True):
        pass
    links = links_module.open_links([0, 1], "test", CPU, board, Replicas((1, 1)), "gloo", ())
    (link,) = (link for link in links.edges if link.name == "edge 0 -> 1")
    with board.run():
        if rank == 0:
            sender = RemoteSender(link, CPU, 3, board)
            sender.send(MESSAGE, Buffer("source"))
            sender.flush()
            commit("kill")
        receiver = RemoteReceiver(link, CPU, callers_stream(CPU), 3, board)
        receiver.begin()
        slot = receiver.receive()
        with board.changed:
            board.changed.wait_for(lambda: receiver._error is not None, 20.0)
        receiver.free(slot)


@pytest.mark.processes
def test_a_buffer_given_back_to_a_rank_that_has_gone():
    """Gloo refuses it: an error of the connection, not of this rank."""
    ends = Ranks(free_late, 2).join()
    assert [end.code for end in ends] == [-9, 1]
    assert "RankError: rank 1" in ends[1].error
    assert "first cause: rank 0, " in ends[1].error


def options(is_high_priority_stream=False):
    """Replaces the options of ProcessGroupNCCL."""
    return SimpleNamespace(high=is_high_priority_stream, config=SimpleNamespace(max_ctas=None))


@pytest.mark.parametrize(
    ("setting", "on_error"),
    [
        (None, "0"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "7"),
        ("NCCL_ASYNC_ERROR_HANDLING", None),
    ],
)
def test_what_groups_of_nccl_are_made_with(setting, on_error, monkeypatch):
    """By themselves: a default group with a device would be split, also by other ranks."""
    made, default = {}, Default(torch.device("cuda", 0))

    def new_group(ranks, timeout, backend, pg_options=None, device_id=None):
        assert default.WORLD.bound_device_id is None
        assert device_id == (CPU if backend == "nccl" else None)
        told = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
        if backend == "nccl":
            made[tuple(ranks)] = pg_options, timeout, told
        else:
            assert pg_options is None
        return Group(0, ranks, backend)

    for name in [name for name in os.environ if "NCCL_" in name]:
        monkeypatch.delenv(name)
    if setting is not None:
        monkeypatch.setenv(setting, "7")
    before = dict(os.environ)
    monkeypatch.setattr(dist, "group", default)
    monkeypatch.setattr(dist, "ProcessGroup", Group)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    board = unwatched(0)
    opener = links_module._Opener([0, 1, 2], "test", board, [("gloo", CPU), ("nccl", CPU)])
    opener.open("edge", (0, 1), lambda *_: None)
    opener.open("replicas", (0, 1, 2), links_module._sum)
    assert os.environ == before
    assert default.WORLD.bound_device_id == torch.device("cuda", 0)
    for ranks, expected in (((0, 1), links_module.CHANNELS), ((0, 1, 2), None)):
        chosen, timeout, told = made[ranks]
        assert (chosen.high, chosen._timeout) == (True, timeout)
        assert (chosen.config.max_ctas, told) == (expected, on_error)
    assert len(board.aborts) == 2  # only NCCL's


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (["a 0", "a 1", "b 0"], "nccl"),
        (["a 0", "a 0", "b 0"], "gloo"),  # shared
        (["a 0", "", "b 0"], "gloo"),
    ],
)
def test_nccl_is_for_ranks_with_a_gpu_each(gpus, expected):
    assert links_module.backend_of_bodies(gpus) == expected
