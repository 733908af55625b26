"""Defines a workload, the model, data and optimizer of a run, and makes a user's own."""

from __future__ import annotations

import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from spectrain_ext.method import Method
from spectrain_ext.tools.commands.options import imported, is_imported, method_of

from .models.building import cut_evenly, seeded
from .options import OptionError

if TYPE_CHECKING:
    from .settings import TrainSettings

Batch = tuple[Any, Tensor]


class Epoch(Sized, Iterable[Batch], Protocol):
    """Minibatches ``(input, target)`` with a length; a ``DataLoader`` is one."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The model, data and optimizer of one run.

    Attributes:
        model: layers called in sequence; stages get equal numbers of them. In a study each maps a
            tensor to a tensor, with the samples along dimension 0.
        optimizer: makes the optimizer of a stage's parameters, as for ``Pipeline``.
        loss: the mean loss of the model's output and a minibatch's target.
        train: minibatches ``(input, target)`` of one epoch, iterated again for each epoch; the seed
            shuffles them, not torch's global random state. Each is one update.
        test: test minibatches, iterated several times.
        name: name in tables and pictures.
        scheduler: makes the learning-rate scheduler of an optimizer; None: rates are constant.
        judged: the test figure for comparisons. For an accuracy the output is ``(..., classes)``
            and the target int64 ``(...)``; a perplexity is the exponential of the loss.
        about: JSON values that the run depends on besides the settings.
    """

    model: Sequence[nn.Module] | nn.Sequential
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    loss: Callable[[Any, Any], Tensor]
    train: Epoch
    test: Iterable[Batch]
    name: str = "own"
    scheduler: Callable[[Any], LRScheduler] | None = None
    judged: Literal["accuracy", "perplexity", "loss"] = "accuracy"
    about: Mapping[str, Any] = field(default_factory=dict)


#: Makes the workload of a run from settings, method, number of stages and seed.
Maker: TypeAlias = "Callable[[TrainSettings, Method, int, int], Workload]"


def stages_in(workload: Workload, stages: int) -> list[nn.Module]:
    return cut_evenly(list(workload.model), stages)


def epochs_of(train: Epoch, epochs: int) -> Iterator[Batch]:
    """Return the minibatches of several epochs."""
    return chain.from_iterable(repeat(train, epochs))


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy in nats per target: ``(..., classes)`` against int64 ``(...)``."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def tested(
    model: nn.Module,
    test: Iterable[Batch],
    loss: Callable[[Any, Any], Tensor] = mean_loss,
    device: torch.device | str = "cpu",
) -> tuple[float, float]:
    """Return accuracy, nan if targets are not classes, and mean loss over all targets."""
    model.eval()
    total, correct, count = 0.0, 0.0, 0
    with torch.no_grad():
        for inputs, targets in test:
            outputs = model(inputs.to(device)).cpu()
            total += loss(outputs, targets).item() * targets.numel()
            count += targets.numel()
            if targets.dtype == torch.int64 and outputs.shape[:-1] == targets.shape:
                correct += int((outputs.argmax(dim=-1) == targets).sum())
            else:
                correct = math.nan
    if not count:
        raise ValueError("test: expected minibatches with targets, got none")
    return correct / count, total / count


# A user's function

#: Options that a workload function receives if it has parameters of these names.
OFFERED = (
    *("data_dir", "batch_size", "width", "depth", "context", "train_samples", "test_samples"),
    *("augment", "optimizer", "momentum", "weight_decay", "nesterov", "lr_schedule", "warmup"),
)
_ALWAYS = ("seed", "stages", "method", "epochs", "lr")


@lru_cache
def parameters_of(name: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the function ``module:function``, all of which options provide."""
    found = inspect.signature(_function_of(name)).parameters
    for parameter in found.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        by_keyword = parameter.kind is not parameter.POSITIONAL_ONLY
        known = by_keyword and parameter.name in (*_ALWAYS, *OFFERED)
        if not known and parameter.default is parameter.empty:
            raise OptionError(
                "workload",
                f"{name} has a parameter {parameter.name!r} without a default; it is called by "
                f"keyword, with those that it has of {', '.join((*_ALWAYS, *OFFERED))}",
            )
    return found


def _function_of(name: str) -> Callable[..., Any]:
    if ":" not in name:
        raise OptionError("workload", f"expected module:function, got {name!r}")
    try:
        function = imported(name)
    except ValueError as error:
        raise OptionError("workload", str(error)) from error
    if not callable(function):
        raise OptionError(
            "workload",
            f"{name!r} is of type {type(function).__name__}, expected a function that returns a "
            "studies.Workload",
        )
    return function  # type: ignore[no-any-return]


def start_rate(name: str) -> float | None:
    parameter = parameters_of(name).get("lr")
    default = None if parameter is None else parameter.default
    return float(default) if isinstance(default, (int, float)) else None


def own(settings: TrainSettings, method: Method, stages: int, seed: int) -> Workload:
    """Call the function of ``workload`` with the options that it has parameters for."""
    name = settings.workload
    assert name is not None
    offered = {
        **{"seed": seed, "stages": stages, "method": method.name},
        **{"epochs": settings.epochs, "lr": settings.lr},
        **dict(settings.given),
    }
    known = parameters_of(name)
    with seeded(seed):
        made = _function_of(name)(**{key: offered[key] for key in known if key in offered})
    if not isinstance(made, Workload):
        raise OptionError(
            "workload", f"{name} returned a {type(made).__name__}, expected a studies.Workload"
        )
    if not isinstance(made.model, (Sequence, nn.Sequential, nn.ModuleList)):
        raise OptionError(
            "workload",
            f"{name} returned a model of type {type(made.model).__name__}, expected an "
            "nn.Sequential or a list of layers, to be cut between them",
        )
    return replace(made, about={**made.about, **source_of_workload(name)})


# The hash of a module's file; changes in modules that it imports are not detected.


@lru_cache
def source_of_workload(name: str) -> dict[str, str]:
    _function_of(name)
    return {"workload_sha256": _hash_of(name)}


def source_of_method(name: str) -> dict[str, str]:
    """Return the source hash of a method's module; empty for a registered method."""
    if not is_imported(name):
        return {}
    method_of(name)
    return {"method": name, "method_sha256": _hash_of(name)}


def _hash_of(name: str) -> str:
    file = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
    return hashlib.sha256(b"" if file is None else Path(file).read_bytes()).hexdigest()
