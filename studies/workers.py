"""Workers: asynchronous data parallelism under one master, its times drawn, its gradients real.

A worker computes a gradient with the weights that it was sent last, while others' gradients
arrive; the master updates by every one that comes and sends new weights back. No processes: who is
through next is drawn, as in DANA's own simulation (Hakimi et al., arXiv 1907.11612).
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from spectrain_ext.operators import sgd_step_

from .data.split import Split
from .workload import mean_loss, tested

#: A gradient: of which weights, on which minibatch.
Gradient = Callable[[Tensor, int], Tensor]
_SLOW = 0.999  # of gap-aware's average


class Master(Protocol):
    """What all workers share; theta is updated in place."""

    def update(self, message: Tensor, stale: Tensor, lr: float) -> None:
        """Take in a worker's message, whose gradient is of the ``stale`` weights."""

    def sends(self, lr: float) -> Tensor:
        """The weights that the worker computes with next."""


class Rule(Protocol):
    """How workers and the master train: a value."""

    def master(self, theta: Tensor, workers: int, lr: float) -> Master:
        """A master of these weights, for so many workers; ``lr`` is the largest that will come."""

    def message(self, gradient: Tensor, buffer: Tensor) -> Tensor:
        """What a worker sends; the buffer is its own, zeros at first."""


@dataclass(frozen=True)
class Asgd:
    """ASGD: theta <- theta - eta*(g + gamma*v) with v <- gamma*v + g, at the master.

    Nesterov's momentum in Bengio's form, NAG-ASGD of arXiv 1907.11612; plain ASGD (Dean et al.,
    2012) with ``momentum=0``.
    """

    momentum: float = 0.9

    def master(self, theta: Tensor, workers: int, lr: float) -> Master:
        return _Sgd(self, theta, lr)

    def message(self, gradient: Tensor, buffer: Tensor) -> Tensor:
        return gradient

    def corrected(self, gradient: Tensor, moved: Tensor, master: _Sgd) -> Tensor:
        """What the master steps with, of weights from which it has ``moved``."""
        return gradient


@dataclass(frozen=True)
class DcAsgd(Asgd):
    """DC-ASGD: g + strength*g*g*(theta - theta_stale) for g (Zheng et al., arXiv 1609.08326)."""

    strength: float = 0.04

    def corrected(self, gradient: Tensor, moved: Tensor, master: _Sgd) -> Tensor:
        return gradient + self.strength * gradient * gradient * moved


@dataclass(frozen=True)
class GapAware(Asgd):
    """Gap-aware: g / (1 + |theta - theta_stale| / (eta_max*(sqrt(A_hat) + 1e-8))) for g.

    A <- .999*A + .001*v^2 after every step, A_hat is A without its bias to zero (Barkai, Hakimi,
    Schuster, arXiv 1909.10802).
    """

    def corrected(self, gradient: Tensor, moved: Tensor, master: _Sgd) -> Tensor:
        if not master.updates:  # nothing has moved yet
            return gradient
        hat = master.average / (1 - _SLOW**master.updates)
        return gradient / (1 + moved.abs() / (master.largest * (hat.sqrt() + 1e-8)))


class _Sgd:
    """A master that makes SGD's step, and sends its weights as they are."""

    def __init__(self, rule: Asgd, theta: Tensor, largest: float) -> None:
        self._rule, self._theta, self.largest, self.updates = rule, theta, largest, 0
        self._v, self.average = torch.zeros_like(theta), torch.zeros_like(theta)

    def update(self, message: Tensor, stale: Tensor, lr: float) -> None:
        gradient = self._rule.corrected(message, self._theta - stale, self)
        m = self._rule.momentum
        sgd_step_(self._theta, gradient, self._v, lr=lr, momentum=m, nesterov=m > 0)
        self.updates += 1
        self.average.lerp_(self._v.square(), 1 - _SLOW)

    def sends(self, lr: float) -> Tensor:
        return self._theta.clone()


@dataclass(frozen=True)
class DanaSlim:
    """DANA-Slim: a worker v <- gamma*v + g sends gamma*v + g; the master theta <- theta - eta*u.

    Hakimi et al., arXiv 1907.11612: momentum is the workers', so that the master's weights are
    already those that the momentum of all will have moved them to.
    """

    momentum: float = 0.9

    def master(self, theta: Tensor, workers: int, lr: float) -> Master:
        return _Sgd(Asgd(0.0), theta, lr)

    def message(self, gradient: Tensor, buffer: Tensor) -> Tensor:
        buffer.mul_(self.momentum).add_(gradient)
        return torch.add(gradient, buffer, alpha=self.momentum)


@dataclass(frozen=True)
class Smega2:
    """SMEGA2: a single momentum for all, of whole cycles of n gradients, n workers.

    G <- G + g; theta <- theta - eta*(g + gamma*m); every n steps m <- gamma*m + G/n and G <- 0. c
    steps into a cycle theta - eta*gamma*((c/n)*G + (n + c*(gamma - 1))*m) is sent: where the next n
    steps will have come to (Cohen, Hakimi, Schuster, ICPP 2022).
    """

    momentum: float = 0.9

    def master(self, theta: Tensor, workers: int, lr: float) -> Master:
        return _Smega2(theta, workers, self.momentum)

    def message(self, gradient: Tensor, buffer: Tensor) -> Tensor:
        return gradient


class _Smega2:
    def __init__(self, theta: Tensor, workers: int, momentum: float) -> None:
        self.theta, self.momentum, self._n, self._c = theta, momentum, workers, 0
        self._sum, self._m = torch.zeros_like(theta), torch.zeros_like(theta)

    def update(self, message: Tensor, stale: Tensor, lr: float) -> None:
        self._sum += message
        self.theta -= lr * torch.add(message, self._m, alpha=self.momentum)
        self._c = (self._c + 1) % self._n
        if self._c == 0:
            self._m.mul_(self.momentum).add_(self._sum, alpha=1 / self._n)
            self._sum.zero_()

    def sends(self, lr: float) -> Tensor:
        ahead = self._n + self._c * (self.momentum - 1)
        to_come = (self._c / self._n) * self._sum + ahead * self._m
        return self.theta - lr * self.momentum * to_come


#: By name, as a study calls them.
RULES: dict[str, Rule] = {
    "asgd": Asgd(momentum=0.0),
    "nag-asgd": Asgd(),
    "dc-asgd": DcAsgd(),
    "gap-aware": GapAware(),
    "dana-slim": DanaSlim(),
    "smega2": Smega2(),
}


def order_of(workers: int, variation: float, seed: int) -> Iterator[int]:
    """Which worker is through next, for ever: times are gamma-distributed, of mean 1.

    Args:
        workers: their number.
        variation: standard deviation of a time, over its mean; DANA's is 0.1.
        seed: of the times.
    """
    draw = random.Random(seed)
    shape = 1 / variation**2
    through = [(draw.gammavariate(shape, 1 / shape), worker) for worker in range(workers)]
    heapify(through)
    while True:
        time, worker = through[0]
        heapreplace(through, (time + draw.gammavariate(shape, 1 / shape), worker))
        yield worker


def run_rule(
    rule: Rule,
    theta: Tensor,
    gradient: Gradient,
    order: Iterator[int],
    workers: int,
    rates: Sequence[float],
) -> Iterator[tuple[int, float]]:
    """Train ``theta`` in place, an update for every rate, on minibatches 0, 1, 2, ...

    Args:
        rule: how.
        theta: the master's weights, one flat tensor.
        gradient: of given weights on a minibatch.
        order: which worker is through next.
        workers: their number; all are sent theta first.
        rates: the learning rate of every update.

    Yields:
        Of every update its lag (updates that the master made since it sent those weights), and the
        gap: the root mean square of theta - theta_stale, before it.
    """
    master = rule.master(theta, workers, max(rates))
    sent = [(0, theta.clone()) for _ in range(workers)]
    buffers = [torch.zeros_like(theta) for _ in range(workers)]
    for n, (worker, lr) in enumerate(zip(order, rates, strict=False)):
        since, stale = sent[worker]
        message = rule.message(gradient(stale, n), buffers[worker])
        gap = float((theta - stale).norm()) / math.sqrt(theta.numel())
        master.update(message, stale, lr)
        sent[worker] = n + 1, master.sends(lr)
        yield n - since, gap


class Trained(NamedTuple):
    """The end of a training.

    Attributes:
        accuracy, loss: of the test part.
        lag, gap: means over all updates, see ``run_rule``.
    """

    accuracy: float
    loss: float
    lag: float
    gap: float


def train(
    rule: Rule,
    model: nn.Module,
    data: Split,
    *,
    workers: int,
    lr: float,
    updates: int,
    batch_size: int,
    seed: int = 0,
) -> Trained | None:
    """Train a copy of a model by a rule; None: it diverged.

    The rate falls linearly from ``lr`` to zero. Minibatches are those of shuffled epochs, the same
    for all rules and numbers of workers; an update has one of them, whoever computes it.

    Args:
        rule: how.
        model: where all begin.
        data: what is trained and tested on.
        workers: their number.
        lr: the first learning rate.
        updates: of the master.
        batch_size: samples of a gradient.
        seed: of the order of samples, and of the times, which vary by 0.1.
    """
    model = copy.deepcopy(model)
    params = list(model.parameters())
    theta = torch.cat([p.detach().reshape(-1) for p in params])
    computed = torch.empty_like(theta)  # where a worker's weights lie while it computes
    for p, view in zip(params, computed.split([p.numel() for p in params]), strict=True):
        p.data = view.view_as(p)
    draw = torch.Generator().manual_seed(seed)
    samples = len(data.train_inputs)
    epochs = -(-updates * batch_size // samples) + 1
    order = torch.cat([torch.randperm(samples, generator=draw) for _ in range(epochs)])

    def gradient(weights: Tensor, n: int) -> Tensor:
        computed.copy_(weights)
        chosen = order[n * batch_size : (n + 1) * batch_size]
        output = model(data.prepare(data.train_inputs[chosen]))
        found = torch.autograd.grad(mean_loss(output, data.train_targets[chosen]), params)
        return torch.cat([g.reshape(-1) for g in found])

    rates = [lr * (1 - n / updates) for n in range(updates)]
    turns = order_of(workers, 0.1, seed)
    seen = list(run_rule(rule, theta, gradient, turns, workers, rates))
    if not theta.isfinite().all():
        return None
    computed.copy_(theta)
    accuracy, loss = tested(model, data.tests())
    lags, gaps = zip(*seen, strict=True)
    return Trained(accuracy, loss, sum(lags) / updates, sum(gaps) / updates)
