"""Trains averaged replicas in one process, minibatch by minibatch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import torch
from torch import Tensor, nn

from spectrain_ext.operators.averaging import Averaging, Exchange, in_a_row, taken_apart

from .delayed import Delayed


class Replicated:
    """Identically built replicas; each takes every r-th of the minibatch's ``parts``."""

    def __init__(self, replicas: Sequence[Delayed], averaging: Averaging, parts: int) -> None:
        if replicas[0].method.then is not None:
            raise ValueError("replicas: a method that changes cannot be averaged")
        self._replicas, self._parts = replicas, parts
        self._averaged = []
        for k, of_all in enumerate(zip(*(replica.stages for replica in replicas), strict=True)):
            messages: dict[int, list[Tensor]] = defaultdict(list)  # of all replicas, by number
            weights = [stage.weights for stage in of_all if stage.weights]
            for each in weights:
                each.moves = True
            exchanges = [_exchange(messages, len(replicas)) for _ in weights]
            self._averaged.append(
                [
                    (each, averaging.begin(in_a_row(each.newest()), exchange, k))
                    for each, exchange in zip(weights, exchanges, strict=True)
                ]
            )

    def train_on(self, value: Tensor, target: Tensor) -> Tensor:
        """Train on a minibatch, one update per stage and replica; return their mean loss."""
        r = len(self._replicas)
        inputs, targets = value.tensor_split(self._parts), target.tensor_split(self._parts)
        losses = [
            replica.compute(torch.cat(inputs[c::r]), torch.cat(targets[c::r]))
            for c, replica in enumerate(self._replicas)
        ]
        every = [pair for of_all in self._averaged for pair in of_all]
        for weights, average in every:
            average.before(in_a_row(weights.newest()))
        for replica in self._replicas:
            for stage in replica.stages:
                stage.step()
        for weights, average in every:
            average.made(in_a_row(weights.newest()))
        for weights, average in every:
            moved = average.after(in_a_row(weights.newest()))
            if moved is not None:
                weights.move(taken_apart(moved, weights.params))
        return torch.stack(losses).mean()

    @contextmanager
    def true_weights(self) -> Iterator[nn.Module]:
        """Provide the whole model with the averages and the first replica's module buffers."""
        with self._replicas[0].true_weights() as model:
            kept = []
            for of_all in self._averaged:
                begun = [average.average(in_a_row(w.newest())) for w, average in of_all]
                params, row = of_all[0][0].params, begun[0]()
                for p, value in zip(params, taken_apart(row, params), strict=True):
                    kept.append((p, p.data))
                    p.data = value
            try:
                yield model
            finally:
                for p, data in kept:
                    p.data = data


def _exchange(messages: dict[int, list[Tensor]], replicas: int) -> Exchange:
    """Return one replica's exchange: all have sent a message before any of them reads it."""
    numbers = count()

    def send(message: Tensor) -> Callable[[], Sequence[Tensor]]:
        number = next(numbers)
        sent = messages[number]
        sent.append(message.clone())
        if len(sent) == replicas:
            del messages[number]
        return lambda: sent

    return send
