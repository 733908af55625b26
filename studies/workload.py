"""Defines a workload: the model, data and optimizer of one run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from spectrain_ext.method import Method

from .models.building import cut_evenly

if TYPE_CHECKING:
    from .settings import TrainSettings

Batch = tuple[Any, Tensor]


class Epoch(Sized, Iterable[Batch], Protocol):
    """Minibatches ``(input, target)`` with a length; a ``DataLoader`` is one."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The model, data and optimizer of one run.

    Attributes:
        model: layers called in sequence; stages get equal numbers of them.
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
    """Return the model cut into stages."""
    return cut_evenly(list(workload.model), stages)


def epochs_of(train: Epoch, epochs: int, begin: int = 0) -> Iterator[Batch]:
    """Return the minibatches of several epochs, without the first ``begin``."""
    return islice(chain.from_iterable(repeat(train, epochs)), begin, None)


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy in nats per target: ``(..., classes)`` against int64 ``(...)``."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def tested(
    model: nn.Module,
    test: Iterable[Batch],
    loss: Callable[[Any, Any], Tensor] = mean_loss,
    device: torch.device | str = "cpu",
    told: Callable[..., None] = lambda *words: None,
) -> tuple[float, float]:
    """Return accuracy and mean loss over all targets; leave the model in evaluation mode.

    The accuracy is nan if targets are not classes. ``told`` is called with the progress from time
    to time.
    """
    model.eval()
    total, correct, count = 0.0, 0.0, 0
    with torch.no_grad():
        for number, (inputs, targets) in enumerate(test):
            told("testing with minibatch", number)
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
