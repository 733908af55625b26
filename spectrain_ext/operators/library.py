"""Registers the operators as `torch.ops.spectrain.*`, with schemas and fake kernels for graphs.

Under torch.compile the package's operators become these (see `traceable`). Called eagerly they are
slower, because torch's dispatcher visits every tensor. They write the arguments that their schemas
mark, bump those version counters, and record nothing for autograd. The schemas take lists of
tensors and plain numbers:

- `lr` is a number; `lr_tensor`, a tensor of one element, replaces it. A graph is recompiled for a
  new number, but not for a new value in a tensor.
- A law of `spectrain_ext.laws` is a name and numbers: "linear" [s], "geometric" [s],
  "second_order" [delay, lead].
- Outputs are called `outs`, because torch.compile treats the name `out` specially.
- The predictions of a step are `horizons` and `outs`, prediction after prediction. `laws` gives
  each a law, whose numbers are the next ones of `horizons`.
- There is no `zero_grad`, because a schema cannot mark an argument as written in some calls only.
  It becomes a separate operation in a graph.
- The `others` of `distance` are `count` concatenated lists. Its result has a row per list and a
  column per tensor, plus one for the whole list.
- `first_step` has one entry per tensor; by default none is the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .calls import bump_versions
from .laws import Geometric, Horizon, Linear, SecondOrder

Function = TypeVar("Function", bound=Callable[..., Any])

_RATE = "float lr, Tensor? lr_tensor=None"
_SGD = "float? momentum=None, float weight_decay=0, bool nesterov=False"
_ADAM = (
    "SymInt step, float beta1=0.9, float beta2=0.999, float eps=1e-8, float weight_decay=0, "
    "bool decoupled_weight_decay=False"
)
_GATE = (
    "Tensor? grad_scale=None, Tensor? found_inf=None, Tensor? clip_factor=None, "
    "SymInt? rounding_seed=None"
)
_HORIZON = 'float[] steps, str law="linear"'
_OUTS = "outs, float[] horizons=[], str[]? laws=None"
_PREDICT = f"Tensor[] params, Tensor[] momentum_buffers, *, {_RATE}, {_HORIZON}, {_SGD}"
_ADAM_PREDICT = (
    f"Tensor[] params, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, *, {_RATE}, {_ADAM}, {_HORIZON}"
)
_EXTRAPOLATE = "Tensor[] params, Tensor[] previous, *, float steps"

#: Schemas of all operators; "!" marks written arguments.
SCHEMAS = (
    f"predict_({_PREDICT.replace('Tensor[]', 'Tensor(a!)[]', 1)}) -> ()",
    f"predict({_PREDICT}) -> Tensor[]",
    f"predict.out({_PREDICT}, Tensor(a!)[] outs) -> ()",
    "stash(Tensor[] params) -> Tensor[]",
    "stash.out(Tensor[] params, *, Tensor(a!)[] outs) -> ()",
    "restore_(Tensor(a!)[] params, Tensor[] stashed) -> ()",
    "swap_(Tensor(a!)[] a, Tensor(b!)[] b) -> ()",
    "stash_predict_(Tensor(a!)[] params, Tensor(b!)[] stashed, Tensor[] momentum_buffers, *, "
    f"{_RATE}, {_HORIZON}, {_SGD}) -> ()",
    "sgd_step_(Tensor(a!)[] params, Tensor?[] grads, Tensor(b!)[] momentum_buffers, *, "
    f"{_RATE}, float momentum, float dampening=0, float weight_decay=0, bool nesterov=False, "
    "bool maximize=False, bool decoupled_weight_decay=False, bool smoothed=False, "
    f"bool[]? first_step=None, Tensor(c!)[] {_OUTS}, {_GATE}) -> ()",
    "adam_step_(Tensor(a!)[] params, Tensor?[] grads, Tensor(b!)[] exp_avgs, "
    f"Tensor(c!)[] exp_avg_sqs, *, {_RATE}, {_ADAM}, bool maximize=False, "
    f"float? momentum_decay=None, float mu_product=1, Tensor(d!)[] {_OUTS}, {_GATE}) -> ()",
    f"adam_predict({_ADAM_PREDICT}) -> Tensor[]",
    f"adam_predict.out({_ADAM_PREDICT}, Tensor(a!)[] outs) -> ()",
    f"extrapolate({_EXTRAPOLATE}) -> Tensor[]",
    f"extrapolate.out({_EXTRAPOLATE}, Tensor(a!)[] outs) -> ()",
    "distance(Tensor[] params, Tensor[] others, *, SymInt count) -> Tensor",
)


# Laws in schemas.

_LAWS: dict[str, tuple[Callable[..., Horizon], tuple[str, ...]]] = {
    "geometric": (Geometric, ("steps",)),
    "linear": (Linear, ("steps",)),
    "second_order": (SecondOrder, ("delay", "lead")),
}


def _encoded(steps: Horizon) -> tuple[str, list[float]]:
    for name, (law, fields) in _LAWS.items():
        if isinstance(steps, law):  # type: ignore[arg-type]
            return name, [getattr(steps, field) for field in fields]
    return "linear", [steps]  # type: ignore[list-item]  # a number, or refused by the schema


def _decoded(name: str, numbers: Sequence[float]) -> Horizon:
    if name not in _LAWS:
        raise ValueError(f"law: expected one of {sorted(_LAWS)}, got {name!r}")
    law, fields = _LAWS[name]
    if len(numbers) != len(fields):
        raise ValueError(
            f"steps: expected {len(fields)} numbers of law {name!r}, got {len(numbers)}"
        )
    return law(*numbers)


# Arguments in schemas: `_in_graph` encodes them, `_kernel` decodes them.


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, Tensor) else list(value)


def _rate(lr: float | Tensor) -> dict[str, Any]:
    if not isinstance(lr, Tensor):
        # A bare number would become a constant of the graph, and a learning-rate schedule would
        # recompile at every step. A product stays an operation.
        lr = torch.ones((), dtype=torch.float64) * lr
    return {"lr": 0.0, "lr_tensor": lr}


def _written(predict: Sequence[tuple[Horizon, Any]]) -> dict[str, Any]:
    laws = [_encoded(steps) for steps, _ in predict]
    return {
        "outs": [t for _, out in predict for t in _list(out)],
        "horizons": [number for _, numbers in laws for number in numbers],
        "laws": [law for law, _ in laws],
    }


_STEPS = ("sgd_step_", "adam_step_")
_FORMS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "lr": _rate,
    "steps": lambda steps: dict(zip(("law", "steps"), _encoded(steps), strict=True)),
    "predict": _written,
    "betas": lambda betas: {"beta1": betas[0], "beta2": betas[1]},
    "others": lambda others: {
        "others": [t for other in others for t in _list(other)],
        "count": len(others),
    },
}


def _in_graph(name: str, lists: Sequence[str], given: dict[str, Any]) -> Any:
    """Call the registered operator with the arguments of the package's operator."""
    if given.pop("stream", None) is not None:
        raise ValueError("stream: a compiled function works on the current one, expected None")
    out, zero_grad = given.pop("out", None), given.pop("zero_grad", False)
    if name in _STEPS:
        given.setdefault("predict", ())
    single = isinstance(given[lists[0]], Tensor)
    arguments: dict[str, Any] = {}
    for key, value in given.items():
        if key in _FORMS and (name, key) != ("extrapolate", "steps"):
            arguments.update(_FORMS[key](value))
        else:
            arguments[key] = _list(value) if key in lists else value
    if "first_step" in given:
        first = given["first_step"]
        each = [first] * len(arguments["params"]) if isinstance(first, bool) else list(first)
        arguments["first_step"] = each
    packet = getattr(torch.ops.spectrain, name)
    with torch.no_grad():
        if out is not None:
            packet.out(**arguments, outs=_list(out))
            return out
        result = packet.default(**arguments)
        if zero_grad:
            for grad in arguments["grads"]:
                if grad is not None:
                    grad.zero_()
    return result[0] if single and isinstance(result, list) else result


def _predictions(
    n: int, outs: Sequence[Tensor], horizons: Sequence[float], laws: Sequence[str] | None
) -> list[tuple[Horizon, Sequence[Tensor]]]:
    predict: list[tuple[Horizon, Sequence[Tensor]]] = []
    at = 0
    for j, law in enumerate(["linear"] * len(horizons) if laws is None else laws):
        end = at + len(_LAWS[law][1]) if law in _LAWS else at
        predict.append((_decoded(law, horizons[at:end]), outs[j * n : (j + 1) * n]))
        at = end
    if at != len(horizons) or n * len(predict) != len(outs):
        raise ValueError(
            f"outs: expected {n} tensors for each of the {len(predict)} predictions and "
            f"{at} horizons, got {len(outs)} tensors and {len(horizons)} horizons"
        )
    return predict


def _kernel(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that calls the eager operator with the schema's arguments."""

    def kernel(first: Sequence[Tensor], *lists: Any, **numbers: Any) -> Any:
        rate = numbers.pop("lr_tensor", None)
        if rate is not None:
            numbers["lr"] = rate.item()
        if name in _STEPS:
            numbers["predict"] = _predictions(
                len(first),
                numbers.pop("outs"),
                numbers.pop("horizons", ()),
                numbers.pop("laws", None),
            )
            if numbers.get("first_step", ()) is None:
                del numbers["first_step"]
        elif "predict" in name:
            numbers["steps"] = _decoded(numbers.pop("law", "linear"), numbers["steps"])
        if name.startswith("adam"):
            numbers["betas"] = (numbers.pop("beta1", 0.9), numbers.pop("beta2", 0.999))
        if name == "sgd_step_" and first and not lists[1]:
            lists = (lists[0], None)
        if name == "distance":
            others, n, count = lists[0], len(first), numbers.pop("count")
            if len(others) != count * n:
                raise ValueError(f"others: expected {count} times {n} tensors, got {len(others)}")
            lists = ([others[j * n : (j + 1) * n] for j in range(count)],)
        if "outs" in numbers:
            operator(first, *lists, out=numbers.pop("outs"), **numbers)
            return None
        return operator(first, *lists, **numbers)

    return kernel


def _bumping(overload: Any) -> Callable[..., None]:
    """Return a kernel that bumps version counters while a graph is traced."""
    arguments = overload._schema.arguments
    written = [(i, argument.name) for i, argument in enumerate(arguments) if argument.is_write]
    tracing = torch._C._TorchDispatchModeKey.FUNCTIONAL

    # The real kernels do not run during tracing. With the counters bumped, autograd refuses a graph
    # whose backward needs overwritten values, as it does in eager calls.
    def bump(keys: Any, *args: Any, **kwargs: Any) -> None:
        if torch._C._get_dispatch_mode(tracing) is not None:
            for i, name in written:
                bump_versions(args[i] if i < len(args) else kwargs[name])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            overload.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)

    return bump


def _new_like(params: Sequence[Tensor], *_: Any, **__: Any) -> list[Tensor]:
    return [torch.empty_like(p, requires_grad=False) for p in params]


def _new_norms(params: Sequence[Tensor], _: Sequence[Tensor], *, count: int) -> Tensor:
    device = params[0].device if params else None
    return torch.empty(count, len(params) + 1, dtype=torch.float64, device=device)


_FAKES: dict[str, Callable[..., Any]] = {
    "()": lambda *_, **__: None,
    "Tensor[]": _new_like,
    "Tensor": _new_norms,
}

_library = torch.library.Library("spectrain", "DEF")  # registrations live as long as it does


def _register(schema: str, kernel: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    # Without this tag, inductor (torch 2.13) copies each argument to fix its strides, and
    # recomputes the copy of a gradient for a second operator, from already changed weights.
    _library.define(schema, tags=(torch.Tag.flexible_layout,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    # As in eager calls, autograd records nothing.
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    if schema.endswith("()"):
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.spectrain, packet), overload or "default")
        _library.impl(name, _bumping(operator), "ADInplaceOrView", with_keyset=True)
    fake = _FAKES[schema.rpartition(" ")[2]]
    torch.library.register_fake(f"spectrain::{name}", fake, lib=_library)


def traceable(function: Function) -> Function:
    """Register an operator under its name, and use the registered one under torch.compile."""
    name = function.__name__.removeprefix("_")
    for schema in SCHEMAS:
        if schema.startswith((f"{name}(", f"{name}.")):
            _register(schema, _kernel(name, function))
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]

    @wraps(function)
    def operator(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            given = dict(zip(names[: len(args)], args, strict=True), **kwargs)
            return _in_graph(name, names, given)
        return function(*args, **kwargs)

    return cast(Function, operator)
