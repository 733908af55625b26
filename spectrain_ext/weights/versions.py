"""Decides which buffer holds which weight version, and which buffer can be overwritten."""

from __future__ import annotations

from typing import NamedTuple

from spectrain_ext.operators.laws import Law, SecondOrder, law_named
from spectrain_ext.schedule import Entries, Place, Reader, Rules

from .storage import Content, Difference, Storage, VersionBuffer


class Update(NamedTuple):
    """The buffers that an update writes and reads."""

    room: VersionBuffer | None  # where the step also writes the next forward's weights
    kept: VersionBuffer | None  # for true weights that are still needed, see ``keep_true``
    before: VersionBuffer | None  # if the update is left out: the last step's prediction


class Versions(Reader[Content]):
    """Finds the buffer of the weights that an instruction computes with; does not touch memory."""

    def __init__(
        self,
        rules: Rules,
        place: Place,
        entries: Entries,
        storage: Storage,
    ) -> None:
        super().__init__(rules, place.microbatches, entries)
        self._storage = storage
        self._step_law: Law | None = None
        if self._by_step and self._horizon is not None:
            self._step_law = SecondOrder(self._horizon - rules.lead, rules.lead)
        # Weights that are not predicted are then used in the master itself.
        self._reads_master = self.retains and storage.same_dtype and storage.master is not None
        if not self._reads_master:
            storage.home.content = Content(0)

    def _weights(self, version: int, horizon: int = 0, by_step: bool = False) -> Content:
        if not horizon:
            return Content(version)
        law = self.rules.law
        if by_step:  # with the learning rates of that step
            return Content(version, self._step_law)
        if law == "difference":
            return Content(version, Difference(horizon))
        if law == "average":  # back by average changes, each (1 - averaging) * (W - average)
            return Content(version, Difference((self.rules.averaging - 1.0) * horizon))
        return Content(version, law_named(law, horizon), self._storage.rates())

    # Buffers.

    @property
    def loads_nothing(self) -> bool:
        """Whether all instructions compute with the newest weights, in the only buffer."""
        storage, rules = self._storage, self.rules
        only = storage.master is None and len(storage.pool) == 1
        return only and self._reads_newest and rules.backward == "current" and not rules.once

    def find(self, content: Content) -> VersionBuffer | None:
        """Return the buffer that holds these weights; None: they must be written."""
        for buffer in self._storage.pool:
            if buffer.content == content:
                return buffer
        if self._reads_master and content == Content(self.version):
            return self._storage.master
        return None

    def room(self, content: Content | None) -> VersionBuffer:
        """Return a buffer to write these weights to; its old content is dropped."""
        storage = self._storage
        for buffer in storage.pool:
            kept = buffer.content
            if kept is None or not (buffer is storage.true or self._is_wanted(kept)):
                break
        else:
            buffer = storage.new_buffer()
        buffer.content = content
        return buffer

    # The update.

    def begin_update(
        self,
        forward: tuple[int, int] | None,  # the stage's next instruction; None: not a forward
        moves: bool = False,  # whether ``move`` may be called right after it
        rates_move: bool = False,  # whether the learning rates probably change right after it
        left_out: bool = False,  # whether it changes no weights
    ) -> Update:
        """Return the buffers of an update; from here on, its version is the newest."""
        storage, true = self._storage, self._weights(self.version, self._past)
        before = None
        if left_out:
            forward = None
            if self._by_step:  # it cannot be computed again
                before = self.find(self._ahead(self.version, 0))
        self.updated()
        kept = None
        if storage.master is None:
            if self._is_wanted(true):
                kept = self.room(None)
            (kept or storage.true).content = Content(self.version)
        elif self._is_wanted(true) and self.find(true) is None:
            kept = self.room(true)
        written = self._following(forward, moves, rates_move)
        return Update(None if written is None else self.room(written), kept, before)

    def is_read_next(self, update: Update, forward: tuple[int, int] | None) -> bool:
        """Whether the stage's next instruction, a ``forward``, reads what an update writes."""
        if self.loads_nothing:
            return True  # whatever the instruction is
        if forward is None or not self._begins(forward) or not self._storage.predicts:
            return False
        true = self._reads_master and self._ahead(self.version, forward[0]) == Content(self.version)
        return self._reads_newest and (update.room is not None or true)

    def _begins(self, forward: tuple[int, int]) -> bool:
        """Whether a forward may read the newest weights, and not those of its minibatch."""
        return self._first is None or self._first[0] != forward[0]

    def _following(
        self, forward: tuple[int, int] | None, moves: bool, rates_move: bool
    ) -> Content | None:
        """Return the weights of the next forward, if the step should write them."""
        storage = self._storage
        if storage.master is None or not storage.predicts or not self._reads_newest:
            return None
        if self.written is not None:  # it needs the gradient: only the step can write it
            return self.written
        if moves or forward is None or not self._begins(forward):
            return None
        content = self._ahead(self.version, forward[0])
        if content.law is None:
            return None if self._reads_master else content
        return None if isinstance(content.law, Difference) or rates_move else content
