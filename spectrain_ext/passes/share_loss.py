"""A pass that gives all ranks the losses, which go back with the gradients."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Self

import torch
from torch import Tensor

from spectrain_ext.pipeline.passes import Handler, Pass
from spectrain_ext.pipeline.views import ProcessesView, RunView, StageView
from spectrain_ext.schedule import Kind
from spectrain_ext.transport import Message


class ShareLoss(Pass):
    """Gives every rank of a ``DistributedPipeline`` the losses, as float64.

    On CUDA the CPU of every rank waits for each of them. In one process nothing changes.

    Example:
        >>> st.passes.ShareLoss()
        ShareLoss()
    """

    in_parts: bool

    def on(self, stage: StageView, processes: ProcessesView) -> Self:
        made = super().on(stage, processes)
        # Where stages have replicas, a minibatch's last gradient does not carry the whole loss:
        # every gradient carries its own microbatch's part, which replicas then add up.
        made.in_parts = processes.replicas.dealt
        return made

    def begin(self, run: RunView) -> Mapping[Kind, Handler]:
        self.known: dict[int, float] = {}  # by minibatch in flight, as far as it is known
        self._parts: dict[tuple[int, int], float] = {}
        return {}

    def lost(self, i: int, j: int, loss: Tensor) -> None:
        if self.in_parts:
            self._pass_on(i, j, loss.item())

    def finished(self, i: int, loss: Tensor) -> None:
        if not self.in_parts:
            self.known[i] = loss.item()

    def _pass_on(self, i: int, j: int, part: float) -> None:
        if self.stage.index:
            self._parts[i, j] = part

    def sends_gradient(self, i: int, j: int, message: Message) -> Message:
        number = self._parts.pop((i, j), nan) if self.in_parts else self.known.get(i, nan)
        loss = torch.tensor(number, dtype=torch.float64, device=self.stage.device)
        return message._replace(tensors=(*message.tensors, loss))

    def received_gradient(self, i: int, j: int, message: Message) -> Message:
        *gradients, loss = message.tensors
        assert loss is not None
        number = loss.item()
        if self.in_parts:
            self._pass_on(i, j, number)
            number += self.known.get(i, 0.0)
        self.known[i] = number
        return message._replace(tensors=tuple(gradients))
