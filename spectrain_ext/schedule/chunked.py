"""Generates the schedules with several stages per device, which are values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from .generators import flushing
from .instructions import Instruction, backward, forward
from .place import Place


@dataclass(frozen=True)
class Interleaved:
    """Interleaved 1F1B (Narayanan et al., 2021, arXiv 2104.04473), a schedule as a value.

    Device d of P = N/v works on P microbatches in one of its chunks 0 to v-1, then in the next;
    backwards take the chunks in reverse. It begins with ``W = (v-1)*P + 2*(P-d-1)`` forwards, then
    alternates forwards and backwards. The instructions of a stage are those of its chunk c:
    backward q has the device's number ``b = q//P*P*v + (v-1-c)*P + q%P``, and all forwards of the
    stage among the device's first W + b + 1 come before it.

    If stages or microbatches do not fill the last round, the order of the others stays the same;
    only multiples of v and P limit the idle time of a device to (P-1)/v microbatches per flush.
    Without a flush microbatches count over all minibatches. One chunk per device without a flush is
    ``1f1b-async`` with wide windows, 2*(N-k) - 1.

    Args:
        chunks: the stages v on every device, at least 1.
        flushes: whether every minibatch ends before the next begins.

    Example:
        >>> from spectrain_ext.schedule import Interleaved
        >>> from spectrain_ext.simulation import streams, validate
        >>> schedule = Interleaved(chunks=2)
        >>> windows = [schedule.window(k, 4, 4) for k in range(4)]
        >>> counts = validate(streams(schedule, windows, 4), minibatches=5)
        >>> [count.in_flight for count in counts] == windows
        True
    """

    chunks: int = 2
    flushes: bool = True

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise ValueError(f"chunks: expected at least 1 stage per device, got {self.chunks}")

    def __call__(self, place: Place) -> Iterator[Instruction]:
        """Yield a stage's endless instructions; the window of the place is ignored."""
        microbatches = place.microbatches
        begun = 0
        for q in count():
            i, j = divmod(q, microbatches)
            if self.flushes:
                due = i * microbatches + min(microbatches, self._begun(place, j))
            else:
                due = self._begun(place, q)
            while begun < due:
                yield from forward(place, *divmod(begun, microbatches))
                begun += 1
            yield from backward(place, i, j)

    def window(self, k: int, n: int, m: int) -> int:
        """Return the most microbatches that stage k of n ever has in flight."""
        place = Place(k, n, 1, m)
        if self.flushes:
            return max(min(self._begun(place, q), m) - q for q in range(m))
        return max(self._begun(place, q) - q for q in range(-(-n // min(self.chunks, n))))

    def _begun(self, place: Place, q: int) -> int:
        v = min(self.chunks, place.stages)
        p = -(-place.stages // v)
        chunk, device = divmod(place.stage, p)
        warmup = (v - 1) * p + 2 * (p - device - 1)
        last = warmup + q // p * p * v + (v - 1 - chunk) * p + q % p  # in the device's numbers
        rounds, rest = divmod(last - chunk * p, p * v)
        return rounds * p + min(p, rest + 1)


@dataclass(frozen=True)
class WPipe:
    """WPipe's schedule (Yang et al., ICLR 2022): two groups of stages that update in turn.

    Device d of P = N/2 has stage d, of group 1, and stage d + P, of group 2. In group 1 forward j
    of the next minibatch comes before backward j of this one: all forwards are late by one update,
    and there are two versions. Group 2 ends each minibatch before the next and is never late;
    meanwhile its devices work for group 1. Within a group the order is that of 1F1B, with windows P
    - k and N - k. With as many microbatches as devices no device idles, and stage k has at most N -
    k in flight.

    Example:
        >>> from spectrain_ext.schedule import WPipe
        >>> from spectrain_ext.simulation import streams, validate
        >>> counts = validate(streams(WPipe(), [2, 1], 1), minibatches=10)
        >>> [max(count.delays) for count in counts]
        [1, 0]
    """

    def __call__(self, place: Place) -> Iterator[Instruction]:
        """Yield a stage's endless instructions; the window of the place is ignored."""
        k, n, m = place.stage, place.stages, place.microbatches
        if k >= n // 2:
            yield from flushing(place._replace(window=n - k))  # without an end
        ahead = min(m, n // 2 - k)
        for j in range(m):
            yield from forward(place, 0, j)
        for i in count():
            for q in range(m + ahead):
                if q >= ahead:
                    yield from backward(place, i, q - ahead)
                if q < m:
                    yield from forward(place, i + 1, q)

    def window(self, k: int, n: int, m: int) -> int:
        """Return the most microbatches that stage k of n ever has in flight."""
        return m + min(m, n // 2 - k) if k < n // 2 else min(m, n - k)
