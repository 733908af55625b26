"""RecomputingStage: keeps the inputs of a forward, and runs it again before its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from spectrain_ext.rng import TURN, States
from spectrain_ext.transport import Buffer, Slot, Transit

from .stage import Stage
from .tape import Tape, activation, check_dependence, check_loss, packed, value_of


class RecomputingStage(Stage):
    """A stage that trades computation for memory.

    The forward keeps its inputs, the module's buffers and the state of the random numbers. The
    backward first runs the whole forward again, with the weights that the backward is to meet.
    Where these are not the forward's, this is another method: all of the gradient is then one of
    the backward's weights, activations included. Buffers, such as a spectral norm's vectors or
    running statistics, are what the first forward found, and updated by that one only; so are those
    of a loss that is a module.
    """

    _states: dict[tuple[int, int], States]
    _then: dict[tuple[int, int], list[_Buffers]]  # the module's, and the loss's
    _sent: Transit
    _loss_fn: Callable[..., Tensor] | None = None
    _before: Sequence[_Buffers] = ()  # while a backward runs

    def forward(self, i: int, j: int) -> None:
        """Compute the output, without a graph."""
        slot = self._received
        message = slot.message
        assert message is not None
        tape, compute = Tape(slot), self.compute
        states = self.random.states()
        reads, writes = (self.working, slot.buffer), (self.module_buffers, tape.buffer)
        with compute.using(reads=reads, writes=writes), torch.no_grad(), TURN, self.random:
            self._then[i, j] = [_Buffers(self.module)]
            # An in-place first layer must leave the inputs for the second time.
            copies = tuple(None if t is None else t.clone() for t in message.tensors)
            tape.output = self.module(packed(message, copies))
        if self.to_next is not None:
            output = activation(tape.output)
            learns = self.weights is not None or any(message.differentiable)
            differentiable = tuple(
                learns and t is not None and (t.is_floating_point() or t.is_complex())
                for t in output.tensors
            )
            tape.message = output._replace(differentiable=differentiable)
        if not self._immediate:
            self._has_computed()
        self._keep(i, j, tape)
        self._states[i, j] = states

    def loss(self, i: int, j: int, loss_fn: Callable[..., Tensor]) -> Tensor:
        tape, target = self._with_target(i, j)
        compute = self.compute
        writes = (tape.target.buffer, tape.buffer)
        with compute.using(writes=writes), torch.no_grad(), TURN, self.random:
            self._then[i, j].append(_Buffers(loss_fn))
            loss = loss_fn(tape.output, target)
        check_loss(loss)
        self._loss_fn = loss_fn
        compute.record(self.computed)
        return loss.detach()

    def _differentiate(
        self, i: int, j: int, tape: Tape, arrived: Slot, halves: bool = False
    ) -> None:
        """Compute the output again, and from it the gradients of weights and input.

        Both at once: to put one half off would be to keep what this computes again not to keep it.
        """
        writes = (tape.slot.buffer, arrived.buffer, tape.buffer, self.module_buffers)
        with self.compute.using(reads=(self.working,), writes=writes), torch.enable_grad():
            self._before = [_Buffers(self.module), _Buffers(self._loss_fn)]
            with torch.no_grad():
                for then in reversed(self._then.pop((i, j))):  # a loss may have the module in it
                    then.restore()
            with self.random.at(self._states.pop((i, j))):
                message = tape.slot.message
                assert message is not None
                tape.leaves, tape.output = self._run(message)
                if self._loss_fn is not None:
                    target = tape.target.message
                    assert target is not None
                    loss = self._loss_fn(tape.output, value_of(target))
                    check_dependence(loss, tape.output)
                    tape.output = loss
        super()._differentiate(i, j, tape, arrived)
        self._restore_buffers()

    def _restore_buffers(self) -> None:
        """Have the module buffers of before the backward, which is over or has failed."""
        if self._before:
            with self.compute.using(writes=(self.module_buffers,)), torch.no_grad():
                for before in self._before:
                    before.restore()
            self._before = ()

    def send_activation(self, i: int, j: int) -> None:
        """Copy the output to the next stage, and let go of it."""
        assert self.to_next is not None
        tape = self._tapes[i, j]
        message, buffer = tape.message, tape.buffer
        read = self.to_next.send(message, buffer, self.computed)
        self._sent.hold(read, buffer, message)
        tape.output, tape.message = (), message._replace(tensors=())
        tape.buffer = Buffer("activations")  # of the second time

    def end(self) -> None:
        try:
            self._restore_buffers()
            self.compute.record(self.computed)
        finally:
            super().end()
        self._sent.reset()
        self._then = {}

    def forget(self) -> None:
        super().forget()
        self._states, self._then = {}, {}
        self._sent = Transit(self.compute, 1)


class _Buffers:
    """A module's buffers as they are now; what is no module has none."""

    def __init__(self, module: object) -> None:
        # Copies of all: ``.data`` and kernels of torch's norms write what autograd does not see.
        self._kept = [
            (owner, name, tensor, tensor.detach().clone())
            for owner in (module.modules() if isinstance(module, nn.Module) else ())
            for name, tensor in owner._buffers.items()
            if tensor is not None
        ]

    def restore(self) -> None:
        """Put them back; a graph that needs them has been used."""
        for owner, name, tensor, value in self._kept:
            owner._buffers[name] = tensor
            tensor.copy_(value)
