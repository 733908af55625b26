"""Orders the work of devices that have several stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import tee

from .generators import bounded
from .instructions import Instruction, Kind, ScheduleError
from .order import ALONE, out_of_order, receive

_FORWARD, _UPDATE, _WEIGHTS = Kind.FORWARD, Kind.UPDATE, Kind.BACKWARD_WEIGHTS
# Among what can begin at once: updates first, what no stage waits for last.
_RANKS = {_UPDATE: 0, _WEIGHTS: 3}
_NEVER = float("inf")


def device_order(
    actions: Sequence[Iterable[Instruction]],
    device_of: Sequence[int],
    minibatches: int | None = None,
) -> list[Iterator[tuple[int, Instruction]]]:
    """Return what every device does in turn, as lazy iterators of (stage, instruction).

    Each device's order is part of one order of all instructions in which everything that an
    instruction waits for comes before it. Devices that follow it cannot deadlock, for any
    durations. It is the same on every machine.

    Args:
        actions: per stage; finite, or endless with ``minibatches``.
        device_of: the device of every stage, from 0.
        minibatches: the length of the run; None: all instructions.

    Raises:
        ScheduleError: while iterating: the schedule cannot run.
        ValueError: not one device per stage.

    Example:
        >>> from spectrain_ext.simulation import device_order, streams
        >>> (only,) = device_order(streams("1f1b", [2, 1]), [0, 0], minibatches=1)
        >>> [(stage, each.kind.value) for stage, each in only][:3]
        [(0, 'forward'), (1, 'forward'), (1, 'backward')]
    """
    # A caller that reads only one device drops the other copies, which then buffer nothing.
    copies = tee(one_by_one(actions, device_of, minibatches), 1 + max(device_of, default=-1))
    return [_of_device(copy, d, device_of) for d, copy in enumerate(copies)]


def _of_device(
    order: Iterator[tuple[int, Instruction]], d: int, device_of: Sequence[int]
) -> Iterator[tuple[int, Instruction]]:
    return (at for at in order if device_of[at[0]] == d)


def one_by_one(
    actions: Sequence[Iterable[Instruction]],
    device_of: Sequence[int],
    minibatches: int | None = None,
) -> Iterator[tuple[int, Instruction]]:
    """Yield the instructions of all stages as devices that never idle without need begin them.

    A forward, a backward and a half take one unit of time, an update and a message none. A device
    runs what can begin first. Ties: an update first and the second half of a backward last; between
    them a forward after a backward and a backward after a forward; then the oldest round of as many
    microbatches as devices; then a forward of the first stage or a backward of the last.
    Interleaved 1F1B comes out in Megatron-LM's order, except that from three chunks and four
    devices on Megatron-LM waits for some forwards where these devices do a backward and end at the
    same time.
    """
    n = len(actions)
    if len(device_of) != n:
        raise ValueError(f"device_of: expected one device per stage, {n}, got {len(device_of)}")
    following = [bounded(actions[k], k, minibatches) for k in range(n)]
    heads = [next(stage, None) for stage in following]
    # What was sent to each stage and when it arrives: gradients, activations.
    inboxes: tuple[list[deque[tuple[Instruction, int]]], ...] = (
        [deque() for _ in range(n)],
        [deque() for _ in range(n)],
    )
    sources, ends = (n - 1, 0), (0, n - 1)  # stages that receive none; that send none
    devices = 1 + max(device_of, default=-1)
    stages_of = [[k for k in range(n) if device_of[k] == d] for d in range(devices)]
    free = [0] * devices
    done = [0] * n, [0] * n
    went_ahead = [False] * devices

    def choice(d: int) -> tuple[float, int, int, int, int]:
        """Return when a device can begin something, and of which stage."""
        found = (_NEVER, 0, 0, 0, -1)
        for k in stages_of[d]:
            turn = heads[k]
            if turn is None:
                continue
            ahead = turn.kind is _FORWARD
            start = free[d]
            if turn.kind not in ALONE and k != sources[ahead]:
                inbox = inboxes[ahead][k]
                if not inbox:
                    continue
                start = max(start, inbox[0][1])
            rank = _RANKS.get(turn.kind, 1 + (ahead is went_ahead[d]))
            found = min(found, (start, rank, done[ahead][k] // devices, k if ahead else -k, k))
        return found

    choices = [choice(d) for d in range(devices)]
    while choices:
        start, _, _, _, k = min(choices)
        turn = heads[k]
        if start == _NEVER or turn is None:
            break
        yield k, turn
        heads[k] = next(following[k], None)
        d, ahead = device_of[k], turn.kind is _FORWARD
        if turn.kind is not _UPDATE:
            free[d], went_ahead[d] = int(start) + 1, ahead
        if turn.kind not in ALONE:
            done[ahead][k] += 1
            if k != sources[ahead]:
                sent, _ = inboxes[ahead][k].popleft()
                if sent[1:] != turn[1:]:
                    raise out_of_order(k, turn, sent)
            if k != ends[ahead]:
                to = k + 1 if ahead else k - 1
                inboxes[ahead][to].append((turn, free[d]))
                if device_of[to] != d:
                    choices[device_of[to]] = choice(device_of[to])
        choices[d] = choice(d)
    for k, turn in enumerate(heads):
        if turn is not None:
            raise ScheduleError(k, receive(turn), "never arrives: no device can go on")
