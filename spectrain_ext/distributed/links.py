"""Creates the process groups through which a rank sends and receives."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from spectrain_ext.pipeline.processes import Ends, Traffic
from spectrain_ext.pipeline.ties import TiedStages
from spectrain_ext.schedule import Replicas
from spectrain_ext.transport.streams import callers_stream

from .board import Board
from .failures import is_broken_connection

#: The most multiprocessors that an NCCL message occupies at either end. A kernel occupies them
#: until its counterpart at the other end runs, so the kernels of all edges must fit on a device
#: together; one that cannot start blocks another device. NCCL's own choice is larger on fast links
#: (2.30: two per NVLink), and it rounds up to a power of two. NCCL_MAX_CTAS in the environment
#: takes precedence. Not measured.
CHANNELS = 4
# The kinds of pieces of a message, all sent in one group.
TAG_FRAME, TAG_LAYOUT, TAG_BODY = 1, 2, 3
_TAGS = 4  # tags reserved per edge
_TAG_NEVER = 2**16  # of no message; above all others
_ON_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CPU = torch.device("cpu")
_Use = Callable[[dist.ProcessGroup, torch.device], None]


class RankGroup(NamedTuple):
    """Ranks that run collectives together, and their process groups."""

    ranks: Sequence[int]
    host: dist.ProcessGroup  # gloo, for CPU tensors
    device: dist.ProcessGroup  # NCCL, or the same gloo group, which stages GPU data in CPU memory


class RemoteEdge(NamedTuple):
    """One direction of messages between two processes, as both know it."""

    name: str  # for reports
    ends: Ends
    stages: tuple[int, int]  # of the sender and of the receiver
    sender: int  # rank in the pipeline
    receiver: int  # rank in the pipeline
    peer: int  # the other process's rank in the default group
    host: dist.ProcessGroup  # gloo
    device: dist.ProcessGroup  # for bodies: NCCL, or the same gloo group
    staged: bool = False  # bodies go through CPU memory, because gloo cannot reach the devices
    # Receives of an evaluation are posted one by one, as none may remain; those of training remain
    # posted during an evaluation.
    evaluates: bool = False

    @property
    def what(self) -> Traffic:
        return self.ends[0]

    @property
    def by_host(self) -> bool:
        """Whether bodies are sent from CPU memory."""
        return self.device is self.host

    @property
    def tags(self) -> int:
        """The offset of the messages' tags: training and evaluation share a group."""
        return _TAGS if self.evaluates else 0


class Links(NamedTuple):
    """The links of one rank."""

    edges: Sequence[RemoteEdge]
    all_ranks: RankGroup  # only for CPU tensors
    replicas: RankGroup | None  # of its stage; None if it is the only one
    shards: RankGroup | None = None  # that share its replica

    def evaluating(self) -> list[RemoteEdge]:
        """Return edges for forwards only, in the same groups."""
        return [
            link._replace(evaluates=True)
            for link in self.edges
            if link.what is not Traffic.TIED_GRADIENTS  # tied weights go once, at the start
        ]


class ConnectionGuard:
    """Blames these ranks (none: an unknown one) for a connection that breaks inside."""

    def __init__(self, board: Board, ranks: Sequence[int], what: str) -> None:
        others = [rank for rank in ranks if rank != board.rank]
        self._board, self._what = board, what
        self._peer = others[0] if len(others) == 1 else None

    def __enter__(self) -> None:
        self._board.check()  # after a failure, NCCL groups are being aborted

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and is_broken_connection(error):
            self._board.lost(self._peer, self._what, error)


def backend_of_bodies(gpus: Sequence[str]) -> str:
    """Return "nccl" if every rank has its own GPU and a torch with NCCL, else "gloo"."""
    # NCCL refuses two ranks on one GPU.
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"


def gpu_of(device: torch.device) -> str:
    """Identify a GPU among those of all machines; "" if NCCL cannot use it."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    # by PCI address, as in NCCL: a uuid may be that of a MIG slice
    of = torch.cuda.get_device_properties(device)
    place = ":".join(str(getattr(of, f"pci_{part}_id")) for part in ("domain", "bus", "device"))
    return f"{socket.gethostname()} {place}"


def open_links(
    ranks: Sequence[int],  # in the default group, of the pipeline's ranks, ascending
    prefix: str,  # of this pipeline, for names
    device: torch.device,
    board: Board,
    replicas: Replicas,
    bodies: str,  # "gloo", or "nccl", which sends from device to device; the same on all ranks
    ties: Sequence[TiedStages],
) -> Links:
    """Make a group for each directed edge of this rank, and use each once."""
    # One group per directed edge, because two directions in one would wait for each other. Its
    # members alone make it; all of them do so in the same order.
    #
    # The first use of a group connects it, and with NCCL blocks the CPU of each rank until the
    # other uses it too. During training ranks could then wait in a circle for each other's first
    # uses; here the order is the same everywhere. NCCL connects per kind of operation, so an edge
    # sends a message in its direction, and replicas sum.
    host = "gloo", _CPU
    kinds = [host] if bodies == "gloo" else [host, (bodies, device)]
    opener = _Opener(ranks, prefix, board, kinds)
    staged = bodies == "gloo" and device.type == "cuda"
    edges: list[RemoteEdge] = []
    rows, shard = replicas.rows, replicas.shard_of(board.rank)

    def link(a: int, b: int, what: Traffic, tie: int | None = None, to: int = shard) -> None:
        """Open the edge to the rank that has this shard of replica b."""
        batches = what in (Traffic.INPUTS, Traffic.TARGETS)  # which rank 0 sends to all shards
        sender, receiver = rows[a][0 if batches else shard], rows[b][to]
        if sender == receiver:
            return

        def message(made: dist.ProcessGroup, on: torch.device) -> None:
            if board.rank == sender:
                dist.send(torch.zeros(1, device=on), ranks[receiver], group=made)
            else:
                dist.recv(torch.zeros(1, device=on), ranks[sender], group=made)

        plain = what in (Traffic.ACTIVATIONS, Traffic.GRADIENTS)
        name = f"edge {a} -> {b}" if plain else f"edge {a} -> {b} of {what.value}"
        two = opener.open(name, (sender, receiver), message)
        if two is None:
            return
        other_shard = to if batches and to and board.rank == sender else None
        ends = what, a if plain else other_shard, b if tie is None else tie
        peer = ranks[receiver if sender == board.rank else sender]
        stages = replicas.stage_and_replica(a)[0], replicas.stage_and_replica(b)[0]
        edges.append(
            RemoteEdge(name, ends, stages, sender, receiver, peer, two.host, two.device, staged)
        )

    for a, b in replicas.edges():
        link(a, b, Traffic.ACTIVATIONS)
        link(b, a, Traffic.GRADIENTS)
    for what, stage in ((Traffic.INPUTS, 0), (Traffic.TARGETS, replicas.stages - 1)):
        for replica in replicas.indices_of(stage):
            for to in range(len(rows[replica])):
                link(0, replica, what, to=to)
    for n, tie in enumerate(ties):
        home, copies = replicas.runs(tie.home, 0), replicas.runs(tie.copy, 0)
        link(home, copies, Traffic.TIED_WEIGHTS, n)
        if tie.trained:
            link(copies, home, Traffic.TIED_GRADIENTS, n)
    of_stage = None
    for k in range(replicas.stages):
        members = [rows[n][shard] for n in replicas.indices_of(k)]
        if len(members) > 1:
            of_stage = opener.open(f"the replicas of stage {k}", members, _sum) or of_stage
    of_replica = None
    for n in replicas.numbers_on(board.rank)[:1] if len(rows[0]) > 1 else ():
        of_replica = opener.open(f"the shards of replica {n}", rows[n], _sum)
    all_ranks = opener._replace(kinds=[host]).open("all ranks", range(len(ranks)), _sum)
    assert all_ranks is not None
    return Links(edges, all_ranks, of_stage, of_replica)


def _sum(made: dist.ProcessGroup, on: torch.device) -> None:
    dist.all_reduce(torch.zeros(1, device=on), group=made)


class _Opener(NamedTuple):
    """Makes and first uses groups of the pipeline's ranks."""

    ranks: Sequence[int]
    prefix: str
    board: Board
    kinds: Sequence[tuple[str, torch.device]]  # for CPU tensors, and for bodies if others

    def open(self, name: str, members: Sequence[int], use: _Use) -> RankGroup | None:
        """Make the groups of these ranks; None if this rank is not a member."""
        if self.board.rank not in members:
            return None
        groups = [self._group(name, members, use, *kind) for kind in self.kinds]
        return RankGroup(members, groups[0], groups[-1])

    def _group(
        self, name: str, members: Sequence[int], use: _Use, backend: str, device: torch.device
    ) -> dist.ProcessGroup:
        board, others = self.board, [r for r in members if r != self.board.rank]
        # Longer than the board's, because gloo's own deadline breaks the connection.
        longer = timedelta(seconds=max(4 * board.timeout, 60.0))
        settings: dict[str, Any] = {}
        if backend != "gloo":
            # With a bound device NCCL connects at once, and a pair needs no second communicator.
            settings["device_id"] = device
            settings["pg_options"] = _options(longer, use is not _sum)
        waits_for = others[0] if len(others) == 1 else None
        board.set_doing("opening", name)
        with board.blocked(waits_for, name), ConnectionGuard(board, (), name):
            ranks = [self.ranks[r] for r in members]
            with _by_itself(f"{self.prefix}/{name}/{ranks}/{backend}"):
                made: dist.ProcessGroup = dist.new_group(ranks, longer, backend, **settings)
            break_on_failure(made, backend, board)
            # Connect now, without a message's short deadline, and before the next group.
            stream = callers_stream(device)
            with stream.using():
                use(made, device)
            stream.synchronize()
        board.check()  # an abort also ends the first use
        return made


def break_on_failure(group: dist.ProcessGroup, backend: str, board: Board) -> None:
    """End all waits in a group once a rank has failed."""
    if backend == "gloo":
        board.disconnects.append(partial(_disconnect, group))
    else:
        board.aborts.append(group.abort)


def _disconnect(group: dist.ProcessGroup) -> None:
    """Break gloo's connections, which ends all waits for them; gloo has no abort (torch 2.13)."""
    # A receive that times out breaks all of a group's connections. It does not time out if its own
    # connection is broken already, so try every peer.
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.empty(0)], peer, _TAG_NEVER).wait(timedelta(milliseconds=1))


def _options(timeout: timedelta, of_an_edge: bool) -> Any:
    """Return the options of an NCCL group; None if torch has no NCCL."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        return None
    # Messages that another device waits for go before this device's own computation.
    options = nccl.Options(is_high_priority_stream=True)
    options._timeout = timeout
    # Sums keep NCCL's own number of channels: they move a whole stage's gradients during a
    # backward, and the update waits for them.
    if of_an_edge:
        options.config.max_ctas = CHANNELS  # also limits sends and receives
    return options


@contextmanager
def _by_itself(name: str) -> Iterator[None]:
    """Let torch make a group of this name, which neither ends the process nor splits another."""
    # Instead the board notices a failure, aborts NCCL's groups, and makes the rank raise RankError.
    chosen = any(name in os.environ for name in (_ON_ERROR, _ON_ERROR.removeprefix("TORCH_")))
    if not chosen:
        os.environ[_ON_ERROR] = "0"  # torch reads it when it makes a group
    # torch splits new groups off a default group with a device_id, also on ranks that are not
    # members. For a gloo group these would wait for members that do not split.
    default = dist.group.WORLD
    assert default is not None
    bound, default.bound_device_id = default.bound_device_id, None
    # A name that only its members need to agree on: torch counts a process's groups, of which
    # others may have more. Setting that count is private (torch 2.13).
    groups, _world.group_count = _world.group_count, int(sha256(name.encode()).hexdigest(), 16)
    try:
        yield
    finally:
        default.bound_device_id = bound
        _world.group_count = groups
        if not chosen:
            del os.environ[_ON_ERROR]
