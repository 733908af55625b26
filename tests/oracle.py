"""The definition of every method, evaluated directly: plain PyTorch, no package code.

Nothing overlaps and every version of every stage is kept. Minibatch i on stage k of N: the forward
reads the version after max(0, i-(N-k)+1) updates (i updates for "sync"), the backward meets the
version after i updates, and the stage updates right after it. A prediction is W - s*lr*v of that
version.
"""

from __future__ import annotations

import copy

import torch


def horizons(method, k, n):
    """(forward s, backward s or None where the backward keeps the forward's weights)."""
    return {
        "sync": (0, 0),
        "vanilla": (0, 0),
        "pipedream": (0, None),
        "spectrain": (k // 2 + n - k - 1, k // 2),
        "spectrain-stash": (n - k - 1, None),
    }[method]


def forward_version(method, i, k, n):
    return i if method == "sync" else max(0, i - (n - k) + 1)


class Oracle:
    """Any modules and any torch.optim.SGD: weights are put into the modules behind autograd's back.

    Saved activations are then the forward's and saved weights the backward's, which is what "the
    backward meets version i" means for a module that saves its weights themselves.
    """

    def __init__(self, stages, optimizer, loss_fn, method, scheduler=None):
        self.stages = [copy.deepcopy(stage) for stage in stages]
        self.loss_fn, self.method = loss_fn, method
        self.params = [[p for p in s.parameters() if p.requires_grad] for s in self.stages]
        self.true = [[p.detach().clone().requires_grad_() for p in ps] for ps in self.params]
        self.optimizers = [optimizer(true) if true else None for true in self.true]
        self.schedulers = [scheduler(o) if scheduler and o else None for o in self.optimizers]

    def version(self, k):
        """Everything a prediction from this version needs: (weight, velocity, lr) per parameter."""
        rows = []
        for p in self.true[k]:
            groups = self.optimizers[k].param_groups
            lr = next(g["lr"] for g in groups if any(p is q for q in g["params"]))
            velocity = self.optimizers[k].state[p].get("momentum_buffer")
            velocity = torch.zeros_like(p) if velocity is None else velocity.clone()
            rows.append((p.detach().clone(), velocity, lr))
        return rows

    def put(self, k, version, steps):
        for p, (weight, velocity, lr) in zip(self.params[k], version, strict=True):
            p.data.copy_(weight - steps * lr * velocity)

    def run(self, batches):
        n, losses = len(self.stages), []
        versions = [[self.version(k)] for k in range(n)]
        for i, (value, target) in enumerate(batches):
            tape = []
            for k, stage in enumerate(self.stages):
                version = versions[k][forward_version(self.method, i, k, n)]
                self.put(k, version, horizons(self.method, k, n)[0])
                entries = [leaf(v) for v in many(value)]
                inputs = [v * 1 if v.requires_grad else v for v in entries]
                value = stage(tuple(inputs) if isinstance(value, tuple) else inputs[0])
                tape.append((entries, many(value)))
            value = self.loss_fn(value, target)
            losses.append(value.detach())
            tape[-1] = (tape[-1][0], (value,))
            gradients = [torch.ones_like(value)]
            for k in reversed(range(n)):
                s_forward, s_backward = horizons(self.method, k, n)
                if s_backward is None:
                    version = versions[k][forward_version(self.method, i, k, n)]
                    self.put(k, version, s_forward)
                else:
                    self.put(k, versions[k][i], s_backward)
                entries, outputs = tape[k]
                gradients = self.backward(k, entries, outputs, gradients)
                if self.optimizers[k]:
                    self.optimizers[k].step()
                if self.schedulers[k]:
                    self.schedulers[k].step()
                versions[k].append(self.version(k))
        for k in range(n):
            self.put(k, versions[k][-1], 0)
        return losses

    def backward(self, k, entries, outputs, gradients):
        """Set the gradients of the true weights; return those of the entries."""
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
        wanted = [v for v in [*entries, *self.params[k]] if v.requires_grad]
        found = [None] * len(wanted)
        if pairs and wanted:
            roots, seeds = zip(
                *((o, torch.zeros_like(o) if g is None else g) for o, g in pairs), strict=True
            )
            found = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
        found = dict(zip(map(id, wanted), found, strict=True))
        for p, true in zip(self.params[k], self.true[k], strict=True):
            true.grad = found[id(p)]
        return [found.get(id(entry)) for entry in entries]


def many(value):
    return value if isinstance(value, tuple) else (value,)


def leaf(value):
    value = value.detach().clone()
    return value.requires_grad_() if value.is_floating_point() else value


class TanhChainOracle:
    """The same for Linear+tanh layers under squared error, all derivatives written out."""

    def __init__(self, stages, lr, momentum, method):
        """stages: per stage a list of (weight, bias)."""
        self.stages = [[(w.clone(), b.clone()) for w, b in stage] for stage in stages]
        self.velocity = [
            [(torch.zeros_like(w), torch.zeros_like(b)) for w, b in stage] for stage in stages
        ]
        self.lr, self.momentum, self.method = lr, momentum, method

    def weights(self, version, steps):
        layers, velocities = version
        ahead = steps * self.lr
        return [
            (w - ahead * vw, b - ahead * vb)
            for (w, b), (vw, vb) in zip(layers, velocities, strict=True)
        ]

    def run(self, batches):
        n, losses = len(self.stages), []
        versions = [[(self.stages[k], self.velocity[k])] for k in range(n)]
        for i, (value, target) in enumerate(batches):
            tape = []
            for k in range(n):
                version = versions[k][forward_version(self.method, i, k, n)]
                for w, b in self.weights(version, horizons(self.method, k, n)[0]):
                    entry, value = value, torch.tanh(value @ w.T + b)
                    tape.append((entry, value))
            losses.append(((value - target) ** 2).mean())
            gradient = 2 * (value - target) / value.numel()
            for k in reversed(range(n)):
                s_forward, s_backward = horizons(self.method, k, n)
                t, s = (
                    (forward_version(self.method, i, k, n), s_forward)
                    if s_backward is None
                    else (i, s_backward)
                )
                grads = []
                for w, _ in reversed(self.weights(versions[k][t], s)):
                    entry, out = tape.pop()
                    gradient = gradient * (1 - out**2)
                    grads.insert(0, (gradient.T @ entry, gradient.sum(0)))
                    gradient = gradient @ w
                layers, velocities = versions[k][i]
                velocities = [
                    (self.momentum * vw + gw, self.momentum * vb + gb)
                    for (vw, vb), (gw, gb) in zip(velocities, grads, strict=True)
                ]
                layers = [
                    (w - self.lr * vw, b - self.lr * vb)
                    for (w, b), (vw, vb) in zip(layers, velocities, strict=True)
                ]
                versions[k].append((layers, velocities))
        self.stages = [kept[-1][0] for kept in versions]
        self.velocity = [kept[-1][1] for kept in versions]
        return losses
