"""Lets the caller of a run read the true weights where stages compute with other ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from spectrain_ext.interrupts import deferred

from .executor import Executor
from .names import bare
from .ties import Copy


@contextmanager
def true_weights(executor: Executor, copies: Sequence[Copy]) -> Iterator[None]:
    """Inside, the stages' parameters hold the true weights, and their modules may be saved."""
    stages = executor.stages
    with deferred():
        executor.let_caller_follow()
        guards = [lifted for stage in stages for lifted in stage.guard.lift(stage.guarded)]
        shown = _true_weights(executor, copies)
        before = [(p, p.data, p._version) for p in shown]
        for p, weights in shown.items():
            p.data = weights
    try:
        yield
    finally:
        with deferred():
            changed = {p for p, _, version in before if p._version != version}
            executor.follow_caller()
            tied = {copy.held for copy in copies}
            for p, data, _ in before:
                if executor.running or p in tied:
                    p.data = data
            if executor.running:
                for attributes, guard in guards:
                    attributes.update(guard)
            else:  # the run has ended inside, and with it the use of all other buffers
                for storage in (stage.storage for stage in stages):
                    if storage is not None:
                        storage.point(storage.home)
    for stage in stages if changed else ():
        for name, p in stage.module.named_parameters():
            if p in changed:
                raise RuntimeError(
                    f"weights: stages[{stage.index}]: parameter {bare(name)!r} was changed in "
                    "place, and predictions for minibatches in flight do not follow; end the run "
                    "before you change parameters"
                )


def _true_weights(executor: Executor, copies: Iterable[Copy]) -> dict[Tensor, Tensor]:
    """Return where the true weights are; copies of those in another dtype or on another device."""
    shown: dict[Tensor, Tensor] = {}
    for stage in executor.stages:
        if stage.weights is not None:
            true = stage.weights.true_weights()
            shown.update((p, true[p].to(p.dtype)) for p in stage.weights.params)
    for copy in copies:
        if copy.original is not None:
            weights = shown.get(copy.original, copy.original.detach())
            shown[copy.held] = weights.to(copy.held.device)
    return shown
