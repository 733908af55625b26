"""Defines ``Stepper``, which makes the steps and predictions of one of this package's optimizers.

A step in a pipeline goes from the stage's weights through ``Stepper.step`` to one native call. In a
training loop of your own, ``PredictingOptimizer.step`` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import unwrap
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from spectrain_ext import _C
from spectrain_ext.operators.calls import StepOptions, bump_versions
from spectrain_ext.operators.laws import Law, Linear, terms_of
from spectrain_ext.operators.numbers import Term

from .guards import Ordered, SaveGuard, exclusive
from .parameter_table import Home, ParameterTable, Views
from .rows import Rows
from .state import (
    Group,
    Rule,
    allowed,
    check_dtypes,
    independent,
    loaded_dtype,
    read_entry,
    ruled,
)

if TYPE_CHECKING:
    from spectrain_ext.operators.numbers import Corrected

    from .swaps import Hooks

_REMEMBERED = 8  # checked laws; a training loop uses the same few
_IMMUTABLE = (float, int, str, type(None))
_OWN_STEP = f"{__package__}.base"  # the module of the step that calls this one

#: Where a step also writes a prediction of the new weights, and its law.
Write = tuple[Views, Law]


class _Resolved(NamedTuple):
    """The launches of a step or a prediction, for as long as the table holds."""

    targets: tuple[object, ...]  # keys by address; kept alive so that no address is reused
    idle: list[Tensor]  # parameters that need no launch yet
    rows: list[Rows]


class Stepper(Ordered):
    """An optimizer's memory and numbers, resolved once, and the steps and predictions on them.

    Anyone may change torch's groups, state and parameters at any time. So each call asks one
    question, in ``_resolve``: is all as it was?

    Attributes:
        rule: the update rule.
        predicts: True; a ``Foreign`` optimizer cannot predict.
        has_modes: False; training and evaluation have the same weights, see ``Foreign``.
        hooks: the hooks of a bound optimizer's step, while they run.
    """

    predicts, has_modes = True, False

    # A weak reference to the optimizer: a cycle would keep its memory alive.
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: Rule,
        state_dtype: torch.dtype | None,
        lock: RLock,  # the optimizer's: threads that share it take turns
    ) -> None:
        self._optimizer: Callable[[], Any] = ref(optimizer)
        self.rule, self._state_dtype = rule, state_dtype
        self._lock = lock
        self._overridden = unwrap(type(optimizer).step).__module__ != _OWN_STEP
        self._ordered: tuple[float, Write | None] | None = None  # of a step by the optimizer
        self._stepped = False  # whether that has come here
        self.hooks: Hooks | None = None
        self._guard = SaveGuard("its weights are predicted; leave the block of predicted() first")
        self._predicted: list[Rows] | None = None  # while weights are predicted in place
        self._continue_in(None, None)

    def _continue_in(self, home: Home | None, correction: Corrected | None) -> None:
        """Forget all that was resolved; ``correction`` replaces the coefficients of steps."""
        self._seen: tuple[Any, ...] | None = None  # groups and state when all was as it is
        self._table: ParameterTable | None = None
        self._resolved: dict[tuple[int, ...], _Resolved] = {}  # by address of what is written
        self._numbers_of: tuple[Any, ...] | None = None  # the groups when numbers were read
        self._numbers: list[Any] = []  # hyperparameters by group
        self._kinds: list[bool] = []  # whether each group has momentum
        self._counted: list[bool] = []  # whether its steps are counted in memory
        self._factor = 1.0  # on the groups' learning rates
        self._good: list[tuple[Law, bool]] = []  # laws that fit, and whether with a gradient
        # Last: an exception in between leaves what the next call resolves again.
        self._home, self._correction = home, correction

    # Hyperparameters of the groups.

    def check_group(self, index: int) -> None:
        """Refuse what a group has: numbers out of range, a dtype, a parameter twice."""
        group = self._optimizer().param_groups[index]
        numbers = self.rule.read(index, group)
        decay = 0.0 if self.rule.of(group).is_for_matrices else numbers.setting()[2]
        if self._state_dtype == torch.bfloat16 and decay > _C.ROUNDED_DECAY:
            raise ValueError(
                f"parameter group {index}: with state_dtype=torch.bfloat16 expected a first moment "
                f"or momentum that decays by at most {_C.ROUNDED_DECAY}, got {decay}: rounded to "
                "nearest, it would not follow the gradients"
            )
        seen: dict[Tensor, int] = {}
        for i, p in enumerate(group["params"]):
            name = f"parameter {i} of group {index}"
            if p in seen:
                raise ValueError(f"{name} is parameter {seen[p]} of that group once more")
            seen[p] = i
            check_dtypes(name, p.dtype, self._state_dtype)

    def _read_numbers(self, factor: float) -> None:
        """Read the hyperparameters of every group, unless they are as before."""
        groups, before = self._optimizer().param_groups, self._numbers_of
        if before is not None and factor == self._factor and _C.same(groups, before):
            return
        self._numbers_of, self._factor = None, factor
        self._numbers = self._numbers_under(factor, self._correction)
        self._good = []
        kinds = [numbers.has_momentum for numbers in self._numbers]
        counted = [bool(group.get("capturable")) for group in groups]
        if kinds != self._kinds or counted != self._counted:
            self._kinds, self._counted, self._table = kinds, counted, None
        if all(map(_stays, groups)):  # no mutable values, such as a learning rate in a tensor
            self._numbers_of = tuple(tuple(map(_noted, group.values())) for group in groups)

    def _numbers_under(self, factor: float, correction: Corrected | None) -> list[Any]:
        groups = enumerate(self._optimizer().param_groups)
        numbers: list[Any] = [self.rule.read(index, group) for index, group in groups]
        if factor != 1.0:
            numbers = [replace(of_group, lr=of_group.lr * factor) for of_group in numbers]
        if correction is None:
            return numbers
        return [_corrected(*numbered, correction) for numbered in enumerate(numbers)]

    def check_correction(self, correction: Corrected | None) -> None:
        """Raise ValueError naming the first group for which a correction is undefined.

        A correction replaces the coefficients of a step; TypeError unless it gives a ``Term``.
        """
        self._numbers_under(1.0, correction)

    def check_law(self, law: Law, *, has_gradient: bool = True) -> None:
        """Raise ValueError if a law does not fit the hyperparameters of a group."""
        self._read_numbers(self._factor)
        if (law, has_gradient) in self._good:
            return
        groups = self._optimizer().param_groups
        for index, (group, numbers) in enumerate(zip(groups, self._numbers, strict=True)):
            try:
                terms = terms_of(law, numbers)
            except ValueError as error:
                raise ValueError(f"parameter group {index}: {error}") from None
            if terms and group["params"] and not numbers.has_momentum:
                raise ValueError(
                    f"parameter group {index} has momentum 0: a prediction needs a momentum buffer"
                )
            if not has_gradient and any(term.gradient for term in terms):
                raise ValueError(f"steps: {law} needs the gradient; let the step write it")
        self._good[_REMEMBERED:] = []
        self._good.insert(0, (law, has_gradient))

    # The launches.

    def _resolve(self, factor: float, outs: Views | None = None, stash: bool = False) -> list[Rows]:
        """Return the launches of a step, of a prediction to ``outs``, or of one in place.

        Everything is read again that has changed: groups and state by the caller or a hook, the
        places of parameters by ``p.data = ...`` and the like, gradients that have come.
        """
        optimizer, home, table = self._optimizer(), self._home, self._table
        groups, state = optimizer.param_groups, optimizer.state
        targets = (outs,) if home is None else (outs, home.weights)
        key = stash, *map(id, targets)
        known = self._resolved.get(key)
        if (
            table is not None
            and known is not None
            and factor == self._factor
            and _C.same((groups, state), self._seen)
            and (table.counts is None or table.counts_hold())
            and all([rows.in_place() for rows in known.rows])
            and (stash or not known.idle or all(p.grad is None for p in known.idle))
        ):
            return known.rows
        self._seen = None
        if outs is not None:
            self._need_home("a prediction")
        self._read_numbers(factor)
        if home is not None:
            if outs is not None:
                home.check(groups, outs, "outs")
            for rows in () if known is None else known.rows:
                if not rows.in_place():
                    raise RuntimeError(
                        f"a parameter of group {rows.group} no longer has the storage it was bound "
                        "with (.to() or load_state_dict(assign=True) since bind)"
                    )
        elif not all(rows.in_place() for each in self._resolved.values() for rows in each.rows):
            self._table = None  # parameters have moved, and perhaps their state with them
        if self._table is None or not self._table.holds(groups, state):
            self.read_state(table)
        known = self._resolved.get(key)
        if known is None or (not stash and any(p.grad is not None for p in known.idle)):
            known = self._resolved[key] = self._made(targets, stash)
        assert self._table is not None
        if self._numbers_of is not None:
            self._seen = self._numbers_of, self._table.seen_state
        return known.rows

    def read_state(self, previous: ParameterTable | None = None) -> None:
        """Read groups and state now, and move state to where kernels can use it."""
        optimizer, previous = self._optimizer(), previous or self._table
        groups, state = optimizer.param_groups, optimizer.state
        self._seen = self._table = None
        self._resolved = {}
        self._table = ParameterTable(
            self.rule, self._state_dtype, self._home, groups, state, previous
        )

    def _made(self, targets: tuple[Views | None, ...], stash: bool) -> _Resolved:
        table, home = self._table, self._home
        assert table is not None
        idle: list[Tensor] = []
        positions_of: dict[tuple[torch.device, bool, Rule], list[int]] = {}
        for i, p in enumerate(table.params):
            kind = self._kinds[table.groups[i]]
            steps = not stash and (p.grad is not None or not kind)
            # In a bound optimizer every parameter has a launch, which may write its outs.
            if home is not None or steps or table.buffers[i] is not None:
                positions_of.setdefault((p.device, kind, table.rules[i]), []).append(i)
            else:
                idle.append(p)
        rows = [
            Rows(table, home, positions, kind, targets[0], stash=stash)
            for (_, kind, _), positions in positions_of.items()
        ]
        return _Resolved(targets, idle, rows)

    # Steps and predictions.

    def step(
        self, factor: float = 1.0, write: Write | None = None, *, by_optimizer: bool = False
    ) -> bool:
        """Update every parameter that has a gradient, and write predictions of the new weights.

        If every parameter has a gradient, a prediction needs no further pass over memory. A
        parameter without one is predicted from its unchanged momentum. Everything is checked before
        anything is written.

        Args:
            factor: of the groups' learning rates, in the step and the prediction.
            write: tensors by parameter, and the law of the prediction; see ``predict``. A law may
                need the gradient (``SecondOrder``).
            by_optimizer: whether the optimizer's own ``step`` calls.

        Returns:
            Whether others' code has run, as hooks do, which may have changed weights and numbers.
        """
        optimizer = self._optimizer()
        if self._ordered is not None:
            factor, write = self._ordered
        elif not by_optimizer and (
            self._overridden
            or "step" in vars(optimizer)  # a scheduler has wrapped it
            or has_step_hooks(optimizer)
            or torch._C._autograd._profiler_enabled()
        ):
            self._ordered, self._stepped = (factor, write), False
            try:
                optimizer.step()
            finally:
                self._ordered = None
            if write is not None and not self._stepped:
                self._predict_without_step(*write, factor)
            return True
        with self._lock:
            if self._predicted is not None:
                self.refuse_while_predicted("step")
            outs, law = write or (None, None)
            launches = self._resolve(factor, outs)
            numbers = self._numbers
            if law is not None and (law, True) not in self._good:
                self.check_law(law)
            for rows in launches:
                rows.read_gradients()
            for rows in launches:
                rows.prepare_step(numbers, law)

            # From here on nothing can be refused.
            table = self._table
            options = _scaling(optimizer) if table is not None and table.in_memory else {}
            for rows in launches:
                if rows.step(numbers, law, optimizer.state, options):
                    self._table = None
                if self._home is None:
                    bump_versions(rows.updated())
            self._stepped = True
        return False

    def _predict_without_step(self, outs: Views, law: Law, factor: float) -> None:
        """Write the predictions of a step that the optimizer's subclass has left out."""
        try:
            self.predict(outs, law, factor)
        except ValueError as error:
            raise RuntimeError(
                f"{type(self._optimizer()).__name__}.step has not called super().step(), and {law} "
                "predicts with the step's gradient; a pass can leave out updates (Pass.skips)"
            ) from error

    def run_hooked(self, step: Callable[[], Any]) -> Any:
        """Run the optimizer's step with its hooks; those of a bound one have the true weights."""
        if self._home is None:
            return step()
        from .swaps import Hooks  # loaded only where it is used

        optimizer, write = self._optimizer(), self._ordered and self._ordered[1]
        params = (p for group in optimizer.param_groups for p in group["params"])
        name = f"{type(optimizer).__name__}: a hook of its step"
        self.hooks = hooks = Hooks(params, self._home.weights, name)
        try:
            return hooks.run(step, write and write[0])
        finally:
            self.hooks = None

    @exclusive
    def predict(self, outs: Views, law: Law, factor: float = 1.0) -> None:
        """Write the prediction of every p to ``outs[p]``, with each group's current learning rate.

        ``outs[p]`` has the layout and device of p's weights; pass the same mapping for the same
        tensors, which are checked once. ``Linear(0)`` copies the weights' bits. Allocates nothing
        and bumps no version counters. RuntimeError if the optimizer is not bound. ValueError for a
        missing or unsuitable tensor, or a law that needs the gradient or does not fit a group.
        """
        self._need_home("predict")
        launches = self._resolve(factor, outs)
        if (law, False) not in self._good:
            self.check_law(law, has_gradient=False)
        for rows in launches:
            rows.predict(self._numbers, law)

    # Predictions in place.

    def predict_in_place(self, law: Law) -> None:
        """Replace every weight by its prediction, see ``PredictingOptimizer.predict_``."""
        self.refuse_while_predicted("predict_")
        if self._home is not None:
            raise RuntimeError("predict_: the optimizer is bound, its owner predicts")
        self.check_law(Linear(1.0))
        self.check_law(law, has_gradient=False)
        # Set before anything is written, so that a prediction that fails can be undone.
        self._predicted = self._resolve(1.0, stash=True)
        try:
            for rows in self._predicted:
                self._guard.put(rows.params)
                rows.stash_predict(self._numbers, law)
                bump_versions(rows.params)
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Restore the weights that were predicted in place, bit for bit; else RuntimeError."""
        if self._predicted is None:
            raise RuntimeError("restore_: the weights are not predicted, call predict_ first")
        for rows in self._predicted:
            if rows.restore():
                bump_versions(rows.params)
            self._guard.take(rows.params)
        self._predicted = None

    @property
    def has_predicted(self) -> bool:
        """Whether the weights are predicted in place."""
        return self._predicted is not None

    def refuse_while_predicted(self, call: str) -> None:
        if self._predicted is not None:
            raise RuntimeError(
                f"{call}: the weights are predicted; leave the block of predicted() first, or call "
                "restore_() after predict_()"
            )

    # For a pipeline, which owns the buffers of weights and state.

    @exclusive
    def bind(
        self,
        master: Views | None,
        buffers: Mapping[str, Views],
        correction: Corrected | None = None,
    ) -> None:
        """Keep weights and state in the caller's tensors, until :meth:`unbind`.

        :meth:`step` then reads each parameter's ``grad``, updates ``master[p]`` (``None``: p
        itself) and keeps ``state[p][key]`` in ``buffers[key][p]``, for each of ``buffer_keys``. All
        tensors have p's shape and device, and one layout. Existing state is copied; other buffers
        become zero, so that a prediction before the first step equals the weights. A bound
        optimizer does not bump autograd's version counters: the caller orders its uses. A
        ``correction`` replaces the coefficients of its steps.

        RuntimeError if already bound or while the weights are predicted. ValueError for a missing
        or unsuitable tensor.
        """
        self.refuse_while_predicted("bind")
        if self._home is not None:
            raise RuntimeError("bind: the optimizer is bound already, unbind() it first")
        optimizer = self._optimizer()
        home = Home.checked(optimizer.param_groups, master, buffers, self.rule.buffers)
        for name, p, rule in ruled(self.rule, optimizer.param_groups):
            read_entry(name, rule, p, optimizer.state.get(p) or {})
        self._continue_in(home, correction)
        self.read_state()

    @exclusive
    def unbind(self) -> None:
        """Move the state to its own storage; RuntimeError if the optimizer is not bound."""
        self._need_home("unbind")
        for entry in self._optimizer().state.values():
            if isinstance(entry, dict):
                entry.update(independent(entry, self.rule.all_keys))
        self._continue_in(None, None)

    @property
    def is_bound(self) -> bool:
        return self._home is not None

    def is_bound_to(self, buffers: Mapping[str, Views]) -> bool:
        """Return whether the optimizer is bound to these buffers."""
        return self._home is not None and self._home.state is buffers

    @exclusive
    def update_in(self, views: Views) -> None:
        """Update ``views[p]`` from the next step on, where the caller has copied the weights.

        Errors as in `predict`.
        """
        home = self._need_home("update_in")
        home.check(self._optimizer().param_groups, views, "weights")
        home.weights = views

    def _need_home(self, call: str) -> Home:
        if self._home is None:
            raise RuntimeError(f"{call}: the optimizer is not bound, call bind() first")
        return self._home

    @property
    def buffer_keys(self) -> tuple[str, ...]:
        """Keys of state with the parameter's shape, for which ``bind`` needs buffers."""
        return self.rule.buffers

    def state_dtype(self, param: Tensor, weight: torch.dtype) -> torch.dtype:
        """Return the dtype of a parameter's buffers (moments) beside weights of that dtype."""
        saved = weight
        if weight == param.dtype:
            entry, keys = self._optimizer().state.get(param, {}), self.rule.all_keys
            saved = next((entry[key].dtype for key in keys if entry.get(key) is not None), weight)
            if saved != weight and allowed(weight, saved) and self._state_dtype is None:
                return saved
        return loaded_dtype(weight, saved, self._state_dtype)

    def loose_state(self) -> list[Tensor]:
        """Return state on a GPU with other shapes than the parameter's, which ``bind`` leaves."""
        entries = self._optimizer().state.values()
        tensors = [entry.get(key) for entry in entries for key in self.rule.loose]
        return [tensor for tensor in tensors if tensor is not None and tensor.is_cuda]

    def set_mode(self, mode: Literal["train", "eval"]) -> None:
        """Do nothing: training and evaluation have the same weights."""


def has_step_hooks(optimizer: Any) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def _scaling(optimizer: Any) -> StepOptions:
    """Return what ``GradScaler`` sets for a step that scales and skips by itself."""
    found_inf, grad_scale = (getattr(optimizer, x, None) for x in ("found_inf", "grad_scale"))
    return {"found_inf": found_inf, "grad_scale": grad_scale}


def _corrected(index: int, numbers: Any, correction: Corrected) -> Any:
    name = f"parameter group {index}"
    if not hasattr(numbers, "correction"):
        raise ValueError(f"{name}: {correction} is not defined for this optimizer")
    corrected = replace(numbers, correction=correction)
    try:
        step = corrected.setting()[-1]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if not isinstance(step, Term):
        raise TypeError(
            f"{name}: {correction}: expected a step as a Term, such as numbers.term(), got {step!r}"
        )
    return corrected


def _stays(group: Group) -> bool:
    for key, value in group.items():
        inside = value if type(value) is tuple else (value,)
        if key != "params" and not all(isinstance(v, _IMMUTABLE) for v in inside):
            return False
    return True


def _noted(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # that of parameters
