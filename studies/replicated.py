"""Trains averaged replicas in one process, minibatch by minibatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from spectrain_ext import Delayed
from spectrain_ext.operators.averaging import Averaging, in_a_row, taken_apart

from .meeting import Meeting


class Replicated:
    """Averaged replicas, trained as ``SideBySide`` trains them.

    Args:
        replicas: identically built replicas.
        averaging: the averaging method.
        parts: number of parts of a minibatch, distributed among the replicas.
    """

    def __init__(self, replicas: Sequence[Delayed], averaging: Averaging, parts: int) -> None:
        if replicas[0].method.then is not None:
            raise ValueError("replicas: a method that changes cannot be averaged")
        self._replicas, self._parts = replicas, parts
        stages = zip(*(replica.stages for replica in replicas), strict=True)
        weights = [[stage.weights for stage in of_all if stage.weights] for of_all in stages]
        meeting = Meeting(len(replicas))
        self._averaged = [
            [
                (each, averaging.begin(in_a_row(each.newest()), meeting.exchange(c, k), k))
                for c, each in enumerate(of_all)
            ]
            for k, of_all in enumerate(weights)
        ]
        for of_all in weights:
            for each in of_all:
                each.moves = True

    def train_on(self, value: Tensor, target: Tensor) -> Tensor:
        """Train on a minibatch, one update per stage and replica; return their mean loss."""
        r = len(self._replicas)
        inputs, targets = value.tensor_split(self._parts), target.tensor_split(self._parts)
        losses = [
            replica.compute(torch.cat(inputs[c::r]), torch.cat(targets[c::r]))
            for c, replica in enumerate(self._replicas)
        ]
        for of_all in self._averaged:
            for weights, average in of_all:
                average.before(in_a_row(weights.newest()))
        for replica in self._replicas:
            for stage in replica.stages:
                stage.step()
        for of_all in self._averaged:
            for weights, average in of_all:
                average.made(in_a_row(weights.newest()))
        for of_all in self._averaged:
            for weights, average in of_all:
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
