"""Step: what surrounds the kernel: hooks, GradScaler's scalars, and that it is made as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from spectrain_ext.interrupts import deferred
from spectrain_ext.operators.laws import Law
from spectrain_ext.operators.lists import StepOptions, bump_versions

from .rows import Correcting, Rows
from .rule import Scalars
from .state import State


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


F = TypeVar("F", bound=Callable[..., Any])


def exclusive(method: F) -> F:
    """Let one thread at a time into methods that read or change weights, state or what is resolved.

    A Ctrl-C waits for their end.
    """

    @wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with deferred(), self._turn:
            return method(self, *args, **kwargs)

    return cast(F, alone)


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

    def skips(self, todo: Sequence[Rows]) -> bool:
        """Whether the step is not to be made, where the host knows, or must and waits for it."""
        found = self.found_inf
        if found is None:
            return False
        # A count lives on the host, and so does what a first step starts: both have to know.
        asks = any(rows.ledger.rule.scalars or not rows.started for rows in todo)
        return (asks or found.device.type == "cpu") and bool(found.item())

    def on(self, device: torch.device) -> StepOptions:
        """What a plan on the device takes of it."""
        grad_scale, found_inf = (
            None if value is None else value.to(device, torch.float32, non_blocking=True)
            for value in self
        )
        return {"grad_scale": grad_scale, "found_inf": found_inf}


class Work(NamedTuple):
    """All that a step writes, with nothing left that could be refused.

    Attributes:
        parts: rows, the native call that updates them, and their scalar state after it.
        templates: the numbers of every group.
        laws: of what the step writes beside, for every group; None: nothing.
    """

    parts: Sequence[tuple[Rows, Callable[[], None], list[Scalars]]]
    templates: list[Any]
    laws: tuple[Law, ...] | None

    @classmethod
    def of(
        cls,
        todo: Sequence[Rows],
        templates: list[Any],
        laws: tuple[Law, ...] | None,
        scaling: Scaling | None,
        correcting: Correcting | None = None,
    ) -> Work:
        """The work on rows that have read their gradients; errors are raised here."""
        parts = []
        for rows in todo:
            options: StepOptions = {} if scaling is None else scaling.on(rows.device)
            parts.append((rows, *rows.prepared(templates, laws, options, correcting)))
        return cls(parts, templates, laws)

    def do(self, state: State, bump: bool) -> bool:
        """Make the step.

        Args:
            state: the optimizer's.
            bump: whether autograd is to know that the parameters have changed.

        Returns:
            Whether parameters now share their numbers with others than before.
        """
        changed = False
        for rows, call, after in self.parts:
            call()
            if self.laws is not None:
                rows.write_rest(self.templates, self.laws)
            rows.forget_gradients()
            if rows.updated_to(after, state):
                changed = True
            if bump:
                bump_versions(rows.updated())
        return changed
