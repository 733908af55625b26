"""Simulates asynchronous data parallelism with one master: real gradients, random timing.

A worker computes a gradient with the weights that it received last while gradients of other workers
arrive. The master updates with every gradient and sends new weights back. Everything runs in one
process: the next worker to finish is drawn at random, as in DANA's own simulation (Hakimi et al.,
arXiv 1907.11612).
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

#: A gradient function of weights and a minibatch.
Gradient = Callable[[Tensor, int], Tensor]
_SLOW = 0.999  # decay of gap-aware's average


class Master(Protocol):
    """The state shared by all workers; theta is updated in place."""

    def update(self, message: Tensor, stale: Tensor, lr: float) -> None:
        """Process a worker's message, whose gradient used the ``stale`` weights."""

    def sends(self, lr: float) -> Tensor:
        """Return the weights for the worker's next gradient."""


class Rule(Protocol):
    """A training rule of workers and master, as a value."""

    def master(self, theta: Tensor, workers: int, lr: float) -> Master:
        """Return a master of these weights; ``lr`` is the largest rate that will occur."""

    def message(self, gradient: Tensor, buffer: Tensor) -> Tensor:
        """Return a worker's message; the buffer belongs to the worker and starts at zero."""


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
        """Return the gradient for the master's step, given how far weights have ``moved``."""
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

    A <- .999*A + .001*v^2 after every step; A_hat is A with bias correction (Barkai, Hakimi,
    Schuster, arXiv 1909.10802).
    """

    def corrected(self, gradient: Tensor, moved: Tensor, master: _Sgd) -> Tensor:
        if not master.updates:  # no movement yet
            return gradient
        hat = master.average / (1 - _SLOW**master.updates)
        return gradient / (1 + moved.abs() / (master.largest * (hat.sqrt() + 1e-8)))


class _Sgd:
    """A master that makes SGD's step and sends its weights unchanged."""

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

    Hakimi et al., arXiv 1907.11612. The workers hold the momentum, so the master's weights are
    already those to which everyone's momentum moves them.
    """

    momentum: float = 0.9

    def master(self, theta: Tensor, workers: int, lr: float) -> Master:
        return _Sgd(Asgd(0.0), theta, lr)

    def message(self, gradient: Tensor, buffer: Tensor) -> Tensor:
        buffer.mul_(self.momentum).add_(gradient)
        return torch.add(gradient, buffer, alpha=self.momentum)


@dataclass(frozen=True)
class Smega2:
    """SMEGA2: one momentum for all, from complete cycles of n gradients of n workers.

    G <- G + g; theta <- theta - eta*(g + gamma*m); every n steps m <- gamma*m + G/n and G <- 0.
    After c steps of a cycle the master sends theta - eta*gamma*((c/n)*G + (n + c*(gamma - 1))*m),
    the prediction for the next n steps (Cohen, Hakimi, Schuster, ICPP 2022).
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


#: Rules by the name that a study uses.
RULES: dict[str, Rule] = {
    "asgd": Asgd(momentum=0.0),
    "nag-asgd": Asgd(),
    "dc-asgd": DcAsgd(),
    "gap-aware": GapAware(),
    "dana-slim": DanaSlim(),
    "smega2": Smega2(),
}


def order_of(workers: int, variation: float, seed: int) -> Iterator[int]:
    """Yield which worker finishes next, endlessly; times follow a gamma distribution of mean 1."""
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
    """Train ``theta`` in place, one update per rate, on minibatches 0, 1, 2, ..."""
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
    """The result of a training.

    Attributes:
        accuracy, loss: on the test part.
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
    """Train a copy of a model by a rule; return None if it diverges.

    The rate falls linearly from ``lr`` to zero. The minibatches come from shuffled epochs and are
    the same for all rules and numbers of workers. An update uses one minibatch, whichever worker
    computes it.
    """
    model = copy.deepcopy(model)
    params = list(model.parameters())
    theta = torch.cat([p.detach().reshape(-1) for p in params])
    computed = torch.empty_like(theta)  # a worker's weights during its computation
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
