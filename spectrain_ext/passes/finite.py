"""A pass that checks whether loss and gradients are finite, and undoes a minibatch if not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Literal, Self

import torch
from torch import Tensor

from spectrain_ext.pipeline.module_state import ModuleBuffers
from spectrain_ext.pipeline.names import bare
from spectrain_ext.pipeline.passes import Handler, Pass
from spectrain_ext.pipeline.views import ProcessesView, RunView, StageView
from spectrain_ext.rng import States
from spectrain_ext.schedule import Kind
from spectrain_ext.transport import Message
from spectrain_ext.weights.storage import local_part

_logger = logging.getLogger(__name__)


class CheckFinite(Pass):
    """Raises an error, or skips updates, where a loss or gradient is inf or nan.

    With a schedule that flushes, no stage updates, and the minibatch is as if it had never come.
    Without a flush, the stage where it happens and those before it skip the update. With replicas,
    all of a stage decide alike. The CPU waits for the device once per update.

    Args:
        then: ``"raise"``: the run ends with a ``StageError``, whose cause is a FloatingPointError
            that names the loss or a parameter. ``"skip"``: see ``Pipeline.skipped``.

    Raises:
        ValueError: another ``then``.

    Example:
        >>> sgd = lambda params: st.optim.SGD(params, lr=0.1)
        >>> passes = [st.passes.CheckFinite("skip")]
        >>> pipe = st.Pipeline([nn.Linear(2, 1)], sgd, nn.functional.mse_loss, passes=passes)
        >>> _ = pipe.fit([(torch.full((4, 2), torch.inf), torch.ones(4, 1))])
        >>> pipe.skipped
        (1,)
        >>> pipe.release()
    """

    _largest: Callable[[float], float]  # over the stage's replicas

    def __init__(self, then: Literal["raise", "skip"]) -> None:
        if then not in ("raise", "skip"):
            raise ValueError(f"then: expected 'raise' or 'skip', got {then!r}")
        self.then = then

    def on(self, stage: StageView, processes: ProcessesView) -> Self:
        made = super().on(stage, processes)
        made._largest = processes.largest
        return made

    def begin(self, run: RunView) -> Mapping[Kind, Handler]:
        self._run = run
        # The source of this minibatch's first non-finite number: k + 1 for a gradient of stage k,
        # inf for the loss, 0 for none. Of two sources the larger one comes first in time.
        self._origin, self.skips = 0.0, False
        self._origins: dict[int, Tensor] = {}  # by minibatch, as far as known, 0-d
        # By minibatch in flight: what must be as before if it is skipped.
        self._kept: dict[int, tuple[States, list[ModuleBuffers]]] = {}
        # Whether all stages decide together: no later minibatch has begun then.
        self._agrees = run.norm is not None
        if self._agrees:
            return {Kind.CHECK_FINITE: self._check, Kind.AGREE: self._agree}
        # Without a flush this stage updates first, and its gradient tells the previous one.
        steps: dict[Kind, Handler] = {Kind.CHECK_FINITE: self._check}
        if not run.is_first:
            steps[Kind.CHECK_GRADIENT] = self._check_gradient
        return steps

    # Undoing.

    def calls(self, i: int, j: int, function: object, inputs: Message) -> None:
        if self.then == "skip" and j == 0:
            _, buffers = self._kept.setdefault(i, (self.stage.random.states(), []))
            buffers.append(ModuleBuffers(function))

    def _undo(self, i: int) -> None:
        stage, (states, buffers) = self.stage, self._kept.pop(i)
        if self._agrees:
            stage.random.set_states(states)
        later = [copies for _, kept in self._kept.values() for copies in kept]
        with stage.computing(writes=(stage.module_buffers,)), torch.no_grad():
            for each in reversed(buffers):  # the loss may contain the module
                if self._agrees:
                    each.restore()
                else:
                    each.restore_finite(later)

    # Noted as it is computed; the CPU does not wait.

    def lost(self, i: int, j: int, loss: Tensor) -> None:
        self._note(i, torch.where(loss.isfinite(), 0.0, inf))

    def _note(self, i: int, origin: Tensor) -> None:
        self._origins[i] = torch.maximum(self._origins.get(i, origin), origin)

    def _check_gradient(self, i: int, j: int) -> None:
        """Note whether a gradient to send, and at last those of the weights, are finite."""
        stage = self.stage
        gradients, outgoing = self._run.input_gradients()
        if j == self._run.microbatches_of(i) - 1:
            gradients.extend(self._gradients().values())
        with stage.computing(reads=(stage.weight_gradients,), writes=(outgoing,)):
            self._note(i, self._origin_in(gradients))

    def sends_gradient(self, i: int, j: int, message: Message) -> Message:
        if self._agrees:
            return message
        return message._replace(tensors=(*message.tensors, self._origins[i]))

    def received_gradient(self, i: int, j: int, message: Message) -> Message:
        if self._agrees:
            return message
        *gradients, origin = message.tensors
        assert origin is not None
        self._note(i, origin)
        return message._replace(tensors=tuple(gradients))

    def _gradients(self) -> dict[str, Tensor]:
        named = self.stage.module.named_parameters()
        parts = ((name, local_part(p)) for name, p in named)
        return {name: p.grad for name, p in parts if p.grad is not None}

    def _origin_in(self, gradients: Iterable[Tensor]) -> Tensor:
        finite = all_finite(gradients, self.stage.device)
        return torch.where(finite, 0.0, self.stage.index + 1.0)

    # Before an update.

    def _check(self, i: int, j: int) -> None:
        """Determine whether loss and gradients of a minibatch are finite here; the CPU waits."""
        stage = self.stage
        predict = stage.predict
        predict.wait_stream(stage.compute)
        with predict.using(reads=(stage.weight_gradients,)):
            self._note(i, self._origin_in(self._gradients().values()))
            divisor = self._run.divisor
            if divisor is not None:  # the mean of nothing is nan
                self._note(i, torch.where(divisor == 0, inf, 0.0))
            self._origin = self._largest(float(self._origins.pop(i)))
            if self.then == "raise" and self._origin:
                raise FloatingPointError(self._describe_origin())
            if not self._agrees:
                self._decide(i)

    def tells(self, i: int) -> float:
        return self._origin

    def _agree(self, i: int, j: int) -> None:
        """Decide by the origins of all stages, under a schedule that flushes."""
        stage, norm = self.stage, self._run.norm
        assert norm is not None
        self._origin = norm.told(i, stage.predict, stage.device)
        with stage.predict.using(reads=(stage.weight_gradients,)):
            self._decide(i)

    def _decide(self, i: int) -> None:
        self.skips = self._origin > 0
        if not self.skips:
            self._kept.pop(i, None)
            return
        stage, is_last = self.stage, self._run.is_last
        if self._origin == stage.index + 1.0 or (self._origin == inf and is_last):
            alone = not self._agrees and not is_last
            who = f"stages 0 to {stage.index} skip" if alone else "all stages skip"
            why = self._describe_origin()
            _logger.warning("minibatch %d, stage %d: %s; %s the update", i, stage.index, why, who)
        self._undo(i)

    def _describe_origin(self) -> str:
        if self._origin == inf:
            return "the loss is not finite"
        if self._origin != self.stage.index + 1.0:
            return f"a gradient of stage {int(self._origin) - 1} is not finite"
        for name, gradient in reversed(self._gradients().items()):  # as the backward reaches them
            if not all_finite([gradient], self.stage.device):
                return f"the gradient of {bare(name)!r} is not finite"
        return "a gradient is not finite"  # its input's, or of tied weights, which have been sent


def all_finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Whether all numbers are finite, 0-d: tests minimum and maximum, which do not overflow."""
    values = [t._values() if t.is_sparse else local_part(t) for t in tensors]
    real = [torch.view_as_real(t) if t.is_complex() else t for t in values if t.numel()]
    ends = [end.double() for t in real for end in torch.aminmax(t)]
    return torch.stack([torch.zeros((), device=device).double(), *ends]).isfinite().all()
