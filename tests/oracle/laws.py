"""Predicts weights s updates after a version, by every law, from its optimizer's state.

A version is a list of rows, one per parameter: the weight, the optimizer's state and its numbers. A
parameter that has not been updated yet has no state, and its prediction is unchanged.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch


@dataclass
class Row:
    """One parameter of one version."""

    weight: torch.Tensor
    state: dict
    group: dict  # the options of its parameter group, with the next update's lr
    kind: type  # the optimizer's class

    @property
    def velocity(self):
        """SGD's momentum buffer or Adam's first moment; None before the first update."""
        return self.state.get("exp_avg", self.state.get("momentum_buffer"))


def rows_of(optimizer, params):
    """Return the present version."""
    rows = []
    for p in params:
        group = next(g for g in optimizer.param_groups if any(p is q for q in g["params"]))
        state = {
            name: v.clone() if torch.is_tensor(v) else v for name, v in optimizer.state[p].items()
        }
        group = {name: group[name] for name in optimizer.defaults}  # without a scheduler's entries
        rows.append(Row(p.detach().clone(), state, group, type(optimizer)))
    return rows


def predict(law, versions, u, steps, lead=0):
    """Return the weights predicted from version u."""
    found = []
    for r, row in enumerate(versions[u]):
        before = versions[max(0, u - 1)][r]
        coming = [row.group["lr"]] * steps
        if law == "difference":
            found.append(row.weight + (steps + lead) * (row.weight - before.weight))
        elif law == "average" and steps:
            found.append(row.weight - steps * average_change(versions[: u + 1], r, steps))
        elif not (steps or lead) or row.velocity is None or (law == "second-order" and u == 0):
            found.append(row.weight)
        elif law == "linear":
            found.append(row.weight - sum(coming) * direction(row))
        elif law == "geometric":
            loop = {"adam": adam_loop, "lion": lion_loop, "sgd": no_more_gradients}[family(row)]
            found.append(loop(row, coming))
        elif law == "second-order":
            found.append(second_order(row, before, steps, lead))
    return found


def average_change(versions, r, steps):
    """Row r: delta <- gamma*delta + (1 - gamma)*(W' - W), gamma = D^(1/steps), D = e^-2."""
    delta = torch.zeros_like(versions[0][r].weight)
    for before, now in itertools.pairwise(versions):
        gamma = math.exp(-2) ** (1 / steps)
        delta = gamma * delta + (1 - gamma) * (now[r].weight - before[r].weight)
    return delta


def direction(row, velocity=None):
    """Return what an update with only this first moment subtracts per learning rate."""
    velocity = row.velocity if velocity is None else velocity
    if family(row) == "lion":  # of the signs, which the next gradients decide, half come true
        return velocity.sign() / 2
    return velocity * first(row, 0) / root(row, 0) if family(row) == "adam" else velocity


def second_order(row, before, delay, lead):
    """Return the momentum and its last change as the update writes them, with that update's lr."""
    earlier = torch.zeros_like(row.velocity) if before.velocity is None else before.velocity
    change = row.velocity - earlier
    moved = (delay + lead) * row.velocity + delay * (delay + 1) / 2 * change
    if family(row) == "lion":
        return row.weight - before.group["lr"] * (delay + lead) * direction(row, moved)
    return row.weight - before.group["lr"] * direction(row, moved)


def no_more_gradients(row, coming):
    """Continue SGD with gradients of zero, as the optimizer itself does."""
    weight = row.weight.clone().requires_grad_()
    optimizer = row.kind([weight], **{**row.group, "lr": 0.0})
    optimizer.state[weight]["momentum_buffer"] = row.velocity.clone()
    for lr in coming:
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    return weight.detach()


def adam_loop(row, coming):
    """Adam's first moment decays, the second stays, the bias corrections continue."""
    weight, moment = row.weight.clone(), row.velocity.clone()
    for ahead, lr in enumerate(coming, start=1):
        moment *= row.group["betas"][0]
        if row.group["decoupled_weight_decay"]:
            weight *= 1 - lr * row.group["weight_decay"]
        weight -= lr * moment * first(row, ahead) / root(row, ahead)
    return weight


def lion_loop(row, coming):
    """Lion's average keeps its sign under gradients of zero."""
    weight = row.weight.clone()
    for lr in coming:
        weight *= 1 - lr * row.group["weight_decay"]
        weight -= lr * row.velocity.sign()
    return weight


def family(row):
    """Return the name of the row's rule: Lion has betas and no second moment."""
    if "betas" not in row.group:
        return "sgd"
    return "adam" if "eps" in row.group else "lion"


def first(row, ahead):
    """Return the first moment's bias correction ``ahead`` updates from now."""
    beta, step = row.group["betas"][0], int(row.state["step"]) + ahead
    decay = row.group.get("momentum_decay")
    if decay is None:
        return 1 / (1 - beta**step)
    mus = [beta * (1 - 0.5 * 0.96 ** (i * decay)) for i in range(1, step + 2)]
    return mus[-1] / (1 - math.prod(mus))  # NAdam: the part of its update with the moment


def root(row, ahead):
    """Return the root of the bias-corrected second moment, plus eps."""
    step = int(row.state["step"]) + ahead
    return (row.state["exp_avg_sq"] / (1 - row.group["betas"][1] ** step)).sqrt() + row.group["eps"]
