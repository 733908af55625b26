"""Exchanges messages between replicas in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from threading import Condition

import torch
from torch import Tensor

from spectrain_ext.transport import Buffer, Event, callers_stream

Sent = tuple[Tensor, Buffer, Event]  # a message, its memory, and when it is written


def copied(message: Tensor, name: str) -> Sent:
    """Copy a message on the current stream."""
    stream, buffer = callers_stream(message.device), Buffer(name)
    with stream.using(writes=(buffer,)):
        copy = message.clone()
    written = stream.event()
    stream.record(written)
    return copy, buffer, written


def read_on(device: torch.device, message: Tensor, buffer: Buffer, written: Event) -> Tensor:
    """Return a message for work on the device's current stream."""
    # A copy between devices uses the current streams of both.
    for stream in [callers_stream(each) for each in {message.device, device}]:
        stream.wait(written)
        stream.lend([message])
    with callers_stream(device).using(reads=(buffer,)):
        return message.to(device)


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
        self._sent: dict[tuple[int, int], dict[int, Sent]] = {}

    def exchange(
        self, replica: int, stage: int
    ) -> Callable[[Tensor], Callable[[], Sequence[Tensor]]]:
        """Return the exchange that a replica of a stage sends with."""
        numbers = count()

        def send(message: Tensor) -> Callable[[], Sequence[Tensor]]:
            key = stage, next(numbers)
            own = copied(message, f"message of replica {replica} of stage {stage}")
            with self.changed:
                sent = self._sent.setdefault(key, {})
                sent[replica] = own
                if len(sent) == self._replicas:
                    del self._sent[key]  # replicas that wait for it already hold a reference
                self.changed.notify_all()
            return partial(self._arrived, sent, message.device)

        return send

    def _arrived(self, sent: dict[int, Sent], device: torch.device) -> Sequence[Tensor]:
        with self.changed:
            self.changed.wait_for(lambda: len(sent) == self._replicas or self.failure)
        if len(sent) < self._replicas:
            raise RuntimeError("another replica has failed") from self.failure
        return [read_on(device, *sent[c]) for c in range(self._replicas)]

    def fail(self, error: BaseException) -> None:
        """Wake up all waiting replicas with an error; keep the first cause."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()
