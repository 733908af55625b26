"""Pipeline: the front that people use; checks what it is given and puts the parts together."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from spectrain_ext.codecs import codecs_of
from spectrain_ext.interrupts import deferred
from spectrain_ext.method import Method, Window, find_method, in_words, phase_places
from spectrain_ext.rng import StageRandom
from spectrain_ext.schedule import Place, Rules
from spectrain_ext.threads import warn_of_threads
from spectrain_ext.transport import callers_stream, each
from spectrain_ext.weights import StageMemory, StageWeights

from .activations import Offload, Recompute, recomputed_blocks
from .arguments import (
    check_factories,
    check_loss_fn,
    check_master_dtype,
    check_mode,
    check_offload,
    check_on_nonfinite,
    check_order,
    check_recompute,
    checked_devices,
    checked_microbatches,
    checked_stages,
    cut_place,
    devices_of,
)
from .batch import SplitDim, first_dim, sides_of
from .coding import crossed
from .connections import Connections
from .executor import Executor
from .loads import OnNonfinite
from .loops import Loops, warn_unless_begun
from .losses import Keep, Result
from .names import same_memory, tensors_by_name, use_model_names
from .observer import Observer, looking_on, observers_of
from .phases import Training, TrainingPhase, Until
from .stage import Stage
from .tape import ModuleModes
from .ties import Copy, copies_in, copies_of, follow_homes
from .trainable import with_new

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from spectrain_ext.codecs import Codec


_logger = logging.getLogger(__name__)


class Pipeline(Loops):
    """Trains a model that is cut into stages, with several minibatches in flight, in one process.

    Args:
        stages: the parts of the model in order, at least one. A stage takes what the previous one
            returned, as one argument, as in ``nn.Sequential``: a tensor, or tuples, lists and dicts
            by name, however nested, of tensors, None, bools, numbers and strings; a named tuple
            arrives as a tuple, any mapping as a dict. The last one may return anything that
            ``loss_fn`` takes, such as a dataclass or the output of a Hugging Face model.
        optimizer: makes a stage's optimizer from the list of its trainable parameters: any
            ``torch.optim.Optimizer`` that holds exactly these, in any groups. Those of
            ``spectrain_ext.optim`` work with every method, and are the fast ones; any other with
            methods that predict nothing, or by the law ``"difference"``, see below. A stage
            without trainable parameters gets none. Where more become trainable between two runs it
            is asked again, for the group that they join.
        loss_fn: ``(output, target) -> loss``, a 0-d tensor: a mean over samples; or a pair of a sum
            and its count, both 0-d tensors, the count may be a number, as of the tokens that are
            not padding. The loss of a minibatch is then the sum of all its microbatches' sums,
            divided by the sum of their counts, on all replicas and ranks, and gradients are divided
            by that count once, before clipping; nan, with gradients of 0, if it is 0. Of a batch
            that is a mapping, the target is all of it, without the columns that ``partition`` says
            are dropped.
        method: a name out of ``methods()``, or a ``Method``. ``"auto"`` predicts on every stage as
            far ahead as stage 0 has to, one update with its usual microbatches; its law is the
            second-order one, or, for optimizers without a momentum that it could use, the last
            change of the weights.
        devices: one device per stage, to which the stages are moved; one CUDA device may be named
            several times. None: where the stages' parameters are.
        scheduler: makes a learning-rate scheduler from a stage's optimizer; stepped once after each
            of its updates.
        microbatches: parts that a minibatch is split into along ``split_dim``. Gradients and the
            loss are weighted by the parts' sizes, so that a loss that is a mean gives what
            ``microbatches=1`` gives. ``"auto"``: as many as stages for the methods ``auto``,
            ``pipedream-2bw``, ``gpipe`` and ``1f1b``, 1 for others.
        window: microbatches that a stage may have in flight: ``"classic"``, N - k on stage k of N;
            ``"wide"``, 2*(N - k) - 1, which hides communication at twice the staleness; a number
            for all stages; or one per stage. None: the method's own, classic for most; ``"auto"``
            and ``"pipedream-2bw"`` have a wider one with more microbatches than stages, as that
            makes nothing later than one update. Not for schedules that flush.
        clip_norm: the largest 2-norm of a gradient before an update; a larger one is scaled down,
            as by ``torch.nn.utils.clip_grad_norm_``. None: what the method says, most say nothing.
        clip_scope: whose gradient: ``"stage"``, each one's own; ``"global"``, all stages' together,
            as of the uncut model, for synchronous methods; ``"auto"``, global in phases of the
            method that flush, by stage in others. A norm that the method says is by stage.
        master_dtype: ``torch.float32`` has the optimizers update float32 weights, with float32
            state, where parameters are bfloat16 or float16; what the stages compute with, true or
            predicted, is these rounded. Between runs they stay, as long as the parameters do.
        split_dim: the dimension that the samples lie along, of all tensors of a batch. Or made as
            the batch is, like ``in_dims`` of ``torch.func.vmap``: a pair (of the input, of the
            target), each a number for all that is in it, or one per member, or a mapping by name;
            for batches that are mappings, a mapping by name. Names left out have 0; what has None
            goes to every microbatch as it is. ``(1, 0)`` for ``nn.LSTM``'s inputs of (time, batch,
            features) and targets of (batch,). Nobody can tell inputs and targets that are both time
            first from a batch. What stages hand on may have any layout.
        recompute: what to run again instead of keeping what autograd saves of it: True, whole
            stages, right before their backwards; a number k, every k-th block of a stage; or
            ``(name, module) -> bool``, which picks blocks, or modules in them, by the model's
            names. Blocks are the layers of a Hugging Face model, or a stage's children, those of an
            ``nn.ModuleList`` in its place. The weights are those that the backward is to meet.
            Where the method has other weights there than in the forward, this is another method;
            where it has not, it is slower, and smaller. Dropout is drawn again as it was. Module
            buffers, which are kept as well, are what the first forward found, and are not updated
            again.
        count: what a minibatch's loss is divided by, where ``loss_fn`` returns sums and that can be
            told by the whole minibatch's target alone: ``target -> a number``, called where batches
            come in; of a batch that is a mapping, the target is all of it. Gradients are then of
            the mean from the start, where those of a sum could overflow 16 bits; a pair's count is
            ignored. None: gradients of pairs are divided at the update.
        on_nonfinite: what comes of a minibatch whose loss or gradient is inf or nan. ``"raise"``:
            a ``StageError`` before the update, caused by a ``FloatingPointError``. ``"skip"``: the
            update is left out. Where the method flushes, by all stages, and all is as if the batch
            had never come: module buffers and random numbers, too. Elsewhere by all stages if it is
            the loss; if a gradient, by its stage and those before it; and buffers get back what
            was finite. The host waits for that at every update. None: nobody looks.
        offload: what to keep in host memory while it waits: ``"activations"``, what autograd saves;
            ``"versions"``, weights that a stage computes with again, but for three of them;
            ``"both"``. No bit changes.
        codec: what packs all that stages send one another, see ``spectrain_ext.codecs``: one for
            activations and gradients, or a pair (of activations, of gradients), each a codec or
            None. Batches, targets and tied weights are not packed, nor are tensors that are no
            floating ones or have fewer than two dimensions. Evaluations and calls of the pipeline
            compute with what was packed as well.

    Attributes:
        method: the Method.
        devices: a device per stage.
        minibatches: begun in all runs; a checkpoint has it.
        phase: which of the method's phases they have come to, counted from 0; likewise.

    Raises:
        TypeError: a member of ``stages`` that is no module, or what ``optimizer`` makes is no
            ``torch.optim.Optimizer``.
        ValueError: an argument that does not fit; the message names it, and what was expected. An
            optimizer that the method cannot predict with, or whose ``step`` needs a closure.
        RuntimeError: a CUDA device where none can be used.

    While a pipeline exists the parameters are views of flat buffers, which kernels overwrite
    without autograd noticing: change parameters in place (``load_state_dict`` does), never by
    ``.to()``, and call ``release()`` at the end. Tensors that a stage receives live in ring buffers
    that later minibatches overwrite: a module that wants to keep one clones it.

    Each stage draws random numbers of its own in its forwards, those of minibatch after minibatch,
    and recomputations draw them again; batches, and what hooks and backwards draw, come from the
    caller's generator. Pipelines in several threads take turns in whatever may draw, which is every
    forward, loss, backward and update: none of them may wait for another thread's pipeline.

    An optimizer that is none of ``spectrain_ext.optim`` is stepped as it is. While its ``step``
    runs, with its hooks, the parameters are the true weights, and with ``master_dtype`` they and
    their gradients are of that dtype; it has to read both anew each time. If its ``step`` raises,
    it may have been made in part.

    A parameter that several stages have is trained as one. It belongs to the first of them, its
    optimizer and its clipping; the others get copies while the pipeline exists, which compute with
    what the first stage's forward of the same microbatch had, and whose gradients are added to its
    own before each update. Stages that hold no common object say so by ``tied_parameters``:
    ``stages[3].tied_parameters = {"head.weight": (0, "embedding.weight")}``, name here: (earlier
    stage, name there). Between runs the first stage's weights count. See docs/methods.md.

    Stages work on streams of their own. Every call orders these with the streams that are current
    at that call, which may be others each time.

    ``state_dict`` and ``load_state_dict`` use the names of the uncut model, where the stages are
    those of ``partition`` or ``cut_at``, so that either takes the other's; with any other stages
    they use the keys of ``nn.Sequential(*stages)``. Optimizers have their own pair.
    """

    _connections: Connections | None = None  # of the stages; None: all of them are here
    _warned = False  # of stages in evaluation mode

    def __init__(
        self,
        stages: Iterable[nn.Module],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        loss_fn: Callable[..., Tensor],
        method: str | Method = "auto",
        devices: Sequence[torch.device | str | int] | None = None,
        scheduler: Callable[[Any], LRScheduler] | None = None,
        microbatches: int | Literal["auto"] = "auto",
        window: Window = None,
        clip_norm: float | None = None,
        clip_scope: Literal["auto", "stage", "global"] = "auto",
        master_dtype: torch.dtype | None = None,
        recompute: Recompute = False,
        split_dim: SplitDim = 0,
        count: Callable[[Any], float | Tensor] | None = None,
        on_nonfinite: OnNonfinite = None,
        offload: Offload = None,
        codec: Codec | tuple[Codec | None, Codec | None] | None = None,
    ) -> None:
        super().__init__()
        with deferred():
            # Everything is checked before anything is moved.
            modules = checked_stages(stages)
            chosen = find_method(method)
            connections = self._connections or Connections(len(modules), split_dim)
            connections.count, connections.codecs = count, codecs_of(codec)
            replicas = connections.replicas
            here = dict(zip(connections.indices, modules, strict=True))
            if len(here) == replicas.stages:
                check_order([cut_place(module) for module in modules])
            self._copies, self._clip_scope = copies_of(modules, connections.indices), clip_scope
            where = (
                devices_of(modules) if devices is None else checked_devices(devices, len(modules))
            )
            parts = checked_microbatches(microbatches, chosen, replicas)
            of_phases = phase_places(chosen, replicas.stages, parts, window, replicas)
            check_master_dtype(master_dtype, modules)
            check_recompute(recompute)
            check_on_nonfinite(on_nonfinite)
            self._on_nonfinite = on_nonfinite
            check_offload(offload, recompute, on_nonfinite)
            blocks = recomputed_blocks(here, recompute)
            sides_of(split_dim)
            check_loss_fn(loss_fn, parts, count)
            check_factories(optimizer, scheduler)
            copies = partial(copies_in, self._copies)
            offloads = offload in ("versions", "both")
            self._training = Training(
                *(chosen, of_phases, here, copies, optimizer, scheduler, master_dtype, offloads)
            )
            self._phases = self._training.phases(clip_norm, clip_scope)
            if not any(map(self._exchanges_norms, self._phases)):
                connections.norm = None
            self.method, self.devices = chosen, tuple(where)
            self.minibatches, self.phase = 0, 0
            first = self._phases[0]
            try:
                for copy in self._copies:
                    copy.bind()
                for module, device, weights in zip(modules, where, first.weights, strict=True):
                    if devices is not None:
                        module.to(device)
                    if weights is not None:
                        weights.bind()
                for k, module in here.items():
                    self.add_module(str(k), module)
                dim, keeps_there = first_dim(split_dim), offload in ("activations", "both")
                own = [
                    Stage(k, module, device, recompute is True, blocks[k], dim, keeps_there)
                    for (k, module), device in zip(here.items(), where, strict=True)
                ]
                own[-1].divided = count is not None
                for stage in own:
                    stage.codecs = connections.codecs
                self._executor = Executor(own, connections)
                self._train_by(first)
                self._log(clip_norm)
                # Not here, lest a loss function that is a module becomes a part of the model.
                connections.connect(own, of_phases, chosen, loss_fn, self._copies)
                self._executor.follow_caller()
            except BaseException:
                self._unbind()
                raise
            self.register_state_dict_post_hook(_put_true_weights)  # type: ignore[no-untyped-call]
            self.register_load_state_dict_pre_hook(_refuse_load_in_run)  # type: ignore[no-untyped-call]
            self.register_load_state_dict_post_hook(_follow_load)  # type: ignore[no-untyped-call]
            use_model_names(self, whole=len(here) == replicas.stages)
            for weights in self._of_all_phases():
                weights.updater.order_by(self._executor.callers_turn)

    def _log(self, clip_norm: float | None) -> None:
        like = next((weights.optimizer for weights in self._trained), None)
        said = (in_words(phase.method, phase.places, like) for phase in self._phases)
        _logger.info("%s", "; then ".join(said))
        if clip_norm is not None:
            scopes = ["all stages" if phase.globally else "each stage" for phase in self._phases]
            _logger.info("gradients are clipped by the norm of %s", ", then ".join(scopes))
        if any(device.type == "cpu" for device in self.devices):
            warn_of_threads()

    def _unbind(self) -> None:
        for weights in self._of_all_phases():
            if weights.bound:
                callers_stream(weights.params[0].device).lend(weights.buffers())
                weights.unbind()
        for copy in self._copies:
            copy.unbind()

    # Training.

    def run(
        self,
        batches: Iterable[object],
        *,
        trace: Observer | Sequence[Observer] | None = None,
        keep: Keep | None = None,
    ) -> Iterator[Result]:
        """Train on every batch, one update per batch and stage, without flushing in between.

        Args:
            batches: pairs (input, target), each a tensor, or tuples, lists and mappings by name,
                however nested; or one such mapping, as Hugging Face's collators make it (a
                ``BatchEncoding`` too), which is both: stage 0 gets it as a dict, and so does
                ``loss_fn(output, batch)``. Tensors are cut along ``split_dim``. Of size 1 there, as
                broadcasting has it, or of no dimensions, they go to every microbatch whole, and so
                does what is no tensor: None, bools, numbers, strings and, within one process,
                any other object, not copied. Or a list of microbatches that the caller has cut,
                each a pair or a mapping, at most as many as ``microbatches`` and of any sizes; two
                of them as ``Microbatches``, since a list of two is a pair. On any device. A batch
                is taken only when stage 0 is ready for it, and is trained on in full. On the GPU
                and in pageable memory it may be overwritten as soon as the next one is asked for;
                in pinned memory it must be left alone.
            trace: a ``Trace`` records when every action runs, ``Metrics`` sums up; at some cost.
                Several of them may look on.
            keep: ``(output, target) -> tensor``, or a dict or tuple of tensors, called for every
                microbatch beside the loss, without a graph; results carry what it returns as
                ``kept``: the mean over microbatches, weighted by samples, of what has no
                dimensions, and other tensors one after another. None: nothing is kept.

        Yields:
            A ``Result`` per minibatch, in order, as soon as its loss has been issued; backwards and
            updates of it and of later minibatches follow. Leaving the loop (or ``close()`` of the
            iterator) finishes the minibatches in flight; so does the end of ``batches``.
            Minibatches count from 0 in every run.

        Raises:
            StageError: an exception inside a stage, the loss or an optimizer, from its cause.
            TypeError, ValueError: a batch that is none of these, has no tensor in it, or tensors
                whose sizes do not agree; or it may be a pair as well as two microbatches.
                A parameter that has become trainable since, where nothing can train it: weights are
                averaged over replicas, or it makes a group that the scheduler does not know.
            RuntimeError: a run has not ended yet, a parameter left its flat buffer, autocast or
                inference mode is on.

        After any exception what was in flight is dropped, the true weights are in the modules (some
        stages may have made more updates than others), and the pipeline can run again. So it is
        after a Ctrl-C, which waits for the end of an instruction. A second one does not wait:
        should it come before the run has ended, whatever asks the pipeline for weights next ends
        the run first, and an update that it has cut short may be made in part.
        """
        self._refuse_in_run("run")
        if keep is not None and not callable(keep):
            raise TypeError(f"keep: expected a callable, got {type(keep).__name__}")
        begun: list[bool] = []
        run = self._run(iter(batches), observers_of(trace), keep, begun)
        return warn_unless_begun(run, begun)

    def _run(
        self,
        batches: Iterator[object],
        observers: Sequence[Observer],
        keep: Keep | None,
        begun: list[bool],
    ) -> Iterator[Result]:
        begun.append(True)
        self._refuse_in_run("run")
        check_mode("run", self.devices)
        self._warn_of_evaluation()
        self._enter()
        _logger.info("run begins: %s, %s", self.method.name, self._where())
        try:
            with looking_on(observers, self._rules, self.devices):
                yield from self._all_phases(batches, observers, keep)
        except GeneratorExit:
            _logger.info("run ended, left by the caller: %s", self._where())
            raise
        except BaseException as error:
            _logger.error("run failed: %s: %s", type(error).__name__, error)
            raise
        _logger.info("run ended: %s", self._where())

    def _warn_of_evaluation(self) -> None:
        """Once: the stages of a cut model do not follow the uncut model's ``train()``."""
        found = [stage.index for stage in self._executor.stages if not stage.module.training]
        if found and not self._warned:
            self._warned = True
            warnings.warn(
                f"run: stages[{found[0]}] is in evaluation mode: it trains without dropout and "
                "with fixed running statistics; call train() of the pipeline (that of the model "
                "that was cut may not reach its stages)",
                stacklevel=3,
            )

    def _all_phases(
        self, batches: Iterator[object], observers: Sequence[Observer], keep: Keep | None
    ) -> Iterator[Result]:
        """Run by one phase of the method after another, as training comes to them."""
        done, left = 0, False
        while True:
            coming = self._entered.method.then
            until = None if coming is None else Until(batches, coming, self.minibatches)
            watching = observers if until is None else (*observers, until)
            run = self._executor.run(until or batches, watching, keep)
            try:
                if done == 0:
                    yield from run
                for result in run:
                    if not left:
                        yield result.renumbered(done + result.index)
            except GeneratorExit:
                run.close()  # finishes what is in flight
                left = True
            finally:
                self.minibatches += self._executor.begun
            if until is None:
                return
            # The first process says where a phase ends: it is the one that ends a run.
            over, more = self._tell(partial(until.said, left), "ending a phase")[0]
            self.phase += over
            if not more:
                return
            done += self._executor.begun
            self._enter()
            for observer in observers:
                observer.changed(self._entered.rules, done)

    def _enter(self) -> None:
        """Have the stages be what the phase makes of them that training has come to."""
        with deferred():
            self._train_what_is_new()
            while (then := self._phases[self.phase].method.then) is not None and (
                then.after is not None and self.minibatches >= then.after
            ):
                self.phase += 1
            now = self._phases[self.phase]
            for stage, weights in zip(self._executor.stages, now.weights, strict=True):
                stage.before, old = self.minibatches, stage.weights
                if weights is not None and old is not None and old.bound:
                    stays = old is weights and not old.refrozen
                    if not stays:
                        callers_stream(stage.device).lend(old.buffers())
                        old.hand_over(weights)
                stage.weights = weights
                if weights is not None and not weights.bound:
                    weights.bind()
            for copy in self._copies:
                copy.bind()
            if follow_homes(self._copies):
                self._executor.connections.tie_again(self._copies)
            before = self._entered.method
            if self._entered is not now:
                self._train_by(now)
            if now.method is not before:
                _logger.info("minibatch %d: now %s", self.minibatches, now.method.name)

    def _train_what_is_new(self) -> None:
        """Have the stages train what requires gradients only since the last run."""
        connections = self._executor.connections
        try:
            phases = with_new(
                self._training, self._phases, self.minibatches, connections.averaged.keys()
            )
        except Exception:
            with connections.run():  # other processes hear of it
                raise
        if phases is self._phases:
            return
        self._phases = phases
        for weights in self._of_all_phases():
            weights.updater.order_by(self._executor.callers_turn)

    def _train_by(self, phase: TrainingPhase) -> None:
        """Have the next run go by a phase, whose weights are bound."""
        executor, connections = self._executor, self._executor.connections
        executor.change(phase.places, phase.method.schedule)
        connections.change(phase.method, phase.places)
        norm = connections.norm if self._exchanges_norms(phase) else None
        stages = zip(executor.stages, phase.weights, phase.max_norms, strict=True)
        for stage, weights, max_norm in stages:
            stage.train_by(weights, max_norm, phase.globally, norm, self._on_nonfinite)
        self._entered = phase

    def _exchanges_norms(self, phase: TrainingPhase) -> bool:
        return phase.globally or (self._on_nonfinite is not None and phase.flushes)

    def _where(self) -> str:
        of, here = f"of {len(self._executor.places)}", [place.stage for place in self.places]
        first, last = here[0], here[-1]
        if len(here) == 1:
            return f"stage {first} {of}"
        dense = last - first == len(here) - 1
        return f"stages {f'{first} to {last}' if dense else ', '.join(map(str, here))} {of}"

    def train(self, mode: bool = True) -> Pipeline:
        """Set the mode of all stages; ``eval()`` calls it with False.

        Raises:
            RuntimeError: a stage cannot have it, see ``partition``; all are then as they were.
        """
        before = ModuleModes(self)
        try:
            return super().train(mode)
        except BaseException:
            before.restore()
            raise

    def forward(self, value: Any) -> Any:
        """The output of the true weights; tensors are moved from stage to stage.

        Raises:
            RuntimeError: a run has not ended yet.
        """
        self._refuse_in_run("calling the pipeline", changed=True)
        columns = self._executor.connections.columns
        if columns is not None and isinstance(value, Mapping):
            value = columns.kept(value, "batch")
        codec = self._executor.connections.codecs[0]
        with self._executor.callers_turn():
            for k, (module, device) in enumerate(zip(self.children(), self.devices, strict=True)):
                if k and codec is not None:
                    value = crossed(codec, value, False, False, k - 1, 0, 0)
                value = module(_moved(value, device))
        return value

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module, with the uncut model's names; in a run copies of the true weights."""
        self._mend(changed=True)
        with ExitStack() as held:
            for stage in self._executor.stages:
                held.enter_context(stage.guard.lifted())
            return super().state_dict(*args, **kwargs)

    def write_back(self, model: nn.Module) -> None:
        """Write the true weights and the module buffers into the uncut model, between two runs.

        What the model can do, such as ``generate``, ``save_pretrained``, ``push_to_hub`` or
        ``merge_and_unload``, is then done with what has been trained. Training goes on afterwards
        as if nobody had asked.

        Args:
            model: the model that was cut, whose tensors are the stages' own for the most part, and
                stay so; or another one like it, in any dtype and on any devices. Its state dict
                has the names of ``state_dict``.

        Raises:
            RuntimeError: a run has not ended yet.
            TypeError, ValueError: it is no module, or has other names or shapes; nothing has been
                written then.
        """
        self.check_drained("write_back")
        state = self.state_dict()
        places = tensors_by_name(model, {name: value.shape for name, value in state.items()})
        with torch.no_grad(), self._executor.callers_turn():
            for name, value in state.items():
                if not same_memory(places[name], value):
                    places[name].copy_(value)

    def _mend(self, changed: bool = False) -> None:
        """Finish the end of a run, if an exception has cut that short."""
        executors = [each for each in (self._executor, self._evaluator) if each is not None]
        for executor in executors:
            executor.mend()
        if not any(executor.running for executor in executors):
            self._executor.let_caller_follow()
            # Changes by ``.data`` nobody sees: to follow them takes as long as to copy the weights.
            for copy in self._copies:
                copy.follow(changed)

    # All ways to the stages' parameters through this module begin here.

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As of any module; the end of a run that an exception cut short is finished first."""
        self._mend()
        found: Iterator[tuple[str, nn.Module]] = super().named_modules(
            memo, prefix, remove_duplicate
        )
        return found

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """As of any module; the end of a run that an exception cut short is finished first."""
        self._mend()
        return super().named_children()

    def _refuse_in_run(self, what: str, changed: bool = False) -> None:
        self._mend(changed)
        if self._evaluator is not None and self._evaluator.running:
            raise RuntimeError(f"{what}: an evaluation of this pipeline has not ended")
        if self._executor.running:
            raise RuntimeError(
                f"{what}: a run of this pipeline has not ended, and the modules may hold predicted "
                "weights; exhaust the iterator that run() returned, or close() it"
            )

    # What it holds.

    @property
    def _weights(self) -> list[StageWeights | None]:
        return [stage.weights for stage in self._executor.stages]

    @property
    def _trained(self) -> list[StageWeights]:
        return [weights for weights in self._weights if weights is not None]

    def _of_all_phases(self) -> list[StageWeights]:
        return [w for phase in self._phases for w in phase.weights if w is not None]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers in the order of stages; a stage without trainable parameters has none."""
        self._mend()
        return [weights.optimizer for weights in self._trained]

    @property
    def schedulers(self) -> list[LRScheduler]:
        """The learning-rate schedulers in the order of stages, empty if there are none."""
        return [each.scheduler for each in self._trained if each.scheduler is not None]

    @property
    def random(self) -> list[StageRandom]:
        """The generators of random numbers in the order of stages."""
        return [stage.random for stage in self._executor.stages]

    @property
    def skipped(self) -> tuple[int, ...]:
        """How many updates each stage here has left out, in all runs: see ``on_nonfinite``."""
        return tuple(stage.skipped for stage in self._executor.stages)

    @property
    def places(self) -> tuple[Place, ...]:
        """A Place per stage, with the window that it has in this phase."""
        return tuple(self._entered.here)

    @property
    def _rules(self) -> list[Rules]:
        return self._entered.rules

    @property
    def first_stage(self) -> int:
        """The index of the first stage that this process holds."""
        return self._executor.stages[0].index

    def masters(self, bind: bool = False) -> dict[Tensor, Tensor]:
        """What the optimizers update where ``master_dtype`` made it wider than the parameter.

        A parameter that is not its master rounded was changed since, and counts. There are none
        after ``release()``, unless ``bind`` asks for new ones.
        """
        self._mend()
        found: dict[Tensor, Tensor] = {}
        for weights in self._trained:
            if bind and not weights.bound:
                weights.bind()
            found.update(weights.masters())
        if bind:
            self._executor.follow_caller()
        return found

    def copied(self, stage: int) -> dict[nn.Parameter, Copy]:
        """The parameters of a stage that are copies of another's, which trains them."""
        return copies_in(self._copies, stage)

    def check_drained(self, what: str) -> None:
        """Raise RuntimeError, naming ``what`` was asked for, if a run has not ended."""
        self._refuse_in_run(what, changed=True)

    @property
    def weight_version_bytes(self) -> int:
        """Bytes of all weight versions of all stages: working, master and kept ones."""
        return sum(weights.nbytes for weights in self._trained)

    def predicted_memory(self) -> list[StageMemory]:
        """What each stage holds at most in a long run, as schedule and method predict it."""
        of_phases = [phase.memory() for phase in self._phases]
        return [StageMemory(*map(max, zip(*s, strict=True))) for s in zip(*of_phases, strict=True)]

    def measured_memory(self) -> list[StageMemory]:
        """The buffers that each stage has, and the most microbatches it had in flight in any run.

        Equal to the prediction once a run has filled the pipeline, unless minibatches had fewer
        samples than microbatches, or learning rates were changed by hand.
        """
        return [
            StageMemory(0, 0, stage.peak) if weights is None else weights.measured(stage.peak)
            for stage, weights in zip(self._executor.stages, self._weights, strict=True)
        ]

    def release(self) -> None:
        """Give the modules and optimizers ordinary storage of their own, and free all buffers.

        Stages on one device have the parameters in common again that they had. A later ``run``
        makes new ones.

        Raises:
            RuntimeError: a run has not ended yet.
        """
        with deferred():
            self._refuse_in_run("release")
            self._unbind()
            for executor in (self._executor, self._evaluator):
                if executor is not None:
                    executor.free_rings()
            self._executor.follow_caller()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} holds streams and buffers, and cannot be pickled or copied; "
            "save its state_dict() and those of its optimizers, or use spectrain_ext.checkpoint; "
            "to train a copy, copy.deepcopy the stages and make a pipeline of them"
        )


def _put_true_weights(
    pipe: Pipeline, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """While a run is suspended, let a state_dict have copies, and of the true weights."""
    if not pipe._executor.running:
        return
    true: dict[Tensor, Tensor] = {}
    with pipe._executor.callers_turn():
        for weights in pipe._trained:
            true.update(weights.true_weights())
        for copy in pipe._copies:
            if copy.original is not None:
                found = true.get(copy.original, copy.original)
                true[copy.held] = found.to(copy.held.device)
        for name, p in pipe.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                state[prefix + name] = true.get(p, p)
        for key, value in state.items():
            if key.startswith(prefix) and isinstance(value, Tensor):
                state[key] = value.detach().clone(memory_format=torch.preserve_format)


def _refuse_load_in_run(pipe: Pipeline, *_: object) -> None:
    pipe._refuse_in_run("load_state_dict")


def _follow_load(pipe: Pipeline, *_: object) -> None:
    for copy in pipe._copies:
        copy.follow(changed=True)
    for averaged in pipe._executor.connections.averaged.values():
        averaged.forget()  # a centre of other weights
    pipe._executor.follow_caller()


def _moved(value: Any, device: torch.device) -> Any:
    """A value there, in the form in which a stage gets it; anything else as it is."""
    return each(value, lambda tensor: tensor.to(device))
