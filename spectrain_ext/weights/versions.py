"""Versions: which buffer of a stage holds which weights, and which of them can be written anew."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from spectrain_ext.operators.laws import Geometric, Law, Linear, SecondOrder
from spectrain_ext.schedule import Entries, OwnLaw, Place, Reader, Rules

from .storage import Content, Difference, Storage, VersionBuffer


class Update(NamedTuple):
    """What an update writes beside the true weights, and reads beside the gradients."""

    room: VersionBuffer | None  # where the step writes the weights of the next forward as well
    kept: VersionBuffer | None  # where true weights go that are still wanted, see ``keep_true``
    # What the last backward computed with, for a correcting step; of an update that is left out
    # what the last step predicted.
    stale: VersionBuffer | None


class Versions(Reader[Content]):
    """Finds the buffer of the weights that an instruction computes with; touches no memory."""

    def __init__(
        self,
        rules: Rules,
        place: Place,
        entries: Entries,
        storage: Storage,
        rates: Callable[[], tuple[float, ...]],
    ) -> None:
        super().__init__(rules, place.microbatches, entries)
        self._storage = storage
        self._rates = rates
        self._step_law: Law | None = None
        if self._by_step and self._horizon is not None:
            self._step_law = SecondOrder(self._horizon - rules.lead, rules.lead)
        # What is not predicted is then computed with in the master itself.
        self._reads_master = self.retains and storage.same_dtype and storage.master is not None
        if not self._reads_master:
            storage.home.content = Content(0)

    def _weights(self, version: int, horizon: int = 0, by_step: bool = False) -> Content:
        if not horizon:
            return Content(version)
        law = self.rules.law
        if by_step:  # with the rates of that step
            return Content(version, self._step_law)
        if law == "difference":
            return Content(version, Difference(horizon))
        if law == "average":  # the average change is the part of it that the average will take
            return Content(version, Difference((self.rules.averaging - 1.0) * horizon))
        return Content(version, _named(law, horizon), self._rates())

    # Buffers.

    def find(self, content: Content) -> VersionBuffer | None:
        """The buffer that holds these weights; None: they are to be written."""
        for buffer in self._storage.pool:
            if buffer.content == content:
                return buffer
        if self._reads_master and content == Content(self.version):
            return self._storage.master
        return None

    def room(self, content: Content | None, besides: VersionBuffer | None = None) -> VersionBuffer:
        """A buffer to write these weights into; what it held is forgotten, or goes to the host."""
        storage = self._storage
        for buffer in storage.pool:
            held = buffer.content
            if held is None or not (buffer is storage.true or self._is_wanted(held)):
                break
        else:
            buffer = self._to_vacate(besides) or storage.new_buffer()
            buffer.leaving = buffer.content
        buffer.content = content
        return buffer

    def _to_vacate(self, besides: VersionBuffer | None) -> VersionBuffer | None:
        """The buffer of what is needed last, of the newest version, if there are enough of them."""
        storage = self._storage
        if storage.most is None or len(storage.pool) < storage.most:
            return None
        needed = (storage.true, storage.bound, besides)
        others = [
            (buffer.content.version, n)
            for n, buffer in enumerate(storage.pool)
            if buffer not in needed and buffer.content not in (None, self._stale)
        ]
        return storage.pool[max(others)[1]] if others else None

    # The update.

    def begin_update(
        self,
        forward: tuple[int, int] | None,  # that the stage runs next; None: something else
        moves: bool = False,  # whether somebody may move the true weights right after it
        rates_move: bool = False,  # whether the learning rates are likely to change right after it
        left_out: bool = False,  # whether the version that it makes is the last one again
    ) -> Update:
        """Find the buffers of an update; from here on the version that it makes is the newest."""
        storage, true = self._storage, Content(self.version)
        stale = None if self._stale is None else self.find(self._stale)
        if left_out:
            forward, stale = None, self._predicted()
        self.updated()
        kept = None
        if storage.master is None:
            if self._is_wanted(true):
                kept = self.room(None)
            (kept or storage.true).content = Content(self.version)
        elif self._is_wanted(true) and self.find(true) is None and true not in storage.hosted:
            kept = self.room(true)
        for content in [each for each in storage.hosted if not self._is_wanted(each)]:
            del storage.hosted[content]
        written = self._following(forward, moves, rates_move)
        return Update(None if written is None else self.room(written, kept), kept, stale)

    def _predicted(self) -> VersionBuffer | None:
        """What the last step predicted and nobody can make again, if that is how it is."""
        return self.find(self._ahead(self.version, 0)) if self._by_step else None

    def _following(
        self, forward: tuple[int, int] | None, moves: bool, rates_move: bool
    ) -> Content | None:
        """The weights of the forward that comes next, if the step is to write them as well."""
        storage = self._storage
        if storage.master is None or not storage.predicts or not self._reads_newest:
            return None
        if self.written is not None:  # it needs the gradient: nobody else can write it
            return self.written
        if moves or forward is None or (self._first is not None and self._first[0] == forward[0]):
            return None
        content = self._ahead(self.version, forward[0])
        if content.law is None:
            return None if self._reads_master else content
        return None if isinstance(content.law, Difference) or rates_move else content


@lru_cache(maxsize=1024)  # a run asks for the same few all the time
def _named(law: str | OwnLaw, horizon: int) -> Law:
    if not isinstance(law, str):
        made: Law = law(horizon)
        return made
    return Geometric(horizon) if law == "geometric" else Linear(horizon)
