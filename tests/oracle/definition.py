"""Evaluates the definition of every method directly in plain PyTorch, without package code.

Nothing overlaps, and every version of every stage is kept. Version t of a stage is its weights
after t updates of this run. For microbatch j of minibatch i, on a stage:

- the forward computes with the prediction, s updates ahead, from the version it reads;
- the backward uses version i itself, or a prediction from it, or the forward's weights again;
- after the last microbatch's backward the optimizer takes the sum of the microbatches' gradients,
  each times its share of the samples, and makes version i + 1.

If a minibatch's loss is not finite and is skipped, version i + 1 of every stage is version i. If
gradients of some stages are not finite, this holds for the last of these and all before it, or for
all stages under a schedule that flushes.

An optimizer with modes, such as a Schedule-Free one, makes version 0 of a run by ``train()``, and
the weights after it by ``eval()``.

A parameter shared by several stages belongs to the first one. On the others, both forward and
backward of a microbatch use the weights of its forward on the first, and their gradients are added
to those of the first.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from oracle.corrections import Pace, Steps
from oracle.laws import predict, rows_of
from oracle.methods import METHODS, local, window_of
from oracle.schedules import FLUSHING, order, updates_before


class Oracle:
    """The oracle of any modules, and any optimizer that oracle.laws supports, at any delay.

    Weights are put into the modules without autograd's knowledge. Saved activations are then the
    forward's and saved weights the backward's, which is the meaning of "the backward uses version
    i" for a module that saves its weights themselves.
    """

    def __init__(
        self,
        stages,
        optimizer,
        loss_fn,
        method,
        scheduler=None,
        *,
        microbatches=1,
        window=None,
        clip_norm=None,
        clip_scope="auto",
        recompute=False,
        master_dtype=None,
        split_dim=0,
        on_nonfinite=None,
    ):
        self.split_dim, self.skips = split_dim, on_nonfinite == "skip"
        self.stages = copy.deepcopy(list(stages))  # ties are made again below
        self.loss_fn, self.microbatches, self.recompute = loss_fn, microbatches, recompute
        self.method = METHODS[method] if isinstance(method, str) else method
        self.clip_norm, self.clip_scope = clip_norm, clip_scope
        self.window = window
        self.params, self.copies = untied(self.stages)
        self.true = [
            [p.detach().to(master_dtype or p.dtype, copy=True).requires_grad_() for p in ps]
            for ps in self.params
        ]
        self.optimizers = [optimizer(true) if true else None for true in self.true]
        self.schedulers = [scheduler(o) if scheduler and o else None for o in self.optimizers]
        self.made = 0  # updates of all runs
        self.paces = []
        self.take_up(self.method)

    def take_up(self, method):
        """Train by this method from the next run on."""
        n, m = len(self.stages), self.microbatches
        self.method = method
        self.windows = [window_of(method, self.window, k, n, m) for k in range(n)]
        places = [(k, n, self.windows[k], m) for k in range(n)]
        self.steps = [
            Steps(o, true, method.correction(*place)) if o else None
            for o, true, place in zip(self.optimizers, self.true, places, strict=True)
        ]
        for pace in self.paces:
            if pace is not None:
                pace.restore()
        self.paces = [
            Pace(o, partial(method.rates, *place)) if o else None
            for o, place in zip(self.optimizers, places, strict=True)
        ]

    def run(self, batches):
        return list(self.minibatches(batches))

    def minibatches(self, batches):
        """Yield the loss of every minibatch after its update; the caller may change weights there.

        A method with phases is one run after another.
        """
        batches = list(batches)
        while self.method.then is not None:
            then, after = self.method.then
            part = max(0, after - self.made)
            yield from self.run_alone(batches[:part])
            batches = batches[part:]
            if self.made < after:
                return
            self.take_up(then)
        yield from self.run_alone(batches)

    def run_alone(self, batches):
        n, m = len(self.stages), self.microbatches
        self.windows = [self.window_at(k) for k in range(n)]
        self.set_mode("train")
        minibatches = [cut(batch, m, self.split_dim) for batch in batches]
        counts = [len(parts) for parts in minibatches]
        self.read = [self.versions_read(k, counts) for k in range(n)]
        self.versions = [[self.version(k)] for k in range(n)]
        # The minibatch of each update; a skipped one has no update.
        self.made_by = [[0] for _ in range(n)]
        for i, parts in enumerate(minibatches):
            loss, tapes = 0.0, []
            for j, (value, target, share) in enumerate(parts):
                value, tape = self.forward(i, j, value, target)
                loss = loss + share * value
                tapes.append(tape)
            total = [[None] * len(ps) for ps in self.true]
            for j, (_, target, share) in enumerate(parts):
                self.backward(i, j, tapes[j], target, share, total)
            last = len(parts) - 1
            stale = [self.backward_weights(i, last, k) for k in range(n)]
            self.update(total, stale, self.left_out(total, loss) if self.skips else ())
            yield loss
        self.set_mode("eval")
        for k in range(n):
            self.put(k, self.true[k])
            for p, home, r in self.copies[k]:
                p.data.copy_(self.true[home][r])

    def set_mode(self, mode):
        """Let optimizers that have modes put the weights for it in place."""
        for optimizer in self.optimizers:
            getattr(optimizer, mode, lambda: None)()

    def window_at(self, k):
        """Return the window of the current phase."""
        return window_of(self.method, self.window, k, len(self.stages), self.microbatches)

    # Weights

    def versions_read(self, k, counts):
        """Return (i, j) -> updates before the forward, given each minibatch's microbatches."""
        n, w, m = len(self.stages), self.windows[k], self.microbatches
        return updates_before(order(self.method.schedule, k, n, w, m, counts), "F")

    def first(self, j, k):
        """Return the microbatch whose weights j uses, if those of a minibatch share weights."""
        return 0

    def version(self, k):
        return rows_of(self.optimizers[k], self.true[k]) if self.true[k] else []

    def read_by_forward(self, i, j, k):
        if self.method.reads == "previous":
            return max(0, i - 1)
        return self.read[0 if self.method.reads == "entry" else k][i, j]

    def forward_weights(self, i, j, k):
        if self.method.once:
            j = self.first(j, k)
        u = self.read_by_forward(i, j, k)
        rule = self.method.forward
        steps = i - u if rule == "counted" else rule(*self.place(k))
        lead = self.method.lead(*self.place(k), local(*self.place(0)))
        return self.ahead(k, self.method.law, u, steps, lead)

    def backward_weights(self, i, j, k):
        if self.method.backward == "stash":
            return self.forward_weights(i, j, k)
        steps = 0
        if self.method.backward == "predict":
            steps = self.method.backward_horizon(*self.place(k))
        law = "linear" if self.method.law == "second-order" else self.method.law
        return self.ahead(k, law, i, steps)

    def ahead(self, k, law, u, steps, lead=0):
        return predict(law, self.versions[k], self.made_by[k][u], steps, lead)

    def place(self, k):
        return k, len(self.stages), self.windows[k], self.microbatches

    def put_copies(self, i, j, k):
        for p, home, r in self.copies[k]:
            p.data.copy_(self.forward_weights(i, j, home)[r])

    def put(self, k, weights):
        for p, weight in zip(self.params[k], weights, strict=True):
            p.data.copy_(weight)

    # Compute

    def forward(self, i, j, value, target):
        tape = []
        for k in range(len(self.stages)):
            self.put(k, self.forward_weights(i, j, k))
            self.put_copies(i, j, k)
            entered, found = value, [buffer.clone() for buffer in self.stages[k].buffers()]
            entries, value = self.compute(k, value, target)
            tape.append((entries, value, entered, found))
        return value.detach(), tape

    def compute(self, k, value, target):
        """Run the stage's forward, and the loss after the last: (input, output)."""
        entries = [leaf(v) for v in many(value)]
        inputs = [v * 1 if v.requires_grad else v for v in entries]
        value = self.stages[k](like(value, inputs))
        if k == len(self.stages) - 1:
            value = self.loss_fn(value, target)
        return entries, value

    def backward(self, i, j, tape, target, share, total):
        """Add the gradients of one microbatch, weighted by its share, to the total."""
        gradients = [torch.ones_like(tape[-1][1])]
        for k in reversed(range(len(self.stages))):
            entries, value, entered, found = tape[k]
            self.put(k, self.backward_weights(i, j, k))
            self.put_copies(i, j, k)
            if self.recompute:
                counted = self.put_buffers(k, found)
                entries, value = self.compute(k, like(entered, entries), target)
                self.put_buffers(k, counted)  # running statistics include this microbatch
            places = [(p, k, r) for r, p in enumerate(self.params[k])] + self.copies[k]
            wanted = [v for v in [*entries, *(p for p, _, _ in places)] if v.requires_grad]
            found = dict(
                zip(map(id, wanted), found_of(many(value), wanted, gradients), strict=True)
            )
            for p, home, r in places:
                if found[id(p)] is not None:
                    mine = share * found[id(p)]
                    total[home][r] = mine if total[home][r] is None else total[home][r] + mine
            gradients = [found.get(id(entry)) for entry in entries]

    def put_buffers(self, k, values):
        """Give the stage's buffers these values; return the previous ones."""
        before = [buffer.clone() for buffer in self.stages[k].buffers()]
        for buffer, value in zip(self.stages[k].buffers(), values, strict=True):
            buffer.data.copy_(value)
        return before

    def left_out(self, total, loss):
        """Return the stages that skip the update with these gradients."""
        bad = [
            k
            for k, gradients in enumerate(total)
            if not all(g is None or g.isfinite().all() for g in gradients)
        ]
        if not loss.isfinite() or (bad and self.method.schedule in FLUSHING):
            bad = [len(total) - 1]
        return range(max(bad, default=-1) + 1)

    def update(self, total, stale, left_out=()):
        for true, gradients in zip(self.true, total, strict=True):
            for p, gradient in zip(true, gradients, strict=True):
                # with its strides, like autograd: fused optimizers follow memory order
                p.grad = None if gradient is None else torch.empty_like(p).copy_(gradient)
        if self.clip_norm is not None:
            whole = [[p for true in self.true for p in true]]
            flushes = self.method.schedule in FLUSHING
            together = flushes if self.clip_scope == "auto" else self.clip_scope == "global"
            for params in whole if together else self.true:
                torch.nn.utils.clip_grad_norm_(params, self.clip_norm)
        self.made += 1
        for k, (optimizer, scheduler) in enumerate(
            zip(self.optimizers, self.schedulers, strict=True)
        ):
            if k in left_out:
                if optimizer:
                    self.paces[k].restore()
                    self.paces[k].slow()
                self.made_by[k].append(self.made_by[k][-1])
                continue
            if optimizer:
                self.steps[k].step(stale[k])
                self.paces[k].restore()
            if scheduler:
                scheduler.step()
            if optimizer:
                self.paces[k].slow()
            self.made_by[k].append(len(self.versions[k]))
            self.versions[k].append(self.version(k))


def untied(stages):
    """Return each stage's trained parameters, and (copy, its home, its place there) of copies.

    The copies' parameters become separate ones.
    """
    params, copies, homes = [], [], {}
    for k, stage in enumerate(stages):
        own, others = [], []
        for p in [p for p in stage.parameters() if p.requires_grad]:
            if p not in homes:
                homes[p] = k, len(own)
                own.append(p)
                continue
            made = torch.nn.Parameter(p.detach().clone())
            for module in stage.modules():
                for name, held in module._parameters.items():
                    if held is p:
                        setattr(module, name, made)
            others.append((made, *homes[p]))
        params.append(own)
        copies.append(others)
    return params, copies


def found_of(outputs, wanted, gradients):
    """Return gradients of ``wanted`` from those of the outputs; None without a dependence."""
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
    if not pairs or not wanted:
        return [None] * len(wanted)
    roots, seeds = zip(
        *((o, torch.zeros_like(o) if g is None else g) for o, g in pairs), strict=True
    )
    return torch.autograd.grad(roots, wanted, seeds, allow_unused=True)


def cut(batch, microbatches, split_dim=0):
    """Return (input, target, share of the samples) per microbatch; sizes differ by at most one."""
    value, target = (batch, batch) if isinstance(batch, dict) else batch
    of = split_dim if isinstance(split_dim, tuple) else (split_dim, split_dim)
    dims = [dims_of(side, dim) for side, dim in zip((value, target), of, strict=True)]
    first = many(value)[0]
    samples = first.shape[dims[0][0]] if first.dim() else 1
    parts = max(1, min(microbatches, samples))
    if parts == 1:
        return [(value, target, 1.0)]
    found, end = [], 0
    for j in range(parts):
        start, end = end, end + samples // parts + (j < samples % parts)
        pieces = [
            like(
                side, [v.narrow(d, start, end - start) for v, d in zip(many(side), ds, strict=True)]
            )
            for side, ds in zip((value, target), dims, strict=True)
        ]
        found.append((*pieces, (end - start) / samples))
    return found


def dims_of(value, split_dim):
    """Return every tensor's split dimension: one for all, one for each, or by name."""
    if isinstance(split_dim, int):
        return [split_dim] * len(many(value))
    if isinstance(split_dim, dict):
        return [split_dim.get(name, 0) for name in value]
    return split_dim


def many(value):
    if isinstance(value, dict):
        return tuple(value.values())
    return value if isinstance(value, tuple) else (value,)


def like(value, tensors):
    """Return these tensors in the structure of a value."""
    if isinstance(value, dict):
        return dict(zip(value, tensors, strict=True))
    return tuple(tensors) if isinstance(value, tuple) else tensors[0]


def leaf(value):
    value = value.detach().clone()
    differentiable = value.is_floating_point() or value.is_complex()
    return value.requires_grad_() if differentiable else value
