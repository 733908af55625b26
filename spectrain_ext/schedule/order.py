"""Runs all stages' instructions against each other in a possible order, and checks them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import tee

from .generators import Generator, bounded
from .instructions import Instruction, Kind, ScheduleError
from .ledger import Count, Ledger
from .place import Place
from .reading import Entries, Rules

_FORWARD, _UPDATE, _WEIGHTS = Kind.FORWARD, Kind.UPDATE, Kind.BACKWARD_WEIGHTS
_ALONE = frozenset((_UPDATE, _WEIGHTS))  # they neither receive nor send
# Among what a device can begin at once: updates first, what no stage waits for last.
_RANKS = {_UPDATE: 0, _WEIGHTS: 3}
_NEVER = float("inf")


def receive(instruction: Instruction) -> Instruction:
    forward = instruction.kind is _FORWARD
    kind = Kind.RECEIVE_ACTIVATION if forward else Kind.RECEIVE_GRADIENT
    return Instruction(kind, *instruction[1:])


def _sender(k: int, instruction: Instruction) -> int:
    return k - 1 if instruction.kind is _FORWARD else k + 1


def device_order(
    instructions: Sequence[Iterable[Instruction]],
    device_of: Sequence[int],
    minibatches: int | None = None,
) -> Iterator[tuple[int, Instruction]]:
    """Yield what devices do, lazily as (stage, instruction), in an order without deadlocks.

    Everything that an instruction waits for comes before it, so devices that follow the order of
    their own stages' instructions cannot deadlock, for any durations. It is the same on every
    machine, and devices do not idle without need: a forward, a backward and a half take one unit of
    time, an update and a message none. A device runs what can begin first. No stage is an update
    ahead of another one of its device. Ties: an update first and the second half of a backward
    last; between them a forward after a backward and a backward after a forward; then the oldest
    round of as many microbatches as devices; then a forward of the first stage or a backward of the
    last. Interleaved 1F1B comes out in Megatron-LM's order, except that from three chunks and four
    devices on Megatron-LM waits for some forwards where these devices do a backward and end at the
    same time.

    Args:
        instructions: the instructions of each stage; finite, or endless with ``minibatches``.
        device_of: the device of every stage, from 0.
        minibatches: the length of the run; None: all instructions.

    Raises:
        ScheduleError: while iterating: the schedule cannot run.
        ValueError: not one device per stage.

    Example:
        >>> from spectrain_ext.simulation import device_order, streams
        >>> order = device_order(streams("1f1b", [2, 1]), [0, 0], minibatches=1)
        >>> [(stage, each.kind.value) for stage, each in order][:3]
        [(0, 'forward'), (1, 'forward'), (1, 'backward')]
    """
    n = len(instructions)
    if len(device_of) != n:
        raise ValueError(f"device_of: expected one device per stage, {n}, got {len(device_of)}")
    following = [bounded(instructions[k], k, minibatches) for k in range(n)]
    heads = [next(stage, None) for stage in following]
    # In each of these pairs, backwards are at index False and forwards at True.
    inboxes: tuple[list[deque[tuple[Instruction, int]]], ...] = (  # with the time of arrival
        [deque() for _ in range(n)],
        [deque() for _ in range(n)],
    )
    done = [0] * n, [0] * n
    updates = [0] * n
    sources, ends = (n - 1, 0), (0, n - 1)  # stages that receive none; that send none
    devices = 1 + max(device_of, default=-1)
    stages_of = [[k for k in range(n) if device_of[k] == d] for d in range(devices)]
    free = [0] * devices
    went_ahead = [False] * devices  # whether the last one was a forward

    def choice(d: int) -> tuple[float, int, int, int, int]:
        """Return when a device can begin something, and of which stage."""
        found = (_NEVER, 0, 0, 0, -1)
        for k in stages_of[d]:
            instruction = heads[k]
            if instruction is None:
                continue
            ahead = instruction.kind is _FORWARD
            start = free[d]
            beside = [updates[m] for m in stages_of[d] if heads[m] is not None]
            if instruction.kind is _UPDATE and updates[k] > min(beside):
                continue
            if instruction.kind not in _ALONE and k != sources[ahead]:
                inbox = inboxes[ahead][k]
                if not inbox:
                    continue
                start = max(start, inbox[0][1])
            rank = _RANKS.get(instruction.kind, 1 + (ahead is went_ahead[d]))
            found = min(found, (start, rank, done[ahead][k] // devices, k if ahead else -k, k))
        return found

    choices = [choice(d) for d in range(devices)]
    while choices:
        start, _, _, _, k = min(choices)
        instruction = heads[k]
        if start == _NEVER or instruction is None:
            break
        d, ahead = device_of[k], instruction.kind is _FORWARD
        if instruction.kind not in _ALONE and k != sources[ahead]:
            sent, _ = inboxes[ahead][k].popleft()
            if sent[1:] != instruction[1:]:  # one of the two may have halves
                reason = (
                    f"stage {_sender(k, instruction)} sends minibatch {sent.minibatch}, microbatch "
                    f"{sent.microbatch} before it or instead of it"
                )
                raise ScheduleError(k, receive(instruction), reason)
        yield k, instruction
        heads[k] = next(following[k], None)
        if instruction.kind is _UPDATE:
            updates[k] += 1
        else:
            free[d], went_ahead[d] = int(start) + 1, ahead
        if instruction.kind not in _ALONE:
            done[ahead][k] += 1
            if k != ends[ahead]:
                to = k + 1 if ahead else k - 1
                inboxes[ahead][to].append((instruction, free[d]))
                if device_of[to] != d:
                    choices[device_of[to]] = choice(device_of[to])
        choices[d] = choice(d)
    for k, instruction in enumerate(heads):
        if instruction is not None:
            raise _stuck(heads, k, instruction)
    for inboxes_of_kind in inboxes:
        for k, inbox in enumerate(inboxes_of_kind):
            if inbox:
                raise ScheduleError(k, receive(inbox[0][0]), "missing: it has been sent")


def _stuck(heads: Sequence[Instruction | None], k: int, waits: Instruction) -> ScheduleError:
    """Return why stage k waits forever: the stage at the end of the chain of waiting ones."""
    sender = _sender(k, waits)
    other = heads[sender]
    if other is None:
        reason = f"stage {sender} ends without sending it"
    elif _sender(sender, other) != k:
        return _stuck(heads, sender, other)
    else:
        reason = (
            f"a deadlock: stage {sender}, which sends it, waits at {receive(other)}, which stage "
            f"{k} sends later"
        )
    return ScheduleError(k, receive(waits), reason)


# Checks and counts.


def open_ledgers(
    streams: Sequence[Iterable[Instruction]],
    rules: Sequence[Rules] | None = None,
    windows: Sequence[int] | None = None,
    microbatches: int | None = None,
) -> tuple[list[Iterable[Instruction]], list[Ledger]]:
    """Return the streams and a ledger per stage; without rules all read the newest weights."""
    n = len(streams)
    for name, values in (("rules", rules), ("windows", windows)):
        if values is not None and len(values) != n:
            raise ValueError(f"{name}: expected one per stage, {n}, got {len(values)}")
    rules = [Rules()] * n if rules is None else rules
    streams, most = list(streams), [None] * n if windows is None else windows
    entries: dict[int, Entries] = {}
    for k, rule in enumerate(rules):
        if rule.forward_reads == "entry":
            streams[0], copy = tee(streams[0])
            entries[k] = Entries(copy)
    return streams, [
        Ledger(k, rules[k], window=most[k], microbatches=microbatches, entries=entries.get(k))
        for k in range(n)
    ]


def validate(
    instructions: Sequence[Iterable[Instruction]],
    *,
    minibatches: int | None = None,
    microbatches: int | None = None,
    windows: Sequence[int] | None = None,
    rules: Sequence[Rules] | None = None,
) -> list[Count]:
    """Run the instructions of all stages against each other without computing, and count.

    Checks: there are only forwards, backwards and updates; what a stage waits for is sent, and what
    is sent is received, in the same order, without deadlocks; every microbatch has one forward,
    then one backward, whole or in halves; every minibatch has an update after its last backward, in
    order; windows are kept; no version of the weights is read before it exists or after it was
    dropped.

    Args:
        instructions: the instructions of each stage; finite, or endless with ``minibatches``. Read
            lazily: memory does not grow with the length of the run.
        minibatches: the length of the run.
        microbatches: the number in every minibatch; None: any.
        windows: the most microbatches in flight per stage; None: any number.
        rules: which weights every stage reads; None: the newest.

    Returns:
        The count of every stage.

    Raises:
        ScheduleError: names the stage, the instruction, and what was expected.
        ValueError: ``windows`` or ``rules`` has another length than ``instructions``.

    Example:
        >>> from spectrain_ext.simulation import streams, validate
        >>> counts = validate(streams("1f1b-async", [3, 2, 1]), minibatches=100, windows=[3, 2, 1])
        >>> [max(count.delays) for count in counts]
        [2, 1, 0]
    """
    streams, ledgers = open_ledgers(instructions, rules, windows, microbatches)
    for k, instruction in device_order(streams, range(len(streams)), minibatches):
        ledgers[k].enter(instruction)
    return [ledger.close(minibatches) for ledger in ledgers]


def check_generator(generate: Generator, places: Sequence[Place]) -> None:
    """Raise unless a schedule can run and each update has the gradients of one minibatch.

    Example:
        >>> from spectrain_ext.schedule import Place, WPipe
        >>> from spectrain_ext.simulation import check_generator
        >>> check_generator(WPipe(), [Place(0, 2, 2), Place(1, 2, 1)])
    """
    microbatches = places[0].microbatches
    # Enough to fill any window and reach the steady state.
    minibatches = max(place.window for place in places) // microbatches + 6
    for place in places:
        first = next(iter(generate(place)), None)
        if first is not None and not isinstance(first, Instruction):
            raise TypeError(
                f"expected instructions one by one, got {first!r} for stage {place.stage} of "
                f"{place.stages}: 'yield from forward(place, i, j)' gives those of a forward"
            )
    windows = [place.window for place in places]
    made = [generate(place) for place in places]
    validate(made, minibatches=minibatches, microbatches=microbatches, windows=windows)
    # Both halves of a backward must be between the same updates: they read one version, and the
    # first may add gradients too, of weights that cannot wait.
    for place in places:
        updates = 0
        for instruction in bounded(generate(place), place.stage, minibatches):
            updates += instruction.kind is _UPDATE
            if instruction.kind not in (_FORWARD, _UPDATE) and instruction.minibatch != updates:
                due = Instruction(_UPDATE, updates)
                raise ScheduleError(place.stage, instruction, f"expected {due} before it")
