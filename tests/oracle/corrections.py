"""Corrections of late gradients, from the papers' formulas.

The optimizer makes its step, which updates its state. If the correction requires another step, the
weights are recomputed from the old ones.
"""

from __future__ import annotations

import torch


class Steps:
    """The steps of one stage's optimizer under a correction, a tuple of its name and numbers.

    ("spike", D), ("braking", rho), ("delay", strength), ("gap", decay); None: the optimizer's own
    step.
    """

    def __init__(self, optimizer, params, correction):
        self.optimizer, self.params = optimizer, params
        self.name, *self.numbers = correction or (None,)
        self.squares = {}  # the mean square of each parameter's updates, and their number
        self.largest_lr = {}  # by group

    @torch.no_grad()
    def step(self, stale):
        """``stale``: for every parameter, the weights of its gradient."""
        moving = [p for p in self.params if p.grad is not None]
        for p, old in zip(self.params, stale, strict=True):
            if self.name in ("delay", "gap") and p.grad is not None:
                p.grad = self.by_stale(p, self.group(p), p - old)
        if self.name == "braking":
            for p in moving:
                sign = -1 if self.group(p).get("maximize") else 1
                p.grad *= self.braking(sign * p.grad, self.velocity(p))
        weights = [p.clone() for p in moving]
        gradients = [p.grad.clone() for p in moving]
        self.optimizer.step()
        if self.name == "spike":
            for p, weight, gradient in zip(moving, weights, gradients, strict=True):
                group = self.group(p)
                kept, update = self.update(p, group, weight, gradient)
                p.copy_(kept - group["lr"] * update)
        if self.name == "gap":
            for p, weight in zip(moving, weights, strict=True):
                self.note_square(p, self.group(p), weight)

    def by_stale(self, p, group, gap):
        """Return the gradient for the optimizer, which adds an L2 penalty of W to it."""
        sign = -1 if group.get("maximize") else 1
        gradient = sign * p.grad
        if self.name == "delay":
            return sign * (gradient + self.numbers[0] * gradient**2 * gap)
        lr = max(group["lr"], self.largest_lr.get(id(group), 0.0))
        self.largest_lr[id(group)] = lr
        average, count = self.squares.get(p, (0, 0))
        if not count:
            return p.grad
        usual = (average / (1 - self.numbers[0] ** count)).sqrt()
        usual = usual + group["eps"] if "betas" in group else lr * (usual + 1e-8)
        decoupled = group.get("decoupled_weight_decay", False)
        penalty = 0.0 if decoupled else group["weight_decay"] * p
        return sign * ((gradient + penalty) / (1 + gap.abs() / usual) - penalty)

    def note_square(self, p, group, weight):
        if "betas" in group:  # its change of the weights, without decoupled decay
            decoupled = group.get("decoupled_weight_decay", False)
            kept = 1 - group["lr"] * group["weight_decay"] if decoupled else 1
            moved = kept * weight - p
        else:
            moved = self.velocity(p)
        average, count = self.squares.get(p, (0, 0))
        decay = self.numbers[0]
        self.squares[p] = decay * average + (1 - decay) * moved**2, count + 1

    def group(self, p):
        return next(g for g in self.optimizer.param_groups if any(p is q for q in g["params"]))

    def velocity(self, p):
        found = self.optimizer.state[p].get("momentum_buffer")
        return torch.zeros_like(p) if found is None else found

    def braking(self, gradient, velocity):
        """1 - rho*cos of the angle between the two."""
        lengths = gradient.norm() * velocity.norm()
        cosine = (gradient * velocity).sum() / lengths if lengths > 0 else 0.0
        return 1 - self.numbers[0] * cosine

    def update(self, p, group, weight, gradient):
        """Return the weights after decoupled decay, and the direction to subtract, times lr."""
        decay = group["weight_decay"]
        decoupled = group.get("decoupled_weight_decay", False)
        kept = weight * (1 - group["lr"] * decay) if decoupled else weight
        if group.get("maximize"):
            gradient = -gradient
        penalized = gradient if decoupled else gradient + decay * weight
        mu, delay = group["momentum"], self.numbers[0]
        taken = 1 - mu if group.get("smoothed") else 1 - group.get("dampening", 0)
        late = (1 - mu**delay) / (1 - mu) * taken * penalized
        return kept, mu**delay * self.velocity(p) + late


class Pace:
    """Multiplies learning rates by a factor for each minibatch of training, skipped or not."""

    def __init__(self, optimizer, factor):
        self.groups, self.made = optimizer.param_groups, 0
        self.factor = factor
        self.slow()

    def slow(self):
        """Set the next minibatch's rates."""
        self.own = [group["lr"] for group in self.groups]
        for group in self.groups:
            group["lr"] = group["lr"] * self.factor(self.made)
        self.given = [group["lr"] for group in self.groups]

    def restore(self):
        """Restore the scheduler's rates after a minibatch; rates set since then have the factor."""
        for group, own, given in zip(self.groups, self.own, self.given, strict=True):
            group["lr"] = own if group["lr"] == given else group["lr"] / self.factor(self.made)
        self.made += 1
