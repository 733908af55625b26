"""Tests asynchronous data parallelism: every rule against its paper's formulas, in float64."""

import itertools
import math

import pytest
import torch
from torch import nn

from studies.data.digits import load_digits
from studies.models import residual_mlp
from studies.workers import RULES, order_of, run_rule, train

_GAMMA, _SIZE = 0.9, 5
_RATES = [0.05 - 0.002 * n for n in range(20)]


def _gradient(weights, n):
    """Return the gradient of a quartic with another slope for every minibatch."""
    return weights**3 + weights * (1 + 0.1 * n) - torch.cos(torch.arange(_SIZE) + 1.0 * n)


def _start():
    return torch.linspace(-1, 1, _SIZE, dtype=torch.float64)


def _found(rule, workers, order):
    theta = _start()
    found = []
    for seen in run_rule(rule, theta, _gradient, iter(order), workers, _RATES):
        found.append((theta.clone(), *seen))
    return found


# The papers' pseudo-code, element by element; a worker is its state.


def _oracle(name, workers, order):
    theta = _start().tolist()
    each = range(_SIZE)
    zero = [0.0] * _SIZE
    held = [list(theta) for _ in range(workers)]
    velocity = [list(zero) for _ in range(workers)]  # DANA-Slim's, of each worker
    v, average = list(zero), list(zero)  # the master's
    big, m, cycle = list(zero), list(zero), 0  # SMEGA2's
    for n, (worker, eta) in enumerate(zip(order, _RATES, strict=False)):
        stale = held[worker]
        g = _gradient(torch.tensor(stale, dtype=torch.float64), n).tolist()
        if name == "dc-asgd":
            g = [g[k] + 0.04 * g[k] * g[k] * (theta[k] - stale[k]) for k in each]
        if name == "gap-aware" and n:
            for k in each:
                hat = average[k] / (1 - 0.999**n)
                g[k] /= 1 + abs(theta[k] - stale[k]) / (_RATES[0] * (math.sqrt(hat) + 1e-8))
        if name == "asgd":
            theta = [theta[k] - eta * g[k] for k in each]
        elif name in ("nag-asgd", "dc-asgd", "gap-aware"):
            v = [_GAMMA * v[k] + g[k] for k in each]
            theta = [theta[k] - eta * (_GAMMA * v[k] + g[k]) for k in each]
            average = [0.999 * average[k] + 0.001 * v[k] ** 2 for k in each]
        elif name == "dana-slim":
            velocity[worker] = [_GAMMA * velocity[worker][k] + g[k] for k in each]
            theta = [theta[k] - eta * (_GAMMA * velocity[worker][k] + g[k]) for k in each]
        elif name == "smega2":
            big = [big[k] + g[k] for k in each]
            theta = [theta[k] - eta * (g[k] + _GAMMA * m[k]) for k in each]
            cycle += 1
            if cycle == workers:
                m = [_GAMMA * m[k] + big[k] / workers for k in each]
                big, cycle = list(zero), 0
        held[worker] = list(theta)
        if name == "smega2":
            c, w = cycle, workers
            held[worker] = [
                theta[k] - eta * _GAMMA * (c / w * big[k] + (w + c * (_GAMMA - 1)) * m[k])
                for k in each
            ]
        yield list(theta)


@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_its_papers(name, workers):
    order = list(itertools.islice(order_of(workers, 0.5, seed=3), len(_RATES)))
    found = _found(RULES[name], workers, order)
    for (theta, _, _), wanted in zip(found, _oracle(name, workers, order), strict=True):
        torch.testing.assert_close(theta.tolist(), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [name for name in RULES if name not in ("asgd", "smega2")])
def test_one_worker_is_nesterovs_sgd(name):
    """In Bengio's form, as in torch: without delay there is nothing to correct."""
    p = nn.Parameter(_start())
    plain = torch.optim.SGD([p], lr=1.0, momentum=_GAMMA, nesterov=True)
    for n, (theta, lag, gap) in enumerate(_found(RULES[name], 1, itertools.repeat(0))):
        plain.param_groups[0]["lr"] = _RATES[n]
        p.grad = _gradient(p.detach(), n)
        plain.step()
        torch.testing.assert_close(theta, p.detach(), rtol=1e-12, atol=1e-14)
        assert (lag, gap) == (0, 0.0)


def test_one_worker_of_smega2_computes_with_nesterovs_weights():
    """The sent weights are Bengio's form at a constant rate; the master's are the other form."""
    rule, theta = RULES["smega2"], _start()
    master = rule.master(theta, 1, 0.05)
    sent = theta.clone()
    p = nn.Parameter(_start())
    plain = torch.optim.SGD([p], lr=0.05, momentum=_GAMMA, nesterov=True)
    for n in range(20):
        master.update(rule.message(_gradient(sent, n), sent), sent, 0.05)
        sent = master.sends(0.05)
        p.grad = _gradient(p.detach(), n)
        plain.step()
        torch.testing.assert_close(sent, p.detach(), rtol=1e-12, atol=1e-14)


def test_the_order_is_the_seeds_and_nearly_in_turn():
    first, again = (list(itertools.islice(order_of(4, 0.1, seed=1), 400)) for _ in range(2))
    assert first == again != list(itertools.islice(order_of(4, 0.1, seed=2), 400))
    assert all(95 <= first.count(worker) <= 105 for worker in range(4))


def test_training_is_the_seeds_and_lags_by_the_other_workers():
    data = load_digits()
    model = nn.Sequential(*residual_mlp(3, features=64, width=8, depth=1, classes=10, seed=0))
    before = [p.clone() for p in model.parameters()]
    options = {"workers": 4, "lr": 0.02, "updates": 80, "batch_size": 32}
    found = [train(RULES["dana-slim"], model, data, seed=seed, **options) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    assert found[0].accuracy > 0.5
    assert 2.7 < found[0].lag < 3.0  # the first updates lag less
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert train(RULES["nag-asgd"], model, data, **{**options, "lr": 1e9}) is None
