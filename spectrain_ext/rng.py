"""Gives each stage its own random numbers, so that dropout does not depend on the schedule."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

States = list[Tensor]

#: Torch has one default generator per device for all threads. Hold this while a stage's state is in
#: it, or while random numbers may be drawn. Reentrant, since a stage may run another pipeline.
RNG_LOCK = threading.RLock()
# Otherwise a child forked meanwhile would wait forever for a thread that it does not have.
os.register_at_fork(
    before=RNG_LOCK.acquire, after_in_parent=RNG_LOCK.release, after_in_child=RNG_LOCK.release
)


class StageRandom:
    """A stage's random numbers: ``with RNG_LOCK, random`` puts its state into the generators.

    Around every forward and loss, also of stages that never draw: whether one draws is known only
    afterwards, by its state, and it could not be run again.

    A stage runs its forwards in the order of minibatches under every schedule, so every schedule
    gives a minibatch the same dropout masks.

    Stages in several threads take turns, so that each draws what it would draw alone. Torch has no
    generator per thread: another thread that draws from a default generator meanwhile, or seeds it,
    changes the stage's numbers, and its own. It needs a ``torch.Generator``.
    """

    def __init__(self, stage: int, device: torch.device, replica: int = 0) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            self._generators.append(torch.cuda.default_generators[device.index])
        with RNG_LOCK:  # another stage's seed may be there
            # does not advance the caller's generators
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
        """Restore the caller's state, if an exception bypassed the end of ``with``."""
        if self._callers:
            with RNG_LOCK:
                self._put(self._callers)
                self._callers = []

    def rewind(self) -> None:
        """Go back, inside ``with``, to the state at its start."""
        self._put(self._entered)

    def _put(self, states: States) -> None:
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)

    def states(self) -> States:
        """Return the stage's state, outside of ``with``."""
        return self._own

    def set_states(self, states: Sequence[Tensor]) -> None:
        """Continue from ``states()``; raise ValueError if it is from another kind of device."""
        if [len(state) for state in states] != [len(state) for state in self._own]:
            raise ValueError(
                f"states: expected {len(self._own)} of {[len(s) for s in self._own]} bytes, got "
                f"{[len(state) for state in states]}"
            )
        self._own = [state.clone() for state in states]

    @contextmanager
    def at(self, states: States) -> Iterator[None]:
        """Draw from these states inside; the stage's own state does not change."""
        with RNG_LOCK:
            own, self._own = self._own, states
            try:
                with self:
                    yield
            finally:
                self.leave()
                self._own = own


def mixed_seed(seed: int, index: int) -> int:
    """Return a seed for an index; with seed + index, neighboring seeds would share numbers."""
    mixed = (seed * 6364136223846793005 + (index + 1) * 1442695040888963407) % 2**64
    return (mixed ^ (mixed >> 31)) % 2**63


@contextmanager
def forked_rng(blocks: Iterable[nn.Module]) -> Iterator[None]:
    devices = {t.device.index for b in blocks for t in b.parameters() if t.device.type == "cuda"}
    cuda = sorted(index for index in devices if index is not None)
    with RNG_LOCK, torch.random.fork_rng(devices=cuda):
        yield
