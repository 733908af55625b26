"""Trains on one device with a pipeline's delays, or any others, in far fewer calls.

A pipeline of N stages and M microbatches runs N*M forwards per minibatch, often with a sample or
two each. But the weights that a minibatch's microbatches use on a stage differ by one update at
most. Here all microbatches with the same weights run together, and a minibatch is finished before
the next one begins: weights that the schedule reads earlier are kept, or predicted, at the update
where it would have read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from spectrain_ext.codecs import Codec, Codecs, codecs_of
from spectrain_ext.method import (
    Method,
    Window,
    delay_under,
    delayed_places,
    find_method,
    phase_places,
    phases_of,
)
from spectrain_ext.schedule import Generator, Instruction, Kind, Place, Replicas, find_generator
from spectrain_ext.transport import Buffer, Message
from spectrain_ext.weights import StageWeights
from spectrain_ext.weights.storage import Content, Flat, VersionBuffer

from .arguments import (
    check_functions,
    check_loss_fn,
    check_mode,
    check_order,
    checked_microbatches,
    checked_stages,
    cut_place,
    devices_of,
)
from .batch import cut_message, samples_in, sizes_of, split
from .coding import packed_message, unpacked_message
from .connections import without_dropped_columns
from .loads import clip, gradient_norm
from .losses import LossFn, mean_of
from .phases import Training
from .tape import (
    ModuleModes,
    activation,
    check_dependence,
    checked_loss,
    differentiate,
    packed,
    run_on,
    seeded,
)
from .ties import copies_of

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

_Gradients = Sequence[Tensor | None]


class _Part(NamedTuple):
    """Samples of a minibatch that use the same weights on a stage, from forward to backward."""

    samples: int  # 0 if they were not counted
    backward: Content | None  # the weights that it uses
    # Where they are written over the forward's; None: they are the forward's.
    buffer: VersionBuffer | None
    leaves: _Gradients
    output: Any


class DelayedStage:
    """One stage: its module, and the weights that future minibatches will use."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        weights: StageWeights | None,
        place: Place,
        schedule: str | Generator,
    ) -> None:
        self.index, self.module, self.weights = index, module, weights
        self._place, self._generator = place, find_generator(schedule)
        self._microbatches = range(place.microbatches)
        self._in_place: bool | None = None  # whether the module modifies its input in place
        # Batch statistics are those of one microbatch.
        self._apart = any(
            isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()
        )

    def begin(self) -> None:
        """Take the current weights as the first version, and forget all others."""
        self.parts: list[_Part] = []
        self._met: dict[tuple[Kind, int, int], Content] = {}  # for the forwards and backwards ahead
        if self.weights is None:
            return
        if not self.weights.bound:
            self.weights.bind()
        self.weights.begin()
        self._actions: Iterator[Instruction] = self._generator(self._place)
        self._peeked: tuple[Instruction, ...] = ()
        self._storage, self._versions = self.weights._bound, self.weights.versions
        self._own: list[VersionBuffer] = []  # for parts whose backward uses other weights

    def _read(self, microbatches: int) -> list[tuple[Content | None, Content | None]]:
        """Return what the next minibatch's forwards and backwards compute with.

        Reads the schedule up to that minibatch's update, and holds the weights that are named
        there.
        """
        if self.weights is None:
            return [(None, None)] * len(self._microbatches)
        if not self.weights.bound:
            self.begin()
        versions, backwards = self._versions, []
        for kind, i, j in chain(self._peeked, self._actions):
            if kind is Kind.UPDATE:
                break
            if kind is Kind.FORWARD:
                self._hold(kind, i, j, versions.for_forward(i, j))
            elif kind is not Kind.BACKWARD_INPUT:  # both halves use the same
                backwards.append(j)
        # Those that a small minibatch lacks come first: corrections read what the last one used.
        for j in sorted(backwards, key=lambda j: j < microbatches):
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
            name = f"weights of part {n}"
            self._own.append(VersionBuffer(Flat(self._storage.params), Buffer(name)))
        return self._own[n]

    def _load(self, content: Content | None, own: VersionBuffer | None) -> None:
        """Compute with these weights, in their buffer, or copied over the weights in ``own``."""
        if content is None:
            return
        buffer = self._versions.find(content)
        assert buffer is not None, content
        if own is not None:
            self._storage.copy(buffer, own)
            buffer = own
        if buffer is not self._storage.bound:
            self._storage.point(buffer)

    def forward(self, message: Message, sizes: Sequence[int]) -> None:
        """Run all microbatches of the next minibatch, which have these sizes."""
        # The tensors to split if parts use different weights.
        self._cuts = [t is not None and _has_samples(t, sum(sizes)) for t in message.tensors]
        self._of_microbatches = self._read(len(sizes))
        met = [(*pair, self._apart * j) for j, pair in enumerate(self._of_microbatches)]
        runs = [
            (key, sum(size for _, size in run))
            for key, run in groupby(zip(met, sizes, strict=False), itemgetter(0))
        ]
        messages = [message]
        if len(runs) > 1:
            messages = cut_message(message, [n for _, n in runs], [0] * len(message.tensors))
        for ((content, backward, _), samples), part in zip(runs, messages, strict=True):
            own = None if content == backward else self._own_buffer(len(self.parts))
            self._load(content, own)
            leaves, output = self._run(part)
            self.parts.append(_Part(samples, backward, own, leaves, output))
        self._release(content for content, _ in self._of_microbatches)

    def _release(self, contents: Iterable[Content | None]) -> None:
        for content in contents:
            if content is not None:
                self._versions.release(content)

    def _run(self, message: Message) -> tuple[list[Tensor | None], Any]:
        if self._in_place is False:
            return run_on(self.module, message, entry=False)
        # Copies: the previous stage's output, or the caller's batch, must not change.
        copies = tuple(None if t is None else t.clone() for t in message.tensors)
        found = run_on(self.module, message._replace(tensors=copies), entry=True)
        self._in_place = self._in_place or any(t is not None and t._version for t in copies)
        return found

    def sent(self) -> Message:
        messages = [activation(part.output) for part in self.parts]
        first = messages[0]
        if len(messages) == 1:
            return first
        if any(message.form != first.form for message in messages):
            raise self._not_joined("values of several forms")
        columns = zip(*(message.tensors for message in messages), strict=True)
        tensors = map(self._joined, columns, first.differentiable)
        return first._replace(tensors=tuple(tensors))

    def _joined(self, column: tuple[Tensor, ...], differentiable: bool) -> Tensor:
        if all(map(_has_samples, column, (part.samples for part in self.parts))):
            return torch.cat(column)
        if differentiable or not all(torch.equal(column[0], other) for other in column):
            raise self._not_joined(f"a tensor of shape {tuple(column[0].shape)}")
        return column[0]

    def _not_joined(self, what: str) -> ValueError:
        return ValueError(
            f"stages[{self.index}]: microbatches that meet other weights return {what}; expected "
            "what has the samples along dimension 0, or is the same for all; or microbatches=1"
        )

    def backward(self, gradients: _Gradients) -> _Gradients:
        """Run the backwards from the gradients of what was sent; return the input's gradients."""
        samples = [part.samples for part in self.parts]
        columns = [self._cut(gradient, samples) for gradient in gradients]
        found = []
        for part, given in zip(self.parts, zip(*columns, strict=True), strict=True):
            self._load(part.backward, part.buffer)
            differentiate(seeded(part.output, given)[0])
            found.append([None if leaf is None else leaf.grad for leaf in part.leaves])
        self._release(content for _, content in self._of_microbatches)
        parts, self.parts = self.parts, []
        if len(found) == 1:
            return found[0]
        leaves = zip(*(part.leaves for part in parts), strict=True)
        return [*map(self._added, zip(*found, strict=True), leaves, self._cuts)]

    @staticmethod
    def _cut(gradient: Tensor | None, samples: Sequence[int]) -> _Gradients:
        if gradient is None or len(samples) == 1:
            return [gradient] * len(samples)
        return list(gradient.split(list(samples)))

    @staticmethod
    def _added(column: _Gradients, leaves: _Gradients, cut: bool) -> Tensor | None:
        """Return the gradient of one input tensor, which was split, or went to each part whole."""
        known = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for gradient, leaf in zip(column, leaves, strict=True)
            if leaf is not None
        ]
        if not known:
            return None
        return torch.cat(known) if cut else torch.stack(known).sum(0)

    def step(self) -> None:
        """Update the weights; afterwards the module has the true weights."""
        weights = self.weights
        if weights is None:
            return
        self._peeked = (next(self._actions),)
        kind, i, j = self._peeked[0]
        following = (i, j) if kind is Kind.FORWARD else None
        weights.step(self._versions.begin_update(following, weights.moves, weights.rates_move))
        if self._storage.bound is not self._storage.true:
            self._storage.point(self._storage.true)

    def end(self) -> None:
        """Give the module and the optimizer ordinary storage, with the true weights."""
        if self.weights is not None and self.weights.bound:
            self.weights.end()
            self.weights.unbind()


def _has_samples(tensor: Tensor, samples: int) -> bool:
    return tensor.dim() > 0 and len(tensor) == samples


class Delayed:
    """Trains with delayed gradients, and predictions, on one device: for studies of staleness.

    It computes what ``Pipeline`` does with these arguments, up to the order of sums, and with
    several microbatches in a fraction of its calls. With ``delays``, gradients are as late as you
    say. Call ``train_on`` for one minibatch after another instead of ``run``.

    Args:
        model: a module, which is one stage; or a sequence of stages as for ``Pipeline``, all on one
            device.
        optimizer: makes a stage's optimizer from its parameters; see ``Pipeline``.
        loss_fn: ``(output, target) -> loss``, a mean over the samples, or a pair (sum, count).
        method: a name from ``methods()``, or a ``Method`` whose phases do not begin at a gap.
        delays: the number of updates between the weights that a minibatch's gradient is computed
            from and those that it changes: one for all stages, or one per stage, at least 0. If D
            is the largest delay, a stage with delay d does what the method does on stage D - d of a
            pipeline of D + 1 stages with one microbatch, so that each stage predicts for its own
            delay. None: the delays of the pipeline.
        scheduler: makes a learning-rate scheduler from an optimizer; it steps after each update.
        microbatches: parts of a minibatch, or ``"auto"``, as for ``Pipeline``; 1 with ``delays``.
        window: as for ``Pipeline``; None with ``delays``.
        clip_norm: the largest 2-norm of a stage's gradient, or of all stages' if the method
            flushes.
        codec: as for ``Pipeline``, with the same random numbers if a minibatch is one microbatch.

    Attributes:
        method: the Method.
        delays: the largest delay of each stage, in updates, in the current phase of the method.
        minibatches: trained on so far.

    Raises:
        TypeError, ValueError: as for ``Pipeline``; or stages on several devices, stages that share
            parameters, or ``delays`` under a schedule that flushes or sets its own windows.

    Between two calls the modules hold their true weights, as views of flat buffers: you may read,
    but not change them. Call ``release()`` at the end. Random numbers come from your generators,
    while a pipeline's stages have their own. If microbatches of a minibatch use different weights
    (``microbatches`` above 1), samples must lie along dimension 0 of all tensors between stages.

    Example:
        >>> sgd = lambda params: st.optim.SGD(params, lr=0.1, momentum=0.9)
        >>> delayed = st.Delayed(nn.Linear(2, 1), sgd, nn.functional.mse_loss, delays=2)
        >>> losses = [delayed.train_on(torch.ones(4, 2), torch.ones(4, 1)) for _ in range(4)]
        >>> delayed.minibatches, delayed.delays
        (4, (2,))
        >>> delayed.release()
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        loss_fn: LossFn,
        method: str | Method = "auto",
        *,
        delays: int | Sequence[int] | None = None,
        scheduler: Callable[[Any], LRScheduler] | None = None,
        microbatches: int | Literal["auto"] = "auto",
        window: Window = None,
        clip_norm: float | None = None,
        codec: Codec | Codecs | None = None,
    ) -> None:
        whole = isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList)
        modules = checked_stages([model] if whole else model)  # type: ignore[list-item, arg-type]
        n = len(modules)
        check_order([cut_place(module) for module in modules])
        self._devices = set(devices_of(modules))
        if len(self._devices) > 1:
            raise ValueError(f"model: expected all stages on one device, got {self._devices}")
        if ties := copies_of(modules, range(n)):
            raise ValueError(
                f"model: {ties[0].member}; expected stages that share no parameters, or one module "
                "and a delay for all of it"
            )
        self.method = find_method(method)
        for phase in phases_of(self.method):
            if phase.then is not None and phase.then.gap is not None:
                raise ValueError(f"method: {phase.name!r} ends at a gap, which only runs measure")
        if delays is None:
            parts = checked_microbatches(microbatches, self.method, Replicas((1,) * n))
            places = phase_places(self.method, n, parts, window)
        else:
            if microbatches not in (1, "auto") or window is not None:
                raise ValueError(
                    "delays: with delays of one's own a minibatch is one microbatch, and there is "
                    f"no window; got microbatches={microbatches!r}, window={window!r}"
                )
            parts, places = 1, delayed_places(self.method, n, delays)
        check_loss_fn(loss_fn, parts)
        check_functions(optimizer, loss_fn, scheduler)
        self._model = modules[0] if whole else nn.Sequential(*modules)
        self._loss_fn, self._microbatches = loss_fn, parts
        self._codecs = codecs_of(codec)
        here = dict(enumerate(modules))
        training = Training(*(self.method, places, here, lambda k: {}, optimizer, scheduler, None))
        self._modules, self._phases = modules, training.phases(clip_norm, "auto")
        self.minibatches = 0
        self.stages: list[DelayedStage] = []
        try:
            self._enter()
        except BaseException:
            self.release()
            raise

    def _enter(self) -> None:
        phase = self._phase = self._phases[0]
        for old, weights in zip(self.stages, phase.weights, strict=False):
            if old.weights is not None and weights is not None and old.weights is not weights:
                old.weights.end()
                old.weights.hand_over(weights)
        schedule = phase.method.schedule
        self.delays = tuple(delay_under(schedule, place) for place in phase.places)
        self.stages = [
            DelayedStage(k, module, weights, place, schedule)
            for k, (module, weights, place) in enumerate(
                zip(self._modules, phase.weights, phase.places, strict=True)
            )
        ]
        for stage in self.stages:
            if stage.weights is not None:
                stage.weights.minibatches = self.minibatches
            stage.begin()

    def train_on(self, input: Any, target: Any = None) -> Tensor:
        """Train on one minibatch: one update of every stage.

        Args:
            input: what the first stage takes; a mapping may hold the whole batch.
            target: what ``loss_fn`` takes besides the output; None: the input.

        Returns:
            The loss, a detached 0-d tensor; the CPU has not waited for it.

        After an exception the modules hold the true weights (some stages may have made one update
        more than others), and training continues as from the start: the first gradients have no
        delay.
        """
        try:
            loss = self.compute(input, target)
            for stage in self.stages:
                stage.step()
        except BaseException:
            for stage in self.stages:
                if stage.weights is not None:
                    stage.weights.end()
                stage.begin()
            raise
        return loss

    def compute(self, input: Any, target: Any = None) -> Tensor:
        """Do the same without the updates, which must follow."""
        check_mode("train_on", self._devices)
        (device,) = self._devices
        while (then := self._phase.method.then) and self.minibatches >= (then.after or 0):
            self._phases.pop(0)
            self._enter()
        batch = input if target is None else (input, target)
        if (columns := getattr(self._modules[0], "batch_columns", None)) is not None:
            batch = without_dropped_columns(columns, False, batch, self.minibatches)
        (whole,) = split(batch, self.minibatches, 1)
        message, target = (
            side._replace(tensors=tuple(t.to(device) for t in side.tensors if t is not None))
            for side in (whole.input, whole.target)
        )
        sizes = [0]
        if self._microbatches > 1:
            samples = samples_in(message.tensors) or 1
            sizes = sizes_of(samples, min(self._microbatches, samples))
        for stage in self.stages[:-1]:
            stage.forward(message, sizes)
            message = stage.sent()
            message = self._crossed(message, stage.index, backward=False)
        self.stages[-1].forward(message, sizes)
        loss, gradients = self._loss(self.stages[-1], packed(target, target.tensors), device)
        for stage in self.stages[:0:-1]:
            sent = Message(tuple(stage.backward(gradients)))
            gradients = self._crossed(sent, stage.index, backward=True).tensors
        self.stages[0].backward(gradients)
        self._clip(device)
        self.minibatches += 1
        return loss

    def _loss(
        self, last: DelayedStage, target: Any, device: torch.device
    ) -> tuple[Tensor, _Gradients]:
        """Return the loss, and what the last stage's backward starts with."""
        parts, leaves = last.parts, list[Tensor | None]()
        if len(parts) == 1:
            found = self._loss_fn(parts[0].output, target)
        else:
            leaves, found = run_on(
                lambda output: self._loss_fn(output, target), last.sent(), entry=False
            )
        loss, count = checked_loss(found, device)
        mean, seed = loss.detach(), torch.ones_like(loss)
        if count is not None:
            mean, seed = mean_of(mean, count), seed / (count + (count == 0)).to(seed.dtype)
        if len(parts) == 1:
            check_dependence(loss, parts[0].output)
            parts[0] = parts[0]._replace(output=loss)
            return mean, (seed,)
        differentiate([(loss, seed)] if loss.requires_grad else [])
        return mean, [None if leaf is None else leaf.grad for leaf in leaves]

    def _crossed(self, message: Message, sender: int, backward: bool) -> Message:
        """Return a message as it arrives; with one microbatch, codecs draw as in a pipeline."""
        codec = self._codecs[backward]
        if codec is None:
            return message
        key = backward, True, sender, self.minibatches, 0
        packed = packed_message(codec, message, backward, *key)
        return unpacked_message(codec, packed, backward)

    def _clip(self, device: torch.device) -> None:
        norms = self._phase.max_norms
        trained = [
            (stage.weights.params, most)
            for stage, most in zip(self.stages, norms, strict=True)
            if stage.weights is not None and most is not None
        ]
        of_all = None
        if self._phase.globally:
            of_all = gradient_norm([p for params, _ in trained for p in params], device)
        for params, most in trained:
            clip(params, most, gradient_norm(params, device) if of_all is None else of_all)

    @contextmanager
    def true_weights(self) -> Iterator[nn.Module]:
        """Inside, yield the model (an ``nn.Sequential`` of stages) in eval mode, without graph."""
        modes = ModuleModes(self._model)
        modes.evaluate()
        try:
            with torch.no_grad():
                yield self._model
        finally:
            modes.restore()

    def release(self) -> None:
        """Give modules and optimizers ordinary storage, and free all buffers.

        Training after it starts anew: the first gradients have no delay.
        """
        for stage in self.stages:
            stage.end()
