"""Defines ``Pipeline``, the class that users call: checks its arguments and assembles its parts."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count as numbers
from operator import itemgetter, methodcaller
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from spectrain_ext.cutting import cut_of
from spectrain_ext.interrupts import deferred
from spectrain_ext.method import (
    Method,
    MethodName,
    Phase,
    Window,
    delay_under,
    find_method,
)
from spectrain_ext.optim.guards import refuse_call
from spectrain_ext.peers import Peers
from spectrain_ext.rng import StageRandom
from spectrain_ext.schedule import Place, Replicas
from spectrain_ext.threads import warn_of_threads
from spectrain_ext.transport import callers_stream
from spectrain_ext.transport.message import map_tensors
from spectrain_ext.weights import StageMemory, StageWeights

from .applied_method import AppliedMethod, ClipScope, applied, check_optimizers
from .arguments import (
    check_functions,
    check_loss_fn,
    check_master_dtype,
    check_mode,
    check_order,
    check_recompute,
    check_trains,
    checked_devices,
    checked_microbatches,
    checked_stages,
    devices_of,
    evaluating_part,
)
from .batch import SplitDim, sides_of
from .compute import Mode
from .factories import weights_of
from .loops import CallersLoop, checked_batches, warn_unless_begun
from .losses import Keep, LossFn, Result
from .module_state import ModuleModes, changing_modes
from .names import use_model_names
from .passes import Pass, checked_passes, hooks
from .processes import Processes
from .run import Run, Work
from .source import BatchSettings, without_dropped_columns
from .stage import Stage
from .ties import copies_of
from .training import follow_method, trained
from .wires import Wires

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from .observer import Observer


_logger = logging.getLogger(__name__)

P = TypeVar("P", bound=Pass)


class Pipeline(nn.Module):
    """Trains a model that is cut into stages, in one process, with several minibatches in flight.

    ``print(pipe)`` shows it, ``print(*pipe.children())`` the modules; docs/pipeline.md says more.

    Args:
        stages: the parts of the model, in order. Each takes what the previous one returned: a
            tensor, or nested tuples, lists and dicts of tensors and constants.
        optimizer: makes a stage's ``torch.optim.Optimizer`` from its list of trainable parameters.
        loss_fn: ``(output, target) -> loss``, a 0-d mean over samples, or a pair (sum, count).
        method: a name from ``methods()``, or a ``Method``.
        devices: one per stage; the stages are moved there. None: where their parameters are.
        scheduler: makes an optimizer's scheduler; it steps after updates, ReduceLROnPlateau by you.
        microbatches: parts that a minibatch is split into. ``"auto"``: the method's usual number.
        window: how many microbatches stage k of N may have in flight: ``"classic"``, N - k;
            ``"wide"``, 2*(N - k) - 1; a number; or one per stage. None: the method's own.
        clip_norm: the largest 2-norm of a gradient; larger ones are scaled. None: the method's.
        clip_scope: whose norm: each ``"stage"``'s, ``"global"`` (of all stages), or ``"auto"``.
        master_dtype: ``torch.float32`` keeps float32 master weights of 16-bit parameters.
        recompute: whether backwards run a stage's forward again instead of keeping activations.
        split_dim: the dimension of the samples in a batch's tensors, for all or for each of them.
        count: ``target -> number`` that a minibatch's sum of losses is divided by.
        passes: optional behaviours, of ``spectrain_ext.passes`` or your own, in order.

    Attributes:
        devices: a device per stage.
        minibatches: how many have begun, in all runs.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.
        RuntimeError: a CUDA device where none can be used.

    Example:
        >>> stages = [nn.Linear(4, 8), nn.Linear(8, 2)]
        >>> sgd = lambda params: st.optim.SGD(params, lr=0.01, momentum=0.9)
        >>> pipe = st.Pipeline(stages, sgd, nn.functional.mse_loss)
        >>> batches = [(torch.randn(6, 4), torch.zeros(6, 2)) for _ in range(3)]
        >>> [result.index for result in pipe.run(batches)]
        [0, 1, 2]
        >>> pipe.release()  # until then, change parameters only in place
    """

    _loss_fn: LossFn

    def __init__(
        self,
        stages: Iterable[nn.Module],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        loss_fn: LossFn,
        method: MethodName | str | Method = "auto",
        devices: Sequence[torch.device | str | int] | None = None,
        scheduler: Callable[[Any], LRScheduler] | None = None,
        microbatches: int | Literal["auto"] = "auto",
        window: Window = None,
        clip_norm: float | None = None,
        clip_scope: ClipScope = "auto",
        master_dtype: torch.dtype | None = None,
        recompute: bool = False,
        split_dim: SplitDim = 0,
        count: Callable[[Any], float | Tensor] | None = None,
        passes: Sequence[Pass] = (),
        *,
        _processes: Processes | None = None,  # that it spans; None: only this one
    ) -> None:
        super().__init__()
        check_mode(type(self).__name__, ())
        with deferred():
            # Check everything before moving anything.
            sharded = _processes is not None and _processes.sharded
            modules = checked_stages(stages, sharded)
            chosen = find_method(method)
            n = len(modules)
            processes = _processes or Processes(Replicas((1,) * n, 1), range(n))
            self._processes = processes
            self._passes = [*processes.passes, *checked_passes(passes, chosen)]
            replicas = processes.replicas
            here = dict(zip(processes.indices, modules, strict=True))
            if len(here) == replicas.stages:
                check_order([cut_of(module).place for module in modules])
            self._copies = copies_of(modules, processes.indices)
            placed = devices_of(modules) if devices is None else checked_devices(devices, n)
            parts = checked_microbatches(microbatches, chosen, replicas)
            self._clipping = clip_norm, clip_scope
            check_master_dtype(master_dtype, modules)
            check_recompute(recompute)
            sides_of(split_dim)
            check_loss_fn(loss_fn, parts, count)
            check_functions(optimizer, loss_fn, scheduler)
            self._methods = applied(chosen, parts, window, replicas, *self._clipping)
            made = weights_of(here, self._copies, optimizer, scheduler, master_dtype)
            check_optimizers(self._methods, dict(zip(here, made, strict=True)))
            self._since = 0  # minibatches of training before the first of them
            self.minibatches, self.devices = 0, tuple(placed)
            # The last of each; evaluations have edges of their own.
            self._training: Run | None = None
            self._evaluation: Run | None = None
            self._evaluation_wires: Wires | None = None
            self._callers_loop = CallersLoop()
            self._warned = False  # that a stage is in evaluation mode
            if len(here) == replicas.stages:
                check_trains(weights is not None for weights in made)
            own = [
                Stage(k, module, device, weights, processes, processes.replica, recompute)
                for (k, module), device, weights in zip(here.items(), placed, made, strict=True)
            ]
            self._weights = made
            for each in reversed(self._methods):  # to the first one
                self._use_passes(each, own)
            try:
                for copy in self._copies:
                    copy.bind()
                for stage in own:
                    if devices is not None:
                        stage.module.to(stage.device)
                    self.add_module(str(stage.index), stage.module)
                self._log()
                if any(device.type == "cpu" for device in self.devices):
                    warn_of_threads()
                self._batches = BatchSettings(split_dim, count)
                ties = processes.connect(own, self._methods, self._copies, count is not None)
                self._wires = Wires(
                    stages=own,
                    applied=self._methods[0],
                    processes=processes,
                    batches=self._batches,
                    ties=ties,
                    copies=self._copies,
                )
                follow_method(self)
                # Not by a plain assignment: a loss that is a module is no part of the model.
                object.__setattr__(self, "_loss_fn", loss_fn)
                self._wires.follow_caller()
            except BaseException:
                self._unbind()
                raise
            self.register_state_dict_post_hook(_clone_in_run)  # type: ignore[no-untyped-call]
            self.register_load_state_dict_pre_hook(_refuse_load_in_run)  # type: ignore[no-untyped-call]
            self.register_load_state_dict_post_hook(_follow_load)  # type: ignore[no-untyped-call]
            use_model_names(self, len(here) == replicas.stages, self._copies)
            for weights in self._trained:
                weights.updater.order_by(self._wires.caller_ordered)

    def _use_passes(self, now: AppliedMethod, stages: Sequence[Stage]) -> None:
        for stage in stages:
            late = delay_under(now.method.schedule, now.places[stage.index])
            stage.use_passes([*self._passes, *now.method.passes], late)

    def _log(self) -> None:
        methods = self._methods
        if _logger.isEnabledFor(logging.INFO):
            from spectrain_ext.method import in_words

            like = next((each.optimizer for each in self._trained), None)
            said = (in_words(each.method, each.places, like) for each in methods)
            _logger.info("%s", "; then ".join(said))
        if self._clipping[0] is not None:
            scopes = ["all stages" if each.globally else "each stage" for each in methods]
            _logger.info("gradients are clipped by the norm of %s", ", then ".join(scopes))

    def _unbind(self) -> None:
        for weights in self._trained:
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
        """Train on every batch, with one update per batch and stage.

        Args:
            batches: pairs (input, target), each a tensor or nested tuples, lists and mappings of
                tensors; or mappings, which stage 0 and ``loss_fn(output, batch)`` get as a dict; or
                lists of microbatches that you have split, see ``Microbatches``. Tensors may be on
                any device and are split along ``split_dim``; tensors of size 1 there, 0-d tensors
                and non-tensors go to every microbatch whole. A batch is taken when stage 0 is ready
                for it. You may overwrite one on the GPU or in pageable memory once the next one is
                requested; leave pinned memory alone.
            trace: an ``Observer`` or several, such as ``Trace`` or ``Metrics``, which cost time.
            keep: ``(output, target) -> tensor``, or a dict or tuple of tensors. It is called for
                every microbatch, without a graph, and its values are in ``Result.kept``: 0-d
                tensors as the mean over microbatches, weighted by samples; others concatenated.
                None: keep nothing.

        Yields:
            A ``Result`` per minibatch, in order, once all stages of this process have issued their
            update from it, and before any issues a later one. Minibatches count from 0 in every
            run. When ``batches`` ends, or you leave the loop (or call ``close()``), the minibatches
            in flight are finished: as many in one process as in several. Python prints an error
            that comes then, and goes on; so the next use of the pipeline, such as ``run``,
            ``evaluate`` or ``state_dict``, raises it again.

        Raises:
            StageError: an exception inside a stage, the loss or an optimizer; its cause is the
                original.
            TypeError, ValueError: a batch of another form, without a tensor, with tensors of
                different sizes, or one that may be a pair as well as two microbatches.
            RuntimeError: another run has not ended, a parameter was frozen or unfrozen since the
                pipeline was made, left its flat buffer or got a gradient in the loop, or autocast
                or inference mode is on.

        After an exception, what was in flight is dropped and the modules hold the true weights;
        some stages may have made more updates than others. The pipeline can run again. A Ctrl-C
        waits for the end of an instruction. A second Ctrl-C does not: an update may then be partly
        done, and the next access to the weights ends the run first.
        """
        self._refuse_in_run("run")
        if keep is not None and not callable(keep):
            raise TypeError(f"keep: expected a callable, got {type(keep).__name__}")
        observers: Sequence[Observer] = ()
        if trace is not None:
            from .observer import observers_of

            observers = observers_of(trace)
        begun: list[bool] = []
        results = trained(self, iter(checked_batches(batches)), observers, keep, begun)
        self._callers_loop.hold(results)
        return warn_unless_begun(results, begun)

    def _warn_of_evaluation(self) -> None:
        """Warn once: ``train()`` of the uncut model may not reach the stages of a cut."""
        if self._warned:
            return
        for stage in self._wires.stages:
            name = evaluating_part(stage.module)
            if name is not None:
                self._warned = True
                part = f": {name!r}" if name else ""
                warnings.warn(
                    f"run: stages[{stage.index}]{part} is in evaluation mode: it trains without "
                    "dropout and with fixed running statistics; call train() of the pipeline "
                    "(that of the model that was cut may not reach its stages)",
                    stacklevel=3,
                )
                return

    def _train(
        self, batches: Iterable[object], observers: Sequence[Observer], keep: Keep | None
    ) -> Iterator[Result]:
        """Train by one method, the one that training has reached."""
        follow_method(self)
        work = Work(
            mode=Mode.TRAIN,
            call=self._loss_fn,
            has_count=self._batches.count is not None,
            minibatches=self.minibatches,
            done=self.minibatches - self._reached()[1],
            keep=keep,
            observers=observers,
        )
        run = self._training = Run(self._wires, self._processes, work, self._callers_loop)
        # Held here: an interrupt between two results must not end it while the stack unwinds.
        results = run.iterate(self._with_columns(iter(batches), several=False))
        try:
            yield from results
        finally:
            self.minibatches += run.begun

    def fit(
        self,
        batches: Iterable[object] | None,
        epochs: int = 1,
        callbacks: Iterable[Callable[[Result], object]] = (),
        *,
        trace: Observer | Sequence[Observer] | None = None,
        keep: Keep | None = None,
        progress: bool = False,
    ) -> list[float]:
        """Train for some epochs in one run; the pipeline drains only at the end.

        Args:
            batches: as for ``run``; a new iterator is made for every epoch. ``set_epoch`` of a
                sampler, or of ``batches``, is called first.
            epochs: at least 1.
            callbacks: each is called with every ``Result``, in order, as soon as ``run`` yields it.
            trace, keep: as for ``run``.
            progress: where stderr is a terminal, shows loss, rate, norm and speed (docs/loops.md).
                With several processes rank 0 shows it, with losses under ``ShareLoss``.

        Returns:
            The mean loss of every epoch over its minibatches, weighted by ``count`` where there is
            one; each loss is the one that its forward computed. nan if there was none. All
            processes get the same floats.

        Raises:
            ValueError: there was no batch, or none in a later epoch: a generator lasts for one.
            TypeError: a callback that cannot be called.
            And what ``run`` raises. An exception in a callback ends the run like leaving its loop.
        """
        from .fitting import fitted

        return fitted(self, batches, epochs, callbacks, trace, keep, progress)

    def evaluate(
        self, batches: Iterable[object] | None, metrics: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """Measure the model on every batch: true weights, modules in eval mode, no graph.

        Several batches are in flight, and no further weight versions are made. Each batch is
        computed whole, even with ``microbatches`` above 1, and may have any size.

        Args:
            batches: as for ``run``. With several processes, rank 0 provides them.
            metrics: by name, functions ``(output, target)`` that return the mean over the batch's
                samples (a 0-d tensor or a number) or a pair (sum, count); or objects with
                ``update(output, target)`` and ``compute()``, as in torchmetrics, which are
                ``reset()`` first if possible. They run on the last stage, without a graph. None:
                the loss, as ``"loss"``.

        Returns:
            The value of each metric. Means are weighted by the samples of each batch (the size of
            its target along ``split_dim``), pairs are the sum of sums divided by the sum of counts
            (nan if that is 0); both are added in float64 without rounding. A list of microbatches
            counts as several batches. A batch without samples is not measured. All processes get
            the same floats as a single process would.

        Raises:
            RuntimeError: a run has not ended yet.
            ValueError: there was no batch, or the value of a metric is not one number.
            TypeError: a metric of another kind, or a batch of another form.
            StageError: an exception inside a stage or a metric; its cause is the original.

        Afterwards all modules have their previous modes, even after an exception. Random numbers,
        of the stages and of torch's default generators, and running statistics are unchanged, so
        that training continues with the same bits as without the evaluation.
        """
        from .evaluation import evaluated

        self.check_drained("evaluate")
        return evaluated(self, batches, metrics)

    def _forward_all(
        self, batches: Iterator[object], measure: Callable[..., Any], evaluates: bool = True
    ) -> None:
        from .evaluation import wires_of

        if self._evaluation_wires is None:
            self._evaluation_wires = wires_of(self._wires, self._processes, self._batches)
        work = Work(Mode.EVALUATE if evaluates else Mode.CALL, measure)
        run = Run(self._evaluation_wires, self._processes, work, CallersLoop())
        self._evaluation = run
        for _ in run.iterate(self._with_columns(batches, several=True)):
            pass

    def change(self, method: MethodName | str | Method, *, window: Window = None) -> None:
        """Train by another method from the next run on; with several processes, all call this.

        Weights, optimizers, schedulers, random numbers and counts continue, and microbatches stay
        as many. What the method needs is checked as by the constructor, with its ``clip_norm``,
        ``clip_scope`` and ``passes``; after an error all is as before.

        Args:
            method: as for the constructor; moments of a hybrid count all training.
            window: as for the constructor; None: the method's own.

        Raises:
            TypeError, ValueError: as the constructor.
            RuntimeError: a run has not ended, or another process refuses the method.

        Example:
            >>> stages = [nn.Linear(4, 8), nn.Linear(8, 2)]
            >>> sgd = lambda params: st.optim.SGD(params, lr=0.01, momentum=0.9)
            >>> pipe = st.Pipeline(stages, sgd, nn.functional.mse_loss, "1f1b")
            >>> batches = [(torch.randn(6, 4), torch.zeros(6, 2))] * 3
            >>> losses = pipe.fit(batches)
            >>> pipe.change("spectrain", window="wide")
            >>> losses += pipe.fit(batches)
            >>> pipe.method.name, [place.window for place in pipe.places]
            ('spectrain', [3, 1])
        """
        self._refuse_in_run("change", changed=True)
        stages, replicas = self._wires.stages, self._processes.replicas

        def made() -> list[AppliedMethod]:
            chosen = find_method(method)
            then = Phase(chosen, self.minibatches)
            checked_passes(self._passes, replace(self.method, then=then))  # as of a hybrid
            parts = self._applied.places[0].microbatches * replicas.counts[0]
            found = applied(chosen, parts, window, replicas, *self._clipping)
            check_optimizers(found, {stage.index: stage.weights for stage in stages})
            try:
                for each in found:
                    self._use_passes(each, stages)  # which a pass may refuse
            finally:
                self._use_passes(self._applied, stages)
            return found

        agreed = self._agreed(made)
        with deferred():
            self._methods, self._since = agreed, self.minibatches
            for stage in stages:
                of_methods = (one for each in agreed for one in each.method.passes)
                stage.forget_passes_but([*self._passes, *of_methods])
        self._log()

    def _agreed(self, make: Callable[[], list[AppliedMethod]]) -> list[AppliedMethod]:
        """Return the methods that are made, in all processes alike."""
        return make()

    def _describe_stages(self) -> str:
        of, here = f"of {len(self._applied.places)}", [place.stage for place in self.places]
        first, last = here[0], here[-1]
        if len(here) == 1:
            return f"stage {first} {of}"
        dense = last - first == len(here) - 1
        return f"stages {f'{first} to {last}' if dense else ', '.join(map(str, here))} {of}"

    def train(self, mode: bool = True) -> Pipeline:
        """Set the mode of all stages; ``eval()`` calls it with False.

        Raises:
            RuntimeError: a stage cannot change its mode, see ``partition``; all modes are then
                unchanged.
        """
        before = ModuleModes(self)
        try:
            with changing_modes("train: a stage"):
                return super().train(mode)
        except BaseException:
            before.restore()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, as any module does; RuntimeError in a run, which does it itself."""
        self._mend()
        if self._trains_now:
            refuse_call("zero_grad")
        super().zero_grad(set_to_none)

    def forward(self, value: Any) -> Any:
        """Return the model's output for ``value`` with the true weights.

        Raises:
            RuntimeError: a run has not ended yet.
        """
        self._refuse_in_run("calling the pipeline", changed=True)
        columns = cut_of(self._wires.stages[0].module).columns
        if columns is not None and isinstance(value, Mapping):
            value = columns.kept(value, "batch")
        with self._wires.caller_ordered():
            for stage in self._wires.stages:
                for cross in hooks(stage.passes, "crosses"):
                    value = cross(value)
                value = stage.module(map_tensors(value, methodcaller("to", stage.device)))
        return value

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state under the uncut model's names; in a run, copies of the true weights."""
        with self.weights():
            return super().state_dict(*args, **kwargs)

    def weights(self) -> AbstractContextManager[None]:
        """Let the parameters of the stages here hold the true weights in a ``with`` block.

        Between two results of a run they may hold predicted or older ones. Inside, modules may be
        read, called, copied and saved, until the run is asked for its next result. Nothing is
        copied but masters in a wider dtype. Without a run, nothing changes.

        Raises:
            RuntimeError: on exit, if a parameter was changed in place.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
            >>> pipe = st.Pipeline(model, lambda p: st.optim.SGD(p, lr=0.1), nn.functional.mse_loss)
            >>> average = torch.optim.swa_utils.AveragedModel(model)
            >>> for result in pipe.run([(torch.randn(6, 4), torch.zeros(6, 2))] * 3):
            ...     with pipe.weights():
            ...         average.update_parameters(model)
        """
        self._mend(changed=True)
        self._callers_loop.raise_ignored()
        run = self._training
        if run is None or not run.running or run.is_looked_at:
            return nullcontext()
        from .true_weights import TrueWeights

        return TrueWeights(run, self._copies)

    def _mend(self, changed: bool = False) -> None:
        """Finish the end of a run that an exception cut short."""
        runs = [run for run in (self._training, self._evaluation) if run is not None]
        for run in runs:
            run.finish_interrupted()
        if not any(run.running for run in runs):
            self._wires.let_caller_follow()
            # Nothing reports changes made through ``.data``, and comparing takes as long as
            # copying.
            for copy in self._copies:
                copy.follow(changed)

    def _with_columns(self, batches: Iterator[object], several: bool) -> Iterator[object]:
        """Drop the columns of batches that the first stage's model does not take."""
        columns = cut_of(self._wires.stages[0].module).columns
        if columns is None or not self._processes.takes_batches:
            return batches
        return map(partial(without_dropped_columns, columns, several), batches, numbers())

    # Overridden by a pipeline over several processes.

    def _own_batches(self, batches: Iterable[object] | None) -> Iterable[object]:
        return checked_batches(batches)

    def together(self, what: str) -> AbstractContextManager[Peers]:
        """Return a context for work that all processes of the pipeline do together."""
        return nullcontext(Peers())

    def _gather_from_ranks(self, make: Callable[[], Any], doing: str) -> list[Any]:
        """Return what ``make`` returns in every process, by rank; values are JSON types."""
        with self.together(doing) as peers, peers.attempt(doing) as found:
            found.append(make())
        return found

    # Every access to the stages' parameters through this module starts with one of these.

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield as any module does, after finishing a run whose end an exception cut short."""
        self._mend()
        modules: Iterator[tuple[str, nn.Module]] = super().named_modules(
            memo, prefix, remove_duplicate
        )
        return modules

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield as any module does, after finishing a run whose end an exception cut short."""
        self._mend()
        return super().named_children()

    def _refuse_in_run(self, what: str, changed: bool = False) -> None:
        self._mend(changed)
        self._callers_loop.raise_ignored()
        if self._evaluation is not None and self._evaluation.running:
            raise RuntimeError(f"{what}: an evaluation of this pipeline has not ended")
        if self._trains_now:
            raise RuntimeError(
                f"{what}: a run of this pipeline has not ended, and the modules may hold predicted "
                "weights; exhaust the iterator that run() returned, or close() it"
            )

    # What it holds.

    @property
    def _trains_now(self) -> bool:
        return self._training is not None and self._training.running

    @property
    def _trained(self) -> list[StageWeights]:
        return [weights for weights in self._weights if weights is not None]

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers, in the order of stages; a stage without trainable parameters has none."""
        self._mend()
        return tuple(weights.optimizer for weights in self._trained)

    @property
    def schedulers(self) -> tuple[LRScheduler, ...]:
        """The learning-rate schedulers, in the order of stages; empty if there are none."""
        return tuple(each.scheduler for each in self._trained if each.scheduler is not None)

    @property
    def random(self) -> tuple[StageRandom, ...]:
        """The random number generators, in the order of stages."""
        return tuple(stage.random for stage in self._wires.stages)

    @property
    def skipped(self) -> tuple[int, ...]:
        """The updates that each stage here has skipped, in all runs: see ``passes.CheckFinite``."""
        return tuple(stage.skipped for stage in self._wires.stages)

    def collect(self, kind: type[P], measured: Callable[[P], Any]) -> list[list[Any]]:
        """Return what the stages' copies of a pass have measured; every rank calls this.

        Args:
            kind: the class of the pass.
            measured: a function of a copy; over several ranks it returns JSON types.

        Returns:
            By stage, of all ranks, a list with a value for each replica.

        Raises:
            RuntimeError: a run has not ended yet.
            ValueError: the pipeline has no such pass.

        Example:
            >>> sgd, finite = lambda p: st.optim.SGD(p, lr=0.1), st.passes.CheckFinite("skip")
            >>> stages = [nn.Linear(2, 2), nn.Linear(2, 1)]
            >>> pipe = st.Pipeline(stages, sgd, nn.functional.mse_loss, passes=[finite])
            >>> pipe.collect(st.passes.CheckFinite, lambda each: each.then)
            [['skip'], ['skip']]
            >>> pipe.release()
        """
        self.check_drained("collect")
        stages, replica = self._wires.stages, self._processes.replica

        def here() -> list[Any]:
            copies = [(s.index, each) for s in stages for each in s.passes if type(each) is kind]
            if not copies:
                raise ValueError(f"collect: the pipeline has no pass {kind.__name__}")
            return [[k, replica, measured(each)] for k, each in copies]

        of_ranks = self._gather_from_ranks(here, f"collecting from {kind.__name__}")
        found: list[list[Any]] = [[] for _ in self._applied.places]
        ordered = sorted((each for rank in of_ranks for each in rank), key=itemgetter(0, 1))
        for k, _, value in ordered:
            found[k].append(value)
        return found

    def _reached(self) -> tuple[int, int]:
        """Return the index of the method after all minibatches so far, and when it has begun."""
        n, since = 0, self._since
        while (then := self._methods[n].method.then) and self.minibatches >= then.after:
            n, since = n + 1, max(since, then.after)
        return n, since

    @property
    def _applied(self) -> AppliedMethod:
        return self._methods[self._reached()[0]]

    @property
    def method(self) -> Method:
        """The method that training has reached: of a hybrid, the present one."""
        return self._applied.method

    @property
    def phase(self) -> int:
        """The number of times that a hybrid has changed."""
        return self._reached()[0]

    @property
    def places(self) -> tuple[Place, ...]:
        """A ``Place`` per stage of this process, with its window under the present method."""
        return tuple(self._applied.places[stage.index] for stage in self._wires.stages)

    def masters(self, bind: bool = False) -> dict[Tensor, Tensor]:
        """Return the master weights that ``master_dtype`` made wider, by parameter.

        Where you have changed a parameter since, its value counts, not the master's. Empty after
        ``release()``, unless ``bind`` asks for new ones.
        """
        self._mend()
        masters: dict[Tensor, Tensor] = {}
        for weights in self._trained:
            if bind and not weights.bound:
                weights.bind()
            masters.update(weights.masters())
        if bind:
            self._wires.follow_caller()
        return masters

    def check_drained(self, what: str) -> None:
        """Raise RuntimeError if a run has not ended; the message begins with ``what``."""
        self._refuse_in_run(what, changed=True)

    @property
    def weight_version_bytes(self) -> int:
        """Bytes of all weight versions of all stages here: working, master and kept ones."""
        return sum(weights.nbytes for weights in self._trained)

    def predicted_memory(self) -> list[StageMemory]:
        """Return what each stage holds at most in a long run, computed from schedule and method."""
        memory = []
        for stage in self._wires.stages:
            each = [m.memory(stage.index, stage.weights) for m in self._methods]
            memory.append(StageMemory(*map(max, zip(*each, strict=True))))
        return memory

    def measured_memory(self) -> list[StageMemory]:
        """Return each stage's weight buffers now, and its most microbatches in flight in any run.

        Equals the prediction once a run has filled the pipeline, unless a minibatch had fewer
        samples than microbatches, or you changed a learning rate by hand.
        """
        return [
            StageMemory(0, 0, stage.peak) if weights is None else weights.measured(stage.peak)
            for stage, weights in zip(self._wires.stages, self._weights, strict=True)
        ]

    def release(self) -> None:
        """Give modules and optimizers ordinary storage, and free all buffers.

        Parameters that stages on one device shared are shared again. A later ``run`` makes new
        buffers.

        Raises:
            RuntimeError: a run has not ended yet.
        """
        with deferred():
            self._refuse_in_run("release")
            self._unbind()
            for wires in (self._wires, self._evaluation_wires):
                if wires is not None:
                    wires.free_storage()
            self._wires.follow_caller()

    def _fqn_modifiers(self) -> dict[str, str]:
        # torch's get_state_dict calls this before it looks for modules along the names
        if any(cut_of(stage).prefixes is not None for stage in self.children()):
            raise TypeError(
                "torch.distributed.checkpoint.state_dict: a pipeline's modules have not the names "
                "of the uncut model, which its state_dict() has; save pipe.state_dict(), or in "
                "one process give the uncut model and pipe.optimizers"
            )
        return {}

    def __repr__(self) -> str:
        from .description import described

        return described(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} holds streams and buffers, and cannot be pickled or copied; "
            "save its state_dict() and those of its optimizers, or use spectrain_ext.checkpoint; "
            "to train a copy, copy.deepcopy the stages and make a pipeline of them"
        )


def _clone_in_run(pipe: Pipeline, state: dict[str, Any], prefix: str, _: object) -> None:
    """Replace what later updates in the run would change by copies."""
    if pipe._trains_now:
        for key, value in state.items():
            if key.startswith(prefix) and isinstance(value, Tensor):
                state[key] = value.detach().clone(memory_format=torch.preserve_format)


def _refuse_load_in_run(pipe: Pipeline, *_: object) -> None:
    pipe._refuse_in_run("load_state_dict")


def _follow_load(pipe: Pipeline, *_: object) -> None:
    for copy in pipe._copies:
        copy.follow(changed=True)
    for stage in pipe._wires.stages:
        for one in stage.passes:
            one.weights_loaded()
    pipe._wires.follow_caller()
