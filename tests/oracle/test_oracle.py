"""Tests the oracle against numbers computed by hand, and that its rows are different.

``pipeline/test_identities.py`` says what pipelines are without it.
"""

from __future__ import annotations

from itertools import combinations

import pytest
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
from oracle.schedules import order, updates_before
from oracle.sgd import AveragingSGD


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


@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize("window", [1, 3, 4, 7])
def test_versions_by_counting(window, m):
    """F(q) follows the backwards up to q - window; a backward follows all earlier updates."""
    actions = list(order("1f1b-async", 0, 4, window, m, [m] * 12))
    assert updates_before(actions, "B") == {(i, j): i for i in range(12) for j in range(m)}
    for (i, j), seen in updates_before(actions, "F").items():
        assert seen == max(0, i * m + j - window + 1) // m


def test_the_orders_by_hand():
    def written(*arguments):
        return " ".join(
            f"{kind}{i}" + ("" if j is None else f".{j}") for kind, i, j in order(*arguments)
        )

    assert written("1f1b-async", 2, 4, 2, 1, [1, 1, 1]) == (
        "F0.0 F1.0 B0.0 U0 F2.0 B1.0 U1 B2.0 U2"
    )
    assert written("1f1b-async", 1, 4, 3, 2, [2, 1]) == "F0.0 F0.1 F1.0 B0.0 B0.1 U0 B1.0 U1"
    assert written("gpipe", 0, 2, 2, 2, [2, 1]) == "F0.0 F0.1 B0.0 B0.1 U0 F1.0 B1.0 U1"
    assert written("zb-h1", 1, 3, 3, 4, [4, 1]) == (
        "F0.0 F0.1 B0.0 F0.2 B0.1 W0.0 F0.3 B0.2 W0.1 B0.3 W0.2 W0.3 U0 F1.0 B1.0 W1.0 U1"
    )
    assert written("zb-h1-async", 1, 3, 2, 1, [1, 1, 1]) == (
        "F0.0 F1.0 B0.0 W0.0 U0 F2.0 B1.0 W1.0 U1 B2.0 W2.0 U2"
    )
    assert written("1f1b", 1, 3, 2, 3, [3, 1]) == ("F0.0 F0.1 B0.0 F0.2 B0.1 B0.2 U0 F1.0 B1.0 U1")


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


def test_the_linear_law_of_adam_repeats_an_update_without_its_decay():
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        weight, optimizer = after_three_updates(kind, lr=0.1, weight_decay=0.0)
        versions = [rows_of(optimizer, [weight])]
        state = optimizer.state[weight]
        first = state["exp_avg"] / (1 - 0.9**3)
        second = state["exp_avg_sq"] / (1 - 0.999**3)
        expected = weight.detach() - 5 * 0.1 * first / (second.sqrt() + 1e-8)
        close(predict("linear", versions, 0, 5)[0], expected)


@pytest.mark.parametrize("nesterov", [False, True])
def test_an_average_is_a_sum_at_another_rate(nesterov):
    torch.manual_seed(1)
    average, _ = after_three_updates(AveragingSGD, lr=0.5, smoothed=True, nesterov=nesterov)
    torch.manual_seed(1)
    summed, _ = after_three_updates(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=nesterov)
    close(average.detach(), summed.detach())


def test_decoupled_decay_shrinks_what_the_gradient_does_not_see():
    weight, _ = after_three_updates(
        AveragingSGD, lr=0.1, momentum=0.0, weight_decay=0.5, decoupled_weight_decay=True
    )
    torch.manual_seed(0)
    expected = torch.randn(6)
    for _ in range(3):
        expected = 0.95 * expected - 0.1 * torch.randn(6)
    close(weight.detach(), expected)
