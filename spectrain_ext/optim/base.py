"""Base class of the optimizers: a fused step that also writes predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from spectrain_ext.operators.calls import bump_versions
from spectrain_ext.operators.laws import Horizon, Law, as_law

from .guards import Ordered, SaveGuard, exclusive, hooked, without_compiler
from .launch import Launch, Launches
from .parameters import Binding, Parameters, Views
from .state import (
    Rule,
    independent,
    loaded_dtype,
    read_entry,
    ruled,
)

if TYPE_CHECKING:
    from spectrain_ext.operators.numbers import Corrected

    from .foreign import Foreign
    from .swaps import Hooks


class PredictingOptimizer(Ordered, torch.optim.Optimizer):
    """Base of this package's optimizers; a subclass adds its rule and torch's class of that name.

    A step is one kernel launch per device for all parameter groups, or two if some groups have
    momentum and others do not. Threads that share an optimizer take turns. Torch does not allow one
    thread to set a ``grad`` while another reads it; the caller must prevent that.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> optimizer = st.optim.SGD([weight], lr=0.25, momentum=0.5)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> with optimizer.predicted(steps=2):
        ...     print(weight.item())
        0.25
    """

    _rule: Rule
    _of_matrices: type[Launch] = Launch
    _momentum_dtype: torch.dtype | None
    _loading: dict[str, Any] | None = None
    _hooks: Hooks | None = None  # while a bound optimizer steps with hooks
    _parameters: Parameters
    _launches: Launches
    rate_factor: float  # on the groups' learning rates, in steps and predictions until `unbind`
    correction: Corrected | None  # of the coefficients of steps, until `unbind`
    has_modes = False  # whether training and evaluation have different weights, see `Foreign`

    def __init__(self, *args: Any, momentum_dtype: torch.dtype | None = None, **more: Any) -> None:
        """Take the arguments of torch's class, and `momentum_dtype`."""
        self._prepare(momentum_dtype)
        super().__init__(*args, **more)
        self._step_supports_amp_scaling = False  # GradScaler unscales and skips, also with fused

    def _prepare(self, momentum_dtype: torch.dtype | None) -> None:
        """Prepare for the parameter groups that torch's constructor will add."""
        self._turn = RLock()
        self._momentum_dtype = momentum_dtype
        self._begin()

    def _begin(self, binding: Binding | None = None) -> None:
        """Discard all resolved state and continue with a new binding."""
        parameters = Parameters(self._rule, self._momentum_dtype, binding)
        # In one call: an exception in between would leave two that do not match.
        launches = Launches(parameters, self._of_matrices)
        self.__dict__.update(_parameters=parameters, _launches=launches)
        self.rate_factor, self.correction = 1.0, None
        self._predicted: list[Launch] | None = None
        self._next_write: tuple[Views, Law, Any] | None = None

    _guard = SaveGuard("its weights are predicted; leave the block of predicted() first")
    profile_hook_step = staticmethod(hooked)

    # Parameter groups and state, as torch.optim.Optimizer keeps them.

    @exclusive
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch does; an invalid one raises and is not added.

        RuntimeError while the weights are predicted or the optimizer is bound.
        """
        self._refuse_while_predicted("add_param_group")
        if self._parameters.binding is not None:
            raise RuntimeError(
                "add_param_group: the optimizer is bound to the parameters of a pipeline's stage; "
                "release() the pipeline, and make another one of stages with the new parameters, "
                "or unbind() an optimizer that you have bound yourself"
            )
        without_compiler(super().add_param_group)(param_group)
        try:
            self._parameters.check_group(self.param_groups, len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, as in torch."""
        without_compiler(super().zero_grad)(set_to_none)

    @exclusive
    def __getstate__(self) -> dict[str, Any]:
        """Return what deepcopy and pickle keep; RuntimeError while the weights are predicted."""
        self._refuse_while_predicted("copying or pickling the optimizer")
        kept: dict[str, Any] = super().__getstate__()
        with self._owners_turn():
            kept["state"] = type(self.state)(
                dict, ((p, self._saved_entry(entry)) for p, entry in self.state.items())
            )
        kept["_momentum_dtype"] = self._momentum_dtype
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the result of ``__getstate__``, or state from ``load_state_dict``."""
        if self._loading is not None:  # before the incomplete state is visible
            from .saved import put_saved

            rule, dtype = self._parameters.rule, self._momentum_dtype
            put_saved(rule, dtype, self.defaults, self._loading, state)
        super().__setstate__(state)
        self.__dict__.setdefault("_turn", RLock())
        if "_parameters" not in self.__dict__:
            self._begin()
        elif self._loading is not None:
            self._parameters.forget()
            self._parameters.look(self.param_groups, self.state)

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """Return the state with the keys of torch's class of the same name.

        Scalar state, and all state of a bound optimizer, is copied, because torch.save would write
        the whole buffer behind a view.
        """
        with self._owners_turn():
            result: dict[str, Any] = without_compiler(super().state_dict)()
            result["state"] = {k: self._saved_entry(v) for k, v in result["state"].items()}
            return result

    def _saved_entry(self, entry: Any) -> Any:
        rule, bound = self._parameters.rule, self._parameters.binding is not None
        return independent(entry, rule.all_keys if bound else tuple(rule.scalars))

    @exclusive
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class or of torch's class of the same name.

        Buffers get ``momentum_dtype`` if it was given. Otherwise float32 buffers of a 16-bit
        parameter stay float32, and all others get the parameter's dtype, or in a bound optimizer
        that of the bound buffers. ValueError or TypeError if the state does not fit; nothing
        changes then. RuntimeError while the weights are predicted.
        """
        self._refuse_while_predicted("load_state_dict")
        from .saved import without_state

        def take_state(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            if self._loading is None:  # else an earlier hook, left by an exception, set it
                self._loading = saved
            return without_state(self._parameters.rule, saved)

        handle = self.register_load_state_dict_pre_hook(take_state)  # after the caller's
        try:
            with self._owners_turn():
                without_compiler(super().load_state_dict)(state_dict)
        finally:
            self._loading = None
            handle.remove()

    @property
    def buffer_keys(self) -> tuple[str, ...]:
        """Keys of state with the parameter's shape, for which ``bind`` needs buffers."""
        return self._parameters.rule.buffers

    @property
    def loose_keys(self) -> tuple[str, ...]:
        """Keys of state with other shapes, which ``bind`` does not move (SOAP)."""
        return self._parameters.rule.loose

    def momentum_dtype(self, param: Tensor) -> torch.dtype:
        """Return the dtype of a parameter's buffers (momentum, moments), present or future."""
        entry, keys = self.state.get(param, {}), self._parameters.rule.all_keys
        saved = next((entry[key].dtype for key in keys if entry.get(key) is not None), param.dtype)
        return loaded_dtype(param.dtype, saved, self._momentum_dtype)

    def loose_state(self) -> list[Tensor]:
        """Return state tensors on a GPU outside the buffers of ``bind``."""
        tensors = [entry.get(key) for entry in self.state.values() for key in self.loose_keys]
        return [tensor for tensor in tensors if tensor is not None and tensor.is_cuda]

    def set_mode(self, mode: Literal["train", "eval"]) -> None:
        """Do nothing: training and evaluation have the same weights."""

    # The step.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the result of ``closure``.

        Everything is checked before anything is written. RuntimeError while the weights are
        predicted or for a sparse gradient; ValueError or TypeError for a hyperparameter out of
        range or a gradient that does not match its parameter. As in torch, Ctrl-C can interrupt a
        step halfway; within a pipeline's run it waits for the end of the step.
        """
        if (
            self._parameters.rule.scalars
            and torch.cuda.is_initialized()
            and torch.cuda.is_current_stream_capturing()
        ):
            raise RuntimeError("step: a captured CUDA graph would repeat this step's count forever")
        loss = None
        if closure is not None:
            self._refuse_while_predicted("step")
            with torch.enable_grad():
                loss = closure()
        with self._turn:
            self._refuse_while_predicted("step")
            self._step()
        return loss

    def _step(self) -> None:
        templates = self._numbers()
        outs, law, checked = self._next_write or (None, None, None)
        launches = self._launches.of(self.param_groups, self.state, outs)
        if law is not None and checked is not templates:
            self._parameters.check_law(self.param_groups, law, has_gradient=True)
        for launch in launches:
            launch.read_gradients()
        for launch in launches:
            launch.prepare_step(templates, law)

        # From here on nothing can be refused.
        for launch in launches:
            if launch.step(self.state):
                self._parameters.forget()
            if self._parameters.binding is None:
                bump_versions(launch.updated())
        self._next_write = None

    def _with_hooks(self, step: Callable[[], Any]) -> Any:
        """Run a step with its hooks; those of a bound optimizer have the true weights."""
        binding = self._parameters.binding
        if binding is None:
            return step()
        from .swaps import Hooks  # loaded only where it is used

        params = (p for group in self.param_groups for p in group["params"])
        hooks = Hooks(params, binding.weights, f"{type(self).__name__}: a hook of its step")
        outs = None if self._next_write is None else self._next_write[0]
        self._hooks = hooks
        try:
            return hooks.run(step, outs)
        finally:
            self._hooks = None

    # Prediction in place.

    def check_can_predict(self, law: Horizon = 1.0) -> None:
        """Raise ValueError naming the first group that has no momentum for a law."""
        self._law(law, has_gradient=True)

    def _numbers(self) -> list[Any]:
        return self._parameters.numbers(self.param_groups, self.rate_factor, self.correction)

    def _law(self, steps: Horizon, *, has_gradient: bool = False) -> tuple[list[Any], Law]:
        """Return the hyperparameters of every group, and the law, which fits them."""
        law, templates = as_law(steps), self._numbers()
        self._parameters.check_law(self.param_groups, law, has_gradient)
        return templates, law

    @exclusive
    def predict_(self, steps: Horizon) -> None:
        """Replace every weight by its prediction ``steps`` updates ahead, until :meth:`restore_`.

        ``steps`` is a number of updates (>= 0, may be fractional), or a law of
        ``spectrain_ext.laws`` that needs no gradient. The same pass stashes the true weights, in
        one more buffer per parameter. Parameters that were never updated do not change. Until
        :meth:`restore_`, ``state_dict``, ``torch.save`` and deepcopy of a module with predicted
        weights raise RuntimeError.

        RuntimeError if the weights are already predicted or the optimizer is bound. ValueError for
        invalid ``steps`` or a group whose momentum is 0.
        """
        self._refuse_while_predicted("predict_")
        if self._parameters.binding is not None:
            raise RuntimeError("predict_: the optimizer is bound, its owner predicts")
        self.check_can_predict()
        templates, law = self._law(steps)
        # Set before anything is written, so that restore_ can undo a prediction that fails.
        self._predicted = self._launches.of(self.param_groups, self.state, stash=True)
        try:
            for launch in self._predicted:
                self._guard.put(launch.params)
                launch.stash_predict(templates, law)
                bump_versions(launch.params)
        except BaseException:
            self.restore_()
            raise

    @exclusive
    def restore_(self) -> None:
        """Restore the weights that :meth:`predict_` replaced, bit for bit; else RuntimeError."""
        if self._predicted is None:
            raise RuntimeError("restore_: the weights are not predicted, call predict_ first")
        for launch in self._predicted:
            if launch.restore():
                bump_versions(launch.params)
            self._guard.take(launch.params)
        self._predicted = None

    @contextmanager
    def predicted(self, steps: Horizon) -> Iterator[None]:
        """Predict within a ``with`` block, see :meth:`predict_`.

        Run the forward *and* its backward inside: entering and leaving bump the weights' version
        counters, so a backward outside raises.
        """
        try:
            self.predict_(steps)
            yield
        finally:
            if self._predicted is not None:
                self.restore_()

    def _refuse_while_predicted(self, call: str) -> None:
        if self._predicted is not None:
            raise RuntimeError(
                f"{call}: the weights are predicted; leave the block of predicted() first, or call "
                "restore_() after predict_()"
            )

    # For a pipeline, which owns the buffers of weights and state.

    @exclusive
    def bind(self, master: Views | None, buffers: Mapping[str, Views]) -> None:
        """Keep weights and state in the caller's tensors, until :meth:`unbind`.

        :meth:`step` then reads each parameter's ``grad``, updates ``master[p]`` (``None``: p
        itself) and keeps ``state[p][key]`` in ``buffers[key][p]``, for each of ``buffer_keys``. All
        tensors have p's shape and device, and one layout. Existing state is copied; other buffers
        become zero, so that a prediction before the first step equals the weights. A bound
        optimizer does not bump autograd's version counters: the caller orders its uses.

        RuntimeError if already bound or while the weights are predicted. ValueError for a missing
        or unsuitable tensor.
        """
        self._refuse_while_predicted("bind")
        if self._parameters.binding is not None:
            raise RuntimeError("bind: the optimizer is bound already, unbind() it first")
        binding = Binding(self.param_groups, master, buffers, self._rule.buffers)
        for where, p, rule in ruled(self._rule, self.param_groups):
            read_entry(where, rule, p, self.state.get(p) or {})
        self._begin(binding)
        self._parameters.look(self.param_groups, self.state)

    @exclusive
    def unbind(self) -> None:
        """Move the state to its own storage; RuntimeError if the optimizer is not bound."""
        self._bound("unbind")
        for entry in self.state.values():
            if isinstance(entry, dict):
                entry.update(independent(entry, self._parameters.rule.all_keys))
        self._begin()

    def is_bound_to(self, buffers: Mapping[str, Views]) -> bool:
        """Return whether the optimizer is bound to these buffers."""
        binding = self._parameters.binding
        return binding is not None and binding.state is buffers

    @exclusive
    def write_prediction(self, outs: Views, steps: Horizon) -> None:
        """Write the prediction of every p to ``outs[p]``, with each group's current learning rate.

        ``outs[p]`` has the layout and device of p's weights; pass the same mapping for the same
        tensors, which are checked once. ``steps`` as in :meth:`predict_`; 0 copies the weights'
        bits. Allocates nothing and bumps no version counters. RuntimeError if the optimizer is not
        bound. ValueError for a missing or unsuitable tensor, and as in :meth:`predict_`.
        """
        self._bound("write_prediction").check(self.param_groups, outs, "outs")
        templates, law = self._law(steps)
        for launch in self._launches.of(self.param_groups, self.state, outs):
            launch.predict(templates, law)

    def write_with_next_step(self, outs: Views | None, steps: Horizon = 0.0) -> None:
        """Let the next :meth:`step` also write what ``write_prediction(outs, steps)`` would.

        If every parameter has a gradient, this needs no further pass over memory. ``steps`` may be
        a law that needs the gradient (``SecondOrder``); a parameter without a gradient is then
        predicted from its unchanged momentum. The request holds for one step; ``None`` cancels it.
        """
        with self._turn:
            if outs is None:
                self._next_write = None
                return
            self._bound("write_with_next_step").check(self.param_groups, outs, "outs")
            templates, law = self._law(steps, has_gradient=True)
            self._next_write = outs, law, templates

    @exclusive
    def update_in(self, views: Views) -> None:
        """Update ``views[p]`` from the next step on, where the caller has copied the weights.

        Errors as in `write_prediction`.
        """
        binding = self._bound("update_in")
        binding.check(self.param_groups, views, "weights")
        binding.weights = views

    def check_correction(self, correction: Corrected | None) -> None:
        """Raise ValueError naming the first group for which a correction is undefined.

        A correction replaces the coefficients of a step; TypeError unless it gives a ``Term``.
        """
        Parameters(self._rule).numbers(self.param_groups, correction=correction)

    def _bound(self, call: str) -> Binding:
        binding = self._parameters.binding
        if binding is None:
            raise RuntimeError(f"{call}: the optimizer is not bound, call bind() first")
        return binding


#: An optimizer as a stage's storage uses it.
Updater: TypeAlias = "PredictingOptimizer | Foreign"


def updater_of(optimizer: torch.optim.Optimizer) -> Updater:
    """Return one of this package's optimizers unchanged, and wrap any other."""
    if isinstance(optimizer, PredictingOptimizer):
        return optimizer
    from .foreign import Foreign  # loaded only where it is used

    return Foreign(optimizer)
