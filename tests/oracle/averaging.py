"""The oracle of averaged replicas: separate pipelines, and the papers' formulas.

Elastic averaging SGD (Zhang, Choromanska, LeCun, 2015), all terms before the update: x_i <- x_i -
lr*g_i - a*(x_i - x), x <- x + a*sum of (x_i - x). AsyncMesh (arXiv 2601.22442), on the part S of
update t - tau: x_i <- mean of all x_j(t - tau) + e, e <- decay*e + (1 - decay)*(x_i(t) - x_i(t -
tau)), with e zero at first.
"""

from __future__ import annotations

import math

import torch
from oracle.definition import Oracle, cut


class AveragingOracle:
    """Replicas as ``Oracle`` objects; replica c of r takes microbatches c, c + r, ..."""

    def __init__(self, replicas, stages, *given, microbatches, **more):
        own = microbatches // replicas
        self.microbatches = microbatches
        self.replicas = [Oracle(stages, *given, microbatches=own, **more) for _ in range(replicas)]

    def run(self, batches):
        """Return each replica's loss for every minibatch."""
        runs = [
            oracle.minibatches([self.dealt(batch, c) for batch in batches])
            for c, oracle in enumerate(self.replicas)
        ]
        losses = []
        for _ in batches:
            losses.append([next(run).item() for run in runs])
            for k in range(len(self.replicas[0].true)):
                if self.replicas[0].true[k]:
                    self.average(k)
        for run in runs:
            assert list(run) == []
        return losses

    def dealt(self, batch, c):
        mine = cut(batch, self.microbatches)[c :: len(self.replicas)]
        return tuple(torch.cat([part[side] for part in mine]) for side in (0, 1))

    def rows(self, k, ago=0):
        """Return stage k's weights, one row per replica, after the last update or before it."""
        return [
            torch.cat([row.weight.reshape(-1) for row in oracle.versions[k][-1 - ago]])
            for oracle in self.replicas
        ]

    def put(self, k, rows):
        for oracle, row in zip(self.replicas, rows, strict=True):
            parts = row.split([p.numel() for p in oracle.true[k]])
            with torch.no_grad():
                for p, part in zip(oracle.true[k], parts, strict=True):
                    p.copy_(part.view_as(p))
            oracle.versions[k][-1] = oracle.version(k)

    def evaluated(self, k):
        rows = self.rows(k)
        return sum(rows) / len(rows)


class ElasticOracle(AveragingOracle):
    def __init__(self, strength, *given, **more):
        super().__init__(*given, **more)
        self.strength = strength
        self.centres = {}

    def average(self, k):
        before, now = self.rows(k, ago=1), self.rows(k)
        centre = self.centres.setdefault(k, before[0])
        away = [x - centre for x in before]
        self.put(k, [x - self.strength * a for x, a in zip(now, away, strict=True)])
        self.centres[k] = centre + self.strength * sum(away)

    def evaluated(self, k):
        return self.centres[k]


class SparseOracle(AveragingOracle):
    def __init__(self, share, delay, decay, *given, **more):
        super().__init__(*given, **more)
        self.share, self.delay, self.decay = share, delay, decay
        self.sent, self.moves = {}, {}

    def average(self, k):
        now = self.rows(k)
        sent = self.sent.setdefault(k, [])
        sent.append([x.clone() for x in now])
        t = len(sent) - 1
        if t < self.delay:
            return
        part = part_of(t - self.delay, self.share, len(now[0]), k)
        then = sent[t - self.delay]
        mean = sum(then) / len(then)
        moves = self.moves.setdefault(k, [torch.zeros_like(x) for x in now])
        for x, old, e in zip(now, then, moves, strict=True):
            e[part] = self.decay * e[part] + (1 - self.decay) * (x - old)[part]
            x[part] = mean[part] + e[part]
        self.put(k, now)


def part_of(update, share, size, stage, seed=0):
    """Return the weights averaged at an update: 16 blocks or more of each part."""
    parts = min(math.ceil(1 / share), max(1, size))
    blocks = torch.arange(size).split(min(max(1, size // (16 * parts)), 1024))
    for index in (stage, update // parts):
        mixed = (seed * 6364136223846793005 + (index + 1) * 1442695040888963407) % 2**64
        seed = (mixed ^ (mixed >> 31)) % 2**63
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))
    return torch.cat([blocks[block] for block in order[update % parts :: parts]])
