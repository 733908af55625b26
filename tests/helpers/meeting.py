"""Exchanges messages between replicas in one process."""

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
    """A message that another replica's stream may read once it is written."""

    message: Tensor
    buffer: Buffer
    written: Event

    @classmethod
    def of(cls, message: Tensor, name: str) -> _Sent:
        """Copy a message on the current stream."""
        stream, buffer = callers_stream(message.device), Buffer(name)
        with stream.using(writes=(buffer,)):
            copy = message.clone()
        written = stream.event()
        stream.record(written)
        return cls(copy, buffer, written)

    def read_on(self, device: torch.device) -> Tensor:
        """Return the message for work on the device's current stream."""
        # A copy between devices uses the current streams of both.
        streams = [callers_stream(each) for each in {self.message.device, device}]
        for stream in streams:
            stream.wait(self.written)
            stream.lend([self.message])
        with callers_stream(device).using(reads=(self.buffer,)):
            return self.message.to(device)


class Meeting:
    """Exchanges messages between replicas in one process, in one or several threads.

    Attributes:
        failure: the reason why all replicas stopped, if any.
        changed: notified when a message may have arrived.
    """

    def __init__(self, replicas: int) -> None:
        self.failure: BaseException | None = None
        self.changed = Condition()
        self._replicas = replicas
        # by (stage, message number), then by replica, until all have arrived
        self._sent: dict[tuple[int, int], dict[int, _Sent]] = {}

    def exchange(self, replica: int, stage: int) -> Exchange:
        """Return the exchange that a replica of a stage sends with."""
        numbers = count()

        def send(message: Tensor) -> Callable[[], Sequence[Tensor]]:
            key = stage, next(numbers)
            own = _Sent.of(message, f"message of replica {replica} of stage {stage}")
            with self.changed:
                sent = self._sent.setdefault(key, {})
                sent[replica] = own
                if len(sent) == self._replicas:
                    del self._sent[key]  # replicas that wait for it already hold a reference
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
        """Wake up all waiting replicas with an error; keep the first cause."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()
