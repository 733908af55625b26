"""Interleaving: all stages' instructions run against each other, in an order that can be run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from .instructions import COMPUTE, Instruction, Kind, ScheduleError

_FORWARD, _UPDATE, _WEIGHTS = Kind.FORWARD, Kind.UPDATE, Kind.BACKWARD_WEIGHTS

# What an endless stream may hold beyond the last minibatch of a run before it ends that one.
_BEYOND = 200_000
_RUN = 4096  # instructions after which a stage that waits for nobody lets the others go on


def bounded(
    instructions: Iterable[Instruction], stage: int, minibatches: int | None = None
) -> Iterator[Instruction]:
    """The instructions of a stage's schedule in a run of some minibatches, lazily.

    Args:
        instructions: finite, or endless with ``minibatches``.
        stage: whose they are.
        minibatches: the length of the run: instructions of later minibatches are left out, and
            nothing is read after the last update. None: all that there are.

    Raises:
        ScheduleError: one that is no computation: a receive, a send or a load belongs to no
            schedule; or there is no end of a minibatch.
    """
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
            if beyond > _BEYOND or kind is _UPDATE:
                wanted = Instruction(_UPDATE, end - 1)
                raise ScheduleError(stage, instruction, f"expected the {wanted} before it")
            continue
        yield instruction
        if kind is _UPDATE and i + 1 == end:
            return


class _Stage:
    """One stage's instructions, and what its neighbours have sent it: theirs, in order."""

    def __init__(self, instructions: Iterator[Instruction], last: bool, first: bool) -> None:
        self.instructions = instructions
        self.activations: deque[Instruction] | None = None if first else deque()
        self.gradients: deque[Instruction] | None = None if last else deque()
        self.waiting: Instruction | None = None
        self.finished = False


def interleave(
    schedules: Sequence[Iterable[Instruction]], minibatches: int | None = None
) -> Iterator[tuple[int, list[Instruction]]]:
    """The instructions of all stages in an order in which they can run, as (stage, some of them).

    A forward or a backward waits for that of the neighbour that it gets its input from; nobody
    waits for a send. What can run does not depend on the order that is chosen, so that a schedule
    which ends here ends on any machine.

    Args:
        schedules: of every stage; finite, or endless with ``minibatches``. Read lazily: no more is
            kept than what is on its way from one stage to the next.
        minibatches: the length of the run.

    Raises:
        ScheduleError: what a stage waits for is never sent, or what is sent is never received; the
            two ends of an edge differ in their order; stages wait for each other for ever; or
            ``bounded`` raises it.
    """
    n = len(schedules)
    stages = [_Stage(bounded(schedules[k], k, minibatches), k == n - 1, k == 0) for k in range(n)]
    # Down and up again: activations travel the whole way in one sweep, and so do gradients.
    sweep = [*range(n), *range(n - 2, 0, -1)]
    progress = True
    while progress:
        progress = False
        for k in sweep:
            run = _advance(stages, k)
            if run:
                progress = True
                yield k, run
    for k, stage in enumerate(stages):
        if not stage.finished:
            raise _stuck(stages, k)
    for k, stage in enumerate(stages):
        for edge, kind in (
            (stage.activations, Kind.RECEIVE_ACTIVATION),
            (stage.gradients, Kind.RECEIVE_GRADIENT),
        ):
            if edge:
                missing = Instruction(kind, *edge[0][1:])
                raise ScheduleError(k, missing, "missing: it has been sent")


def _advance(stages: list[_Stage], k: int) -> list[Instruction]:
    """What stage k can do until it has to wait."""
    stage = stages[k]
    to_next = stages[k + 1].activations if stage.gradients is not None else None
    to_previous = stages[k - 1].gradients if stage.activations is not None else None
    activations, gradients, following = stage.activations, stage.gradients, stage.instructions
    run: list[Instruction] = []
    instruction = stage.waiting or next(following, None)
    stage.waiting = None
    while instruction is not None:
        kind = instruction[0]
        if kind is not _UPDATE and kind is not _WEIGHTS:
            if kind is _FORWARD:
                inputs, outputs = activations, to_next
            else:
                inputs, outputs = gradients, to_previous
            if inputs is not None:
                if not inputs:
                    stage.waiting = instruction
                    return run
                sent = inputs.popleft()
                # one may have halves, the other not
                if sent != instruction and sent[1:] != instruction[1:]:
                    raise out_of_order(k, instruction, sent)
            if outputs is not None:
                outputs.append(instruction)
        run.append(instruction)
        if len(run) >= _RUN:
            return run
        instruction = next(following, None)
    stage.finished = True
    return run


def receive(instruction: Instruction) -> Instruction:
    """What a forward or a backward waits for."""
    forward = instruction.kind is _FORWARD
    kind = Kind.RECEIVE_ACTIVATION if forward else Kind.RECEIVE_GRADIENT
    return Instruction(kind, *instruction[1:])


def _sender(k: int, instruction: Instruction) -> int:
    return k - 1 if instruction.kind is _FORWARD else k + 1


def out_of_order(k: int, instruction: Instruction, sent: Instruction) -> ScheduleError:
    return ScheduleError(
        k,
        receive(instruction),
        f"stage {_sender(k, instruction)} sends minibatch {sent.minibatch}, microbatch "
        f"{sent.microbatch} before it or instead of it",
    )


def _stuck(stages: list[_Stage], k: int) -> ScheduleError:
    """Why stage k waits for ever: the stage at the end of the chain of those that wait."""
    instruction = stages[k].waiting
    assert instruction is not None
    sender = _sender(k, instruction)
    other = stages[sender].waiting
    if other is None:
        reason = f"stage {sender} ends without sending it"
        return ScheduleError(k, receive(instruction), reason)
    if _sender(sender, other) != k:
        return _stuck(stages, sender)
    return ScheduleError(
        k,
        receive(instruction),
        f"a deadlock: stage {sender}, which sends it, waits at {receive(other)}, which stage {k} "
        "sends later",
    )
