"""Adapts any optimizer with torch's interface to the interface that a stage's storage needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .guards import Ordered
from .parameter_table import Views
from .state import laid_out_as
from .swaps import Swap, swapped


class Foreign(Ordered):
    """Wraps a user's optimizer as an ``Updater`` that cannot predict and keeps its own state.

    With wider master weights, a parameter and its gradient have that dtype during a step. Optimizer
    state has it until ``unbind``, also after loading.
    """

    predicts = False
    buffer_keys = ()

    # Requirement: the optimizer reads its parameters and gradients again in each step, and changes
    # parameters in place or assigns data of the same shape.
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._forget()
        with suppress(AttributeError):  # wrappers that never call torch's ``__init__``
            # Weak references: the optimizer may outlive the pipeline and its buffers.
            optimizer.register_state_dict_post_hook(_weak(self._copied))
            optimizer.register_load_state_dict_pre_hook(_weak(self._before_load))
            optimizer.register_load_state_dict_post_hook(_weak(self._after_load))

    def _forget(self) -> None:
        self._buffers: Mapping[str, Views] | None = None
        self._master: Views | None = None
        self._wide: dict[Tensor, Tensor] = {}  # parameters with a wider master, and the master
        self._params: tuple[Tensor, ...] = ()
        self._known: dict[tuple[int, ...], list[Swap]] = {}  # by addresses
        self._loading: dict[str, Any] | None = None

    # Binding.

    def state_dtype(self, param: Tensor, weight: torch.dtype) -> torch.dtype:
        return weight

    def bind(
        self, master: Views | None, buffers: Mapping[str, Views], correction: object = None
    ) -> None:
        """Make steps on ``master``; there is no correction, see ``check_optimizer``."""
        self._forget()
        self._params = tuple(p for group in self._optimizer.param_groups for p in group["params"])
        self._master = master
        if master is not None:
            self._wide = {p: master[p] for p in self._params if master[p].dtype != p.dtype}
        self._buffers = buffers
        for p, true in self._wide.items():
            self._convert_state(p, true)

    def unbind(self) -> None:
        for p in self._wide:
            self._convert_state(p, p)
        self._forget()

    def is_bound_to(self, buffers: Mapping[str, Views]) -> bool:
        return self._buffers is buffers

    def update_in(self, views: Views) -> None:
        self._master = views

    # The step.

    def step(self, factor: float = 1.0, write: object = None) -> bool:
        """Run the optimizer's step on the true weights, with ``factor`` times its learning rates.

        Returns True: others' code has run.
        """
        with self._on_true_weights("step"), self._scaled_rates(factor):
            self._optimizer.step()
        return True

    def set_mode(self, mode: Literal["train", "eval"]) -> None:
        """Call the optimizer's ``train`` or ``eval``, if it has both, on the true weights.

        Schedule-Free optimizers train one sequence of weights and evaluate another; the calls turn
        one into the other in place.
        """
        if self.has_modes:
            with self._on_true_weights(mode):
                getattr(self._optimizer, mode)()

    @property
    def has_modes(self) -> bool:
        """Whether the optimizer has different weights for training and evaluation."""
        modes = (getattr(self._optimizer, mode, None) for mode in ("train", "eval"))
        return all(map(callable, modes))

    @contextmanager
    def _on_true_weights(self, doing: str) -> Iterator[None]:
        # Parameters and true weights may each be in any of several buffers.
        at = id(self._master), *(p.data_ptr() for p in self._params)  # an empty one has none: 0
        if at not in self._known:
            self._known[at] = [Swap.of(p, self._master) for p in self._params]
        name = type(self._optimizer).__name__
        with swapped(self._known[at], f"{name}: its {doing}"):
            try:
                yield
            except BaseException as error:
                error.add_note(
                    f"the {doing} of {name} was cut short: of the stage's true weights and "
                    "optimizer state some may have been updated and others not"
                )
                raise

    @contextmanager
    def _scaled_rates(self, factor: float) -> Iterator[None]:
        if factor == 1.0:
            yield
            return
        scaled: dict[int, tuple[Any, Any]] = {}  # by group: the caller's rate, and the step's
        groups = self._optimizer.param_groups

        def scale(*_: object) -> None:
            for index, group in enumerate(groups):
                if index not in scaled or group["lr"] is not scaled[index][1]:
                    scaled[index] = group["lr"], group["lr"] * factor
                    group["lr"] = scaled[index][1]

        with ExitStack() as held:
            with suppress(AttributeError):  # again after the caller's hooks, which may set rates
                held.enter_context(self._optimizer.register_step_pre_hook(scale))
            try:
                scale()
                yield
            finally:
                for index, (rate, scaled_rate) in scaled.items():
                    if groups[index]["lr"] is scaled_rate:
                        groups[index]["lr"] = rate

    # State that the caller reads or loads.

    def _copied(self, _: object, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self._buffers is None:
            return state_dict
        with self.owner_ordered():
            state = _mapped(state_dict["state"], lambda tensor: tensor.detach().clone())
            return {**state_dict, "state": state}

    def _before_load(self, _: object, state_dict: dict[str, Any]) -> None:
        with self.owner_ordered():
            self._loading = state_dict if self._wide else None

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo torch's cast of state to the parameters' dtypes, and use the parameters' strides."""
        loading, self._loading = self._loading, None
        with self.owner_ordered():
            if loading is not None:
                saved_groups = loading["param_groups"]
                for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
                    for p, key in zip(group["params"], saved["params"], strict=True):
                        if p in self._wide and key in loading["state"]:
                            entry = _converted(loading["state"][key], self._wide[p])
                            optimizer.state[p].update(entry)
            for p, entry in _state_of(optimizer).items():
                if isinstance(p, Tensor) and isinstance(entry, dict):
                    entry.update({key: laid_out_as(p, value) for key, value in entry.items()})

    def loose_state(self) -> list[Tensor]:
        """Return all state tensors on a GPU."""
        leaves = tree_leaves([*_state_of(self._optimizer).values()])
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda]

    def _convert_state(self, p: Tensor, like: Tensor) -> None:
        entry = _state_of(self._optimizer).get(p)
        if isinstance(entry, dict):
            entry.update(_converted(entry, like))


def _state_of(optimizer: torch.optim.Optimizer) -> Any:
    return getattr(optimizer, "state", {})  # a wrapper may keep it elsewhere


def _converted(entry: Mapping[Any, Any], like: Tensor) -> dict[Any, Any]:
    """Convert a parameter's state as torch does when loading it for ``like``."""

    def of(tensor: Tensor) -> Tensor:
        return tensor.to(like.device, like.dtype if tensor.is_floating_point() else tensor.dtype)

    return {key: _mapped(value, of) for key, value in entry.items() if key != "step"}


def _mapped(value: Any, of: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return of(value)
    if type(value) in (list, tuple):  # no subclass, such as torch.Size
        return type(value)(_mapped(member, of) for member in value)
    if isinstance(value, dict):
        return {key: _mapped(member, of) for key, member in value.items()}
    return value


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that does nothing once the method's object is gone."""
    ref = WeakMethod(method)

    def hook(*args: Any) -> Any:
        alive = ref()
        return None if alive is None else alive(*args)

    return hook
