"""Passes: bytes of weights that a method reads and writes, counted by the engine's own books."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, cast

from spectrain_ext.method import Method, find_method, rules_at
from spectrain_ext.schedule import Entries, Kind, Place, find_generator
from spectrain_ext.weights.storage import Content, Storage
from spectrain_ext.weights.versions import Versions

#: Bytes per float32 parameter of an SGD step: gradient, momentum, weight; the last two written.
STEP = 20


class Passes(NamedTuple):
    """Bytes read and written per float32 parameter, the mean over a run's steady state.

    Attributes:
        forward: to have the weights of a microbatch's forward.
        backward: of its backward.
        update: of a minibatch's step, with the prediction that it may write.
    """

    forward: float
    backward: float
    update: float


class _Buffer:
    """Stands for a ``VersionBuffer``, without memory."""

    def __init__(self) -> None:
        self.content: Content | None = None


class _Books:
    """Stands for ``Storage``: has buffers of no memory.

    Args:
        master: whether the true weights have one of their own.
    """

    same_dtype = predicts = True

    def __init__(self, master: bool) -> None:
        self.home = _Buffer()
        self.pool = [self.home]
        self.master = _Buffer() if master else None
        self.true = self.master or self.home

    def new_buffer(self) -> _Buffer:
        self.pool.append(_Buffer())
        return self.pool[-1]


def passes_of(method: str | Method, entry: Place, place: Place) -> Passes:
    """Count what a stage does to have its weights.

    Args:
        method: its rules.
        entry: the place of stage 0.
        place: the stage's.
    """
    return _count(find_method(method), entry, place)


@lru_cache(maxsize=1 << 14)
def _count(method: Method, entry: Place, place: Place) -> Passes:
    rules, parts = rules_at(method, place), place.microbatches
    generate = find_generator(method.schedule)
    books = _Books(rules.predicts)
    versions = Versions(
        rules, place, Entries(generate(entry)), cast(Storage, books), lambda: (0.1,)
    )
    warm = (entry.window + place.window) // parts + 2
    end = warm + max(4, warm)
    found = {Kind.FORWARD: 0, Kind.BACKWARD: 0, Kind.UPDATE: 0}
    following = generate(place)
    turn = next(following)
    while versions.version < end:
        then = next(following)
        kind, i, j = turn
        counted, moved = versions.version >= warm, 0
        if kind is Kind.UPDATE:
            ahead = (then.minibatch, then.microbatch) if then.kind is Kind.FORWARD else None
            update = versions.begin_update(ahead)
            if update.kept is not None and books.master is None:
                books.true = cast(_Buffer, update.kept)
            moved = STEP + 8 * (update.kept is not None) + 4 * (update.room is not None)
        else:
            if kind is Kind.FORWARD:
                wanted = versions.for_forward(i, j)
            else:
                wanted = versions.for_backward(i, j, kind is not Kind.BACKWARD_INPUT)
                kind = Kind.BACKWARD  # both halves of it
            if versions.find(wanted) is None:
                versions.room(wanted)
                moved = 12 if wanted.law else 8
        if counted:
            found[kind] += moved
        turn = then
    updates = end - warm
    return Passes(
        found[Kind.FORWARD] / (updates * parts),
        found[Kind.BACKWARD] / (updates * parts),
        found[Kind.UPDATE] / updates,
    )
