"""Base class of the optimizers: torch.optim's interface over a ``Stepper``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from spectrain_ext.operators.laws import Horizon, as_law

from .guards import exclusive, without_compiler
from .state import Rule, independent
from .stepper import Stepper, has_step_hooks

if TYPE_CHECKING:
    from spectrain_ext.operators.numbers import Corrected

    from .foreign import Foreign


def hooked(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a step in torch's hooks and profiler range only if one of them is in use."""

    def between_hooks(self: PredictingOptimizer, *args: Any, **kwargs: Any) -> Any:
        hooks = self.stepper.hooks
        if hooks is None:
            return func(self, *args, **kwargs)
        keeps = bool(self._optimizer_step_post_hooks or _global_optimizer_post_hooks)
        return hooks.outside(partial(func, self, *args, **kwargs), keeps)

    # The profiler range costs as much as the rest of a small step.
    plain: Callable[..., Any] = torch.optim.Optimizer.profile_hook_step(between_hooks)

    @wraps(func)
    def step(self: PredictingOptimizer, *args: Any, **kwargs: Any) -> Any:
        if has_step_hooks(self):
            return self.stepper.run_hooked(partial(plain, self, *args, **kwargs))
        if torch._C._autograd._profiler_enabled():
            return plain(self, *args, **kwargs)
        return func(self, *args, **kwargs)

    return step


class PredictingOptimizer(torch.optim.Optimizer):
    """Base of this package's optimizers; a subclass adds its rule and torch's class of that name.

    A step is one kernel launch per device for all parameter groups, or two if some groups have
    momentum and others do not. Threads that share an optimizer take turns. Torch does not allow one
    thread to set a ``grad`` while another reads it; the caller must prevent that.

    Attributes:
        stepper: makes steps and predictions; a pipeline uses it directly.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> optimizer = st.optim.SGD([weight], lr=0.25, momentum=0.5)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> with optimizer.predicted(steps=2):
        ...     print(weight.item())
        0.25
    """

    stepper: Stepper
    _rule: Rule
    _state_dtype: torch.dtype | None
    _loading: dict[str, Any] | None = None

    def __init__(self, *args: Any, state_dtype: torch.dtype | None = None, **more: Any) -> None:
        """Take the arguments of torch's class, and `state_dtype`."""
        self._prepare(state_dtype)
        super().__init__(*args, **more)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``GradScaler`` leaves it to the step to unscale and to skip."""
        # Otherwise, also with fused, it does both, and waits for the device.
        flags = [group.get("capturable", False) for group in self.param_groups]
        return bool(self._rule.scalars) and all(flags)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, _: bool) -> None:  # by torch's constructors
        pass

    def _prepare(self, state_dtype: torch.dtype | None) -> None:
        """Prepare for the parameter groups that torch's constructor will add."""
        self._state_dtype = state_dtype
        self._lock = RLock()
        self.stepper = Stepper(self, self._rule, state_dtype, self._lock)

    profile_hook_step = staticmethod(hooked)

    # Parameter groups and state, as torch.optim.Optimizer keeps them.

    @exclusive
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch does; an invalid one raises and is not added.

        RuntimeError while the weights are predicted or the optimizer is bound.
        """
        self.stepper.refuse_while_predicted("add_param_group")
        if self.stepper.is_bound:
            raise RuntimeError(
                "add_param_group: the optimizer is bound to the parameters of a pipeline's stage; "
                "release() the pipeline, and make another one of stages with the new parameters, "
                "or unbind() an optimizer that you have bound yourself"
            )
        without_compiler(super().add_param_group)(param_group)
        try:
            self.stepper.check_group(len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, as in torch."""
        without_compiler(super().zero_grad)(set_to_none)

    @exclusive
    def __getstate__(self) -> dict[str, Any]:
        """Return what deepcopy and pickle keep; RuntimeError while the weights are predicted."""
        self.stepper.refuse_while_predicted("copying or pickling the optimizer")
        kept: dict[str, Any] = super().__getstate__()
        with self.stepper.owner_ordered():
            kept["state"] = type(self.state)(
                dict, ((p, self._saved_entry(entry)) for p, entry in self.state.items())
            )
        kept["_state_dtype"] = self._state_dtype
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the result of ``__getstate__``, or state from ``load_state_dict``."""
        if self._loading is not None:  # before the incomplete state is visible
            from .saved import put_saved

            put_saved(self._rule, self._state_dtype, self.defaults, self._loading, state)
        super().__setstate__(state)
        if "stepper" not in self.__dict__:
            self._prepare(self._state_dtype)
        elif self._loading is not None:
            self.stepper.read_state()

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """Return the state with the keys of torch's class of the same name.

        Scalar state, and all state of a bound optimizer, is copied, because torch.save would write
        the whole buffer behind a view.
        """
        with self.stepper.owner_ordered():
            result: dict[str, Any] = without_compiler(super().state_dict)()
            result["state"] = {k: self._saved_entry(v) for k, v in result["state"].items()}
            return result

    def _saved_entry(self, entry: Any) -> Any:
        rule = self._rule
        return independent(entry, rule.all_keys if self.stepper.is_bound else tuple(rule.scalars))

    @exclusive
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class or of torch's class of the same name.

        Buffers get ``state_dtype`` if it was given. Otherwise float32 buffers of a 16-bit
        parameter stay float32, and all others get the parameter's dtype, or in a bound optimizer
        that of the bound buffers. ValueError or TypeError if the state does not fit; nothing
        changes then. RuntimeError while the weights are predicted.
        """
        self.stepper.refuse_while_predicted("load_state_dict")
        from .saved import without_state

        def take_state(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            if self._loading is None:  # else an earlier hook, left by an exception, set it
                self._loading = saved
            return without_state(self._rule, saved)

        handle = self.register_load_state_dict_pre_hook(take_state)  # after the caller's
        try:
            with self.stepper.owner_ordered():
                without_compiler(super().load_state_dict)(state_dict)
        finally:
            self._loading = None
            handle.remove()

    # The step.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the result of ``closure``.

        Everything is checked before anything is written. RuntimeError while the weights are
        predicted or for a sparse gradient; ValueError or TypeError for a hyperparameter out of
        range or a gradient that does not match its parameter. As in torch, Ctrl-C can interrupt a
        step halfway; within a pipeline's run it waits for the end of the step.
        """
        stepper = self.stepper
        if (
            self._rule.scalars
            and not self._step_supports_amp_scaling
            and torch.cuda.is_initialized()
            and torch.cuda.is_current_stream_capturing()
        ):
            raise RuntimeError(
                "step: a captured CUDA graph would repeat this step's count forever; with "
                "capturable=True it is counted in memory"
            )
        loss = None
        if closure is not None:
            stepper.refuse_while_predicted("step")
            with torch.enable_grad():
                loss = closure()
        stepper.step(by_optimizer=True)
        return loss

    # Prediction in place.

    def check_can_predict(self, law: Horizon = 1.0) -> None:
        """Raise ValueError naming the first group that has no momentum for a law."""
        self.stepper.check_law(as_law(law))

    def check_correction(self, correction: Corrected | None) -> None:
        """Raise ValueError naming the first group for which a correction is undefined."""
        self.stepper.check_correction(correction)

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
        self.stepper.predict_in_place(as_law(steps))

    @exclusive
    def restore_(self) -> None:
        """Restore the weights that :meth:`predict_` replaced, bit for bit; else RuntimeError."""
        self.stepper.restore()

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
            if self.stepper.has_predicted:
                self.restore_()


#: Makes the steps of a stage's optimizer.
Updater: TypeAlias = "Stepper | Foreign"


def updater_of(optimizer: torch.optim.Optimizer) -> Updater:
    """Return the stepper of one of this package's optimizers, and wrap any other."""
    if isinstance(optimizer, PredictingOptimizer):
        return optimizer.stepper
    from .foreign import Foreign  # loaded only where it is used

    return Foreign(optimizer)
