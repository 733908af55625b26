"""Updates a stage's weights: steps the optimizer and moves to the next version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.lr_scheduler import ReduceLROnPlateau

from spectrain_ext.operators.laws import Linear, SecondOrder
from spectrain_ext.optim.base import updater_of
from spectrain_ext.optim.guards import StepGuard
from spectrain_ext.schedule import Entries, Generator, Place, Rules, count_stage, find_generator

from .own_writes import OwnWrites
from .storage import Content, Storage, flat_nbytes, local_part, true_dtype
from .versions import Update, Versions

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler


_COPY = Linear(0)  # writes weights that are not predicted


class StageMemory(NamedTuple):
    """The largest memory of a stage, in weight versions, bytes and microbatches.

    Attributes:
        versions: weight buffers: those that the stage computes with, and the master.
        weight_bytes: their bytes, without gradients and the optimizer's state.
        microbatches: microbatches between the start of their forward and the end of their backward.
    """

    versions: int
    weight_bytes: int
    microbatches: int


#: The weights of all pipelines that exist.
_made: WeakSet[StageWeights] = WeakSet()


class StageWeights:
    """The weights of one stage that has trainable parameters, and their optimizer.

    ``Storage`` holds the memory, ``Versions`` knows what each buffer contains.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        master_dtype: torch.dtype | None = None,
        copies: Set[Tensor] = frozenset(),  # parameters that another stage trains
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.updater = updater_of(optimizer)
        self.scheduler = scheduler
        # After each update, unless the caller steps it with a metric between runs.
        self._stepped = None if isinstance(scheduler, ReduceLROnPlateau) else scheduler
        self.guard = StepGuard(optimizer, scheduler)
        own = [(n, p) for n, p in module.named_parameters() if p.requires_grad and p not in copies]
        self._owners = [p for _, p in own]
        self._names: dict[Tensor, str] = {local_part(p): name for name, p in own}
        self.params = list(self._names)
        self._master_dtype = master_dtype
        self.storage: Storage | None = None
        self._half: Storage | None = None  # while it is bound or unbound
        self.own_writes: OwnWrites | None = None  # in a run that has to notice them
        self.followed: object = None  # the rules that it trains by
        _made.add(self)

    def follow(self, rules: Rules, places: tuple[Place, Place], schedule: str | Generator) -> None:
        """Train by these rules from the next run on; if bound, in buffers for these.

        ``places``: of stage 0 and of this one.
        """
        settings = rules, places, schedule
        if settings == self.followed:
            return
        self.followed = None  # until all is done, or after an interrupt
        # Masters keep all their digits, and a foreign optimizer its state in their dtype.
        wide = {p: master.clone() for p, master in self.masters().items()}
        state = getattr(self.optimizer, "state", {})
        entries = {p: dict(state[p]) for p in wide if p in state}
        bound = self.bound
        if bound:
            self.unbind()
        self.rules = rules
        entry, self._place = places
        self.entry = partial(find_generator(schedule), entry)  # yields the instructions of stage 0
        # Whether a backward may use other weights than its forward.
        self.differs_in_backward = rules.retains(self._place.microbatches)
        self._has_master, self._computing, _ = self._needs(*settings)
        self.followed = settings
        if not bound:
            return
        self.bind()
        for p, master in self.masters().items():
            if p in wide:
                master.copy_(wide[p])
        if not self.updater.predicts:  # it has no bound state
            for p, kept in entries.items():
                state[p].update(kept)

    def _needs(
        self, rules: Rules, places: tuple[Place, Place], schedule: str | Generator
    ) -> tuple[bool, int, int]:
        """Return whether there is a master, the other buffers, and microbatches in flight."""
        wide = self.true_dtypes != [p.dtype for p in self.params]
        has_master = rules.predicts or wide
        peak = count_stage(schedule, *places, rules, wide)
        return has_master, peak.versions - has_master - rules.keeps_before, peak.in_flight

    # Storage.

    @property
    def bound(self) -> bool:
        return self.storage is not None

    @property
    def nbytes(self) -> int:
        return self.measured(0).weight_bytes

    def buffers(self) -> list[Tensor]:
        if self.storage is None:
            return []
        return [*self.storage.buffers(), *self.updater.loose_state()]

    def measured(self, microbatches: int) -> StageMemory:
        flats = [] if self.storage is None else self.storage.flats()
        return StageMemory(len(flats), sum(flat.nbytes for flat in flats), microbatches)

    def predicted(
        self, rules: Rules, places: tuple[Place, Place], schedule: str | Generator
    ) -> StageMemory:
        """Return what the stage holds at most under these rules."""
        narrow, wide = [p.dtype for p in self.params], self.true_dtypes
        has_master, computing, in_flight = self._needs(rules, places, schedule)
        true = has_master + rules.keeps_before
        if rules.keeps_before and narrow != wide:
            true += 1  # a wide buffer for the extrapolation before it is rounded
        size = computing * flat_nbytes(self.params, narrow) + true * flat_nbytes(self.params, wide)
        return StageMemory(computing + true, size, in_flight)

    def bind(self) -> None:
        """Move the parameters into the home buffer, and the optimizer onto the true weights."""
        self._let_go()
        self.drop_gradients()
        made = self._half = Storage(
            self.params,
            self.optimizer,
            self.updater,
            self.rules,
            master=self._has_master,
            master_dtype=self._master_dtype,
            versions=self._computing,
        )
        try:
            made.bind()
        except BaseException:
            self._let_go()
            raise
        self.storage, self._half = made, None

    def unbind(self) -> None:
        """Give parameters and state ordinary storage; the parameters hold the true weights now."""
        self.__dict__.pop("versions", None)  # it refers to the storage
        self.own_writes = None
        self._half, self.storage = self._bound, None
        self._let_go()

    def _let_go(self) -> None:
        """Unbind the storage that is half bound, if any, also after a second Ctrl-C."""
        if self._half is not None:
            self._half.unbind()
            self._half = None

    @property
    def _bound(self) -> Storage:
        assert self.storage is not None, "not bound"
        return self.storage

    def check(self, stage: int) -> None:
        """Raise RuntimeError if a parameter is no longer a view of its flat buffer."""
        if self.storage is None:
            return
        now = dict(self.module.named_parameters())
        for p, view in self.storage.bound.flat.views.items():
            name = self._names[p]
            looks = [(each.data_ptr(), each.dtype, each.stride()) for each in (p, view)]
            if name in now and local_part(now[name]) is p and looks[0] == looks[1]:
                continue
            if any(each is not self and each._holds(p) for each in _made):
                raise RuntimeError(
                    f"stages[{stage}]: another pipeline of this model has parameter {name!r} "
                    "in its flat buffer; release() one before you build or run the other"
                )
            raise RuntimeError(
                f"stages[{stage}]: parameter {name!r} left the pipeline's flat buffer, as by "
                ".to() or load_state_dict(assign=True); change parameters in place, or call "
                "release() first and build a new Pipeline afterwards"
            )

    def has_same_groups(self) -> bool:
        """Whether the optimizer holds the stage's parameters, and no others."""
        groups = self.optimizer.param_groups
        return {p for group in groups for p in group["params"]} == {*self.params}

    def _holds(self, p: Tensor) -> bool:
        views = {} if self.storage is None else self.storage.bound.flat.views
        return p in views and views[p].data_ptr() == p.data_ptr()

    # A run.

    def begin(
        self,
        factor: Callable[[int], float] | None = None,
        moves: bool = False,
        replicated: bool = False,
    ) -> None:
        """Take the parameters' values as version 0.

        ``factor``: on the learning rates, of an update of the run; ``moves``: whether ``move`` may
        follow an update; ``replicated``: whether replicas must keep the same weights.
        """
        self._factor, self._updates, self.moves = factor, 0, moves
        storage = self._bound
        storage.begin()
        self._scale_rates()
        self.versions = Versions(self.rules, self._place, Entries(self.entry()), storage)
        named = self.module.named_parameters()
        learns: dict[Tensor, str] = {p: name for name, p in named if p.requires_grad}
        idle = self.versions.loads_nothing
        self.own_writes = OwnWrites(storage, learns, idle) if replicated or not idle else None
        self.rates_move = False  # whether they probably change after each update
        self.drop_gradients()

    def end(self) -> None:
        """Put the true weights back into the parameters, and forget the microbatches in flight."""
        self._bound.end()
        self.drop_gradients()
        for p in self._owners:  # after a failure: DTensors, whose shards are ``params``
            p.grad = None
        # A graph that the caller made before the run must not use the new weights unnoticed.
        increment_version(self.params)

    def drop_gradients(self) -> None:
        """Set all gradients to None; autograd then hands over new ones without a copy."""
        for p in self.params:
            p.grad = None

    def true_weights(self) -> Mapping[Tensor, Tensor]:
        return self._bound.true_weights()

    def newest(self) -> list[Tensor]:
        """Return the true weights in the order of ``params``; do not write them."""
        true = self.true_weights()
        return [true[p].detach() for p in self.params]

    def masters(self) -> dict[Tensor, Tensor]:
        """Return the masters that are wider than their parameters."""
        master = None if self.storage is None else self.storage.master
        views = {} if master is None else master.flat.views
        return {p: view for p, view in views.items() if view.dtype != p.dtype}

    @contextmanager
    def holding(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Give the parameters these values inside, between two runs; afterwards their own."""
        before = [p.detach().clone() for p in self.params]
        with torch.no_grad():
            torch._foreach_copy_(self.params, list(values))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.params, before)

    def move(self, weights: Iterable[Tensor]) -> None:
        """Make these the true weights, in the order of ``params``, right after an update."""
        # The step has written only predictions that cannot be computed again; they are shifted too.
        self._bound.move(weights, self.versions.version)

    @property
    def true_dtypes(self) -> list[torch.dtype]:
        return [true_dtype(p, self._master_dtype) for p in self.params]

    def keep(self) -> tuple[Mapping[Tensor, Tensor], Callable[[], None]]:
        """Keep the weights that the module has now, until the next update at most.

        Returns views of them, by parameter, and a function to be called before that update.
        """
        buffer, versions = self._bound.bound, self.versions
        content = buffer.content or Content(versions.version)
        versions.hold(content)
        return buffer.flat.views, partial(versions.release, content)

    def widen_gradients(self) -> list[Tensor]:
        """Give gradients their true weights' dtype, if wider, up to the update; return the old."""
        narrow = []
        for p, true in self.masters().items():
            if p.grad is not None:
                working, gradient = p.data, p.grad
                narrow.append(gradient)
                # A gradient must have the dtype that its parameter has when it is set.
                p.grad, p.data = None, true
                p.grad, p.data = gradient.to(true.dtype), working
        return narrow

    # The update, and other writes of versions.

    def step(self, update: Update) -> None:
        """Step the optimizer and the scheduler."""
        storage, room, kept, write = self.storage, update.room, update.kept, None
        assert storage is not None, "not bound"
        if kept is not None:
            storage.keep_true(kept)
        if storage.keeps_before:
            storage.note_before()
        written = None if room is None else room.content
        if room is not None and written is not None:
            write = room.flat.views, written.law or _COPY
        hooks_ran = self.updater.step(storage.rate_factor, write)
        changes_rates = self._stepped is not None or self._factor is not None
        # Asked only if needed: on a GPU it synchronizes.
        after = storage.rates() if storage.predicts and (changes_rates or hooks_ran) else None
        if after and room is not None and written and written.rates not in (None, after):
            room.content = None  # the next forward will ask for other rates
        self._updates += 1
        if changes_rates:
            if self._stepped is not None:
                self._stepped.step()
            self._scale_rates()
            self.rates_move = storage.predicts and storage.rates() != after
        for p in self.params:
            p.grad = None

    def skip(self, update: Update) -> None:
        """Make an update that changes no weights, and write the last step's prediction again."""
        storage, room, before = self._bound, update.room, update.before
        if room is not None:
            if before is None:  # overwritten: predict as if the momentum had not changed
                law = room.content and room.content.law
                assert isinstance(law, SecondOrder)
                storage.write(Content(0, Linear(law.delay + law.lead)), room)
            elif before is not room:
                storage.copy(before.flat, room.flat)
        if update.kept is not None:
            storage.keep_true(update.kept)
        self._updates += 1
        self._scale_rates()
        self.drop_gradients()

    def _scale_rates(self) -> None:
        if self._factor is not None:
            self._bound.rate_factor = self._factor(self._updates)

    @property
    def rate_factor(self) -> float:
        """The factor on the learning rates of the next update; 1 between runs."""
        return 1.0 if self.storage is None else self.storage.rate_factor
