"""Turns: a stage's forwards, backwards and updates, each checked to be loaded, fed and sent on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .actions import Action, Kind, ScheduleError
from .generators import Generator, find_generator
from .place import Place

_FORWARD, _BACKWARD, _UPDATE = Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE
_LOAD_FORWARD, _LOAD_BACKWARD, _PULL = Kind.LOAD_FORWARD, Kind.LOAD_BACKWARD, Kind.PULL

# What an endless stream may hold beyond the last minibatch of a run before it ends that one.
_BEYOND = 200_000


def streams(
    schedule: str | Generator, windows: Sequence[int], microbatches: int = 1
) -> list[Iterator[Action]]:
    """The endless actions of every stage.

    Args:
        schedule: a name in ``GENERATORS``, or a generator.
        windows: the window of each stage, in microbatches; their number is that of the stages.
        microbatches: parts per minibatch.

    Raises:
        ValueError: there is no schedule of that name; a window or ``microbatches`` is below 1.
    """
    generate = find_generator(schedule) if isinstance(schedule, str) else schedule
    if microbatches < 1:
        raise ValueError(f"microbatches: expected at least 1, got {microbatches}")
    for k, window in enumerate(windows):
        if window < 1:
            raise ValueError(f"windows[{k}]: expected at least 1 microbatch, got {window}")
    n = len(windows)
    return [generate(Place(k, n, window, microbatches)) for k, window in enumerate(windows)]


def turns(
    actions: Iterable[Action], stage: int, stages: int, minibatches: int | None = None
) -> Iterator[Action]:
    """The forwards, backwards and updates of a stage's actions, in order, lazily.

    Around each of them, and next to it, must be what belongs to it, for the same microbatch:

        forward    [pull] load forward weights, receive activation, forward, send activation | loss
        backward   load backward weights, [receive gradient], backward, [send gradient]

    Stage 0 pulls a minibatch before its first microbatch; the last stage computes the loss instead
    of sending, and receives no gradient; stage 0 sends none.

    Args:
        actions: finite, or endless with ``minibatches``.
        stage: whose actions they are.
        stages: the number of stages.
        minibatches: the length of the run: actions of later minibatches are left out, and nothing
            is read after the last update. None: all that there are.

    Raises:
        ScheduleError: something else stands where one of these was expected.
    """
    first, last = stage == 0, stage == stages - 1
    forward: tuple[Kind, ...] = (
        Kind.RECEIVE_ACTIVATION,
        _FORWARD,
        Kind.LOSS if last else Kind.SEND_ACTIVATION,
    )
    pull = (_LOAD_FORWARD, *forward)
    backward: tuple[Kind, ...] = (_BACKWARD,)
    if not last:
        backward = (Kind.RECEIVE_GRADIENT, *backward)
    if not first:
        backward = (*backward, Kind.SEND_GRADIENT)
    end = -1 if minibatches is None else minibatches
    beyond = 0
    stream = iter(actions)
    while end:
        action = next(stream, None)
        if action is None:
            return
        kind, i, j = action
        if i >= end > 0:
            beyond += 1
            if beyond > _BEYOND or kind is _UPDATE:
                wanted = Action(_UPDATE, end - 1)
                raise ScheduleError(stage, action, f"expected the {wanted} before it")
            continue
        if kind is _LOAD_FORWARD and (j or not first):
            made, rest = _FORWARD, forward
        elif kind is _LOAD_BACKWARD:
            made, rest = _BACKWARD, backward
        elif kind is _UPDATE:
            yield action
            if i + 1 == end:
                return
            continue
        elif kind is _PULL and first:
            made, rest = _FORWARD, pull
        elif kind is _LOAD_FORWARD:
            raise ScheduleError(stage, action, f"expected {Action(_PULL, i)} before it")
        else:
            raise ScheduleError(stage, action, "expected the load of its weights before it")
        for wanted_kind in rest:
            found = next(stream, None)
            if found != (wanted_kind, i, j):
                raise _out_of_turn(stage, Action(wanted_kind, i, j), found)
            if wanted_kind is made:
                turn = found
        yield turn


def _out_of_turn(stage: int, wanted: Action, found: Action | None) -> ScheduleError:
    instead = "the actions end" if found is None else f"found {found}"
    return ScheduleError(stage, wanted, f"missing: {instead} in its place")
