"""Schedules for several stages per device: stage k of N, v to a device, lies on k mod ceil(N/v)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count

from .generators import flushing
from .instructions import Instruction, backward, forward
from .place import Place


@dataclass(frozen=True)
class Interleaved:
    """Interleaved 1F1B (Narayanan et al., 2021, arXiv 2104.04473), a schedule as a value.

    Device d of P = N/v works on P microbatches in one of its chunks 0 to v-1, then in the next;
    backwards take the chunks in reverse. It begins with ``W = (v-1)*P + 2*(P-d-1)`` forwards, then
    does a forward and a backward in turn. A stage's own actions are those of its chunk c: backward
    q is the device's number ``b = q//P*P*v + (v-1-c)*P + q%P``, and before it come all forwards of
    the stage that are among the device's first W + b + 1.

    Of stages or microbatches that do not fill the last round the others' order stays as it is; only
    with multiples of v and P is a device idle for no more than (P-1)/v microbatches per flush.
    Without a flush microbatches count on over all minibatches. One chunk per device without a flush
    is ``1f1b-async`` with wide windows, 2*(N-k) - 1.

    Args:
        chunks: the stages v on every device, at least 1.
        flushes: whether every minibatch is finished before the next begins.
    """

    chunks: int = 2
    flushes: bool = True

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise ValueError(f"chunks: expected at least 1 stage per device, got {self.chunks}")

    def __call__(self, place: Place) -> Iterator[Instruction]:
        """The endless actions of a stage, whatever the window of its place."""
        return chain.from_iterable(self._runs(place))

    def window(self, k: int, n: int, m: int) -> int:
        """The most microbatches that stage k of n ever has in flight."""
        place = Place(k, n, 1, m)
        if self.flushes:
            return max(min(self._begun(place, q), m) - q for q in range(m))
        return max(self._begun(place, q) - q for q in range(-(-n // min(self.chunks, n))))

    def _begun(self, place: Place, q: int) -> int:
        """The forwards before backward q."""
        v = min(self.chunks, place.stages)
        p = -(-place.stages // v)
        chunk, device = divmod(place.stage, p)
        warmup = (v - 1) * p + 2 * (p - device - 1)
        last = warmup + q // p * p * v + (v - 1 - chunk) * p + q % p  # by the device's own numbers
        rounds, rest = divmod(last - chunk * p, p * v)
        return rounds * p + min(p, rest + 1)

    def _runs(self, place: Place) -> Iterator[tuple[Instruction, ...]]:
        parts = place.microbatches
        begun = 0
        for q in count():
            i, j = divmod(q, parts)
            if self.flushes:
                due = i * parts + min(parts, self._begun(place, j))
            else:
                due = self._begun(place, q)
            while begun < due:
                yield forward(place, *divmod(begun, parts))
                begun += 1
            yield backward(place, i, j)


@dataclass(frozen=True)
class WPipe:
    """WPipe's schedule (Yang et al., ICLR 2022): two groups of stages, which update in turn.

    Device d of P = N/2 has stage d, of group 1, and d + P, of group 2. In group 1 the forwards of
    the next minibatch come before the backwards of this one, forward j before backward j: all are
    late by one update, and there are two versions. Group 2 finishes a minibatch before it begins
    the next, and is never late: while it is about to, its device works for group 1. Within a group
    it goes as in 1F1B, with windows P - k and N - k. With as many microbatches as devices no device
    is ever idle, and no more than N - k microbatches are in flight on stage k.
    """

    def __call__(self, place: Place) -> Iterator[Instruction]:
        """The endless actions of a stage, whatever the window of its place."""
        k, n = place.stage, place.stages
        if k >= n // 2:
            return flushing(place._replace(window=n - k))
        return chain.from_iterable(self._moved(place))

    def window(self, k: int, n: int, m: int) -> int:
        """The most microbatches that stage k of n ever has in flight."""
        return m + min(m, n // 2 - k) if k < n // 2 else min(m, n - k)

    def _moved(self, place: Place) -> Iterator[tuple[Instruction, ...]]:
        k, n, _, m = place
        ahead = min(m, n // 2 - k)
        for j in range(m):
            yield forward(place, 0, j)
        for i in count():
            for q in range(m + ahead):
                if q >= ahead:
                    yield backward(place, i, q - ahead)
                if q < m:
                    yield forward(place, i + 1, q)
