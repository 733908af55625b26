"""AsyncMesh's averaging of replicas: a part of the weights at a time, which arrives late.

A value for `spectrain_ext.passes.AverageWeights`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from spectrain_ext.errors import check_int
from spectrain_ext.passes.averaging import Averager, Averaging, Exchange, fitting, summed
from spectrain_ext.rng import mixed_seed


@dataclass(frozen=True, slots=True)
class Sparse(Averaging):
    """Averages a part of the weights after every update; the average arrives late.

    The weights in a row are cut into blocks of up to 1,024. ceil(1/share) parts with equally many
    random blocks (at least 16, or of single weights) take turns, and are then drawn again. Update t
    has part S_t. On S = S_(t - delay), with e zero at first::

        e[S]   <- decay*e[S] + (1 - decay)*(x_i(t) - x_i(t - delay))[S]
        x_i[S] <- (mean of all x_j(t - delay))[S] + e[S]

    AsyncMesh (Ajanthan et al., arXiv 2601.22442). The mean of all x_i is what is evaluated.

    Attributes:
        share: of the weights, above 0 and at most 1; 1 without delay is plain averaging.
        delay: updates until an average has arrived.
        decay: of the average of a replica's moves meanwhile, from 0 (only the last) to below 1.
        seed: of the parts.
    """

    share: float = 0.05
    delay: int = 0
    decay: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share: expected above 0 and at most 1, got {self.share}")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay: expected from 0 to below 1, got {self.decay}")
        check_int("delay", self.delay, 0)

    def begin(self, weights: Tensor, exchange: Exchange, stage: int) -> Averager:
        return _Sparse(self, weights, exchange, stage)


class _Part(NamedTuple):
    """Positions of weights in a row, by blocks."""

    size: int  # weights per block
    blocks: Tensor  # numbers of whole blocks
    end: bool  # includes the rest after whole blocks

    def of(self, row: Tensor) -> Tensor:
        """Return a copy of these weights."""
        whole = self._whole(row).index_select(0, self.blocks).reshape(-1)
        return torch.cat([whole, row[self._ends(row) :]]) if self.end else whole

    def put(self, row: Tensor, weights: Tensor) -> None:
        """Write these weights to the row."""
        n = len(self.blocks) * self.size
        self._whole(row).index_copy_(0, self.blocks, weights[:n].view(-1, self.size))
        if self.end:
            row[self._ends(row) :] = weights[n:]

    def _ends(self, row: Tensor) -> int:
        return len(row) - len(row) % self.size

    def _whole(self, row: Tensor) -> Tensor:
        return row[: self._ends(row)].view(-1, self.size)


class _Sparse:
    # Time of one core per exchange of 2^20 and 2^24 weights (share 0.05, median of 41 in turns):
    # single weights 4.5 and 98 ms; blocks of 1,024 0.46 and 3.9 ms; of 256 or 4,096 0.23 to 0.27
    # and 3.0 to 4.7 ms. At least 16 blocks keep parts about equal in size.
    _LEAST_BLOCKS, _LARGEST_BLOCK = 16, 1024

    def __init__(self, asked: Sparse, weights: Tensor, exchange: Exchange, stage: int) -> None:
        self._asked, self._exchange, self._stage = asked, exchange, stage
        self._moves = torch.zeros_like(weights)
        self._updates = 0
        # A part of the earlier weights, and a function that waits for its mean over replicas.
        self._pending: list[tuple[Tensor, Callable[[], Tensor]]] = []
        # The round, the order of the blocks, and the shorter one's position in it; -1: none.
        self._dealt: tuple[int, Tensor, int] | None = None
        self._parts = min(ceil(1 / asked.share), max(1, len(weights)))
        wanted = len(weights) // (self._parts * self._LEAST_BLOCKS)
        self._block = min(max(1, wanted), self._LARGEST_BLOCK)

    def _part(self, update: int) -> _Part:
        """Return an update's positions, which depend on the update only."""
        number, turn = divmod(update, self._parts)
        if self._dealt is None or self._dealt[0] != number:
            mixed = mixed_seed(mixed_seed(self._asked.seed, self._stage), number)
            draw = torch.Generator().manual_seed(mixed)
            blocks, rest = divmod(len(self._moves), self._block)
            order = torch.randperm(blocks + (rest > 0), generator=draw)
            short = int((order == blocks).int().argmax()) if rest else -1
            self._dealt = number, order.to(self._moves.device), short
        _, order, short = self._dealt
        own, place = order[turn :: self._parts], short // self._parts
        end = short >= 0 and short % self._parts == turn
        whole = torch.cat([own[:place], own[place + 1 :]]) if end else own  # does not wait
        return _Part(self._block, whole, end)

    def before(self, weights: Tensor) -> None: ...

    def made(self, weights: Tensor) -> None:
        own = self._part(self._updates).of(weights)
        others = self._exchange(own)
        self._pending.append((own, cache(lambda: _mean(others()))))
        self._updates += 1

    def after(self, weights: Tensor) -> Tensor | None:
        if len(self._pending) <= self._asked.delay:
            return None
        (own, mean), decay = self._pending.pop(0), self._asked.decay
        part = self._part(self._updates - 1 - self._asked.delay)
        move = (part.of(weights) - own).mul_(1 - decay)
        move.add_(part.of(self._moves), alpha=decay)
        part.put(self._moves, move)
        part.put(weights, move.add_(mean()))
        return weights

    def average(self, weights: Tensor) -> Callable[[], Tensor]:
        others = self._exchange(weights)
        return lambda: _mean(others())

    def state(self) -> tuple[dict[str, Tensor], int]:
        kept = {"moves": self._moves}
        for n, (own, mean) in enumerate(self._pending):
            kept |= {f"part{n}": own, f"mean{n}": mean()}
        return kept, self._updates

    def load_state(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        self._moves.copy_(fitting(tensors, "moves", self._moves))
        self._updates, self._pending = updates, []
        waiting = min(updates, self._asked.delay)
        for n, update in enumerate(range(updates - waiting, updates)):
            like = self._part(update).of(self._moves)
            own, mean = (fitting(tensors, f"{kind}{n}", like) for kind in ("part", "mean"))
            known = [torch.empty_like(like).copy_(mean)]
            self._pending.append((like.copy_(own), cache(partial(_mean, known))))


def _mean(parts: Sequence[Tensor]) -> Tensor:
    return summed(parts).div_(len(parts))
