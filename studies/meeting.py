"""Meeting: where replicas in one process leave messages for one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from threading import Condition
from typing import NamedTuple

import torch
from torch import Tensor

from spectrain_ext.operators.averaging import Exchange
from spectrain_ext.transport import Buffer, Event, callers_stream


class _Sent(NamedTuple):
    """A message that another replica's stream may read once it has been written."""

    message: Tensor
    buffer: Buffer
    written: Event

    @classmethod
    def of(cls, message: Tensor, name: str) -> _Sent:
        """A copy of it, made on the current stream."""
        stream, buffer = callers_stream(message.device), Buffer(name)
        with stream.using(writes=(buffer,)):
            copy = message.clone()
        written = stream.event()
        stream.record(written)
        return cls(copy, buffer, written)

    def read_on(self, device: torch.device) -> Tensor:
        """The message, for work that follows on the device's current stream."""
        # A copy between devices is made by the current streams of both.
        streams = [callers_stream(each) for each in {self.message.device, device}]
        for stream in streams:
            stream.wait(self.written)
            stream.lend([self.message])
        with callers_stream(device).using(reads=(self.buffer,)):
            return self.message.to(device)


class Meeting:
    """Where replicas in one process leave messages for one another, be they threads or not.

    Args:
        replicas: their number.

    Attributes:
        failure: why none of them goes on.
        changed: notified where there may be something new.
    """

    def __init__(self, replicas: int) -> None:
        self.failure: BaseException | None = None
        self.changed = Condition()
        self._replicas = replicas
        # (stage, number of the message) -> by replica, until all are there
        self._sent: dict[tuple[int, int], dict[int, _Sent]] = {}

    def exchange(self, replica: int, stage: int) -> Exchange:
        """What a replica of a stage sends by."""
        numbers = count()

        def send(message: Tensor) -> Callable[[], Sequence[Tensor]]:
            key = stage, next(numbers)
            own = _Sent.of(message, f"message of replica {replica} of stage {stage}")
            with self.changed:
                sent = self._sent.setdefault(key, {})
                sent[replica] = own
                if len(sent) == self._replicas:
                    del self._sent[key]  # who waits for it has it
                self.changed.notify_all()
            return partial(self._arrived, sent, message.device)

        return send

    def _arrived(self, sent: Mapping[int, _Sent], device: torch.device) -> Sequence[Tensor]:
        with self.changed:
            self.changed.wait_for(lambda: len(sent) == self._replicas or self.failure)
        if len(sent) < self._replicas:
            raise RuntimeError("another replica has failed") from self.failure
        return [sent[c].read_on(device) for c in range(self._replicas)]

    def fail(self, error: BaseException) -> None:
        """Let nobody wait any more; the first cause stays."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()
