"""Generates the schedules: endless streams of what a stage computes, made lazily."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count, takewhile
from typing import Literal

from spectrain_ext.errors import unknown

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

#: A schedule: from a stage's place to its endless instructions.
Generator = Callable[[Place], Iterator[Instruction]]


def asynchronous(place: Place) -> Iterator[Instruction]:
    """1F1B without a flush: a window of forwards, then backwards and forwards in turn.

    Four stages with classic windows 4, 3, 2, 1, time to the right, ``b`` a backward with its
    update:

        stage 0   F0 F1 F2 F3          b0 F4 b1 F5 b2 F6
        stage 1      F0 F1 F2       b0 F3 b1 F4 b2 F5
        stage 2         F0 F1    b0 F2 b1 F3 b2 F4
        stage 3            F0 b0 F1 b1 F2 b2 F3

    Numbers count microbatches over all minibatches: q = i*M + j. The forward of q follows the
    backward of q - window, and a minibatch's update the backward of its last microbatch.
    """
    return _rounds(place, backward)


def asynchronous_halves(place: Place) -> Iterator[Instruction]:
    """``asynchronous`` with backwards in two halves and the gradient sent between them."""
    # With forwards and halves of equal length this hides messages of half a forward each, for which
    # ``asynchronous`` needs wider windows.
    return _rounds(place, _both_halves)


def _rounds(
    place: Place, backward: Callable[[Place, int, int], Iterable[Instruction]]
) -> Iterator[Instruction]:
    window, microbatches = place.window, place.microbatches
    for q in range(window):
        yield from forward(place, *divmod(q, microbatches))
    for q in count():
        yield from backward(place, *divmod(q, microbatches))
        yield from forward(place, *divmod(q + window, microbatches))


def _both_halves(place: Place, i: int, j: int) -> Iterator[Instruction]:
    yield from backward_input(place, i, j)
    # At once: without a flush there is no time to fill, and waiting would only make the weights of
    # later forwards older.
    yield from backward_weights(place, i, j)


def flushing(place: Place) -> Iterator[Instruction]:
    """1F1B that ends each minibatch before the next (DAPPLE, PipeDream-Flush, Megatron-LM)."""
    microbatches = place.microbatches
    window = min(microbatches, place.window)
    for i in count():
        for q in range(microbatches + window):
            if q >= window:
                yield from backward(place, i, q - window)
            if q < microbatches:
                yield from forward(place, i, q)


def gpipe(place: Place) -> Iterator[Instruction]:
    """All forwards of a minibatch, all its backwards, one update (Huang et al., 2019)."""
    return flushing(place._replace(window=place.microbatches))


def zero_bubble(place: Place) -> Iterator[Instruction]:
    """ZB-H1 (Qi et al., 2023): 1F1B with a flush and backwards in two halves.

    ``b`` computes the input's gradient, for which the previous stage waits, ``w`` the weights'
    gradients, for which no stage waits. Three stages, four microbatches, equal lengths:

        stage 0   F0 F1 F2       b0 w0 F3 b1 w1 b2 w2 b3 w3
        stage 1      F0 F1    b0 F2 b1 w0 F3 b2 w1 b3 w2 w3
        stage 2         F0 b0 F1 b1 F2 b2 w0 F3 b3 w1 w2 w3

    On stage k of N a ``w`` is k microbatches behind its ``b``, which fills the time at the end when
    no gradient has arrived. The window, by default N on every stage, holds microbatches that await
    their ``b`` or their ``w``.
    """
    stage, window, microbatches = place.stage, place.window, place.microbatches
    behind = min(stage, window - 1)
    ahead = min(microbatches, window - behind)
    for i in count():
        for q in range(microbatches + ahead + behind):
            if 0 <= q - ahead < microbatches:
                yield from backward_input(place, i, q - ahead)
            if 0 <= q - ahead - behind < microbatches:
                yield from backward_weights(place, i, q - ahead - behind)
            if q < microbatches:
                yield from forward(place, i, q)


ScheduleName = Literal["1f1b-async", "gpipe", "1f1b", "zb-h1", "zb-h1-async"]
GENERATORS: dict[str, Generator] = {
    "1f1b-async": asynchronous,
    "gpipe": gpipe,
    "1f1b": flushing,
    "zb-h1": zero_bubble,
    "zb-h1-async": asynchronous_halves,
}

#: Synchronous schedules: a minibatch ends on all stages before the next begins.
FLUSHING = frozenset({"gpipe", "1f1b", "zb-h1"})


def find_generator(schedule: str | Generator) -> Generator:
    """Return the schedule of a name, or a generator unchanged."""
    if callable(schedule):
        return schedule
    if not isinstance(schedule, str):
        raise TypeError(f"schedule: expected a name or a generator, got {type(schedule).__name__}")
    if schedule not in GENERATORS:
        raise ValueError(f"schedule: {unknown(schedule, GENERATORS)}")
    return GENERATORS[schedule]


def name_of(schedule: str | Generator) -> str:
    """Return a schedule's name, the same in every process."""
    if isinstance(schedule, str):
        return schedule
    named = schedule if hasattr(schedule, "__qualname__") else type(schedule)
    return f"{named.__module__}.{named.__qualname__}"


def flushes(schedule: str | Generator) -> bool:
    """Whether a minibatch ends before the next begins; a generator is tried on stage 0 of 3."""
    if isinstance(schedule, str):
        return schedule in FLUSHING
    attribute = getattr(schedule, "flushes", None)
    if isinstance(attribute, bool):
        return attribute
    try:
        # With three microbatches in flight, the third belongs to the next minibatch.
        first = next(a for a in schedule(Place(0, 3, 3, 2)) if a.minibatch or a.kind is Kind.UPDATE)
    except Exception:  # made for other numbers of stages, or not a schedule
        return False
    return first.minibatch == 0


def takes_window(schedule: str | Generator) -> bool:
    """Whether a window can be chosen: it does not flush and has no windows of its own."""
    return not (flushes(schedule) or hasattr(schedule, "window"))


def put_off(schedule: str | Generator, place: Place) -> int:
    """Return the most microbatches whose gradient is sent before their backward has ended."""
    # It is 1, or more if the second halves come later; counted up to a stage's steady state.
    end = Instruction(Kind.UPDATE, place.window // place.microbatches + 1)
    now, most = 0, 1
    for instruction in takewhile(end.__ne__, find_generator(schedule)(place)):
        now += (instruction.kind is Kind.BACKWARD_INPUT) - (
            instruction.kind is Kind.BACKWARD_WEIGHTS
        )
        most = max(most, now)
    return most


# Instructions of later minibatches that a stream may yield before a run's last update.
_BEYOND = 200_000


def bounded(
    instructions: Iterable[Instruction], stage: int, minibatches: int | None = None
) -> Iterator[Instruction]:
    """Yield a stage's instructions in a run of some minibatches, lazily; None: all of them."""
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
