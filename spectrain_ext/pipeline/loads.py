"""Selects the weights that a stage computes with, on the stream that loads and updates."""

from __future__ import annotations

from spectrain_ext.schedule import Kind
from spectrain_ext.weights import StageWeights
from spectrain_ext.weights.storage import Content, Storage, VersionBuffer

from .passes import Handler
from .stage import Stage


class Loads:
    """Who loads: the weights of a stage, for forwards and backwards of one run."""

    def __init__(self, stage: Stage, weights: StageWeights, storage: Storage) -> None:
        self._stage, self._versions, self._storage = stage, weights.versions, storage

    def handlers(self) -> dict[Kind, Handler]:
        versions = self._versions

        def forward(i: int, j: int) -> None:
            self._load(versions.for_forward(i, j))

        def backward(i: int, j: int) -> None:
            self._load(versions.for_backward(i, j))

        def backward_input(i: int, j: int) -> None:  # the first half: the second reads them too
            self._load(versions.for_backward(i, j, ends=False))

        return {
            Kind.LOAD_FORWARD: forward,
            Kind.LOAD_BACKWARD: backward,
            Kind.LOAD_BACKWARD_INPUT: backward_input,
        }

    def _load(self, content: Content) -> None:
        """Compute with these weights from here on; write them first unless a buffer holds them."""
        storage = self._storage
        buffer = self._versions.find(content)
        if buffer is None:
            buffer = self._written(content)
        if not buffer.awaited:
            assert buffer.written is not None
            self._stage.compute.wait(buffer.written)
            buffer.awaited = True
        if buffer is not storage.bound:
            storage.point(buffer)

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
    """Record that these were written on the prediction stream, which is not the CPU's."""
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
