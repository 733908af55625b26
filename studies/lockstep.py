"""Lockstep: what a Pipeline would compute, minibatch after minibatch, with far fewer calls.

A pipeline of N stages and M microbatches runs N*M forwards for a minibatch, of a sample or two
each where models are small. But a stage's microbatches of one minibatch differ in the weights that
they meet by one update at most: here all that meet the same weights run together. The weights are
those that the engine's own bookkeeping names, made by its own kernels, so that the numbers are the
engine's up to the order of sums. A small transformer in 32 stages with 32 microbatches takes a
seventh of the time, in 8 stages with 8 two fifths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from spectrain_ext.method import (
    Method,
    Window,
    check_optimizer,
    delay,
    factor_of,
    phase_places,
    phases_of,
    rules_at,
)
from spectrain_ext.operators.averaging import Averager, Averaging, in_a_row, taken_apart
from spectrain_ext.optim.foreign import updater_of
from spectrain_ext.pipeline.loads import clip, gradient_norm
from spectrain_ext.schedule import (
    Entries,
    Generator,
    Instruction,
    Kind,
    Place,
    Rules,
    find_generator,
)
from spectrain_ext.weights import paced, rates_of
from spectrain_ext.weights.storage import Content, Storage
from spectrain_ext.weights.versions import Versions

from .meeting import Meeting


class _Part(NamedTuple):
    """Samples of a minibatch that meet the same weights on a stage, and what autograd knows."""

    begin: int
    end: int
    backward: Content
    value: Tensor
    output: Tensor


class _Stage:
    """One stage: its module, the weights of the versions that minibatches to come will meet."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        rules: Rules,
        places: tuple[Place, Place],
        schedule: str | Generator,
        max_norm: float | None,
    ) -> None:
        self.module = module
        self.params = [p for p in module.parameters() if p.requires_grad]
        self._updater = updater_of(optimizer)
        self._scheduler = scheduler
        self._max_norm = max_norm
        entry, place = places
        generator = find_generator(schedule)
        self._actions: Iterator[Instruction] = generator(place)
        self._storage = Storage(self.params, self._updater, rules, master=True)
        self._storage.bind()
        self._storage.begin()
        # Only its bookkeeping is used: what each turn computes with, by name.
        self._versions = Versions(
            rules,
            place,
            Entries(generator(entry)),
            self._storage,
            partial(rates_of, optimizer),
        )
        self._forwards: dict[tuple[int, int], Content] = {}
        self._backwards: dict[tuple[int, int], Content] = {}
        self._made: dict[Content, list[Tensor]] = {}
        self._held: Content | None = None
        self._microbatches = place.microbatches
        self._reach = delay(entry) + 1  # versions back that a forward may read
        # A statistic of a batch is one microbatch's.
        self._together = not any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()
        )
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Read the actions up to the next update, and make the weights that they name."""
        versions = self._versions
        self._keep(Content(versions.version))
        for kind, i, j in self._actions:
            if kind is Kind.FORWARD:
                self._forwards[i, j] = content = versions.for_forward(i, j)
                self._keep(content)
            elif kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHTS):  # both halves meet the same
                self._backwards[i, j] = content = versions.for_backward(i, j)
                self._keep(content)
            elif kind is Kind.UPDATE:
                break
        named = chain(self._forwards.values(), self._backwards.values())
        oldest = min([versions.version - self._reach, *(content.version for content in named)])
        self._made = {c: made for c, made in self._made.items() if c.version >= oldest}

    def _keep(self, content: Content) -> None:
        if content in self._made:
            return
        assert content.version == self._versions.version, (content, self._versions.version)
        if self._held != content:
            self._storage.write(content, self._storage.home)
            self._held = content
        self._made[content] = [buffer.clone() for buffer in self._storage.home.flat.buffers]

    def _load(self, content: Content) -> None:
        if self._held == content:
            return
        for buffer, made in zip(self._storage.home.flat.buffers, self._made[content], strict=True):
            buffer.copy_(made)
        self._held = content

    def forward(self, i: int, value: Tensor, sizes: Sequence[int]) -> Tensor:
        """Run all microbatches of minibatch i; ``sizes`` are their samples."""
        self._parts: list[_Part] = []
        named = [
            (self._forwards.pop((i, j)), self._backwards.pop((i, j)), None if self._together else j)
            for j in range(self._microbatches)
        ]
        begin = 0
        for (content, met, _), run in groupby(zip(named, sizes, strict=False), itemgetter(0)):
            end = begin + sum(size for _, size in run)
            self._load(content)
            part = value[begin:end].detach()
            if part.is_floating_point():
                part.requires_grad_()
            self._parts.append(_Part(begin, end, met, part, self.module(part)))
            begin = end
        return torch.cat([part.output.detach() for part in self._parts])

    def backward(self, gradient: Tensor) -> Tensor:
        """Run their backwards; returns the gradient of the input, empty for one that has none."""
        found = []
        for part in self._parts:
            self._load(part.backward)
            part.output.backward(gradient[part.begin : part.end])
            found.append(part.value.grad)
        self._parts = []
        return torch.cat([given for given in found if given is not None] or [gradient[:0]])

    def update(self) -> None:
        """Step the optimizer and the scheduler."""
        self.step()
        self.follow()

    def step(self, average: Averager | None = None) -> None:
        """The update without what follows from it."""
        if self._max_norm is not None:
            clip(self.params, self._max_norm, gradient_norm(self.params, torch.device("cpu")))
        self._versions.updated()
        ordered = self._versions.written
        self._storage.before_update()
        if average is not None:
            average.before(self.row())
        if ordered is not None:
            sink = self._storage.sink_of(self._storage.home)
            self._updater.write_with_next_step(sink, ordered.law or 0.0)
        self._updater.step()
        self._ordered = ordered
        if average is not None:
            average.made(self.row())

    def average(self, average: Averager) -> None:
        """Between a step and what follows: the other replicas have all made theirs."""
        moved = average.after(self.row())
        if moved is not None:
            weights = taken_apart(moved, self.params)
            self._storage.home.content = self._ordered
            self._storage.move(weights, self._versions.version)

    def row(self) -> Tensor:
        """The true weights."""
        true = self._storage.true_weights()
        return in_a_row([true[p] for p in self.params])

    def follow(self) -> None:
        """Make what the next minibatch computes with."""
        ordered = self._ordered
        if self._scheduler is not None:
            self._scheduler.step()
        for p in self.params:
            p.grad = None
        if ordered is not None:
            self._held = ordered
            self._keep(ordered)
        self._look_ahead()

    def show_true(self) -> None:
        """Put the true weights into the module."""
        self._load(Content(self._versions.version))

    def show(self, row: Tensor) -> None:
        """Put other weights into the module, for a while."""
        for p, value in zip(self.params, taken_apart(row, self.params), strict=True):
            p.data.copy_(value)
        self._held = None

    def release(self) -> None:
        self._storage.end()
        self._storage.unbind()


class Lockstep:
    """Trains modules as ``Pipeline`` with the same arguments does; see there.

    One process on the CPU. What draws random numbers is not drawn as the engine would; methods that
    want the learning rates to come, or change at a measured gap, are refused.

    Raises:
        ValueError: a method that is not defined for these stages, or is refused.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        method: Method,
        *,
        scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        microbatches: int = 1,
        window: Window = None,
        clip_norm: float | None = None,
        codec: Any = None,
    ) -> None:
        phases = phases_of(method)
        for phase in phases:
            if phase.then is not None and phase.then.gap is not None:
                raise ValueError(f"method: {phase.name!r} ends at a gap, which only runs measure")
        places = phase_places(method, len(stages), microbatches, window)
        self._loss_fn = loss_fn
        self._microbatches = microbatches
        self._clip_norm = clip_norm
        self._codec = codec
        self._drawn = torch.initial_seed() << 32
        self._phases = [*zip(phases, places, strict=True)]
        self._trained: list[tuple[nn.Module, torch.optim.Optimizer, LRScheduler | None]] = []
        for k, module in enumerate(stages):
            made = optimizer([p for p in module.parameters() if p.requires_grad])
            schedule = paced(
                scheduler or (lambda optimizer: None),
                factor_of([(phase, found[k]) for phase, found in self._phases]),
            )
            self._trained.append((module, made, schedule(made)))
        self._begun = 0  # minibatches before this phase
        self._stages: list[_Stage] = []
        self._enter()

    def _enter(self) -> None:
        """Begin the first of the phases that are left."""
        method, places = self._phases.pop(0)
        for stage in self._stages:
            stage.release()
        self._stages = []
        self._end = None if method.then is None else method.then.after
        self._minibatches = 0
        for (module, made, scheduler), place in zip(self._trained, places, strict=True):
            rules = rules_at(method, place, made)
            check_optimizer(method, rules, place.stage, made)
            max_norm = self._clip_norm
            if max_norm is None and method.clip is not None:
                max_norm = method.clip(place)
            entry = places[0], place
            self._stages.append(
                _Stage(module, made, scheduler, rules, entry, method.schedule, max_norm)
            )

    @contextmanager
    def true_weights(self) -> Iterator[nn.Module]:
        """Inside, the whole model with its true weights, to be evaluated."""
        model = nn.Sequential(*(stage.module for stage in self._stages))
        for stage in self._stages:
            stage.show_true()
        model.eval()
        with torch.no_grad():
            yield model
        model.train()

    def release(self) -> None:
        """Give the modules ordinary parameters with the true weights."""
        for stage in self._stages:
            stage.release()

    def train_on(self, value: Tensor, target: Tensor) -> float:
        """One minibatch, one update of every stage; returns its mean loss."""
        loss = self.compute(value, target)
        for stage in self._stages:
            stage.update()
        return loss

    def _across(self, value: Tensor, backward: bool) -> Tensor:
        if self._codec is None:
            return value
        more = ()
        if getattr(self._codec, "draws", False):
            self._drawn += 1
            more = (self._drawn,)
        packed = self._codec.pack(value, backward, *more)
        return self._codec.unpack(packed, value.to("meta"), backward)

    def compute(self, value: Tensor, target: Tensor) -> float:
        """The same without the updates."""
        while self._end is not None and self._begun + self._minibatches >= self._end:
            self._begun += self._minibatches
            self._enter()
        parts = max(1, min(self._microbatches, len(value)))
        sizes = [len(part) for part in value.tensor_split(parts)]
        i = self._minibatches
        for k, stage in enumerate(self._stages):
            if k:
                value = self._across(value, False)
            value = stage.forward(i, value, sizes)
        value.requires_grad_()
        loss = self._loss_fn(value, target)
        loss.backward()
        gradient = value.grad
        assert gradient is not None
        for k, stage in reversed([*enumerate(self._stages)]):
            gradient = stage.backward(gradient)
            if k:
                gradient = self._across(gradient, True)
        self._minibatches += 1
        return loss.item()


class Replicated:
    """Replicas in lockstep that are averaged, as ``SideBySide`` has them.

    Args:
        locks: one for each replica, made alike.
        averaging: how.
    """

    def __init__(self, locks: Sequence[Lockstep], averaging: Averaging) -> None:
        if any(lock._end is not None for lock in locks):
            raise ValueError("locks: a method that changes cannot be averaged")
        self._locks = locks
        self._stages = list(zip(*(lock._stages for lock in locks), strict=True))
        self._averages = []
        meeting = Meeting(len(locks))
        for k, stages in enumerate(self._stages):
            made = [
                averaging.begin(stage.row(), meeting.exchange(c, k), k)
                for c, stage in enumerate(stages)
            ]
            self._averages.append(made)

    def train_on(self, value: Tensor, target: Tensor) -> float:
        """One minibatch, dealt out; one update of every stage of each; the mean of their losses."""
        r = len(self._locks)
        count = sum(lock._microbatches for lock in self._locks)
        inputs, targets = value.tensor_split(count), target.tensor_split(count)
        losses = [
            lock.compute(torch.cat(inputs[c::r]), torch.cat(targets[c::r]))
            for c, lock in enumerate(self._locks)
        ]
        for stages, averages in zip(self._stages, self._averages, strict=True):
            for stage, average in zip(stages, averages, strict=True):
                stage.step(average)
            for stage, average in zip(stages, averages, strict=True):
                stage.average(average)
                stage.follow()
        return sum(losses) / r

    @contextmanager
    def true_weights(self) -> Iterator[nn.Module]:
        """Inside, the whole model with the averages, and the first replica's module buffers."""
        with self._locks[0].true_weights() as model:
            for stages, averages in zip(self._stages, self._averages, strict=True):
                begun = [
                    average.average(stage.row())
                    for stage, average in zip(stages, averages, strict=True)
                ]
                stages[0].show(begun[0]())
            yield model
