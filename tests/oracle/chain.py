"""A second oracle in closed form: Linear+tanh layers with squared error and momentum SGD.

All derivatives, versions and laws are closed forms: no autograd, no optimizer, no list of actions.
"""

from __future__ import annotations

import math

import torch
from oracle.methods import METHODS, local, window_of
from oracle.schedules import FLUSHING


class TanhChainOracle:
    """stages: a list of (weight, bias) per stage."""

    def __init__(self, stages, lr, momentum, method, microbatches=1, window=None):
        self.lr, self.mu, self.m = lr, momentum, microbatches
        self.name, self.method = method, METHODS[method]
        n = len(stages)
        self.windows = [window_of(self.method, window, k, n, microbatches) for k in range(n)]
        self.stages = [flat.clone() for flat in map(flattened, stages)]
        self.velocity = [torch.zeros_like(flat) for flat in self.stages]
        self.made, self.squares = 0, [[] for _ in stages]
        self.shapes = [[(w.shape, b.shape) for w, b in stage] for stage in stages]

    def read(self, i, j, k):
        """Return the version that the forward of microbatch j of minibatch i reads."""
        if self.method.schedule == "interleaved-async":
            return self.interleaved(i * self.m + j, k) // self.m
        if self.method.schedule == "wpipe":
            return max(0, i - 1) if k < len(self.stages) // 2 else i
        if self.method.schedule in FLUSHING:
            return i
        if self.method.reads == "previous":
            return max(0, i - 1)
        window = self.windows[0 if self.method.reads == "entry" else k]
        return max(0, i * self.m + (0 if self.method.once else j) - window + 1) // self.m

    def interleaved(self, q, k):
        """Return the backwards of stage k before its forward q, with two chunks.

        Its device numbers them 2p*(q//p) + c*p + q%p, in chunk c for forwards and 1 - c for
        backwards; backward b follows forward b + warmup.
        """
        v = min(2, len(self.stages))
        p = -(-len(self.stages) // v)
        c, d = divmod(k, p)
        forward = v * p * (q // p) + c * p + q % p
        # completed, hence minus one
        through = forward - (2 * (p - d - 1) + (v - 1) * p) - (v - 1 - c) * p
        return max(0, through // (v * p) * p + min(p, through % (v * p)))

    def weights(self, k, u, law, s):
        """Return the prediction from version u of stage k."""
        w, v = self.versions[k][u]
        if law == "difference":
            return w + s * (w - self.versions[k][max(0, u - 1)][0])
        if law == "average":
            delta, gamma = 0.0, math.exp(-2 / s) if s else 0.0
            for t in range(1, u + 1):
                delta = delta * gamma
                delta += (1 - gamma) * (self.versions[k][t][0] - self.versions[k][t - 1][0])
            return w - s * delta
        if law == "geometric":
            return w - self.lr * v * (self.mu - self.mu ** (s + 1)) / (1 - self.mu)
        if law == "second-order":
            change = v - self.versions[k][max(0, u - 1)][1]
            lead = self.method.lead(*self.place(k), local(*self.place(0)))
            ahead = self.rate(k, u - 1) * ((s + lead) * v + s * (s + 1) / 2 * change)
            return w - ahead if u else w
        return w - s * self.rate(k, u) * v

    def rate(self, k, u):
        """Return the learning rate of the update after version u of this run."""
        return self.lr * self.method.rates(*self.place(k), self.made + u)

    def place(self, k):
        return k, len(self.stages), self.windows[k], self.m

    def after(self, k, i, total, stale):
        """Return the version after an update whose last backward had the stale weights."""
        w, v = self.versions[k][i]
        name, *numbers = self.method.correction(*self.place(k)) or (None,)
        if name == "braking" and total.norm() * v.norm() > 0:
            # each parameter has its own angle
            shapes = [s.numel() for pair in self.shapes[k] for s in pair]
            pieces = zip(total.split(shapes), v.split(shapes), strict=True)
            total = torch.cat(
                [g * (1 - numbers[0] * (g @ u) / (g.norm() * u.norm())) for g, u in pieces]
            )
        if name == "delay":
            total = total + numbers[0] * total**2 * (w - stale)
        made = len(self.squares[k])
        if name == "gap" and made:
            decay = numbers[0]
            old = sum(decay ** (made - 1 - t) * s for t, s in enumerate(self.squares[k]))
            usual = self.lr * ((old * (1 - decay) / (1 - decay**made)).sqrt() + 1e-8)
            total = total / (1 + (w - stale).abs() / usual)
        moved = self.mu * v + total
        self.squares[k].append(moved**2)
        if name == "spike":
            a = self.mu ** numbers[0]
            step = a * moved + (1 - a) / (1 - self.mu) * total
        elif name == "feedback":
            step = 2 * moved - v
        else:
            step = moved
        return w - self.rate(k, i) * step, moved

    def both(self, i, j, k):
        """Return the weights of the forward and of the backward."""
        place = self.place(k)
        u = self.read(i, j, k)
        s = i - u if self.method.forward == "counted" else self.method.forward(*place)
        forward = self.weights(k, u, self.method.law, s)
        if self.method.backward == "stash":
            return forward, forward
        s = self.method.backward_horizon(*place) if self.method.backward == "predict" else 0
        law = "average" if self.method.law == "average" else "linear"
        return forward, self.weights(k, i, law, s)

    def run(self, batches):
        n, losses = len(self.stages), []
        self.versions = [[pair] for pair in zip(self.stages, self.velocity, strict=True)]
        for i, (x, y) in enumerate(batches):
            loss, total = 0.0, [0.0] * n
            xs, ys = x.tensor_split(self.m), y.tensor_split(self.m)
            for j in range(self.m):
                share, value, tape = len(xs[j]) / len(x), xs[j], []
                if len(xs[j]):
                    last = [self.both(i, j, k) for k in range(n)]
                pairs = [self.both(i, j, k) for k in range(n)]
                for k in range(n):
                    for w, b in self.layers(k, pairs[k][0]):
                        entry, value = value, torch.tanh(value @ w.T + b)
                        tape.append((entry, value))
                loss = loss + share * ((value - ys[j]) ** 2).mean()
                gradient = 2 * (value - ys[j]) / value.numel()
                for k in reversed(range(n)):
                    grads = []
                    for w, _ in reversed(self.layers(k, pairs[k][1])):
                        entry, out = tape.pop()
                        gradient = gradient * (1 - out**2)
                        grads.insert(0, (gradient.T @ entry, gradient.sum(0)))
                        gradient = gradient @ w
                    total[k] = total[k] + share * flattened(grads)
            losses.append(loss)
            for k in range(n):
                self.versions[k].append(self.after(k, i, total[k], last[k][1]))
        self.made += len(batches)
        self.stages = [kept[-1][0] for kept in self.versions]
        self.velocity = [kept[-1][1] for kept in self.versions]
        return losses

    def layers(self, k, flat):
        pieces = iter(flat.split([s.numel() for pair in self.shapes[k] for s in pair]))
        return [(next(pieces).view(w), next(pieces).view(b)) for w, b in self.shapes[k]]


def flattened(stage):
    return torch.cat([tensor.reshape(-1) for pair in stage for tensor in pair])
