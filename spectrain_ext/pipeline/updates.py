"""Updates a stage's weights: divides and clips gradients, and steps the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spectrain_ext.rng import RNG_LOCK
from spectrain_ext.schedule import Kind
from spectrain_ext.transport import DONE, Buffer, Point
from spectrain_ext.weights import StageWeights
from spectrain_ext.weights.storage import Storage

from .cursor import Cursor
from .norms import Clipping, GlobalNorm, gradient_norm
from .passes import Handler, hooks
from .stage import Stage

if TYPE_CHECKING:
    from spectrain_ext.weights.versions import Update


class Updates:
    """The updates of one stage in one run, with the norms that they clip by."""

    def __init__(
        self, stage: Stage, cursor: Cursor, clipping: Clipping, norm: GlobalNorm | None
    ) -> None:
        self._stage, self._cursor, self._clipping, self.norm = stage, cursor, clipping, norm
        self.divisors: dict[int, Tensor] = {}  # by minibatch, where losses are sums
        self.divisor: Tensor | None = None  # of the last update
        stage.note_clipped(None)
        self._norm_of = (*hooks(stage.passes, "gradient_norm"), gradient_norm)[0]
        self._gradients_read: tuple[Point, list[Tensor | None]] | None = None

    def handlers(self) -> dict[Kind, Handler]:
        weights = self._stage.weights
        steps: dict[Kind, Handler] = {Kind.DIVIDE: self._divide}
        if self.norm is not None:
            steps[Kind.SEND_NORM] = self._send_norm
        if weights is not None:
            if self._clipping.max_norm is not None:
                steps[Kind.CLIP] = self._clip
            steps[Kind.UPDATE] = self._update
        else:
            steps[Kind.UPDATE] = self._follow_passes
        return steps

    def _follow_passes(self, i: int, j: int) -> None:
        """Update nothing: results follow, and backwards write gradients that passes have read."""
        stage = self._stage
        if stage.skips:
            stage.note_skipped(by_all=self.norm is not None)
        if stage.passes:
            stage.weights_written()

    def _divide(self, i: int, j: int) -> None:
        """Divide the gradients of sums by the count of the minibatch."""
        self.divisor = self.divisors.pop(i, None)
        if self.divisor is None or self._stage.weights is None:
            return
        with self._stage.changing_gradients() as gradients:
            if gradients:  # if the count is 0, they are zeros
                torch._foreach_div_(gradients, self.divisor + (self.divisor == 0))

    def _send_norm(self, i: int, j: int) -> None:
        stage, norm = self._stage, self.norm
        assert norm is not None
        predict, buffer = stage.predict, Buffer(f"gradient norm of stage {stage.index}")
        predict.wait_stream(stage.compute)
        params = () if stage.weights is None else stage.weights.params
        with predict.using(reads=(stage.weight_gradients,), writes=(buffer,)):
            norm_here = self._norm_of(params, stage.device).double()
            number = max([each.tells(i) for each in stage.passes], default=0.0)
            norm_here = torch.stack([norm_here, torch.full_like(norm_here, number)])
        norm.give(i, stage.index, norm_here, buffer, predict)

    def _clip(self, i: int, j: int) -> None:
        stage, (max_norm, globally) = self._stage, self._clipping
        weights = stage.weights
        assert weights is not None and max_norm is not None
        if stage.skips:
            return
        predict = stage.predict
        predict.wait_stream(stage.compute)
        if globally:
            assert self.norm is not None
            norm = self.norm.take(i, predict, stage.device)
        with predict.using(writes=(stage.weight_gradients,)):
            if not globally:
                norm = self._norm_of(weights.params, stage.device)
            # Multiplies by min(1, max_norm / (norm + 1e-6)), without a CPU wait.
            nn.utils.clip_grads_with_norm_(weights.params, max_norm, norm)
        stage.note_clipped(norm)

    def _update(self, i: int, j: int) -> None:
        """Step the optimizer, unless a pass skips that; write the next forward's weights."""
        stage = self._stage
        weights, skips = stage.weights, bool(stage.passes) and stage.skips
        assert weights is not None and weights.storage is not None
        if weights.own_writes is not None:
            weights.own_writes.check(stage.index)
        cursor, forward = self._cursor, None
        following = cursor.peek() if cursor.limited else cursor.upcoming
        if following is not None and following.kind is Kind.FORWARD:
            forward = following.minibatch, following.microbatch
        moves = weights.moves, weights.rates_move
        update = weights.versions.begin_update(forward, *moves, skips)
        step = weights.skip if skips else weights.step
        if skips:
            stage.note_skipped(by_all=self.norm is not None)
        if stage.immediate:
            with RNG_LOCK:  # a hook may draw random numbers
                step(update)
        else:
            self._on_stream(stage, weights, weights.storage, step, update, forward)

    def _on_stream(
        self,
        stage: Stage,
        weights: StageWeights,
        storage: Storage,
        step: Callable[[Update], None],
        update: Update,
        forward: tuple[int, int] | None,  # the next instruction; None: not a forward
    ) -> None:
        # If the next instruction reads what the update writes, no computation overlaps with it.
        apart = stage.updates_apart or not weights.versions.is_read_next(update, forward)
        stream, other = stage.predict, stage.compute
        if not apart:
            stream, other = other, stream
        stream.wait_stream(other)
        changed = {storage.true, update.kept or storage.true, update.room or storage.true}
        gradients = [p.grad for p in weights.params]
        reads = [stage.weight_gradients]
        if update.before is not None and update.before not in changed:
            reads.append(update.before.memory)
        writes = [stage.optimizer_state, *(buffer.memory for buffer in changed)]
        with stream.using(reads=reads, writes=writes), RNG_LOCK:
            step(update)
        written = stream.mark() if apart else DONE
        for buffer in changed:
            buffer.written = written
        if apart:
            # Held until the compute stream has waited for the step, as it would reuse their memory.
            self._gradients_read = written, gradients
        stage.note_update(stream)

    def free_gradients(self) -> None:
        """Let the compute stream reuse the memory of gradients that an update has read."""
        if self._gradients_read is not None:
            stepped, _ = self._gradients_read
            self._stage.compute.wait(stepped)
            self._stage.compute.writes(self._stage.weight_gradients)
            self._gradients_read = None
