"""Traces a model by torch.export in training and evaluation mode, without changing it."""

from __future__ import annotations

import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from spectrain_ext.transport.message import tensors_in

from .outline import BY_POSITION, Columns, hooked, modes_kept
from .profile import forked_rng, untouched
from .programs import Mode, Program, programs_of
from .tensors import close

MODE_NAMES = {True: "in training", False: "in evaluation", None: "as it is"}

#: The stages of a model in one mode, each with its state.
TracedModel = list[tuple[Program, dict[str, Tensor]]]


def traces(
    model: nn.Module,
    arguments: tuple[Tensor, ...],
    begins: set[nn.Module],  # each begins a stage
    once: bool = False,  # only the present mode, for these sizes
    columns: Columns = BY_POSITION,
) -> dict[Mode, TracedModel | str]:
    """Trace a model in its present mode (first in the result), in training and in evaluation."""
    by_mode: dict[Mode, TracedModel | str] = {}
    with (
        torch.enable_grad(),
        _marked(begins),
        _with_signature(model, columns),
        modes_kept(model),
        _switching_modes(model) as switch,
        _refusing_assigned_buffers(model),
    ):
        if once:
            return {None: _exported(model, columns, arguments, MODE_NAMES[None])}
        original = [module.training for module in model.modules()]
        first = _sized(model, columns, arguments, MODE_NAMES[None])
        for mode in (True, False):
            name = MODE_NAMES[mode]
            try:
                switch(mode)
                same = [module.training for module in model.modules()] == original
                by_mode[mode] = first if same else _sized(model, columns, arguments, name)
            except (RuntimeError, ValueError) as error:
                by_mode[mode] = f"the stages cannot do that {name}: {error}"
    if all(traced is not first for traced in by_mode.values()):
        by_mode[None] = first
    return dict(sorted(by_mode.items(), key=lambda item: item[1] is not first))


def _sized(
    model: nn.Module, columns: Columns, arguments: tuple[Tensor, ...], name: str
) -> TracedModel:
    """Trace a model for all sizes that it treats alike."""
    size = arguments[0].shape[0] if arguments and arguments[0].dim() else 0
    sampled = [size > 0 and a.dim() > 0 and a.shape[0] == size for a in arguments]
    pairs = list(zip(arguments, sampled, strict=True))
    if size != 1:
        trace = _exported(model, columns, arguments, name, dynamic=True)
        arguments = tuple(a[:1] if many else a for a, many in pairs)
    else:  # torch.export takes a size of 1 for a constant
        try:
            two = tuple(torch.cat([a, a]).detach() if many else a for a, many in pairs)
            trace = _exported(model, columns, two, name, dynamic=True)
            if (why := trace[0][0].shape_error(arguments)) is not None:
                raise ValueError(why)
        except (RuntimeError, ValueError):
            return _exported(model, columns, arguments, name, dynamic=True)
    program = trace[0][0]
    if size and program.shape_error(arguments) is None and program.branch_error(arguments):
        # Often it is only torch that computes the same otherwise, because strides are free.
        program.sampled = sampled
        program.single_sample_error = _difference(model, columns, arguments, trace)
    return trace


def _difference(
    model: nn.Module, columns: Columns, arguments: tuple[Tensor, ...], trace: TracedModel
) -> str | None:
    """Return what a model does otherwise than its trace, or None."""
    args, kwargs = columns.arguments(arguments)
    try:
        with torch.no_grad(), untouched(model), forked_rng([model]):
            torch.manual_seed(0)
            expected = list(tensors_in(model(*args, **kwargs)))
            torch.manual_seed(0)
            value: Any = arguments
            for program, state in trace:
                value = program(value if isinstance(value, tuple) else (value,), [*state.values()])
            pairs = zip(tensors_in(value), expected, strict=True)
            same = all(a.shape == b.shape and close(a, b) for a, b in pairs)
    except Exception as error:  # for example BatchNorm refuses one sample
        return f"{type(error).__name__}: {error}"
    return None if same else "the model does something else with one"


def _exported(
    model: nn.Module,
    columns: Columns,
    arguments: tuple[Tensor, ...],
    name: str,
    dynamic: bool = False,  # for other sizes too, as far as the model allows
) -> TracedModel:
    from torch.export import Dim, export
    from torch.fx.experimental import _config

    args, kwargs = columns.arguments(arguments)
    shapes = None
    if dynamic:
        sizes = tuple(
            {d: Dim.AUTO if not d or n > 1 else Dim.STATIC for d, n in enumerate(argument.shape)}
            for argument in arguments
        )
        given, named = columns.arguments(sizes)
        shapes = named or given
    patch = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with _recording_dropped_backwards() as own, _undoing_draws() as drawn, patch:
        try:
            exported = None
            if shapes is not None:
                with suppress(Exception):  # it may work with static sizes
                    exported = export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
            if exported is None:
                exported = export(model, args, kwargs, strict=False)
        except Exception as error:
            what = str(error).strip().partition("\n")[0]  # torch appends a long report
            if " in output, which is not a known type." in what:
                what = what.partition(" If this")[0] + (
                    " Put the model into a module whose forward returns tensors, such as "
                    "model(..., use_cache=False).logits"
                )
            raise RuntimeError(
                f"torch.export cannot trace the model {name}: {type(error).__name__}: {what}"
            ) from error
    if drawn:
        raise RuntimeError(
            f"the model draws from {drawn[-1]} {name}, and those numbers would be constants; draw "
            "by torch"
        )
    if own:
        raise RuntimeError(
            f"the model has a backward of its own {name}, {', '.join(sorted(own))}, and a graph "
            "would have its forward's derivative; make it a torch.library.custom_op"
        )
    return programs_of(exported)


@contextmanager
def _marked(begins: set[nn.Module]) -> Iterator[None]:
    """Mark in the trace where these modules begin."""
    from torch.distributed.pipelining import pipe_split  # it doubles this package's import time

    def marked(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        pipe_split()
        return forwards[module](*args, **kwargs)

    forwards = {module: module.forward for module in begins}
    with ExitStack() as stack:
        for module in forwards:
            stack.enter_context(_patched(module, "forward", MethodType(marked, module)))
        yield


@contextmanager
def _with_signature(model: nn.Module, columns: Columns) -> Iterator[None]:
    """Give the forward a signature with the columns: dynamic_shapes rejects ``**``."""
    if columns.whole or not columns.takes:
        yield
        return
    real = model.forward

    def forward(**given: Tensor) -> Any:
        return real(**given, **columns.fixed)

    parameters = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in columns.takes]
    vars(forward)["__signature__"] = inspect.Signature(parameters)
    with _patched(model, "forward", forward):
        yield


@contextmanager
def _patched(owner: Any, name: str, value: object) -> Iterator[None]:
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if own is None else setattr(owner, name, own)


@contextmanager
def _undoing_draws() -> Iterator[list[str]]:
    """Undo draws from generators that torch.export does not trace, and list these."""
    drawn: list[str] = []
    python, numpy = random.getstate(), sys.modules.get("numpy")
    legacy = None if numpy is None else numpy.random.get_state(legacy=False)
    try:
        yield drawn
    finally:
        if random.getstate() != python:
            random.setstate(python)
            drawn.append("Python's random")
        if numpy is not None and legacy is not None:
            before, now = legacy["state"], numpy.random.get_state(legacy=False)["state"]
            if before["pos"] != now["pos"] or (before["key"] != now["key"]).any():
                numpy.random.set_state(legacy)
                drawn.append("numpy.random")


@contextmanager
def _refusing_assigned_buffers(model: nn.Module) -> Iterator[None]:
    """Raise if the forward assigns to a saved buffer, which torch.export may leave out."""
    saved = model.state_dict(keep_vars=True).keys()
    before: dict[str, Tensor] = {}
    assigned: set[str] = set()

    def begin(*_: object) -> None:
        before.update(model.named_buffers())

    def end(*_: object) -> None:
        now = model.named_buffers()
        assigned.update(name for name, b in now if name in saved and b is not before.get(name))

    with hooked([model], begin, end):
        yield
    if assigned:
        raise RuntimeError(
            f"the model's forward assigns to the module buffer {', '.join(sorted(assigned))}, and "
            "a graph would leave that out; change it in place, as by copy_()"
        )


_patching = threading.RLock()  # held while functions of torch are replaced


@contextmanager
def _recording_dropped_backwards() -> Iterator[set[str]]:
    """Collect parts of the model's backward that torch.export drops silently."""
    own: set[str] = set()
    thread = threading.get_ident()
    apply: Any = vars(torch.autograd.Function)["apply"]
    register: Any = torch.Tensor.register_hook
    enter: Any = torch.inference_mode.__enter__

    def applied(cls: type, *given: Any, **more: Any) -> Any:
        if torch.is_grad_enabled() and threading.get_ident() == thread:
            # torch's own are derivatives of its operations, except a module's backward hooks.
            if cls.__name__ == "BackwardHookFunction":
                own.add("a module's backward hook")
            elif not cls.__module__.startswith("torch."):
                own.add(f"autograd.Function {cls.__name__}")
        return apply.__get__(None, cls)(*given, **more)  # implemented in C since torch 2.15

    def registered(tensor: Tensor, hook: Any) -> Any:
        if threading.get_ident() == thread:
            own.add("a tensor's register_hook")
        return register(tensor, hook)

    def entered(inference: torch.inference_mode) -> None:
        if inference.mode and threading.get_ident() == thread:
            own.add("torch.inference_mode, where no_grad would do")
        enter(inference)

    with (
        _patching,
        _patched(torch.inference_mode, "__enter__", entered),
        _patched(torch.autograd.Function, "apply", classmethod(applied)),
        _patched(torch.Tensor, "register_hook", registered),
    ):
        yield own


@contextmanager
def _switching_modes(model: nn.Module) -> Iterator[Callable[[bool], None]]:
    """Yield a function that calls the model's train() or eval(); undo on exit what these do."""
    own_code = [
        module
        for module in model.modules()
        if type(module).train is not nn.Module.train
        or type(module).eval is not nn.Module.eval
        or not {"train", "eval"}.isdisjoint(vars(module))
    ]
    names = {t: name for name, t in (*model.named_parameters(), *model.named_buffers())}
    before = {
        tensor: (tensor.detach().clone(), tensor.requires_grad)
        for module in own_code
        for tensor in (*module.parameters(), *module.buffers())
    }
    training = model.training

    def switch(mode: bool) -> None:
        if mode:
            model.train()
        else:
            model.eval()
        # A module's own train() may also merge weights. The graphs of the two modes would then
        # compute with different weights than the stages hold, so refuse that.
        present = {id(t) for t in (*model.parameters(), *model.buffers())}
        for tensor, (value, learns) in before.items():
            if (
                id(tensor) not in present
                or tensor.requires_grad != learns
                or not torch.equal(tensor, value)
            ):
                raise RuntimeError(
                    f"the model's own {'train()' if mode else 'eval()'} changes {names[tensor]!r}; "
                    "cut the model in that mode, or evaluate the whole model"
                )

    try:
        yield switch
    finally:
        try:
            if own_code:
                model.train(training)
        finally:
            with torch.no_grad():
                for tensor, (value, learns) in before.items():
                    if not torch.equal(tensor, value):
                        tensor.data.copy_(value)
                    if tensor.requires_grad != learns:
                        tensor.requires_grad_(learns)
