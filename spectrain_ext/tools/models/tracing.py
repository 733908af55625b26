"""Traces a model by torch.export in training and evaluation mode, without changing it."""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import MethodType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from spectrain_ext.modules import modes_kept, slots_of, untouched
from spectrain_ext.rng import forked_rng
from spectrain_ext.transport import tensors_in

from .outline import Columns, hooked
from .programs import Mode, Program, programs_of
from .stand_ins import close

MODE_NAMES = {True: "in training", False: "in evaluation", None: "as it is"}

#: The stages of a model in one mode, each with its state.
TracedModel = list[tuple[Program, dict[str, Tensor]]]


def traces(
    model: nn.Module,
    columns: Columns,
    arguments: tuple[Tensor, ...],
    begins: set[nn.Module],  # each begins a stage
    once: bool,  # only the present mode, for these sizes
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
    trace = _exported(model, columns, arguments, name, dynamic=True)
    program = trace[0][0]
    size = arguments[0].shape[0] if arguments and arguments[0].dim() else 0
    sampled = [a.dim() > 0 and a.shape[0] == size for a in arguments]
    pairs = zip(arguments, sampled, strict=True)
    single = tuple(a[:1] if many else a for a, many in pairs)
    if size > 1 and program.shape_error(single) is None and program.branch_error(single):
        # Often it is only torch that computes the same otherwise, because strides are free.
        program.sampled = sampled
        program.single_sample_error = _difference(model, columns, single, trace)
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
    with _recording_dropped_backwards() as dropped, _undoing_draws() as drawn, patch:
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
    if dropped:
        raise RuntimeError(
            f"the model has a backward of its own {name}, {', '.join(sorted(dropped))}, and a "
            "graph would have its forward's derivative; make it a torch.library.custom_op"
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
    python, numpys = random.getstate(), numpy.random.get_state(legacy=False)
    try:
        yield drawn
    finally:
        now = numpy.random.get_state(legacy=False)
        if random.getstate() != python:
            drawn.append("Python's random")
        if repr(now) != repr(numpys):  # its position changes with each draw
            drawn.append("numpy.random")
        random.setstate(python)
        numpy.random.set_state(numpys)


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
    dropped: set[str] = set()
    thread = threading.get_ident()

    def recording(real: Any, kind_of: Callable[[Any], str | None]) -> Any:
        def recorded(subject: Any, *args: Any, **kwargs: Any) -> Any:
            kind = kind_of(subject) if threading.get_ident() == thread else None
            if kind is not None:
                dropped.add(kind)
            return real(subject, *args, **kwargs)

        return recorded

    def kind_of_function(function: type) -> str | None:
        # torch's own are derivatives of its operations, except a module's backward hooks.
        if not torch.is_grad_enabled():
            return None
        if function.__name__ == "BackwardHookFunction":
            return "a module's backward hook"
        is_torchs = function.__module__.startswith("torch.")
        return None if is_torchs else f"autograd.Function {function.__name__}"

    def kind_of_inference(inference: torch.inference_mode) -> str | None:
        return "torch.inference_mode, where no_grad would do" if inference.mode else None

    def apply_to(function: type, *args: Any, **kwargs: Any) -> Any:
        return apply.__get__(None, function)(*args, **kwargs)  # implemented in C since torch 2.15

    apply: Any = vars(torch.autograd.Function)["apply"]
    applied: Any = classmethod(recording(apply_to, kind_of_function))
    registered = recording(torch.Tensor.register_hook, lambda _: "a tensor's register_hook")
    entered = recording(torch.inference_mode.__enter__, kind_of_inference)
    with (
        _patching,
        _patched(torch.inference_mode, "__enter__", entered),
        _patched(torch.autograd.Function, "apply", applied),
        _patched(torch.Tensor, "register_hook", registered),
    ):
        yield dropped


@contextmanager
def _switching_modes(model: nn.Module) -> Iterator[Callable[[bool], None]]:
    """Yield a function that calls the model's train() or eval(); undo on exit what these do."""
    # A module's own train() may merge weights. The graphs of the two modes would then compute with
    # different weights than the stages hold, so refuse that.
    within = {
        inner
        for module in model.modules()
        if type(module).train is not nn.Module.train
        or type(module).eval is not nn.Module.eval
        or not {"train", "eval"}.isdisjoint(vars(module))
        for inner in module.modules()
    }
    before = {
        name: (tensor, tensor.detach().clone())
        for owner, _, name, tensor in slots_of(model)
        if owner in within
    }
    training = model.training

    def switch(mode: bool) -> None:
        call = model.train if mode else model.eval
        call()
        present = {tensor for _, _, _, tensor in slots_of(model)}
        for name, (tensor, value) in before.items():
            if tensor not in present or not torch.equal(tensor, value):
                raise RuntimeError(
                    f"the model's own {'train()' if mode else 'eval()'} changes {name!r}; "
                    "cut the model in that mode, or evaluate the whole model"
                )

    try:
        yield switch
    finally:
        if within:
            model.train(training)
        for tensor, value in before.values():
            tensor.data.copy_(value)
