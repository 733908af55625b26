"""StageWeights: the weights that a stage computes with, from version to version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import increment_version

from spectrain_ext.operators.laws import SecondOrder
from spectrain_ext.optim.foreign import loose_state, updater_of
from spectrain_ext.schedule import Entries, Generator, Place, Rules, count_stage, find_generator

from .flat import flat_nbytes
from .rates import ComingRates, rates_of
from .storage import Content, Difference, Storage, true_dtype
from .versions import Versions

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler


class StageMemory(NamedTuple):
    """What a stage holds at most.

    Attributes:
        versions: buffers of weights: working, master and kept ones.
        weight_bytes: bytes of these; the optimizer's state and gradients are not among them.
        microbatches: microbatches between the begin of their forward and the end of their backward.
    """

    versions: int
    weight_bytes: int
    microbatches: int


class StageWeights:
    """The weights of one stage that has trainable parameters.

    The parameters are views of the *working* buffer from ``bind`` to ``unbind``; kernels
    overwrite it behind autograd's back, so that a backward meets whatever weights are in it. Where
    weights are predicted, or computed with in a narrower dtype, the true ones live in a *master*
    buffer; elsewhere they are a version like any other, in the working buffer at every update.
    ``Versions`` knows what the buffers hold, ``Storage`` has the memory; this class has both in
    hand, and steps the optimizer.

    Args:
        module: the stage.
        optimizer: any that holds exactly the stage's trainable parameters.
        scheduler: stepped after every update, or None.
        rules: the method at this stage.
        places: the places of stage 0 and of this one.
        schedule: the schedule's name, or its generator.
        future: the learning rates of updates to come, where the method asks for them.
        master_dtype: the dtype of the master and of the optimizer's state for 16-bit parameters;
            None: the parameters'.
        copies: parameters that are trained on another stage.

    Attributes:
        peak: what the stage holds at once, as its schedule predicts.
        updater: the optimizer as the storage knows it.
        entry: makes the actions of stage 0.
        moves: whether somebody may ``move`` the true weights after an update.
        versions: of a run: what the working buffer holds, and is to hold. Whoever runs actions asks
            it for the weights first, so as not to prepare for a load that does nothing.
    """

    moves = False

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        rules: Rules,
        places: tuple[Place, Place],
        schedule: str | Generator,
        future: ComingRates | None = None,
        master_dtype: torch.dtype | None = None,
        copies: Set[Tensor] = frozenset(),
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.updater = updater_of(optimizer)
        self.scheduler = scheduler
        self._names: dict[Tensor, str] = {
            p: name for name, p in module.named_parameters() if p.requires_grad and p not in copies
        }
        self.params = list(self._names)
        self._rules = rules
        entry, self._place = places
        self.entry = partial(find_generator(schedule), entry)
        self._future = future
        self._master_dtype = master_dtype
        self._has_master = rules.has_master or any(
            true_dtype(p, master_dtype) != p.dtype for p in self.params
        )
        self.peak = count_stage(schedule, *places, rules, self._has_master)
        # Beside these there are what is true, and what it was before.
        self._computing = self.peak.versions - self._has_master - rules.keeps_before
        self.storage: Storage | None = None
        self._moving: Storage | None = None  # between being bound and not

    # Storage.

    @property
    def bound(self) -> bool:
        """Whether the parameters are views of the working buffer now."""
        return self.storage is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the working buffer, the master and the kept versions."""
        return 0 if self.storage is None else sum(flat.nbytes for flat in self.storage.flats())

    def buffers(self) -> list[Tensor]:
        """All memory of weights and of the optimizer's state."""
        if self.storage is None:
            return []
        return [*self.storage.buffers(), *loose_state(self.optimizer)]

    def measured(self, microbatches: int) -> StageMemory:
        """What there is now, and the most microbatches that were in flight."""
        flats = [] if self.storage is None else self.storage.flats()
        return StageMemory(len(flats), self.nbytes, microbatches)

    def predicted(self) -> StageMemory:
        """What the schedule and the method say there will be."""
        narrow = [p.dtype for p in self.params]
        wide = [true_dtype(p, self._master_dtype) for p in self.params]
        computing, true = self._computing, self.peak.versions - self._computing
        if self._rules.keeps_before and narrow != wide:
            true += 1  # where the extrapolation is rounded from
        size = computing * flat_nbytes(self.params, narrow) + true * flat_nbytes(self.params, wide)
        return StageMemory(computing + true, size, self.peak.in_flight)

    def bind(self) -> None:
        """Move the parameters into the working buffer and the optimizer onto the true weights."""
        self.mend()
        self.drop_gradients()
        self._moving = made = Storage(
            self.params,
            self.updater,
            master=self._has_master,
            master_dtype=self._master_dtype,
            before=self._rules.keeps_before,
            kept=self._computing - 1,
            averaging=self._rules.averaging,
            correction=self._rules.correction,
        )
        try:
            made.bind()
            self.storage = made
        finally:
            self.mend()

    def unbind(self) -> None:
        """Give parameters (they hold the true weights now) and state ordinary storage."""
        self.__dict__.pop("versions", None)  # which knows the storage
        self._moving = self._bound
        self.storage = None
        self.mend()

    def hand_over(self, other: StageWeights) -> None:
        """Unbind, and bind what has the same parameters and optimizer under other rules.

        Masters keep all of their digits, and a foreign optimizer its state of their dtype.
        """
        wide = {p: master.clone() for p, master in self.masters().items()}
        state = getattr(self.optimizer, "state", {})
        entries = {p: dict(state[p]) for p in wide if p in state}
        self.unbind()
        other.bind()
        for p, master in other.masters().items():
            master.copy_(wide[p])
        if other.updater is not self.updater:  # foreign ones' state is their own
            for p, entry in entries.items():
                state[p].update(entry)

    def mend(self) -> None:
        """Undo what an exception left half bound, and what it left half undone."""
        if self._moving is not self.storage and self._moving is not None:
            self._moving.unbind()
        self._moving = None

    @property
    def _bound(self) -> Storage:
        assert self.storage is not None, "not bound"
        return self.storage

    def in_place(self) -> bool:
        """Whether all parameters are where they were bound; a parameter replaced is not seen."""
        return self._bound.in_place()

    def check(self, stage: int) -> None:
        """Raise RuntimeError if a parameter is no longer a view of the working buffer."""
        if self.storage is None:
            return
        now = dict(self.module.named_parameters())
        for p, view in self.storage.working.views.items():
            name = self._names[p]
            if (
                now.get(name) is not p
                or p.data_ptr() != view.data_ptr()
                or p.dtype != view.dtype
                or p.stride() != view.stride()
            ):
                raise RuntimeError(
                    f"stages[{stage}]: parameter {name!r} left the pipeline's flat buffer, as by "
                    ".to() or load_state_dict(assign=True); change parameters in place, or call "
                    "release() first and build a new Pipeline afterwards"
                )

    # A run.

    def begin(self) -> None:
        """Take what the parameters hold as version 0."""
        self.versions = Versions(
            self._rules,
            self._place,
            Entries(self.entry()),
            self._has_master,
            self._bound,
            partial(rates_of, self.optimizer),
            self._future,
        )
        self._rates_move = False
        if self._future is not None:
            self._future.begin()
        self._bound.begin()
        self.drop_gradients()

    def end(self) -> None:
        """Put the true weights back into the parameters and forget the microbatches in flight.

        An update that was interrupted is finished. An end that was may be repeated.
        """
        self.updater.mend()
        self.updater.write_with_next_step(None)
        self._bound.end()
        self.drop_gradients()
        # A graph that the caller made before the run must not meet the new weights unnoticed.
        increment_version(self.params)

    def drop_gradients(self) -> None:
        """Forget all gradients; autograd then hands over its next ones without a copy."""
        for p in self.params:
            p.grad = None

    def true_weights(self) -> Mapping[Tensor, Tensor]:
        """Where the true weights are: parameter -> tensor, not to be written."""
        return self._bound.true_weights()

    def newest(self) -> list[Tensor]:
        """The true weights in the order of ``params``, not to be written."""
        true = self.true_weights()
        return [true[p].detach() for p in self.params]

    def masters(self) -> dict[Tensor, Tensor]:
        """The masters that are wider than their parameters."""
        master = None if self.storage is None else self.storage.master
        views = {} if master is None else master.views
        return {p: view for p, view in views.items() if view.dtype != p.dtype}

    def move(self, weights: Iterable[Tensor]) -> None:
        """Make these the true weights, in the order of ``params``, right after an update.

        The step has then written no prediction but those that nobody can make again: they move as
        far.
        """
        held = self.versions.held
        written = held is not None and held.version == self.versions.version
        self._bound.move(weights, written)

    # The update.

    def update(self, forward: tuple[int, int] | None) -> None:
        """Step the optimizer and the scheduler.

        Args:
            forward: the microbatch whose forward is what the stage does next, if it is one. The
                step writes its weights in the same pass over memory, unless a scheduler is about to
                change the learning rate that they are predicted with.
        """
        storage, versions = self._bound, self.versions
        sink, ordered = storage.sink, None
        if sink is not None:
            ordered = self._ordered(versions.step_writes(forward))
        versions.before_update(ordered is not None)
        storage.before_update()
        if ordered is not None:
            self.updater.write_with_next_step(sink, ordered.law or 0.0)
        self.updater.step()
        # A hook may have changed them. Nobody asks without a sink, and one on a GPU takes a wait.
        after = () if sink is None else rates_of(self.optimizer)
        if ordered is not None and ordered.rates not in (None, after):
            ordered = None
        versions.after_update(ordered)
        if self.scheduler is not None:
            self.scheduler.step()
            self._rates_move = sink is not None and rates_of(self.optimizer) != after
        if self._future is not None:
            self._future.advance()
        self.drop_gradients()

    def _ordered(self, content: Content | None) -> Content | None:
        """What a step is to write, None where the result would not be of use."""
        if content is None or isinstance(content.law, Difference):
            return None
        if self.moves and not isinstance(content.law, SecondOrder):
            return None  # of weights that are not yet the next ones
        return None if content.rates is not None and self._rates_move else content
