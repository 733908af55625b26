"""Versions: which weights a stage computes with, and which it must keep, as bare bookkeeping."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple, Protocol

from spectrain_ext.method import Choices
from spectrain_ext.schedule import Kind, Place, find_generator


class Content(NamedTuple):
    """What a buffer of weights holds.

    Attributes:
        version: updates made in this run.
        law: how it is predicted from there; None: it is the version itself.
        rates: the learning rates that the law is evaluated at, where it does not have its own.
    """

    version: int
    law: Any = None  # hashable
    rates: tuple[float, ...] | None = None


class Store(Protocol):
    """The buffers: the working buffer, and one for every content that is kept."""

    def keep(self, content: Content) -> None:
        """Copy what the working buffer holds to a buffer of its own."""

    def restore(self, content: Content) -> None:
        """Copy what is kept to the working buffer."""

    def swap(self, content: Content, held: Content) -> None:
        """Exchange what is kept for what the working buffer holds."""

    def drop(self, content: Content) -> None:
        """Let go of what is kept."""

    def write(self, content: Content) -> None:
        """Make it from the true weights, in the working buffer."""


class Predictor(Protocol):
    """Names the contents of predictions."""

    def forward(self, version: int, steps: int, lead: int) -> Content:
        """The forward's prediction from the newest version, or from the one after it."""

    def backward(self, version: int, steps: int) -> Content:
        """The backward's prediction from the newest version."""


class Versions:
    """A cache with one entry, the working buffer, and whatever must outlive its overwriting.

    Loading what the working buffer holds costs nothing. What it holds is kept before it is
    overwritten if it is still wanted: a microbatch in flight will reload it, a later forward reads
    that version, or it cannot be made again. Without a master the true weights are a version like
    any other, in the working buffer at every update.

    No memory is touched here but through the ``Store``: with one that only counts, a schedule tells
    how many buffers it needs.

    Args:
        choices: the method at this stage.
        place: the stage's place.
        entries: the versions of microbatches at stage 0.
        master: whether the true weights have a buffer of their own.
        store: the buffers.
        predictor: names predictions.
    """

    def __init__(
        self,
        choices: Choices,
        place: Place,
        entries: Entries,
        master: bool,
        store: Store,
        predictor: Predictor,
    ) -> None:
        self._choices = choices
        self._last = place.microbatches - 1
        self._entries = entries
        self._master = master
        self._store = store
        self._predictor = predictor
        self._reads_newest = choices.reads == "newest"
        self._stashes = choices.backward == "stash"
        self._once = choices.once
        self._gradient_law = choices.law == "second-order"
        self.version = 0
        self.held: Content | None = Content(0)
        self.kept: set[Content] = set()
        self._in_flight: dict[tuple[int, int], Content] = {}  # what their backwards must find again
        self._wants: Counter[Content] = Counter()
        self._first: tuple[int, Content] | None = None  # of this minibatch, with ``once``
        self._done_with: Content | None = None
        self._oldest = 0  # version that a forward to come may read
        # What a step wrote and nothing can write again, and whether forwards to come may read it.
        self._written: Content | None = None
        self._read_again = False

    # What is computed with.

    def for_forward(self, i: int, j: int) -> Content:
        """What the forward of a microbatch computes with, now; load it, then ``settle``."""
        choices = self._choices
        if self._once:
            content = self._for_minibatch(i, j)
        elif self._reads_newest:
            content = self._predicted(self.version, i)
        else:
            content = Content(self._read_older(i, j))
        if choices.backward == "stash":
            self._in_flight[i, j] = content
            self._wants[content] += 1
        return content

    def _predicted(self, version: int, i: int) -> Content:
        choices = self._choices
        steps = choices.forward
        if steps is None:
            steps = i - version
        elif self._gradient_law and version == 0:
            return Content(0)  # no step has written a prediction yet
        if not steps and not choices.lead:
            return Content(version)
        return self._predictor.forward(version, steps, choices.lead)

    def _for_minibatch(self, i: int, j: int) -> Content:
        """The first microbatch's weights, kept until the last has them."""
        if self._first is None or self._first[0] != i:
            if self._first is not None:  # a small minibatch, whose last microbatch did not exist
                self._release(self._first[1])
            self._first = i, self._predicted(self.version, i)
            self._wants[self._first[1]] += 1
        content = self._first[1]
        if j == self._last:
            self._done_with = content
            self._first = None
        return content

    def _read_older(self, i: int, j: int) -> int:
        """The version that a forward reads; what no later one reads need not be kept for it."""
        if self._choices.reads == "previous":
            version = max(0, i - 1)
            self._oldest = max(0, i - 1 if j < self._last else i)
        else:
            version = self._entries.take(i, j)
            self._oldest = self._entries.following
        return version

    def for_backward(self, i: int, j: int) -> Content:
        """What the backward of a microbatch computes with, now; load it, then ``settle``."""
        if self._gradient_law and j == self._last:
            self._read_again = False  # an update comes before the next forward
        if self._stashes:
            self._done_with = content = self._in_flight.pop((i, j))
            return content
        if self._choices.backward_ahead:
            return self._predictor.backward(self.version, self._choices.backward_ahead)
        return Content(self.version)

    def settle(self) -> None:
        """What was asked for last is loaded; whoever asked will not ask for it again."""
        content = self._done_with
        if content is not None:
            self._done_with = None
            self._release(content)
        if not self._reads_newest and self.kept:
            self._sweep()

    def _release(self, content: Content) -> None:
        self._wants[content] -= 1
        if not self._wants[content]:
            del self._wants[content]
            if content in self.kept and self._is_surplus(content):
                self._drop(content)

    # What is kept.

    @property
    def true(self) -> Content:
        """The true weights."""
        return Content(self.version)

    def _is_wanted(self, content: Content) -> bool:
        version, law, _ = content
        return (
            content in self._wants
            or (not self._reads_newest and law is None and version >= self._oldest)
            or (self._read_again and content == self._written)
        )

    def _is_needed(self, held: Content) -> bool:
        """Whether what the working buffer holds must not be lost."""
        return self._is_wanted(held) or (not self._master and held == self.true)

    def _is_surplus(self, kept: Content) -> bool:
        """Whether what is kept can go."""
        return not self._is_wanted(kept) and (
            self._master or kept != self.true or kept == self.held
        )

    def _sweep(self) -> None:
        for content in [content for content in self.kept if self._is_surplus(content)]:
            self._drop(content)

    def _drop(self, content: Content) -> None:
        self.kept.remove(content)
        self._store.drop(content)

    def _keep(self, content: Content) -> None:
        self._store.keep(content)
        self.kept.add(content)

    def load(self, content: Content) -> None:
        """Make the working buffer hold it."""
        held = self.held
        if held is not None and (held in self.kept or not self._is_needed(held)):
            held = None  # no loss
        if content not in self.kept:
            if held is not None:
                self._keep(held)
            self._store.write(content)
        elif held is not None:
            self._store.swap(content, held)
            self.kept.remove(content)
            self.kept.add(held)
        else:
            self._store.restore(content)
            if not self._is_wanted(content):
                self._drop(content)
        self.held = content

    # The update.

    def before_update(self, writes: bool) -> None:
        """Make room for a step, which may write a prediction into the working buffer."""
        if (not self._master and self.held != self.true) or self._is_lost(self.true):
            self.load(self.true)
        held = self.held
        if (
            (writes or not self._master)
            and held is not None
            and held not in self.kept
            and self._is_wanted(held)
        ):
            self._keep(held)
        if writes:
            self.held = None  # unknown, should the step raise

    def _is_lost(self, true: Content) -> bool:
        """Whether a later forward reads the version that only the master has."""
        return (
            not self._reads_newest
            and true.version >= self._oldest
            and true != self.held
            and true not in self.kept
        )

    def after_update(self, written: Content | None) -> None:
        """The step has been made; ``written``: what it wrote into the working buffer, if known."""
        self.version += 1
        if written is not None:
            self.held = written
        elif not self._master:
            self.held = self.true
        if self._gradient_law:
            self._written = written
            self._read_again = True
        if self.kept and (self._gradient_law or not self._reads_newest):
            self._sweep()

    def step_writes(self, forward: tuple[int, int] | None) -> Content | None:
        """What the next step should write: the weights of the forward that comes right after it.

        None where another pass has to do it. A prediction that needs the gradient nobody else can
        write.
        """
        if not self._master or not self._reads_newest:
            return None
        if self._gradient_law:
            return self._predicted(self.version + 1, 0)
        if forward is None or (self._first is not None and self._first[0] == forward[0]):
            return None
        return self._predicted(self.version + 1, forward[0])


class Entries:
    """The version that stage 0 has when a microbatch enters, for its forwards in order."""

    def __init__(self, place: Place, schedule: str) -> None:
        self._actions = find_generator(schedule)(place)
        self._updates = 0
        self._next = self._advance()

    def _advance(self) -> tuple[int, int, int]:
        for kind, i, j in self._actions:
            if kind is Kind.LOAD_FORWARD:
                return i, j, self._updates
            self._updates += kind is Kind.UPDATE
        raise AssertionError("a schedule is endless")

    def take(self, i: int, j: int) -> int:
        """The version of one microbatch; a small minibatch has fewer of them than the schedule."""
        while self._next[:2] != (i, j):
            self._next = self._advance()
        version = self._next[2]
        self._next = self._advance()
        return version

    @property
    def following(self) -> int:
        """The version of the microbatch after that."""
        return self._next[2]
