"""Workload: what one run trains and is tested with, whoever made it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from spectrain_ext.method import Method

from .models.building import cut_evenly
from .settings import TrainSettings

Batch = tuple[Any, Tensor]


class Epoch(Sized, Iterable[Batch], Protocol):
    """Minibatches ``(input, target)``, counted; a ``DataLoader`` is one."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one run trains.

    Attributes:
        model: layers that are called one after another, of which stages get equal numbers.
        optimizer: makes the optimizer of a stage's parameters, as ``Pipeline`` wants it.
        loss: of the model's output and a minibatch's target: their mean.
        train: minibatches ``(input, target)`` of one epoch, gone through again for each: they are
            shuffled by the seed, and not by torch's global random state. Each is one update.
        test: minibatches to test with, gone through several times.
        name: in tables and pictures.
        scheduler: makes a learning-rate scheduler of an optimizer; None: rates are constant.
        judged: by which figure of the tests. For an accuracy the output is ``(..., classes)``, the
            target int64 ``(...)``; a perplexity is the exponential of the loss.
        about: what the run depends on besides the settings, of JSON's types.
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


#: Makes the workload of a run: of settings, method, number of stages and seed.
Maker = Callable[[TrainSettings, Method, int, int], Workload]


def stages_in(workload: Workload, stages: int) -> list[nn.Module]:
    """The model in so many stages.

    Raises:
        ValueError: it has fewer layers.
    """
    return cut_evenly(list(workload.model), stages)


def epochs_of(train: Epoch, epochs: int, begin: int = 0) -> Iterator[Batch]:
    """The minibatches of several epochs, without the first ``begin``."""
    return islice(chain.from_iterable(repeat(train, epochs)), begin, None)


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats per target: ``(..., classes)`` against int64 ``(...)``."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def tested(
    model: nn.Module,
    test: Iterable[Batch],
    loss: Callable[[Any, Any], Tensor] = mean_loss,
    device: torch.device | str = "cpu",
    told: Callable[..., None] = lambda *words: None,
) -> tuple[float, float]:
    """Accuracy and mean loss over all targets; leaves the model in evaluation.

    The accuracy is nan where targets are no classes. ``told`` hears from time to time how far it
    is.

    Raises:
        ValueError: there is nothing to test with.
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
