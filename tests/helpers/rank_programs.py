"""Programs of ranks for the tests of transport, boards and worlds."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
from helpers.checked_streams import CheckedStream, checked_streams
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from spectrain_ext.distributed import connections, ends, join_ranks
from spectrain_ext.distributed import links as links_module
from spectrain_ext.distributed.board import Board
from spectrain_ext.distributed.ends import RemoteReceiver, RemoteSender
from spectrain_ext.distributed.links import Traffic, open_links
from spectrain_ext.distributed.store import _agree_on_start
from spectrain_ext.errors import RankError
from spectrain_ext.partitioning import partition
from spectrain_ext.transport import NO_HEADER, Buffer, Header, Message, callers_stream

CPU = torch.device("cpu")
GRADS = (True, False, True, False, False, True, True)  # of ``tensors``


def board(rank, ranks, timeout=30.0, grace=5.0):
    store = dist.PrefixStore("test", _get_default_store())
    made = Board(store, rank, ranks, timeout, grace)
    with made.run(starts=True):
        pass
    return made


@contextmanager
def travelling(way):
    """Transfer tensors as with GPUs, although all stages are on the CPU.

    "staged": as between stages on one GPU. "apart": by separate groups, as with NCCL.
    """

    def staged(*given):
        links = open_links(*given)
        return links._replace(edges=[link._replace(staged=True) for link in links.edges])

    def new_group(*given, backend, device_id, **more):
        return real(*given, backend="gloo", **more)

    real = dist.new_group
    with ExitStack() as patches:
        if way == "staged":
            patches.enter_context(patch.object(connections, "open_links", staged))
        if way == "apart":
            patches.enter_context(patch.object(links_module.dist, "new_group", new_group))
            patches.enter_context(patch.object(connections, "backend_of_bodies", lambda *_: "nccl"))
        yield


def travels(rank, ranks, way, program, *args):
    """Run another program with this kind of transfer."""
    with travelling(way):
        return program(rank, ranks, *args)


def ends_of(rank, ranks, depth=3, dynamic=False, timeout=30.0, staged=False):
    """Return a board and the two ends of edge 0 -> 1, of which each rank has one."""
    told = board(rank, ranks, timeout)
    links = open_links(None, CPU, told, dynamic)
    stream = callers_stream(CPU)
    (link,) = (link for link in links.edges if link.name == "edge 0 -> 1")
    link = link._replace(staged=staged)
    if rank:
        return told, RemoteReceiver(link, CPU, stream, depth, told)
    return told, RemoteSender(link, CPU, depth, told)


def send(sender, *tensors, grads=None, header=NO_HEADER):
    event = callers_stream(CPU).event()
    grads = grads or (True,) * len(tensors)
    sender.send(Message(tensors, grads), Buffer("source"), event, header=header)


def tensors(seed, rows=4):
    """Return tensors of several dtypes and layouts, and an empty place."""
    g = torch.Generator().manual_seed(seed)
    images = torch.randn(rows, 3, 5, 5, generator=g).to(memory_format=torch.channels_last)
    return (
        torch.randn(rows, 7, generator=g),
        None,
        images.to(torch.bfloat16),
        torch.randint(0, 9, (rows,), generator=g),
        torch.randn(rows, 3, generator=g, dtype=torch.float64) > 0,
        torch.randn(6, rows, generator=g).t(),
        torch.randn(rows, 3, generator=g, dtype=torch.complex64).conj(),
    )


def checked(rank, ranks, dropped, *given):
    """Run ``same_bits`` of a staged edge with all uses ordered, except some streams' waits."""
    wait = CheckedStream.wait

    def waits(stream, event):
        if dropped is None or not stream.name.startswith(dropped):
            wait(stream, event)

    with checked_streams(), patch.object(CheckedStream, "wait", waits):
        return same_bits(rank, ranks, *given, staged=True)


def few_layouts(rank, ranks, messages):
    """Run ``same_bits`` with ends that keep at most two layouts."""
    with patch.object(ends, "_KINDS", 2):
        return same_bits(rank, ranks, messages, dynamic=True)


def same_bits(rank, ranks, messages, dynamic, staged=False):
    told, end = ends_of(rank, ranks, dynamic=dynamic, staged=staged)
    wrong = []
    held = []
    with told.run():
        if rank == 0:
            for seed, rows in messages:
                sent = tensors(seed, rows)
                send(end, *sent, grads=GRADS, header=Header(seed + 1, seed / 7, seed))
            end.end()
            end.flush()
        else:
            end.begin()
            n = 0
            while (slot := end.receive()) is not None:
                seed = messages[n][0]
                if slot.header != (seed + 1, seed / 7, seed):
                    wrong.append((n, slot.header))
                callers_stream(CPU).reads(slot.buffer)
                held.append((n, slot))
                for place, (got, meant) in enumerate(
                    zip(slot.message.tensors, tensors(*messages[n]), strict=True)
                ):
                    if (got is None) != (meant is None):
                        wrong.append((n, place))
                    elif got is not None and not (
                        torch.equal(got, meant)
                        and got.dtype == meant.dtype
                        and got.stride() == torch.empty_like(meant).stride()
                    ):
                        wrong.append((n, place, got.shape, got.stride()))
                wrong += [slot.message.differentiable] * (slot.message.differentiable != GRADS)
                n += 1
                if len(held) == 2:  # a buffer in use is not written again
                    first, old = held.pop(0)
                    if not torch.equal(old.message.tensors[0], tensors(*messages[first])[0]):
                        wrong.append(("overwritten", first))
                    end.free(old)
            wrong += ["count"] * (n != len(messages))
    return wrong


def two_runs(rank, ranks):
    told, end = ends_of(rank, ranks)
    seen = []
    for run in range(3):
        with told.run():
            if rank == 0:
                for n in range(5):
                    send(end, torch.full((3,), 10.0 * run + n))
                end.end()
                end.flush()
            else:
                end.begin()
                while (slot := end.receive()) is not None:
                    seen.append(slot.message.tensors[0][0].item())
                    end.free(slot)
    return seen


def grows(rank, ranks):
    told, end = ends_of(rank, ranks)
    with told.run():
        if rank == 0:
            send(end, torch.zeros(4, 2))
            send(end, torch.zeros(5, 2))
        else:
            end.begin()
            while (slot := end.receive()) is not None:
                end.free(slot)


def chain(rank, ranks, fault, culprit, timeout, grace):
    """Let every rank wait for the previous one while the culprit does something else."""
    told = board(rank, ranks, timeout, grace)
    links = open_links(None, CPU, told, False)
    receiver = sender = None
    for link in links.edges:
        if link.what is Traffic.ACTIVATIONS and link.receiver == rank:
            receiver = RemoteReceiver(link, CPU, callers_stream(CPU), 3, told)
            receiver.begin()
        elif link.what is Traffic.ACTIVATIONS:
            sender = RemoteSender(link, CPU, 3, told)
    with told.run():
        for n in range(1000000):
            told.set_action("F", n)
            if rank == culprit and n == 20:
                commit(fault)
            if receiver is not None:
                receiver.free(receiver.receive())
            if sender is not None:
                send(sender, torch.full((3,), float(n)))
            told.check()


def frees_late(rank, ranks):
    """Let rank 1 return a buffer after rank 0, which sent into it, has ended."""
    told, end = ends_of(rank, ranks)
    with told.run():
        if rank == 0:
            send(end, torch.ones(4))
            end.flush()
            commit("kill")
        end.begin()
        slot = end.receive()
        with told.changed:
            told.changed.wait_for(lambda: end._error is not None, 20.0)
        end.free(slot)
    return "freed"


def cut_off(rank, ranks, fails):
    """Make rank 0 fail but stay alive while rank 1 waits in a call.

    The call waits, as for a device, until an abort. It then fails or returns data that has not
    arrived, and the rank fails.
    """
    store, aborted = _get_default_store(), threading.Event()

    class Work:
        def wait(self):
            store.set("waits", "1")
            aborted.wait()
            if fails:
                raise RuntimeError("the communicator was aborted")

    told = board(rank, ranks, grace=10.0)
    with travelling("apart"):
        links = open_links(None, CPU, told, False, None, "nccl")
    (link,) = (link for link in links.edges if link.name == "edge 0 -> 1")
    told.aborts[:] = [aborted.set]
    end = (
        RemoteReceiver(link, CPU, callers_stream(CPU), 3, told)
        if rank
        else RemoteSender(link, CPU, 3, told)
    )
    try:
        with told.run(), patch.object(dist, "irecv", lambda *_, **__: Work()):
            if rank == 0:
                send(end, torch.ones(4))
                store.get("waits")
                raise ArithmeticError("planned")
            end.begin()
            end.receive()
            raise ValueError("not a number")
    except ArithmeticError:
        store.wait(["over"], timedelta(seconds=30))
        return aborted.is_set()
    except RankError as error:
        store.set("over", "1")
        return str(error), str(error.__cause__)


def waits_for_one(rank, ranks, timeout, grace, seconds):
    """Let rank 0 work alone in steps of ``seconds`` (None: endless) while the others wait."""
    told = board(rank, ranks, timeout, grace)
    with told.together("the work of one"):
        if rank == 0:
            with told.busy("the work"):
                for n, each in enumerate(seconds):
                    told.set_action("step", n)
                    threading.Event().wait(each)
    return True


def commit(fault):
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "exit":
        os._exit(7)
    if fault == "exception":
        raise ArithmeticError("planned")
    if fault == "hang":
        threading.Event().wait()
    if fault.startswith("/"):  # a pipe: its reader notices the hang
        with open(fault, "w"):
            threading.Event().wait()


def partitions(rank, ranks, blocks):
    """Return every rank's cut; each was slow at another block."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(blocks[rank])))

    def lingers(*_):
        torch.linalg.svd(torch.rand(300, 300))

    model[2 * rank].register_forward_pre_hook(lingers)
    try:
        parts = partition(model, 3, torch.randn(4, 8))
    except ValueError as error:
        return str(error)
    return parts.cut.ends, [block.seconds for block in parts.profile.blocks]


def joined(rank, ranks, port, start):
    """Return this rank and the ranks' sum, on a store that earlier starts have used."""
    dist.destroy_process_group()  # the test's group
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if rank == 0 and ranks > 1:  # the others see the earlier content
        store.wait([f"{start} has begun"])
    store.set(f"{start} has begun", "")
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ.update(given, WORLD_SIZE=str(ranks), TORCHELASTIC_USE_AGENT_STORE="True")
    found = join_ranks(timeout=timedelta(seconds=60))
    total = torch.tensor(float(start))
    dist.all_reduce(total)
    return (*found, total.item())


def joining(rank, ranks, port, as_rank):
    """Join with a rank that no other rank expects."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with suppress(TimeoutError):
        _agree_on_start(store, as_rank, as_rank + 1, timedelta(seconds=0.1))
