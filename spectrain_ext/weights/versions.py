"""Versions: which buffer of a stage holds which weights, and which of them can be written anew."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from spectrain_ext.operators.laws import Geometric, Law, Linear, SecondOrder
from spectrain_ext.schedule import Entries, OwnLaw, Place, Reader, Rules

from .storage import Content, Difference, Storage, VersionBuffer


@lru_cache(maxsize=1024)  # a run asks for the same few all the time
def _named(law: str | OwnLaw, horizon: int, lead: int = 0) -> Law:
    if not isinstance(law, str):
        made: Law = law(horizon)
        return made
    if law == "second-order":
        return SecondOrder(horizon, lead)
    return Geometric(horizon) if law == "geometric" else Linear(horizon)


class Versions(Reader[Content]):
    """Finds the buffer of the weights that an instruction computes with.

    Weights that a buffer holds cost nothing. Others are written into a buffer whose own nobody
    wants any more. No memory is touched here.

    Args:
        rules: the method at this stage.
        place: the stage's place.
        entries: the versions of microbatches at stage 0.
        storage: the buffers, at the begin of a run.
        rates: the present learning rate of every parameter group.
    """

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
        self._law = rules.law
        self._averaging = rules.averaging
        self._held: dict[Content, VersionBuffer] = {}
        self._master = storage.master
        # What is not predicted is then computed with in the master itself.
        self._reads_master = self.retains and storage.same_dtype and storage.master is not None
        if not self._reads_master:
            self._hold(Content(0), storage.home)

    # Contents.

    def _itself(self, version: int) -> Content:
        return Content(version)

    def _for_forward(self, version: int, horizon: int) -> Content:
        """Second order has the rates of the step that writes it."""
        if self._by_step:
            return Content(version, _named(self._law, horizon, self._lead))
        return self._predicted(self._law, version, horizon)

    def _for_backward(self, version: int, horizon: int) -> Content:
        return self._predicted(
            "linear" if self._law == "second-order" else self._law, version, horizon
        )

    def _predicted(self, law: str | OwnLaw, version: int, horizon: int) -> Content:
        if law == "difference":
            return Content(version, Difference(horizon))
        if law == "average":  # the average change is the part of it that the average will take
            return Content(version, Difference((self._averaging - 1.0) * horizon))
        return Content(version, _named(law, horizon), self._rates())

    # Buffers.

    def find(self, content: Content) -> VersionBuffer | None:
        """The buffer that holds these weights; None: they are to be written."""
        found = self._held.get(content)
        if (
            found is None
            and self._reads_master
            and content.law is None
            and content.version == self.version
        ):
            return self._master
        return found

    def room(self, content: Content) -> VersionBuffer:
        """A buffer to write these weights into; what it held is forgotten."""
        for buffer in self._storage.pool:
            if buffer.content is None or not self._is_needed(buffer.content):
                break
        else:
            buffer = self._storage.new_buffer()
        self._hold(content, buffer)
        return buffer

    def _hold(self, content: Content | None, buffer: VersionBuffer) -> None:
        if buffer.content is not None:
            del self._held[buffer.content]
        buffer.content = content
        if content is not None:
            self._held[content] = buffer

    def _is_needed(self, held: Content) -> bool:
        return self._is_wanted(held) or (self._master is None and held == Content(self.version))

    # The update.

    def stale(self) -> VersionBuffer:
        """What the last backward computed with, which a correcting step reads."""
        assert self._stale is not None, "corrections are for stashed weights"
        return self._held[self._stale]

    def keep_true(self) -> VersionBuffer | None:
        """Room for the true weights, if an update would overwrite ones that are still wanted.

        Of a stage with a master a copy of them is to go there, to be read later; without one the
        update itself is to go there.
        """
        true = Content(self.version)
        if self._master is not None:
            lost = not self._reads_newest and true.version >= self._oldest
            return self.room(true) if lost and true not in self._held else None
        return self.room(Content(self.version + 1)) if self._is_wanted(true) else None

    def begin_update(self, written: Content | None) -> VersionBuffer | None:
        """Room for what the step is to write, if anything; what only this version had is over."""
        if self._stale is not None:
            self._let_go_of_stale()
        self._forget_newest()
        if written is None:
            return None
        room = self.room(written)
        self._hold(None, room)  # unknown, should the step raise
        return room

    def end_update(self, written: Content | None, room: VersionBuffer | None) -> None:
        """The step has been made; ``written``: what it wrote into the room, if that is of use."""
        self.updated()
        if written is not None and room is not None:
            self._hold(written, room)
        elif self._master is None:
            self._hold(Content(self.version), self._storage.true)

    def step_writes(self, forward: tuple[int, int] | None) -> Content | None:
        """What the next step should write: the weights of the forward that comes right after it.

        None where another pass has to do it. A prediction that needs the gradient nobody else can
        write.
        """
        if self._master is None or not self._reads_newest:
            return None
        if self._by_step:
            return self._ahead(self.version + 1, 0)
        if forward is None or (self._first is not None and self._first[0] == forward[0]):
            return None
        content = self._ahead(self.version + 1, forward[0])
        return None if self._reads_master and content.law is None else content
