"""Guards of steps, saves and reads of an optimizer, and wrappers of its methods."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache, partial, wraps
from types import MethodType
from typing import Any, NoReturn, TypeVar, cast
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from spectrain_ext.interrupts import deferred

F = TypeVar("F", bound=Callable[..., Any])

_SAVES = nn.Module._save_to_state_dict.__code__
_GUARDED = ("detach", "__deepcopy__", "__reduce_ex__")

# Wrappers of methods.


def without_compiler(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of torch's optimizers without its torch.compiler.disable wrapper.

    The wrapper imports the compiler, 1.0 s in each process (torch 2.13). Unless the compiler is
    imported already, nothing is being compiled.
    """
    if "torch._dynamo" in sys.modules or not hasattr(method, "__wrapped__"):
        return method
    return partial(method.__wrapped__, cast(Any, method).__self__)


def exclusive(method: F) -> F:
    """Make a method exclusive to one thread at a time, and defer Ctrl-C until it returns."""

    @wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with deferred(), self._lock:
            return method(self, *args, **kwargs)

    return cast(F, alone)


# Guards.


class Ordered:
    """Synchronizes reading and loading of state with an owner that steps on other streams."""

    _order: WeakMethod[Callable[[], AbstractContextManager[object]]] | None = None

    def order_by(self, ordered: Callable[[], AbstractContextManager[object]]) -> None:
        """Enter the context manager from this bound method when state is read or loaded.

        An owner that steps on its own streams orders them with the caller's there. Only a weak
        reference to it is kept.
        """
        self._order = WeakMethod(ordered)

    def owner_ordered(self) -> AbstractContextManager[object]:
        ordered = None if self._order is None else self._order()
        return nullcontext() if ordered is None else ordered()


class SaveGuard:
    """Makes ``state_dict``, ``torch.save``, pickle and deepcopy of parameters raise RuntimeError.

    torch's hooks belong to modules, but any module may hold the parameters. So attributes of the
    parameters shadow their class's: ``detach``, if ``nn.Module._save_to_state_dict`` calls it, and
    the methods that ``copy`` and ``pickle`` use. Compiled code ignores them. ``why`` is the error
    message, with the remedy.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def put(self, params: Iterable[Tensor]) -> None:
        for p in params:
            guards = (partial(self._detach, p), self._copy, self._copy)
            vars(p).update(zip(_GUARDED, guards, strict=True))

    def take(self, params: Iterable[Tensor]) -> None:
        """Allow saving again; may be called repeatedly or without a ``put``."""
        for p in params:
            for name in _GUARDED:
                vars(p).pop(name, None)

    def lift(self, params: Iterable[Tensor]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Allow saving; return the parameters' attributes, and with what to update them again."""
        attributes = [vars(p) for p in params]
        return [(own, {k: own.pop(k) for k in _GUARDED if k in own}) for own in attributes]

    def _detach(self, p: Tensor) -> Tensor:
        if not is_compiling() and sys._getframe(1).f_code is _SAVES:
            raise RuntimeError(f"state_dict: {self._why}")
        return Tensor.detach(p)

    def _copy(self, *_: Any) -> NoReturn:
        raise RuntimeError(f"copying or pickling a module: {self._why}")


class StepGuard:
    """Makes an optimizer's ``step``, ``zero_grad`` and modes, and its scheduler's ``step``, raise.

    Not by hooks, which ``zero_grad`` and schedulers do not have. Attributes of the optimizer shadow
    its class's methods; a scheduler, whose ``state_dict`` has all its attributes, gets a subclass.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        self._attributes: dict[str, Any] = getattr(optimizer, "__dict__", {})
        self._scheduler = scheduler
        self._refused = {k: call for k, call in _REFUSED.items() if hasattr(optimizer, k)}
        self._before: tuple[dict[str, Any], type] | None = None  # while the guard is put

    def put(self) -> None:
        attributes, scheduler = self._attributes, self._scheduler
        kind: Any = type(scheduler)
        self._before = (
            {name: attributes[name] for name in self._refused if name in attributes},
            kind,
        )
        attributes.update(self._refused)
        if scheduler is not None:
            with suppress(TypeError):  # of a class that allows no such subclass
                scheduler.__class__ = _refusing(kind)

    def take(self) -> None:
        """Allow the methods again; may be called repeatedly or without a ``put``."""
        if self._before is None:
            return
        attributes, kind = self._before
        for name in self._refused:
            self._attributes.pop(name, None)
        self._attributes.update(attributes)
        if self._scheduler is not None:
            self._scheduler.__class__ = kind
        self._before = None  # last: an exception in between, as by a second Ctrl-C, leaves it


def refuse_call(name: str, *_: object, **__: object) -> NoReturn:
    raise RuntimeError(
        f"{name}: a run of the pipeline has not ended; it steps its optimizers and schedulers and "
        "clears the gradients itself, so leave this call out; 'Inside the loop' in docs/loops.md "
        "says what to do instead"
    )


# Methods, as torch's schedulers expect when they wrap an optimizer's ``step``.
_REFUSED = {name: MethodType(refuse_call, name) for name in ("step", "zero_grad", "train", "eval")}


@lru_cache(maxsize=64)
def _refusing(kind: type) -> type:
    """Return a subclass of a scheduler's class, under its name, that cannot step."""

    def step(_: object, *args: object, **more: object) -> None:
        refuse_call("step")

    body = {"__module__": kind.__module__, "__slots__": (), "step": step}
    return type(kind)(kind.__name__, (kind,), body)
