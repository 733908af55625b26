"""Loads the weights that a stage's forwards and backwards read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from spectrain_ext.schedule import Kind
from spectrain_ext.transport import DONE
from spectrain_ext.weights import StageWeights
from spectrain_ext.weights.storage import Content, Storage, VersionBuffer

from .passes import Handler
from .stage import Stage


class Loads:
    """The loads of one stage in one run: they point its parameters at versions of the weights."""

    def __init__(self, stage: Stage, weights: StageWeights, storage: Storage) -> None:
        self._stage, self._versions, self._storage = stage, weights.versions, storage

    def handlers(self) -> dict[Kind, Handler]:
        versions = self._versions
        # The second half of a backward reads the weights of the first half too.
        first_half = partial(versions.for_backward, ends=False)
        return {
            Kind.LOAD_FORWARD: self._loading(versions.for_forward),
            Kind.LOAD_BACKWARD: self._loading(versions.for_backward),
            Kind.LOAD_BACKWARD_INPUT: self._loading(first_half),
        }

    def _loading(self, read_by: Callable[[int, int], Content]) -> Handler:
        """Return the handler that loads the weights which an instruction reads by ``read_by``."""
        storage, compute = self._storage, self._stage.compute

        def load(i: int, j: int) -> None:
            content, buffer = read_by(i, j), storage.bound
            if buffer.content != content:
                # Write them first unless another buffer holds them.
                buffer = self._versions.find(content) or self._written(content)
            if buffer.written is not DONE:
                compute.wait(buffer.written)
            if buffer is not storage.bound:
                storage.point(buffer)

        return load

    def _written(self, content: Content) -> VersionBuffer:
        stage, buffer, storage = self._stage, self._versions.room(content), self._storage
        stage.wait_for_uses(buffer, again=self._versions.version > 0)
        reads = stage.optimizer_state, storage.true.memory
        with stage.predict.using(reads=reads, writes=(buffer.memory,)):
            storage.write(content, buffer)
        buffer.written = stage.predict.mark()
        return buffer
