"""Scaling: what torch.amp.GradScaler tells a step, where its parameters are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spectrain_ext.operators.lists import StepOptions


class Scaling(NamedTuple):
    """Scalars of a scaled step; GradScaler sets them on an optimizer around its ``step``.

    Attributes:
        grad_scale: what gradients are divided by; None where they have been unscaled already.
        found_inf: not 0 where a gradient is not finite, and the step is not to be made.
    """

    grad_scale: Tensor | None
    found_inf: Tensor | None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Scaling | None:
        """What is set on the optimizer now; None: nothing."""
        grad_scale = getattr(optimizer, "grad_scale", None)
        found_inf = getattr(optimizer, "found_inf", None)
        return None if grad_scale is found_inf is None else cls(grad_scale, found_inf)

    def skips(self) -> bool:
        """Whether the step is not to be made; on CUDA the host waits for the answer."""
        return self.found_inf is not None and bool(self.found_inf.item())

    @property
    def is_free(self) -> bool:
        """Whether the answer is on the host."""
        return self.found_inf is None or self.found_inf.device.type == "cpu"

    def on(self, device: torch.device) -> StepOptions:
        """What a plan on the device takes of it."""
        grad_scale, found_inf = (
            None if value is None else value.to(device, torch.float32, non_blocking=True)
            for value in self
        )
        return {"grad_scale": grad_scale, "found_inf": found_inf}
