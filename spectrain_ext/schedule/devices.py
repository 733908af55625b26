"""Devices: several stages on one device, which does one thing at a time: in which order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import tee

from .instructions import Instruction, Kind, ScheduleError
from .interleaving import bounded, out_of_order, receive

_FORWARD, _UPDATE, _WEIGHTS = Kind.FORWARD, Kind.UPDATE, Kind.BACKWARD_WEIGHTS
# Of what can begin at once: an update goes first, and what nobody waits for last.
_RANKS = {_UPDATE: 0, _WEIGHTS: 3}
_ALONE = frozenset((_UPDATE, _WEIGHTS))  # turns that receive nothing and send nothing
_NEVER = float("inf")


def lay_out(stages: int, chunks: int) -> list[int]:
    """The device of every stage: k mod ceil(stages/chunks)."""
    devices = -(-stages // min(chunks, stages))
    return [k % devices for k in range(stages)]


def device_order(
    actions: Sequence[Iterable[Instruction]],
    device_of: Sequence[int],
    minibatches: int | None = None,
) -> list[Iterator[tuple[int, Instruction]]]:
    """What every device does one after another, as (stage, turn), lazily.

    That is ``one_by_one``, by device. The order of a device is part of one order of all turns, in
    which everything that a turn waits for comes before it: devices that keep to it, whatever time
    their work takes, never wait for each other for ever. It is the same on every machine.

    Args:
        actions: of every stage; finite, or endless with ``minibatches``.
        device_of: the device of every stage, counted from 0.
        minibatches: the length of the run; None: all that there are.

    Raises:
        ScheduleError: as they are read: the schedule cannot be run.
        ValueError: there is not one device for every stage.
    """
    # Who reads the order of one device only lets go of the other copies, and nothing is kept.
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
    """The turns of all stages as devices begin them that are never idle without need.

    A forward, a backward and half of one take one unit of time, an update and a message none. A
    device does what can begin first; of turns that can begin at once an update, and the weights'
    half of a backward last; else a forward after a backward and a backward after a forward, else
    one of the oldest round of as many microbatches as there are devices, else a forward of the
    first stage or a backward of the last. Interleaved 1F1B comes out in the order of Megatron-LM;
    but that from three chunks and four devices on waits for some forwards, where these devices do a
    backward meanwhile and end at the same time.

    Args:
        actions: of every stage; finite, or endless with ``minibatches``.
        device_of: the device of every stage, counted from 0.
        minibatches: the length of the run; None: all that there are.

    Raises:
        ScheduleError: the schedule cannot be run.
        ValueError: there is not one device for every stage.
    """
    n = len(actions)
    if len(device_of) != n:
        raise ValueError(f"device_of: expected one device per stage, {n}, got {len(device_of)}")
    following = [bounded(actions[k], k, minibatches) for k in range(n)]
    heads = [next(stage, None) for stage in following]
    # What was sent to each stage and when it is there: gradients, activations.
    inboxes: tuple[list[deque[tuple[Instruction, int]]], ...] = (
        [deque() for _ in range(n)],
        [deque() for _ in range(n)],
    )
    sources, ends = (n - 1, 0), (0, n - 1)  # stages that receive none, and that send none
    devices = 1 + max(device_of, default=-1)
    stages_of = [[k for k in range(n) if device_of[k] == d] for d in range(devices)]
    free = [0] * devices
    done = [0] * n, [0] * n
    went_ahead = [False] * devices

    def choice(d: int) -> tuple[float, int, int, int, int]:
        """When a device can begin something, and which stage's turn that is."""
        found = (_NEVER, 0, 0, 0, -1)
        for k in stages_of[d]:
            turn = heads[k]
            if turn is None:
                continue
            ahead = turn.kind is _FORWARD
            start = free[d]
            if turn.kind not in _ALONE and k != sources[ahead]:
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
        if turn.kind not in _ALONE:
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
