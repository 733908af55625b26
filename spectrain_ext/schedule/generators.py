"""The schedules: what a stage computes, without an end, made as it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, takewhile

from .instructions import (
    COMPUTE,
    Instruction,
    Kind,
    ScheduleError,
    backward,
    backward_input,
    backward_weights,
    forward,
)
from .place import Place

#: A schedule: a stage's place -> what it computes, without an end.
Generator = Callable[[Place], Iterator[Instruction]]


def asynchronous(place: Place) -> Iterator[Instruction]:
    """1F1B without a flush: a window of forwards, then backward, forward in turn.

    Four stages with their classic windows 4, 3, 2, 1, time to the right, ``b`` a backward with its
    update:

        stage 0   F0 F1 F2 F3          b0 F4 b1 F5 b2 F6
        stage 1      F0 F1 F2       b0 F3 b1 F4 b2 F5
        stage 2         F0 F1    b0 F2 b1 F3 b2 F4
        stage 3            F0 b0 F1 b1 F2 b2 F3

    The figures count microbatches, those of all minibatches in one row: q = i*M + j. The forward of
    q follows the backward of q - window, and a minibatch's update the backward of its last
    microbatch.
    """
    return chain.from_iterable(_rounds(place))


def _rounds(place: Place) -> Iterator[tuple[Instruction, ...]]:
    # Every method without a flush runs this: a call for each round, and none of the helpers.
    new, window, parts = tuple.__new__, place.window, place.microbatches
    forwards, backwards, update = Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE
    for q in range(window):
        yield (new(Instruction, (forwards, *divmod(q, parts))),)
    for q in count():
        i, j = divmod(q, parts)
        back = new(Instruction, (backwards, i, j))
        ahead = new(Instruction, (forwards, *divmod(q + window, parts)))
        yield (back, ahead) if j < parts - 1 else (back, new(Instruction, (update, i, 0)), ahead)


def flushing(place: Place) -> Iterator[Instruction]:
    """1F1B that ends a minibatch before the next begins (DAPPLE, PipeDream-Flush, Megatron-LM)."""
    parts = place.microbatches
    window = min(parts, place.window)
    for i in count():
        for q in range(parts + window):
            if q >= window:
                yield from backward(place, i, q - window)
            if q < parts:
                yield from forward(place, i, q)


def gpipe(place: Place) -> Iterator[Instruction]:
    """All forwards of a minibatch, all its backwards, one update (Huang et al., 2019)."""
    return flushing(place._replace(window=place.microbatches))


def zero_bubble(place: Place) -> Iterator[Instruction]:
    """ZB-H1 (Qi et al., 2023): 1F1B with a flush, its backwards in two halves.

    ``b`` is the half that gives the input's gradient, which the previous stage waits for, and ``w``
    the other one, which nobody waits for. Three stages, four microbatches, all of equal length:

        stage 0   F0 F1 F2       b0 w0 F3 b1 w1 b2 w2 b3 w3
        stage 1      F0 F1    b0 F2 b1 w0 F3 b2 w1 b3 w2 w3
        stage 2         F0 b0 F1 b1 F2 b2 w0 F3 b3 w1 w2 w3

    On stage k of N a ``w`` is k microbatches behind its ``b``, so that it fills the time at the end
    in which there is no gradient yet. The window, N on every stage unless less is asked for, holds
    both what awaits its ``b`` and what awaits its ``w``.
    """
    stage, _, window, parts = place
    behind = min(stage, window - 1)
    ahead = min(parts, window - behind)
    for i in count():
        for q in range(parts + ahead + behind):
            if 0 <= q - ahead < parts:
                yield from backward_input(place, i, q - ahead)
            if 0 <= q - ahead - behind < parts:
                yield from backward_weights(place, i, q - ahead - behind)
            if q < parts:
                yield from forward(place, i, q)


def asynchronous_halves(place: Place) -> Iterator[Instruction]:
    """As ``asynchronous``, with backwards in two halves: the gradient is sent between them.

    With forwards and halves of equal length that hides messages of half a forward each, for which
    ``asynchronous`` needs wider windows.
    """
    for instruction in asynchronous(place):
        kind, i, j = instruction
        if kind is Kind.BACKWARD:
            yield from backward_input(place, i, j)
            # At once: without a flush there is no time to fill, and if it were put off the weights
            # of later forwards would only be older.
            yield Instruction(Kind.BACKWARD_WEIGHTS, i, j)
        else:
            yield instruction


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
        parts = place.microbatches
        begun = 0
        for q in count():
            i, j = divmod(q, parts)
            if self.flushes:
                due = i * parts + min(parts, self._begun(place, j))
            else:
                due = self._begun(place, q)
            while begun < due:
                yield from forward(place, *divmod(begun, parts))
                begun += 1
            yield from backward(place, i, j)

    def window(self, k: int, n: int, m: int) -> int:
        """The most microbatches that stage k of n ever has in flight."""
        place = Place(k, n, 1, m)
        if self.flushes:
            return max(min(self._begun(place, q), m) - q for q in range(m))
        return max(self._begun(place, q) - q for q in range(-(-n // min(self.chunks, n))))

    def _begun(self, place: Place, q: int) -> int:
        v = min(self.chunks, place.stages)
        p = -(-place.stages // v)
        chunk, device = divmod(place.stage, p)
        warmup = (v - 1) * p + 2 * (p - device - 1)
        last = warmup + q // p * p * v + (v - 1 - chunk) * p + q % p  # by the device's own numbers
        rounds, rest = divmod(last - chunk * p, p * v)
        return rounds * p + min(p, rest + 1)


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
        k, n, _, m = place
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
        """The most microbatches that stage k of n ever has in flight."""
        return m + min(m, n // 2 - k) if k < n // 2 else min(m, n - k)


GENERATORS: dict[str, Generator] = {
    "1f1b-async": asynchronous,
    "gpipe": gpipe,
    "1f1b": flushing,
    "zb-h1": zero_bubble,
    "zb-h1-async": asynchronous_halves,
}

#: Those that finish a minibatch on all stages before the next one begins: synchronous training.
FLUSHING = frozenset({"gpipe", "1f1b", "zb-h1"})


def find_generator(schedule: str | Generator) -> Generator:
    """The schedule of that name; a generator is returned as it is.

    Raises:
        ValueError: there is none; the message lists those that exist.
        TypeError: neither a name nor a function.
    """
    if callable(schedule):
        return schedule
    if not isinstance(schedule, str):
        raise TypeError(f"schedule: expected a name or a generator, got {type(schedule).__name__}")
    if schedule not in GENERATORS:
        raise ValueError(f"schedule: there is no {schedule!r}; there are {', '.join(GENERATORS)}")
    return GENERATORS[schedule]


def name_of(schedule: str | Generator) -> str:
    """What people call it; the same in every process."""
    if isinstance(schedule, str):
        return schedule
    named = schedule if hasattr(schedule, "__qualname__") else type(schedule)
    return f"{named.__module__}.{named.__qualname__}"


def flushes(schedule: str | Generator) -> bool:
    """Whether a minibatch is finished before the next begins: of a generator, on stage 0 of 3."""
    if isinstance(schedule, str):
        return schedule in FLUSHING
    said = getattr(schedule, "flushes", None)
    if isinstance(said, bool):
        return said
    try:
        # Of three microbatches that may be in flight the third is the next minibatch's.
        first = next(a for a in schedule(Place(0, 3, 3, 2)) if a.minibatch or a.kind is Kind.UPDATE)
    except Exception:  # one that is made for other numbers of stages, or is no schedule at all
        return False
    return first.minibatch == 0


def takes_window(schedule: str | Generator) -> bool:
    """Whether a window can be chosen for it: it does not flush, and has no windows of its own."""
    return not (flushes(schedule) or hasattr(schedule, "window"))


def put_off(schedule: str | Generator, place: Place) -> int:
    """The most microbatches, up to a stage's steady state, that have sent their gradient while
    their backward has not ended: 1, or more where the weights' halves come later."""
    end = Instruction(Kind.UPDATE, place.window // place.microbatches + 1)
    now, most = 0, 1
    for action in takewhile(end.__ne__, find_generator(schedule)(place)):
        now += (action.kind is Kind.BACKWARD_INPUT) - (action.kind is Kind.BACKWARD_WEIGHTS)
        most = max(most, now)
    return most


def streams(
    schedule: str | Generator, windows: Sequence[int], microbatches: int = 1
) -> list[Iterator[Instruction]]:
    """What every stage computes, without an end.

    Args:
        schedule: a name in ``GENERATORS``, or a generator.
        windows: the window of each stage, in microbatches; their number is that of the stages.
        microbatches: parts per minibatch.

    Raises:
        ValueError: there is no schedule of that name; a window or ``microbatches`` is below 1.
    """
    generate = find_generator(schedule)
    if microbatches < 1:
        raise ValueError(f"microbatches: expected at least 1, got {microbatches}")
    for k, window in enumerate(windows):
        if window < 1:
            raise ValueError(f"windows[{k}]: expected at least 1 microbatch, got {window}")
    n = len(windows)
    return [generate(Place(k, n, window, microbatches)) for k, window in enumerate(windows)]


# What an endless stream may hold beyond the last minibatch of a run before it ends that one.
_BEYOND = 200_000


def bounded(
    instructions: Iterable[Instruction], stage: int, minibatches: int | None = None
) -> Iterator[Instruction]:
    """A stage's instructions in a run of some minibatches, lazily; None: all that there are."""
    end = -1 if minibatches is None else minibatches
    beyond = 0
    if not end:
        return
    for instruction in instructions:
        kind, i, _ = instruction
        if kind not in COMPUTE:
            raise ScheduleError(
                stage,
                instruction,
                "a schedule is made of forwards, backwards and updates only, as forward(place, i, "
                "j) and backward(place, i, j) give them; loads, receives and sends follow",
            )
        if i >= end > 0:
            beyond += 1
            if beyond > _BEYOND or kind is Kind.UPDATE:
                wanted = Instruction(Kind.UPDATE, end - 1)
                raise ScheduleError(stage, instruction, f"expected the {wanted} before it")
            continue
        yield instruction
        if kind is Kind.UPDATE and i + 1 == end:
            return
