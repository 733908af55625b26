"""Links: the process groups that one rank sends and receives by, which all make in one order."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spectrain_ext.pipeline.edges import Traffic
from spectrain_ext.pipeline.ties import TiedStages
from spectrain_ext.schedule import Replicas
from spectrain_ext.transport.streams import callers_stream

from .board import Board
from .wire import TAGS

#: Multiprocessors that a message takes by NCCL at most, at either end. A kernel stays on the device
#: until the one at the other end has come, and those of all edges must fit there together: one that
#: does not get on keeps another device waiting. NCCL by itself takes more where links are fast (its
#: 2.30: two per NVLink), and rounds up to a power of two. Not measured.
CHANNELS = 4
_BOUNDS = frozenset(
    f"NCCL_{end}_{what}"
    for end in ("MIN", "MAX")
    for what in ("CTAS", "NCHANNELS", "P2P_NCHANNELS")
)
_ON_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CPU = torch.device("cpu")
_Use = Callable[[dist.ProcessGroup, torch.device], None]


class Circle(NamedTuple):
    """Ranks that put something together, and the groups that they do it by."""

    ranks: Sequence[int]
    host: dist.ProcessGroup  # of gloo, for what their hosts wait for
    # For what goes from device to device: the same one, which itself sees to it that a GPU's data
    # gets through host memory, or one of NCCL.
    device: dist.ProcessGroup


class RemoteEdge(NamedTuple):
    """What two processes have in common for one direction; ranks are those of the pipeline."""

    name: str  # of the edge, for reports
    what: Traffic
    at: int  # the replica at the other end; of tied weights and gradients the tie's number
    stages: tuple[int, int]  # of the sender and of the receiver
    sender: int
    receiver: int
    peer: int  # the other process's rank in the default group
    host: dist.ProcessGroup  # of gloo
    device: dist.ProcessGroup  # that bodies go by: the same, or one of NCCL
    dynamic: bool  # whether later messages may be larger than the first
    # Whether gloo cannot reach the stages' devices: bodies go through the hosts' memory.
    staged: bool = False
    # The first of its messages' tags. Two links by one group have others: gloo waits for the next
    # message of a training run beside those of an evaluation.
    tags: int = 0

    @property
    def by_host(self) -> bool:
        """Whether bodies travel in the CPU's memory."""
        return self.device is self.host


class Links(NamedTuple):
    """The links of one rank; ``circle``: the replicas of its stage, None if there is one."""

    edges: Sequence[RemoteEdge]
    circle: Circle | None = None

    def evaluating(self) -> Links:
        """Links by the same groups for forwards only: messages of any size, beside those here."""
        return Links(
            [
                link._replace(dynamic=True, tags=link.tags + TAGS)
                for link in self.edges
                if link.what is not Traffic.TIED_GRADIENTS  # tied weights go once, first of all
            ]
        )


class Connected:
    """Inside, a RuntimeError is that of a broken connection to one of these ranks."""

    def __init__(self, board: Board, ranks: Sequence[int], what: str) -> None:
        others = [rank for rank in ranks if rank != board.rank]
        self._board, self._what = board, what
        self._peer = others[0] if len(others) == 1 else None

    def __enter__(self) -> None:
        if self._board.cause is not None:  # groups of NCCL are being aborted
            self._board.check()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RuntimeError):
            self._board.lost(self._peer, self._what, error)


def backend_of_bodies(board: Board, device: torch.device) -> str:
    """``"nccl"`` if every rank has a GPU of its own and a torch with NCCL, otherwise ``"gloo"``."""
    gpus = board.gathered("comparing GPUs", _gpu(device))
    # NCCL refuses two ranks on one GPU.
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"


def _gpu(device: torch.device) -> str:
    """Which of all GPUs of all machines it is; nothing where NCCL cannot use it."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    of = torch.cuda.get_device_properties(device)  # by its place, as NCCL: a uuid may be of a part
    place = ":".join(str(getattr(of, f"pci_{part}_id")) for part in ("domain", "bus", "device"))
    return f"{socket.gethostname()} {place}"


def open_links(
    group: dist.ProcessGroup | None,
    device: torch.device,
    board: Board,
    dynamic: bool,
    replicas: Replicas | None = None,
    bodies: str = "gloo",  # or "nccl", which leaves them on the GPU; on all ranks alike
    ties: Sequence[TiedStages] = (),
) -> Links:
    """Make the groups of all directed edges that end or begin at this rank, and use each once."""
    # One group per directed edge: the two directions would otherwise wait for each other. All ranks
    # make all groups, in one order, as torch asks of them.
    #
    # The first use of a group connects, and by NCCL blocks the hosts of both ranks until the other
    # has come to it too. In training that could be a circle of ranks, each of which waits for the
    # next one's first use of another edge; here all have the same order. NCCL connects for what is
    # done: an edge is used by a message in its direction, replicas by a sum.
    opener = _Opener(dist.get_process_group_ranks(group), board, bodies, device)
    ranks = opener.ranks
    replicas = Replicas((1,) * len(ranks)) if replicas is None else replicas
    staged = bodies == "gloo" and device.type == "cuda"
    edges: list[RemoteEdge] = []

    def link(a: int, b: int, what: Traffic, tie: int | None = None) -> None:
        sender, receiver = a % replicas.ranks, b % replicas.ranks
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
        other = b if sender == board.rank else a
        at, peer = other if tie is None else tie, ranks[other % replicas.ranks]
        stages, size = (
            (replicas.stage_and_replica(a)[0], replicas.stage_and_replica(b)[0]),
            dynamic or what.tied,
        )
        edges.append(
            RemoteEdge(
                name, what, at, stages, sender, receiver, peer, two.host, two.device, size, staged
            )
        )

    for a, b in replicas.edges():
        link(a, b, Traffic.ACTIVATIONS)
        link(b, a, Traffic.GRADIENTS)
    for replica in replicas.indices_of(0):
        link(0, replica, Traffic.INPUTS)
    for replica in replicas.indices_of(replicas.stages - 1):
        link(0, replica, Traffic.TARGETS)
    for n, tie in enumerate(ties):
        home, copies = replicas.runs(tie.home, 0), replicas.runs(tie.copy, 0)
        link(home, copies, Traffic.TIED_WEIGHTS, n)
        if tie.trained:
            link(copies, home, Traffic.TIED_GRADIENTS, n)
    circle = None
    for k in range(replicas.stages):
        members = replicas.ranks_of(k)
        if len(members) > 1:
            circle = opener.open(f"the replicas of stage {k}", members, _sum) or circle
    return Links(edges, circle)


def open_circle(group: dist.ProcessGroup | None, board: Board) -> Circle:
    """All ranks, for what their hosts tell one another."""
    ranks = dist.get_process_group_ranks(group)
    made = _Opener(ranks, board, "gloo", _CPU).open("all ranks", range(len(ranks)), _sum)
    assert made is not None
    return made


def _sum(made: dist.ProcessGroup, on: torch.device) -> None:
    dist.all_reduce(torch.zeros(1, device=on), group=made)


class _Opener(NamedTuple):
    """Makes groups of some of the pipeline's ranks, and uses them."""

    ranks: list[int]
    board: Board
    bodies: str
    device: torch.device

    def open(self, name: str, members: Sequence[int], use: _Use) -> Circle | None:
        """Groups of these ranks; None: this one is no member."""
        host = self.group(name, members, "gloo", _CPU, use)
        device = host
        if self.bodies != "gloo":
            device = self.group(name, members, self.bodies, self.device, use)
        return None if host is None or device is None else Circle(members, host, device)

    def group(
        self, name: str, members: Sequence[int], backend: str, device: torch.device, use: _Use
    ) -> dist.ProcessGroup | None:
        board, chosen = self.board, [self.ranks[r] for r in members]
        # gloo's own deadline would break the connection: the board's comes first.
        longer = timedelta(seconds=max(4 * board.timeout, 60.0))
        # NCCL then connects at once, and a pair's messages need no second communicator.
        bound = None if backend == "gloo" else device
        options = None if backend == "gloo" else _options(longer, use is not _sum)
        mine, others = board.rank in members, [r for r in members if r != board.rank]
        waits_for = others[0] if len(others) == 1 else None
        board.doing("opening", name)
        with board.blocked(waits_for, name) if mine else nullcontext():
            try:
                with _unbound(), _lenient():
                    made = dist.new_group(
                        chosen, timeout=longer, backend=backend, pg_options=options, device_id=bound
                    )
                if not mine:
                    return None
                assert isinstance(made, dist.ProcessGroup)
                if backend != "gloo":  # whose waits are those of threads, which may stay behind
                    board.aborts.append(made.abort)
                # Not left to a message whose deadline is short, and over before the next begins.
                stream = callers_stream(device)
                with stream.using():
                    use(made, device)
                stream.synchronize()
            except RuntimeError as error:
                board.lost(None, name, error)
        board.check()  # an abort ends the first use as well
        return made


def _options(timeout: timedelta, of_an_edge: bool) -> Any:
    """What a group of NCCL is made with; None where torch has none."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        return None
    # What another rank's device waits for goes before what only this one computes.
    options = nccl.Options(is_high_priority_stream=True)
    options._timeout = timeout
    # Sums have as many channels as NCCL chooses for them beside a backward: they move whole stages'
    # gradients at once, and an update waits for them.
    if of_an_edge and not _BOUNDS & os.environ.keys():
        options.config.max_ctas = CHANNELS  # of sends and receives as well
    return options


@contextmanager
def _lenient() -> Iterator[None]:
    """Inside, torch makes groups of NCCL that do not end the process at an error of theirs.

    The board hears of the failure, aborts them, and has the rank raise RankError.
    """
    if any(name in os.environ for name in (_ON_ERROR, _ON_ERROR.removeprefix("TORCH_"))):
        yield
        return
    os.environ[_ON_ERROR] = "0"  # read when a group is made
    try:
        yield
    finally:
        del os.environ[_ON_ERROR]


@contextmanager
def _unbound() -> Iterator[None]:
    """Inside, torch makes new groups without the default group's communicator."""
    # From one with a device_id it splits them off, on the ranks that are no members as well: for a
    # group of gloo these would wait for members that do not split anything.
    default = dist.group.WORLD
    assert default is not None
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound
