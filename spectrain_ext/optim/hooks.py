"""Hooks: torch's around a step, at no cost where there are none."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def hooked(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a step in torch's hooks, and in its profiler range only while somebody profiles.

    The range costs as much as the rest of a small step.
    """
    plain: Callable[..., Any] = torch.optim.Optimizer.profile_hook_step(func)

    @wraps(func)
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or torch._C._autograd._profiler_enabled()
        ):
            return plain(self, *args, **kwargs)
        return func(self, *args, **kwargs)

    return step
