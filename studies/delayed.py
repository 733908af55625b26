"""Trains on one device with a pipeline's delays, or the same delay on all stages, in fewer calls.

A pipeline of N stages and M microbatches runs N*M forwards per minibatch, often with a sample or
two each. But the weights that a minibatch's microbatches use on a stage differ by one update at
most. Here all microbatches with the same weights run together, and a minibatch is finished before
the next one begins: weights that the schedule reads earlier are kept, or predicted, at the update
where it would have read them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from spectrain_ext.method import (
    Method,
    check_optimizer,
    delay_under,
    factor_of,
    find_method,
    phases_of,
    phases_on,
    places_of,
    rules_at,
)
from spectrain_ext.passes.averaging import Averaging, Exchange
from spectrain_ext.passes.codecs import Codec
from spectrain_ext.passes.compress import packed_message, unpacked_message
from spectrain_ext.pipeline.norms import gradient_norm
from spectrain_ext.pipeline.ties import Copy, copies_of
from spectrain_ext.schedule import Instruction, Kind, Place, find_generator, flushes
from spectrain_ext.transport import Buffer, Message
from spectrain_ext.transport.message import TENSOR
from spectrain_ext.weights import StageWeights
from spectrain_ext.weights.storage import Content, Flat, VersionBuffer, in_a_row, taken_apart

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler


class _Part(NamedTuple):
    """Samples of a minibatch that use the same weights on a stage, from forward to backward."""

    samples: int
    backward: Content | None  # the weights that it uses
    # Where they are written over the forward's; None: they are the forward's.
    buffer: VersionBuffer | None
    leaf: Tensor
    output: Tensor


class _Tie:
    """A copy of another stage's parameter: it uses what the home's forward of a microbatch used."""

    def __init__(self, copy: Copy, home: DelayedStage) -> None:
        assert copy.original is not None
        self.copy, self.home, self.original = copy, home, copy.original
        copy.bind()
        self._used: list[nn.Parameter] = []

    def use(self, microbatch: int) -> None:
        value = self.home.lent[microbatch][self.original]
        # a new one: the graph of an earlier part has the one before
        self.copy.put(nn.Parameter(value, self.original.requires_grad))
        self._used.append(self.copy.held)

    def add_gradients(self) -> None:
        for p in self._used:
            if p.grad is not None:
                own = self.original.grad
                self.original.grad = p.grad if own is None else own + p.grad
        self._used = []


class DelayedStage:
    """One stage: its module, and the weights that future minibatches will use."""

    lent: Sequence[Mapping[nn.Parameter, Tensor]]  # weights of each microbatch's forward
    lends: Sequence[nn.Parameter] = ()  # those that other stages have copies of
    ties: Sequence[_Tie] = ()
    weights: StageWeights | None = None  # None: no trainable parameters
    averaged = False  # whether an update is followed by other weights
    # What passes ask of a stage and its run: all is in one stream, and nothing is skipped.
    reading = changing_gradients = staticmethod(lambda wide=False: torch.no_grad())
    skips, trains, microbatches_of = False, True, staticmethod(lambda i: 1)

    def __init__(self, module: nn.Module, index: int) -> None:
        self.module, self.index = module, index
        # Batch statistics are those of one microbatch.
        self._apart = any(
            isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()
        )

    def enter(self, method: Method, places: Sequence[Place]) -> None:
        """Begin a phase of the method with the current weights as its first version."""
        weights, place = self.weights, places[self.index]
        if weights is not None and weights.bound:
            weights.end()
            weights.unbind()
        self._microbatches = range(place.microbatches)
        self.parts: list[_Part] = []
        self._met: dict[tuple[Kind, int, int], Content] = {}  # for the forwards and backwards ahead
        self.late = delay_under(method.schedule, place)
        self.passes = [each.on(self, None) for each in method.passes]
        self._steps = [each.begin(self) for each in self.passes]
        if weights is None:
            return
        rules = rules_at(method, place, weights.optimizer)
        weights.follow(rules, (places[0], place), method.schedule)
        weights.bind()
        weights.begin(factor_of(method, place))
        self._actions: Iterator[Instruction] = find_generator(method.schedule)(place)
        self._peeked: tuple[Instruction, ...] = ()
        self._storage, self._versions = weights._bound, weights.versions
        self._own: list[VersionBuffer] = []  # for parts whose backward uses other weights

    def _run_passes(self, kind: Kind) -> None:
        for run in [steps[kind] for steps in self._steps if kind in steps]:
            run(0, 0)

    def _read(self) -> list[tuple[Content | None, Content | None]]:
        """Hold and return what the forwards and backwards up to the next update compute with."""
        if self.weights is None:
            return [(None, None)] * len(self._microbatches)
        versions = self._versions
        for kind, i, j in chain(self._peeked, self._actions):
            if kind is Kind.UPDATE:
                break
            if kind is Kind.FORWARD:
                self._hold(kind, i, j, versions.for_forward(i, j))
            elif kind is not Kind.BACKWARD_INPUT:  # both halves use the same weights
                self._hold(Kind.BACKWARD, i, j, versions.for_backward(i, j))
        found = self._met.pop
        return [
            (found((Kind.FORWARD, i, j)), found((Kind.BACKWARD, i, j))) for j in self._microbatches
        ]

    def _hold(self, kind: Kind, i: int, j: int, content: Content) -> None:
        versions = self._versions
        self._met[kind, i, j] = content
        versions.hold(content)
        if versions.find(content) is None:
            assert content.version == versions.version, content
            self._storage.write(content, versions.room(content))

    def _own_buffer(self, n: int) -> VersionBuffer:
        if n == len(self._own):
            flat = Flat(self._storage.params)
            self._own.append(VersionBuffer(flat, Buffer(f"weights of part {n}")))
        return self._own[n]

    def _load(self, content: Content | None, own: VersionBuffer | None) -> None:
        """Compute with these weights, in their buffer, or copied over the weights in ``own``."""
        if content is None:
            return
        buffer = self._versions.find(content)
        assert buffer is not None, content
        if own is not None:
            self._storage.copy(buffer.flat, own.flat)
            buffer = own
        if buffer is not self._storage.bound:
            self._storage.point(buffer)

    def forward(self, value: Tensor, sizes: Sequence[int]) -> None:
        """Run all microbatches of the next minibatch, which have these sizes."""
        self._used = self._read()
        homes = [[id(tie.home.lent[j]) for tie in self.ties] for j in range(len(sizes))]
        met = [
            (*pair, self._apart * j, home)
            for j, (pair, home) in enumerate(zip(self._used, homes, strict=False))
        ]
        runs = [
            (key, [size for _, size in run])
            for key, run in groupby(zip(met, sizes, strict=False), itemgetter(0))
        ]
        pieces = value.detach().split([sum(run) for _, run in runs])
        lent: list[Mapping[nn.Parameter, Tensor]] = []
        for ((content, backward, _, _), run), piece in zip(runs, pieces, strict=True):
            own = None if content == backward else self._own_buffer(len(self.parts))
            self._load(content, own)
            for tie in self.ties:
                tie.use(len(lent))
            lent += [{p: p.detach().clone() for p in self.lends}] * len(run)
            leaf = piece.detach().requires_grad_(value.requires_grad)
            # a copy: the module may work in place, and neither a leaf nor the batch may change
            output = self.module(leaf.clone())
            self.parts.append(_Part(sum(run), backward, own, leaf, output))
        self.lent = lent
        self._release(content for content, _ in self._used)

    def _release(self, contents: Iterable[Content | None]) -> None:
        for content in contents:
            if content is not None:
                self._versions.release(content)

    def sent(self) -> Tensor:
        """Return the parts' outputs together, as a leaf."""
        outputs = [part.output for part in self.parts]
        wanted = any(output.requires_grad for output in outputs)
        return torch.cat([output.detach() for output in outputs]).requires_grad_(wanted)

    def backward(self, gradient: Tensor) -> Tensor:
        """Run the backwards from the gradient of what was sent; return the input's gradient."""
        pieces = [gradient]
        if len(self.parts) > 1:
            pieces = [*gradient.split([part.samples for part in self.parts])]
        found = []
        for part, piece in zip(self.parts, pieces, strict=True):
            self._load(part.backward, part.buffer)
            if part.output.requires_grad:
                part.output.backward(piece)
            reached = part.leaf.grad
            found.append(torch.zeros_like(part.leaf) if reached is None else reached)
        self._run_passes(Kind.BACKWARD)
        self._release(content for _, content in self._used)
        self.parts = []
        return torch.cat(found)

    def step(self) -> None:
        """Update the weights; afterwards the module has the true weights."""
        weights = self.weights
        if weights is None:
            return
        self._peeked = (next(self._actions),)
        kind, i, j = self._peeked[0]
        following = (i, j) if kind is Kind.FORWARD else None
        self._run_passes(Kind.CHANGE_GRADIENTS)
        weights.step(self._versions.begin_update(following, self.averaged, weights.rates_move))
        self._run_passes(Kind.UPDATE)
        if self._storage.bound is not self._storage.true:
            self._storage.point(self._storage.true)


def uniform_places(method: Method, stages: int, delay: int) -> list[tuple[Method, list[Place]]]:
    """Return ``phases_on`` stages that are all like the first of delay + 1 stages."""
    late = [Place(0, delay + 1, delay + 1, latest=delay)] * stages
    return [
        (phase, places_of(phase, stages, 1) if flushes(phase.schedule) else late)
        for phase in phases_of(method)
    ]


class Delayed:
    """Trains stages on one device with the gradients and predictions of a pipeline.

    Losses and weights are those of ``Pipeline`` with these arguments, up to the order of sums; the
    loss is a mean over the samples. Each stage maps a tensor to a tensor, with the samples along
    dimension 0. Between two calls the modules hold their true weights, as views of flat buffers.

    Args:
        delay: updates by which the gradients of all stages are late, with one microbatch; None: the
            delays of the pipeline.
        clip_norm: the largest 2-norm of a stage's gradient, or of all stages' if the method
            flushes or ``clip_all`` is true, which no pipeline without a flush can do.

    Attributes:
        clipped: the mean share of stages whose gradient was longer, over all updates, 0 to 1.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        loss_fn: Callable[[Any, Any], Tensor],
        method: str | Method,
        *,
        delay: int | None = None,
        scheduler: Callable[[Any], LRScheduler] | None = None,
        microbatches: int = 1,
        clip_norm: float | None = None,
        clip_all: bool = False,
        codec: Codec | None = None,
    ) -> None:
        self.method = find_method(method)
        self.stages = [DelayedStage(module, k) for k, module in enumerate(stages)]
        self._model = nn.Sequential(*stages)
        copies = copies_of(stages, range(len(stages)))
        self._ties = [_Tie(copy, self.stages[copy.home]) for copy in copies]
        for tie in self._ties:
            tie.home.lends = (*tie.home.lends, tie.original)
            stage = self.stages[tie.copy.stage]
            stage.ties = (*stage.ties, tie)
        borrowed = {copy.held for copy in copies}
        self._loss_fn, self._microbatches, self._codec = loss_fn, microbatches, codec
        self._clip_norm, self._clip_all = clip_norm, clip_all
        self._clipped = 0.0
        self.minibatches = 0
        n = len(stages)
        if delay is None:
            self._phases = phases_on(self.method, n, microbatches)
        else:
            self._phases = uniform_places(self.method, n, delay)
        for k, (module, stage) in enumerate(zip(stages, self.stages, strict=True)):
            params = [p for p in module.parameters() if p.requires_grad and p not in borrowed]
            if not params:
                continue
            made = optimizer(params)
            for phase, places in self._phases:
                check_optimizer(phase, rules_at(phase, places[k], made), k, made)
            stage.weights = StageWeights(module, made, scheduler and scheduler(made))
        self._enter()

    def _enter(self) -> None:
        self._phase, places = self._phases.pop(0)
        own = self._phase.clip
        self._norms = [self._clip_norm or (own and own(place)) for place in places]
        for stage in self.stages:
            stage.enter(self._phase, places)

    def train_on(self, value: Tensor, target: Tensor) -> Tensor:
        """Train on one minibatch, one update of every stage; return its loss, 0-d and detached."""
        loss = self.compute(value, target)
        for stage in self.stages:
            stage.step()
        for tie in self._ties:
            tie.copy.follow(changed=True)
        return loss

    def compute(self, value: Tensor, target: Tensor) -> Tensor:
        """Do the same without the updates, which must follow."""
        while (then := self._phase.then) and self.minibatches >= then.after:
            self._enter()
        parts = value.tensor_split(min(self._microbatches, len(value)))
        sizes = [len(part) for part in parts]
        last = self.stages[-1]
        for k, stage in enumerate(self.stages[:-1]):
            stage.forward(value, sizes)
            value = self._crossed(stage.sent(), k, backward=False)
        last.forward(value, sizes)
        loss, gradient = self._loss(last, target)
        for k in range(len(self.stages) - 1, 0, -1):
            gradient = self._crossed(self.stages[k].backward(gradient), k, backward=True)
        self.stages[0].backward(gradient)
        for tie in self._ties:
            tie.add_gradients()
        self._clip(value.device)
        self.minibatches += 1
        return loss

    def _loss(self, last: DelayedStage, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and the gradient that the last stage's backward starts with."""
        if len(last.parts) == 1:
            loss = self._loss_fn(last.parts[0].output, target)
            last.parts[0] = last.parts[0]._replace(output=loss)
            return loss.detach(), torch.ones_like(loss)
        output = last.sent()
        loss = self._loss_fn(output, target)
        (gradient,) = torch.autograd.grad(loss, output)
        return loss.detach(), gradient

    def _crossed(self, tensor: Tensor, sender: int, backward: bool) -> Tensor:
        """Return a tensor as it arrives; with one microbatch, codecs draw as in a pipeline."""
        if self._codec is None:
            return tensor
        message = Message((tensor.detach(),), (tensor.requires_grad,), TENSOR)
        key = backward, True, sender, self.minibatches, 0
        packed = packed_message(self._codec, message, backward, *key)
        (arrived,) = unpacked_message(self._codec, packed, backward).tensors
        assert arrived is not None
        return arrived.requires_grad_(tensor.requires_grad)

    def _clip(self, device: torch.device) -> None:
        trained = [
            (stage.weights.params, most)
            for stage, most in zip(self.stages, self._norms, strict=True)
            if stage.weights is not None and most is not None
        ]
        of_all = None
        if self._clip_norm is not None and (self._clip_all or flushes(self._phase.schedule)):
            of_all = gradient_norm([p for params, _ in trained for p in params], device)
        for params, most in trained:
            norm = gradient_norm(params, device) if of_all is None else of_all
            nn.utils.clip_grads_with_norm_(params, most, norm)
            self._clipped += bool(norm > most) / len(trained)

    @property
    def clipped(self) -> float:
        return self._clipped / max(1, self.minibatches)

    @contextmanager
    def true_weights(self) -> Iterator[nn.Module]:
        """Inside, yield the model (an ``nn.Sequential`` of stages) in eval mode, without graph."""
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            with torch.no_grad():
                yield self._model
        finally:
            for module, training in modes:
                module.training = training


# Averaged replicas


class Replicated:
    """Identically built replicas; each takes every r-th of the minibatch's ``parts``."""

    def __init__(self, replicas: Sequence[Delayed], averaging: Averaging, parts: int) -> None:
        if replicas[0].method.then is not None:
            raise ValueError("replicas: a method that changes cannot be averaged")
        if replicas[0]._ties:
            raise ValueError("replicas: stages with tied weights cannot be averaged")
        self._replicas, self._parts = replicas, parts
        self._averaged = []
        for k, of_all in enumerate(zip(*(replica.stages for replica in replicas), strict=True)):
            messages: dict[int, list[Tensor]] = defaultdict(list)  # of all replicas, by number
            for stage in of_all:
                stage.averaged = True
            weights = [stage.weights for stage in of_all if stage.weights]
            exchanges = [_exchange(messages, len(replicas)) for _ in weights]
            self._averaged.append(
                [
                    (each, averaging.begin(in_a_row(each.newest()), exchange, k))
                    for each, exchange in zip(weights, exchanges, strict=True)
                ]
            )

    def train_on(self, value: Tensor, target: Tensor) -> Tensor:
        """Train on a minibatch, one update per stage and replica; return their mean loss."""
        r = len(self._replicas)
        inputs, targets = value.tensor_split(self._parts), target.tensor_split(self._parts)
        losses = [
            replica.compute(torch.cat(inputs[c::r]), torch.cat(targets[c::r]))
            for c, replica in enumerate(self._replicas)
        ]
        every = [pair for of_all in self._averaged for pair in of_all]
        for weights, average in every:
            average.before(in_a_row(weights.newest()))
        for replica in self._replicas:
            for stage in replica.stages:
                stage.step()
        for weights, average in every:
            average.made(in_a_row(weights.newest()))
        for weights, average in every:
            moved = average.after(in_a_row(weights.newest()))
            if moved is not None:
                weights.move(taken_apart(moved, weights.params))
        return torch.stack(losses).mean()

    @contextmanager
    def true_weights(self) -> Iterator[nn.Module]:
        """Provide the whole model with the averages and the first replica's module buffers."""
        with self._replicas[0].true_weights() as model:
            kept = []
            for of_all in self._averaged:
                begun = [average.average(in_a_row(w.newest())) for w, average in of_all]
                params, row = of_all[0][0].params, begun[0]()
                for p, value in zip(params, taken_apart(row, params), strict=True):
                    kept.append((p, p.data))
                    p.data = value
            try:
                yield model
            finally:
                for p, data in kept:
                    p.data = data


def _exchange(messages: dict[int, list[Tensor]], replicas: int) -> Exchange:
    """Return one replica's exchange: all have sent a message before any of them reads it."""
    numbers = count()

    def send(message: Tensor) -> Callable[[], Sequence[Tensor]]:
        number = next(numbers)
        sent = messages[number]
        sent.append(message.clone())
        if len(sent) == replicas:
            del messages[number]
        return lambda: sent

    return send
