"""Loads the weights that a stage's forwards and backwards read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from spectrain_ext.schedule import Kind
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
            if not buffer.awaited:
                assert buffer.written is not None
                compute.wait(buffer.written)
                buffer.awaited = True
            if buffer is not storage.bound:
                storage.point(buffer)

        return load

    def _written(self, content: Content) -> VersionBuffer:
        stage, buffer, storage = self._stage, self._versions.room(content), self._storage
        if buffer.read is not None:
            stage.predict.wait(buffer.read)
        reads = stage.optimizer_state, storage.true.memory
        with stage.predict.using(reads=reads, writes=(buffer.memory,)):
            storage.write(content, buffer)
        if not stage.immediate:
            note_written(stage, buffer)
        return buffer


def note_written(stage: Stage, *buffers: VersionBuffer) -> None:
    """Record writes of these buffers on the prediction stream, which is not the CPU's."""
    for buffer in buffers:
        if buffer.written is None:
            buffer.written = stage.predict.event()
        stage.predict.record(buffer.written)
        buffer.awaited = False
    stage.predict.record(stage.loaded)


def note_read(stage: Stage) -> None:
    """Record that computation has read the weights that the module has now."""
    stage.compute.record(stage.computed)
    if stage.storage is not None:
        buffer = stage.storage.bound
        if buffer.read is None:
            buffer.read = stage.compute.event()
        stage.compute.record(buffer.read)
