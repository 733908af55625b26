"""Tests the oracle against numbers computed by hand, and that its rows are different.

``pipeline/test_identities.py`` says what pipelines are without it.
"""

from __future__ import annotations

from itertools import combinations

import torch
from helpers.pipeline_cases import (
    batches,
    close,
    float64,  # noqa: F401  # a fixture
    mse,
    tanh_stages,
    torch_sgd,
)
from oracle.definition import Oracle
from oracle.laws import predict, rows_of
from oracle.methods import METHODS


def test_the_oracle_tells_the_methods_apart():
    """Except for methods that coincide at this momentum, window or number of microbatches."""
    stages, data = tanh_stages(4, layers=1), batches(6, size=2)
    final = {}
    for method in METHODS:
        if method != "xgrad":
            oracle = Oracle(stages, torch_sgd(), mse, method, microbatches=2)
            final[method] = oracle.run(data)[-1]
    groups = (
        ("auto", "zb-h1-async"),  # except for microbatches that two methods handle differently
        ("sync", "gpipe", "1f1b", "zb-h1", "interleaved"),
        ("spectrain", "spectrain-smoothed"),
        ("pipeoptim", "lwp-v", "lwp-w"),  # W - W_prev is -lr*v while lr is constant
    )
    same = {frozenset(pair) for group in groups for pair in combinations(group, 2)}
    for a in final:
        for b in final:
            if a != b:
                differ = abs(final[a] - final[b]) > 1e-9
                assert differ != (frozenset((a, b)) in same), (a, b)


def after_three_updates(kind, **options):
    """Return a weight, and the optimizer that made three updates of it."""
    weight = torch.randn(6).requires_grad_()
    optimizer = kind([weight], **options)
    for _ in range(3):
        weight.grad = torch.randn(6)
        optimizer.step()
    return weight, optimizer


def test_the_geometric_law_with_a_penalty_is_a_matrix_power():
    """(W, v) after an update without gradient is [[1 - lr*l, -lr*mu], [l, mu]] times (W, v)."""
    lr, mu, decay = 0.1, 0.8, 0.3
    weight, optimizer = after_three_updates(torch.optim.SGD, lr=lr, momentum=mu, weight_decay=decay)
    versions = [rows_of(optimizer, [weight])]
    matrix = torch.tensor([[1 - lr * decay, -lr * mu], [decay, mu]])
    for steps in range(5):
        power = torch.linalg.matrix_power(matrix, steps)
        velocity = optimizer.state[weight]["momentum_buffer"]
        expected = power[0, 0] * weight.detach() + power[0, 1] * velocity
        close(predict("geometric", versions, 0, steps)[0], expected)
