"""Checks the arguments of a pipeline; every error names the argument, the place and the remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import signature
from itertools import chain
from types import MethodType
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from spectrain_ext import _C
from spectrain_ext.method import Method, microbatches_of
from spectrain_ext.schedule import Replicas

_TRAINED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def checked_stages(stages: Iterable[nn.Module], sharded: bool = False) -> list[nn.Module]:
    """Return the stages as a list of modules; they may share parameters, but not modules.

    ``sharded``: parameters may be DTensors.
    """
    try:
        modules = list(stages)
    except TypeError:
        raise TypeError(
            f"stages: expected a sequence of modules, got {type(stages).__name__}; "
            "st.partition(model, n, example_input) cuts a model into stages"
        ) from None
    if not modules:
        raise ValueError("stages: expected at least one module, got an empty list")
    owners: dict[nn.Module, tuple[int, str]] = {}
    for k, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise TypeError(f"stages[{k}]: expected an nn.Module, got {module!r:.80}")
        for old in ("tied_parameters", "full_name"):
            if hasattr(module, old):
                raise TypeError(
                    f"stages[{k}]: its {old!r} is not read any more; stage.cut = "
                    "spectrain_ext.partitioning.Cut(ties=..., prefixes=...) says this of a stage"
                )
        parts = {part: name for name, part in module.named_modules()}
        for part, name in parts.items():
            if part in owners:
                other, its_name = owners[part]
                if part is module is modules[other]:
                    raise ValueError(
                        f"stages[{k}]: it is stages[{other}] again, the very same module; a stage "
                        "needs one of its own, such as copy.deepcopy of it"
                    )
                raise ValueError(
                    f"stages[{k}]: its module {name!r} is module {its_name!r} of stages[{other}] "
                    "as well; stages may share parameters: give each a module of its own, and the "
                    "later one the earlier one's parameters, as head.weight = embedding.weight does"
                )
            where = f"stages[{k}]: {f'its module {name!r}' if name else 'it'}"
            if _is_named(part, "FSDPModule"):
                raise TypeError(
                    f"{where} is sharded by fully_shard (FSDP2), which frees and gathers weights "
                    "around each forward and backward, and a pipeline's weight versions must stay "
                    "in its own buffers; give the module without it. DistributedPipeline(..., "
                    "replicas=...) trains replicas of a stage, group=mesh tensor-parallel ones, "
                    "and ZeroRedundancyOptimizer shards the optimizer's state"
                )
            for wrapper in ("DistributedDataParallel", "FullyShardedDataParallel"):
                if not _is_named(part, wrapper):
                    continue
                raise TypeError(
                    f"{where} is wrapped in {wrapper}, whose replicas would drift apart: it waits "
                    "for gradients in backwards of its own; give the module without it, and "
                    "DistributedPipeline(..., replicas=...) for replicas of a stage"
                )
            if isinstance(part, torch.jit.ScriptModule):
                raise TypeError(
                    f"{where} is a {type(part).__name__} of torch.jit, whose code and buffers are "
                    "not Python's; give the module that it was made of, or torch.compile of that"
                )
            if getattr(part.__dict__.get("forward"), "__module__", "") == "torch.cuda.graphs":
                raise ValueError(
                    f"{where} was captured in CUDA "
                    "graphs, as by torch.cuda.make_graphed_callables, which replay the weights' "
                    "addresses of then; in a pipeline weights have several; give it uncaptured"
                )
        owners.update((part, (k, name)) for part, name in parts.items())
        for name, p in module.named_parameters():
            if is_lazy(p):
                raise ValueError(
                    f"stages[{k}]: parameter {name!r} is not initialized; run a forward of the "
                    "module first"
                )
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            if _is_named(tensor, "DTensor") and not (sharded and kind == "parameter"):
                raise TypeError(
                    f"stages[{k}]: {kind} {name!r} is a DTensor, as tensor parallelism makes; "
                    "parameters may be DTensors in a DistributedPipeline(..., group=mesh), with a "
                    "mesh that has the dimensions 'pp' and 'tp'"
                )
            if tensor.is_inference():
                raise ValueError(
                    f"stages[{k}]: {kind} {name!r} was made in inference mode and cannot be "
                    "trained with; make or load the module outside of it, or give "
                    "copy.deepcopy(module), made outside"
                )
            if kind == "parameter" and tensor.requires_grad and tensor.dtype not in _TRAINED:
                remedy = "freeze it by requires_grad_(False)"
                if tensor.is_complex():
                    remedy += ", or keep torch.view_as_real of it, and view_as_complex in forward"
                raise TypeError(
                    f"stages[{k}]: parameter {name!r} is {tensor.dtype}, and a pipeline trains "
                    f"float32, float64, float16 and bfloat16; {remedy}"
                )
            if tensor.is_meta:
                raise ValueError(
                    f"stages[{k}]: {kind} {name!r} is on the meta device and has no value; "
                    "materialize(stage, folder) gives it one"
                )
    return modules


def _is_named(thing: object, name: str) -> bool:
    """Whether one of its classes is torch's of that name, without importing torch.distributed."""
    classes = type(thing).__mro__
    return any(c.__name__ == name and c.__module__.startswith("torch.") for c in classes)


#: A module's index among the stages of a cut, and their number; None: it is not from a cut.
CutPlace: TypeAlias = "tuple[int, int] | None"


def check_order(places: Sequence[CutPlace]) -> None:
    """Refuse stages of one cut in another order, repeated, or with some left out."""
    remedy = "give all stages of a cut in their order, and a module in the place of one left out"
    at, previous = -1, None
    for index, place in enumerate(places):
        if place is None:
            continue
        k, n = place
        what = f"stages[{index}]: it is stage {k} of the {n} that a model was cut into"
        has_own_modules = index - at > 1  # the user's own modules stand between
        if previous is None or (previous[0] == previous[1] - 1 and k == 0):
            if k > 0 and not has_own_modules:
                raise ValueError(f"{what}, and stage {k - 1} is not before it; {remedy}")
        elif n != previous[1] or k <= previous[0] or (k > previous[0] + 1 and not has_own_modules):
            raise ValueError(
                f"{what}, and comes after stage {previous[0]} of {previous[1]}; {remedy}"
            )
        at, previous = index, place
    if previous is not None and previous[0] < previous[1] - 1 and at == len(places) - 1:
        k, n = previous
        raise ValueError(
            f"stages[{at}]: it is stage {k} of the {n} that a model was cut into, and stage "
            f"{k + 1} does not come after it; {remedy}"
        )


def devices_of(modules: Sequence[nn.Module]) -> list[torch.device]:
    """Return each module's device; one without tensors gets its predecessor's, or else the next."""
    of_stages: list[torch.device | None] = []
    for k, module in enumerate(modules):
        device = None
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            if device is None:
                device, first = tensor.device, name
            elif tensor.device != device:
                raise ValueError(
                    f"stages[{k}]: {first!r} is on {device} and {name!r} on {tensor.device}; a "
                    "stage must be on one device"
                )
        if device is not None:
            if device.type not in ("cpu", "cuda"):
                raise ValueError(
                    f"stages[{k}]: expected it on the CPU or on CUDA, it is on {device}"
                )
            _check_native(device, f"stages[{k}]")
        of_stages.append(device)
    known = next((device for device in of_stages if device is not None), torch.device("cpu"))
    devices = []
    for device in of_stages:
        known = known if device is None else device
        devices.append(known)
    return devices


def checked_devices(devices: Sequence[torch.device | str | int], stages: int) -> list[torch.device]:
    """Return one usable device per stage, each with its index."""
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise TypeError(f"devices: expected a sequence of {stages} devices, got {devices!r}")
    if len(devices) != stages:
        raise ValueError(f"devices: expected one per stage ({stages}), got {len(devices)}")
    checked = []
    for k, named in enumerate(devices):
        try:
            device = torch.device(named)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"devices[{k}]: {named!r} is not a device: {error}") from None
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"devices[{k}]: expected the CPU or a CUDA device, got {device}")
        if device.type == "cuda":
            device = _checked_cuda(device, k)
        checked.append(device)
    return checked


def _checked_cuda(device: torch.device, k: int) -> torch.device:
    if not torch.cuda.is_available():
        why = (
            "torch is built without CUDA"
            if torch.version.cuda is None
            else "torch finds no usable GPU or driver"
        )
        raise RuntimeError(
            f"devices[{k}]: {device} was asked for, but there is no CUDA device here ({why})"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise RuntimeError(
            f"devices[{k}]: {device} was asked for, but there are only "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    device = torch.device("cuda", index)
    _check_native(device, f"devices[{k}]")
    return device


def _check_native(device: torch.device, where: str) -> None:
    """Raise unless this package has its CUDA kernels; torch with CUDA is not enough."""
    if device.type == "cuda":
        try:
            _C.require_cuda()
        except RuntimeError as error:
            raise RuntimeError(f"{where}: it is on {device}, but {error}") from None


def checked_microbatches(microbatches: object, method: Method, replicas: Replicas) -> int:
    """Return the number of microbatches; ``"auto"`` is the method's usual number."""
    if microbatches == "auto":
        return microbatches_of(method, replicas.stages, replicas)
    if isinstance(microbatches, bool) or not isinstance(microbatches, int):
        raise TypeError(
            f"microbatches: expected an int or 'auto', got {type(microbatches).__name__}"
        )
    if microbatches < 1:
        raise ValueError(f"microbatches: expected at least 1, got {microbatches}")
    return microbatches


def check_master_dtype(master_dtype: object, modules: Sequence[nn.Module]) -> None:
    """Refuse dtypes that the kernels do not support, and warn of 16-bit weights without masters."""
    if master_dtype not in (None, torch.float32):
        raise ValueError(
            f"master_dtype: expected torch.float32, or None for none, got {master_dtype!r}"
        )
    narrow = (
        (k, name, p.dtype)
        for k, module in enumerate(modules)
        for name, p in module.named_parameters()
        if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)
    )
    if master_dtype is None and (found := next(narrow, None)) is not None:
        k, name, dtype = found
        warnings.warn(
            f"stages[{k}]: {name!r} is {dtype}, and updates smaller than half its precision are "
            "rounded away; give master_dtype=torch.float32",
            stacklevel=3,
        )


def check_recompute(recompute: object) -> None:
    if not isinstance(recompute, bool):
        raise TypeError(
            f"recompute: expected a bool, got {type(recompute).__name__}; to recompute blocks, "
            "checkpoint them in the stages"
        )


def check_mode(call: str, devices: Iterable[torch.device]) -> None:
    """Refuse inference mode (no autograd) and autocast (its cast weights would be outdated)."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(f"{call}: inference mode is on; training needs autograd")
    for kind in {device.type for device in devices}:
        if torch.is_autocast_enabled(kind):
            raise RuntimeError(
                f"{call}: autocast is on; its casts of the weights would outlive them. Enter "
                "autocast inside the stages, or use bfloat16 stages"
            )


def evaluating_part(stage: nn.Module) -> str | None:
    """Return the name of a trainable part in evaluation mode; a batch norm may be on purpose."""
    for name, part in stage.named_modules():
        norm = part._buffers.get("running_mean") is not None
        if not (part.training or norm) and any(p.requires_grad for p in part.parameters()):
            return str(name)
    return None


def check_functions(optimizer: object, loss_fn: object, scheduler: object) -> None:
    """Refuse what cannot be called as the pipeline will call it, such as swapped arguments."""
    _check_function("optimizer", optimizer, "parameters")
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        name = loss_fn.__name__
        raise TypeError(f"loss_fn: expected a function, got the class {name}: loss_fn={name}()")
    _check_function("loss_fn", loss_fn, "output, target")
    if scheduler is not None:
        _check_function("scheduler", scheduler, "optimizer")


def _check_function(argument: str, function: object, values: str) -> None:
    kind = function.func if isinstance(function, partial) else function
    if isinstance(getattr(kind, "step", None), MethodType):  # an optimizer, a scheduler
        kind = type(kind)
    name = getattr(kind, "__name__", type(kind).__name__)
    remedy = ""
    if hasattr(kind, "step") and argument != "loss_fn":
        remedy = f"; {argument}=lambda {values}: {name}({values}, ...)"
    elif callable(kind) and argument != "scheduler":
        remedy = "; are optimizer and loss_fn swapped? The order is (stages, optimizer, loss_fn)"
    if not callable(function):
        raise TypeError(f"{argument}: expected a function of ({values}), got {name}{remedy}")
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        takes = signature(called)
    except (TypeError, ValueError):  # of functions in C, for example
        return
    try:
        takes.bind(*values.split(", "))
    except TypeError:
        raise TypeError(
            f"{argument}: it is called with ({values}), and {name} takes "
            f"({needed_arguments(called)}){remedy}"
        ) from None


def check_loss_fn(loss_fn: object, microbatches: int, count: object = None) -> None:
    """Refuse a loss with parameters, which train nowhere; warn of a sum."""
    if isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
        raise ValueError(
            "loss_fn: it has trainable parameters, which nobody would train; put them in the last "
            "stage"
        )
    if isinstance(loss_fn, partial):
        reduction = loss_fn.keywords.get("reduction")
    else:
        reduction = getattr(loss_fn, "reduction", None)
    if count is not None and not callable(count):
        raise TypeError(f"count: expected a callable, got {type(count).__name__}")
    if microbatches > 1 and reduction == "sum" and count is None:
        warnings.warn(
            f"loss_fn: its reduction is 'sum', and the losses of {microbatches} microbatches are "
            f"averaged, so that gradients are about 1/{microbatches} of the sum's; return a pair "
            "(sum, count), or take a mean, or microbatches=1",
            stacklevel=3,
        )


def check_trains(trains: Iterable[bool]) -> None:
    """Raise ValueError if no stage has anything to train."""
    if not any(trains):
        raise ValueError(
            "stages: none has a trainable parameter, expected at least one with requires_grad; "
            "PeftModel.from_pretrained freezes an adapter unless it gets is_trainable=True"
        )


def needed_arguments(function: Callable[..., object]) -> str:
    """Return the names of the arguments that a call cannot omit."""
    return ", ".join(
        p.name
        for p in signature(function).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )
