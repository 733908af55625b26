"""The oracle of stages with replicas, from the versions that each replica reads."""

from __future__ import annotations

from oracle.definition import Oracle
from oracle.methods import window_of
from oracle.schedules import CHUNKED, flushing, order, updates_before


class ReplicaOracle(Oracle):
    """Microbatch j runs on replica j mod r, whose own order is that of a stage without replicas.

    An update needs the gradients of all replicas: versions belong to the stage.
    """

    def __init__(self, stages, counts, optimizer, loss_fn, method, scheduler=None, **more):
        window = more.pop("window", None)
        super().__init__(stages, optimizer, loss_fn, method, scheduler, **more)
        self.counts = counts
        self.parts = [self.microbatches // r for r in counts]
        self.window = window

    def window_at(self, k):
        """Return each replica's window: the ranks from here on over the stage's replicas."""
        if isinstance(self.window, list):
            return self.window[k]
        if self.method.schedule in CHUNKED:
            return window_of(self.method, self.window, k, len(self.counts), self.parts[k])
        ahead = -(-sum(self.counts[k:]) // self.counts[k])
        return window_of(self.method, self.window, 0, ahead, self.parts[k])

    def versions_read(self, k, counts):
        r, window, found = self.counts[k], self.windows[k], {}
        for c in range(r):
            own = [len(range(c, count, r)) for count in counts]
            if self.method.schedule == "1f1b":
                actions = flushing(window, own)
            else:
                # Stages with chunks have equal replicas everywhere: each is a separate pipeline.
                at = (k, len(self.counts)) if self.method.schedule in CHUNKED else (0, 1)
                actions = order(self.method.schedule, *at, window, self.parts[k], own)
            for (i, j), updates in updates_before(actions, "F").items():
                found[i, c + j * r] = updates
        return found

    def first(self, j, k):
        return j % self.counts[k]

    def place(self, k):
        return k, len(self.stages), self.windows[k], self.parts[k]
