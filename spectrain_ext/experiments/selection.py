"""Which methods are compared, and what each of them needs to be set to."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import click
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from spectrain_ext.distributed import DistributedPipeline
from spectrain_ext.method import Method, find_method, places_of
from spectrain_ext.method.registry import methods
from spectrain_ext.optim import PredictingOptimizer
from spectrain_ext.pipeline.pipeline import Pipeline
from spectrain_ext.schedule import FLUSHING, Place, Replicas

from .settings import TrainSettings, Window
from .workload import make_optimizer, mean_loss

#: What is compared where no method is named: synchronous training, and one of each kind.
DEFAULT_METHODS = ("sync", "vanilla", "pipedream", "spectrain", "spectrain-stash")
ALL = "all"
# With one microbatch they are what sync is.
_WANT_MICROBATCHES = ("gpipe", "1f1b")


def choose_methods(given: Sequence[str]) -> tuple[str, ...]:
    """Return the methods named in ``given`` (each entry may list several, with commas).

    ``all`` is every one that there is, no name at all :data:`DEFAULT_METHODS`.

    Raises:
        click.BadParameter: a name that is no method; the message lists those that exist.
    """
    known = methods()
    names = _names(given)
    for name in names:
        if name not in (*known, ALL):
            raise click.BadParameter(
                f"unknown method {name!r}; the methods are {', '.join(known)}, or {ALL}",
                param_hint="'--method'",
            )
    if ALL in names:
        return known
    return tuple(dict.fromkeys(names)) or DEFAULT_METHODS


def all_asked(given: Sequence[str]) -> bool:
    """Whether ``given`` asks for all methods, not only for those that it names."""
    return ALL in _names(given)


def _names(given: Sequence[str]) -> list[str]:
    return [name.strip() for entry in given for name in entry.split(",") if name.strip()]


def microbatches_for(
    names: Sequence[str], stages: int, replicas: Sequence[int] | None = None
) -> int:
    """Microbatches that let every method of ``names`` be what it is; 1 where all are content.

    Replicas deal them out evenly.
    """
    least = 1
    for name in names:
        method = find_method(name)
        if name in _WANT_MICROBATCHES:
            least = max(least, stages)
        elif method.min_microbatches is not None:
            place = Place(0, stages, stages, 1)
            least = max(least, method.min_microbatches(place))
    each = math.lcm(*replicas) if replicas else 1
    return -(-least // each) * each


def stages_of(method: Method, settings: TrainSettings) -> int:
    """Stages that a method trains the model in: those of the settings, or the most it can have."""
    return min(settings.stages, method.max_stages or settings.stages)


def window_of(method: Method, settings: TrainSettings) -> Window:
    """The settings' window, where the method's schedule has one to choose."""
    return None if method.schedule in FLUSHING else settings.window


def fitting(settings: TrainSettings, *, leave_out: bool) -> tuple[TrainSettings, dict[str, str]]:
    """Return the settings with the methods that work with them, and why others do not.

    Raises:
        ValueError: a method does not work and is not to be left out; or none is left.
    """
    reasons = {name: why_not(name, settings) for name in settings.methods}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    for name, reason in left_out.items():
        if not leave_out or len(left_out) == len(reasons):
            raise ValueError(f"method {name}: {reason}")
    kept = tuple(name for name in settings.methods if name not in left_out)
    return dataclasses.replace(settings, methods=kept), left_out


def build_pipeline(
    settings: TrainSettings,
    method: Method,
    modules: list[nn.Module],
    *,
    devices: Sequence[str] | None = None,
    scheduler: Callable[[PredictingOptimizer], LambdaLR] | None = None,
    stage: int | None = None,
) -> Pipeline:
    """Return the pipeline of a method, with everything that the settings say of it.

    Args:
        settings: of the comparison.
        method: one that works with them.
        modules: all stages.
        devices: one per stage; None: where the stages are.
        scheduler: makes a stage's learning-rate scheduler.
        stage: the one that is this process's; None: it has all of them.

    Raises:
        ValueError: the method does not work with the settings.
    """
    more: dict[str, Any] = {
        "scheduler": scheduler,
        "microbatches": settings.microbatches,
        "window": window_of(method, settings),
        "clip_norm": settings.clip_norm,
        "recompute": settings.recompute,
    }

    def optimizer(parameters: list[nn.Parameter]) -> PredictingOptimizer:
        return make_optimizer(settings, method, parameters)

    if stage is None:
        return Pipeline(modules, optimizer, mean_loss, method, devices, **more)
    device = None if devices is None else devices[stage]
    return DistributedPipeline(
        modules[stage],
        optimizer,
        mean_loss,
        method,
        replicas=settings.replicas,
        device=device,
        **more,
    )


def why_not(name: str, settings: TrainSettings) -> str | None:
    """What keeps a method from working with these settings, None if nothing does."""
    method = find_method(name)
    # as many stages of the smallest kind: whether it can work does not depend on the model
    count = stages_of(method, settings)
    stages: list[nn.Module] = [nn.Linear(1, 1) for _ in range(count)]
    try:
        if settings.replicas is not None and count == settings.stages:
            window = window_of(method, settings)
            replicas = Replicas(settings.replicas)
            places_of(method, count, settings.microbatches, window, replicas)
            # windows of replicas are no windows of a pipeline without them
            settings = dataclasses.replace(settings, window=None)
        build_pipeline(settings, method, stages).release()
    except ValueError as error:
        return str(error)
    return None
