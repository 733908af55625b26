"""Builds the pipeline of a run, and finds the methods that work with the settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from spectrain_ext.method import Method, check, in_words, places_of
from spectrain_ext.pipeline.pipeline import Pipeline
from spectrain_ext.tools.commands.options import method_of, own_failures

from .optimizers import make_optimizer
from .options import OptionError
from .settings import AUTO, TrainSettings, microbatches_in, stages_of
from .workload import Workload, own


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for CUDA devices, so that timing covers the work and not only its launch."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def build_pipeline(
    settings: TrainSettings,
    method: Method,
    workload: Workload,
    stages: Sequence[nn.Module],
    *,
    devices: Sequence[str] | None = None,
) -> Pipeline:
    return Pipeline(
        list(stages),
        workload.optimizer,
        workload.loss,
        method,
        devices,
        scheduler=workload.scheduler,
        microbatches=microbatches_in(method, settings),
        clip_norm=settings.clip_norm,
        clip_scope="stage",  # for every method, so that they differ in nothing else
    )


def _an_optimizer(settings: TrainSettings, method: Method) -> torch.optim.Optimizer:
    """Return an optimizer like a stage's, of a parameter outside any model."""
    lone = [nn.Parameter(torch.zeros(1))]
    if settings.workload is None:
        return make_optimizer(settings, method, lone)
    return own(settings, method, stages_of(method, settings), settings.seeds[0]).optimizer(lone)


def fitting(settings: TrainSettings, *, leave_out: bool) -> tuple[TrainSettings, dict[str, str]]:
    """Return the settings with only the methods that work, and the reasons for the others."""
    reasons = {name: _why_not(name, settings) for name in settings.methods}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    for name, reason in left_out.items():
        if not leave_out or len(left_out) == len(reasons):
            raise ValueError(f"method {name}: {reason}")
    kept = tuple(name for name in settings.methods if name not in left_out)
    return dataclasses.replace(settings, methods=kept), left_out


def choice(settings: TrainSettings) -> str:
    """Return one line about what the method ``auto`` chose for these settings."""
    method = method_of(AUTO)
    parts = microbatches_in(method, settings)
    places = places_of(method, settings.stages, parts)
    return in_words(method, places, _an_optimizer(settings, method))


def _why_not(name: str, settings: TrainSettings) -> str | None:
    """Return why a method cannot work with these settings, None if it can."""
    method = method_of(name)
    try:
        with own_failures(name):
            check(
                method,
                stages_of(method, settings),
                microbatches=microbatches_in(method, settings),
                optimizer=_an_optimizer(settings, method),
            )
    except OptionError:  # an error of the workload, the same for every method
        raise
    except ValueError as error:
        return str(error)
    return None
