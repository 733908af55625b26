"""StageRandom: a generator state of a stage's own, so that dropout ignores the schedule."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

States = list[Tensor]

#: Torch has one default generator per device for all threads: who has put a stage's numbers there,
#: or may draw, holds this. A stage may run another pipeline, so the same thread may take it again.
RNG_LOCK = threading.RLock()
# A child that is forked meanwhile would wait for ever for a thread that it does not have.
os.register_at_fork(
    before=RNG_LOCK.acquire, after_in_parent=RNG_LOCK.release, after_in_child=RNG_LOCK.release
)


class StageRandom:
    """Inside ``with RNG_LOCK, random`` the default generators go on with this stage's numbers.

    A stage runs its forwards in the order of minibatches under every schedule, so every schedule
    gives a minibatch the same dropout masks.

    Stages that are run by several threads take turns, so that each draws what it would alone. Torch
    has no generator per thread, so any other thread that meanwhile draws from a default generator,
    or seeds one, disturbs the stage and is disturbed: it needs a ``torch.Generator`` of its own.
    """

    def __init__(self, stage: int, device: torch.device, replica: int = 0) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            self._generators.append(torch.cuda.default_generators[device.index])
        with RNG_LOCK:  # elsewhere a stage's seed may be there
            # which advances no generator of the caller's
            seed = mixed_seed(torch.initial_seed(), stage)
        if replica:  # the first has the numbers of a stage without replicas
            seed = mixed_seed(seed, replica)
        own = [torch.Generator(g.device).manual_seed(seed) for g in self._generators]
        self._own = [generator.get_state() for generator in own]
        self._callers: States = []  # inside ``with``
        self._entered = self._own

    def __enter__(self) -> None:
        self._entered = self._own
        self._callers = callers = []
        for generator, state in zip(self._generators, self._own, strict=True):
            callers.append(generator.get_state())
            generator.set_state(state)

    def __exit__(self, *_: object) -> None:
        own: States = []
        for generator, state in zip(self._generators, self._callers, strict=False):
            own.append(generator.get_state())
            generator.set_state(state)
        self._own, self._callers = own, []

    def leave(self) -> None:
        """Go on with the caller's numbers, if an exception kept ``with`` from seeing to that."""
        if self._callers:
            with RNG_LOCK:
                self._put(self._callers)
                self._callers = []

    def rewind(self) -> None:
        """Inside ``with``, draw again what has been drawn since it was entered."""
        self._put(self._entered)

    def _put(self, states: States) -> None:
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)

    def states(self) -> States:
        """Where the stage's numbers stand, outside of ``with``."""
        return self._own

    def set_states(self, states: Sequence[Tensor]) -> None:
        """Go on from what ``states`` returned; ValueError if it was for another kind of device."""
        if [len(state) for state in states] != [len(state) for state in self._own]:
            raise ValueError(
                f"states: expected {len(self._own)} of {[len(s) for s in self._own]} bytes, got "
                f"{[len(state) for state in states]}"
            )
        self._own = [state.clone() for state in states]

    @contextmanager
    def at(self, states: States) -> Iterator[None]:
        """Inside, numbers are drawn again from there; where they stood is not changed."""
        with RNG_LOCK:
            own, self._own = self._own, states
            try:
                with self:
                    yield
            finally:
                self.leave()
                self._own = own


def mixed_seed(seed: int, index: int) -> int:
    """A seed per index; with seed + index, neighbouring seeds would share numbers."""
    mixed = (seed * 6364136223846793005 + (index + 1) * 1442695040888963407) % 2**64
    return (mixed ^ (mixed >> 31)) % 2**63
