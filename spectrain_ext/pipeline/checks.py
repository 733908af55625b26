"""Checks whether a minibatch's loss and gradients are finite, and undoes its effects if not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from math import inf

import torch
from torch import Tensor

from spectrain_ext.rng import StageRandom, States
from spectrain_ext.transport import Buffer, Slot

from .edges import StageEdges
from .loads import Loads
from .names import bare
from .tape import ModuleBuffers

_logger = logging.getLogger(__name__)


class Checks(Loads):
    """Lets a stage skip updates whose loss or gradients are not finite.

    With a schedule that flushes, the stages exchange the ``origin`` of non-finite numbers, and none
    of them updates. Without a flush it goes back with the gradients.
    """

    edges: StageEdges
    random: StageRandom
    # The input's gradients, the buffer that stands for their memory, and a count.
    _outgoing: tuple[Sequence[Tensor | None], Buffer, Tensor | None] | None
    join: Callable[[float], float] | None = None  # returns the largest origin of all replicas
    skipped = 0  # updates skipped, in all runs
    undone = 0  # minibatches of all runs after which all is as if they had never come

    def forget(self) -> None:
        self.origin = 0.0
        self._origins: dict[int, Tensor] = {}  # by minibatch, as far as known, 0-d
        # By minibatch in flight: what must be as before if it is skipped.
        self._kept: dict[int, tuple[States, list[ModuleBuffers]]] = {}

    @property
    def _tells(self) -> bool:  # whether origins go to the previous stage with the gradients
        return self.on_nonfinite is not None and self.global_norm is None

    # Undoing.

    def keep(self, i: int, j: int, module: object) -> None:
        """Before a forward: keep the buffers of what it calls, and the state of random numbers."""
        if self.on_nonfinite == "skip" and j == 0:
            _, buffers = self._kept.setdefault(i, (self.random.states(), []))
            buffers.append(ModuleBuffers(module))

    def _undo(self, i: int) -> None:
        states, buffers = self._kept.pop(i)
        if exactly := self.global_norm is not None:  # no later minibatch has begun
            self.random.set_states(states)
            self.undone += 1
        later = [copies for _, kept in self._kept.values() for copies in kept]
        with self.computing(writes=(self.module_buffers,)), torch.no_grad():
            for each in reversed(buffers):  # the loss may contain the module
                if exactly:
                    each.restore()
                else:
                    each.restore_finite(later)
        self.compute.record(self.computed)

    # Noted as it is computed; the CPU does not wait.

    def note_loss(self, i: int, loss: Tensor) -> None:
        if self.on_nonfinite is not None:
            self._note(i, torch.where(loss.detach().isfinite(), 0.0, inf))

    def _note(self, i: int, origin: Tensor) -> None:
        self._origins[i] = torch.maximum(self._origins.get(i, origin), origin)

    def take_origin(self, i: int, slot: Slot) -> None:
        """Note the origin that came as the last tensor of a gradient."""
        if not self._tells:
            return
        *gradients, origin = slot.message.tensors
        assert origin is not None
        slot.message = slot.message._replace(tensors=tuple(gradients))
        with self.computing(reads=(slot.buffer,)):
            self._note(i, origin)

    def with_origin(
        self, i: int, gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """Return gradients with the origin, if the previous stage needs it."""
        return (*gradients, self._origins[i]) if self._tells else gradients

    def check_gradient(self, i: int, j: int) -> None:
        """Before a gradient is sent: note whether it, and at last the weights', are finite."""
        assert self._outgoing is not None
        leaves, outgoing, _ = self._outgoing
        found = [leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None]
        if j == len(self.cursor.shares[i]) - 1:
            found.extend(self._gradients().values())
        # The origin is sent with them.
        with self.computing(reads=(self.weight_gradients,), writes=(outgoing,)):
            self._note(i, self._origin_in(found))
        self.compute.record(self.computed)

    def _gradients(self) -> dict[str, Tensor]:
        return {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None}

    def _origin_in(self, gradients: Iterable[Tensor]) -> Tensor:
        return torch.where(all_finite(gradients, self.device), 0.0, self.index + 1.0)

    # Instructions of an update.

    def check_finite(self, i: int, j: int) -> None:
        """Determine whether loss and gradients of a minibatch are finite here; the CPU waits."""
        predict = self.predict
        predict.wait(self.computed)
        with predict.using(reads=(self.weight_gradients,)):
            self._note(i, self._origin_in(self._gradients().values()))
            if self.divisor is not None:  # the mean of nothing is nan
                self._note(i, torch.where(self.divisor == 0, inf, 0.0))
            origin = float(self._origins.pop(i))
            self.origin = origin if self.join is None else self.join(origin)
            if self.on_nonfinite == "raise" and self.origin:
                raise FloatingPointError(self._describe_origin())
            if self.global_norm is None:
                self._decide(i)

    def agree(self, i: int, j: int) -> None:
        """With a schedule that flushes: get the origins of the other stages."""
        assert self.global_norm is not None
        self.origin = self.global_norm.origin(i, self.predict, self.device)
        with self.predict.using(reads=(self.weight_gradients,)):
            self._decide(i)

    def _decide(self, i: int) -> None:
        if not self.origin:
            self._kept.pop(i, None)
            return
        self.skipped += 1
        is_last = bool(self.edges.targets)
        if self.origin == self.index + 1.0 or (self.origin == inf and is_last):
            alone = self.global_norm is None and not is_last
            who = f"stages 0 to {self.index} skip" if alone else "all stages skip"
            why = self._describe_origin()
            _logger.warning("minibatch %d, stage %d: %s; %s the update", i, self.index, why, who)
        self._undo(i)

    def _describe_origin(self) -> str:
        if self.origin == inf:
            return "the loss is not finite"
        if self.origin != self.index + 1.0:
            return f"a gradient of stage {int(self.origin) - 1} is not finite"
        for name, gradient in reversed(self._gradients().items()):  # as the backward reaches them
            if not all_finite([gradient], self.device):
                return f"the gradient of {bare(name)!r} is not finite"
        return "a gradient is not finite"  # its input's, or of tied weights, which have been sent


def all_finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Whether all numbers are finite, 0-d: tests minimum and maximum, which do not overflow."""
    values = [t._values() if t.is_sparse else t for t in tensors]
    found = [torch.view_as_real(t) if t.is_complex() else t for t in values if t.numel()]
    ends = [end.double() for t in found for end in torch.aminmax(t)]
    return torch.stack([torch.zeros((), device=device).double(), *ends]).isfinite().all()
