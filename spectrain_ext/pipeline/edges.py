"""StageEdges: what a stage receives and sends by, from the caller's batches to shared losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import nan

from torch import Tensor

from spectrain_ext.interrupts import waiting
from spectrain_ext.schedule import Replicas
from spectrain_ext.transport import Buffer, Edge, Header, Receiver, Sender

from .batch import Microbatch, SplitDim, hand_in, samples_of, shares_of, sizes_of, split


@dataclass
class StageEdges:
    """The edges of one stage: of each kind those of its own microbatches of a minibatch, in order.

    A kind that the stage does not have is empty.

    Attributes:
        inputs: that forwards' inputs come in by.
        targets: that the loss's targets come in by, of the last stage.
        gradients: that backwards' gradients come in by, of all but the last stage.
        to_next: the next stage's ``inputs``.
        to_previous: the previous stage's ``gradients``.
        replica, count: which of the stage's replicas this is, and their number.
        apart: whether each replica trains on a minibatch of its own.
    """

    inputs: Sequence[Receiver] = ()
    targets: Sequence[Receiver] = ()
    gradients: Sequence[Receiver] = ()
    to_next: Sequence[Sender] = ()
    to_previous: Sequence[Sender] = ()
    replica: int = 0
    count: int = 1
    apart: bool = False
    heard_end: Receiver | None = field(default=None, repr=False)  # which has told of the run's end

    def shares(self, header: Header) -> Sequence[float]:
        """The shares of a minibatch's samples that the microbatches here have."""
        parts, samples = header.parts, int(header.value)
        mine = shares_of(samples, parts)
        if self.count > 1:
            mine = mine[self.replica :: self.count]
            if self.apart:
                own = sum(sizes_of(samples, parts)[self.replica :: self.count])
                mine = shares_of(own, len(mine))
        return mine

    def end(self) -> None:
        """Tell the next stage that there are no more minibatches."""
        for edge in dict.fromkeys(self.to_next):
            edge.end()


class Source:
    """Takes the caller's batches, and sends their microbatches where they are used.

    Args:
        edges: of every microbatch of a minibatch, that of its input and that of its target.
        replicas: of all stages.
        split_dim: along which dimensions minibatches are cut.
        whole: whether batches are not cut; of replicas they are then the parts of a tuple.

    Attributes:
        left: whether the caller has left the run: no batch is taken any more.
    """

    def __init__(
        self,
        edges: Sequence[tuple[Sender, Sender]],
        replicas: Replicas,
        split_dim: SplitDim,
        whole: bool,
    ) -> None:
        self._edges, self._replicas = edges, replicas
        self._split_dim, self._whole = split_dim, whole
        self._batch = Buffer("the caller's batch")
        # A batch that is input and target comes from the host once.
        self._together = [
            isinstance(a, Edge) and isinstance(b, Edge) and a.target == b.target for a, b in edges
        ]
        self.left = False

    def begin(self, batches: Iterator[object], stop: Callable[[], None]) -> None:
        """A run begins; ``stop`` is to be called at its end."""
        self._batches, self._stop, self.left = batches, stop, False

    def pull(self, i: int, j: int) -> None:
        """Send the microbatches of the next batch, or end the run if there is none."""
        batch, over = None, self.left
        if not over:
            with waiting():
                try:
                    batch = next(self._batches)
                except StopIteration:
                    over = True
        if over:
            self._stop()
            for edge in {each: None for pair in self._edges for each in pair}:
                edge.end()
            return
        parts = self._split(batch, i)
        header = Header(len(parts), 0.0 if self._whole else float(samples_of(parts)))
        for part, (inputs, targets), together in zip(
            parts, self._edges, self._together, strict=False
        ):
            hand_in(inputs, part.input, self._batch, header)
            if part.target is part.input and together:
                assert isinstance(inputs, Edge)
                inputs.send_on(targets)
            else:
                hand_in(targets, part.target, self._batch, header)

    def _split(self, batch: object, i: int) -> list[Microbatch]:
        if self._whole:
            if not self._replicas.dealt:
                return split(batch, i, 1, self._split_dim)
            assert isinstance(batch, tuple)
            return [split(one, n, 1)[0] for n, one in enumerate(batch, i * len(batch))]
        parts = split(batch, i, len(self._edges), self._split_dim)
        for k, count in enumerate(self._replicas.counts):
            if len(parts) < count:
                raise ValueError(
                    f"batches[{i}]: it makes {len(parts)} microbatches, and stage {k} has {count} "
                    "replicas, each of which needs one; leave such a minibatch out, or make it "
                    "larger"
                )
        return parts


class SharedLosses:
    """A stage's part in telling all ranks the losses, which go back with gradients.

    Without replicas a minibatch's goes along with its last gradient, as it is. With them nobody
    knows it so early: every gradient goes with its own microbatch's part.

    Args:
        dealt: whether stages have replicas.
        sends_back: whether there is an earlier stage.

    Attributes:
        known: of each minibatch in flight the loss, as far as it is known.
    """

    def __init__(self, dealt: bool, sends_back: bool) -> None:
        self._dealt, self._sends_back = dealt, sends_back
        self.known: dict[int, float] = {}
        self._parts: dict[tuple[int, int], float] = {}

    def begin(self) -> None:
        self.known, self._parts = {}, {}

    def computed(self, i: int, j: int, part: Tensor, total: Tensor | None) -> None:
        """The last stage has a microbatch's part of the loss, and with the last one the sum."""
        if self._dealt:
            self._pass_on(i, j, part.item())
        elif total is not None:
            self.known[i] = total.item()

    def came_back(self, i: int, j: int, value: float) -> None:
        """A gradient has come with this."""
        if self._dealt:
            self._pass_on(i, j, value)
            value += self.known.get(i, 0.0)
        self.known[i] = value

    def _pass_on(self, i: int, j: int, part: float) -> None:
        if self._sends_back:
            self._parts[i, j] = part

    def header(self, i: int, j: int) -> Header:
        """What goes with the gradient of a microbatch."""
        return Header(1, self._parts.pop((i, j), nan) if self._dealt else self.known.get(i, nan))
