"""What ranks put together: gradients or weights of a stage's replicas, norms of all gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Condition

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from spectrain_ext.pipeline.clipping import GlobalNorm
from spectrain_ext.schedule import Replicas
from spectrain_ext.transport import Buffer, Stream
from spectrain_ext.weights.storage import Flat

from .board import Board
from .links import Circle

# A gradient goes in about this many pieces, of sizes that are worth a collective of their own.
PIECES = 8
LEAST_BYTES = 2**20
MOST_BYTES = 25 * 2**20

_GRADIENTS = "the gradients of the stage's other replicas"
_WEIGHTS = "the weights of the stage's other replicas"
_NORMS = "the norms of all ranks' gradients"


class _Pending:
    """A collective under way; ``done`` is set, and ``changed`` notified, when it has ended.

    The work itself says that it is completed a moment after its future does: too late to be asked
    by whoever that woke up.
    """

    def __init__(self, work: dist.Work, changed: Condition, by_host: bool) -> None:
        self.work = work
        self.done = not by_host
        self._changed = changed
        if by_host:
            work.get_future().add_done_callback(self._ended)

    def _ended(self, _: object) -> None:
        with self._changed:
            self.done = True
            self._changed.notify_all()


class _Bucket:
    """Some parameters of one dtype, and a flat copy of their gradients."""

    def __init__(self, params: list[Tensor]) -> None:
        self.flat = Flat(params)
        self.missing: set[Tensor] = set()
        self.pending: _Pending | None = None

    def copy(self) -> None:
        """Take the gradients; none counts as zeros."""
        views, gradients = [], []
        for p, view in self.flat.views.items():
            if p.grad is None:
                view.zero_()
            else:
                views.append(view)
                gradients.append(p.grad)
        if views:
            with torch.no_grad():
                torch._foreach_copy_(views, gradients)


class GradientSum:
    """Sums a minibatch's gradient, and a number, over the replicas of a stage.

    During a minibatch's last backward a bucket of gradients is sent off as soon as autograd has the
    last of them, and the ones before it are under way. All replicas send them in one order, that of
    the last layer first. ``finish`` waits for them; all replicas then have the same bits.

    Args:
        params: the stage's trainable parameters, in the same order on all its replicas.
        circle: the replicas.
        board: names a failure.
        compute: the stream that backwards are issued to.
        gradients: what they write.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        circle: Circle,
        board: Board,
        compute: Stream,
        gradients: Buffer,
    ) -> None:
        self._params = list(params)
        self._circle = circle
        self._board = board
        self._compute = compute
        self._gradients = gradients
        self._buckets = [_Bucket(part) for part in _parts(self._params)]
        self._bucket_of = {p: b for b in self._buckets for p in b.flat.views}
        self._armed = False
        self._sent = 0
        self._handles: list[RemovableHandle] = []
        members = circle.ranks
        self._peer = members[(members.index(board.rank) + 1) % len(members)]

    # A run.

    def begin(self) -> None:
        for p in self._params:
            self._handles.append(p.register_post_accumulate_grad_hook(self._on_gradient))

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._armed = False

    # A minibatch.

    def expect(self) -> None:
        """The backward that comes next is the minibatch's last one here."""
        self._armed, self._sent = True, 0
        for bucket in self._buckets:
            bucket.missing = set(bucket.flat.views)

    def _on_gradient(self, p: Tensor) -> None:
        if not self._armed:
            return
        bucket = self._bucket_of[p]
        if bucket.pending is not None:
            raise RuntimeError(
                "a parameter got a second gradient in one backward, as by reentrant checkpointing, "
                "when the first was being added up over the stage's replicas"
            )
        bucket.missing.discard(p)
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[self._sent]
        bucket.copy()
        (buffer,) = bucket.flat.buffers
        bucket.pending = self._all_reduce(buffer, self._circle.device)
        self._sent += 1

    def send_rest(self) -> None:
        """The backward has ended: what it did not reach has the gradient that it has."""
        self._armed = False
        with self._compute.using(reads=(self._gradients,)):
            while self._sent < len(self._buckets):
                self._send()

    def finish(self, number: float, stream: Stream) -> float:
        """Put the sums into the gradients, on a stream that follows them; returns the number's.

        A parameter that has no gradient on any replica gets none.

        Raises:
            RankError: another rank has failed, or the deadline has passed.
        """
        own = [number, *(float(p.grad is not None) for p in self._params)]
        tail = torch.tensor(own, dtype=torch.float64)
        under_way = [bucket.pending for bucket in self._buckets if bucket.pending is not None]
        under_way.append(self._all_reduce(tail, self._circle.host))
        # Where the rank can hear of failures; for NCCL the stream waits, below.
        self._board.wait(lambda: all(p.done for p in under_way), self._peer, _GRADIENTS)
        try:
            with stream.using(writes=(self._gradients,)):
                for pending in under_way:
                    pending.work.wait()
        except RuntimeError as error:
            self._board.lost_one_of(self._circle.ranks, _GRADIENTS, error)
        for bucket in self._buckets:
            bucket.pending = None
        total, *have = tail.tolist()
        for p, count in zip(self._params, have, strict=True):
            p.grad = self._bucket_of[p].flat.views[p] if count else None
        return float(total)

    # The replicas.

    def _all_reduce(self, tensor: Tensor, group: dist.ProcessGroup) -> _Pending:
        try:
            work = dist.all_reduce(tensor, group=group, async_op=True)
        except RuntimeError as error:
            self._board.lost_one_of(self._circle.ranks, _GRADIENTS, error)
        assert work is not None
        return _Pending(work, self._board.changed, group is self._circle.host)


class WeightExchange:
    """Sends weights to a stage's other replicas and waits for theirs, when they are asked for.

    Not a sum: its order would be gloo's, and another one with other numbers of replicas.

    Args:
        circle: the replicas.
        board: names a failure.
    """

    def __init__(self, circle: Circle, board: Board) -> None:
        self._circle, self._board = circle, board
        members = circle.ranks
        self._peer = members[(members.index(board.rank) + 1) % len(members)]

    def __call__(self, message: Tensor) -> Callable[[], Sequence[Tensor]]:
        """Begin to send it; all replicas call this in one order.

        Raises:
            RankError: there, or by what is returned: another rank has failed.
        """
        circle, board = self._circle, self._board
        found = [torch.empty_like(message) for _ in circle.ranks]
        try:
            work = dist.all_gather(found, message, group=circle.device, async_op=True)
        except RuntimeError as error:
            board.lost_one_of(circle.ranks, _WEIGHTS, error)
        assert work is not None
        pending = _Pending(work, board.changed, circle.device is circle.host)

        def arrived() -> Sequence[Tensor]:
            board.wait(lambda: pending.done, self._peer, _WEIGHTS)
            try:
                work.wait()
            except RuntimeError as error:
                board.lost_one_of(circle.ranks, _WEIGHTS, error)
            return found

        return arrived


def _parts(params: Sequence[Tensor]) -> list[list[Tensor]]:
    """Buckets of one dtype each, in the order in which a backward makes their gradients."""
    whole = sum(p.nbytes for p in params)
    enough = min(max(whole // PIECES, LEAST_BYTES), MOST_BYTES)
    done: list[list[Tensor]] = []
    open_: dict[torch.dtype, list[Tensor]] = {}
    for p in reversed(params):
        part = open_.setdefault(p.dtype, [])
        part.append(p)
        if sum(q.nbytes for q in part) >= enough:
            done.append(open_.pop(p.dtype))
    return [*done, *open_.values()]


class DistributedNorm(GlobalNorm):
    """Every rank gives its stages' norms and hears all others', over gloo: the host waits for it.

    It does so when the last of its stages has given its own; the others' updates wait until then.
    Replicas have added up their gradients by then and give the same norm, which counts once.

    Args:
        replicas: of every stage.
        board: names a failure.
    """

    def __init__(self, replicas: Replicas, board: Board) -> None:
        super().__init__(replicas.stages)
        self._replicas = replicas
        self._mine = {k: n for n, k in enumerate(replicas.stages_on(board.rank))}
        self._own = torch.empty(len(self._mine), dtype=torch.float64)
        self._board = board
        self._group: dist.ProcessGroup | None = None

    def connect(self, group: dist.ProcessGroup) -> None:
        """Go by this group of all ranks, of gloo."""
        self._group = group

    def give(self, i: int, stage: int, norm: Tensor, buffer: Buffer, stream: Stream) -> None:
        """A stage's own norm of minibatch i; of the rank's last returns when all have given."""
        super().give(i, stage, norm, buffer, stream)
        with stream.using(reads=(buffer,)):
            self._own[self._mine[stage]] = norm.to("cpu", torch.float64)
        if not self.has(self._mine):
            return
        gathered = [torch.empty_like(self._own) for _ in range(self._board.ranks)]
        with self._board.blocked(None, _NORMS):
            try:
                dist.all_gather(gathered, self._own, group=self._group)
            except RuntimeError as error:  # which does not say whose connection has broken
                self._board.lost_one_of(range(self._board.ranks), _NORMS, error)
        for k in range(self._replicas.stages):
            if k not in self._mine:
                rank = self._replicas.ranks_of(k)[0]
                found = gathered[rank][k // self._board.ranks if len(self._mine) > 1 else 0]
                super().give(i, k, found, Buffer(f"gradient norm of stage {k}"), stream)
